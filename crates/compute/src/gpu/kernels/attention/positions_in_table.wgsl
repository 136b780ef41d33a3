// Positions of rows: the second word of each row's entry in the table at `first`, which is that of
// kv_of_rows.wgsl.
// implements: @positions

@group(0) @binding(2) var<storage, read> words: array<u32>;

fn position_of(first: u32, row: u32) -> u32 { return words[first + row * 7u + 1u]; }
