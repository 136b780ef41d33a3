// out = activation(gate, up). Grid: a thread for each number.
// needs: common/common, common/gated_activation
// constants: WG

struct Params { gate: View, up: View, out: View, numbers: u32, width: u32, alpha: f32, limit: f32 }
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
    let gate = a[p.gate.at + row * p.gate.row + at];
    let up = a[p.up.at + row * p.up.row + at];
    a[p.out.at + row * p.out.row + at] = activate(gate, up, p.alpha, p.limit);
}
