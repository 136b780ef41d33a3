// What attention does to queries, keys and values before it: RMSNorm of each vector, rotation by a table of cosines and
// sines (by row and pair), and, with APPEND, writing keys and values into the state at their positions.
// Vectors of `one` (queries), then of `other` (keys), then, with APPEND, as many of `v`; one and other are written in place.
// ONE_NORM, OTHER_NORM: 0 none, 1 without weight, 2 with weight. INTERLEAVED: where the pairs lie. HALF: 1 for states of two f16
// in a word. MOST: numbers of the widest vector. Widths and rows of states are even.
// Grid: a team for each vector, WG / TEAM in a workgroup.
// needs: common/common, @team
// constants: APPEND, HALF, INTERLEAVED, MOST, ONE_NORM, OTHER_NORM, TEAM, WG

struct Vectors { view: View, heads: u32, width: u32, weight: u32, eps: f32, pairs: u32, table: u32 }
struct Params {
    one: Vectors, other: Vectors, v: View,
    rows: u32, position: u32, positions: u32, values: u32, v_width: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read_write> state: array<u32>;

var<workgroup> numbers: array<f32, WG / TEAM * MOST>;

fn put(at: u32, x: vec2<f32>) {
    if (HALF == 1u) {
        // The largest f16: what is beyond it ends there.
        state[at / 2u] = pack2x16float(clamp(x, vec2<f32>(-65504.0), vec2<f32>(65504.0)));
    } else {
        state[at] = bitcast<u32>(x.x);
        state[at + 1u] = bitcast<u32>(x.y);
    }
}

fn normed(of_one: bool, at: u32, i: u32, weight: u32, scale: f32) -> f32 {
    let x = numbers[at + i];
    let kind = select(OTHER_NORM, ONE_NORM, of_one);
    if (kind == 0u) { return x; }
    if (kind == 1u) { return x * scale; }
    return x * scale * a[weight + i];
}

fn turned(of_one: bool, vectors: Vectors, row: u32, at: u32, i: u32, scale: f32) -> f32 {
    let x = normed(of_one, at, i, vectors.weight, scale);
    if (i >= 2u * vectors.pairs) { return x; }
    var pair = i / 2u;
    var second = i % 2u == 1u;
    var mate = i ^ 1u;
    if (INTERLEAVED == 0u) {
        second = i >= vectors.pairs;
        pair = select(i, i - vectors.pairs, second);
        mate = select(i + vectors.pairs, i - vectors.pairs, second);
    }
    let y = normed(of_one, at, mate, vectors.weight, scale);
    let angle = vectors.table + (row * vectors.pairs + pair) * 2u;
    let c = bitcast<f32>(words[angle]);
    let s = bitcast<f32>(words[angle + 1u]);
    return select(x * c - y * s, x * c + y * s, second);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let of_row = p.one.heads + p.other.heads * (1u + APPEND);
    let vector = group_index(id, count) * (WG / TEAM) + team;
    let real = vector < of_row * p.rows;
    let row = min(vector / of_row, p.rows - 1u);
    var head = vector % of_row;
    var which = 0u;
    var vectors = p.one;
    if (head >= p.one.heads) {
        head -= p.one.heads;
        which = 1u;
        vectors = p.other;
        if (head >= p.other.heads) {
            head -= p.other.heads;
            which = 2u;
            vectors.view = p.v;
            vectors.width = p.v_width;
        }
    }
    let source = vectors.view.at + row * vectors.view.row + head * vectors.view.head;
    let at = team * MOST;
    var squares = 0.0;
    for (var i = lane; i < vectors.width; i += TEAM) {
        let x = a[source + i];
        numbers[at + i] = x;
        squares += x * x;
    }
    let scale = 1.0 / sqrt(team_sum(squares) / f32(vectors.width) + vectors.eps);
    workgroupBarrier();
    if (!real) { return; }
    let place = (p.position + row) % max(p.positions, 1u);
    for (var i = lane * 2u; i < vectors.width; i += TEAM * 2u) {
        if (which == 2u) {
            let to = p.values + (place * p.other.heads + head) * p.v_width + i;
            put(to, vec2<f32>(numbers[at + i], numbers[at + i + 1u]));
        } else {
            let one = which == 0u;
            let two = vec2<f32>(
                turned(one, vectors, row, at, i, scale), turned(one, vectors, row, at, i + 1u, scale));
            a[source + i] = two.x;
            a[source + i + 1u] = two.y;
            if (APPEND == 1u && which == 1u) { put((place * p.other.heads + head) * vectors.width + i, two); }
        }
    }
}
