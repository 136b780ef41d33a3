// The rows of four chunks: the first word of each (the first vector of four words where chunks are so read), and the first
// byte of their scales and biases.
// ROW_COLS: inputs of a row. ELEMENT, BITS, BLOCK_COLS, SCALE as in formats.wgsl; BLOCK_COLS is a multiple of 32, or 16 with
// scales of a byte. Weights begin at multiples of 16 bytes (of 4 where chunks are read by words), scales and biases at
// multiples of 4.
// Of a chunk, `chunk_four` gives numbers 4 j and the three that follow, without their scales; `chunk_dot` and `chunk_dot8`
// the products of both halves.
//
// A part of PART neighbouring threads works on ROWS rows (1, 2 or 4) at a time. Each of its threads asks for four chunks at
// once: ACROSS of each row, PART chunks apart.

const ACROSS = 4u / ROWS;
// Of the four: their row, and how far their chunk lies behind the first.
const ROW_OF = vec4<u32>(0u, 1u / ACROSS, 2u / ACROSS, 3u / ACROSS);
const CHUNK_OF = vec4<u32>(0u, 1u % ACROSS, 2u % ACROSS, 3u % ACROSS) * PART;

struct Rows { weights: vec4<u32>, scales: vec4<u32>, biases: vec4<u32> }

const HALVES = BLOCK_COLS < 32u;
const SCALE_BYTES = select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u);

@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> w4: array<vec4<u32>>;

// Words (vectors of four where chunks are so read) of a row of weights, and bytes of a row of scales.
const ROW_WORDS = select(ROW_COLS * BITS / 32u, ROW_COLS / 32u * VECTORS, VECTORS > 0u);
const ROW_SCALES = select((ROW_COLS + BLOCK_COLS - 1u) / BLOCK_COLS * SCALE_BYTES, 0u, ELEMENT < 3u);

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

// Four chunks as they lie in memory: nothing waits for them before it needs them. Of the words of scales and biases, what
// counts begins at `shifts`.
struct Loaded { q0: Chunk, q1: Chunk, q2: Chunk, q3: Chunk, scales: vec4<u32>, biases: vec4<u32>, shifts: vec4<u32> }

// Four chunks from chunk `c` on; behind the end the last one.
fn load(rows: Rows, c: u32) -> Loaded {
    let at = min(vec4<u32>(c) + CHUNK_OF, vec4<u32>(CHUNKS - 1u));
    let behind = at * 32u / BLOCK_COLS * SCALE_BYTES;
    var scales: vec4<u32>;
    var biases: vec4<u32>;
    if (ELEMENT > 2u) { scales = words_at(rows.scales + behind); }
    if (ELEMENT == 3u) { biases = words_at(rows.biases + behind); }
    return Loaded(
        chunk_load(rows.weights.x, at.x), chunk_load(rows.weights.y, at.y),
        chunk_load(rows.weights.z, at.z), chunk_load(rows.weights.w, at.w),
        scales, biases, (rows.scales + behind & vec4<u32>(3u)) * 8u);
}

// The words in which bytes lie.
fn words_at(bytes: vec4<u32>) -> vec4<u32> {
    let at = bytes >> vec4<u32>(2u);
    return vec4<u32>(w[at.x], w[at.y], w[at.z], w[at.w]);
}

// Scales and biases of four chunks; where both halves of one have a scale there are no biases, and `other` is the second's.
struct Scales { one: vec4<f32>, other: vec4<f32> }

fn scales_of(four: Loaded) -> Scales {
    if (ELEMENT < 3u) { return Scales(vec4<f32>(1.0), vec4<f32>()); }
    let words = four.scales >> four.shifts;
    if (HALVES) { return Scales(numbers_of(words), numbers_of(words >> vec4<u32>(8u))); }
    if (ELEMENT != 3u) { return Scales(numbers_of(words), vec4<f32>()); }
    return Scales(numbers_of(words), numbers_of(four.biases >> four.shifts));
}

fn numbers_of(words: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(scale_of(words.x), scale_of(words.y), scale_of(words.z), scale_of(words.w));
}
