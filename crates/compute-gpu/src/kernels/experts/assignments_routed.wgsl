// Router fused into the expert GEMV, for one row with all slots in this bank. Every workgroup
// ranks all experts; the first also writes ids and weights.
// implements: @assignments
// needs: @team, experts/assignments, experts/slot_matrix, router/rank_experts
// needs: router/scratch_workgroup
// constants: EXPERTS, SHARED_EXPERT, TOP_K, WG

const ASSIGNMENTS = 2u;
@group(0) @binding(4) var<storage, read_write> report: array<atomic<u32>>;

// Whether the slots of all experts are loaded along with their logits.
const SLOTS_FIT = EXPERTS <= WG;
var<workgroup> slots: array<u32, select(1u, EXPERTS, SLOTS_FIT)>;

fn find_assignment(i: u32) -> Assignment {
    // The shared expert is always selected.
    if (SHARED_EXPERT > 0u && i == TOP_K) { return Assignment(words[2u * EXPERTS + 1u], 0u, i, true); }
    var slot = words[2u * min(thread, EXPERTS - 1u) + 1u];
    find_top_k(p.routing, 0u);
    let expert = scratch_word(TOP_IDS + i);
    if (SLOTS_FIT) {
        if (thread < EXPERTS) { slots[thread] = slot; }
        workgroupBarrier();
        slot = slots[expert];
    } else {
        slot = words[2u * expert + 1u];
    }
    return Assignment(slot, 0u, i, true);
}

fn write_routing(group: u32) {
    if (group == 0u) { write_weights(p.routing); }
}
