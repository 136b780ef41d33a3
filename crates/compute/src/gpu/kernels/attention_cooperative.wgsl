// Attention of many rows, as attention_tiles.wgsl has it, by matrices of 16 x 16 that a subgroup multiplies together: queries,
// keys, values and weights as f16, sums as f32.
//
// A workgroup keeps QUERIES queries in memory and walks tiles of KEYS positions. Scores go to memory; TQ threads of a query
// make weights of them, relative to a largest score that is brought up only when a score is far above it: sums, which lie in
// matrices, then go by way of memory to be scaled. That is seldom, and each query's own affair, so that its bits depend on no other.
//
// WG: 256, 8 subgroups of 32. QUERIES: 64, or 32 where a key or value has more than 128 numbers, up to 256.
// KEY, VALUE, LATENT, HALF, grid: as there.

struct Params {
    q: View, out: View, gate: View,
    rows: u32, position: u32, window: u32,
    heads: u32, group: u32, positions: u32, values: u32, sinks: u32, gated: u32, scale: f32, tiles: u32,
}
var<immediate> p: Params;

alias Four = vec4<f16>;
alias MatA = coop_mat16x16<f16, A>;
alias MatB = coop_mat16x16<f16, B>;
alias MatC = coop_mat16x16<f32, C>;

const KEYS = 32u;
// Most that a score may be above what weights are relative to: such weights are finite in f16, and so are their sums in f32.
const ABOVE = 6.0;
const VALUE_STRIDE = LATENT * KEY + (1u - LATENT) * VALUE;
// Subgroups for 16 queries, and columns that they have together, 64 each.
const ACROSS = 128u / QUERIES;
const COLUMNS = ACROSS * 64u;
const KEY_FOURS = (KEY + 15u) / 16u * 4u;
// Vectors from one row to the next; two more than there are, so that rows lie in different banks.
const Q_PITCH = KEY_FOURS + 2u;
const KV_PITCH = max(KEY_FOURS, COLUMNS / 4u) + 2u;
const P_PITCH = KEYS / 4u + 2u;
const S_PITCH = KEYS + 4u;
// Threads of a query and vectors of weights of each.
const TQ = WG / QUERIES;
const WEIGHTS = KEYS / 4u / TQ;
const SCORE_TILES = QUERIES / 16u * KEYS / 16u;

var<workgroup> queries: array<Four, QUERIES * Q_PITCH>;
var<workgroup> kv_tile: array<Four, KEYS * KV_PITCH>;
var<workgroup> weights: array<Four, QUERIES * P_PITCH>;
// Scores, or a matrix of sums of each subgroup.
var<workgroup> scores: array<f32, max(QUERIES * S_PITCH, 2048u)>;
var<workgroup> found: array<f32, WG>;
var<workgroup> keep: array<f32, QUERIES>;
var<workgroup> scaled: u32;
// Which workgroup this is; its first query; the first position of its first tile, and the end of its last.
var<workgroup> walk: vec4<u32>;

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

    let sub = index / 32u;
    let lane = index % 32u;
    // Where this subgroup's sums lie, and its scores.
    let rows_at = sub / ACROSS * 16u;
    let column_fours = sub % ACROSS * 16u;
    let stage = sub * 256u;
    let tile_of = sub % SCORE_TILES;
    let score_row = tile_of / (KEYS / 16u) * 16u;
    let score_column = tile_of % (KEYS / 16u) * 16u;
    // Which query and which keys this thread weighs.
    let mine = index / TQ;
    let part = index % TQ;
    let my_position = p.position + (first + mine) / p.group;
    let my_begin = my_position + 1u - min(my_position + 1u, p.window);
    let real = first + mine < all;

    for (var i = index; i < QUERIES * KEY_FOURS; i += WG) {
        let query = first + i / KEY_FOURS;
        let at = i % KEY_FOURS * 4u;
        var x = vec4<f32>();
        if (query < all) {
            let begins = p.q.at + query / p.group * p.q.row + (kv * p.group + query % p.group) * p.q.head;
            for (var j = 0u; j < 4u; j++) {
                if (at + j < KEY) { x[j] = clamp(a[begins + at + j], -65504.0, 65504.0); }
            }
        }
        queries[i / KEY_FOURS * Q_PITCH + i % KEY_FOURS] = Four(x);
    }
    for (var i = index; i < 2048u; i += WG) { scores[i] = 0.0; }
    workgroupBarrier();
    let zero = coopLoadT<MatC>(&scores[stage], 16u);
    var c0 = zero;
    var c1 = zero;
    var c2 = zero;
    var c3 = zero;
    var most = NOTHING;
    var sum = 0.0;

    for (var tile = walked.z; tile < walked.w; tile += KEYS) {
        let len = min(KEYS, walked.w - tile);
        let ring = tile % p.positions;
        workgroupBarrier();
        for (var i = index; i < KEYS * KEY_FOURS; i += WG) {
            let r = i / KEY_FOURS;
            var x = vec4<f32>();
            if (r < len) { x = four_of((place_of(r, ring) * kv_heads + kv) * KEY, i % KEY_FOURS, KEY, KEY); }
            kv_tile[r * KV_PITCH + i % KEY_FOURS] = Four(x);
        }
        if (index == 0u) { scaled = 0u; }
        workgroupBarrier();
        var s = zero;
        for (var c = 0u; c < KEY_FOURS; c += 4u) {
            let q = coopLoadT<MatA>(&queries[score_row * Q_PITCH + c], Q_PITCH);
            let k = coopLoad<MatB>(&kv_tile[score_column * KV_PITCH + c], KV_PITCH);
            s = coopMultiplyAdd(q, k, s);
        }
        // Subgroups with the same scores write the same.
        coopStoreT(s, &scores[score_row * S_PITCH + score_column], S_PITCH);
        workgroupBarrier();

        for (var i = index; i < KEYS * COLUMNS / 4u; i += WG) {
            let r = i / (COLUMNS / 4u);
            let four = i % (COLUMNS / 4u);
            var x = vec4<f32>();
            if (r < len && four * 4u < VALUE) {
                var at = (place_of(r, ring) * kv_heads + kv) * VALUE_STRIDE;
                if (LATENT == 0u) { at += p.values; }
                x = four_of(at, four, VALUE, VALUE_STRIDE);
            }
            kv_tile[r * KV_PITCH + four] = Four(x);
        }
        var score: array<f32, WEIGHTS * 4u>;
        var largest = NOTHING;
        for (var i = 0u; i < WEIGHTS * 4u; i++) {
            let t = part * WEIGHTS * 4u + i;
            score[i] = NOTHING;
            if (real && tile + t >= my_begin && tile + t <= my_position) {
                score[i] = scores[mine * S_PITCH + t] * p.scale;
            }
            largest = max(largest, score[i]);
        }
        found[index] = largest;
        workgroupBarrier();
        for (var i = 0u; i < TQ; i++) { largest = max(largest, found[mine * TQ + i]); }
        var factor = 1.0;
        if (largest > most + ABOVE) {
            factor = exp(most - largest);
            most = largest;
            scaled = 1u;
        }
        sum *= factor;
        if (part == 0u) { keep[mine] = factor; }
        for (var i = 0u; i < WEIGHTS; i++) {
            var weight = vec4<f32>();
            for (var j = 0u; j < 4u; j++) {
                if (score[i * 4u + j] > NOTHING) { weight[j] = exp(score[i * 4u + j] - most); }
            }
            // The sum is of what values are multiplied by.
            let rounded = Four(weight);
            let again = vec4<f32>(rounded);
            sum += again.x + again.y + again.z + again.w;
            weights[mine * P_PITCH + part * WEIGHTS + i] = rounded;
        }
        workgroupBarrier();
        if (workgroupUniformLoad(&scaled) == 1u) {
            coopStoreT(c0, &scores[stage], 16u);
            workgroupBarrier();
            scale_stage(stage, lane, rows_at);
            workgroupBarrier();
            c0 = coopLoadT<MatC>(&scores[stage], 16u);
            workgroupBarrier();
            coopStoreT(c1, &scores[stage], 16u);
            workgroupBarrier();
            scale_stage(stage, lane, rows_at);
            workgroupBarrier();
            c1 = coopLoadT<MatC>(&scores[stage], 16u);
            workgroupBarrier();
            coopStoreT(c2, &scores[stage], 16u);
            workgroupBarrier();
            scale_stage(stage, lane, rows_at);
            workgroupBarrier();
            c2 = coopLoadT<MatC>(&scores[stage], 16u);
            workgroupBarrier();
            coopStoreT(c3, &scores[stage], 16u);
            workgroupBarrier();
            scale_stage(stage, lane, rows_at);
            workgroupBarrier();
            c3 = coopLoadT<MatC>(&scores[stage], 16u);
        }
        for (var k = 0u; k < KEYS; k += 16u) {
            let w = coopLoadT<MatA>(&weights[rows_at * P_PITCH + k / 4u], P_PITCH);
            let at = k * KV_PITCH + column_fours;
            c0 = coopMultiplyAdd(w, coopLoadT<MatB>(&kv_tile[at], KV_PITCH), c0);
            c1 = coopMultiplyAdd(w, coopLoadT<MatB>(&kv_tile[at + 4u], KV_PITCH), c1);
            c2 = coopMultiplyAdd(w, coopLoadT<MatB>(&kv_tile[at + 8u], KV_PITCH), c2);
            c3 = coopMultiplyAdd(w, coopLoadT<MatB>(&kv_tile[at + 12u], KV_PITCH), c3);
        }
    }

    // What each query's sums are multiplied by.
    workgroupBarrier();
    found[index] = sum;
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < TQ; i++) { total += found[mine * TQ + i]; }
    let sink = sink_of(p.sinks, kv * p.group + (first + mine) % p.group);
    let m = max(most, sink);
    let factor = exp(most - m);
    if (part == 0u) { keep[mine] = factor * share_of(total * factor + sink_weight(p.sinks, sink, m)); }
    workgroupBarrier();
    coopStoreT(c0, &scores[stage], 16u);
    workgroupBarrier();
    emit(stage, lane, rows_at, column_fours * 4u, first, kv);
    workgroupBarrier();
    coopStoreT(c1, &scores[stage], 16u);
    workgroupBarrier();
    emit(stage, lane, rows_at, column_fours * 4u + 16u, first, kv);
    workgroupBarrier();
    coopStoreT(c2, &scores[stage], 16u);
    workgroupBarrier();
    emit(stage, lane, rows_at, column_fours * 4u + 32u, first, kv);
    workgroupBarrier();
    coopStoreT(c3, &scores[stage], 16u);
    workgroupBarrier();
    emit(stage, lane, rows_at, column_fours * 4u + 48u, first, kv);
}

// Four numbers of a vector of a state; zero behind its end.
fn four_of(at: u32, four: u32, width: u32, stride: u32) -> vec4<f32> {
    var x = vec4<f32>();
    if (four * 4u < width) { x = vec4(state_pair(at, four * 2u, width, stride), 0.0, 0.0); }
    if (four * 4u + 2u < width) {
        let y = state_pair(at, four * 2u + 1u, width, stride);
        x = vec4(x.xy, y);
    }
    for (var j = 0u; j < 4u; j++) {
        if (four * 4u + j >= width) { x[j] = 0.0; }
    }
    return x;
}

fn scale_stage(stage: u32, lane: u32, rows_at: u32) {
    for (var i = lane; i < 256u; i += 32u) { scores[stage + i] *= keep[rows_at + i / 16u]; }
}

fn emit(stage: u32, lane: u32, rows_at: u32, column: u32, first: u32, kv: u32) {
    for (var i = lane; i < 256u; i += 32u) {
        let query = first + rows_at + i / 16u;
        let at = column + i % 16u;
        if (query >= p.rows * p.group || at >= VALUE) { continue; }
        let row = query / p.group;
        let head = kv * p.group + query % p.group;
        var gate = 1.0;
        if (p.gated == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row + head * p.gate.head + at]); }
        a[p.out.at + row * p.out.row + head * p.out.head + at] = scores[stage + i] * keep[rows_at + i / 16u] * gate;
    }
}

// Where position `i` of a tile lies in the state.
fn place_of(i: u32, ring: u32) -> u32 {
    let place = ring + i;
    return select(place, place - p.positions, place >= p.positions);
}
