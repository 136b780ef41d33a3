// Attention of many rows: out[h] = sum_t softmax_t(scale q[h] . K[t], sink) V[t] * sigmoid(gate), with an online softmax.
//
// A workgroup takes QUERIES queries that share a head of keys: the query heads of the group of one row, then those of the
// next. It walks the positions that any of them sees in tiles of KEYS, at multiples of KEYS, so that a query's bits do not
// depend on the others. A thread makes the scores of QI queries (`y_lane + 16 i`) for 4 keys (`x_lane + 16 j`), out of chunks of
// CHUNK numbers in workgroup memory; then it adds to VI times 4 columns of its QI queries, out of SOME values at a time.
//
// WG: 256. QUERIES: 16, 32 or 64. KEY, VALUE: widths. LATENT 1: values are the first numbers of the keys. HALF: f16 in the
// state. Grid: (tiles of queries, the last first; kv heads).
// needs: common/common, attention/kv_cache, attention/softmax
// constants: KEY, LATENT, QUERIES, VALUE, WG

struct Params {
    q: View, out: View, gate: View,
    rows: u32, position: u32, window: u32,
    heads: u32, group: u32, positions: u32, values: u32, sinks: u32, gated: u32, scale: f32, tiles: u32,
}
var<immediate> p: Params;

const KEYS = 64u;
const QI = QUERIES / 16u;
const CHUNK = 32u;
// Vectors of a row of a chunk, and of weights; odd, so that neighbours lie in different banks.
const ROW = CHUNK / 4u + 1u;
const WEIGHTS_ROW = KEYS / 4u + 1u;
const VI = (VALUE + 63u) / 64u;
// A divisor of KEYS.
const SOME = 1u << firstLeadingBit(max(32u / VI, 1u));
const VALUE_STRIDE = LATENT * KEY + (1u - LATENT) * VALUE;
// Where keys begin behind queries; weights take the place of both.
const KEYS_AT = QUERIES * ROW;

var<workgroup> pool: array<vec4<f32>, max((QUERIES + KEYS) * ROW, QUERIES * WEIGHTS_ROW)>;
// Values, or what the 16 threads of a query found.
var<workgroup> some: array<vec4<f32>, max(SOME * VI * 16u, QUERIES * 4u)>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let kv_heads = p.heads / p.group;
    let work = group_index(id, count);
    if (work >= p.tiles * kv_heads) { return; }
    let kv = work % kv_heads;
    // The tiles that see most come first.
    let first = (p.tiles - 1u - work / kv_heads) * QUERIES;
    let all = p.rows * p.group;
    let first_position = p.position + first / p.group;
    let last_position = p.position + (min(first + QUERIES, all) - 1u) / p.group;
    let begin = first_position + 1u - min(first_position + 1u, p.window);

    let x_lane = index % 16u;
    let y_lane = index / 16u;
    var most: array<f32, QI>;
    var sum: array<f32, QI>;
    var y: array<vec4<f32>, QI * VI>;
    // @unroll
    for (var i = 0u; i < QI; i++) { most[i] = NOTHING; }

    for (var tile = begin / KEYS * KEYS; tile <= last_position; tile += KEYS) {
        let len = min(KEYS, last_position + 1u - tile);
        let ring = tile % p.positions;
        var score: array<vec4<f32>, QI>;
        // @unroll
        for (var i = 0u; i < QI; i++) { score[i] = vec4<f32>(); }
        for (var chunk = 0u; chunk < KEY; chunk += CHUNK) {
            workgroupBarrier();
            for (var i = index; i < QUERIES * CHUNK; i += WG) {
                let query = first + i / CHUNK;
                let at = chunk + i % CHUNK;
                var x = 0.0;
                if (query < all && at < KEY) {
                    let head = kv * p.group + query % p.group;
                    x = a[p.q.at + query / p.group * p.q.row + head * p.q.head + at];
                }
                pool[i / CHUNK * ROW + i % CHUNK / 4u][i % 4u] = x;
            }
            for (var i = index; i < KEYS * CHUNK / 2u; i += WG) {
                let r = i / (CHUNK / 2u);
                let pair = i % (CHUNK / 2u);
                let at = chunk / 2u + pair;
                var x = vec2<f32>();
                if (r < len && at * 2u < KEY) {
                    let begins = (place_of(r, ring) * kv_heads + kv) * KEY;
                    x = state_pair(begins, at, KEY, KEY);
                    if (at * 2u + 1u >= KEY) { x.y = 0.0; }
                }
                let to = KEYS_AT + r * ROW + pair / 2u;
                pool[to][pair % 2u * 2u] = x.x;
                pool[to][pair % 2u * 2u + 1u] = x.y;
            }
            workgroupBarrier();
            for (var d = 0u; d < CHUNK / 4u; d++) {
                var k: array<vec4<f32>, 4>;
                // @unroll
                for (var j = 0u; j < 4u; j++) { k[j] = pool[KEYS_AT + (x_lane + 16u * j) * ROW + d]; }
                // @unroll
                for (var i = 0u; i < QI; i++) {
                    let q = pool[(y_lane + 16u * i) * ROW + d];
                    score[i] += vec4(dot(q, k[0]), dot(q, k[1]), dot(q, k[2]), dot(q, k[3]));
                }
            }
        }

        // @unroll
        for (var i = 0u; i < QI; i++) {
            let query = first + y_lane + 16u * i;
            score[i] = select(vec4(NOTHING), score[i] * p.scale, sees(query, tile + x_lane));
            some[(y_lane + 16u * i) * 4u + x_lane / 4u][x_lane % 4u] =
                max(max(score[i].x, score[i].y), max(score[i].z, score[i].w));
        }
        workgroupBarrier();
        // @unroll
        for (var i = 0u; i < QI; i++) {
            let mine = y_lane + 16u * i;
            let before = most[i];
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                let part = some[mine * 4u + j];
                most[i] = max(most[i], max(max(part.x, part.y), max(part.z, part.w)));
            }
            let keep = exp(before - most[i]);
            let seen = sees(first + mine, tile + x_lane);
            let weight = select(vec4<f32>(), exp(score[i] - most[i]), seen);
            sum[i] = sum[i] * keep + (weight.x + weight.y + weight.z + weight.w);
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                pool[mine * WEIGHTS_ROW + (x_lane + 16u * j) / 4u][x_lane % 4u] = weight[j];
            }
            // @unroll
            for (var j = 0u; j < VI; j++) { y[i * VI + j] *= keep; }
        }

        for (var block = 0u; block < len; block += SOME) {
            workgroupBarrier();
            for (var i = index; i < SOME * VI * 32u; i += WG) {
                let r = i / (VI * 32u);
                let pair = i % (VI * 32u);
                var x = vec2<f32>();
                if (block + r < len && pair * 2u < VALUE) {
                    var at = (place_of(block + r, ring) * kv_heads + kv) * VALUE_STRIDE;
                    if (LATENT == 0u) { at += p.values; }
                    x = state_pair(at, pair, VALUE, VALUE_STRIDE);
                }
                let to = r * VI * 16u + pair / 2u;
                some[to][pair % 2u * 2u] = x.x;
                some[to][pair % 2u * 2u + 1u] = x.y;
            }
            workgroupBarrier();
            for (var r = 0u; r < SOME; r++) {
                var v: array<vec4<f32>, VI>;
                // @unroll
                for (var j = 0u; j < VI; j++) { v[j] = some[r * VI * 16u + x_lane + 16u * j]; }
                let n = block + r;
                // @unroll
                for (var i = 0u; i < QI; i++) {
                    let weight = pool[(y_lane + 16u * i) * WEIGHTS_ROW + n / 4u][n % 4u];
                    // @unroll
                    for (var j = 0u; j < VI; j++) { y[i * VI + j] += weight * v[j]; }
                }
            }
        }
    }

    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < QI; i++) {
        some[(y_lane + 16u * i) * 4u + x_lane / 4u][x_lane % 4u] = sum[i];
    }
    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < QI; i++) {
        let query = first + y_lane + 16u * i;
        if (query < all) {
            var total = 0.0;
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                let part = some[(y_lane + 16u * i) * 4u + j];
                total += part.x + part.y + part.z + part.w;
            }
            let sink = sink_of(p.sinks, kv * p.group + query % p.group);
            let m = max(most[i], sink);
            let factor = exp(most[i] - m);
            let share = factor * share_of(total * factor + sink_weight(p.sinks, sink, m));
            // @unroll
            for (var j = 0u; j < VI; j++) { emit(query, kv, (x_lane + 16u * j) * 4u, y[i * VI + j] * share); }
        }
    }
}

// Writes the four columns of a query from `column` on, as far as there are so many.
fn emit(query: u32, kv: u32, column: u32, y: vec4<f32>) {
    let row = query / p.group;
    let head = kv * p.group + query % p.group;
    for (var c = 0u; c < 4u && column + c < VALUE; c++) {
        var gate = 1.0;
        if (p.gated == 1u) { gate = sigmoid(a[p.gate.at + row * p.gate.row + head * p.gate.head + column + c]); }
        a[p.out.at + row * p.out.row + head * p.out.head + column + c] = y[c] * gate;
    }
}

// Which of the positions `t + 16 j` a query sees.
fn sees(query: u32, t: u32) -> vec4<bool> {
    let position = p.position + query / p.group;
    let begin = position + 1u - min(position + 1u, p.window);
    let all = vec4(t, t + 16u, t + 32u, t + 48u);
    return (all >= vec4(begin)) & (all <= vec4(position)) & vec4(query < p.rows * p.group);
}

// Where position `i` of a tile lies in the state.
fn place_of(i: u32, ring: u32) -> u32 {
    let place = ring + i;
    return select(place, place - p.positions, place >= p.positions);
}
