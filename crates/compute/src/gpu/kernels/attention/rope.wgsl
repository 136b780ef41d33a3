// Rotates pair i of each vector by the angle whose cosine and sine (times the op's scale) stand in a table, by row and
// pair; numbers behind the pairs are copied.
// Grid: a thread for each pair and for each number behind them.
// needs: common/common
// constants: WG

struct Params {
    x: View, out: View,
    vectors: u32, heads: u32, width: u32, pairs: u32, table: u32, interleaved: u32,
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
    let x = p.x.at + row * p.x.row + vector % p.heads * p.x.head;
    let out = p.out.at + row * p.out.row + vector % p.heads * p.out.head;
    if (i >= p.pairs) {
        let behind = i + p.pairs;
        a[out + behind] = a[x + behind];
        return;
    }
    let at = p.table + (row * p.pairs + i) * 2u;
    let c = bitcast<f32>(words[at]);
    let s = bitcast<f32>(words[at + 1u]);
    let one = select(i, 2u * i, p.interleaved == 1u);
    let other = select(i + p.pairs, 2u * i + 1u, p.interleaved == 1u);
    let y = a[x + one];
    let z = a[x + other];
    a[out + one] = y * c - z * s;
    a[out + other] = z * c + y * s;
}
