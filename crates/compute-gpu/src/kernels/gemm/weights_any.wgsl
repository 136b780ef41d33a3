// Weight tile from weights of any format and alignment, without prefetch.
// ALIGNED: 1 if rows start at whole words and eight weights are whole words.
// implements: @weights
// needs: codec/any_format, gemm/gemm_tile
// constants: ALIGNED, BITS, BLOCK_COLS, BLOCK_ROWS, ELEMENT, SCALE, TILE_N, WG

fn weight_offsets(tile: Tile, index: u32) {}

fn load_weights(k: u32, index: u32) {}

// Stores inputs k .. k + TILE_K of all outputs to workgroup memory.
fn store_weights(tile: Tile, k: u32, index: u32) {
    for (var i = index; i < TILE_N * K_VECS / 2u; i += WG) {
        let o = i / (K_VECS / 2u);
        let vec = i % (K_VECS / 2u);
        let eight = weights_of(min(tile.output + o, outputs_at(tile.slot) - 1u), tile.slot, k + vec * 8u);
        w_tile[o * PITCH + vec * 2u] = w_vec4(eight.low);
        w_tile[o * PITCH + vec * 2u + 1u] = w_vec4(eight.high);
    }
}

struct Eight { low: vec4<f32>, high: vec4<f32> }

// Weights i .. i + 8 of an output, zeros past the end of the row; i is a multiple of 8.
fn weights_of(output: u32, slot: u32, i: u32) -> Eight {
    let found = weight_row(output, slot);
    let m = found.m;
    let row = found.row;
    if (i >= p.cols) { return Eight(vec4<f32>(0.0), vec4<f32>(0.0)); }
    let partial = i + 8u > p.cols || ELEMENT > 3u && BLOCK_COLS % 8u != 0u;
    if (ELEMENT != 3u && (partial || ELEMENT >= Q4_0)) {
        return one_at_a_time(m, row, i);
    }
    let byte = m.weights + row * m.row_bytes + (i >> 3u) * BITS;
    if (ELEMENT == 0u) {
        let low = vec4<u32>(load_aligned(byte), load_aligned(byte + 4u), load_aligned(byte + 8u), load_aligned(byte + 12u));
        let high = vec4<u32>(load_aligned(byte + 16u), load_aligned(byte + 20u), load_aligned(byte + 24u), load_aligned(byte + 28u));
        return Eight(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high));
    }
    if (ELEMENT < 3u) {
        return Eight(four_f16(load_aligned(byte), load_aligned(byte + 4u)), four_f16(load_aligned(byte + 8u), load_aligned(byte + 12u)));
    }
    let scales = row / BLOCK_ROWS * m.scale_bytes;
    let scale = scalar_at(SCALE, m.scales + scales, i / BLOCK_COLS);
    let codes = load_codes(byte);
    if (ELEMENT == 3u) {
        let bias = vec4<f32>(scalar_at(SCALE, m.biases + scales, i / BLOCK_COLS));
        return Eight(scale * vec4<f32>(codes.low) + bias, scale * vec4<f32>(codes.high) + bias);
    }
    return Eight(scale * minifloats(codes.low), scale * minifloats(codes.high));
}

fn one_at_a_time(m: Matrix, row: u32, i: u32) -> Eight {
    var eight: array<f32, 8>;
    for (var n = 0u; n < 8u; n++) {
        eight[n] = 0.0;
        if (i + n < p.cols) { eight[n] = weight_at(m, row, i + n); }
    }
    return Eight(
        vec4<f32>(eight[0], eight[1], eight[2], eight[3]),
        vec4<f32>(eight[4], eight[5], eight[6], eight[7]),
    );
}

fn four_f16(low: u32, high: u32) -> vec4<f32> {
    if (ELEMENT == 1u) { return vec4<f32>(unpack2x16float(low), unpack2x16float(high)); }
    return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
}

fn minifloats(codes: vec4<u32>) -> vec4<f32> {
    if (ELEMENT == 5u) { return vec4<f32>(e4m3(codes.x), e4m3(codes.y), e4m3(codes.z), e4m3(codes.w)); }
    // Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by code.
    let sizes = vec4<f32>((vec4<u32>(0xc8643210u) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u)) * 0.5;
    return select(sizes, -sizes, (codes & vec4<u32>(8u)) != vec4<u32>(0u));
}

// The word at a byte address.
fn load_aligned(byte: u32) -> u32 {
    let shift = (byte & 3u) * 8u;
    if (ALIGNED != 0u || shift == 0u) { return w[byte >> 2u]; }
    return w[byte >> 2u] >> shift | w[(byte >> 2u) + 1u] << (32u - shift);
}

struct Codes { low: vec4<u32>, high: vec4<u32> }

const CODE_BITS = BITS & 15u;
const FOUR_CODES_BITS = CODE_BITS * 4u & 31u;

// Eight codes of BITS bits, 8 at most, in BITS bytes.
fn load_codes(byte: u32) -> Codes {
    var low: u32;
    var high = 0u;
    if (BITS == 4u) {
        low = load_aligned(byte);
    } else if (BITS == 8u) {
        low = load_aligned(byte);
        high = load_aligned(byte + 4u);
    } else {
        let first = byte >> 2u;
        let last = (byte + BITS - 1u) >> 2u;
        let shift = (byte & 3u) * 8u;
        var next = 0u;
        low = w[first] >> shift;
        if (last > first) {
            next = w[first + 1u];
            high = next >> shift;
        }
        low |= next << (31u - shift) << 1u;
        if (last > first + 1u) { high |= w[first + 2u] << (31u - shift) << 1u; }
    }
    // Four codes never take more than a word.
    if (BITS < 8u) { high = low >> FOUR_CODES_BITS | high << (31u - FOUR_CODES_BITS) << 1u; }
    let shifts = vec4<u32>(0u, CODE_BITS, CODE_BITS * 2u, CODE_BITS * 3u);
    let mask = vec4<u32>((1u << CODE_BITS) - 1u);
    return Codes((vec4<u32>(low) >> shifts) & mask, (vec4<u32>(high) >> shifts) & mask);
}
