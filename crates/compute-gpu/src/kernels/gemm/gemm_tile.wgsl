// GEMM tile: out = x W^T (+ bias), TILE_M rows by TILE_N outputs per workgroup, TILE_K inputs per
// step. This file finds the tile and stages its rows of x; weights_blocks.wgsl or weights_any.wgsl
// stages the weights; gemm_cooperative.wgsl or gemm_registers.wgsl multiplies. x comes from
// activations_f16.wgsl.
// ASSIGNMENTS 0: rows of x to rows of out, with weights in an arena. Else experts: a table has
// four words for each tile (first byte of the slot, bank, first assignment, count), and a list two
// words for each assignment (row of x, row of out). ASSIGNMENTS 1: row of x to inner, which is in
// the order of the list. ASSIGNMENTS 2: inner to row of out. ASSIGNMENTS 3: rows of x to rows of
// out, with `bank` matrices: the table has nine words for each, and `outputs` is a multiple of
// TILE_N for each. Its words: offsets of weights, scales and biases, offset and row stride of out,
// offset of the bias, outputs, offset and row stride of the residual.
// GATED 1: outputs 2 i and 2 i + 1 are gate and up, fused to output i. BIAS: type of a bias stored
// with the weights, 8 for one among the activations, 9 for none.
// Grid: tiles x blocks of TILE_N outputs.
// needs: common/common, common/gated_activation, codec/any_format, @weights
// constants: ASSIGNMENTS, BIAS, GATED, PAD, TILE_K, TILE_M, TILE_N, WG

struct Params {
    out: View, m: Matrix,
    up_weights: u32, up_scales: u32, up_biases: u32,
    x: u32, x_row_vecs: u32, factors: u32,
    rows: u32, outputs: u32, cols: u32, // With ASSIGNMENTS: tiles.
    table: u32, list: u32, bank: u32,
    row_step: u32, up_first: u32, bias: u32, up_bias: u32,
    alpha: f32, limit: f32,
}
var<immediate> p: Params;

@group(0) @binding(3) var<storage, read> factors: array<u32>;
@group(0) @binding(4) var<storage, read> words: array<u32>;

// Vectors of a row of a tile in workgroup memory.
const K_VECS = TILE_K / 4u;
// Pitch of rows: they start in different banks.
const PITCH = K_VECS + PAD;

// Vectors of x that a thread loads per step.
const X_LOADS = (TILE_M * K_VECS + WG - 1u) / WG;
var<workgroup> x_tile: array<Vec4, TILE_M * PITCH>;
var<workgroup> w_tile: array<Vec4, TILE_N * PITCH>;
// Offsets of the rows of x that a thread loads, in vectors, and the loaded vectors.
var<private> x_offsets: array<u32, X_LOADS>;
var<private> loaded_x: array<XWords, X_LOADS>;
// Of each row: its offset in x, in vectors, and in out; its final factor.
var<workgroup> row_x_offset: array<u32, TILE_M>;
var<workgroup> row_out_offset: array<u32, TILE_M>;
var<workgroup> row_factor: array<u32, TILE_M>;

// `slot`: first byte of the expert's slot; with ASSIGNMENTS 3, first word of the matrix.
struct Tile { first: u32, count: u32, slot: u32, output: u32 }

const MATRIX_WORDS = 9u;

// Outputs of the tile's matrix.
fn outputs_at(slot: u32) -> u32 {
    if (ASSIGNMENTS == 3u) { return words[slot + 6u]; }
    return p.outputs;
}

fn tile_at(work: u32) -> Tile {
    let blocks = (p.outputs + TILE_N - 1u) / TILE_N;
    let tile = work / blocks;
    var output = work % blocks * TILE_N;
    if (ASSIGNMENTS == 0u || ASSIGNMENTS == 3u) {
        let first = min(tile * TILE_M, p.rows);
        var matrix = p.table;
        if (ASSIGNMENTS == 3u) {
            for (var i = 1u; i < p.bank && output >= words[matrix + 6u]; i++) {
                output -= (words[matrix + 6u] + TILE_N - 1u) / TILE_N * TILE_N;
                matrix += MATRIX_WORDS;
            }
        }
        return Tile(first, min(p.rows - first, TILE_M), select(0u, matrix, ASSIGNMENTS == 3u), output);
    }
    if (tile >= p.rows) { return Tile(0u, 0u, 0u, 0u); }
    let entry = p.table + tile * 4u;
    return Tile(words[entry + 2u], select(0u, words[entry + 3u], words[entry + 1u] == p.bank), words[entry], output);
}

fn tile_rows(tile: Tile, index: u32) {
    for (var r = index; r < TILE_M; r += WG) {
        let assignment = tile.first + min(r, tile.count - 1u);
        var x_row = assignment;
        var out_row = assignment;
        if (ASSIGNMENTS == 1u) { x_row = words[p.list + assignment * 2u]; }
        if (ASSIGNMENTS == 2u) { out_row = words[p.list + assignment * 2u + 1u]; }
        row_x_offset[r] = p.x + x_row * p.x_row_vecs;
        row_out_offset[r] = p.out.offset + out_row * p.out.row_stride;
        if (ASSIGNMENTS == 3u) { row_out_offset[r] = words[tile.slot + 3u] + out_row * words[tile.slot + 4u]; }
        row_factor[r] = factors[p.factors + x_row];
    }
}

// Finds the offsets of a thread's loads; after a barrier that follows tile_rows.
fn tile_offsets(tile: Tile, index: u32) {
    // @unroll
    for (var j = 0u; j < X_LOADS; j++) {
        let i = min(index + j * WG, TILE_M * K_VECS - 1u);
        x_offsets[j] = row_x_offset[i / K_VECS] + i % K_VECS;
    }
    weight_offsets(tile, index);
}

// Loads inputs k .. k + TILE_K of all rows and outputs into registers.
fn tile_load(k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < X_LOADS; j++) {
        if (TILE_M * K_VECS % WG == 0u || index + j * WG < TILE_M * K_VECS) { loaded_x[j] = x_f16[x_offsets[j] + k / 4u]; }
    }
    load_weights(k, index);
}

// Stores the loaded inputs k .. k + TILE_K to workgroup memory.
fn tile_store(tile: Tile, k: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < X_LOADS; j++) {
        let i = index + j * WG;
        if (TILE_M * K_VECS % WG == 0u || i < TILE_M * K_VECS) { x_tile[i / K_VECS * PITCH + i % K_VECS] = x_vec4(loaded_x[j]); }
    }
    store_weights(tile, k, index);
}

// Writes the dot products of a row with one output, or with its gate and up.
fn tile_write(tile: Tile, r: u32, o: u32, sums: vec2<f32>) {
    let output = tile.output + o;
    if (r >= tile.count || output >= outputs_at(tile.slot)) { return; }
    let factor = bitcast<f32>(row_factor[r]);
    if (GATED == 1u) {
        let gate = sums.x * factor + bias_of(output, tile.slot);
        let up = sums.y * factor + bias_of(output + 1u, tile.slot);
        act[row_out_offset[r] + output / 2u] = activate(gate, up, p.alpha, p.limit);
    } else {
        act[row_out_offset[r] + output] = activate_up(sums.x * factor + bias_of(output, tile.slot));
    }
}

fn bias_of(output: u32, slot: u32) -> f32 {
    if (BIAS == 9u) { return 0.0; }
    if (BIAS == 8u && ASSIGNMENTS == 3u) { return act[words[slot + 5u] + output]; }
    if (BIAS == 8u) { return act[p.bias + output]; }
    if (GATED == 0u) { return scalar_at(BIAS, slot + p.bias, output); }
    let is_up = output & 1u;
    return scalar_at(BIAS, slot + select(p.bias, p.up_bias, is_up == 1u), (output >> 1u) * p.row_step + is_up * p.up_first);
}

struct WeightRow { m: Matrix, row: u32 }

// Location of the weights of an output.
fn weight_row(output: u32, slot: u32) -> WeightRow {
    var m = p.m;
    var row = output;
    if (GATED == 1u) {
        row = (output >> 1u) * p.row_step + (output & 1u) * p.up_first;
        if ((output & 1u) == 1u) {
            m.weights = p.up_weights;
            m.scales = p.up_scales;
            m.biases = p.up_biases;
        }
    }
    if (ASSIGNMENTS == 3u) {
        m.weights = words[slot];
        m.scales = words[slot + 1u];
        m.biases = words[slot + 2u];
        return WeightRow(m, row);
    }
    m.weights += slot;
    m.scales += slot;
    m.biases += slot;
    return WeightRow(m, row);
}
