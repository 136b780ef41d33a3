// Attention of one row's query heads that share a head of keys and values, over a part of the positions that the row
// sees: with score[h][t] = scale q[h] . K[t] the largest score m[h], sum[h] = sum_t exp(score - m) and
// y[h] = sum_t exp(score - m) V[t]. Where all positions are one part (FINISH 1) the output is
//   out[h] = y / (sum + exp(sink - m)) * sigmoid(gate);
// else m, sum and y go to scratch, for `attention_merge`.
//
// A workgroup walks its part in blocks of BLOCK positions: `attention_scores` scores them, then each thread owns a pair of
// columns of the values, for all heads and for every G-th four positions. So keys and values are read once for all heads,
// and reads are coalesced.
//
// WG: 256. HT: most heads of a workgroup, a power of two. KEY, VALUE: widths. LATENT 1: values are the first numbers of
// the keys. NAMED 1: positions are those of a list. COLUMNS: pairs of values that threads take side by side, a power of two
// block 16 to WG. HALF: f16 in the state.
// Scratch: m and sum by (row, head, split), then y. Grid: (rows, kv heads, tiles of heads, splits).
// needs: common/common, @team, attention/kv_cache, attention/block_scores
// needs: attention/visible_splits, attention/softmax
// constants: COLUMNS, FINISH, HT, KEY, LATENT, NAMED, TEAM, VALUE, WG

struct Params {
    q: View, out: View, gate: View, list: View,
    rows: u32, position: u32, window: u32, alone: u32, least: u32, most: u32, splits: u32,
    heads: u32, group: u32, tiles: u32, positions: u32, values: u32, sinks: u32, gated: u32, scale: f32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read_write> scratch: array<f32>;

const PARTS = BLOCK / TEAM;
const PAIRS = (VALUE + 1u) / 2u;
const PASSES = (PAIRS + COLUMNS - 1u) / COLUMNS;
const G = WG / COLUMNS;
const VALUE_STRIDE = LATENT * KEY + (1u - LATENT) * VALUE;
// Pairs of heads whose sums lie in workgroup memory at once.
const ROUND = TILE / WG;

var<workgroup> weights: array<vec4<f32>, HT * BLOCK / 4u>;
var<workgroup> parts: array<f32, HT * PARTS>;
var<workgroup> keep: array<f32, HT>;
var<workgroup> largest: array<f32, HT>;
var<workgroup> named: array<u32, BLOCK>;
// Where a block begins in the state, and where the row itself lies; which head of keys.
var<private> ring: u32;
var<private> own: u32;
var<private> kv: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let split = group % p.splits;
    let head_tile = group / p.splits % p.tiles;
    let kv_heads = p.heads / p.group;
    kv = group / p.splits / p.tiles % kv_heads;
    let row = group / p.splits / p.tiles / kv_heads;
    if (row >= p.rows) { return; }
    let position = p.position + row;
    own = position % p.positions;
    let seen = seen_at(position, p.window, p.alone, p.least, p.most);
    let begin = split * seen.of_split;
    if (begin >= seen.count) { return; }
    let end = min(seen.count, begin + seen.of_split);

    // Heads of this workgroup, counted in the group.
    let first_head = head_tile * HT;
    let head = kv * p.group + first_head;
    let n_heads = min(HT, p.group - first_head);
    let q = p.q.at + row * p.q.row + head * p.q.head;

    // Which position and which heads this thread scores.
    let t = index % BLOCK;
    let my_head = index / BLOCK * HPT;
    let scores_heads = my_head < HT;
    var most: array<f32, HPT>;
    var sum: array<f32, HPT>;
    var score: array<f32, HPT>;
    for (var j = 0u; j < HPT; j++) { most[j] = NOTHING; }
    // Which values it sums up.
    let column = index % COLUMNS;
    let g = index / COLUMNS;
    var y: array<vec2<f32>, PASSES * HT>;

    for (var block = begin; block < end; block += BLOCK) {
        let len = min(BLOCK, end - block);
        ring = (seen.start + block) % p.positions;
        if (NAMED == 1u) {
            workgroupBarrier();
            if (index < BLOCK) {
                let bits = bitcast<u32>(a[p.list.at + row * p.list.row + min(block + index, end - 1u)]);
                // Neither negative nor NaN; minus zero is zero.
                var place = NONE;
                if (index < len && (bits < 0x7f800000u || bits == 0x80000000u)) {
                    place = u32(min(bitcast<f32>(bits & 0x7fffffffu), 16777216.0)) % p.positions;
                }
                named[index] = place;
            }
            workgroupBarrier();
        }

        score = scores_of(index, q, p.q.head, n_heads, len);
        var sees = t < len;
        if (NAMED == 1u) { sees = sees && named[t] != NONE; }
        for (var j = 0u; j < HPT; j++) {
            score[j] = select(NOTHING, score[j] * p.scale, sees);
            let part = team_max(score[j]);
            if (lane == 0u && scores_heads) { parts[(my_head + j) * PARTS + t / TEAM] = part; }
        }
        workgroupBarrier();
        if (scores_heads) {
            for (var j = 0u; j < HPT; j++) {
                let h = my_head + j;
                let before = most[j];
                for (var i = 0u; i < PARTS; i++) { most[j] = max(most[j], parts[h * PARTS + i]); }
                let factor = exp(before - most[j]);
                let weight = select(0.0, exp(score[j] - most[j]), sees);
                sum[j] = sum[j] * factor + weight;
                weights[h * (BLOCK / 4u) + t / 4u][t % 4u] = weight;
                if (t == 0u) { keep[h] = factor; }
            }
        }
        workgroupBarrier();

        for (var turn = 0u; turn < PASSES; turn++) {
            let pair = turn * COLUMNS + column;
            for (var h = 0u; h < HT; h++) { y[turn * HT + h] *= keep[h]; }
            if (pair >= PAIRS) { continue; }
            for (var four = g; four * 4u < len; four += G) {
                var v: array<vec2<f32>, 4>;
                for (var i = 0u; i < 4u; i++) {
                    // What is behind the last position has no weight.
                    let place = place_of(min(four * 4u + i, len - 1u));
                    var at = (place * kv_heads + kv) * VALUE_STRIDE;
                    if (LATENT == 0u) { at += p.values; }
                    v[i] = state_pair(at, pair, VALUE, VALUE_STRIDE);
                }
                for (var h = 0u; h < HT; h++) {
                    let w = weights[h * (BLOCK / 4u) + four];
                    y[turn * HT + h] += w.x * v[0] + w.y * v[1] + w.z * v[2] + w.w * v[3];
                }
            }
        }
    }

    // Sums of the threads of a head, then those of the threads of a column.
    for (var j = 0u; j < HPT; j++) {
        let part = team_sum(sum[j]);
        if (lane == 0u && scores_heads) { parts[(my_head + j) * PARTS + t / TEAM] = part; }
        if (t == 0u && scores_heads) { largest[my_head + j] = most[j]; }
    }
    for (var turn = 0u; turn < PASSES; turn++) {
        if (G > 1u) {
            for (var h = 0u; h < HT; h += 2u * ROUND) {
                workgroupBarrier();
                for (var i = 0u; i < ROUND && h + 2u * i < HT; i++) {
                    let one = turn * HT + h + 2u * i;
                    keys[i * WG + index] = bitcast<vec4<u32>>(vec4(y[one], y[min(one + 1u, PASSES * HT - 1u)]));
                }
                workgroupBarrier();
                if (g == 0u) {
                    for (var i = 0u; i < ROUND && h + 2u * i < HT; i++) {
                        var all = vec4<f32>();
                        for (var j = 0u; j < G; j++) {
                            all += bitcast<vec4<f32>>(keys[i * WG + j * COLUMNS + column]);
                        }
                        let one = turn * HT + h + 2u * i;
                        y[one] = all.xy;
                        if (HT > 1u) { y[min(one + 1u, PASSES * HT - 1u)] = all.zw; }
                    }
                }
            }
        }
    }
    workgroupBarrier();

    let vectors = p.rows * p.heads * p.splits;
    for (var h = 0u; h < n_heads; h++) {
        var total = 0.0;
        for (var i = 0u; i < PARTS; i++) { total += parts[h * PARTS + i]; }
        let vector = (row * p.heads + head + h) * p.splits + split;
        var factor = 1.0;
        if (FINISH == 1u) {
            let sink = sink_of(p.sinks, head + h);
            let m = max(largest[h], sink);
            factor = exp(largest[h] - m);
            total = fma(total, factor, sink_weight(p.sinks, sink, m));
        } else if (index == 0u) {
            scratch[vector * 2u] = largest[h];
            scratch[vector * 2u + 1u] = total;
        }
        if (g > 0u) { continue; }
        for (var turn = 0u; turn < PASSES; turn++) {
            let at = (turn * COLUMNS + column) * 2u;
            for (var i = 0u; i < 2u && at + i < VALUE; i++) {
                let x = y[turn * HT + h][i];
                if (FINISH == 1u) {
                    var gate = 1.0;
                    if (p.gated == 1u) {
                        gate = sigmoid(a[p.gate.at + row * p.gate.row + (head + h) * p.gate.head + at + i]);
                    }
                    let out = p.out.at + row * p.out.row + (head + h) * p.out.head + at + i;
                    a[out] = x * factor * share_of(total) * gate;
                } else {
                    scratch[vectors * 2u + vector * VALUE + at + i] = x;
                }
            }
        }
    }
}

// Where position `i` of a block lies in the state; one that a list does not name lies where the row itself does.
fn place_of(i: u32) -> u32 {
    if (NAMED == 1u) { return select(named[i], own, named[i] == NONE); }
    let place = ring + i;
    return select(place, place - p.positions, place >= p.positions);
}

fn key_at(i: u32) -> u32 {
    return (place_of(i) * (p.heads / p.group) + kv) * KEY;
}
