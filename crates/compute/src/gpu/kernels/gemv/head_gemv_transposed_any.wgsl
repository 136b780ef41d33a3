// out[r][h][o] = sum_i x[r][h][i] W[h][i][o]: matrices of heads the other way, for weights of any format, f32 throughout.
// W[h] is the `inputs` rows of the weight from first + h * head_rows on; each has `cols` numbers.
// Grid: rows x heads x blocks of WG outputs.
// needs: common/common, codec/any_format
// constants: WG

struct Params {
    x: View, out: View, m: Matrix,
    first: u32, inputs: u32, cols: u32, rows: u32, heads: u32, head_rows: u32,
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
    let first = p.first + head * p.head_rows;
    let x = p.x.at + row * p.x.row + head * p.x.head;
    var sum = 0.0;
    for (var i = 0u; i < p.inputs; i++) { sum += a[x + i] * weight_at(p.m, first + i, o); }
    a[p.out.at + row * p.out.row + head * p.out.head + o] = sum;
}
