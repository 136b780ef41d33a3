// Recurrent states of `rows` sequences with any numbers of rows, in arenas as in
// states_of_rows.wgsl.
// The parameter `table` is the offset in `words` of the starts of the committed and next states of
// each sequence, its first row and its number of rows.
// implements: @states

@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;
@group(0) @binding(3) var<storage, read> words: array<u32>;

fn sequence_count() -> u32 { return p.rows; }

fn first_row_of(sequence: u32) -> u32 { return words[p.table + 4u * sequence + 2u]; }

fn rows_of(sequence: u32) -> u32 { return words[p.table + 4u * sequence + 3u]; }

fn load_state(sequence: u32, i: u32) -> f32 { return committed[words[p.table + 4u * sequence] + i]; }

fn store_state(sequence: u32, i: u32, x: f32) { next[words[p.table + 4u * sequence + 1u] + i] = x; }
