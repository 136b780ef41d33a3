// Recurrent states of the sequences of rows, one row each, in one arena. The parameter `table` is
// the offset in `words` of the starts of their committed and next states, and of their last inputs
// of the convolution, committed and next.
// implements: @states, @inputs

@group(0) @binding(1) var<storage, read_write> arena: array<f32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;

fn sequence_count() -> u32 { return p.rows; }

fn first_row_of(sequence: u32) -> u32 { return sequence; }

fn rows_of(sequence: u32) -> u32 { return 1u; }

fn load_state(sequence: u32, i: u32) -> f32 { return arena[words[p.table + 4u * sequence] + i]; }

fn store_state(sequence: u32, i: u32, x: f32) { arena[words[p.table + 4u * sequence + 1u] + i] = x; }

fn load_input(sequence: u32, i: u32) -> f32 { return arena[words[p.table + 4u * sequence + 2u] + i]; }

fn store_input(sequence: u32, i: u32, x: f32) { arena[words[p.table + 4u * sequence + 3u] + i] = x; }
