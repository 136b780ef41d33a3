// Tiles of out = x W^T (+ bias) for many rows, weights of any format and alignment: ROWS rows of x by OUTS outputs for a
// workgroup, STEP inputs at a time. This file finds the tile and brings its rows and weights into workgroup memory;
// tile_cooperative.wgsl and tile_registers.wgsl multiply. x comes from tile_halves.wgsl.
// USES 0: rows of x to rows of out; the weights lie in an arena. Else experts: tiles come from a table of four words, the
// slot's first byte, its bank, first use and number of uses; a list has two words for a use, its row of x and its part.
// USES 1: row of x to inner, which is in the order of the list. USES 2: inner to part.
// PAIRS 1: outputs 2 i and 2 i + 1 are gate and up of what is output i, and are joined.
// BIAS: the type of a bias that lies with the weights, 8 for one among the activations, 9 for none.
// ALIGNED: 1 where weights begin at whole words, row by row; 2, at whole vectors of sixteen bytes.
// Grid: tiles x blocks of OUTS outputs.

struct Params {
    out: View, m: Matrix,
    up_weights: u32, up_scales: u32, up_biases: u32,
    x: u32, x_fours: u32, factors: u32,
    rows: u32, outputs: u32, cols: u32, // USES: `rows` tiles
    tiles: u32, list: u32, bank: u32,
    step: u32, second: u32, bias: u32, up_bias: u32,
    alpha: f32, limit: f32,
}
var<immediate> p: Params;

@group(0) @binding(3) var<storage, read> factors: array<u32>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> w_fours: array<vec4<u32>>;

// Numbers of a row of a tile in workgroup memory, by fours.
const FOURS = STEP / 4u;
// Those of the next row begin so much later, in other banks.
const PITCH = FOURS + PAD;

// Vectors of x that a thread brings in a step.
const MY_XS = (ROWS * FOURS + WG - 1u) / WG;
// Whether weights are quants that come in lots of sixteen bytes, asked for a step ahead; weights of a lot, lots of a row,
// lots that a thread brings.
const AHEAD = ALIGNED == 2u && ELEMENT == 3u && (BITS == 4u || BITS == 8u) && BLOCK_COLS % 32u == 0u;
const LOT = 128u / BITS;
const LOTS = (STEP + LOT - 1u) / LOT;
const MY_LOTS = (OUTS * LOTS + WG - 1u) / WG;

var<workgroup> xs: array<Four, ROWS * PITCH>;
var<workgroup> ws: array<Four, OUTS * PITCH>;
// Where the rows begin that a thread brings numbers of: in x, by fours; lots, scales and biases of weights.
var<private> my_x_at: array<u32, MY_XS>;
var<private> my_w_at: array<vec3<u32>, MY_LOTS>;
// What it has asked for.
var<private> my_xs: array<AsIs, MY_XS>;
var<private> my_lots: array<vec4<u32>, MY_LOTS>;
var<private> my_scales: array<vec2<f32>, MY_LOTS>;
// Of each row: where it begins in x, by fours, and in out; what it is multiplied by at last.
var<workgroup> row_x: array<u32, ROWS>;
var<workgroup> row_out: array<u32, ROWS>;
var<workgroup> row_factor: array<u32, ROWS>;

struct Tile { first: u32, count: u32, slot: u32, output: u32 }

fn tile_of(work: u32) -> Tile {
    let blocks = (p.outputs + OUTS - 1u) / OUTS;
    let tile = work / blocks;
    let output = work % blocks * OUTS;
    if (USES == 0u) {
        let first = min(tile * ROWS, p.rows);
        return Tile(first, min(p.rows - first, ROWS), 0u, output);
    }
    if (tile >= p.rows) { return Tile(0u, 0u, 0u, 0u); }
    let at = p.tiles + tile * 4u;
    return Tile(words[at + 2u], select(0u, words[at + 3u], words[at + 1u] == p.bank), words[at], output);
}

fn tile_begin(tile: Tile, index: u32) {
    for (var r = index; r < ROWS; r += WG) {
        let use_of = tile.first + min(r, tile.count - 1u);
        var source = use_of;
        var to = use_of;
        if (USES == 1u) { source = words[p.list + use_of * 2u]; }
        if (USES == 2u) { to = words[p.list + use_of * 2u + 1u]; }
        row_x[r] = p.x + source * p.x_fours;
        row_out[r] = p.out.at + to * p.out.row;
        row_factor[r] = factors[p.factors + source];
    }
}

// Finds what a thread brings; after a barrier behind tile_begin.
fn tile_start(tile: Tile, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_XS; j++) {
        let i = min(index + j * WG, ROWS * FOURS - 1u);
        my_x_at[j] = row_x[i / FOURS] + i % FOURS;
    }
    if (!AHEAD) { return; }
    // @unroll
    for (var j = 0u; j < MY_LOTS; j++) {
        let i = min(index + j * WG, OUTS * LOTS - 1u);
        let place = place_of(min(tile.output + i / LOTS, p.outputs - 1u), tile.slot);
        let scales = place.row * place.m.scale_bytes;
        my_w_at[j] = vec3<u32>(
            (place.m.weights + place.row * place.m.row_bytes) / 16u,
            place.m.scales + scales,
            place.m.biases + scales,
        );
    }
}

// Asks for inputs k .. k + STEP of all rows and of all outputs, as far as they can be asked for ahead.
fn tile_ask(k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_XS; j++) {
        if (ROWS * FOURS % WG == 0u || index + j * WG < ROWS * FOURS) { my_xs[j] = halves[my_x_at[j] + k / 4u]; }
    }
    if (!AHEAD) { return; }
    // @unroll
    for (var j = 0u; j < MY_LOTS; j++) {
        let i = index + j * WG;
        if (OUTS * LOTS % WG == 0u || i < OUTS * LOTS) {
            let at = min(k + i % LOTS * LOT, p.cols - LOT);
            my_lots[j] = w_fours[my_w_at[j].x + at / LOT];
            my_scales[j] = vec2<f32>(
                aligned_scalar(my_w_at[j].y, at / BLOCK_COLS),
                aligned_scalar(my_w_at[j].z, at / BLOCK_COLS),
            );
        }
    }
}

// A scale or a bias where they lie at multiples of their size.
fn aligned_scalar(at: u32, i: u32) -> f32 {
    if (SCALE == 0u) { return bitcast<f32>(w[(at >> 2u) + i]); }
    let place = (at >> 1u) + i;
    let half = w[place >> 1u] >> ((place & 1u) * 16u);
    if (SCALE == 1u) { return unpack2x16float(half).x; }
    return bitcast<f32>(half << 16u);
}

// Brings inputs k .. k + STEP, asked for before, to workgroup memory.
fn tile_put(tile: Tile, k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_XS; j++) {
        let i = index + j * WG;
        if (ROWS * FOURS % WG == 0u || i < ROWS * FOURS) { xs[i / FOURS * PITCH + i % FOURS] = four_of_x(my_xs[j]); }
    }
    if (AHEAD) {
        // @unroll
        for (var j = 0u; j < MY_LOTS; j++) {
            let i = index + j * WG;
            if (OUTS * LOTS % WG == 0u || i < OUTS * LOTS) {
                let scale = select(vec2<f32>(0.0), my_scales[j], k + i % LOTS * LOT < p.cols);
                put_lot(my_lots[j], scale, i / LOTS * PITCH + i % LOTS * (LOT / 4u));
            }
        }
        return;
    }
    for (var i = index; i < OUTS * FOURS / 2u; i += WG) {
        let o = i / (FOURS / 2u);
        let c = i % (FOURS / 2u);
        let eight = weights_of(min(tile.output + o, p.outputs - 1u), tile.slot, k + c * 8u);
        ws[o * PITCH + c * 2u] = four_of(eight.low);
        ws[o * PITCH + c * 2u + 1u] = four_of(eight.high);
    }
}

// Unpacks a lot, whose scale and bias are given. A quant becomes the low bits of 128 or 256 and more, in place of a
// conversion; the bias takes that away again, but for 2^-16 of the scale.
fn put_numbers(lot: vec4<u32>, scale: vec2<f32>, at: u32) {
    let s = vec4<f32>(scale.x);
    let b = vec4<f32>(scale.y - select(256.0, 128.0, BITS == 4u) * scale.x);
    for (var j = 0u; j < 4u; j++) {
        let q = lot[j];
        if (BITS == 4u) {
            let low = vec4<u32>(q << 16u, q << 12u, q << 8u, q << 4u) & vec4<u32>(0xf0000u);
            let high = vec4<u32>(q, q >> 4u, q >> 8u, q >> 12u) & vec4<u32>(0xf0000u);
            ws[at + j * 2u] = four_of(fma(bitcast<vec4<f32>>(low | vec4<u32>(0x43000000u)), s, b));
            ws[at + j * 2u + 1u] = four_of(fma(bitcast<vec4<f32>>(high | vec4<u32>(0x43000000u)), s, b));
        } else {
            let all = vec4<u32>(q << 15u, q << 7u, q >> 1u, q >> 9u) & vec4<u32>(0x7f8000u);
            ws[at + j] = four_of(fma(bitcast<vec4<f32>>(all | vec4<u32>(0x43800000u)), s, b));
        }
    }
}

// The products of a row of the tile with one output, or with gate and up of one.
fn tile_emit(tile: Tile, r: u32, o: u32, sums: vec2<f32>) {
    let output = tile.output + o;
    if (r >= tile.count || output >= p.outputs) { return; }
    let factor = bitcast<f32>(row_factor[r]);
    if (PAIRS == 1u) {
        let gate = sums.x * factor + bias_of(output, tile.slot);
        let up = sums.y * factor + bias_of(output + 1u, tile.slot);
        a[row_out[r] + output / 2u] = activate(gate, up, p.alpha, p.limit);
    } else {
        a[row_out[r] + output] = sums.x * factor + bias_of(output, tile.slot);
    }
}

fn bias_of(output: u32, slot: u32) -> f32 {
    if (BIAS == 9u) { return 0.0; }
    if (BIAS == 8u) { return a[p.bias + output]; }
    if (PAIRS == 0u) { return scalar_at(BIAS, slot + p.bias, output); }
    let half = output & 1u;
    return scalar_at(BIAS, slot + select(p.bias, p.up_bias, half == 1u), (output >> 1u) * p.step + half * p.second);
}

struct Place { m: Matrix, row: u32 }

// Where the weights of an output lie.
fn place_of(output: u32, slot: u32) -> Place {
    var m = p.m;
    var row = output;
    if (PAIRS == 1u) {
        row = (output >> 1u) * p.step + (output & 1u) * p.second;
        if ((output & 1u) == 1u) {
            m.weights = p.up_weights;
            m.scales = p.up_scales;
            m.biases = p.up_biases;
        }
    }
    m.weights += slot;
    m.scales += slot;
    m.biases += slot;
    return Place(m, row);
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
