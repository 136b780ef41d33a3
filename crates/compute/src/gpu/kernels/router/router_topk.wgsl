// The router: experts of each row and their weights, as ranking.wgsl has it.
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
    let r = Ranking(
        p.logits.at + row * p.logits.row, p.ids.at + row * p.ids.row, p.weights.at + row * p.weights.row,
        p.gate.at + row * p.gate.row, p.correction, p.expert_scale, p.scale);
    rank_row(r, row);
    weigh_row(r);
}
