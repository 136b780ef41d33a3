// 32 plain numbers: ELEMENT 0 f32, 1 f16, 2 bf16.
// implements: @codec
// needs: codec/block_scales
// constants: BITS, ELEMENT

const VECTORS = BITS / 4u;

alias Chunk = array<vec4<u32>, VECTORS>;

fn chunk_load(row: u32, c: u32) -> Chunk {
    var all: Chunk;
    // @unroll
    for (var i = 0u; i < VECTORS; i++) { all[i] = w4[row + c * VECTORS + i]; }
    return all;
}

fn chunk_four(all: Chunk, j: u32) -> vec4<f32> {
    if (ELEMENT == 0u) { return bitcast<vec4<f32>>(all[j % VECTORS]); }
    let v = all[j / 2u % VECTORS];
    let pair = select(v.xy, v.zw, j % 2u == 1u);
    if (ELEMENT == 1u) { return vec4<f32>(unpack2x16float(pair.x), unpack2x16float(pair.y)); }
    let even = bitcast<vec2<f32>>(pair << vec2<u32>(16u));
    let odd = bitcast<vec2<f32>>(pair & vec2<u32>(0xffff0000u));
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn chunk_dot(all: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return fours_dot(all, x);
}
