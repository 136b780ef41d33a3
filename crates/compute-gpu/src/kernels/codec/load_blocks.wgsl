// Loads of four blocks of 32 weights: their addresses, scales and biases.
// ROW_BYTES, ROW_SCALES: bytes of a stored row of weights and of scales. Weights start at multiples
// of the codec's UNIT_BYTES, scales and biases at multiples of 4.
// ROW_THREADS neighbouring threads share ROWS rows (1, 2 or 4). Each thread loads four blocks at
// once: BLOCKS_PER_ROW of each row, ROW_THREADS blocks apart.
// needs: codec/block_scales, @codec, @scales
// constants: ROWS, ROW_BLOCKS, ROW_BYTES, ROW_THREADS

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

// Load units of a row of weights.
const ROW_UNITS = ROW_BYTES / UNIT_BYTES;

// Four blocks as stored. Decoding is left for later, so loads stay in flight.
struct FourBlocks { q0: Block32, q1: Block32, q2: Block32, q3: Block32, scales: FourScales }

// Scales and biases of four blocks: of their first and of their second halves. Without TWO_SCALES
// and TWO_BIASES only the first ones are set; without HAS_BIAS there are no biases.
struct BlockScales { first: vec4<f32>, second: vec4<f32>, bias: vec4<f32>, second_bias: vec4<f32> }

// Loads four blocks from block `c` on; past the end of a row, its last block.
fn load_blocks(rows: RowOffsets, c: u32) -> FourBlocks {
    let block = min(vec4<u32>(c) + BLOCK_OF, vec4<u32>(ROW_BLOCKS - 1u));
    let scales = load_scales(rows, block);
    var last: Block32;
    if (!SKIP_FOURTH) { last = load_block(rows.weights.w, block.w); }
    return FourBlocks(
        load_block(rows.weights.x, block.x), load_block(rows.weights.y, block.y),
        load_block(rows.weights.z, block.z), last, scales);
}
