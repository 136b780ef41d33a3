// Prefill attention (flash attention) on cooperative matrices: out = softmax(scale q K^T, sink) V
// * sigmoid(gate), as attention_tiled.wgsl computes it. 16 x 16 x 16 products of f16 with f32
// sums.
// A workgroup takes QUERIES queries, a subgroup 16 of them, kept in matrices. It loops over tiles
// of TILE_KV positions. Scores go through workgroup memory. Two threads per query turn them into
// softmax weights, relative to a reference score. The reference is raised only when a score
// exceeds it by RESCALE_MARGIN; the sums are then rescaled through workgroup memory. That is rare
// and decided per query, so a query's bits do not depend on other queries.
// WG: 2 QUERIES, in subgroups of 32. K_WIDTH, V_WIDTH: head widths, multiples of 16, at most 128.
// The KV cache is f16.
// Grid: as attention_tiled.wgsl.
// needs: common/common, common/f16_range, attention/span_tiles, attention/softmax
// enables: f16, wgpu_cooperative_matrix
// constants: K_WIDTH, QUERIES, V_WIDTH, WG

struct Params {
    q: View, out: View, gate: View,
    table: u32, window: u32, heads: u32, group: u32, sinks: u32, gated: u32, scale: f32, tiles: u32,
}
var<immediate> p: Params;
// Tile of this workgroup.
var<private> span: SpanTile;

@group(0) @binding(1) var<storage, read> kv_cache: array<vec4<f16>>;

alias Vec4 = vec4<f16>;
alias MatA = coop_mat16x16<f16, A>;
alias MatB = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const TILE_KV = 32u;
// Most by which a score may exceed the reference. Weights stay finite in f16, sums in f32.
const RESCALE_MARGIN = 6.0;
const K_VECS = K_WIDTH / 4u;
const V_VECS = V_WIDTH / 4u;
// Pitches in vectors: rows start in different banks, at multiples of 16 bytes.
const K_PITCH = K_VECS + 2u;
const V_PITCH = V_VECS + 2u;
const Q_PITCH = 10u;
const W_PITCH = TILE_KV / 4u + 2u;
const S_PITCH = TILE_KV / 4u + 1u;
const V_TILE = TILE_KV * K_PITCH;
const K_LOADS = (TILE_KV * K_VECS + WG - 1u) / WG;
const V_LOADS = (TILE_KV * V_VECS + WG - 1u) / WG;

var<workgroup> kv_tile: array<Vec4, max(TILE_KV * (K_PITCH + V_PITCH), QUERIES * Q_PITCH)>;
var<workgroup> weights: array<Vec4, QUERIES * W_PITCH>;
// Scores of each subgroup, or two of its matrices of sums side by side.
var<workgroup> scores: array<vec4<f32>, QUERIES * S_PITCH>;
var<workgroup> normalize: array<f32, QUERIES>;
var<workgroup> needs_rescale: u32;
// First position of the first tile, end of the last tile.
var<workgroup> work_range: vec2<u32>;
// Vectors of K and V that a thread has loaded for the next tile.
var<private> loaded_k: array<Vec4, K_LOADS>;
var<private> loaded_v: array<Vec4, V_LOADS>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let kv_heads = p.heads / p.group;
    let work = group_index(id, count);
    span = span_tile_at(p.table, min(work / kv_heads, p.tiles - 1u));
    // Uniform over the workgroup, as cooperative matrices require.
    if (index == 0u) {
        let position = span.position + span.first / p.group;
        let last = span.position + (min(span.first + QUERIES, span.rows * p.group) - 1u) / p.group;
        let start = position + 1u - min(position + 1u, p.window);
        work_range = vec2(start / TILE_KV * TILE_KV, select(0u, last + 1u, work < p.tiles * kv_heads));
    }
    let range = workgroupUniformLoad(&work_range);
    if (range.y == 0u) { return; }
    let kv_head = work % kv_heads;
    let first = span.first;
    let queries = span.rows * p.group;

    // Query of this thread, and the half of the tile that it weighs.
    let my_query = index / 2u;
    let half = index % 2u;
    let my_position = span.position + (first + my_query) / p.group;
    let my_start = my_position + 1u - min(my_position + 1u, p.window);
    let my_end = select(0u, my_position + 1u, first + my_query < queries);
    let first_row = index / 32u * 16u;
    let stage_offset = first_row * S_PITCH;
    let my_scores = my_query * S_PITCH + half * (TILE_KV / 8u);

    load_queries(first, kv_head, 0u, index);
    workgroupBarrier();
    let zero = MatC();
    var q0 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH], Q_PITCH);
    var q1 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH + 4u], Q_PITCH);
    var q2 = q0;
    var q3 = q1;
    if (K_WIDTH > 32u) {
        workgroupBarrier();
        load_queries(first, kv_head, 8u, index);
        workgroupBarrier();
        q2 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH], Q_PITCH);
        q3 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH + 4u], Q_PITCH);
    }
    var q4 = q0;
    var q5 = q1;
    if (K_WIDTH > 64u) {
        workgroupBarrier();
        load_queries(first, kv_head, 16u, index);
        workgroupBarrier();
        q4 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH], Q_PITCH);
        q5 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH + 4u], Q_PITCH);
    }
    var q6 = q0;
    var q7 = q1;
    if (K_WIDTH > 96u) {
        workgroupBarrier();
        load_queries(first, kv_head, 24u, index);
        workgroupBarrier();
        q6 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH], Q_PITCH);
        q7 = coopLoadT<MatA>(&kv_tile[first_row * Q_PITCH + 4u], Q_PITCH);
    }
    var c0 = zero;
    var c1 = zero;
    var c2 = zero;
    var c3 = zero;
    var c4 = zero;
    var c5 = zero;
    var c6 = zero;
    var c7 = zero;
    var max_score = MASKED;
    var sum = 0.0;

    load_tile(range.x, range.y, kv_head, index);
    for (var tile = range.x; tile < range.y; tile += TILE_KV) {
        workgroupBarrier();
        store_tile(index);
        if (index == 0u) { needs_rescale = 0u; }
        workgroupBarrier();
        if (tile + TILE_KV < range.y) { load_tile(tile + TILE_KV, range.y, kv_head, index); }
        var s0 = zero;
        var s1 = zero;
        s0 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[0u], K_PITCH), s0);
        s1 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 0u], K_PITCH), s1);
        if (K_WIDTH > 16u) {
            s0 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[4u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 4u], K_PITCH), s1);
        }
        if (K_WIDTH > 32u) {
            s0 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[8u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 8u], K_PITCH), s1);
        }
        if (K_WIDTH > 48u) {
            s0 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[12u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 12u], K_PITCH), s1);
        }
        if (K_WIDTH > 64u) {
            s0 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 16u], K_PITCH), s1);
        }
        if (K_WIDTH > 80u) {
            s0 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[20u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 20u], K_PITCH), s1);
        }
        if (K_WIDTH > 96u) {
            s0 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[24u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 24u], K_PITCH), s1);
        }
        if (K_WIDTH > 112u) {
            s0 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[28u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 28u], K_PITCH), s1);
        }
        coopStoreT(s0, &scores[stage_offset], S_PITCH);
        coopStoreT(s1, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();

        let t = tile + half * (TILE_KV / 2u);
        var score: array<vec4<f32>, 4>;
        var tile_max = MASKED;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            let positions_4 = vec4<u32>(t + i * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let visible = (positions_4 >= vec4<u32>(my_start)) & (positions_4 < vec4<u32>(my_end));
            score[i] = select(vec4<f32>(MASKED), scores[my_scores + i] * p.scale, visible);
            tile_max = max(tile_max, max(max(score[i].x, score[i].y), max(score[i].z, score[i].w)));
        }
        tile_max = max(tile_max, subgroupShuffleXor(tile_max, 1u));
        var factor = 1.0;
        if (tile_max > max_score + RESCALE_MARGIN) {
            factor = exp(max_score - tile_max);
            // Sums that are still empty need no rescaling.
            if (max_score > MASKED) { needs_rescale = 1u; }
            max_score = tile_max;
        }
        sum *= factor;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            let weight = select(vec4<f32>(), exp(score[i] - max_score), score[i] != vec4<f32>(MASKED));
            // Sums the rounded weights, as V is multiplied by those.
            let rounded = Vec4(weight);
            let weight_sum = vec4<f32>(rounded);
            sum += (weight_sum.x + weight_sum.y) + (weight_sum.z + weight_sum.w);
            weights[my_query * W_PITCH + half * (TILE_KV / 8u) + i] = rounded;
        }
        if (workgroupUniformLoad(&needs_rescale) == 1u) {
            if (V_WIDTH > 0u) {
                coopStoreT(c0, &scores[stage_offset], S_PITCH);
                coopStoreT(c1, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c0 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c1 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_WIDTH > 32u) {
                coopStoreT(c2, &scores[stage_offset], S_PITCH);
                coopStoreT(c3, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c2 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c3 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_WIDTH > 64u) {
                coopStoreT(c4, &scores[stage_offset], S_PITCH);
                coopStoreT(c5, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c4 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c5 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_WIDTH > 96u) {
                coopStoreT(c6, &scores[stage_offset], S_PITCH);
                coopStoreT(c7, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c6 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c7 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
        }
        let w0 = coopLoadT<MatA>(&weights[first_row * W_PITCH], W_PITCH);
        let w1 = coopLoadT<MatA>(&weights[first_row * W_PITCH + 4u], W_PITCH);
        c0 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 0u], V_PITCH), c0);
        c0 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 0u], V_PITCH), c0);
        if (V_WIDTH > 16u) {
            c1 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 4u], V_PITCH), c1);
            c1 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 4u], V_PITCH), c1);
        }
        if (V_WIDTH > 32u) {
            c2 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 8u], V_PITCH), c2);
            c2 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 8u], V_PITCH), c2);
        }
        if (V_WIDTH > 48u) {
            c3 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 12u], V_PITCH), c3);
            c3 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 12u], V_PITCH), c3);
        }
        if (V_WIDTH > 64u) {
            c4 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 16u], V_PITCH), c4);
            c4 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 16u], V_PITCH), c4);
        }
        if (V_WIDTH > 80u) {
            c5 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 20u], V_PITCH), c5);
            c5 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 20u], V_PITCH), c5);
        }
        if (V_WIDTH > 96u) {
            c6 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 24u], V_PITCH), c6);
            c6 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 24u], V_PITCH), c6);
        }
        if (V_WIDTH > 112u) {
            c7 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 28u], V_PITCH), c7);
            c7 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 28u], V_PITCH), c7);
        }
    }

    // Normalization of each query: 1 / (sum + sink).
    let total = sum + subgroupShuffleXor(sum, 1u);
    let sink = sink_score(p.sinks, kv_head * p.group + (first + my_query) % p.group);
    let m = max(max_score, sink);
    let factor = exp(max_score - m);
    if (half == 0u) { normalize[my_query] = factor * reciprocal(total * factor + sink_weight(p.sinks, sink, m)); }
    if (V_WIDTH > 0u) {
        workgroupBarrier();
        coopStoreT(c0, &scores[stage_offset], S_PITCH);
        coopStoreT(c1, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 0u, first, kv_head);
    }
    if (V_WIDTH > 32u) {
        workgroupBarrier();
        coopStoreT(c2, &scores[stage_offset], S_PITCH);
        coopStoreT(c3, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 32u, first, kv_head);
    }
    if (V_WIDTH > 64u) {
        workgroupBarrier();
        coopStoreT(c4, &scores[stage_offset], S_PITCH);
        coopStoreT(c5, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 64u, first, kv_head);
    }
    if (V_WIDTH > 96u) {
        workgroupBarrier();
        coopStoreT(c6, &scores[stage_offset], S_PITCH);
        coopStoreT(c7, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 96u, first, kv_head);
    }
}

// Loads elements 4 vecs .. 4 vecs + 32 of all queries.
fn load_queries(first: u32, kv_head: u32, vecs: u32, index: u32) {
    for (var i = index; i < QUERIES * 8u; i += WG) {
        let query = first + i / 8u;
        let element = (vecs + i % 8u) * 4u;
        var x = vec4<f32>();
        if (query < span.rows * p.group && element < K_WIDTH) {
            let start = p.q.offset + (span.first_row + query / p.group) * p.q.row_stride + (kv_head * p.group + query % p.group) * p.q.head_stride + element;
            x = vec4<f32>(act[start], act[start + 1u], act[start + 2u], act[start + 3u]);
        }
        kv_tile[i / 8u * Q_PITCH + i % 8u] = Vec4(clamp_f16(x));
    }
}

// Loads K and V of a tile; zeros from `end` on.
fn load_tile(tile: u32, end: u32, kv_head: u32, index: u32) {
    let kv_heads = p.heads / p.group;
    let first_kv_row = tile % span.capacity;
    // @unroll
    for (var j = 0u; j < K_LOADS; j++) {
        let row_in_tile = (index + j * WG) / K_VECS;
        loaded_k[j] = Vec4();
        if (row_in_tile < TILE_KV && tile + row_in_tile < end) {
            loaded_k[j] = kv_cache[span.kv_start * 2u + (kv_row_of(row_in_tile, first_kv_row) * kv_heads + kv_head) * K_VECS + (index + j * WG) % K_VECS];
        }
    }
    // @unroll
    for (var j = 0u; j < V_LOADS; j++) {
        let row_in_tile = (index + j * WG) / V_VECS;
        loaded_v[j] = Vec4();
        if (row_in_tile < TILE_KV && tile + row_in_tile < end) {
            let element = span.kv_start * 2u + span.v_offset / 4u + (kv_row_of(row_in_tile, first_kv_row) * kv_heads + kv_head) * V_VECS;
            loaded_v[j] = kv_cache[element + (index + j * WG) % V_VECS];
        }
    }
}

fn store_tile(index: u32) {
    // @unroll
    for (var j = 0u; j < K_LOADS; j++) {
        let i = index + j * WG;
        if (i < TILE_KV * K_VECS) { kv_tile[i / K_VECS * K_PITCH + i % K_VECS] = loaded_k[j]; }
    }
    // @unroll
    for (var j = 0u; j < V_LOADS; j++) {
        let i = index + j * WG;
        if (i < TILE_KV * V_VECS) { kv_tile[V_TILE + i / V_VECS * V_PITCH + i % V_VECS] = loaded_v[j]; }
    }
}

// Writes columns `column` .. `column` + 32 of the queries of this subgroup.
fn write_out(index: u32, column: u32, first: u32, kv_head: u32) {
    let element = column + index % 32u;
    let first_row = index / 32u * 16u;
    for (var row_in_tile = first_row; row_in_tile < first_row + 16u; row_in_tile++) {
        let query = first + row_in_tile;
        if (query < span.rows * p.group && element < V_WIDTH) {
            let row = span.first_row + query / p.group;
            let head = kv_head * p.group + query % p.group;
            var gate = 1.0;
            if (p.gated == 1u) { gate = sigmoid(act[p.gate.offset + row * p.gate.row_stride + head * p.gate.head_stride + element]); }
            let y = scores[row_in_tile * S_PITCH + index % 32u / 4u][index % 4u];
            act[p.out.offset + row * p.out.row_stride + head * p.out.head_stride + element] = y * normalize[row_in_tile] * gate;
        }
    }
}

// Row of the KV cache (a ring buffer) of position `i` of a tile.
fn kv_row_of(i: u32, first_kv_row: u32) -> u32 {
    let kv_row = first_kv_row + i;
    return select(kv_row, kv_row - span.capacity, kv_row >= span.capacity);
}
