// out = sum over ranks, in rank order, of weights[row][rank] parts[row k + rank], plus the shared expert (SHARED) times
// sigmoid of its gate (GATED), plus out itself (ADD). Grid: a thread for each number of out.
// needs: common/common
// constants: ADD, GATED, SHARED, WG

struct Params {
    parts: View, weights: View, shared_out: View, gate: View, out: View,
    numbers: u32, width: u32, k: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.numbers) { return; }
    let row = i / p.width;
    let at = i % p.width;
    var sum = 0.0;
    for (var rank = 0u; rank < p.k; rank++) {
        let weight = a[p.weights.at + row * p.weights.row + rank];
        sum = fma(weight, a[p.parts.at + (row * p.k + rank) * p.parts.row + at], sum);
    }
    if (SHARED == 1u) {
        var gate = 1.0;
        if (GATED == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row]); }
        sum = fma(gate, a[p.shared_out.at + row * p.shared_out.row + at], sum);
    }
    let out = p.out.at + row * p.out.row + at;
    if (ADD == 1u) { sum += a[out]; }
    a[out] = sum;
}
