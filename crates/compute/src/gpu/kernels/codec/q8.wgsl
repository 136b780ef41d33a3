// 32 quants of 8 bits: two vectors of words. As signed numbers they are 128 less.
// implements: @codec
// needs: codec/block_scales

const OFFSET = 128.0;
const UNIT = 1.0;
const VECTORS = 2u;

struct Chunk { a: vec4<u32>, b: vec4<u32> }

fn chunk_load(row: u32, c: u32) -> Chunk {
    return Chunk(w4[row + 2u * c], w4[row + 2u * c + 1u]);
}

fn chunk_quants(q: Chunk, j: u32) -> vec4<u32> {
    var word = q.a[j % 4u];
    if (j >= 4u) { word = q.b[j % 4u]; }
    return vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(255u);
}

fn chunk_four(q: Chunk, j: u32) -> vec4<f32> {
    return vec4<f32>(chunk_quants(q, j));
}

fn chunk_dot(q: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return fours_dot(q, x);
}

fn chunk_dot8(q: Chunk, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    let a8 = q.a ^ vec4<u32>(0x80808080u);
    let b8 = q.b ^ vec4<u32>(0x80808080u);
    return vec2<i32>(
        (dot4I8Packed(a8.x, x0.x) + dot4I8Packed(a8.y, x0.y)) + (dot4I8Packed(a8.z, x0.z) + dot4I8Packed(a8.w, x0.w)),
        (dot4I8Packed(b8.x, x1.x) + dot4I8Packed(b8.y, x1.y)) + (dot4I8Packed(b8.z, x1.z) + dot4I8Packed(b8.w, x1.w)));
}
