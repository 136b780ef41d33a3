// Assignments that are known before the dispatch.
// TABLE_ENTRIES: entries of the slot table, if all are slots of this bank and there is a thread
// for each; else 0.
// implements: @assignments
// needs: @team, experts/assignments, experts/slot_matrix
// constants: TABLE_ENTRIES

var<workgroup> slots: array<u32, max(TABLE_ENTRIES, 1u)>;

fn find_assignment(i: u32) -> Assignment {
    if (TABLE_ENTRIES == 0u) { return assignment_at(p.assignments, i); }
    // Loads all slots together with the expert id: one memory latency instead of two.
    let slot = words[2u * min(thread, TABLE_ENTRIES - 1u) + 1u];
    let expert = expert_at(p.assignments, i);
    if (thread < TABLE_ENTRIES) { slots[thread] = slot; }
    workgroupBarrier();
    return Assignment(slots[expert], x_row(p.assignments, i), i, true);
}

fn write_routing(group: u32) {}
