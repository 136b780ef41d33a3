// Results of experts that the host computed, copied from the memory that card and host share: rows
// of experts without a slot, of a row for each id.
// Grid: a thread for each element of out.
// needs: common/common
// constants: WG

struct Params { ids: View, out: View, k: u32, width: u32, count: u32 }
var<immediate> p: Params;
// Slot table: bank and first byte of each expert.
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read> results: array<f32>;

const NO_BANK = 0xffffffffu;

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
    let expert = u32(act[p.ids.offset + row / p.k * p.ids.row_stride + row % p.k]);
    if (words[2u * expert] != NO_BANK) { return; }
    act[p.out.offset + row * p.out.row_stride + col] = results[i];
}
