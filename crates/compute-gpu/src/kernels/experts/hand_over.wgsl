// Router ids and inputs of experts, copied to the memory that card and host share: ids from its
// start on, inputs from element `input_at` on, both without gaps.
// Grid: a thread for each id and each input.
// needs: common/common
// constants: WG

struct Params { ids: View, input: View, k: u32, ids_count: u32, width: u32, count: u32, input_at: u32 }
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> exchange: array<f32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let i = group_index(id, count) * WG + index;
    if (i >= p.count) { return; }
    if (i < p.ids_count) {
        exchange[i] = act[p.ids.offset + i / p.k * p.ids.row_stride + i % p.k];
        return;
    }
    let j = i - p.ids_count;
    exchange[p.input_at + j] = act[p.input.offset + j / p.width * p.input.row_stride + j % p.width];
}
