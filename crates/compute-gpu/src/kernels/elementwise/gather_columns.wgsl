// Columns in another order: out[row][j] = x[row][orders[0][j]], or with IDS: 1
// out[row k + rank][j] = x[row][orders[ids[row][rank]][j]]. Orders are integers in f32.
// Grid: a thread for each element of out.
// needs: common/common
// constants: IDS, WG

struct Params {
    x: View, orders: View, ids: View, out: View, count: u32, width: u32, k: u32, orders_count: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.count) { return; }
    let out_row = i / p.width;
    let col = i % p.width;
    let row = out_row / p.k;
    var order = 0u;
    if (IDS == 1u) {
        let expert = u32(act[p.ids.offset + row * p.ids.row_stride + out_row % p.k]);
        order = min(expert, p.orders_count - 1u);
    }
    let src = min(u32(act[p.orders.offset + order * p.orders.row_stride + col]), p.width - 1u);
    act[p.out.offset + out_row * p.out.row_stride + col] = act[p.x.offset + row * p.x.row_stride + src];
}
