// Bidirectional attention within segments of rows on cooperative matrices, as
// segment_attention.wgsl computes it, in the way of attention_cooperative.wgsl: 16 x 16 x 16
// products of f16 with f32 sums, and a reference score per query that is raised only when a score
// exceeds it by RESCALE_MARGIN. A workgroup takes QUERIES rows of a segment and one head, a
// subgroup 16 of them. It loops over the rows of the segment in tiles of TILE_KEYS, from the first
// one on, so a row's bits do not depend on other segments.
// WG: 2 QUERIES, in subgroups of 32. K_WIDTH, V_WIDTH: head widths, multiples of 4, at most 128;
// matrices have zeros up to the next multiple of 16.
// Table in `words`: first row of the segment, its rows, first query of the tile in the segment.
// Grid: (tiles of queries, heads).
// needs: common/common, common/f16_range, attention/softmax
// enables: f16, wgpu_cooperative_matrix
// constants: K_WIDTH, QUERIES, V_WIDTH, WG

struct Params {
    q: View, k: View, v: View, out: View,
    table: u32, tiles: u32, heads: u32, group: u32, scale: f32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;
// Keys and values of segment_f16.wgsl.
@group(0) @binding(2) var<storage, read> kv: array<vec4<f16>>;

alias Vec4 = vec4<f16>;
alias MatA = coop_mat16x16<f16, A>;
alias MatB = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const TILE_KEYS = 32u;
// Maximum by which a score may exceed the reference. Weights stay finite in f16, sums in f32.
const RESCALE_MARGIN = 6.0;
const K_PADDED = (K_WIDTH + 15u) / 16u * 16u;
const V_PADDED = (V_WIDTH + 15u) / 16u * 16u;
const K_VECS = K_PADDED / 4u;
const V_VECS = V_PADDED / 4u;
// Pitches in vectors: rows start in different banks, at multiples of 16 bytes.
const K_PITCH = K_VECS + 2u;
const V_PITCH = V_VECS + 2u;
const Q_PITCH = 10u;
const W_PITCH = TILE_KEYS / 4u + 2u;
const S_PITCH = TILE_KEYS / 4u + 1u;
const V_TILE = TILE_KEYS * K_PITCH;
const K_LOADS = (TILE_KEYS * K_VECS + WG - 1u) / WG;
const V_LOADS = (TILE_KEYS * V_VECS + WG - 1u) / WG;

var<workgroup> kv_tile: array<Vec4, max(TILE_KEYS * (K_PITCH + V_PITCH), QUERIES * Q_PITCH)>;
var<workgroup> weights: array<Vec4, QUERIES * W_PITCH>;
// Scores of each subgroup, or two of its matrices of sums side by side.
var<workgroup> scores: array<vec4<f32>, QUERIES * S_PITCH>;
var<workgroup> normalize: array<f32, QUERIES>;
var<workgroup> needs_rescale: u32;
// Rows of the segment; 0 beyond the grid.
var<workgroup> segment_rows: u32;
// Vectors of K and V that a thread has loaded for the next tile.
var<private> loaded_k: array<Vec4, K_LOADS>;
var<private> loaded_v: array<Vec4, V_LOADS>;
// Elements of the first row of the head: of the tile's queries, and vectors of the segment.
var<private> q_start: u32;
var<private> k_start: u32;
var<private> v_start: u32;
// Vectors between rows of keys and values.
var<private> kv_pitch: u32;
var<private> out_start: u32;
// Queries of the tile.
var<private> queries: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let work = group_index(id, count);
    let head = work % p.heads;
    let entry = p.table + min(work / p.heads, p.tiles - 1u) * 3u;
    // Uniform over the workgroup, as cooperative matrices require.
    if (index == 0u) { segment_rows = select(0u, words[entry + 1u], work < p.tiles * p.heads); }
    let rows = workgroupUniformLoad(&segment_rows);
    if (rows == 0u) { return; }
    let first_row = words[entry];
    let first = words[entry + 2u];
    q_start = p.q.offset + head * p.q.head_stride + (first_row + first) * p.q.row_stride;
    let kv_heads = p.heads / p.group;
    kv_pitch = kv_heads * (K_WIDTH + V_WIDTH) / 4u;
    k_start = first_row * kv_pitch + head / p.group * (K_WIDTH / 4u);
    v_start = first_row * kv_pitch + kv_heads * (K_WIDTH / 4u) + head / p.group * (V_WIDTH / 4u);
    out_start = p.out.offset + head * p.out.head_stride + (first_row + first) * p.out.row_stride;
    queries = min(rows - first, QUERIES);

    // Query of this thread, and the half of the tile that it weighs.
    let my_query = index / 2u;
    let half = index % 2u;
    let my_end = select(0u, rows, my_query < queries);
    let subgroup_row = index / 32u * 16u;
    let stage_offset = subgroup_row * S_PITCH;
    let my_scores = my_query * S_PITCH + half * (TILE_KEYS / 8u);

    load_queries(0u, index);
    workgroupBarrier();
    let zero = MatC();
    var q0 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH], Q_PITCH);
    var q1 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH + 4u], Q_PITCH);
    var q2 = q0;
    var q3 = q1;
    if (K_PADDED > 32u) {
        workgroupBarrier();
        load_queries(8u, index);
        workgroupBarrier();
        q2 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH], Q_PITCH);
        q3 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH + 4u], Q_PITCH);
    }
    var q4 = q0;
    var q5 = q1;
    if (K_PADDED > 64u) {
        workgroupBarrier();
        load_queries(16u, index);
        workgroupBarrier();
        q4 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH], Q_PITCH);
        q5 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH + 4u], Q_PITCH);
    }
    var q6 = q0;
    var q7 = q1;
    if (K_PADDED > 96u) {
        workgroupBarrier();
        load_queries(24u, index);
        workgroupBarrier();
        q6 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH], Q_PITCH);
        q7 = coopLoadT<MatA>(&kv_tile[subgroup_row * Q_PITCH + 4u], Q_PITCH);
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

    load_tile(0u, rows, index);
    for (var tile = 0u; tile < rows; tile += TILE_KEYS) {
        workgroupBarrier();
        store_tile(index);
        if (index == 0u) { needs_rescale = 0u; }
        workgroupBarrier();
        if (tile + TILE_KEYS < rows) { load_tile(tile + TILE_KEYS, rows, index); }
        var s0 = zero;
        var s1 = zero;
        s0 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[0u], K_PITCH), s0);
        s1 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 0u], K_PITCH), s1);
        if (K_PADDED > 16u) {
            s0 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[4u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 4u], K_PITCH), s1);
        }
        if (K_PADDED > 32u) {
            s0 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[8u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 8u], K_PITCH), s1);
        }
        if (K_PADDED > 48u) {
            s0 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[12u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 12u], K_PITCH), s1);
        }
        if (K_PADDED > 64u) {
            s0 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 16u], K_PITCH), s1);
        }
        if (K_PADDED > 80u) {
            s0 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[20u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 20u], K_PITCH), s1);
        }
        if (K_PADDED > 96u) {
            s0 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[24u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 24u], K_PITCH), s1);
        }
        if (K_PADDED > 112u) {
            s0 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[28u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 28u], K_PITCH), s1);
        }
        coopStoreT(s0, &scores[stage_offset], S_PITCH);
        coopStoreT(s1, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();

        let t = tile + half * (TILE_KEYS / 2u);
        var score: array<vec4<f32>, 4>;
        var tile_max = MASKED;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            let is_key = vec4<u32>(t + i * 4u) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(my_end);
            score[i] = select(vec4<f32>(MASKED), scores[my_scores + i] * p.scale, is_key);
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
            weights[my_query * W_PITCH + half * (TILE_KEYS / 8u) + i] = rounded;
        }
        if (workgroupUniformLoad(&needs_rescale) == 1u) {
            if (V_PADDED > 0u) {
                coopStoreT(c0, &scores[stage_offset], S_PITCH);
                coopStoreT(c1, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c0 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c1 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_PADDED > 32u) {
                coopStoreT(c2, &scores[stage_offset], S_PITCH);
                coopStoreT(c3, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c2 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c3 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_PADDED > 64u) {
                coopStoreT(c4, &scores[stage_offset], S_PITCH);
                coopStoreT(c5, &scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c4 = coopLoadT<MatC>(&scores[stage_offset], S_PITCH);
                c5 = coopLoadT<MatC>(&scores[stage_offset + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (V_PADDED > 96u) {
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
        let w0 = coopLoadT<MatA>(&weights[subgroup_row * W_PITCH], W_PITCH);
        let w1 = coopLoadT<MatA>(&weights[subgroup_row * W_PITCH + 4u], W_PITCH);
        c0 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 0u], V_PITCH), c0);
        c0 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 0u], V_PITCH), c0);
        if (V_PADDED > 16u) {
            c1 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 4u], V_PITCH), c1);
            c1 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 4u], V_PITCH), c1);
        }
        if (V_PADDED > 32u) {
            c2 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 8u], V_PITCH), c2);
            c2 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 8u], V_PITCH), c2);
        }
        if (V_PADDED > 48u) {
            c3 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 12u], V_PITCH), c3);
            c3 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 12u], V_PITCH), c3);
        }
        if (V_PADDED > 64u) {
            c4 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 16u], V_PITCH), c4);
            c4 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 16u], V_PITCH), c4);
        }
        if (V_PADDED > 80u) {
            c5 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 20u], V_PITCH), c5);
            c5 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 20u], V_PITCH), c5);
        }
        if (V_PADDED > 96u) {
            c6 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 24u], V_PITCH), c6);
            c6 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 24u], V_PITCH), c6);
        }
        if (V_PADDED > 112u) {
            c7 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_TILE + 28u], V_PITCH), c7);
            c7 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_TILE + 16u * V_PITCH + 28u], V_PITCH), c7);
        }
    }

    // Normalization of each query: 1 / sum.
    let total = sum + subgroupShuffleXor(sum, 1u);
    if (half == 0u) { normalize[my_query] = reciprocal(total); }
    if (V_PADDED > 0u) {
        workgroupBarrier();
        coopStoreT(c0, &scores[stage_offset], S_PITCH);
        coopStoreT(c1, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 0u);
    }
    if (V_PADDED > 32u) {
        workgroupBarrier();
        coopStoreT(c2, &scores[stage_offset], S_PITCH);
        coopStoreT(c3, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 32u);
    }
    if (V_PADDED > 64u) {
        workgroupBarrier();
        coopStoreT(c4, &scores[stage_offset], S_PITCH);
        coopStoreT(c5, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 64u);
    }
    if (V_PADDED > 96u) {
        workgroupBarrier();
        coopStoreT(c6, &scores[stage_offset], S_PITCH);
        coopStoreT(c7, &scores[stage_offset + 4u], S_PITCH);
        workgroupBarrier();
        write_out(index, 96u);
    }
}

// Four elements of a row as f16; zeros from `width` on.
fn elements(start: u32, element: u32, width: u32) -> Vec4 {
    if (element >= width) { return Vec4(); }
    let at = start + element;
    return Vec4(clamp_f16(vec4<f32>(act[at], act[at + 1u], act[at + 2u], act[at + 3u])));
}

// Loads elements 4 vecs .. 4 vecs + 32 of all queries.
fn load_queries(vecs: u32, index: u32) {
    for (var i = index; i < QUERIES * 8u; i += WG) {
        let query = i / 8u;
        var x = Vec4();
        if (query < queries) {
            x = elements(q_start + query * p.q.row_stride, (vecs + i % 8u) * 4u, K_WIDTH);
        }
        kv_tile[query * Q_PITCH + i % 8u] = x;
    }
}

// Loads K and V of a tile; zeros from `end` on.
fn load_tile(tile: u32, end: u32, index: u32) {
    // @unroll
    for (var j = 0u; j < K_LOADS; j++) {
        let i = index + j * WG;
        let key = tile + i / K_VECS;
        loaded_k[j] = Vec4();
        if (i < TILE_KEYS * K_VECS && key < end && i % K_VECS < K_WIDTH / 4u) {
            loaded_k[j] = kv[k_start + key * kv_pitch + i % K_VECS];
        }
    }
    // @unroll
    for (var j = 0u; j < V_LOADS; j++) {
        let i = index + j * WG;
        let key = tile + i / V_VECS;
        loaded_v[j] = Vec4();
        if (i < TILE_KEYS * V_VECS && key < end && i % V_VECS < V_WIDTH / 4u) {
            loaded_v[j] = kv[v_start + key * kv_pitch + i % V_VECS];
        }
    }
}

fn store_tile(index: u32) {
    // @unroll
    for (var j = 0u; j < K_LOADS; j++) {
        let i = index + j * WG;
        if (i < TILE_KEYS * K_VECS) { kv_tile[i / K_VECS * K_PITCH + i % K_VECS] = loaded_k[j]; }
    }
    // @unroll
    for (var j = 0u; j < V_LOADS; j++) {
        let i = index + j * WG;
        if (i < TILE_KEYS * V_VECS) { kv_tile[V_TILE + i / V_VECS * V_PITCH + i % V_VECS] = loaded_v[j]; }
    }
}

// Writes columns `column` .. `column` + 32 of the queries of this subgroup.
fn write_out(index: u32, column: u32) {
    let element = column + index % 32u;
    let subgroup_row = index / 32u * 16u;
    for (var query = subgroup_row; query < min(subgroup_row + 16u, queries); query++) {
        if (element < V_WIDTH) {
            let y = scores[query * S_PITCH + index % 32u / 4u][index % 4u];
            act[out_start + query * p.out.row_stride + element] = y * normalize[query];
        }
    }
}
