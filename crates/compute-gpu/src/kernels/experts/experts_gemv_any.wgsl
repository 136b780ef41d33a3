// GEMV of one matrix of the experts of all assignments, for weights of any format and alignment,
// in f32. STAGE 0: inner[i] = W x[row]. 1: inner[i] = activation(inner[i], W x[row]), which may
// have no gate. 2: out[row] = W inner[i]. i: index of the assignment.
// W is the stored rows first_row, first_row + row_step, ... of a slot. BIAS_SCALAR: type of the
// bias in the slot, from byte `bias` on, one for each stored row; 9 for none.
// Grid: assignments x blocks of WG / TEAM outputs.
// needs: common/common, common/gated_activation, @team, codec/any_format, experts/assignments
// constants: BIAS_SCALAR, STAGE, TEAM, WG

struct Params {
    x: View, out: View, m: Matrix, assignments: Assignments,
    count: u32, first_row: u32, row_step: u32, outputs: u32, cols: u32, bias: u32,
    alpha: f32, limit: f32,
}
var<immediate> p: Params;
const ONE_ROW = false;
@group(0) @binding(2) var<storage, read> words: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let groups = (p.outputs + WG / TEAM - 1u) / (WG / TEAM);
    let work = group_index(id, count);
    let i = work / groups;
    if (i >= p.count) { return; }
    let assignment = assignment_at(p.assignments, i);
    if (!assignment.in_bank) { return; }
    var m = p.m;
    m.weights += assignment.slot;
    m.scales += assignment.slot;
    m.biases += assignment.slot;
    let o = work % groups * (WG / TEAM) + team;
    let stored = p.first_row + min(o, p.outputs - 1u) * p.row_step;
    let x = p.x.offset + select(assignment.row, i, STAGE == 2u) * p.x.row_stride;
    var sum = 0.0;
    for (var c = lane; c < p.cols; c += TEAM) { sum += act[x + c] * weight_at(m, stored, c); }
    sum = team_sum(sum);
    if (lane != 0u || o >= p.outputs) { return; }
    if (BIAS_SCALAR < 3u) { sum += scalar_at(BIAS_SCALAR, assignment.slot + p.bias, stored); }
    let out = p.out.offset + select(i, assignment.out_row, STAGE == 2u) * p.out.row_stride + o;
    if (STAGE == 1u) { sum = activate(act[out], sum, p.alpha, p.limit); }
    act[out] = sum;
}
