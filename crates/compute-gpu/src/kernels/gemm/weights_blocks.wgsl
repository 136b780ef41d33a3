// Weight tile from blocks of 32 weights: loaded one step ahead, dequantized into workgroup memory.
// implements: @weights
// needs: codec/any_format, codec/block_scales, @codec, @dequantize, gemm/gemm_tile
// constants: BITS, BLOCK_COLS, BLOCK_ROWS, ELEMENT, TILE_K, TILE_N, WG

const X_IN_ORDER = true;
// Blocks of an output in a step, and blocks that a thread loads.
const STEP_BLOCKS = TILE_K / 32u;
const BLOCK_LOADS = (TILE_N * STEP_BLOCKS + WG - 1u) / WG;
const QUANT_HALVES = ELEMENT == 3u && TWO_BIASES;
// Scales in a word.
const SCALES_PER_WORD = 4u / SCALE_BYTES;

@group(0) @binding(5) var<storage, read> w4: array<vec4<u32>>;

// Row offsets of a thread's loads: weights in load units, scales and biases in elements.
var<private> w_offsets: array<vec3<u32>, BLOCK_LOADS>;
// Loaded blocks, and their scale and bias, or the scales of both halves. Where halves have a
// scale and a bias each, `second_scales` has the pair of the second half.
var<private> loaded_blocks: array<Block32, BLOCK_LOADS>;
var<private> loaded_scales: array<vec2<f32>, BLOCK_LOADS>;
var<private> second_scales: array<vec2<f32>, BLOCK_LOADS>;

fn weight_offsets(tile: Tile, index: u32) {
    // @unroll
    for (var j = 0u; j < BLOCK_LOADS; j++) {
        let i = min(index + j * WG, TILE_N * STEP_BLOCKS - 1u);
        let found = weight_row(min(tile.output + i / STEP_BLOCKS, outputs_at(tile.slot) - 1u), tile.slot);
        let scales = found.row / BLOCK_ROWS * found.m.scale_bytes;
        w_offsets[j] = vec3<u32>(
            (found.m.weights + found.row * found.m.row_bytes) / UNIT_BYTES,
            (found.m.scales + scales) / SCALE_BYTES,
            (found.m.biases + scales) / SCALE_BYTES,
        );
    }
}

// Loads inputs k .. k + TILE_K into registers.
fn load_weights(k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < BLOCK_LOADS; j++) {
        let i = index + j * WG;
        if (TILE_N * STEP_BLOCKS % WG == 0u || i < TILE_N * STEP_BLOCKS) {
            let col = min(k + i % STEP_BLOCKS * 32u, p.cols - 32u);
            loaded_blocks[j] = load_block(w_offsets[j].x, col / 32u);
            if (ELEMENT == 3u) {
                loaded_scales[j] = scale_and_bias(w_offsets[j], col / BLOCK_COLS);
                if (QUANT_HALVES) { second_scales[j] = scale_and_bias(w_offsets[j], col / BLOCK_COLS + 1u); }
            } else if (ELEMENT > 3u && ELEMENT < Q4_0) {
                let bits = scale_bits(w_offsets[j].y + col / BLOCK_COLS);
                var second = bits;
                if (TWO_SCALES && SCALE_BYTES == 4u) { second = scale_bits(w_offsets[j].y + col / BLOCK_COLS + 1u); }
                if (TWO_SCALES && SCALE_BYTES < 4u) { second = bits >> (SCALE_BYTES * 8u & 31u); }
                loaded_scales[j] = vec2<f32>(decode_scale(bits), decode_scale(second));
            }
        }
    }
}

// Scale and bias `i` of a row.
fn scale_and_bias(offsets: vec3<u32>, i: u32) -> vec2<f32> {
    return vec2<f32>(decode_scale(scale_bits(offsets.y + i)), decode_scale(scale_bits(offsets.z + i)));
}

// Scale or bias `i` in the low bits of a word.
fn scale_bits(i: u32) -> u32 {
    return w[i / SCALES_PER_WORD] >> (i % SCALES_PER_WORD * (32u / SCALES_PER_WORD));
}

// Dequantizes the loaded inputs k .. k + TILE_K into workgroup memory.
fn store_weights(tile: Tile, k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < BLOCK_LOADS; j++) {
        let i = index + j * WG;
        if (TILE_N * STEP_BLOCKS % WG == 0u || i < TILE_N * STEP_BLOCKS) {
            let inside = k + i % STEP_BLOCKS * 32u < p.cols;
            let dst = i / STEP_BLOCKS * PITCH + i % STEP_BLOCKS * 8u;
            // Past the end of a row, quants with scale and bias 0 give zeros.
            if (QUANT_HALVES) {
                dequantize_halves(loaded_blocks[j], loaded_scales[j], second_scales[j], inside, dst);
            } else if (ELEMENT == 3u) {
                dequantize_block(loaded_blocks[j], select(vec2<f32>(0.0), loaded_scales[j], inside), true, dst);
            } else {
                dequantize_block(loaded_blocks[j], loaded_scales[j], inside, dst);
            }
        }
    }
}

// Dequantizes a block in f32; zeros past the end of the row.
fn dequantize_any(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        var values = block_values(q, j);
        if (ELEMENT == 3u) {
            values = fma(values, vec4<f32>(scale.x), vec4<f32>(scale.y));
        } else if (ELEMENT > 3u) {
            values *= select(scale.y, scale.x, j < 4u);
        }
        w_tile[dst + j] = w_vec4(select(vec4<f32>(0.0), values, inside));
    }
}

// Dequantizes a block of quants in f32, with a scale and a bias for each half; zeros past the end
// of the row.
fn dequantize_halves(q: Block32, first: vec2<f32>, second: vec2<f32>, inside: bool, dst: u32) {
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        let scale = select(second, first, j < 4u);
        let values = fma(block_values(q, j), vec4<f32>(scale.x), vec4<f32>(scale.y));
        w_tile[dst + j] = w_vec4(select(vec4<f32>(0.0), values, inside));
    }
}

// Whether f16, up to 65504, holds all weights with this scale and bias.
fn fits_f16(scale: vec2<f32>) -> bool {
    return abs(scale.x) * f32((1u << (BITS & 15u)) - 1u) + abs(scale.y) <= 65504.0;
}
