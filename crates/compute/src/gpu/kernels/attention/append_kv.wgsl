// Appends rows of K and V to the KV cache: K[position] = k[row], V[position] = v[row]. Positions
// are consecutive.
// The cache is K as (position, head, width), then V from element `v_offset` on. KV_F16 1: two f16
// in a word. A word shared with another position keeps the half of that position.
// Grid: a thread for each word that is written, those of K first.
// needs: common/common, common/f16_range
// constants: KV_F16, WG

struct Params {
    k: View, v: View,
    heads: u32, k_width: u32, v_width: u32, rows: u32, kv_row: u32, v_offset: u32, k_words: u32, words: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> kv_cache: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    var i = group_index(id, count) * WG + index;
    if (i >= p.words) { return; }
    var source = p.k;
    var width = p.k_width;
    var base = 0u;
    if (i >= p.k_words) {
        i -= p.k_words;
        source = p.v;
        width = p.v_width;
        base = p.v_offset;
    }
    let row_width = p.heads * width;
    let first = base + p.kv_row * row_width;
    if (KV_F16 == 0u) {
        let row = i / row_width;
        let col = i % row_width;
        kv_cache[first + i] = bitcast<u32>(act[source.offset + row * source.row_stride + col / width * source.head_stride + col % width]);
        return;
    }
    let word = first / 2u + i;
    var halves = vec2<f32>();
    if (first % 2u == 1u || row_width % 2u == 1u) { halves = unpack2x16float(kv_cache[word]); }
    for (var j = 0u; j < 2u; j++) {
        let element = word * 2u + j;
        if (element >= first && element < first + p.rows * row_width) {
            let row = (element - first) / row_width;
            let col = (element - first) % row_width;
            halves[j] = act[source.offset + row * source.row_stride + col / width * source.head_stride + col % width];
        }
    }
    kv_cache[word] = pack_f16(halves);
}
