// Attention of one row's query heads that share a head of keys and values, over a part of the positions that the row
// sees, as `attention` has it, made for few rows of a long context: what a workgroup reads of a block of BLOCK positions is
// requested at once, keys and values both, before anything is known of the queries, and lies in registers until it is used.
// LANES threads share a key and keep their part of all queries; then each thread owns a pair of columns of the values and
// every G-th four positions.
//
// FRESH 1: the row's own key and value, `k` and `v`, do not lie in the state yet. The workgroups of the last part take them
// from the activations, rounded as the state rounds them, and those of the first tile of heads write them there; nobody else
// reads that place. Then queries and keys are normed and rotated on their way (Q_NORM, K_NORM: 0 none, 1 RMSNorm without
// weight, 2 with weight; the first PAIRS pairs are rotated, by a table of cosines and sines; INTERLEAVED: where pairs
// lie), and not written back. Without FRESH there is nothing to be normed or rotated.
//
// WG: 256. HALF: f16 in the state. KEY, VALUE: widths, whole vectors of four words. KV_HEADS, GROUP: heads of keys, and of
// queries for each. HT: most heads of a workgroup, up to 8. LANES: a power of two, 8 to 32. COLUMNS: pairs of values, rounded up
// to a power of two, 16 to WG. FINISH 1: all positions are one part, and the output is written; else the largest score, the
// sum of weights and the weighted values go to scratch, for `attention_merge`.
// Scratch: as in `attention`. Grid: (rows, KV_HEADS, tiles of heads, splits).
// needs: common/common, @team, attention/visible_splits, attention/softmax, @sum8
// constants: COLUMNS, FINISH, FRESH, GROUP, HALF, HT, INTERLEAVED, KEY, KV_HEADS, K_NORM, LANES
// constants: PAIRS, Q_NORM, TEAM, VALUE, WG

struct Params {
    q: View, out: View, gate: View,
    k: u32, k_head: u32, v: u32, v_head: u32,
    rows: u32, position: u32, window: u32, alone: u32, least: u32, most: u32, splits: u32,
    positions: u32, values: u32, sinks: u32, gated: u32, scale: f32,
    q_weight: u32, q_eps: f32, k_weight: u32, k_eps: f32, table: u32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read_write> state: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<f32>;

const BLOCK = 32u;
const PER = 1u + HALF;
// Numbers of a vector of words, and vectors of a key and of a value.
const VEC = 4u * PER;
const VECS = KEY / VEC;
const VALUE_VECS = VALUE / VEC;
const TILES = (GROUP + HT - 1u) / HT;
// Vectors of a key that a thread takes, positions that are scored side by side, and how often.
const CHUNKS = (VECS + LANES - 1u) / LANES;
const STEP = WG / LANES;
const ROUNDS = BLOCK / STEP;
// Threads of a team own so many pairs of a query each.
const EACH = (KEY / 2u + TEAM - 1u) / TEAM;
const G = WG / COLUMNS;
const FOURS = (BLOCK / 4u + G - 1u) / G;
const HEAD_PAIRS = (HT + 1u) / 2u;
// Scores of a head; not a multiple of the banks of workgroup memory.
const ROW = BLOCK + 4u;

// Number `i` of a vector of words `c` of head `h` lies at (h VEC + i) VECS + c: threads side by side read side by side. The
// key of the row itself lies behind the queries.
var<workgroup> queries: array<f32, (HT + 1u) * KEY>;
var<workgroup> own_value: array<u32, VALUE / PER>;
var<workgroup> scores: array<f32, HT * ROW>;
var<workgroup> weights: array<vec4<f32>, HT * BLOCK / 4u>;
var<workgroup> sums: array<f32, HT * BLOCK / 4u>;
var<workgroup> keep: array<f32, HT>;
var<workgroup> largest: array<f32, HT>;
// Weighted values of two heads at a pair of columns.
var<workgroup> parts: array<vec4<f32>, WG * HEAD_PAIRS>;

// Where the first position lies that the row sees, the last of them that may be read, and which head of keys.
var<private> first: u32;
var<private> last: u32;
var<private> kv: u32;

// Two numbers of a vector that are rotated together, if at all.
struct Pair { at: vec2<u32>, x: vec2<f32>, weight: vec2<f32>, turn: vec2<f32> }

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let split = group % p.splits;
    let tile = group / p.splits % TILES;
    kv = group / p.splits / TILES % KV_HEADS;
    let row = group / p.splits / TILES / KV_HEADS;
    if (row >= p.rows) { return; }
    let position = p.position + row;
    let seen = seen_at(position, p.window, p.alone, p.least, p.most);
    let begin = split * seen.of_split;
    if (begin >= seen.count) { return; }
    let end = min(seen.count, begin + seen.of_split);
    first = seen.start % p.positions;
    let fresh = FRESH == 1u && end == seen.count;
    let stored = end - select(0u, 1u, fresh);
    // A row that is on its way to the state sees others, or there would be nothing to read instead of itself.
    last = stored - 1u;
    let head = kv * GROUP + tile * HT;
    let n_heads = min(HT, GROUP - tile * HT);

    var keys = keys_of(begin, index);
    var values = values_of(begin, index);
    let column = index % COLUMNS;
    let g = index / COLUMNS;
    var own = vec2<u32>();
    if (fresh && column < VALUE / 2u) {
        let v = p.v + kv * p.v_head + column * 2u;
        own = rounded(vec2(a[v], a[v + 1u]));
    }
    var key: array<Pair, EACH>;
    if (fresh) { key = pairs_of(p.k + kv * p.k_head, K_NORM, p.k_weight); }
    for (var turn = 0u; turn < HT; turn += WG / TEAM) {
        let h = turn + team;
        let q = p.q.at + row * p.q.row + (head + min(h, n_heads - 1u)) * p.q.head;
        let pairs = pairs_of(q, Q_NORM, p.q_weight);
        let scale = scale_of(pairs, Q_NORM, p.q_eps);
        if (h < HT) { put(h, pairs, scale, p.scale); }
    }
    if (fresh) {
        let scale = scale_of(key, K_NORM, p.k_eps);
        if (team == 0u) { put(HT, key, scale, 1.0); }
        if (g == 0u && column < VALUE / 2u) {
            own_value[column * (2u / PER)] = own.x;
            if (HALF == 0u) { own_value[column * 2u + 1u] = own.y; }
        }
    }
    workgroupBarrier();

    let l = index % LANES;
    var q: array<f32, HT * CHUNKS * VEC>;
    // @unroll
    for (var h = 0u; h < HT; h++) {
        // @unroll
        for (var i = 0u; i < CHUNKS; i++) {
            // @unroll
            for (var j = 0u; j < VEC; j++) {
                let c = i * LANES + l;
                let x = queries[(h * VEC + j) * VECS + min(c, VECS - 1u)];
                q[(h * CHUNKS + i) * VEC + j] = select(0.0, x, VECS % LANES == 0u || c < VECS);
            }
        }
    }
    var own_key: array<vec4<u32>, CHUNKS>;
    if (fresh) {
        let place = place_of(stored) * KV_HEADS + kv;
        // @unroll
        for (var i = 0u; i < CHUNKS; i++) {
            let c = i * LANES + l;
            if (VECS % LANES == 0u || c < VECS) {
                own_key[i] = own_key_at(c);
                if (tile == 0u && index < LANES) { state[place * VECS + c] = own_key[i]; }
            }
        }
        if (tile == 0u) {
            for (var i = index; i < VALUE_VECS; i += WG) {
                let w = i * 4u;
                state[p.values / VEC + place * VALUE_VECS + i] =
                    vec4(own_value[w], own_value[w + 1u], own_value[w + 2u], own_value[w + 3u]);
            }
        }
    }

    // Which head and which four positions this thread weighs.
    let my_head = index / (BLOCK / 4u);
    let my_four = index % (BLOCK / 4u);
    var most = NOTHING;
    var sum = 0.0;
    var y: array<vec2<f32>, HEAD_PAIRS * 2u>;
    for (var block = begin; block < end; block += BLOCK) {
        // @unroll
        for (var r = 0u; r < ROUNDS; r++) {
            let t = r * STEP + index / LANES;
            var s: array<f32, 8>;
            // @unroll
            for (var i = 0u; i < CHUNKS; i++) {
                var k = keys[r * CHUNKS + i];
                if (FRESH == 1u && fresh && block + t == stored) { k = own_key[i]; }
                var numbers: array<f32, 8>;
                if (HALF == 1u) {
                    let one = unpack2x16float(k.x);
                    let two = unpack2x16float(k.y);
                    let three = unpack2x16float(k.z);
                    let four = unpack2x16float(k.w);
                    numbers = array(one.x, one.y, two.x, two.y, three.x, three.y, four.x, four.y);
                } else {
                    let x = bitcast<vec4<f32>>(k);
                    numbers = array(x.x, x.y, x.z, x.w, 0.0, 0.0, 0.0, 0.0);
                }
                // @unroll
                for (var h = 0u; h < HT; h++) {
                    // @unroll
                    for (var j = 0u; j < VEC; j++) {
                        s[h] = fma(numbers[j], q[(h * CHUNKS + i) * VEC + j], s[h]);
                    }
                }
            }
            let all = sum_of_eight(vec4(s[0], s[1], s[2], s[3]), vec4(s[4], s[5], s[6], s[7]));
            let h = l / (LANES / 8u);
            if (l % (LANES / 8u) == 0u && h < HT) {
                scores[h * ROW + t] = select(NOTHING, all, block + t < end);
            }
        }
        if (block + BLOCK < end) { keys = keys_of(block + BLOCK, index); }
        workgroupBarrier();
        if (my_head < HT) {
            let of_head = my_head * ROW;
            let before = most;
            // @unroll
            for (var t = 0u; t < BLOCK; t++) { most = max(most, scores[of_head + t]); }
            var weight: vec4<f32>;
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                let t = my_four * 4u + i;
                weight[i] = select(0.0, exp(scores[of_head + t] - most), block + t < end);
            }
            let factor = exp(before - most);
            sum = fma(sum, factor, (weight.x + weight.y) + (weight.z + weight.w));
            weights[index] = weight;
            if (my_four == 0u) { keep[my_head] = factor; }
        }
        workgroupBarrier();
        // @unroll
        for (var h = 0u; h < HT; h++) { y[h] *= keep[h]; }
        // @unroll
        for (var i = 0u; i < FOURS; i++) {
            let four = g + i * G;
            if (FOURS * G * 4u == BLOCK || four < BLOCK / 4u) {
                var v: array<vec2<f32>, 4>;
                // @unroll
                for (var j = 0u; j < 4u; j++) {
                    var word = values[i * 4u + j];
                    if (FRESH == 1u && fresh && block + four * 4u + j == stored) { word = own; }
                    if (HALF == 1u) { v[j] = unpack2x16float(word.x); } else { v[j] = bitcast<vec2<f32>>(word); }
                }
                // @unroll
                for (var h = 0u; h < HT; h++) {
                    let w = weights[h * (BLOCK / 4u) + four];
                    y[h] = fma(vec2(w.x), v[0], y[h]);
                    y[h] = fma(vec2(w.y), v[1], y[h]);
                    y[h] = fma(vec2(w.z), v[2], y[h]);
                    y[h] = fma(vec2(w.w), v[3], y[h]);
                }
            }
        }
        if (block + BLOCK < end) { values = values_of(block + BLOCK, index); }
    }

    // @unroll
    for (var i = 0u; i < HEAD_PAIRS; i++) {
        parts[(g * HEAD_PAIRS + i) * COLUMNS + column] = vec4(y[2u * i], y[2u * i + 1u]);
    }
    if (my_head < HT) {
        sums[index] = sum;
        if (my_four == 0u) { largest[my_head] = most; }
    }
    workgroupBarrier();
    let vectors = p.rows * KV_HEADS * GROUP * p.splits;
    if (FINISH == 0u && index < n_heads) {
        let vector = (row * KV_HEADS * GROUP + head + index) * p.splits + split;
        scratch[vector * 2u] = largest[index];
        scratch[vector * 2u + 1u] = total_of(index);
    }
    for (var item = index; item < HEAD_PAIRS * COLUMNS; item += WG) {
        let at = item % COLUMNS * 2u;
        if (at >= VALUE) { continue; }
        var all = parts[item];
        // @unroll
        for (var j = 1u; j < G; j++) { all += parts[j * HEAD_PAIRS * COLUMNS + item]; }
        for (var i = 0u; i < 2u; i++) {
            let h = item / COLUMNS * 2u + i;
            if (h >= n_heads) { break; }
            let x = select(all.xy, all.zw, i == 1u);
            if (FINISH == 1u) {
                let sink = sink_of(p.sinks, head + h);
                let m = max(largest[h], sink);
                let factor = exp(largest[h] - m);
                let share = share_of(fma(total_of(h), factor, sink_weight(p.sinks, sink, m)));
                var gate = vec2(1.0);
                if (p.gated == 1u) {
                    let start = p.gate.at + row * p.gate.row + (head + h) * p.gate.head + at;
                    gate = vec2(sigmoid(a[start]), sigmoid(a[start + 1u]));
                }
                let out = p.out.at + row * p.out.row + (head + h) * p.out.head + at;
                a[out] = x.x * factor * share * gate.x;
                a[out + 1u] = x.y * factor * share * gate.y;
            } else {
                let vector = (row * KV_HEADS * GROUP + head + h) * p.splits + split;
                scratch[vectors * 2u + vector * VALUE + at] = x.x;
                scratch[vectors * 2u + vector * VALUE + at + 1u] = x.y;
            }
        }
    }
}

// The sum of a head's weights.
fn total_of(h: u32) -> f32 {
    var total = 0.0;
    for (var i = 0u; i < BLOCK / 4u; i++) { total += sums[h * (BLOCK / 4u) + i]; }
    return total;
}

// Where the position lies that is number `i` of those that the row sees.
fn place_of(i: u32) -> u32 {
    let place = first + i;
    return select(place, place - p.positions, place >= p.positions);
}

// This thread's vectors of the keys of a block. What is not there is read where something is, without a branch: all loads
// are under way at once.
fn keys_of(block: u32, index: u32) -> array<vec4<u32>, ROUNDS * CHUNKS> {
    var keys: array<vec4<u32>, ROUNDS * CHUNKS>;
    // @unroll
    for (var r = 0u; r < ROUNDS; r++) {
        let at = (place_of(min(block + r * STEP + index / LANES, last)) * KV_HEADS + kv) * VECS;
        // @unroll
        for (var i = 0u; i < CHUNKS; i++) {
            keys[r * CHUNKS + i] = state[at + min(i * LANES + index % LANES, VECS - 1u)];
        }
    }
    return keys;
}

// This thread's words of the values of a block: one of f16, or two.
fn values_of(block: u32, index: u32) -> array<vec2<u32>, FOURS * 4u> {
    var values: array<vec2<u32>, FOURS * 4u>;
    let word = min(index % COLUMNS, VALUE / 2u - 1u) * (2u / PER);
    let base = p.values / VEC + word / 4u;
    // @unroll
    for (var i = 0u; i < FOURS; i++) {
        // @unroll
        for (var j = 0u; j < 4u; j++) {
            let t = (index / COLUMNS + i * G) * 4u + j;
            let at = base + (place_of(min(block + t, last)) * KV_HEADS + kv) * VALUE_VECS;
            values[i * 4u + j].x = state[at][word % 4u];
            if (HALF == 0u) { values[i * 4u + j].y = state[at][word % 4u + 1u]; }
        }
    }
    return values;
}

// Two numbers as the state has them.
fn rounded(x: vec2<f32>) -> vec2<u32> {
    // The largest f16: what is beyond it ends there.
    if (HALF == 1u) { return vec2(pack2x16float(clamp(x, vec2(-65504.0), vec2(65504.0))), 0u); }
    return bitcast<vec2<u32>>(x);
}

// Vector `c` of the row's own key.
fn own_key_at(c: u32) -> vec4<u32> {
    var x: array<f32, 8>;
    // @unroll
    for (var j = 0u; j < VEC; j++) { x[j] = queries[(HT * VEC + j) * VECS + c]; }
    let one = rounded(vec2(x[0], x[1]));
    let two = rounded(vec2(x[2], x[3]));
    if (HALF == 0u) { return vec4(one, two); }
    return vec4(one.x, two.x, rounded(vec2(x[4], x[5])).x, rounded(vec2(x[6], x[7])).x);
}

// This thread's pairs of a vector that begins at number `start`.
fn pairs_of(start: u32, norm: u32, weight: u32) -> array<Pair, EACH> {
    var pairs: array<Pair, EACH>;
    // @unroll
    for (var j = 0u; j < EACH; j++) {
        let i = lane + j * TEAM;
        if (KEY / 2u % TEAM == 0u || i < KEY / 2u) {
            var at = vec2(2u * i, 2u * i + 1u);
            if (INTERLEAVED == 0u && i < PAIRS) { at = vec2(i, i + PAIRS); }
            pairs[j].at = at;
            pairs[j].x = vec2(a[start + at.x], a[start + at.y]);
            pairs[j].weight = vec2(1.0);
            if (norm == 2u) { pairs[j].weight = vec2(a[weight + at.x], a[weight + at.y]); }
            if (i < PAIRS) {
                let angle = p.table + 2u * i;
                pairs[j].turn = vec2(bitcast<f32>(words[angle]), bitcast<f32>(words[angle + 1u]));
            }
        }
    }
    return pairs;
}

// What a norm multiplies a vector by, beside its weight. All threads of a workgroup call it together.
fn scale_of(pairs: array<Pair, EACH>, norm: u32, eps: f32) -> f32 {
    if (norm == 0u) { return 1.0; }
    var squares = 0.0;
    // @unroll
    for (var j = 0u; j < EACH; j++) {
        squares += dot(pairs[j].x, pairs[j].x);
    }
    return 1.0 / sqrt(team_sum(squares) / f32(KEY) + eps);
}

// Norms and rotates a vector, times `factor`, on its way to workgroup memory.
fn put(h: u32, pairs: array<Pair, EACH>, scale: f32, factor: f32) {
    // @unroll
    for (var j = 0u; j < EACH; j++) {
        let i = lane + j * TEAM;
        if (KEY / 2u % TEAM == 0u || i < KEY / 2u) {
            let pair = pairs[j];
            var x = pair.x * scale * pair.weight;
            if (i < PAIRS) {
                x = vec2(x.x * pair.turn.x - x.y * pair.turn.y, x.y * pair.turn.x + x.x * pair.turn.y);
            }
            queries[(h * VEC + pair.at.x % VEC) * VECS + pair.at.x / VEC] = x.x * factor;
            queries[(h * VEC + pair.at.y % VEC) * VECS + pair.at.y / VEC] = x.y * factor;
        }
    }
}
