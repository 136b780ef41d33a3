// Gated linear unit: out = activation(gate, up). Grid: a thread for each element.
// needs: common/common, common/gated_activation
// constants: WG

struct Params { gate: View, up: View, out: View, count: u32, width: u32, alpha: f32, limit: f32 }
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
    let gate = act[p.gate.offset + row * p.gate.row_stride + col];
    let up = act[p.up.offset + row * p.up.row_stride + col];
    act[p.out.offset + row * p.out.row_stride + col] = activate(gate, up, p.alpha, p.limit);
}
