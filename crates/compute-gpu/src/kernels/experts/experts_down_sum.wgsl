// GEMV of the down projections of the TOP_K experts of each row, fused with their weighted sum and
// the residual, as combine.wgsl computes it: expert_out[e][o] = down[e][o] . inner[e]; out[o] +=
// sum over e, in rank order, of weights[e] expert_out[e][o], plus the shared expert (SHARED) times
// sigmoid of its gate (GATED).
// Threads per row, ROWS and blocks: as in row_products.wgsl. The threads of a workgroup share
// ROW_GROUPS groups of ROWS outputs of all experts, and then sum them.
// Grid: groups of ROW_GROUPS ROWS outputs, `row_groups` of them for each row.
// needs: common/common, @team, @row_sums, experts/assignments, experts/slot_matrix
// needs: gemv/row_products, gemv/stage_x
// constants: BLOCK_ROWS, GATED, ROWS, ROW_GROUPS, ROW_SCALES, ROW_THREADS, SHARED, TOP_K, WG

struct Params {
    x: u32, assignments: Assignments, outputs: u32, down: SlotMatrix,
    expert_out: u32, expert_out_row_stride: u32, weights: u32, shared_out: u32, gate: u32, out: u32,
    rows: u32, row_groups: u32, x_stride: u32, weights_stride: u32, shared_stride: u32, gate_stride: u32,
    out_stride: u32,
}
var<immediate> p: Params;
// Ids of the workgroup's row.
var<private> assignments: Assignments;

const X_ROWS = TOP_K;
const NORM = 0u;
const HEAD_WIDTH = 0u;
const HEAD_SQUARES = 0u;
const ASSIGNMENTS = 2u;
const ONE_ROW = true;
const ITEMS = TOP_K * ROW_GROUPS;
const OUTPUTS = ROW_GROUPS * ROWS;

const ITEMS_AT_ONCE = WG / ROW_THREADS; // Row groups computed at once.

var<workgroup> products: array<f32, ITEMS * ROWS>;
var<workgroup> expert_weights: array<f32, TOP_K>;

// Work of ROW_THREADS threads in one step: a row group of one expert, clamped to the last one.
struct Item { item: u32, slot: u32, rows: RowOffsets }

fn item_at(first_output: u32, item: u32) -> Item {
    let i = min(item, ITEMS - 1u);
    let slot = assignment_at(assignments, i / ROW_GROUPS).slot;
    return Item(i, slot, row_offsets(slot, first_output + i % ROW_GROUPS * ROWS));
}

fn row_offsets(slot: u32, o: u32) -> RowOffsets {
    let stored = min(vec4<u32>(o) + ROW_OF, vec4<u32>(p.outputs - 1u));
    let scale_row = stored / BLOCK_ROWS * ROW_SCALES + slot;
    return RowOffsets(p.down.weights + slot / UNIT_BYTES + stored * ROW_UNITS, p.down.scales + scale_row, p.down.biases + scale_row);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let row = group / p.row_groups;
    let first_output = group % p.row_groups * OUTPUTS;
    if (row >= p.rows) { return; }
    assignments = p.assignments;
    assignments.list += row * p.assignments.row_stride;
    let x = p.x + row * p.x_stride;
    let out = p.out + row * p.out_stride;
    let row_thread = index % ROW_THREADS;
    let loaded_x = load_x(x, 0u, 0u);
    var current = item_at(first_output, index / ROW_THREADS);
    var blocks = load_blocks(current.rows, row_thread);
    // Loaded after the weights, which must not wait for it.
    let o = first_output + index;
    var residual = 0.0;
    if (index < OUTPUTS && o < p.outputs) { residual = act[out + o]; }
    var weight = 0.0;
    if (index < TOP_K) { weight = act[p.weights + row * p.weights_stride + index]; }
    stage_activations(loaded_x, x, 0u);
    if (index < TOP_K) { expert_weights[index] = weight; }
    for (var items = 0u; items < ITEMS; items += ITEMS_AT_ONCE) {
        if (items > 0u) {
            current = item_at(first_output, items + index / ROW_THREADS);
            blocks = load_blocks(current.rows, row_thread);
        }
        let sums = sum_row_threads(row_products(blocks, current.rows, row_thread, current.item / ROW_GROUPS));
        if (row_thread == 0u && items + index / ROW_THREADS < ITEMS) {
            for (var j = 0u; j < ROWS; j++) {
                let o = min(first_output + current.item % ROW_GROUPS * ROWS + j, p.outputs - 1u);
                products[current.item * ROWS + j] = sums[j] + bias_at(current.slot + p.down.bias, o);
            }
        }
    }
    workgroupBarrier();
    if (index < OUTPUTS && o < p.outputs) {
        var sum = 0.0;
        // TOP_K times. A driver that unrolls the loop may fuse the first product instead of the
        // second one with their sum, which combine.wgsl does not.
        for (var rank = 0u; rank < p.assignments.k; rank++) {
            let product = products[rank * OUTPUTS + index];
            act[p.expert_out + (row * p.assignments.k + rank) * p.expert_out_row_stride + o] = product;
            sum = fma(expert_weights[rank], product, sum);
        }
        if (SHARED == 1u) {
            var gate = 1.0;
            if (GATED == 1u) { gate = sigmoid(act[p.gate + row * p.gate_stride]); }
            sum = fma(gate, act[p.shared_out + row * p.shared_stride + o], sum);
        }
        act[out + o] = residual + sum;
    }
}
