// The rows of four chunks: the first word of each (the first vector of four words where chunks are so read), and the first
// byte of their scales and biases.
// ROW_COLS: inputs of a row. Weights begin at multiples of 16 bytes (of 4 where chunks are read by words), scales and biases
// at multiples of 4.
//
// A part of PART neighbouring threads works on ROWS rows (1, 2 or 4) at a time. Each of its threads asks for four chunks at
// once: ACROSS of each row, PART chunks apart.
// needs: codec/block_scales, @codec
// constants: BITS, BLOCK_COLS, CHUNKS, ELEMENT, PART, ROWS, ROW_COLS

const ACROSS = 4u / ROWS;
// Of the four: their row, and how far their chunk lies behind the first.
const ROW_OF = vec4<u32>(0u, 1u / ACROSS, 2u / ACROSS, 3u / ACROSS);
const CHUNK_OF = vec4<u32>(0u, 1u % ACROSS, 2u % ACROSS, 3u % ACROSS) * PART;

// Whether the last of the four lies behind the end of every row, so that nobody asks for it.
const THREE = CHUNK_OF.w >= CHUNKS;
// Whether the four are all that a thread has of its rows.
const WHOLE_ROWS = CHUNKS <= PART * ACROSS;
// Whether all that are asked for are chunks of their rows, too.
const FULL = CHUNKS == PART * ACROSS || (THREE && CHUNKS == 3u * PART);

struct Rows { weights: vec4<u32>, scales: vec4<u32>, biases: vec4<u32> }

@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> w4: array<vec4<u32>>;

// Words (vectors of four where chunks are so read) of a row of weights, and bytes of a row of scales.
const ROW_WORDS = select(ROW_COLS * BITS / 32u, ROW_COLS / 32u * VECTORS, VECTORS > 0u);
const ROW_SCALES = select((ROW_COLS + BLOCK_COLS - 1u) / BLOCK_COLS * SCALE_BYTES, 0u, ELEMENT < 3u);

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
    var last: Chunk;
    if (!THREE) { last = chunk_load(rows.weights.w, at.w); }
    return Loaded(
        chunk_load(rows.weights.x, at.x), chunk_load(rows.weights.y, at.y),
        chunk_load(rows.weights.z, at.z), last,
        scales, biases, (rows.scales + behind & vec4<u32>(3u)) * 8u);
}

// The words in which bytes lie.
fn words_at(bytes: vec4<u32>) -> vec4<u32> {
    let at = bytes >> vec4<u32>(2u);
    var last = 0u;
    if (!THREE) { last = w[at.w]; }
    return vec4<u32>(w[at.x], w[at.y], w[at.z], last);
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
