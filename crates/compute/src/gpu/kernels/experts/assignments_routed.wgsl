// Uses that a router chooses of one row in the same dispatch, where all slots are of this bank: behind ranking.wgsl and
// slot.wgsl. Every workgroup ranks all experts; the first one also writes down what has been chosen.
// implements: @assignments
// needs: @team, experts/assignments, experts/slot_matrix, router/rank_experts
// needs: router/scratch_workgroup
// constants: BESIDES, K, N, WG

const USES = 2u;
const STAGE = 0u;
@group(0) @binding(4) var<storage, read_write> report: array<atomic<u32>>;

// Whether the slots of all experts are asked for with their logits.
const KNOWN = N <= WG;
var<workgroup> slots: array<u32, select(1u, N, KNOWN)>;

fn find(i: u32) -> Use {
    // The shared expert is not looked for.
    if (BESIDES > 0u && i == K) { return Use(words[2u * N + 1u], 0u, i, true); }
    var slot = words[2u * min(thread, N - 1u) + 1u];
    rank_row(p.chosen, 0u);
    let expert = word(BEST + i);
    if (KNOWN) {
        if (thread < N) { slots[thread] = slot; }
        workgroupBarrier();
        slot = slots[expert];
    } else {
        slot = words[2u * expert + 1u];
    }
    return Use(slot, 0u, i, true);
}

fn note(group: u32) {
    if (group == 0u) { weigh_row(p.chosen); }
}
