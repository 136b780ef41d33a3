// The experts of few rows. STAGE 0: inner[use][o] = activation(gate[o] . x[row], up[o] . x[row]). STAGE 2:
// out[part][o] = down[o] . inner[use]. Parts of threads, their ROWS rows and chunks are those of products.wgsl; in STAGE 0 the
// first half of a part's rows are gate's and the others are up's.
// STEP: rows from one stored row of a matrix to the next, 2 where gate and up are interleaved. BIAS_SCALAR may be 8, where what
// out has is added.
// WALKERS: blocks of rows of a use, where all uses are of one row; else 0, and `walkers` says it.
// Uses are found as listed.wgsl or ranked.wgsl has it.
// Grid: uses x blocks of rows.
// needs: common/common, common/gated_activation, @team, @row_sums, experts/slot_matrix
// needs: @assignments, gemv/row_products, gemv/stage_x
// constants: BIAS_SCALAR, BLOCK_ROWS, PART, ROWS, STAGE, STEP, WALKERS, WG

struct Params {
    x: u32, x_row: u32, out: u32, out_row: u32,
    uses: Uses, count: u32, walkers: u32, turns: u32, outputs: u32,
    one: Part, other: Part, other_first: u32, alpha: f32, limit: f32,
    chosen: Ranking,
}
var<immediate> p: Params;
const X_ROWS = 1u;
const ONE_ROW = WALKERS > 0u;
const NORM = 0u;
const HEAD = 0u;
const SQUARES = 0u;
const OUTPUTS = select(ROWS / 2u, ROWS, STAGE == 2u); // of a part at a time

// The rows of a part from output `o` on.
fn rows_at(slot: u32, o: u32) -> Rows {
    var stored = min(vec4<u32>(o) + ROW_OF % OUTPUTS, vec4<u32>(p.outputs - 1u));
    var weights = vec4<u32>(p.one.weights);
    var scales = vec4<u32>(p.one.scales);
    var biases = vec4<u32>(p.one.biases);
    if (STAGE == 0u) {
        stored = stored * STEP + vec4<u32>(0u, 0u, p.other_first, p.other_first);
        weights = vec4<u32>(weights.xy, vec2<u32>(p.other.weights));
        scales = vec4<u32>(scales.xy, vec2<u32>(p.other.scales));
        biases = vec4<u32>(biases.xy, vec2<u32>(p.other.biases));
    }
    weights += slot / SLOT_UNIT + stored * ROW_WORDS;
    let of_row = stored / BLOCK_ROWS * ROW_SCALES + slot;
    return Rows(weights, scales + of_row, biases + of_row);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let work = group_index(id, count);
    let walkers = select(p.walkers, WALKERS, ONE_ROW);
    let i = work / walkers;
    if (i >= p.count) { return; }
    let x = p.x + select(row_of(p.uses, i), i, STAGE == 2u) * p.x_row;
    let asked = ask(x, 0u, 0u);
    let found = find(i);
    if (!found.ours) {
        note(work);
        return;
    }
    let chunk = index % PART;
    let first = (work % walkers * p.turns * (WG / PART) + index / PART) * OUTPUTS;
    let out = p.out + select(i, found.part, STAGE == 2u) * p.out_row;
    var rows = rows_at(found.slot, first);
    var loaded = load(rows, chunk);
    note(work);
    stage(asked, x, 0u);
    for (var turn = 0u; turn < p.turns; turn++) {
        let o = first + turn * (WG / PART) * OUTPUTS;
        if (turn > 0u) {
            rows = rows_at(found.slot, o);
            loaded = load(rows, chunk);
        }
        let sums = part_sum(products(loaded, rows, chunk, 0u));
        if (chunk == 0u) {
            if (STAGE == 0u) {
                for (var j = 0u; j < OUTPUTS; j++) {
                    if (o + j < p.outputs) {
                        let gate = sums[j] + bias_at(found.slot + p.one.bias, (o + j) * STEP);
                        let up = sums[j + OUTPUTS] + bias_at(found.slot + p.other.bias, (o + j) * STEP + p.other_first);
                        a[out + o + j] = activate(gate, up, p.alpha, p.limit);
                    }
                }
            } else {
                for (var j = 0u; j < OUTPUTS; j++) {
                    if (o + j < p.outputs) {
                        var y = sums[j] + bias_at(found.slot + p.one.bias, (o + j) * STEP);
                        if (BIAS_SCALAR == 8u) { y += a[out + o + j]; }
                        a[out + o + j] = y;
                    }
                }
            }
        }
    }
}
