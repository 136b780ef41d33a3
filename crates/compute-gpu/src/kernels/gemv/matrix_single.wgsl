// Parameters of a GEMV with one matrix.
// implements: @matrices
// needs: gemv/gemv

// Weights in load units of the codec, scales and biases in bytes, out and bias in elements.
struct Matrix { weights: u32, scales: u32, biases: u32, out: u32, out_row_stride: u32, bias: u32, rows: u32 }
struct Params {
    x: u32, x_row_stride: u32, normed: u32, rows: u32, workgroups: u32, steps: u32,
    matrix: Matrix,
    norm_weight: u32, eps: f32,
    residual: u32, residual_row_stride: u32, squares: u32, squares_row_stride: u32,
}
var<immediate> p: Params;

// Rows of a step from row `o` of the matrix on.
fn row_group_at(o: u32) -> RowGroup {
    return row_group(p.matrix, o, p.matrix.rows);
}

fn out_offset(m: Matrix, count: u32, row: u32) -> u32 {
    return m.out + row * m.out_row_stride;
}

fn bias_offset(m: Matrix) -> u32 {
    return m.bias;
}

fn residual_offset(row: u32) -> u32 {
    return p.residual + row * p.residual_row_stride;
}

fn squares_offset(row: u32) -> u32 {
    return p.squares + row * p.squares_row_stride;
}
