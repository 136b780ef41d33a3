// Joins the parts of `attention`, in an order that does not depend on their number:
//   m = max(m[i], sink)   out = sum_i exp(m[i] - m) y[i] / (sum_i exp(m[i] - m) sum[i] + exp(sink - m)) * sigmoid(gate)
// All that a workgroup reads is requested at once: threads side by side take COLUMNS columns, and every SLICES-th part.
// MOST: the most parts, a multiple of SLICES, up to WG.
// Grid: a workgroup of WG threads for each row, head and COLUMNS columns.
// needs: common/common, @team, attention/visible_splits, attention/softmax
// constants: MOST, WG

struct Params {
    out: View, gate: View,
    rows: u32, position: u32, window: u32, alone: u32, least: u32, most: u32, splits: u32,
    heads: u32, value: u32, spans: u32, sinks: u32, gated: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> scratch: array<f32>;

const COLUMNS = 32u;
const SLICES = WG / COLUMNS;
const EACH = MOST / SLICES;

var<workgroup> factors: array<f32, WG>;
var<workgroup> sums: array<f32, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let column = group % p.spans * COLUMNS + index % COLUMNS;
    let slice = index / COLUMNS;
    let vector = group / p.spans;
    let row = vector / p.heads;
    let head = vector % p.heads;
    if (row >= p.rows) { return; }
    let seen = seen_at(p.position + row, p.window, p.alone, p.least, p.most);
    let n = (seen.count + seen.of_split - 1u) / seen.of_split;
    let first = vector * p.splits;
    let values = p.rows * p.heads * p.splits * 2u + first * p.value + min(column, p.value - 1u);
    // What is not there is read where something is, and has no weight.
    var y: array<f32, EACH>;
    // @unroll
    for (var j = 0u; j < EACH; j++) { y[j] = scratch[values + min(slice + j * SLICES, n - 1u) * p.value]; }
    let part = (first + min(index, n - 1u)) * 2u;
    let mine = vec2(scratch[part], scratch[part + 1u]);
    var gate = 1.0;
    if (p.gated == 1u && slice == 0u && column < p.value) {
        gate = sigmoid(a[p.gate.at + row * p.gate.row + head * p.gate.head + column]);
    }
    let sink = sink_of(p.sinks, head);
    let m = max(group_max(mine.x), sink);
    let factor = select(0.0, exp(mine.x - m), index < n);
    factors[index] = factor;
    let total = group_sum(fma(mine.y, factor, select(0.0, sink_weight(p.sinks, sink, m), index == 0u)));
    workgroupBarrier();
    var sum = 0.0;
    // @unroll
    for (var j = 0u; j < EACH; j++) { sum = fma(y[j], factors[slice + j * SLICES], sum); }
    sums[index] = sum;
    workgroupBarrier();
    if (slice > 0u || column >= p.value) { return; }
    for (var j = 1u; j < SLICES; j++) { sum += sums[index + j * COLUMNS]; }
    a[p.out.at + row * p.out.row + head * p.out.head + column] = sum * share_of(total) * gate;
}
