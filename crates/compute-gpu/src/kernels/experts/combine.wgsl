// Weighted sum of expert outputs: out = sum over ranks, in rank order, of weights[row][rank]
// expert_out[row k + rank], plus the shared expert (SHARED) times sigmoid of its gate (GATED),
// plus out (ADD).
// Grid: a thread for each element of out.
// needs: common/common
// constants: ADD, GATED, SHARED, WG

struct Params {
    expert_out: View, weights: View, shared_out: View, gate: View, out: View,
    count: u32, width: u32, k: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.count) { return; }
    let row = i / p.width;
    let col = i % p.width;
    var sum = 0.0;
    for (var rank = 0u; rank < p.k; rank++) {
        let weight = act[p.weights.offset + row * p.weights.row_stride + rank];
        sum = fma(weight, act[p.expert_out.offset + (row * p.k + rank) * p.expert_out.row_stride + col], sum);
    }
    if (SHARED == 1u) {
        var gate = 1.0;
        if (GATED == 1u) { gate = sigmoid(act[p.gate.offset + row * p.gate.row_stride]); }
        sum = fma(gate, act[p.shared_out.offset + row * p.shared_out.row_stride + col], sum);
    }
    let out = p.out.offset + row * p.out.row_stride + col;
    if (ADD == 1u) { sum += act[out]; }
    act[out] = sum;
}
