// Which positions a row sees and how they are split over workgroups: by the row's own position alone, so that its bits
// do not depend on the other rows of the op.

// Splits are multiples of so many positions.
const SPLIT_UNIT = 32u;

struct Seen { start: u32, count: u32, of_split: u32 }

// What a row at `position` sees, in parts of `of_split`: no fewer than `least`, and no more parts than `most`; as one up to
// `alone`.
fn seen_at(position: u32, window: u32, alone: u32, least: u32, most: u32) -> Seen {
    let count = min(position + 1u, window);
    if (count <= alone) { return Seen(position + 1u - count, count, count); }
    let share = (count + most - 1u) / most;
    let of_split = max(least, (share + SPLIT_UNIT - 1u) / SPLIT_UNIT * SPLIT_UNIT);
    return Seen(position + 1u - count, count, of_split);
}
