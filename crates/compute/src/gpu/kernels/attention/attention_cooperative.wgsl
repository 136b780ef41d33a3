// Attention of many rows, as attention_tiles.wgsl has it, by matrices of 16 x 16 that a subgroup multiplies together: queries,
// keys, values and weights as f16, sums as f32.
//
// A subgroup takes 16 queries, which it keeps in matrices, and a workgroup QUERIES; it walks tiles of KEYS positions. Scores
// go to memory; two threads of a query make weights of them, relative to a largest score that is brought up only when a
// score is far above it: sums then go by way of memory to be scaled. That is seldom, and each query's own affair, so that its
// bits depend on no other.
//
// WG: 2 QUERIES, in subgroups of 32. KEY, VALUE: widths, whole sixteens, 128 at most; f16 in the state. Grid: as there.
// needs: common/common, attention/softmax
// enables: f16, wgpu_cooperative_matrix
// constants: KEY, QUERIES, VALUE, WG

struct Params {
    q: View, out: View, gate: View,
    rows: u32, position: u32, window: u32,
    heads: u32, group: u32, positions: u32, values: u32, sinks: u32, gated: u32, scale: f32, tiles: u32,
}
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read> state: array<vec4<f16>>;

alias Four = vec4<f16>;
alias MatA = coop_mat16x16<f16, A>;
alias MatB = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const KEYS = 32u;
// Most that a score may be above what weights are relative to: such weights are finite in f16, and so are their sums in f32.
const ABOVE = 6.0;
const K_FOURS = KEY / 4u;
const V_FOURS = VALUE / 4u;
// Vectors from one row to the next: rows lie in different banks, at whole vectors of sixteen bytes.
const K_PITCH = K_FOURS + 2u;
const V_PITCH = V_FOURS + 2u;
const Q_PITCH = 10u;
const W_PITCH = KEYS / 4u + 2u;
const S_PITCH = KEYS / 4u + 1u;
const V_AT = KEYS * K_PITCH;
const MY_KS = (KEYS * K_FOURS + WG - 1u) / WG;
const MY_VS = (KEYS * V_FOURS + WG - 1u) / WG;

var<workgroup> kv_tile: array<Four, max(KEYS * (K_PITCH + V_PITCH), QUERIES * Q_PITCH)>;
var<workgroup> weights: array<Four, QUERIES * W_PITCH>;
// Scores, or two matrices of sums, side by side, of each subgroup.
var<workgroup> scores: array<vec4<f32>, QUERIES * S_PITCH>;
var<workgroup> keep: array<f32, QUERIES>;
var<workgroup> scaled: u32;
// Which workgroup this is; its first query; the first position of its first tile, and the end of its last.
var<workgroup> walk: vec4<u32>;
// What a thread has asked for.
var<private> my_ks: array<Four, MY_KS>;
var<private> my_vs: array<Four, MY_VS>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let kv_heads = p.heads / p.group;
    // All threads walk the same tiles: cooperative matrices ask for proof of that.
    if (index == 0u) {
        let work = group_index(id, count);
        // The tiles that see most come first.
        let first = (p.tiles - 1u - min(work / kv_heads, p.tiles - 1u)) * QUERIES;
        let position = p.position + first / p.group;
        let last = p.position + (min(first + QUERIES, p.rows * p.group) - 1u) / p.group;
        let begin = position + 1u - min(position + 1u, p.window);
        walk = vec4(work, first, begin / KEYS * KEYS, select(0u, last + 1u, work < p.tiles * kv_heads));
    }
    let walked = workgroupUniformLoad(&walk);
    if (walked.w == 0u) { return; }
    let kv = walked.x % kv_heads;
    let first = walked.y;
    let all = p.rows * p.group;

    // The query of this thread, and which half of a tile it weighs.
    let mine = index / 2u;
    let half = index % 2u;
    let my_position = p.position + (first + mine) / p.group;
    let my_begin = my_position + 1u - min(my_position + 1u, p.window);
    let my_end = select(0u, my_position + 1u, first + mine < all);
    let rows_at = index / 32u * 16u;
    let stage = rows_at * S_PITCH;
    let my_scores = mine * S_PITCH + half * (KEYS / 8u);

    load_queries(first, kv, 0u, index);
    workgroupBarrier();
    let zero = MatC();
    var q0 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH], Q_PITCH);
    var q1 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH + 4u], Q_PITCH);
    var q2 = q0;
    var q3 = q1;
    if (KEY > 32u) {
        workgroupBarrier();
        load_queries(first, kv, 8u, index);
        workgroupBarrier();
        q2 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH], Q_PITCH);
        q3 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH + 4u], Q_PITCH);
    }
    var q4 = q0;
    var q5 = q1;
    if (KEY > 64u) {
        workgroupBarrier();
        load_queries(first, kv, 16u, index);
        workgroupBarrier();
        q4 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH], Q_PITCH);
        q5 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH + 4u], Q_PITCH);
    }
    var q6 = q0;
    var q7 = q1;
    if (KEY > 96u) {
        workgroupBarrier();
        load_queries(first, kv, 24u, index);
        workgroupBarrier();
        q6 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH], Q_PITCH);
        q7 = coopLoadT<MatA>(&kv_tile[rows_at * Q_PITCH + 4u], Q_PITCH);
    }
    var c0 = zero;
    var c1 = zero;
    var c2 = zero;
    var c3 = zero;
    var c4 = zero;
    var c5 = zero;
    var c6 = zero;
    var c7 = zero;
    var most = NOTHING;
    var sum = 0.0;

    ask(walked.z, walked.w, kv, index);
    for (var tile = walked.z; tile < walked.w; tile += KEYS) {
        workgroupBarrier();
        put(index);
        if (index == 0u) { scaled = 0u; }
        workgroupBarrier();
        if (tile + KEYS < walked.w) { ask(tile + KEYS, walked.w, kv, index); }
        var s0 = zero;
        var s1 = zero;
        s0 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[0u], K_PITCH), s0);
        s1 = coopMultiplyAdd(q0, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 0u], K_PITCH), s1);
        if (KEY > 16u) {
            s0 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[4u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q1, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 4u], K_PITCH), s1);
        }
        if (KEY > 32u) {
            s0 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[8u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q2, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 8u], K_PITCH), s1);
        }
        if (KEY > 48u) {
            s0 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[12u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q3, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 12u], K_PITCH), s1);
        }
        if (KEY > 64u) {
            s0 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q4, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 16u], K_PITCH), s1);
        }
        if (KEY > 80u) {
            s0 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[20u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q5, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 20u], K_PITCH), s1);
        }
        if (KEY > 96u) {
            s0 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[24u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q6, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 24u], K_PITCH), s1);
        }
        if (KEY > 112u) {
            s0 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[28u], K_PITCH), s0);
            s1 = coopMultiplyAdd(q7, coopLoad<MatB>(&kv_tile[16u * K_PITCH + 28u], K_PITCH), s1);
        }
        coopStoreT(s0, &scores[stage], S_PITCH);
        coopStoreT(s1, &scores[stage + 4u], S_PITCH);
        workgroupBarrier();

        let t = tile + half * (KEYS / 2u);
        var score: array<vec4<f32>, 4>;
        var largest = NOTHING;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            let at = vec4<u32>(t + i * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
            let seen = (at >= vec4<u32>(my_begin)) & (at < vec4<u32>(my_end));
            score[i] = select(vec4<f32>(NOTHING), scores[my_scores + i] * p.scale, seen);
            largest = max(largest, max(max(score[i].x, score[i].y), max(score[i].z, score[i].w)));
        }
        largest = max(largest, subgroupShuffleXor(largest, 1u));
        var factor = 1.0;
        if (largest > most + ABOVE) {
            factor = exp(most - largest);
            // Sums that are nothing yet need no scaling.
            if (most > NOTHING) { scaled = 1u; }
            most = largest;
        }
        sum *= factor;
        // @unroll
        for (var i = 0u; i < 4u; i++) {
            let weight = select(vec4<f32>(), exp(score[i] - most), score[i] > vec4<f32>(NOTHING));
            // The sum is of what values are multiplied by.
            let rounded = Four(weight);
            let again = vec4<f32>(rounded);
            sum += (again.x + again.y) + (again.z + again.w);
            weights[mine * W_PITCH + half * (KEYS / 8u) + i] = rounded;
        }
        if (workgroupUniformLoad(&scaled) == 1u) {
            if (VALUE > 0u) {
                coopStoreT(c0, &scores[stage], S_PITCH);
                coopStoreT(c1, &scores[stage + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c0 = coopLoadT<MatC>(&scores[stage], S_PITCH);
                c1 = coopLoadT<MatC>(&scores[stage + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (VALUE > 32u) {
                coopStoreT(c2, &scores[stage], S_PITCH);
                coopStoreT(c3, &scores[stage + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c2 = coopLoadT<MatC>(&scores[stage], S_PITCH);
                c3 = coopLoadT<MatC>(&scores[stage + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (VALUE > 64u) {
                coopStoreT(c4, &scores[stage], S_PITCH);
                coopStoreT(c5, &scores[stage + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c4 = coopLoadT<MatC>(&scores[stage], S_PITCH);
                c5 = coopLoadT<MatC>(&scores[stage + 4u], S_PITCH);
                workgroupBarrier();
            }
            if (VALUE > 96u) {
                coopStoreT(c6, &scores[stage], S_PITCH);
                coopStoreT(c7, &scores[stage + 4u], S_PITCH);
                workgroupBarrier();
                for (var i = 0u; i < 4u; i++) { scores[my_scores + i] *= factor; }
                workgroupBarrier();
                c6 = coopLoadT<MatC>(&scores[stage], S_PITCH);
                c7 = coopLoadT<MatC>(&scores[stage + 4u], S_PITCH);
                workgroupBarrier();
            }
        }
        let w0 = coopLoadT<MatA>(&weights[rows_at * W_PITCH], W_PITCH);
        let w1 = coopLoadT<MatA>(&weights[rows_at * W_PITCH + 4u], W_PITCH);
        c0 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 0u], V_PITCH), c0);
        c0 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 0u], V_PITCH), c0);
        if (VALUE > 16u) {
            c1 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 4u], V_PITCH), c1);
            c1 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 4u], V_PITCH), c1);
        }
        if (VALUE > 32u) {
            c2 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 8u], V_PITCH), c2);
            c2 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 8u], V_PITCH), c2);
        }
        if (VALUE > 48u) {
            c3 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 12u], V_PITCH), c3);
            c3 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 12u], V_PITCH), c3);
        }
        if (VALUE > 64u) {
            c4 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 16u], V_PITCH), c4);
            c4 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 16u], V_PITCH), c4);
        }
        if (VALUE > 80u) {
            c5 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 20u], V_PITCH), c5);
            c5 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 20u], V_PITCH), c5);
        }
        if (VALUE > 96u) {
            c6 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 24u], V_PITCH), c6);
            c6 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 24u], V_PITCH), c6);
        }
        if (VALUE > 112u) {
            c7 = coopMultiplyAdd(w0, coopLoadT<MatB>(&kv_tile[V_AT + 28u], V_PITCH), c7);
            c7 = coopMultiplyAdd(w1, coopLoadT<MatB>(&kv_tile[V_AT + 16u * V_PITCH + 28u], V_PITCH), c7);
        }
    }

    // What each query's sums are multiplied by.
    let total = sum + subgroupShuffleXor(sum, 1u);
    let sink = sink_of(p.sinks, kv * p.group + (first + mine) % p.group);
    let m = max(most, sink);
    let factor = exp(most - m);
    if (half == 0u) { keep[mine] = factor * share_of(total * factor + sink_weight(p.sinks, sink, m)); }
    if (VALUE > 0u) {
        workgroupBarrier();
        coopStoreT(c0, &scores[stage], S_PITCH);
        coopStoreT(c1, &scores[stage + 4u], S_PITCH);
        workgroupBarrier();
        emit(index, 0u, first, kv);
    }
    if (VALUE > 32u) {
        workgroupBarrier();
        coopStoreT(c2, &scores[stage], S_PITCH);
        coopStoreT(c3, &scores[stage + 4u], S_PITCH);
        workgroupBarrier();
        emit(index, 32u, first, kv);
    }
    if (VALUE > 64u) {
        workgroupBarrier();
        coopStoreT(c4, &scores[stage], S_PITCH);
        coopStoreT(c5, &scores[stage + 4u], S_PITCH);
        workgroupBarrier();
        emit(index, 64u, first, kv);
    }
    if (VALUE > 96u) {
        workgroupBarrier();
        coopStoreT(c6, &scores[stage], S_PITCH);
        coopStoreT(c7, &scores[stage + 4u], S_PITCH);
        workgroupBarrier();
        emit(index, 96u, first, kv);
    }
}

// Numbers 4 fours .. 4 fours + 32 of all queries.
fn load_queries(first: u32, kv: u32, fours: u32, index: u32) {
    for (var i = index; i < QUERIES * 8u; i += WG) {
        let query = first + i / 8u;
        let at = (fours + i % 8u) * 4u;
        var x = vec4<f32>();
        if (query < p.rows * p.group && at < KEY) {
            let begins = p.q.at + query / p.group * p.q.row + (kv * p.group + query % p.group) * p.q.head + at;
            x = vec4<f32>(a[begins], a[begins + 1u], a[begins + 2u], a[begins + 3u]);
        }
        kv_tile[i / 8u * Q_PITCH + i % 8u] = Four(clamp(x, vec4<f32>(-65504.0), vec4<f32>(65504.0)));
    }
}

// Asks for the keys and values of a tile; zeros behind `end`.
fn ask(tile: u32, end: u32, kv: u32, index: u32) {
    let kv_heads = p.heads / p.group;
    let ring = tile % p.positions;
    // @unroll
    for (var j = 0u; j < MY_KS; j++) {
        let r = (index + j * WG) / K_FOURS;
        my_ks[j] = Four();
        if (r < KEYS && tile + r < end) {
            my_ks[j] = state[(place_of(r, ring) * kv_heads + kv) * K_FOURS + (index + j * WG) % K_FOURS];
        }
    }
    // @unroll
    for (var j = 0u; j < MY_VS; j++) {
        let r = (index + j * WG) / V_FOURS;
        my_vs[j] = Four();
        if (r < KEYS && tile + r < end) {
            let at = p.values / 4u + (place_of(r, ring) * kv_heads + kv) * V_FOURS;
            my_vs[j] = state[at + (index + j * WG) % V_FOURS];
        }
    }
}

fn put(index: u32) {
    // @unroll
    for (var j = 0u; j < MY_KS; j++) {
        let i = index + j * WG;
        if (i < KEYS * K_FOURS) { kv_tile[i / K_FOURS * K_PITCH + i % K_FOURS] = my_ks[j]; }
    }
    // @unroll
    for (var j = 0u; j < MY_VS; j++) {
        let i = index + j * WG;
        if (i < KEYS * V_FOURS) { kv_tile[V_AT + i / V_FOURS * V_PITCH + i % V_FOURS] = my_vs[j]; }
    }
}

// Writes columns `column` .. `column` + 32 of this subgroup's queries.
fn emit(index: u32, column: u32, first: u32, kv: u32) {
    let at = column + index % 32u;
    let rows_at = index / 32u * 16u;
    for (var r = rows_at; r < rows_at + 16u; r++) {
        let query = first + r;
        if (query < p.rows * p.group && at < VALUE) {
            let row = query / p.group;
            let head = kv * p.group + query % p.group;
            var gate = 1.0;
            if (p.gated == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row + head * p.gate.head + at]); }
            let y = scores[r * S_PITCH + index % 32u / 4u][index % 4u];
            a[p.out.at + row * p.out.row + head * p.out.head + at] = y * keep[r] * gate;
        }
    }
}

// Where position `i` of a tile lies in the state.
fn place_of(i: u32, ring: u32) -> u32 {
    let place = ring + i;
    return select(place, place - p.positions, place >= p.positions);
}
