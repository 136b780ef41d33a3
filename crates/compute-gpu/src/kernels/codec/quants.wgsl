// Codec of quants of BITS bits (2, 3, 5 or 6): 32 in BITS words.
// implements: @codec
// needs: codec/block_scales
// constants: BITS

const QUANT_OFFSET = 0.0;
const QUANT_STEP = 1.0;
const UNIT_BYTES = 4u;

alias Block32 = array<u32, BITS>;

fn load_block(row: u32, c: u32) -> Block32 {
    var words: Block32;
    // @unroll
    for (var i = 0u; i < BITS; i++) { words[i] = w[row + c * BITS + i]; }
    return words;
}

fn quant(words: Block32, i: u32) -> u32 {
    let bit = i * BITS;
    var q = words[bit / 32u] >> (bit % 32u);
    if (bit % 32u + BITS > 32u) { q |= words[bit / 32u + 1u] << (32u - bit % 32u); }
    return extractBits(q, 0u, BITS);
}

fn block_quants(words: Block32, j: u32) -> vec4<u32> {
    let i = j * 4u;
    return vec4<u32>(quant(words, i), quant(words, i + 1u), quant(words, i + 2u), quant(words, i + 3u));
}

fn block_values(words: Block32, j: u32) -> vec4<f32> {
    return vec4<f32>(block_quants(words, j));
}

fn block_dot(words: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return block_dot_of_values(words, x);
}

fn block_dot_i8(words: Block32, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    var sums = vec2<i32>();
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        var packed = 0u;
        if (BITS == 2u) {
            packed = words[j / 4u] >> (2u * (j % 4u)) & 0x03030303u;
        } else {
            let i = j * 4u;
            packed = quant(words, i) | quant(words, i + 1u) << 8u | quant(words, i + 2u) << 16u
                | quant(words, i + 3u) << 24u;
        }
        sums[j / 4u] += dot4I8Packed(packed, select(x1[j % 4u], x0[j % 4u], j < 4u));
    }
    return sums;
}
