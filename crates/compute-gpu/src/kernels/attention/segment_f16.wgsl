// Converts keys and values to f16 for segment_cooperative.wgsl, which reads them once for each tile
// of queries: dense rows of all heads, first the keys, from word `values` on the values. Beyond
// 65504, the largest f16, they are clamped.
// Grid: a thread for each word, of two elements.
// needs: common/common, common/f16_range
// constants: K_WIDTH, V_WIDTH, WG

struct Params { k: View, v: View, heads: u32, values: u32, words: u32 }
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read_write> scratch: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let word = group_index(id, count) * WG + index;
    if (word >= p.words) { return; }
    if (word < p.values) {
        scratch[word] = two_elements(p.k, word, K_WIDTH);
    } else {
        scratch[word] = two_elements(p.v, word - p.values, V_WIDTH);
    }
}

// Elements 2 word and 2 word + 1 of all heads of a view, whose heads have `width`.
fn two_elements(view: View, word: u32, width: u32) -> u32 {
    let row_words = p.heads * width / 2u;
    let element = word % row_words * 2u;
    let at = view.offset + word / row_words * view.row_stride
        + element / width * view.head_stride + element % width;
    return pack_f16(vec2<f32>(act[at], act[at + 1u]));
}
