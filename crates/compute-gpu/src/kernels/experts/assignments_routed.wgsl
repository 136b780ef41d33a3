// Router fused into the expert GEMV, for a few rows with all slots in this bank. Every workgroup
// ranks all experts for its row; the first one of a row also writes ids and weights. Rows of
// logits, ids, weights and gates follow one another.
// implements: @assignments
// needs: @team, experts/assignments, experts/slot_matrix, router/rank_experts
// needs: router/scratch_workgroup
// constants: EXPERTS, ONE_ROW, SHARED_EXPERT, TOP_K, WG

const ASSIGNMENTS = 2u;
@group(0) @binding(4) var<storage, read_write> report: array<atomic<u32>>;

// Whether the slots of all experts are loaded along with their logits.
const SLOTS_FIT = EXPERTS <= WG;
var<workgroup> slots: array<u32, select(1u, EXPERTS, SLOTS_FIT)>;

// Experts of a row, the shared one included.
const ROW_EXPERTS = TOP_K + min(SHARED_EXPERT, 1u);

fn routing_of(row: u32) -> Routing {
    var r = p.routing;
    r.logits += row * EXPERTS;
    r.ids += row * ROW_EXPERTS;
    r.weights += row * ROW_EXPERTS;
    r.gate += row;
    return r;
}

fn find_assignment(i: u32) -> Assignment {
    var row = 0u;
    if (!ONE_ROW) { row = i / ROW_EXPERTS; }
    let rank = i - row * ROW_EXPERTS;
    // The shared expert is always selected.
    if (SHARED_EXPERT > 0u && rank == TOP_K) { return Assignment(words[2u * EXPERTS + 1u], row, i, true); }
    var slot = words[2u * min(thread, EXPERTS - 1u) + 1u];
    find_top_k(routing_of(row), row);
    let expert = scratch_word(TOP_IDS + rank);
    if (SLOTS_FIT) {
        if (thread < EXPERTS) { slots[thread] = slot; }
        workgroupBarrier();
        slot = slots[expert];
    } else {
        slot = words[2u * expert + 1u];
    }
    return Assignment(slot, row, i, true);
}

fn write_routing(group: u32) {
    if (ONE_ROW) {
        if (group == 0u) { write_weights(p.routing); }
    } else if (group % (ROW_EXPERTS * p.workgroups) == 0u) {
        write_weights(routing_of(group / (ROW_EXPERTS * p.workgroups)));
    }
}
