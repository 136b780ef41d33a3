// KIND 0: x += y. 1: x *= factor. 2: x = factor tanh(x / factor). Grid: a thread for each number.
// needs: common/common
// constants: KIND, WG

struct Params { x: View, y: View, numbers: u32, width: u32, factor: f32 }
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
    let x = p.x.at + row * p.x.row + i % p.width;
    if (KIND == 0u) {
        a[x] += a[p.y.at + row * p.y.row + i % p.width];
    } else if (KIND == 1u) {
        a[x] *= p.factor;
    } else {
        a[x] = p.factor * tanh_of(a[x] / p.factor);
    }
}
