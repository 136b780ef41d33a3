// WORDS words of a workgroup in scratch, by fours, where its own memory is too small for them.
// implements: @scratch
// needs: router/rank_experts

@group(0) @binding(2) var<storage, read_write> kept_words: array<vec4<u32>>;
var<private> words_at: u32;

fn four_words(i: u32) -> vec4<u32> { return kept_words[words_at + i]; }
fn word(i: u32) -> u32 { return kept_words[words_at + i / 4u][i % 4u]; }
fn set_word(i: u32, x: u32) { kept_words[words_at + i / 4u][i % 4u] = x; }
fn words_begin(group: u32) { words_at = group * (WORDS / 4u); }
fn words_written() {
    storageBarrier();
    workgroupBarrier();
}
