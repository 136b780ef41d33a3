// Uses that are known before the dispatch: behind slot.wgsl.
// ENTRIES: of the table, where all of them are slots of this bank and there is a thread for each; or 0.
// implements: @assignments
// needs: @team, experts/assignments, experts/slot_matrix
// constants: ENTRIES

struct Ranking { none: u32 }

var<workgroup> slots: array<u32, max(ENTRIES, 1u)>;

fn find(i: u32) -> Use {
    if (ENTRIES == 0u) { return use_of(p.uses, i); }
    // All slots are asked for with the expert: one trip to memory instead of two.
    let own = words[2u * min(thread, ENTRIES - 1u) + 1u];
    let expert = expert_of(p.uses, i);
    if (thread < ENTRIES) { slots[thread] = own; }
    workgroupBarrier();
    return Use(slots[expert], row_of(p.uses, i), i, true);
}

fn note(group: u32) {}
