// One matrix of the experts of all uses, weights of any format and alignment, f32 throughout.
// STAGE 0: inner[use] = W x[row]. 1: inner[use] = activation(inner[use], W x[row]). 2: out[part] = W inner[use].
// W is rows first, first + step, ... of what a slot stores. BIAS_SCALAR: the type of the bias that lies in the slot from
// `bias` on, one number for each stored row; 9 for none.
// Grid: uses x blocks of WG / TEAM outputs.
// needs: common/common, common/gated_activation, @team, codec/any_format, experts/assignments
// constants: BIAS_SCALAR, STAGE, TEAM, WG

struct Params {
    x: View, out: View, m: Matrix, uses: Uses,
    count: u32, first: u32, step: u32, outputs: u32, cols: u32, bias: u32,
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
    let blocks = (p.outputs + WG / TEAM - 1u) / (WG / TEAM);
    let work = group_index(id, count);
    let i = work / blocks;
    if (i >= p.count) { return; }
    let found = use_of(p.uses, i);
    if (!found.ours) { return; }
    var m = p.m;
    m.weights += found.slot;
    m.scales += found.slot;
    m.biases += found.slot;
    let o = work % blocks * (WG / TEAM) + team;
    let stored = p.first + min(o, p.outputs - 1u) * p.step;
    let x = p.x.at + select(found.row, i, STAGE == 2u) * p.x.row;
    var sum = 0.0;
    for (var c = lane; c < p.cols; c += TEAM) { sum += a[x + c] * weight_at(m, stored, c); }
    sum = team_sum(sum);
    if (lane != 0u || o >= p.outputs) { return; }
    if (BIAS_SCALAR < 3u) { sum += scalar_at(BIAS_SCALAR, found.slot + p.bias, stored); }
    let out = p.out.at + select(i, found.part, STAGE == 2u) * p.out.row + o;
    if (STAGE == 1u) { sum = activate(a[out], sum, p.alpha, p.limit); }
    a[out] = sum;
}
