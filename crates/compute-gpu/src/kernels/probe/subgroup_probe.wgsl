// Layout of subgroups: writes the subgroup size and the thread's index in its subgroup, packed in
// a word. Grid: one workgroup.
// constants: WG

@group(0) @binding(0) var<storage, read_write> result: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) thread: u32,
) {
    result[index] = size << 16u | thread;
}
