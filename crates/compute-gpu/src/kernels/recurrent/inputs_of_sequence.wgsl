// Last inputs of the convolution of one sequence, as in states_of_sequence.wgsl.
// implements: @inputs

@group(0) @binding(3) var<storage, read_write> inputs: array<f32>;
@group(0) @binding(4) var<storage, read_write> next_inputs: array<f32>;

fn load_input(sequence: u32, i: u32) -> f32 { return inputs[i]; }

fn store_input(sequence: u32, i: u32, x: f32) { next_inputs[i] = x; }
