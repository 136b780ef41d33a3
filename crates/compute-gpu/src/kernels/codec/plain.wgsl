// Codec of plain weights: 32 in BLOCK_VECS vec4<u32>. ELEMENT: 0 f32, 1 f16, 2 bf16.
// implements: @codec
// needs: codec/block_scales
// constants: BITS, ELEMENT

const UNIT_BYTES = 16u;
const BLOCK_VECS = BITS / 4u;

alias Block32 = array<vec4<u32>, BLOCK_VECS>;

fn load_block(row: u32, c: u32) -> Block32 {
    var all: Block32;
    // @unroll
    for (var i = 0u; i < BLOCK_VECS; i++) { all[i] = w4[row + c * BLOCK_VECS + i]; }
    return all;
}

fn block_values(all: Block32, j: u32) -> vec4<f32> {
    if (ELEMENT == 0u) { return bitcast<vec4<f32>>(all[j % BLOCK_VECS]); }
    let v = all[j / 2u % BLOCK_VECS];
    let pair = select(v.xy, v.zw, j % 2u == 1u);
    if (ELEMENT == 1u) { return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y)); }
    let even = bitcast<vec2<f32>>(pair << vec2<u32>(16u));
    let odd = bitcast<vec2<f32>>(pair & vec2<u32>(0xffff0000u));
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn block_dot(all: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return block_dot_of_values(all, x);
}
