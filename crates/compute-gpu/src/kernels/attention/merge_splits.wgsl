// Merges the splits of attention (flash-decoding), in an order that does not depend on their
// number: m = max(m[i], sink), out = sum_i exp(m[i] - m) y[i] / (sum_i exp(m[i] - m) sum[i] +
// exp(sink - m)) * sigmoid(gate).
// All loads of a workgroup are in flight at once: threads side by side take COLUMNS columns, each
// for every SLICES-th split. MAX_SPLITS: most splits, a multiple of SLICES, up to WG.
// Grid: a workgroup of WG threads for each row, head and COLUMNS columns.
// needs: common/common, @team, @positions, attention/visible_splits, attention/softmax
// constants: MAX_SPLITS, WG

struct Params {
    out: View, gate: View,
    rows: u32, splits: Splits,
    heads: u32, v_width: u32, column_groups: u32, sinks: u32, gated: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> scratch: array<f32>;

const COLUMNS = 32u;
const SLICES = WG / COLUMNS;
const SPLITS_PER_SLICE = MAX_SPLITS / SLICES;

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
    let column = group % p.column_groups * COLUMNS + index % COLUMNS;
    let slice = index / COLUMNS;
    let vector = group / p.column_groups;
    let row = vector / p.heads;
    let head = vector % p.heads;
    if (row >= p.rows) { return; }
    let visible = visible_at(position_of(p.splits.position, row), p.splits);
    let n = (visible.count + visible.per_split - 1u) / visible.per_split;
    let first_split = vector * p.splits.count;
    let v_offset = p.rows * p.heads * p.splits.count * 2u + first_split * p.v_width + min(column, p.v_width - 1u);
    // Splits past the end are clamped to the last one and have weight 0.
    var y: array<f32, SPLITS_PER_SLICE>;
    // @unroll
    for (var j = 0u; j < SPLITS_PER_SLICE; j++) { y[j] = scratch[v_offset + min(slice + j * SLICES, n - 1u) * p.v_width]; }
    let split_offset = (first_split + min(index, n - 1u)) * 2u;
    let split = vec2(scratch[split_offset], scratch[split_offset + 1u]);
    var gate = 1.0;
    if (p.gated == 1u && slice == 0u && column < p.v_width) {
        gate = sigmoid(act[p.gate.offset + row * p.gate.row_stride + head * p.gate.head_stride + column]);
    }
    let sink = sink_score(p.sinks, head);
    let m = max(group_max(split.x), sink);
    let factor = select(0.0, exp(split.x - m), index < n);
    factors[index] = factor;
    let total = group_sum(fma(split.y, factor, select(0.0, sink_weight(p.sinks, sink, m), index == 0u)));
    workgroupBarrier();
    var sum = 0.0;
    // @unroll
    for (var j = 0u; j < SPLITS_PER_SLICE; j++) { sum = fma(y[j], factors[slice + j * SLICES], sum); }
    sums[index] = sum;
    workgroupBarrier();
    if (slice > 0u || column >= p.v_width) { return; }
    for (var j = 1u; j < SLICES; j++) { sum += sums[index + j * COLUMNS]; }
    act[p.out.offset + row * p.out.row_stride + head * p.out.head_stride + column] = sum * reciprocal(total) * gate;
}
