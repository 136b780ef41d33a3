// Gate per head or per element: x *= function(gate), as in gate_function.wgsl.
// ELEMENT_GATES: 1 if each element has a gate, 0 if a head has one.
// Grid: a thread for each element.
// needs: common/common, common/gate_function
// constants: ELEMENT_GATES, WG

struct Params { x: View, gate: View, count: u32, heads: u32, width: u32 }
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.count) { return; }
    let col = i % p.width;
    let head = i / p.width % p.heads;
    let row = i / p.width / p.heads;
    let gates = p.gate.offset + row * p.gate.row_stride + head * p.gate.head_stride;
    let gate = act[gates + ELEMENT_GATES * col];
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride + col;
    act[x] *= gate_function(gate);
}
