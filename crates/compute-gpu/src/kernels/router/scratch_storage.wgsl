// SCRATCH_WORDS words of scratch per workgroup in a storage buffer, by vectors of four, if
// workgroup memory is too small.
// implements: @scratch
// needs: router/rank_experts

@group(0) @binding(2) var<storage, read_write> scratch_words: array<vec4<u32>>;
var<private> scratch_base: u32;

fn scratch_vec(i: u32) -> vec4<u32> { return scratch_words[scratch_base + i]; }
fn scratch_word(i: u32) -> u32 { return scratch_words[scratch_base + i / 4u][i % 4u]; }
fn set_scratch(i: u32, x: u32) { scratch_words[scratch_base + i / 4u][i % 4u] = x; }
fn scratch_begin(group: u32) { scratch_base = group * (SCRATCH_WORDS / 4u); }
fn scratch_barrier() {
    storageBarrier();
    workgroupBarrier();
}
