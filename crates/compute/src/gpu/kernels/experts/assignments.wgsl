// Which expert meets which row. USES 0: the one matrix there is meets row i. USES 1: three words of a list, the slot's first byte, row of x, row of out. USES 2: what a
// router chose; the slot comes from a table of two words an expert, bank and first byte. Uses of other banks are not ours.
// ONE_ROW: whether all uses are of one row: nothing is divided then ahead of the first trip to memory.
// needs: common/common
// constants: ONE_ROW, USES

struct Uses { list: u32, row: u32, k: u32, bank: u32 } // USES 2: ids at `list`, `row` apart

struct Use { slot: u32, row: u32, part: u32, ours: bool }

// `words` is the list or the table.

// The row of x, which a use may know before its slot.
fn row_of(uses: Uses, i: u32) -> u32 {
    if (USES == 0u) { return i; }
    if (USES == 1u) { return words[uses.list + i * 3u + 1u]; }
    if (ONE_ROW) { return 0u; }
    return i / uses.k;
}

// USES 2.
fn expert_of(uses: Uses, i: u32) -> u32 {
    if (ONE_ROW) { return u32(a[uses.list + i]); }
    return u32(a[uses.list + i / uses.k * uses.row + i % uses.k]);
}

fn use_of(uses: Uses, i: u32) -> Use {
    if (USES == 0u) { return Use(0u, i, i, true); }
    if (USES == 1u) {
        let at = uses.list + i * 3u;
        return Use(words[at], words[at + 1u], words[at + 2u], true);
    }
    let expert = expert_of(uses, i);
    return Use(words[expert * 2u + 1u], row_of(uses, i), i, words[expert * 2u] == uses.bank);
}
