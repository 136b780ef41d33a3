// GEMV of expert matrices, few rows. STAGE 0: inner[i][o] = activation(gate[o] . x[row], up[o] .
// x[row]). STAGE 1: the same without a gate. STAGE 2: out[row][o] = down[o] . inner[i]. i: index of
// the assignment.
// Threads per row, ROWS and blocks: as in row_products.wgsl. In STAGE 0 the first half of the ROWS
// rows are gate's, the others up's. ROW_STEP: stored rows from one row of a matrix to the next, 2
// if gate and up are interleaved. BIAS_SCALAR 8: accumulates into out.
// WORKGROUPS: workgroups per assignment if all are of one row; else 0, and `workgroups` has it.
// Grid: assignments x groups of rows.
// needs: common/common, common/gated_activation, @team, @row_sums, experts/slot_matrix
// needs: @assignments, gemv/row_products, gemv/stage_x, router/routing
// constants: BIAS_SCALAR, BLOCK_ROWS, ROWS, ROW_SCALES, ROW_STEP, ROW_THREADS, STAGE, WG
// constants: WORKGROUPS

struct Params {
    x: u32, x_row_stride: u32, out: u32, out_row_stride: u32,
    assignments: Assignments, count: u32, workgroups: u32, steps: u32, outputs: u32,
    matrix: SlotMatrix, up: SlotMatrix, up_first: u32, alpha: f32, limit: f32,
    routing: Routing, // If fused with the router.
}
var<immediate> p: Params;
const X_ROWS = 1u;
const ONE_ROW = WORKGROUPS > 0u;
const NORM = 0u;
const HEAD_WIDTH = 0u;
const HEAD_SQUARES = 0u;
const OUTPUTS = select(ROWS, ROWS / 2u, STAGE == 0u); // Outputs per step.

// Offsets of the rows of a step, from output `o` on.
fn row_offsets(slot: u32, o: u32) -> RowOffsets {
    var stored = min(vec4<u32>(o) + ROW_OF % OUTPUTS, vec4<u32>(p.outputs - 1u));
    var weights = vec4<u32>(p.matrix.weights);
    var scales = vec4<u32>(p.matrix.scales);
    var biases = vec4<u32>(p.matrix.biases);
    if (STAGE == 0u) {
        stored = stored * ROW_STEP + vec4<u32>(0u, 0u, p.up_first, p.up_first);
        weights = vec4<u32>(weights.xy, vec2<u32>(p.up.weights));
        scales = vec4<u32>(scales.xy, vec2<u32>(p.up.scales));
        biases = vec4<u32>(biases.xy, vec2<u32>(p.up.biases));
    }
    weights += slot / UNIT_BYTES + stored * ROW_UNITS;
    let scale_row = stored / BLOCK_ROWS * ROW_SCALES + slot;
    return RowOffsets(weights, scales + scale_row, biases + scale_row);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let work = group_index(id, count);
    let workgroups = select(p.workgroups, WORKGROUPS, ONE_ROW);
    let i = work / workgroups;
    if (i >= p.count) { return; }
    let x = p.x + select(x_row(p.assignments, i), i, STAGE == 2u) * p.x_row_stride;
    let loaded_x = load_x(x, 0u, 0u);
    let assignment = find_assignment(i);
    if (!assignment.in_bank) {
        write_routing(work);
        return;
    }
    let row_thread = index % ROW_THREADS;
    let first_output = (work % workgroups * p.steps * (WG / ROW_THREADS) + index / ROW_THREADS) * OUTPUTS;
    let out = p.out + select(i, assignment.out_row, STAGE == 2u) * p.out_row_stride;
    var rows = row_offsets(assignment.slot, first_output);
    var blocks = load_blocks(rows, row_thread);
    write_routing(work);
    stage_activations(loaded_x, x, 0u);
    for (var step = 0u; step < p.steps; step++) {
        let o = first_output + step * (WG / ROW_THREADS) * OUTPUTS;
        if (step > 0u) {
            rows = row_offsets(assignment.slot, o);
            blocks = load_blocks(rows, row_thread);
        }
        let sums = sum_row_threads(row_products(blocks, rows, row_thread, 0u));
        if (row_thread == 0u) {
            if (STAGE == 0u) {
                for (var j = 0u; j < OUTPUTS; j++) {
                    if (o + j < p.outputs) {
                        let gate = sums[j] + bias_at(assignment.slot + p.matrix.bias, (o + j) * ROW_STEP);
                        let up = sums[j + OUTPUTS] + bias_at(assignment.slot + p.up.bias, (o + j) * ROW_STEP + p.up_first);
                        act[out + o + j] = activate(gate, up, p.alpha, p.limit);
                    }
                }
            } else {
                for (var j = 0u; j < OUTPUTS; j++) {
                    if (o + j < p.outputs) {
                        var y = sums[j] + bias_at(assignment.slot + p.matrix.bias, (o + j) * ROW_STEP);
                        if (STAGE == 1u) { y = activate_up(y); }
                        if (BIAS_SCALAR == 8u) { y += act[out + o + j]; }
                        act[out + o + j] = y;
                    }
                }
            }
        }
    }
}
