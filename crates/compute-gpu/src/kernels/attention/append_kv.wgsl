// Appends rows of K and V to the KV caches of any sequences in one arena: K[position] = k[row],
// V[position] = v[row]. Rows of a segment have consecutive positions of one sequence. The table of
// the segments is in `words`, from offset `table` on, SEGMENT_WORDS words each.
// The cache is K as (position, head, width), then V from element `v_offset` on. KV_F16 1: two f16
// in a word. A word shared with another position keeps the half of that position.
// Grid: a thread for each word that is written, those of K first, in workgroups of one segment.
// needs: common/common, common/f16_range, common/segments
// constants: KV_F16, WG

struct Params {
    k: View, v: View,
    heads: u32, k_width: u32, v_width: u32, table: u32, segments: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> kv_cache: array<u32>;
@group(0) @binding(2) var<storage, read> words: array<u32>;

// `first_group`: its first workgroup. `kv_start`: start of the cache in the arena, in vectors of 16
// bytes. `v_offset`: offset of the values in the cache, in elements. `first_row`: first row in the
// views. `kv_row`: cache row of that row. `k_words` of `words` words are of K.
struct Segment {
    first_group: u32, kv_start: u32, v_offset: u32, first_row: u32, rows: u32, kv_row: u32, k_words: u32, words: u32,
}

const SEGMENT_WORDS = 8u;

fn segment_of(group: u32) -> Segment {
    let entry = segment_entry(p.table, p.segments, group);
    return Segment(
        words[entry], words[entry + 1u], words[entry + 2u], words[entry + 3u],
        words[entry + 4u], words[entry + 5u], words[entry + 6u], words[entry + 7u],
    );
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let segment = segment_of(group);
    var i = (group - segment.first_group) * WG + index;
    if (i >= segment.words) { return; }
    var source = p.k;
    var width = p.k_width;
    var base = 0u;
    if (i >= segment.k_words) {
        i -= segment.k_words;
        source = p.v;
        width = p.v_width;
        base = segment.v_offset;
    }
    let row_width = p.heads * width;
    let first = base + segment.kv_row * row_width;
    let start = segment.kv_start * 4u;
    if (KV_F16 == 0u) {
        let row = i / row_width;
        let col = i % row_width;
        kv_cache[start + first + i] = bitcast<u32>(act[source.offset + (segment.first_row + row) * source.row_stride + col / width * source.head_stride + col % width]);
        return;
    }
    let word = first / 2u + i;
    var halves = vec2<f32>();
    if (first % 2u == 1u || row_width % 2u == 1u) { halves = unpack2x16float(kv_cache[start + word]); }
    for (var j = 0u; j < 2u; j++) {
        let element = word * 2u + j;
        if (element >= first && element < first + segment.rows * row_width) {
            let row = (element - first) / row_width;
            let col = (element - first) % row_width;
            halves[j] = act[source.offset + (segment.first_row + row) * source.row_stride + col / width * source.head_stride + col % width];
        }
    }
    kv_cache[start + word] = pack_f16(halves);
}
