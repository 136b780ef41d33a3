// Shared by all kernels: the buffer of all activations, views of it, and activation functions. A
// view is an offset and two strides, in elements.

struct View { offset: u32, row_stride: u32, head_stride: u32 }

@group(0) @binding(0) var<storage, read_write> act: array<f32>;

fn sigmoid(x: f32) -> f32 {
    // Clamped, as Metal's fast math does not support infinity.
    return 1.0 / (1.0 + exp(clamp(-x, -80.0, 80.0)));
}

fn silu(x: f32) -> f32 {
    return x * sigmoid(x);
}

// tanh without overflow.
fn tanh_of(x: f32) -> f32 {
    let e = exp(-2.0 * min(abs(x), 40.0));
    return sign(x) * (1.0 - e) / (1.0 + e);
}

// Index of the workgroup in a 2D grid that stands for a 1D one.
fn group_index(id: vec3<u32>, count: vec3<u32>) -> u32 {
    return id.y * count.x + id.x;
}
