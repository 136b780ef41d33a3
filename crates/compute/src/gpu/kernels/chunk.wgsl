// Four rows of weights: the first word of each (the first vector of four words where chunks are so read), and the first byte
// of their scales and biases.
// ELEMENT, BITS, BLOCK_COLS, SCALE as in formats.wgsl; BLOCK_COLS is a multiple of 32, or 16 with scales of a byte. Weights
// begin at multiples of 16 bytes (of 4 where chunks are read by words), scales and biases at multiples of 4.
// Halves of a chunk have products of their own: `chunk_dot` and `chunk_dot8` have two results.

struct Rows { weights: vec4<u32>, scales: vec4<u32>, biases: vec4<u32> }

// Scales and biases of a chunk of four rows; where both halves have a scale there are no biases, and `other` is the second's.
struct Scales { one: vec4<f32>, other: vec4<f32> }

const HALVES = BLOCK_COLS < 32u;
const SCALE_BYTES = select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u);

@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> w4: array<vec4<u32>>;

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

// Words that begin with scale `i` of those at bytes `at`.
fn scale_words(at: vec4<u32>, i: u32) -> vec4<u32> {
    let byte = at + i * SCALE_BYTES;
    let first = byte >> vec4<u32>(2u);
    return vec4<u32>(w[first.x], w[first.y], w[first.z], w[first.w]) >> ((byte & vec4<u32>(3u)) * 8u);
}

fn scales_of(words: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(scale_of(words.x), scale_of(words.y), scale_of(words.z), scale_of(words.w));
}

fn chunk_scales(rows: Rows, c: u32) -> Scales {
    if (ELEMENT < 3u) { return Scales(vec4<f32>(1.0), vec4<f32>()); }
    let words = scale_words(rows.scales, c * 32u / BLOCK_COLS);
    if (HALVES) { return Scales(scales_of(words), scales_of(words >> vec4<u32>(8u))); }
    if (ELEMENT != 3u) { return Scales(scales_of(words), vec4<f32>()); }
    return Scales(scales_of(words), scales_of(scale_words(rows.biases, c * 32u / BLOCK_COLS)));
}
