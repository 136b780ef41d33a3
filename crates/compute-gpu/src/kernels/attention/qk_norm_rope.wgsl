// QK norm, RoPE and KV append in one pass before attention: RMSNorm of each vector, rotation by a
// table of cosines and sines (by row and pair) and, with APPEND, writing K and V to the KV cache.
// Vectors: heads of q, then of k, then, with APPEND, of v. q and k are updated in place. Q_NORM,
// K_NORM: 0 none, 1 without weight, 2 with weight. INTERLEAVED: pairs are neighbours. KV_F16: f16
// in the KV cache. MAX_WIDTH: widest vector. Widths and rows of the cache are even.
// Grid: a team for each vector, WG / TEAM in a workgroup.
// needs: common/common, common/f16_range, @team
// constants: APPEND, INTERLEAVED, KV_F16, K_NORM, MAX_WIDTH, Q_NORM, TEAM, WG

struct Vectors { view: View, heads: u32, width: u32, weight: u32, eps: f32, pairs: u32, table: u32 }
struct Params {
    q: Vectors, k: Vectors, v: View,
    rows: u32, position: u32, capacity: u32, v_offset: u32, v_width: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
@group(0) @binding(2) var<storage, read_write> kv_cache: array<u32>;

var<workgroup> vector_values: array<f32, WG / TEAM * MAX_WIDTH>;

fn write_kv(element: u32, x: vec2<f32>) {
    if (KV_F16 == 1u) {
        kv_cache[element / 2u] = pack_f16(x);
    } else {
        kv_cache[element] = bitcast<u32>(x.x);
        kv_cache[element + 1u] = bitcast<u32>(x.y);
    }
}

fn normalized(is_q: bool, base: u32, i: u32, weight: u32, scale: f32) -> f32 {
    let x = vector_values[base + i];
    let norm = select(K_NORM, Q_NORM, is_q);
    if (norm == 0u) { return x; }
    if (norm == 1u) { return x * scale; }
    return x * scale * act[weight + i];
}

fn rotated(is_q: bool, vectors: Vectors, row: u32, base: u32, i: u32, scale: f32) -> f32 {
    let x = normalized(is_q, base, i, vectors.weight, scale);
    if (i >= 2u * vectors.pairs) { return x; }
    var pair = i / 2u;
    var second = i % 2u == 1u;
    var partner = i ^ 1u;
    if (INTERLEAVED == 0u) {
        second = i >= vectors.pairs;
        pair = select(i, i - vectors.pairs, second);
        partner = select(i + vectors.pairs, i - vectors.pairs, second);
    }
    let y = normalized(is_q, base, partner, vectors.weight, scale);
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
    let row_vectors = p.q.heads + p.k.heads * (1u + APPEND);
    let vector = group_index(id, count) * (WG / TEAM) + team;
    let in_range = vector < row_vectors * p.rows;
    let row = min(vector / row_vectors, p.rows - 1u);
    var head = vector % row_vectors;
    var kind = 0u;
    var vectors = p.q;
    if (head >= p.q.heads) {
        head -= p.q.heads;
        kind = 1u;
        vectors = p.k;
        if (head >= p.k.heads) {
            head -= p.k.heads;
            kind = 2u;
            vectors.view = p.v;
            vectors.width = p.v_width;
        }
    }
    let source = vectors.view.offset + row * vectors.view.row_stride + head * vectors.view.head_stride;
    let base = team * MAX_WIDTH;
    var squares = 0.0;
    for (var i = lane; i < vectors.width; i += TEAM) {
        let x = act[source + i];
        vector_values[base + i] = x;
        squares += x * x;
    }
    let scale = 1.0 / sqrt(team_sum(squares) / f32(vectors.width) + vectors.eps);
    workgroupBarrier();
    if (!in_range) { return; }
    let kv_row = (p.position + row) % max(p.capacity, 1u);
    for (var i = lane * 2u; i < vectors.width; i += TEAM * 2u) {
        if (kind == 2u) {
            let dst = p.v_offset + (kv_row * p.k.heads + head) * p.v_width + i;
            write_kv(dst, vec2<f32>(vector_values[base + i], vector_values[base + i + 1u]));
        } else {
            let is_query = kind == 0u;
            let pair = vec2<f32>(
                rotated(is_query, vectors, row, base, i, scale), rotated(is_query, vectors, row, base, i + 1u, scale));
            act[source + i] = pair.x;
            act[source + i + 1u] = pair.y;
            if (APPEND == 1u && kind == 1u) { write_kv((kv_row * p.k.heads + head) * vectors.width + i, pair); }
        }
    }
}
