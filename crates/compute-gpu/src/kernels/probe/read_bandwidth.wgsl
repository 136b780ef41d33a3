// Read bandwidth: each thread reduces EACH vectors by exclusive or. The blocks of WG EACH vectors
// are read in turn, coalesced, and repeatedly. Grid: a workgroup for each block and repeat.
// constants: EACH, WG

struct Params { blocks: u32, groups: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = id.y * count.x + id.x;
    if (group >= p.groups) { return; }
    let block = group % p.blocks;
    var reduced = vec4<u32>();
    for (var i = 0u; i < EACH; i++) {
        reduced ^= x[(block * EACH + i) * WG + index];
    }
    result[block * WG + index] = reduced.x ^ reduced.y ^ reduced.z ^ reduced.w;
}
