// Expert assignments: (slot, row of x, row of out). ASSIGNMENTS 0: a single matrix, row i. 1: an
// explicit list of three words each: first byte of the slot, row of x, row of out. 2: from the
// router's ids, through a slot table of two words per expert: bank and first byte. Assignments in
// other banks are skipped.
// ONE_ROW: all assignments are of one row, so no division delays the first load. `words` is the
// list or the table.
// needs: common/common
// constants: ASSIGNMENTS, ONE_ROW

// ASSIGNMENTS 2: ids at `list`, rows `row_stride` apart.
struct Assignments { list: u32, row_stride: u32, k: u32, bank: u32 }

struct Assignment { slot: u32, row: u32, out_row: u32, in_bank: bool }

// Row of x, which is known before the slot.
fn x_row(assignments: Assignments, i: u32) -> u32 {
    if (ASSIGNMENTS == 0u) { return i; }
    if (ASSIGNMENTS == 1u) { return words[assignments.list + i * 3u + 1u]; }
    if (ONE_ROW) { return 0u; }
    return i / assignments.k;
}

// ASSIGNMENTS 2: expert of assignment `i`.
fn expert_at(assignments: Assignments, i: u32) -> u32 {
    if (ONE_ROW) { return u32(act[assignments.list + i]); }
    return u32(act[assignments.list + i / assignments.k * assignments.row_stride + i % assignments.k]);
}

fn assignment_at(assignments: Assignments, i: u32) -> Assignment {
    if (ASSIGNMENTS == 0u) { return Assignment(0u, i, i, true); }
    if (ASSIGNMENTS == 1u) {
        let entry = assignments.list + i * 3u;
        return Assignment(words[entry], words[entry + 1u], words[entry + 2u], true);
    }
    let expert = expert_at(assignments, i);
    return Assignment(words[expert * 2u + 1u], x_row(assignments, i), i, words[expert * 2u] == assignments.bank);
}
