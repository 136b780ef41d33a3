// Converts keys and values to f16 for segment_cooperative.wgsl, which reads them once for each tile
// of queries. A row has the keys of all heads, then the values of all heads. Beyond 65504, the
// largest f16, they are clamped.
// Grid: a thread for each word, of two elements.
// needs: common/common, common/f16_range
// constants: K_WIDTH, V_WIDTH, WG

struct Params { k: View, v: View, heads: u32, words: u32 }
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
    let row_words = p.heads * (K_WIDTH + V_WIDTH) / 2u;
    let row = word / row_words;
    let element = word % row_words * 2u;
    let keys = p.heads * K_WIDTH;
    if (element < keys) {
        scratch[word] = two_elements(p.k, row, element, K_WIDTH);
    } else {
        scratch[word] = two_elements(p.v, row, element - keys, V_WIDTH);
    }
}

// Two elements of a row of a view, whose heads have `width`.
fn two_elements(view: View, row: u32, element: u32, width: u32) -> u32 {
    let at = view.offset + row * view.row_stride + element / width * view.head_stride
        + element % width;
    return pack_f16(vec2<f32>(act[at], act[at + 1u]));
}
