// GEMV: out[r][o] = x[r] . W[o] + bias[o] for few rows of x, bound by the bandwidth of the
// weights. W is up to MATRICES matrices that share x, concatenated by rows; all but the last have
// a multiple of four rows.
// ROW_THREADS threads compute ROWS rows of W at a time, as in row_products.wgsl. A workgroup
// computes `steps` groups of ROWS WG / ROW_THREADS rows. COLS: inputs, a multiple of 32.
// BIAS_MODE: 1 adds the bias, which is among the activations; 2 accumulates into out.
// NORM (prologue): RMSNorm of x; the first workgroup of a row also writes the result to `normed`.
// Rows are dense, in x and there. HEAD_WIDTH (prologue): heads of x are divided by their root mean
// square, as in stage_x.wgsl, from the sums at `squares`. RESIDUAL (epilogue): out of the only
// matrix is also added to `residual`.
// Grid: rows of x x `workgroups`.
// needs: common/common, @team, @row_sums, gemv/row_products, gemv/stage_x
// constants: BIAS_MODE, BLOCK_ROWS, COLS, HEAD_WIDTH, MATRICES, NORM, RESIDUAL, ROWS, ROW_THREADS
// constants: WG

// First load unit of the weights, first byte of scales and biases, first element of out, end of
// the matrix's rows in W; first element of the bias, or, of several rows without bias, the row
// stride of out.
struct Matrix { weights: u32, scales: u32, biases: u32, out: u32, end: u32, bias: u32 }
struct Params {
    x: u32, x_row: u32, out_row: u32, rows: u32, workgroups: u32, steps: u32,
    m0: Matrix, m1: Matrix, m2: Matrix, m3: Matrix,
    norm: u32, eps: f32, // First element of the norm's weights.
}
var<immediate> p: Params;

const X_ROWS = 1u;

// Rows of a step from row `o` of W on: their matrix, the first row in it, the number of its rows,
// and their offsets.
struct RowGroup { m: Matrix, first_row: u32, count: u32, rows: RowOffsets }

fn row_group_at(o: u32) -> RowGroup {
    var m = p.m0;
    var start = 0u;
    if (MATRICES > 1u && o >= p.m0.end) { m = p.m1; start = p.m0.end; }
    if (MATRICES > 2u && o >= p.m1.end) { m = p.m2; start = p.m1.end; }
    if (MATRICES > 3u && o >= p.m2.end) { m = p.m3; start = p.m2.end; }
    let count = m.end - start;
    let stored = min(vec4<u32>(o - start) + ROW_OF, vec4<u32>(count - 1u));
    let scales = stored / BLOCK_ROWS * ROW_SCALES;
    return RowGroup(m, o - start, count, RowOffsets(m.weights + stored * ROW_WORDS, m.scales + scales, m.biases + scales));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let work = group_index(id, count);
    let row = work / p.workgroups;
    if (row >= p.rows) { return; }
    let row_thread = index % ROW_THREADS;
    let x = p.x + row * select(p.x_row, COLS, NORM == 1u);
    let loaded_x = load_x(x, p.norm, 0u);
    var squares = 0.0;
    if (HEAD_WIDTH > 0u) { squares = sum_head_squares(p.m2.out + row * p.m2.bias); }
    let first_row = (work % p.workgroups * p.steps * (WG / ROW_THREADS) + index / ROW_THREADS) * ROWS;
    var group = row_group_at(first_row);
    var blocks = load_blocks(group.rows, row_thread);
    if (HEAD_WIDTH > 0u) { store_head_factors(squares, p.eps); }
    stage_activations(loaded_x, x, p.norm);
    var row_factor = 1.0;
    if (NORM == 1u) {
        row_factor = norm_factor(p.eps);
        if (work % p.workgroups == 0u) {
            let dst = p.x_row + row * COLS;
            for (var i = index; i < COLS; i += WG) { act[dst + i] = act[x + i] * act[p.norm + i] * row_factor; }
        }
    }
    for (var step = 0u; step < p.steps; step++) {
        let sums = sum_row_threads(row_products(blocks, group.rows, row_thread, 0u)) * row_factor;
        if (row_thread == 0u) {
            let out = group.m.out + row * select(p.out_row, group.m.bias, MATRICES > 1u);
            for (var i = 0u; i < ROWS; i++) {
                let o = group.first_row + i;
                if (o < group.count) {
                    var y = sums[i];
                    if (BIAS_MODE == 1u) { y += act[group.m.bias + o]; }
                    if (BIAS_MODE == 2u) { y += act[out + o]; }
                    act[out + o] = y;
                    if (RESIDUAL == 1u) { act[p.m1.out + row * p.m1.bias + o] += y; }
                }
            }
        }
        if (step + 1u < p.steps) {
            group = row_group_at(first_row + (step + 1u) * (WG / ROW_THREADS) * ROWS);
            blocks = load_blocks(group.rows, row_thread);
        }
    }
}
