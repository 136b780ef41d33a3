// What subgroups are: of each thread the size of its subgroup and its place in it, packed in a word.
// Grid: one workgroup.
// constants: WG

@group(0) @binding(0) var<storage, read_write> seen: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) place: u32,
) {
    seen[index] = size << 16u | place;
}
