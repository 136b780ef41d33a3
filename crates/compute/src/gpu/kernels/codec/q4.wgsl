// 32 quants of 4 bits: one vector of words.
// implements: @codec
// needs: codec/block_scales

const OFFSET = 0.0;
const UNIT = 1.0;
const VECTORS = 1u;

alias Chunk = vec4<u32>;

fn chunk_load(row: u32, c: u32) -> vec4<u32> {
    return w4[row + c];
}

fn chunk_quants(q: vec4<u32>, j: u32) -> vec4<u32> {
    let word = q[j / 2u] >> (16u * (j % 2u));
    return vec4<u32>(word) >> vec4<u32>(0u, 4u, 8u, 12u) & vec4<u32>(15u);
}

fn chunk_four(q: vec4<u32>, j: u32) -> vec4<f32> {
    return vec4<f32>(chunk_quants(q, j));
}

fn chunk_dot(q: vec4<u32>, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return fours_dot(q, x);
}

fn chunk_dot8(q: vec4<u32>, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    let even = q & vec4<u32>(0x0f0f0f0fu);
    let odd = q >> vec4<u32>(4u) & vec4<u32>(0x0f0f0f0fu);
    return vec2<i32>(
        (dot4I8Packed(even.x, x0.x) + dot4I8Packed(odd.x, x0.y)) + (dot4I8Packed(even.y, x0.z) + dot4I8Packed(odd.y, x0.w)),
        (dot4I8Packed(even.z, x1.x) + dot4I8Packed(odd.z, x1.y)) + (dot4I8Packed(even.w, x1.z) + dot4I8Packed(odd.w, x1.w)));
}
