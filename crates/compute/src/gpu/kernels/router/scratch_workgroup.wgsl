// WORDS words of a workgroup in its own memory, by fours.
// implements: @scratch
// needs: router/rank_experts

var<workgroup> kept_words: array<vec4<u32>, WORDS / 4u>;

fn four_words(i: u32) -> vec4<u32> { return kept_words[i]; }
fn word(i: u32) -> u32 { return kept_words[i / 4u][i % 4u]; }
fn set_word(i: u32, x: u32) { kept_words[i / 4u][i % 4u] = x; }
fn words_begin(group: u32) {}
fn words_written() { workgroupBarrier(); }
