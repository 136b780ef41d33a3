// What a router chose, sorted by expert: the list of uses and the table of tiles of tile.wgsl. Uses of one expert keep
// their order. The tiles of expert e begin at entry first / ROWS + e, where `first` is its first use in the list; entries
// that no expert needs are empty.
// Grid: a workgroup of WG threads for each expert.
// needs: common/common
// constants: ROWS, WG

struct Params { ids: u32, row: u32, k: u32, uses: u32, list: u32, tiles: u32, experts: u32 }
var<immediate> p: Params;

// Bank and first byte of each expert's slot.
@group(0) @binding(1) var<storage, read> slots: array<u32>;
@group(0) @binding(2) var<storage, read_write> s: array<u32>;

// Uses of this expert, and of those before it, up to and with a thread's share.
var<workgroup> counts: array<vec2<u32>, WG>;

fn expert_of(i: u32) -> u32 {
    return u32(a[p.ids + i / p.k * p.row + i % p.k]);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let expert = group_index(id, count);
    if (expert >= p.experts) { return; }
    let share = (p.uses + WG - 1u) / WG;
    let begin = min(index * share, p.uses);
    let end = min(begin + share, p.uses);
    var own = vec2<u32>(0u);
    for (var i = begin; i < end; i++) {
        let chosen = expert_of(i);
        own += vec2<u32>(u32(chosen == expert), u32(chosen < expert));
    }
    counts[index] = own;
    workgroupBarrier();
    for (var back = 1u; back < WG; back *= 2u) {
        var before = vec2<u32>(0u);
        if (index >= back) { before = counts[index - back]; }
        workgroupBarrier();
        counts[index] += before;
        workgroupBarrier();
    }
    let all = counts[WG - 1u].x;
    let first = counts[WG - 1u].y;
    var at = first + counts[index].x - own.x;
    for (var i = begin; i < end; i++) {
        if (expert_of(i) == expert) {
            s[p.list + at * 2u] = i / p.k;
            s[p.list + at * 2u + 1u] = i;
            at++;
        }
    }
    let entries = first / ROWS + expert;
    let ends = (first + all) / ROWS + expert + 1u;
    for (var entry = entries + index; entry < ends; entry += WG) {
        let done = min((entry - entries) * ROWS, all);
        let to = p.tiles + entry * 4u;
        s[to] = slots[expert * 2u + 1u];
        s[to + 1u] = slots[expert * 2u];
        s[to + 2u] = first + done;
        s[to + 3u] = min(all - done, ROWS);
    }
}
