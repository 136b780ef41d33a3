// GEMV per head: out[r][h][o] = x[r][h] . W[h][o]; weights are read once for each row of x. W[h]
// is the `head_rows` stored rows from first_row + h head_row_stride on. ROW_THREADS threads
// compute ROWS rows of weights at a time, as in load_blocks.wgsl.
// Grid: rows x heads x groups of ROWS WG / ROW_THREADS outputs.
// needs: common/common, @team, @row_sums, gemv/row_products, gemv/stage_x
// constants: BLOCK_ROWS, ROWS, ROW_SCALES, ROW_THREADS, WG

struct Params {
    x: View, out: View, weights: u32, scales: u32, biases: u32,
    first_row: u32, head_rows: u32, head_row_stride: u32, rows: u32, heads: u32,
}
var<immediate> p: Params;

const X_ROWS = 1u;
const NORM = 0u;
const HEAD_WIDTH = 0u;
const HEAD_SQUARES = 0u;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group_outputs = ROWS * WG / ROW_THREADS;
    let groups = (p.head_rows + group_outputs - 1u) / group_outputs;
    let work = group_index(id, count);
    let head = work / groups % p.heads;
    let row = work / groups / p.heads;
    if (row >= p.rows) { return; }
    let row_thread = index % ROW_THREADS;
    let o = work % groups * group_outputs + index / ROW_THREADS * ROWS;
    let stored = min(vec4<u32>(o) + ROW_OF, vec4<u32>(p.head_rows - 1u)) + p.first_row + head * p.head_row_stride;
    let scale_row = stored / BLOCK_ROWS * ROW_SCALES;
    let rows = RowOffsets(p.weights + stored * ROW_UNITS, p.scales + scale_row, p.biases + scale_row);
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride;
    let loaded_x = load_x(x, 0u, 0u);
    let blocks = load_blocks(rows, row_thread);
    stage_activations(loaded_x, x, 0u);
    let sums = sum_row_threads(row_products(blocks, rows, row_thread, 0u));
    if (row_thread > 0u) { return; }
    let out = p.out.offset + row * p.out.row_stride + head * p.out.head_stride;
    for (var i = 0u; i < ROWS; i++) {
        if (o + i < p.head_rows) { act[out + o + i] = sums[i]; }
    }
}
