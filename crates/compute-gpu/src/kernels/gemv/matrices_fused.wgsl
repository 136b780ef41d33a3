// Parameters of a GEMV with MATRICES matrices, 2 to 4, that share x. All but the last have a
// multiple of four rows. There is neither a residual nor a head norm.
// implements: @matrices
// needs: gemv/gemv
// constants: BIAS_MODE, MATRICES

// Weights in load units of the codec, scales and biases in bytes, out in elements; end of the
// matrix's rows in W. `bias_or_row_stride`: the bias with BIAS_MODE 1, where rows of out are dense;
// else the row stride of out. Separate words for both would exceed 128 bytes.
struct Matrix { weights: u32, scales: u32, biases: u32, out: u32, end_row: u32, bias_or_row_stride: u32 }
struct Params {
    x: u32, x_row_stride: u32, normed: u32, rows: u32, workgroups: u32, steps: u32,
    m0: Matrix, m1: Matrix, m2: Matrix, m3: Matrix,
    norm_weight: u32, eps: f32,
}
var<immediate> p: Params;

// Rows of a step from row `o` of W on.
fn row_group_at(o: u32) -> RowGroup {
    var m = p.m0;
    var start = 0u;
    if (o >= p.m0.end_row) { m = p.m1; start = p.m0.end_row; }
    if (MATRICES > 2u && o >= p.m1.end_row) { m = p.m2; start = p.m1.end_row; }
    if (MATRICES > 3u && o >= p.m2.end_row) { m = p.m3; start = p.m2.end_row; }
    return row_group(m, o - start, m.end_row - start);
}

fn out_offset(m: Matrix, count: u32, row: u32) -> u32 {
    return m.out + row * select(m.bias_or_row_stride, count, BIAS_MODE == 1u);
}

fn bias_offset(m: Matrix) -> u32 {
    return m.bias_or_row_stride;
}

fn residual_offset(row: u32) -> u32 {
    return 0u;
}

fn squares_offset(row: u32) -> u32 {
    return 0u;
}
