// Positions of rows: consecutive ones from `first` on.
// implements: @positions

fn position_of(first: u32, row: u32) -> u32 { return first + row; }
