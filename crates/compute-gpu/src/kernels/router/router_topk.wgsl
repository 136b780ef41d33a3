// Router top-k: ids and weights of the selected experts of each row, as in rank_experts.wgsl.
// Grid: a workgroup of WG threads for each row.
// needs: common/common, @team, router/rank_experts
// constants: WG

struct Params {
    logits: View, ids: View, weights: View, gate: View, correction: u32, expert_scale: u32, rows: u32, scale: f32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let row = group_index(id, count);
    if (row >= p.rows) { return; }
    let r = Routing(
        p.logits.offset + row * p.logits.row_stride, p.ids.offset + row * p.ids.row_stride, p.weights.offset + row * p.weights.row_stride,
        p.gate.offset + row * p.gate.row_stride, p.correction, p.expert_scale, p.scale);
    find_top_k(r, row);
    write_weights(r);
}
