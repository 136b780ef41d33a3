// Weights of a tile of any format and alignment, as they are needed.
// ALIGNED: 1 where rows begin at whole words and eight weights are whole words.
// implements: @weights
// needs: codec/any_format, gemm/gemm_tile
// constants: ALIGNED, BITS, BLOCK_COLS, BLOCK_ROWS, ELEMENT, OUTS, SCALE, WG

fn start_weights(tile: Tile, index: u32) {}

fn ask_weights(k: u32, index: u32) {}

// Brings inputs k .. k + STEP of all outputs to workgroup memory.
fn put_weights(tile: Tile, k: u32, index: u32) {
    for (var i = index; i < OUTS * FOURS / 2u; i += WG) {
        let o = i / (FOURS / 2u);
        let c = i % (FOURS / 2u);
        let eight = weights_of(min(tile.output + o, p.outputs - 1u), tile.slot, k + c * 8u);
        ws[o * PITCH + c * 2u] = four_of(eight.low);
        ws[o * PITCH + c * 2u + 1u] = four_of(eight.high);
    }
}

struct Eight { low: vec4<f32>, high: vec4<f32> }

// Weights i .. i + 8 of an output, zeros where a row has ended; i is a multiple of 8.
fn weights_of(output: u32, slot: u32, i: u32) -> Eight {
    let place = place_of(output, slot);
    let m = place.m;
    let row = place.row;
    if (i >= p.cols) { return Eight(vec4<f32>(0.0), vec4<f32>(0.0)); }
    if (ELEMENT != 3u && (i + 8u > p.cols || ELEMENT > 3u && BLOCK_COLS % 8u != 0u)) {
        return one_by_one(m, row, i);
    }
    let at = m.weights + row * m.row_bytes + (i >> 3u) * BITS;
    if (ELEMENT == 0u) {
        let low = vec4<u32>(word_of(at), word_of(at + 4u), word_of(at + 8u), word_of(at + 12u));
        let high = vec4<u32>(word_of(at + 16u), word_of(at + 20u), word_of(at + 24u), word_of(at + 28u));
        return Eight(bitcast<vec4<f32>>(low), bitcast<vec4<f32>>(high));
    }
    if (ELEMENT < 3u) {
        return Eight(four_halves(word_of(at), word_of(at + 4u)), four_halves(word_of(at + 8u), word_of(at + 12u)));
    }
    let scales = row / BLOCK_ROWS * m.scale_bytes;
    let scale = scalar_at(SCALE, m.scales + scales, i / BLOCK_COLS);
    let codes = codes_at(at);
    if (ELEMENT == 3u) {
        let bias = vec4<f32>(scalar_at(SCALE, m.biases + scales, i / BLOCK_COLS));
        return Eight(scale * vec4<f32>(codes.low) + bias, scale * vec4<f32>(codes.high) + bias);
    }
    return Eight(scale * small_floats(codes.low), scale * small_floats(codes.high));
}

fn one_by_one(m: Matrix, row: u32, i: u32) -> Eight {
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

fn four_halves(low: u32, high: u32) -> vec4<f32> {
    if (ELEMENT == 1u) { return vec4<f32>(unpack2x16float(low), unpack2x16float(high)); }
    return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
}

fn small_floats(codes: vec4<u32>) -> vec4<f32> {
    if (ELEMENT == 5u) { return vec4<f32>(e4m3(codes.x), e4m3(codes.y), e4m3(codes.z), e4m3(codes.w)); }
    // Twice the sizes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by code.
    let sizes = vec4<f32>((vec4<u32>(0xc8643210u) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u)) * 0.5;
    return select(sizes, -sizes, (codes & vec4<u32>(8u)) != vec4<u32>(0u));
}

// The word at byte `at`.
fn word_of(at: u32) -> u32 {
    let shift = (at & 3u) * 8u;
    if (ALIGNED != 0u || shift == 0u) { return w[at >> 2u]; }
    return w[at >> 2u] >> shift | w[(at >> 2u) + 1u] << (32u - shift);
}

struct Codes { low: vec4<u32>, high: vec4<u32> }

const QUARTER = BITS & 15u;
const HALF = QUARTER * 4u & 31u;

// Eight numbers of BITS bits, 8 at most: BITS bytes.
fn codes_at(at: u32) -> Codes {
    var low: u32;
    var high = 0u;
    if (BITS == 4u) {
        low = word_of(at);
    } else if (BITS == 8u) {
        low = word_of(at);
        high = word_of(at + 4u);
    } else {
        let first = at >> 2u;
        let last = (at + BITS - 1u) >> 2u;
        let shift = (at & 3u) * 8u;
        var next = 0u;
        low = w[first] >> shift;
        if (last > first) {
            next = w[first + 1u];
            high = next >> shift;
        }
        low |= next << (31u - shift) << 1u;
        if (last > first + 1u) { high |= w[first + 2u] << (31u - shift) << 1u; }
    }
    // Four numbers never take more than a word.
    if (BITS < 8u) { high = low >> HALF | high << (31u - HALF) << 1u; }
    let shifts = vec4<u32>(0u, QUARTER, QUARTER * 2u, QUARTER * 3u);
    let mask = vec4<u32>((1u << QUARTER) - 1u);
    return Codes((vec4<u32>(low) >> shifts) & mask, (vec4<u32>(high) >> shifts) & mask);
}
