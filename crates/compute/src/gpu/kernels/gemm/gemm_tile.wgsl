// Tiles of out = x W^T (+ bias) for many rows: ROWS rows of x by OUTS outputs for a workgroup, STEP inputs at a time. This file
// finds the tile and brings its rows into workgroup memory; tile_chunks.wgsl or tile_any.wgsl brings weights,
// tile_cooperative.wgsl or tile_registers.wgsl multiplies. x comes from tile_halves.wgsl.
// USES 0: rows of x to rows of out; the weights lie in an arena. Else experts: tiles come from a table of four words, the
// slot's first byte, its bank, first use and number of uses; a list has two words for a use, its row of x and its part.
// USES 1: row of x to inner, which is in the order of the list. USES 2: inner to part.
// PAIRS 1: outputs 2 i and 2 i + 1 are gate and up of what is output i, and are joined.
// BIAS: the type of a bias that lies with the weights, 8 for one among the activations, 9 for none.
// Grid: tiles x blocks of OUTS outputs.
// needs: common/common, common/gated_activation, codec/any_format, @weights
// constants: BIAS, OUTS, PAD, PAIRS, ROWS, STEP, USES, WG

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

// Numbers of a row of a tile in workgroup memory, by fours.
const FOURS = STEP / 4u;
// Those of the next row begin so much later, in other banks.
const PITCH = FOURS + PAD;

// Vectors of x that a thread brings in a step.
const MY_XS = (ROWS * FOURS + WG - 1u) / WG;
var<workgroup> xs: array<Four, ROWS * PITCH>;
var<workgroup> ws: array<Four, OUTS * PITCH>;
// Where the rows of x begin, by fours, that a thread brings numbers of, and what it has asked for.
var<private> my_x_at: array<u32, MY_XS>;
var<private> my_xs: array<AsIs, MY_XS>;
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
    start_weights(tile, index);
}

// Asks for inputs k .. k + STEP of all rows and of all outputs, as far as they can be asked for ahead.
fn tile_ask(k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_XS; j++) {
        if (ROWS * FOURS % WG == 0u || index + j * WG < ROWS * FOURS) { my_xs[j] = halves[my_x_at[j] + k / 4u]; }
    }
    ask_weights(k, index);
}

// Brings inputs k .. k + STEP, asked for before, to workgroup memory.
fn tile_put(tile: Tile, k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < MY_XS; j++) {
        let i = index + j * WG;
        if (ROWS * FOURS % WG == 0u || i < ROWS * FOURS) { xs[i / FOURS * PITCH + i % FOURS] = four_of_x(my_xs[j]); }
    }
    put_weights(tile, k, index);
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
