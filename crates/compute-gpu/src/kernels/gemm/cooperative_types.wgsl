// Types of GEMM on cooperative matrices, 16 x 16 x 16, f16 to f32.
// enables: f16, wgpu_cooperative_matrix

alias Vec4 = vec4<f16>;
alias XWords = vec4<f16>;
alias MatX = coop_mat16x16<f16, A>;
alias MatW = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

// Vectors between rows in workgroup memory: they start in different banks.
const PAD = 2u;

@group(0) @binding(2) var<storage, read> x_f16: array<vec4<f16>>;

fn x_vec4(x: XWords) -> Vec4 {
    return x;
}

// Weights beyond 65504, the largest f16, are clamped to it.
fn w_vec4(v: vec4<f32>) -> Vec4 {
    let max_abs = max(max(abs(v.x), abs(v.y)), max(abs(v.z), abs(v.w)));
    if (max_abs > 65504.0) { return Vec4(clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0))); }
    return Vec4(v);
}
