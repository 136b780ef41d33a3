// Recurrent states of the sequences of rows, one row each. All committed states are in one arena,
// all next states in one, and so on; it may be the same arena, so all are bound for writing. The
// parameter `table` is the offset in `words` of the starts of the committed and next states of each
// sequence, and of its last inputs of the convolution, committed and next.
// implements: @states, @inputs

@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;
@group(0) @binding(3) var<storage, read_write> inputs: array<f32>;
@group(0) @binding(4) var<storage, read_write> next_inputs: array<f32>;
@group(0) @binding(5) var<storage, read> words: array<u32>;

fn sequence_count() -> u32 { return p.rows; }

fn first_row_of(sequence: u32) -> u32 { return sequence; }

fn rows_of(sequence: u32) -> u32 { return 1u; }

fn load_state(sequence: u32, i: u32) -> f32 { return committed[words[p.table + 4u * sequence] + i]; }

fn store_state(sequence: u32, i: u32, x: f32) { next[words[p.table + 4u * sequence + 1u] + i] = x; }

fn load_input(sequence: u32, i: u32) -> f32 { return inputs[words[p.table + 4u * sequence + 2u] + i]; }

fn store_input(sequence: u32, i: u32, x: f32) { next_inputs[words[p.table + 4u * sequence + 3u] + i] = x; }
