// Weights of a tile in chunks of 32 inputs of an output (chunk_q4.wgsl and its like), which threads ask for a step ahead.
// implements: @weights
// needs: codec/any_format, codec/block_scales, @codec, @dequantize, gemm/gemm_tile
// constants: BITS, BLOCK_COLS, BLOCK_ROWS, ELEMENT, OUTS, STEP, WG

// Chunks of an output in a step, and those that a thread brings.
const CHUNKS = STEP / 32u;
const MY_CHUNKS = (OUTS * CHUNKS + WG - 1u) / WG;
// Scales in a word.
const SCALES = 4u / SCALE_BYTES;
// Bytes of what weights are read by.
const UNIT_BYTES = select(4u, 16u, VECTORS > 0u);

@group(0) @binding(5) var<storage, read> w4: array<vec4<u32>>;

// Where the rows begin that a thread brings weights of: in what chunks are read by; in scales; in biases.
var<private> my_w_at: array<vec3<u32>, MY_CHUNKS>;
// What it has asked for: chunks, and their scale and bias, or the scales of both halves.
var<private> my_chunks: array<Chunk, MY_CHUNKS>;
var<private> my_scales: array<vec2<f32>, MY_CHUNKS>;

fn start_weights(tile: Tile, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_CHUNKS; j++) {
        let i = min(index + j * WG, OUTS * CHUNKS - 1u);
        let place = place_of(min(tile.output + i / CHUNKS, p.outputs - 1u), tile.slot);
        let scales = place.row / BLOCK_ROWS * place.m.scale_bytes;
        my_w_at[j] = vec3<u32>(
            (place.m.weights + place.row * place.m.row_bytes) / UNIT_BYTES,
            (place.m.scales + scales) / SCALE_BYTES,
            (place.m.biases + scales) / SCALE_BYTES,
        );
    }
}

// Asks for inputs k .. k + STEP.
fn ask_weights(k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_CHUNKS; j++) {
        let i = index + j * WG;
        if (OUTS * CHUNKS % WG == 0u || i < OUTS * CHUNKS) {
            let at = min(k + i % CHUNKS * 32u, p.cols - 32u);
            my_chunks[j] = chunk_load(my_w_at[j].x, at / 32u);
            if (ELEMENT == 3u) {
                my_scales[j] = vec2<f32>(
                    scale_of(scale_bits(my_w_at[j].y + at / BLOCK_COLS)),
                    scale_of(scale_bits(my_w_at[j].z + at / BLOCK_COLS)),
                );
            } else if (ELEMENT > 3u) {
                let bits = scale_bits(my_w_at[j].y + at / BLOCK_COLS);
                my_scales[j] = vec2<f32>(scale_of(bits), scale_of(select(bits, bits >> 8u, HALVES)));
            }
        }
    }
}

// Scale or bias `i`, and what lies behind it in its word.
fn scale_bits(i: u32) -> u32 {
    return w[i / SCALES] >> (i % SCALES * (32u / SCALES));
}

// Brings inputs k .. k + STEP, asked for before, to workgroup memory.
fn put_weights(tile: Tile, k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_CHUNKS; j++) {
        let i = index + j * WG;
        if (OUTS * CHUNKS % WG == 0u || i < OUTS * CHUNKS) {
            let inside = k + i % CHUNKS * 32u < p.cols;
            let at = i / CHUNKS * PITCH + i % CHUNKS * 8u;
            // Where a row has ended quants without scale and bias are zeros.
            if (ELEMENT == 3u) {
                put_chunk(my_chunks[j], select(vec2<f32>(0.0), my_scales[j], inside), true, at);
            } else {
                put_chunk(my_chunks[j], my_scales[j], inside, at);
            }
        }
    }
}

// Brings any chunk, or zeros where the row has ended.
fn put_any(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        var four = chunk_four(q, j);
        if (ELEMENT == 3u) {
            four = fma(four, vec4<f32>(scale.x), vec4<f32>(scale.y));
        } else if (ELEMENT > 3u) {
            four *= select(scale.y, scale.x, j < 4u);
        }
        ws[at + j] = four_of(select(vec4<f32>(0.0), four, inside));
    }
}

// Whether f16, which ends at 65,504, holds all that quants with this scale and bias may stand for.
fn are_halves(scale: vec2<f32>) -> bool {
    return abs(scale.x) * f32((1u << (BITS & 15u)) - 1u) + abs(scale.y) <= 65504.0;
}
