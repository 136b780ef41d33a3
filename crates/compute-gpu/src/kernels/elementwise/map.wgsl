// Elementwise maps. KIND 0: x += y. 1: x *= factor. 2: x = factor tanh(x / factor) (soft cap).
// 3: x = silu(x).
// Grid: a thread for each element.
// needs: common/common
// constants: KIND, WG

struct Params { x: View, y: View, count: u32, width: u32, factor: f32 }
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
    let x = p.x.offset + row * p.x.row_stride + i % p.width;
    if (KIND == 0u) {
        act[x] += act[p.y.offset + row * p.y.row_stride + i % p.width];
    } else if (KIND == 1u) {
        act[x] *= p.factor;
    } else if (KIND == 3u) {
        act[x] = silu(act[x]);
    } else {
        act[x] = p.factor * tanh_of(act[x] / p.factor);
    }
}
