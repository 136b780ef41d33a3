// Codec of 4-bit quants: 32 in one vec4<u32>.
// implements: @codec
// needs: codec/block_scales

const QUANT_OFFSET = 0.0;
const QUANT_STEP = 1.0;
const UNIT_BYTES = 16u;

alias Block32 = vec4<u32>;

fn load_block(row: u32, c: u32) -> vec4<u32> {
    return w4[row + c];
}

fn block_quants(q: vec4<u32>, j: u32) -> vec4<u32> {
    let word = q[j / 2u] >> (16u * (j % 2u));
    return vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u) & vec4<u32>(15u);
}

fn block_values(q: vec4<u32>, j: u32) -> vec4<f32> {
    return vec4<f32>(block_quants(q, j));
}

fn block_dot(q: vec4<u32>, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return block_dot_of_values(q, x);
}

fn block_dot_i8(q: vec4<u32>, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    let even = q & vec4<u32>(0x0f0f0f0fu);
    let odd = q >> vec4<u32>(4u) & vec4<u32>(0x0f0f0f0fu);
    return vec2<i32>(
        (dot4I8Packed(even.x, x0.x) + dot4I8Packed(odd.x, x0.y)) + (dot4I8Packed(even.y, x0.z) + dot4I8Packed(odd.y, x0.w)),
        (dot4I8Packed(even.z, x1.x) + dot4I8Packed(odd.z, x1.y)) + (dot4I8Packed(even.w, x1.z) + dot4I8Packed(odd.w, x1.w)));
}
