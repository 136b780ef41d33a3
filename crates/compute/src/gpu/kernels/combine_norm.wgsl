// The sum of combine.wgsl with ADD, then RMSNorm of it: a layer's end and the next one's beginning.
// SHARED, GATED: as there.
// EACH: numbers of a row that a thread keeps, at most; K: parts of a row.
// Grid: a workgroup of WG threads for each row.

struct Params {
    parts: View, weights: View, shared_out: View, gate: View, out: View, normed: View,
    rows: u32, width: u32, weight: u32, eps: f32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let row = group_index(id, count);
    if (row >= p.rows) { return; }
    let parts = p.parts.at + row * K * p.parts.row;
    let out = p.out.at + row * p.out.row;
    var gate = 1.0;
    if (GATED == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row]); }
    var share: array<f32, K>;
    for (var rank = 0u; rank < K; rank++) { share[rank] = a[p.weights.at + row * p.weights.row + rank]; }
    var kept: array<f32, EACH>;
    var squares = 0.0;
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i >= p.width) { break; }
        var sum = 0.0;
        for (var rank = 0u; rank < K; rank++) { sum += share[rank] * a[parts + rank * p.parts.row + i]; }
        if (SHARED == 1u) { sum += gate * a[p.shared_out.at + row * p.shared_out.row + i]; }
        sum += a[out + i];
        a[out + i] = sum;
        kept[j] = sum;
        squares += sum * sum;
    }
    let scale = 1.0 / sqrt(group_sum(squares) / f32(p.width) + p.eps);
    let normed = p.normed.at + row * p.normed.row;
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i < p.width) { a[normed + i] = kept[j] * scale * a[p.weight + i]; }
    }
}
