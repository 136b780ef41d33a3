// Visible positions of a row and their splits over workgroups. Both depend on the row's position
// alone, so a row's bits do not depend on the other rows of the op.

// Splits are multiples of this number of positions.
const SPLIT_UNIT = 32u;

// Position of the first row, or the table of the rows, and the split policy of all rows; `count`:
// splits of the row that has most.
struct Splits { position: u32, window: u32, max_unsplit: u32, min_split: u32, max_splits: u32, count: u32 }

struct Visible { start: u32, count: u32, per_split: u32 }

// Visible positions of a row at `position`, in splits of `per_split` positions: at least
// `min_split` positions each, at most `max_splits` splits, and one split up to `max_unsplit`
// positions.
fn visible_at(position: u32, splits: Splits) -> Visible {
    let count = min(position + 1u, splits.window);
    if (count <= splits.max_unsplit) { return Visible(position + 1u - count, count, count); }
    let share = (count + splits.max_splits - 1u) / splits.max_splits;
    let per_split = max(splits.min_split, (share + SPLIT_UNIT - 1u) / SPLIT_UNIT * SPLIT_UNIT);
    return Visible(position + 1u - count, count, per_split);
}
