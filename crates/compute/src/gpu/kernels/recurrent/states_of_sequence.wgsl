// Recurrent state of one sequence. Both buffers are ranges of one, so both are bound for writing.
// implements: @states

@group(0) @binding(1) var<storage, read_write> committed: array<f32>;
@group(0) @binding(2) var<storage, read_write> next: array<f32>;

fn load_state(sequence: u32, i: u32) -> f32 { return committed[i]; }

fn store_state(sequence: u32, i: u32, x: f32) { next[i] = x; }
