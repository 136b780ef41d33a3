// Recurrent state of one sequence, which all rows are of. Both buffers are ranges of one, so both
// are bound for writing.
// implements: @states

@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;

fn sequence_count() -> u32 { return 1u; }

fn first_row_of(sequence: u32) -> u32 { return 0u; }

fn rows_of(sequence: u32) -> u32 { return p.rows; }

fn load_state(sequence: u32, i: u32) -> f32 { return committed[i]; }

fn store_state(sequence: u32, i: u32, x: f32) { next[i] = x; }
