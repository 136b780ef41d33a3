// Gate per head or per element: x *= function(gate). FUNCTION: 0 sigmoid, 1 softplus,
// 2 identity.
// ELEMENT_GATES: 1 if each element has a gate, 0 if a head has one.
// Grid: a thread for each element.
// needs: common/common, common/exp_log
// constants: ELEMENT_GATES, FUNCTION, WG

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
    if (FUNCTION == 0u) {
        act[x] *= sigmoid(gate);
    } else if (FUNCTION == 2u) {
        act[x] *= gate;
    } else {
        act[x] *= max(gate, 0.0) + log1p_of(exp_of(-abs(gate)));
    }
}
