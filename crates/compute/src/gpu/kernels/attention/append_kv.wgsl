// Writes rows of keys and values into a state, at positions that lie one after another.
// The state is (positions, heads, width) of keys and then, from number `values` on, of values; HALF 1: two f16 in a word.
// A word whose other half belongs to another position keeps that half.
// Grid: a thread for each word that is touched, those of the keys first.
// needs: common/common
// constants: HALF, WG

struct Params {
    k: View, v: View,
    heads: u32, key: u32, value: u32, rows: u32, place: u32, values: u32, words_of_keys: u32, words: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> state: array<u32>;

// The largest f16: what is beyond it ends there.
const LARGEST = 65504.0;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    var i = group_index(id, count) * WG + index;
    if (i >= p.words) { return; }
    var source = p.k;
    var width = p.key;
    var base = 0u;
    if (i >= p.words_of_keys) {
        i -= p.words_of_keys;
        source = p.v;
        width = p.value;
        base = p.values;
    }
    let of_row = p.heads * width;
    let first = base + p.place * of_row;
    if (HALF == 0u) {
        let row = i / of_row;
        let at = i % of_row;
        state[first + i] = bitcast<u32>(a[source.at + row * source.row + at / width * source.head + at % width]);
        return;
    }
    let word = first / 2u + i;
    var two = vec2<f32>();
    if (first % 2u == 1u || of_row % 2u == 1u) { two = unpack2x16float(state[word]); }
    for (var j = 0u; j < 2u; j++) {
        let n = word * 2u + j;
        if (n >= first && n < first + p.rows * of_row) {
            let row = (n - first) / of_row;
            let at = (n - first) % of_row;
            let x = a[source.at + row * source.row + at / width * source.head + at % width];
            two[j] = clamp(x, -LARGEST, LARGEST);
        }
    }
    state[word] = pack2x16float(two);
}
