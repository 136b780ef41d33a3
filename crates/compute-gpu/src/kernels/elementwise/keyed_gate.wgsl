// Value gated by the agreement of a query and a key: out = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) v
// with s = scale q . k.
// Grid: a workgroup of WG threads for each vector.
// needs: common/common, @team
// constants: WG

struct Params {
    q: View, k: View, v: View, out: View, vectors: u32, heads: u32, width: u32, scale: f32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let vector = group_index(id, count);
    if (vector >= p.vectors) { return; }
    let row = vector / p.heads;
    let head = vector % p.heads;
    let q = p.q.offset + row * p.q.row_stride + head * p.q.head_stride;
    let k = p.k.offset + row * p.k.row_stride + head * p.k.head_stride;
    let v = p.v.offset + row * p.v.row_stride;
    let out = p.out.offset + row * p.out.row_stride + head * p.out.head_stride;
    var sum = 0.0;
    for (var i = index; i < p.width; i += WG) { sum += act[q + i] * act[k + i]; }
    let s = group_sum(sum) * p.scale;
    let gate = sigmoid(sign(s) * sqrt(max(abs(s), 1e-6)));
    for (var i = index; i < p.width; i += WG) { act[out + i] = gate * act[v + i]; }
}
