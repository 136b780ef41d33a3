// What all kernels share. `a` holds all activations; a view of them is a first number and two strides.

struct View { at: u32, row: u32, head: u32 }

@group(0) @binding(0) var<storage, read_write> a: array<f32>;

fn sigmoid(x: f32) -> f32 {
    // Metal's fast math knows no infinity: exp stays finite.
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

// Which workgroup this is in a grid of two dimensions that stands for one.
fn group_index(id: vec3<u32>, count: vec3<u32>) -> u32 {
    return id.y * count.x + id.x;
}
