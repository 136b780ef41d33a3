// The scales of chunks of 32 inputs, and products of their numbers by fours.
// ELEMENT, BITS, BLOCK_COLS, SCALE as in formats.wgsl; BLOCK_COLS is a multiple of 32, or 16 with scales of a byte.
// Of a chunk, `chunk_four` gives numbers 4 j and the three that follow, without their scales; `chunk_dot` and `chunk_dot8`
// the products of both halves; of quants `chunk_quants` gives the same as whole numbers, and of small floating-point numbers
// `chunk_bits` what their bits are as f16, FACTOR times smaller.
// needs: @codec
// constants: BLOCK_COLS, SCALE

// Whether both halves of a chunk have a scale.
const HALVES = BLOCK_COLS < 32u;
const SCALE_BYTES = select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u);

// What the lowest bits of a word say.
fn scale_of(word: u32) -> f32 {
    if (SCALE == 0u) { return bitcast<f32>(word); }
    if (SCALE == 1u) { return unpack2x16float(word).x; }
    if (SCALE == 2u) { return bitcast<f32>(word << 16u); }
    let code = word & 255u;
    if (SCALE == 3u) {
        // e8m0: 2^(code - 127), where 0 is less than the smallest number with all bits and 255 is NaN.
        return bitcast<f32>(code << 23u | select(0u, 0x00400000u, (code + 1u & 255u) < 2u));
    }
    // e4m3, where f16 has sign, exponent and mantissa.
    let size = unpack2x16float((code & 128u) << 8u | (code & 127u) << 7u).x * 256.0;
    return select(size, bitcast<f32>(0x7fc00000u | code), (code & 127u) == 127u);
}

fn fours_dot(q: Chunk, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return vec2<f32>(
        (dot(chunk_four(q, 0u), x[0]) + dot(chunk_four(q, 1u), x[1]))
            + (dot(chunk_four(q, 2u), x[2]) + dot(chunk_four(q, 3u), x[3])),
        (dot(chunk_four(q, 4u), x[4]) + dot(chunk_four(q, 5u), x[5]))
            + (dot(chunk_four(q, 6u), x[6]) + dot(chunk_four(q, 7u), x[7])));
}
