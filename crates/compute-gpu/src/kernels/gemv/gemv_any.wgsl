// GEMV per head for weights of any format and alignment, in f32: out[r][h][o] = sum_i x[r][h][i]
// W[h][o][i] + bias[o]. W[h] is the stored rows from first_row + h head_row_stride on. BIASED: 1
// with a bias, which is among the activations.
// Grid: rows x heads x blocks of WG / TEAM outputs.
// needs: common/common, @team, codec/any_format
// constants: BIASED, TEAM, WG

struct Params {
    x: View, out: View, m: Matrix,
    first_row: u32, outputs: u32, cols: u32, rows: u32, heads: u32, head_row_stride: u32, bias: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let blocks = (p.outputs + WG / TEAM - 1u) / (WG / TEAM);
    let work = group_index(id, count);
    let head = work / blocks % p.heads;
    let row = work / blocks / p.heads;
    if (row >= p.rows) { return; }
    let o = work % blocks * (WG / TEAM) + team;
    let stored = p.first_row + head * p.head_row_stride + min(o, p.outputs - 1u);
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride;
    var sum = 0.0;
    for (var col = lane; col < p.cols; col += TEAM) { sum += act[x + col] * weight_at(p.m, stored, col); }
    sum = team_sum(sum);
    if (lane != 0u || o >= p.outputs) { return; }
    if (BIASED == 1u) { sum += act[p.bias + o]; }
    act[p.out.offset + row * p.out.row_stride + head * p.out.head_stride + o] = sum;
}
