// Decode attention (flash-decoding), grouped queries: computes what attention_split.wgsl does, for
// few rows of long contexts. Loads of K and V of a block of BLOCK positions are issued together,
// before the queries are ready, and stay in registers.
// KEY_THREADS threads share a key and keep their part of all queries. Then each thread owns a pair
// of columns of V and every V_GROUPS-th quad of positions.
// NEW_KV 1: K and V of the current token (`k`, `v`) are not in the KV cache yet. The workgroups of
// the last split take them from the activations, rounded as in the cache. Those of the first tile
// of heads also write them to the cache; no other workgroup reads that row. q and k are normalized
// and rotated on load (Q_NORM, K_NORM: 0 none, 1 RMSNorm without weight, 2 with weight; RoPE on
// the first ROPE_PAIRS pairs by a table of cosines and sines; INTERLEAVED: pairs are neighbours),
// and not written back. Without NEW_KV nothing is normalized or rotated.
// WG: 256. KV_F16: f16 in the KV cache. K_WIDTH, V_WIDTH: head widths, multiples of four words.
// KV_HEADS: KV heads; GROUP_HEADS: query heads per KV head. TILE_HEADS: most query heads of a
// workgroup, up to 8. KEY_THREADS: power of two, 8 to 32. V_COLUMNS: pairs of columns of V,
// rounded up to a power of two, 16 to WG. SINGLE_SPLIT 1: one split, so the output is written.
// Else max score, sum of weights and weighted V go to scratch for merge_splits.wgsl.
// Scratch: as in attention_split.wgsl. Grid: (rows, KV_HEADS, tiles of heads, splits).
// needs: common/common, common/f16_range, @team, attention/visible_splits, attention/softmax
// needs: @sum8, @kv
// constants: GROUP_HEADS, INTERLEAVED, KEY_THREADS, KV_F16, KV_HEADS, K_NORM, K_WIDTH, NEW_KV
// constants: Q_NORM, ROPE_PAIRS, SINGLE_SPLIT, TEAM, TILE_HEADS, V_COLUMNS, V_WIDTH, WG

struct Params {
    q: View, out: View, gate: View,
    k: u32, k_head_stride: u32, v: u32, v_head_stride: u32,
    rows: u32, splits: Splits,
    capacity: u32, v_offset: u32, sinks: u32, gated: u32, scale: f32,
    q_weight: u32, q_eps: f32, k_weight: u32, k_eps: f32, table: u32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<f32>;

const BLOCK = 32u;
const PER_WORD = 1u + KV_F16;
// Elements of a vector of four words; vectors of a key and of a value.
const VEC_WIDTH = 4u * PER_WORD;
const K_VECS = K_WIDTH / VEC_WIDTH;
const V_VECS = V_WIDTH / VEC_WIDTH;
const TILES = (GROUP_HEADS + TILE_HEADS - 1u) / TILE_HEADS;
// Vectors of a key per thread; positions scored at once; rounds per block.
const THREAD_VECS = (K_VECS + KEY_THREADS - 1u) / KEY_THREADS;
const POSITIONS_AT_ONCE = WG / KEY_THREADS;
const ROUNDS = BLOCK / POSITIONS_AT_ONCE;
// Pairs of elements of a query per thread of a team.
const TEAM_PAIRS = (K_WIDTH / 2u + TEAM - 1u) / TEAM;
const V_GROUPS = WG / V_COLUMNS;
const V_QUADS = (BLOCK / 4u + V_GROUPS - 1u) / V_GROUPS;
const HEAD_PAIRS = (TILE_HEADS + 1u) / 2u;
// Pitch of the scores of a head, not a multiple of the number of banks.
const SCORE_PITCH = BLOCK + 4u;

// Element `i` of vector `c` of head `h` is at (h VEC_WIDTH + i) K_VECS + c, so neighbouring
// threads read neighbouring words. The key of the current token follows the queries.
var<workgroup> q_tile: array<f32, (TILE_HEADS + 1u) * K_WIDTH>;
var<workgroup> new_v_words: array<u32, V_WIDTH / PER_WORD>;
var<workgroup> scores: array<f32, TILE_HEADS * SCORE_PITCH>;
var<workgroup> weights: array<vec4<f32>, TILE_HEADS * BLOCK / 4u>;
var<workgroup> sums: array<f32, TILE_HEADS * BLOCK / 4u>;
var<workgroup> rescale: array<f32, TILE_HEADS>;
var<workgroup> max_scores: array<f32, TILE_HEADS>;
// Weighted sums of two heads for a pair of columns.
var<workgroup> v_partials: array<vec4<f32>, WG * HEAD_PAIRS>;

// Cache row of the first visible position; last position stored in the cache; KV head.
var<private> first_kv_row: u32;
var<private> last_position: u32;
var<private> kv_head: u32;
// Position, KV cache and new K and V of the row.
var<private> kv: KvRow;

// A pair of elements that RoPE rotates together, with its norm weights and cosine and sine.
struct Pair { element: vec2<u32>, x: vec2<f32>, weight: vec2<f32>, rotation: vec2<f32> }

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let split = group % p.splits.count;
    let head_tile = group / p.splits.count % TILES;
    kv_head = group / p.splits.count / TILES % KV_HEADS;
    let row = group / p.splits.count / TILES / KV_HEADS;
    if (row >= p.rows) { return; }
    kv = kv_row_at(row);
    let visible = visible_at(kv.position, p.splits);
    let start = split * visible.per_split;
    if (start >= visible.count) { return; }
    let end = min(visible.count, start + visible.per_split);
    first_kv_row = visible.start % kv.capacity;
    let has_new = NEW_KV == 1u && end == visible.count;
    let stored = end - select(0u, 1u, has_new);
    // With NEW_KV at least one other position is visible, so there is always a row to load.
    last_position = stored - 1u;
    let head = kv_head * GROUP_HEADS + head_tile * TILE_HEADS;
    let n_heads = min(TILE_HEADS, GROUP_HEADS - head_tile * TILE_HEADS);

    var loaded_k = load_k(start, index);
    var loaded_v = load_v(start, index);
    let column = index % V_COLUMNS;
    let g = index / V_COLUMNS;
    var new_v = vec2<u32>();
    if (has_new && column < V_WIDTH / 2u) {
        let v = kv.v + kv_head * p.v_head_stride + column * 2u;
        new_v = to_kv(vec2(act[v], act[v + 1u]));
    }
    var key: array<Pair, TEAM_PAIRS>;
    if (has_new) { key = load_pairs(kv.k + kv_head * p.k_head_stride, K_NORM, p.k_weight); }
    for (var head_base = 0u; head_base < TILE_HEADS; head_base += WG / TEAM) {
        let h = head_base + team;
        let q = p.q.offset + row * p.q.row_stride + (head + min(h, n_heads - 1u)) * p.q.head_stride;
        let pairs = load_pairs(q, Q_NORM, p.q_weight);
        let scale = norm_factor(pairs, Q_NORM, p.q_eps);
        if (h < TILE_HEADS) { store_vector(h, pairs, scale, p.scale); }
    }
    if (has_new) {
        let scale = norm_factor(key, K_NORM, p.k_eps);
        if (team == 0u) { store_vector(TILE_HEADS, key, scale, 1.0); }
        if (g == 0u && column < V_WIDTH / 2u) {
            new_v_words[column * (2u / PER_WORD)] = new_v.x;
            if (KV_F16 == 0u) { new_v_words[column * 2u + 1u] = new_v.y; }
        }
    }
    workgroupBarrier();

    let key_thread = index % KEY_THREADS;
    var q: array<f32, TILE_HEADS * THREAD_VECS * VEC_WIDTH>;
    // @unroll
    for (var h = 0u; h < TILE_HEADS; h++) {
        // @unroll
        for (var i = 0u; i < THREAD_VECS; i++) {
            // @unroll
            for (var j = 0u; j < VEC_WIDTH; j++) {
                let c = i * KEY_THREADS + key_thread;
                let x = q_tile[(h * VEC_WIDTH + j) * K_VECS + min(c, K_VECS - 1u)];
                q[(h * THREAD_VECS + i) * VEC_WIDTH + j] = select(0.0, x, K_VECS % KEY_THREADS == 0u || c < K_VECS);
            }
        }
    }
    var new_k: array<vec4<u32>, THREAD_VECS>;
    if (has_new) {
        let kv_row = kv_row_of(stored) * KV_HEADS + kv_head;
        // @unroll
        for (var i = 0u; i < THREAD_VECS; i++) {
            let c = i * KEY_THREADS + key_thread;
            if (K_VECS % KEY_THREADS == 0u || c < K_VECS) {
                new_k[i] = new_k_vec(c);
                if (head_tile == 0u && index < KEY_THREADS) { store_kv(kv_row * K_VECS + c, new_k[i]); }
            }
        }
        if (head_tile == 0u) {
            for (var i = index; i < V_VECS; i += WG) {
                let w = i * 4u;
                let vec = vec4(new_v_words[w], new_v_words[w + 1u], new_v_words[w + 2u], new_v_words[w + 3u]);
                store_kv(kv.v_offset / VEC_WIDTH + kv_row * V_VECS + i, vec);
            }
        }
    }

    // Head and quad of positions that this thread weighs.
    let my_head = index / (BLOCK / 4u);
    let my_quad = index % (BLOCK / 4u);
    var max_score = MASKED;
    var sum = 0.0;
    var y: array<vec2<f32>, HEAD_PAIRS * 2u>;
    for (var block = start; block < end; block += BLOCK) {
        // @unroll
        for (var r = 0u; r < ROUNDS; r++) {
            let t = r * POSITIONS_AT_ONCE + index / KEY_THREADS;
            var s: array<f32, 8>;
            // @unroll
            for (var i = 0u; i < THREAD_VECS; i++) {
                var k = loaded_k[r * THREAD_VECS + i];
                if (NEW_KV == 1u && has_new && block + t == stored) { k = new_k[i]; }
                var k_values: array<f32, 8>;
                if (KV_F16 == 1u) {
                    let one = unpack2x16float(k.x);
                    let two = unpack2x16float(k.y);
                    let three = unpack2x16float(k.z);
                    let last = unpack2x16float(k.w);
                    k_values = array(one.x, one.y, two.x, two.y, three.x, three.y, last.x, last.y);
                } else {
                    let x = bitcast<vec4<f32>>(k);
                    k_values = array(x.x, x.y, x.z, x.w, 0.0, 0.0, 0.0, 0.0);
                }
                // @unroll
                for (var h = 0u; h < TILE_HEADS; h++) {
                    // @unroll
                    for (var j = 0u; j < VEC_WIDTH; j++) {
                        s[h] = fma(k_values[j], q[(h * THREAD_VECS + i) * VEC_WIDTH + j], s[h]);
                    }
                }
            }
            let all = sum8(vec4(s[0], s[1], s[2], s[3]), vec4(s[4], s[5], s[6], s[7]));
            let h = key_thread / (KEY_THREADS / 8u);
            if (key_thread % (KEY_THREADS / 8u) == 0u && h < TILE_HEADS) {
                scores[h * SCORE_PITCH + t] = select(MASKED, all, block + t < end);
            }
        }
        if (block + BLOCK < end) { loaded_k = load_k(block + BLOCK, index); }
        workgroupBarrier();
        if (my_head < TILE_HEADS) {
            let head_offset = my_head * SCORE_PITCH;
            let previous = max_score;
            // @unroll
            for (var t = 0u; t < BLOCK; t++) { max_score = max(max_score, scores[head_offset + t]); }
            var weight: vec4<f32>;
            // @unroll
            for (var i = 0u; i < 4u; i++) {
                let t = my_quad * 4u + i;
                weight[i] = select(0.0, exp(scores[head_offset + t] - max_score), block + t < end);
            }
            let factor = exp(previous - max_score);
            sum = fma(sum, factor, (weight.x + weight.y) + (weight.z + weight.w));
            weights[index] = weight;
            if (my_quad == 0u) { rescale[my_head] = factor; }
        }
        workgroupBarrier();
        // @unroll
        for (var h = 0u; h < TILE_HEADS; h++) { y[h] *= rescale[h]; }
        // @unroll
        for (var i = 0u; i < V_QUADS; i++) {
            let quad = g + i * V_GROUPS;
            if (V_QUADS * V_GROUPS * 4u == BLOCK || quad < BLOCK / 4u) {
                var v: array<vec2<f32>, 4>;
                // @unroll
                for (var j = 0u; j < 4u; j++) {
                    var word = loaded_v[i * 4u + j];
                    if (NEW_KV == 1u && has_new && block + quad * 4u + j == stored) { word = new_v; }
                    if (KV_F16 == 1u) { v[j] = unpack2x16float(word.x); } else { v[j] = bitcast<vec2<f32>>(word); }
                }
                // @unroll
                for (var h = 0u; h < TILE_HEADS; h++) {
                    let w = weights[h * (BLOCK / 4u) + quad];
                    y[h] = fma(vec2(w.x), v[0], y[h]);
                    y[h] = fma(vec2(w.y), v[1], y[h]);
                    y[h] = fma(vec2(w.z), v[2], y[h]);
                    y[h] = fma(vec2(w.w), v[3], y[h]);
                }
            }
        }
        if (block + BLOCK < end) { loaded_v = load_v(block + BLOCK, index); }
    }

    // @unroll
    for (var i = 0u; i < HEAD_PAIRS; i++) {
        v_partials[(g * HEAD_PAIRS + i) * V_COLUMNS + column] = vec4(y[2u * i], y[2u * i + 1u]);
    }
    if (my_head < TILE_HEADS) {
        sums[index] = sum;
        if (my_quad == 0u) { max_scores[my_head] = max_score; }
    }
    workgroupBarrier();
    let vectors = p.rows * KV_HEADS * GROUP_HEADS * p.splits.count;
    if (SINGLE_SPLIT == 0u && index < n_heads) {
        let vector = (row * KV_HEADS * GROUP_HEADS + head + index) * p.splits.count + split;
        scratch[vector * 2u] = max_scores[index];
        scratch[vector * 2u + 1u] = weight_sum(index);
    }
    for (var item = index; item < HEAD_PAIRS * V_COLUMNS; item += WG) {
        let element = item % V_COLUMNS * 2u;
        if (element >= V_WIDTH) { continue; }
        var all = v_partials[item];
        // @unroll
        for (var j = 1u; j < V_GROUPS; j++) { all += v_partials[j * HEAD_PAIRS * V_COLUMNS + item]; }
        for (var i = 0u; i < 2u; i++) {
            let h = item / V_COLUMNS * 2u + i;
            if (h >= n_heads) { break; }
            let x = select(all.xy, all.zw, i == 1u);
            if (SINGLE_SPLIT == 1u) {
                let sink = sink_score(p.sinks, head + h);
                let m = max(max_scores[h], sink);
                let factor = exp(max_scores[h] - m);
                let scale = reciprocal(fma(weight_sum(h), factor, sink_weight(p.sinks, sink, m)));
                var gate = vec2(1.0);
                if (p.gated == 1u) {
                    let start = p.gate.offset + row * p.gate.row_stride + (head + h) * p.gate.head_stride + element;
                    gate = vec2(sigmoid(act[start]), sigmoid(act[start + 1u]));
                }
                let out = p.out.offset + row * p.out.row_stride + (head + h) * p.out.head_stride + element;
                act[out] = x.x * factor * scale * gate.x;
                act[out + 1u] = x.y * factor * scale * gate.y;
            } else {
                let vector = (row * KV_HEADS * GROUP_HEADS + head + h) * p.splits.count + split;
                scratch[vectors * 2u + vector * V_WIDTH + element] = x.x;
                scratch[vectors * 2u + vector * V_WIDTH + element + 1u] = x.y;
            }
        }
    }
}

// Sum of the softmax weights of a head.
fn weight_sum(h: u32) -> f32 {
    var total = 0.0;
    for (var i = 0u; i < BLOCK / 4u; i++) { total += sums[h * (BLOCK / 4u) + i]; }
    return total;
}

// Row of the KV cache of visible position `i`.
fn kv_row_of(i: u32) -> u32 {
    let kv_row = first_kv_row + i;
    return select(kv_row, kv_row - kv.capacity, kv_row >= kv.capacity);
}

// Loads this thread's vectors of the keys of a block. Positions past the end are clamped instead
// of skipped: without branches all loads are in flight at once.
fn load_k(block: u32, index: u32) -> array<vec4<u32>, ROUNDS * THREAD_VECS> {
    var loaded_k: array<vec4<u32>, ROUNDS * THREAD_VECS>;
    // @unroll
    for (var r = 0u; r < ROUNDS; r++) {
        let element = (kv_row_of(min(block + r * POSITIONS_AT_ONCE + index / KEY_THREADS, last_position)) * KV_HEADS + kv_head) * K_VECS;
        // @unroll
        for (var i = 0u; i < THREAD_VECS; i++) {
            loaded_k[r * THREAD_VECS + i] = load_kv(element + min(i * KEY_THREADS + index % KEY_THREADS, K_VECS - 1u));
        }
    }
    return loaded_k;
}

// Loads this thread's words of V of a block: one with two f16, or two with f32.
fn load_v(block: u32, index: u32) -> array<vec2<u32>, V_QUADS * 4u> {
    var loaded_v: array<vec2<u32>, V_QUADS * 4u>;
    let word = min(index % V_COLUMNS, V_WIDTH / 2u - 1u) * (2u / PER_WORD);
    let base = kv.v_offset / VEC_WIDTH + word / 4u;
    // @unroll
    for (var i = 0u; i < V_QUADS; i++) {
        // @unroll
        for (var j = 0u; j < 4u; j++) {
            let t = (index / V_COLUMNS + i * V_GROUPS) * 4u + j;
            let element = base + (kv_row_of(min(block + t, last_position)) * KV_HEADS + kv_head) * V_VECS;
            loaded_v[i * 4u + j].x = load_kv_word(element, word % 4u);
            if (KV_F16 == 0u) { loaded_v[i * 4u + j].y = load_kv_word(element, word % 4u + 1u); }
        }
    }
    return loaded_v;
}

// Two values as the KV cache stores them.
fn to_kv(x: vec2<f32>) -> vec2<u32> {
    if (KV_F16 == 1u) { return vec2(pack_f16(x), 0u); }
    return bitcast<vec2<u32>>(x);
}

// Vector `c` of the key of the current token.
fn new_k_vec(c: u32) -> vec4<u32> {
    var x: array<f32, 8>;
    // @unroll
    for (var j = 0u; j < VEC_WIDTH; j++) { x[j] = q_tile[(TILE_HEADS * VEC_WIDTH + j) * K_VECS + c]; }
    let one = to_kv(vec2(x[0], x[1]));
    let two = to_kv(vec2(x[2], x[3]));
    if (KV_F16 == 0u) { return vec4(one, two); }
    return vec4(one.x, two.x, to_kv(vec2(x[4], x[5])).x, to_kv(vec2(x[6], x[7])).x);
}

// Loads this thread's pairs of a vector at `start`.
fn load_pairs(start: u32, norm: u32, weight: u32) -> array<Pair, TEAM_PAIRS> {
    var pairs: array<Pair, TEAM_PAIRS>;
    // @unroll
    for (var j = 0u; j < TEAM_PAIRS; j++) {
        let i = lane + j * TEAM;
        if (K_WIDTH / 2u % TEAM == 0u || i < K_WIDTH / 2u) {
            var element = vec2(2u * i, 2u * i + 1u);
            if (INTERLEAVED == 0u && i < ROPE_PAIRS) { element = vec2(i, i + ROPE_PAIRS); }
            pairs[j].element = element;
            pairs[j].x = vec2(act[start + element.x], act[start + element.y]);
            pairs[j].weight = vec2(1.0);
            if (norm == 2u) { pairs[j].weight = vec2(act[weight + element.x], act[weight + element.y]); }
            if (i < ROPE_PAIRS) {
                let angle = kv.table + 2u * i;
                pairs[j].rotation = vec2(bitcast<f32>(words[angle]), bitcast<f32>(words[angle + 1u]));
            }
        }
    }
    return pairs;
}

// RMSNorm factor of a vector, without its weight. All threads of a workgroup call this together.
fn norm_factor(pairs: array<Pair, TEAM_PAIRS>, norm: u32, eps: f32) -> f32 {
    if (norm == 0u) { return 1.0; }
    var squares = 0.0;
    // @unroll
    for (var j = 0u; j < TEAM_PAIRS; j++) {
        squares += dot(pairs[j].x, pairs[j].x);
    }
    return 1.0 / sqrt(team_sum(squares) / f32(K_WIDTH) + eps);
}

// Normalizes, rotates and scales a vector and stores it to workgroup memory.
fn store_vector(h: u32, pairs: array<Pair, TEAM_PAIRS>, scale: f32, factor: f32) {
    // @unroll
    for (var j = 0u; j < TEAM_PAIRS; j++) {
        let i = lane + j * TEAM;
        if (K_WIDTH / 2u % TEAM == 0u || i < K_WIDTH / 2u) {
            let pair = pairs[j];
            var x = pair.x * scale * pair.weight;
            if (i < ROPE_PAIRS) {
                x = vec2(x.x * pair.rotation.x - x.y * pair.rotation.y, x.y * pair.rotation.x + x.x * pair.rotation.y);
            }
            q_tile[(h * VEC_WIDTH + pair.element.x % VEC_WIDTH) * K_VECS + pair.element.x / VEC_WIDTH] = x.x * factor;
            q_tile[(h * VEC_WIDTH + pair.element.y % VEC_WIDTH) * K_VECS + pair.element.y / VEC_WIDTH] = x.y * factor;
        }
    }
}
