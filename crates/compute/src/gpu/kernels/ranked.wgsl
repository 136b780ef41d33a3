// Uses that a router chooses of one row in the same dispatch: behind ranking.wgsl and slot.wgsl. Every workgroup ranks all
// experts; the first one also writes down what has been chosen.

const USES = 2u;
const STAGE = 0u;
@group(0) @binding(4) var<storage, read_write> report: array<atomic<u32>>;

// Whether the slots of all experts are asked for with their logits.
const KNOWN = N <= WG;
var<workgroup> slots: array<vec2<u32>, select(1u, N, KNOWN)>;

fn find(i: u32) -> Use {
    let own = 2u * min(thread, N - 1u);
    var slot = vec2<u32>(words[own], words[own + 1u]);
    rank_row(p.chosen, 0u);
    let expert = word(BEST + i);
    if (KNOWN) {
        if (thread < N) { slots[thread] = slot; }
        workgroupBarrier();
        slot = slots[expert];
    } else {
        slot = vec2<u32>(words[2u * expert], words[2u * expert + 1u]);
    }
    return Use(slot.y, 0u, i, slot.x == p.uses.bank);
}

fn note(group: u32) {
    if (group == 0u) { weigh_row(p.chosen); }
}
