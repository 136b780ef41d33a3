// Rows of x into given rows of out, copied or, with ADD, added. The rows are listed in `words`,
// from offset `list` on. Grid: a thread for each element of x.
// needs: common/common
// constants: ADD, WG

struct Params { x: View, out: View, count: u32, width: u32, list: u32 }
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;

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
    let out = p.out.offset + words[p.list + row] * p.out.row_stride + col;
    let x = act[p.x.offset + row * p.x.row_stride + col];
    if (ADD == 1u) {
        act[out] += x;
    } else {
        act[out] = x;
    }
}
