// Reads memory and does little else: of each thread the exclusive or of its words. All workgroups read the same pieces in turn.
// Layout: pieces of WG EACH vectors, of which neighbouring threads read neighbours. Grid: a workgroup for each piece and turn.
// constants: EACH, WG

struct Params { pieces: u32, groups: u32 }
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> seen: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = id.y * count.x + id.x;
    if (group >= p.groups) { return; }
    let piece = group % p.pieces;
    var all = vec4<u32>();
    for (var i = 0u; i < EACH; i++) {
        all ^= x[(piece * EACH + i) * WG + index];
    }
    seen[piece * WG + index] = all.x ^ all.y ^ all.z ^ all.w;
}
