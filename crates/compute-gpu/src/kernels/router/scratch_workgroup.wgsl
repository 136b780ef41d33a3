// SCRATCH_WORDS words of scratch in workgroup memory, by vectors of four.
// implements: @scratch
// needs: router/rank_experts

var<workgroup> scratch_words: array<vec4<u32>, SCRATCH_WORDS / 4u>;

fn scratch_vec(i: u32) -> vec4<u32> { return scratch_words[i]; }
fn scratch_word(i: u32) -> u32 { return scratch_words[i / 4u][i % 4u]; }
fn set_scratch(i: u32, x: u32) { scratch_words[i / 4u][i % 4u] = x; }
fn scratch_begin(group: u32) {}
fn scratch_barrier() { workgroupBarrier(); }
