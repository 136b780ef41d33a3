// Counting sort of the router's choices by expert: writes the list of assignments and the table of
// tiles of gemm_tile.wgsl. Assignments of an expert keep their order. The tiles of expert e start
// at entry first / TILE_M + e, where `first` is its first assignment in the list. Entries that no
// expert needs are empty.
// Grid: a workgroup of WG threads for each expert.
// needs: common/common
// constants: TILE_M, WG

struct Params { ids: u32, ids_row_stride: u32, k: u32, assignments: u32, list: u32, table: u32, experts: u32 }
var<immediate> p: Params;

// Bank and first byte of each expert's slot.
@group(0) @binding(1) var<storage, read> slots: array<u32>;
@group(0) @binding(2) var<storage, read_write> scratch: array<u32>;

// Assignments of this expert, and of those before it, up to and including a thread's range.
var<workgroup> counts: array<vec2<u32>, WG>;

fn expert_at(i: u32) -> u32 {
    return u32(act[p.ids + i / p.k * p.ids_row_stride + i % p.k]);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let expert = group_index(id, count);
    if (expert >= p.experts) { return; }
    let per_thread = (p.assignments + WG - 1u) / WG;
    let start = min(index * per_thread, p.assignments);
    let end = min(start + per_thread, p.assignments);
    var mine = vec2<u32>(0u);
    for (var i = start; i < end; i++) {
        let selected = expert_at(i);
        mine += vec2<u32>(u32(selected == expert), u32(selected < expert));
    }
    counts[index] = mine;
    workgroupBarrier();
    for (var distance = 1u; distance < WG; distance *= 2u) {
        var before = vec2<u32>(0u);
        if (index >= distance) { before = counts[index - distance]; }
        workgroupBarrier();
        counts[index] += before;
        workgroupBarrier();
    }
    let all = counts[WG - 1u].x;
    let first = counts[WG - 1u].y;
    var place = first + counts[index].x - mine.x;
    for (var i = start; i < end; i++) {
        if (expert_at(i) == expert) {
            scratch[p.list + place * 2u] = i / p.k;
            scratch[p.list + place * 2u + 1u] = i;
            place++;
        }
    }
    let entries = first / TILE_M + expert;
    let ends = (first + all) / TILE_M + expert + 1u;
    for (var entry = entries + index; entry < ends; entry += WG) {
        let done = min((entry - entries) * TILE_M, all);
        let dst = p.table + entry * 4u;
        scratch[dst] = slots[expert * 2u + 1u];
        scratch[dst + 1u] = slots[expert * 2u];
        scratch[dst + 2u] = first + done;
        scratch[dst + 3u] = min(all - done, TILE_M);
    }
}
