// Codec of 8-bit quants: 32 in two vec4<u32>. As i8 they are stored minus 128 (QUANT_OFFSET).
// implements: @codec
// needs: codec/block_scales

const QUANT_OFFSET = 128.0;
const QUANT_STEP = 1.0;
const UNIT_BYTES = 16u;

struct Block32 { a: vec4<u32>, b: vec4<u32> }

fn load_block(row: u32, c: u32) -> Block32 {
    return Block32(w4[row + 2u * c], w4[row + 2u * c + 1u]);
}

fn block_quants(q: Block32, j: u32) -> vec4<u32> {
    var word = q.a[j % 4u];
    if (j >= 4u) { word = q.b[j % 4u]; }
    return vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(255u);
}

fn block_values(q: Block32, j: u32) -> vec4<f32> {
    return vec4<f32>(block_quants(q, j));
}

fn block_dot(q: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return block_dot_of_values(q, x);
}

fn block_dot_i8(q: Block32, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    let a8 = q.a ^ vec4<u32>(0x80808080u);
    let b8 = q.b ^ vec4<u32>(0x80808080u);
    return vec2<i32>(
        (dot4I8Packed(a8.x, x0.x) + dot4I8Packed(a8.y, x0.y)) + (dot4I8Packed(a8.z, x0.z) + dot4I8Packed(a8.w, x0.w)),
        (dot4I8Packed(b8.x, x1.x) + dot4I8Packed(b8.y, x1.y)) + (dot4I8Packed(b8.z, x1.z) + dot4I8Packed(b8.w, x1.w)));
}
