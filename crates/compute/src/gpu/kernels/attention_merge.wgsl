// Joins the parts of `attention`, in their order:
//   m = max(m[i], sink)   out = sum_i exp(m[i] - m) y[i] / (sum_i exp(m[i] - m) sum[i] + exp(sink - m)) * sigmoid(gate)
// Grid: a workgroup of WG threads for each row, head and SPAN columns.

struct Params {
    out: View, gate: View,
    rows: u32, position: u32, window: u32, least: u32, most: u32, splits: u32,
    heads: u32, value: u32, spans: u32, sinks: u32, gated: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> scratch: array<f32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let column = group % p.spans * WG + index;
    let vector = group / p.spans;
    let row = vector / p.heads;
    let head = vector % p.heads;
    if (row >= p.rows || column >= p.value) { return; }
    let seen = seen_at(p.position + row, p.window, p.least, p.most);
    let n = (seen.count + seen.of_split - 1u) / seen.of_split;
    let first = vector * p.splits;
    let values = p.rows * p.heads * p.splits * 2u + first * p.value + column;
    let sink = sink_of(p.sinks, head);
    var m = sink;
    for (var i = 0u; i < n; i++) { m = max(m, scratch[(first + i) * 2u]); }
    var total = sink_weight(p.sinks, sink, m);
    var y = 0.0;
    for (var i = 0u; i < n; i++) {
        let factor = exp(scratch[(first + i) * 2u] - m);
        total = fma(scratch[(first + i) * 2u + 1u], factor, total);
        y = fma(scratch[values + i * p.value], factor, y);
    }
    var gate = 1.0;
    if (p.gated == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row + head * p.gate.head + column]); }
    a[p.out.at + row * p.out.row + head * p.out.head + column] = y * share_of(total) * gate;
}
