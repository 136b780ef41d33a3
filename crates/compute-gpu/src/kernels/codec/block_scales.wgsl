// Scales of blocks of 32 weights, and f32 dot products of a block.
// ELEMENT, BITS, BLOCK_COLS, SCALE: as in any_format.wgsl. BLOCK_COLS is a multiple of 32, or 16.
// UNIT_BYTES: bytes of the unit in which a codec counts addresses.
// A codec defines for a block: `block_values`, weights 4 j .. 4 j + 4 without their scale;
// `block_dot` and `block_dot_i8`, dot products of both halves; for quants `block_quants`, the same
// weights as integers; for minifloats `block_f16_bits`, their bits as f16, F16_FACTOR times too
// small.
// needs: codec/block_types, @codec
// constants: BLOCK_COLS, ELEMENT, SCALE, X_IN_ORDER

// Whether each half of a block has its own scale, whether there are biases, and whether each half
// has its own.
const TWO_SCALES = BLOCK_COLS < 32u || PAIR_COLS > 0u || ELEMENT == Q2_K || ELEMENT == Q3_K || ELEMENT == Q6_K
    || ELEMENT == IQ2_XS || ELEMENT == IQ2_S || ELEMENT == IQ1_M || ELEMENT == NVFP4;
const HAS_BIAS = ELEMENT == 3u || ELEMENT == Q4_1 || ELEMENT == Q5_1 || TWO_BIASES || ELEMENT == Q4_K || ELEMENT == Q5_K;
const TWO_BIASES = ELEMENT == 3u && BLOCK_COLS < 32u || ELEMENT == Q2_K || PAIR_COLS > 0u && (ELEMENT == Q4_K || ELEMENT == Q5_K);
// Inputs among which the halves of a block are one half apart; 0 if blocks are 32 neighbours, as in
// kernels with X_IN_ORDER.
const PAIR_COLS = select(
    0u, select(64u, 128u, ELEMENT == Q6_K), !X_IN_ORDER && ELEMENT >= Q2_K && ELEMENT <= Q6_K);
const SCALE_BYTES = select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u);

// Decodes the scale in the lowest bits of a word.
fn decode_scale(word: u32) -> f32 {
    if (SCALE == 0u) { return bitcast<f32>(word); }
    if (SCALE == 1u) { return unpack2x16float(word).x; }
    if (SCALE == 2u) { return bitcast<f32>(word << 16u); }
    let code = word & 255u;
    if (SCALE == 3u) {
        // e8m0: 2^(code - 127). Code 0 is subnormal and 255 is NaN.
        return bitcast<f32>(code << 23u | select(0u, 0x00400000u, (code + 1u & 255u) < 2u));
    }
    // e4m3, by moving sign, exponent and mantissa to their places in f16.
    let size = unpack2x16float((code & 128u) << 8u | (code & 127u) << 7u).x * 256.0;
    return select(size, bitcast<f32>(0x7fc00000u | code), (code & 127u) == 127u);
}

// Products and sums are fused as written, so that no driver fuses them in one kernel only.
fn dot_4(a: vec4<f32>, b: vec4<f32>) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, a.x * b.x)));
}

fn block_dot_of_values(q: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return vec2<f32>(
        (dot_4(block_values(q, 0u), x[0]) + dot_4(block_values(q, 1u), x[1]))
            + (dot_4(block_values(q, 2u), x[2]) + dot_4(block_values(q, 3u), x[3])),
        (dot_4(block_values(q, 4u), x[4]) + dot_4(block_values(q, 5u), x[5]))
            + (dot_4(block_values(q, 6u), x[6]) + dot_4(block_values(q, 7u), x[7])));
}
