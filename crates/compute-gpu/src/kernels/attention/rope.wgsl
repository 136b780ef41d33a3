// RoPE: rotates pair i of each vector by the angle whose cosine and sine (times the op's scale)
// are in a table, by row and pair. Elements after the pairs are copied. Layout of the pairs: 0
// halves, 1 neighbours, 2 halves of each half.
// Grid: a thread for each pair and for each element after the pairs.
// needs: common/common
// constants: WG

struct Params {
    x: View, out: View,
    vectors: u32, heads: u32, width: u32, pairs: u32, table: u32, pair_layout: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let n = p.width - p.pairs;
    let work = group_index(id, count) * WG + index;
    let vector = work / n;
    let i = work % n;
    if (vector >= p.vectors) { return; }
    let row = vector / p.heads;
    let x = p.x.offset + row * p.x.row_stride + vector % p.heads * p.x.head_stride;
    let out = p.out.offset + row * p.out.row_stride + vector % p.heads * p.out.head_stride;
    if (i >= p.pairs) {
        let rest = i + p.pairs;
        act[out + rest] = act[x + rest];
        return;
    }
    let angle = p.table + (row * p.pairs + i) * 2u;
    let c = bitcast<f32>(words[angle]);
    let s = bitcast<f32>(words[angle + 1u]);
    let half = select(p.pairs, p.pairs / 2u, p.pair_layout == 2u);
    let first = select(i + i / half * half, 2u * i, p.pair_layout == 1u);
    let second = first + select(half, 1u, p.pair_layout == 1u);
    let y = act[x + first];
    let z = act[x + second];
    act[out + first] = y * c - z * s;
    act[out + second] = z * c + y * s;
}
