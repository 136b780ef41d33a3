// Positions of rows of any sequences, in the table at `first`.
// implements: @positions
// needs: attention/row_table

@group(0) @binding(2) var<storage, read> words: array<u32>;

fn position_of(first: u32, row: u32) -> u32 { return row_position(first, row); }
