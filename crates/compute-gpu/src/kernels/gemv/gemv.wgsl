// GEMV: out[r][o] = x[r] . W[o] + bias[o] for few rows of x, bound by the bandwidth of the
// weights. W is the matrices of the parameters, concatenated by rows: matrix_single.wgsl or
// matrices_fused.wgsl.
// ROW_THREADS threads compute ROWS rows of W at a time, as in row_products.wgsl. A workgroup
// computes `steps` groups of ROWS WG / ROW_THREADS rows. COLS: inputs, a multiple of 32.
// BIAS_MODE: 1 adds the bias, which is among the activations; 2 accumulates into out.
// NORM (prologue): RMSNorm of x; the first workgroup of a row also writes the result to `normed`.
// Rows are dense, in x and there. HEAD_WIDTH (prologue): heads of x are divided by their root mean
// square, as in stage_x.wgsl, from the sums at `squares`. RESIDUAL (epilogue): out is also added
// to `residual`. HEAD_WIDTH and RESIDUAL are for a single matrix.
// Grid: rows of x x `workgroups`.
// needs: common/common, @team, @row_sums, @matrices, gemv/row_products, gemv/stage_x
// constants: BIAS_MODE, BLOCK_ROWS, COLS, HEAD_WIDTH, NORM, RESIDUAL, ROWS, ROW_SCALES
// constants: ROW_THREADS, WG

const X_ROWS = 1u;

// Rows of a step: their matrix, the first row in it, the number of its rows, and their offsets.
struct RowGroup { matrix: Matrix, first_row: u32, count: u32, rows: RowOffsets }

// Rows from row `first_row` of a matrix of `count` rows on, clamped to the last one.
fn row_group(m: Matrix, first_row: u32, count: u32) -> RowGroup {
    let stored = min(vec4<u32>(first_row) + ROW_OF, vec4<u32>(count - 1u));
    let scales = stored / BLOCK_ROWS * ROW_SCALES;
    return RowGroup(m, first_row, count, RowOffsets(m.weights + stored * ROW_UNITS, m.scales + scales, m.biases + scales));
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
    let x = p.x + row * select(p.x_row_stride, COLS, NORM == 1u);
    let loaded_x = load_x(x, p.norm_weight, 0u);
    var squares = 0.0;
    if (HEAD_WIDTH > 0u) { squares = sum_head_squares(squares_offset(row)); }
    let first_row = (work % p.workgroups * p.steps * (WG / ROW_THREADS) + index / ROW_THREADS) * ROWS;
    var group = row_group_at(first_row);
    var blocks = load_blocks(group.rows, row_thread);
    if (HEAD_WIDTH > 0u) { store_head_factors(squares, p.eps); }
    stage_activations(loaded_x, x, p.norm_weight);
    var row_factor = 1.0;
    if (NORM == 1u) {
        row_factor = norm_factor(p.eps);
        if (work % p.workgroups == 0u) {
            let dst = p.normed + row * COLS;
            for (var i = index; i < COLS; i += WG) { act[dst + i] = act[x + i] * act[p.norm_weight + i] * row_factor; }
        }
    }
    for (var step = 0u; step < p.steps; step++) {
        let sums = sum_row_threads(row_products(blocks, group.rows, row_thread, 0u)) * row_factor;
        if (row_thread == 0u) {
            let out = out_offset(group.matrix, group.count, row);
            for (var i = 0u; i < ROWS; i++) {
                let o = group.first_row + i;
                if (o < group.count) {
                    var y = sums[i];
                    if (BIAS_MODE == 1u) { y += act[bias_offset(group.matrix) + o]; }
                    if (BIAS_MODE == 2u) { y += act[out + o]; }
                    act[out + o] = y;
                    if (RESIDUAL == 1u) { act[residual_offset(row) + o] += y; }
                }
            }
        }
        if (step + 1u < p.steps) {
            group = row_group_at(first_row + (step + 1u) * (WG / ROW_THREADS) * ROWS);
            blocks = load_blocks(group.rows, row_thread);
        }
    }
}
