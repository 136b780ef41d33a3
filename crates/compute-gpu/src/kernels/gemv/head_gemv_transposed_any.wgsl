// Transposed GEMV per head for weights of any format and alignment, in f32: out[r][h][o] = sum_i
// x[r][h][i] W[h][i][o]. W[h] is the `head_rows` stored rows from first_row + h head_row_stride
// on, of `cols` weights each.
// Grid: rows x heads x blocks of WG outputs.
// needs: common/common, codec/any_format
// constants: WG

struct Params {
    x: View, out: View, m: Matrix,
    first_row: u32, head_rows: u32, cols: u32, rows: u32, heads: u32, head_row_stride: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let blocks = (p.cols + WG - 1u) / WG;
    let work = group_index(id, count);
    let head = work / blocks % p.heads;
    let row = work / blocks / p.heads;
    let o = work % blocks * WG + index;
    if (row >= p.rows || o >= p.cols) { return; }
    let first = p.first_row + head * p.head_row_stride;
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride;
    var sum = 0.0;
    for (var i = 0u; i < p.head_rows; i++) { sum += act[x + i] * weight_at(p.m, first + i, o); }
    act[p.out.offset + row * p.out.row_stride + head * p.out.head_stride + o] = sum;
}
