// Loads of four blocks of 32 weights: their addresses, scales and biases.
// ROW_COLS: columns of a stored row. Weights start at multiples of 16 bytes (4 if the codec loads
// single words), scales and biases at multiples of 4.
// ROW_THREADS neighbouring threads share ROWS rows (1, 2 or 4). Each thread loads four blocks at
// once: BLOCKS_PER_ROW of each row, ROW_THREADS blocks apart.
// needs: codec/block_scales, @codec
// constants: BITS, BLOCK_COLS, ELEMENT, ROWS, ROW_BLOCKS, ROW_COLS, ROW_THREADS

const BLOCKS_PER_ROW = 4u / ROWS;
// Row of each of the four blocks, and its distance from the first block.
const ROW_OF = vec4<u32>(0u, 1u / BLOCKS_PER_ROW, 2u / BLOCKS_PER_ROW, 3u / BLOCKS_PER_ROW);
const BLOCK_OF = vec4<u32>(0u, 1u % BLOCKS_PER_ROW, 2u % BLOCKS_PER_ROW, 3u % BLOCKS_PER_ROW) * ROW_THREADS;

// Whether the fourth block is past the end of every row and is not loaded.
const SKIP_FOURTH = BLOCK_OF.w >= ROW_BLOCKS;
// Whether one load per thread covers its rows.
const ONE_LOAD = ROW_BLOCKS <= ROW_THREADS * BLOCKS_PER_ROW;
// Whether all loaded blocks are inside their rows, too.
const ALL_VALID = ROW_BLOCKS == ROW_THREADS * BLOCKS_PER_ROW || (SKIP_FOURTH && ROW_BLOCKS == 3u * ROW_THREADS);

struct RowOffsets { weights: vec4<u32>, scales: vec4<u32>, biases: vec4<u32> }

@group(0) @binding(1) var<storage, read> w: array<u32>;
@group(0) @binding(2) var<storage, read> w4: array<vec4<u32>>;

// Words (vec4 if the codec loads those) of a row of weights, and bytes of a row of scales.
const ROW_WORDS = select(ROW_COLS * BITS / 32u, ROW_COLS / 32u * BLOCK_VECS, BLOCK_VECS > 0u);
const ROW_SCALES = select((ROW_COLS + BLOCK_COLS - 1u) / BLOCK_COLS * SCALE_BYTES, 0u, ELEMENT < 3u);

// Four blocks as stored. Decoding is left for later, so loads stay in flight. In the words of
// scales and biases the wanted bits start at `shifts`.
struct FourBlocks { q0: Block32, q1: Block32, q2: Block32, q3: Block32, scales: vec4<u32>, biases: vec4<u32>, shifts: vec4<u32> }

// Loads four blocks from block `c` on; past the end of a row, its last block.
fn load_blocks(rows: RowOffsets, c: u32) -> FourBlocks {
    let block = min(vec4<u32>(c) + BLOCK_OF, vec4<u32>(ROW_BLOCKS - 1u));
    let scale_byte = block * 32u / BLOCK_COLS * SCALE_BYTES;
    var scales: vec4<u32>;
    var biases: vec4<u32>;
    if (ELEMENT > 2u) { scales = load_words(rows.scales + scale_byte); }
    if (ELEMENT == 3u) { biases = load_words(rows.biases + scale_byte); }
    var last: Block32;
    if (!SKIP_FOURTH) { last = load_block(rows.weights.w, block.w); }
    return FourBlocks(
        load_block(rows.weights.x, block.x), load_block(rows.weights.y, block.y),
        load_block(rows.weights.z, block.z), last,
        scales, biases, (rows.scales + scale_byte & vec4<u32>(3u)) * 8u);
}

// The words that contain four byte addresses.
fn load_words(bytes: vec4<u32>) -> vec4<u32> {
    let word = bytes >> vec4<u32>(2u);
    var last = 0u;
    if (!SKIP_FOURTH) { last = w[word.w]; }
    return vec4<u32>(w[word.x], w[word.y], w[word.z], last);
}

// Scales and biases of four blocks. With TWO_SCALES there are no biases, and `second` is the scale
// of the second half.
struct BlockScales { first: vec4<f32>, second: vec4<f32> }

fn block_scales(blocks: FourBlocks) -> BlockScales {
    if (ELEMENT < 3u) { return BlockScales(vec4<f32>(1.0), vec4<f32>()); }
    let words = blocks.scales >> blocks.shifts;
    if (TWO_SCALES) { return BlockScales(decode_scales(words), decode_scales(words >> vec4<u32>(8u))); }
    if (ELEMENT != 3u) { return BlockScales(decode_scales(words), vec4<f32>()); }
    return BlockScales(decode_scales(words), decode_scales(blocks.biases >> blocks.shifts));
}

fn decode_scales(words: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(decode_scale(words.x), decode_scale(words.y), decode_scale(words.z), decode_scale(words.w));
}
