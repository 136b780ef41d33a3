// Prefill attention (flash attention, online softmax): out[h] = sum_t softmax_t(scale q[h] . K[t],
// sink) V[t] * sigmoid(gate).
// A workgroup takes QUERIES queries of a sequence that share a KV head: the query heads of one row,
// then of the next. It loops over all positions that any of them sees, in tiles of TILE_KV, aligned
// to TILE_KV, so a query's bits do not depend on the other queries. A thread scores THREAD_QUERIES
// queries (`y_thread + 16 i`) for 4 keys (`x_thread + 16 j`), from slices of SLICE elements in
// workgroup memory. Then it accumulates V_VECS times 4 columns of its queries, from V_ROWS rows of
// V at a time.
// WG: 256. QUERIES: 16, 32 or 64. K_WIDTH, V_WIDTH: head widths. LATENT 1: V is the first elements
// of K (MLA). KV_F16: f16 in the KV cache.
// Grid: (tiles of queries, KV heads).
// needs: common/common, attention/kv_cache, attention/span_tiles, attention/softmax
// constants: K_WIDTH, LATENT, QUERIES, V_WIDTH, WG

struct Params {
    q: View, out: View, gate: View,
    table: u32, window: u32, heads: u32, group: u32, sinks: u32, gated: u32, scale: f32, tiles: u32,
}
var<immediate> p: Params;
// Tile of this workgroup.
var<private> span: SpanTile;

const TILE_KV = 64u;
const THREAD_QUERIES = QUERIES / 16u;
const SLICE = 32u;
// Pitches in vectors; odd, so that neighbours are in different banks.
const PITCH = SLICE / 4u + 1u;
const WEIGHTS_PITCH = TILE_KV / 4u + 1u;
const V_VECS = (V_WIDTH + 63u) / 64u;
// A divisor of TILE_KV.
const V_ROWS = 1u << firstLeadingBit(max(32u / V_VECS, 1u));
const V_STRIDE = LATENT * K_WIDTH + (1u - LATENT) * V_WIDTH;
// K follows the queries; the softmax weights replace both.
const K_TILE = QUERIES * PITCH;

var<workgroup> qk_tile: array<vec4<f32>, max((QUERIES + TILE_KV) * PITCH, QUERIES * WEIGHTS_PITCH)>;
// Rows of V, or partial results of the 16 threads of a query.
var<workgroup> v_tile: array<vec4<f32>, max(V_ROWS * V_VECS * 16u, QUERIES * 4u)>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let kv_heads = p.heads / p.group;
    let work = group_index(id, count);
    if (work >= p.tiles * kv_heads) { return; }
    let kv_head = work % kv_heads;
    span = span_tile_at(p.table, work / kv_heads);
    kv_start = span.kv_start * 4u;
    let first = span.first;
    let queries = span.rows * p.group;
    let first_position = span.position + first / p.group;
    let last_position = span.position + (min(first + QUERIES, queries) - 1u) / p.group;
    let start = first_position + 1u - min(first_position + 1u, p.window);

    let x_thread = index % 16u;
    let y_thread = index / 16u;
    var max_score: array<f32, THREAD_QUERIES>;
    var sum: array<f32, THREAD_QUERIES>;
    var y: array<vec4<f32>, THREAD_QUERIES * V_VECS>;
    // @unroll
    for (var i = 0u; i < THREAD_QUERIES; i++) { max_score[i] = MASKED; }

    for (var tile = start / TILE_KV * TILE_KV; tile <= last_position; tile += TILE_KV) {
        let len = min(TILE_KV, last_position + 1u - tile);
        let first_kv_row = tile % span.capacity;
        var score: array<vec4<f32>, THREAD_QUERIES>;
        // @unroll
        for (var i = 0u; i < THREAD_QUERIES; i++) { score[i] = vec4<f32>(); }
        for (var slice = 0u; slice < K_WIDTH; slice += SLICE) {
            workgroupBarrier();
            for (var i = index; i < QUERIES * SLICE; i += WG) {
                let query = first + i / SLICE;
                let element = slice + i % SLICE;
                var x = 0.0;
                if (query < queries && element < K_WIDTH) {
                    let head = kv_head * p.group + query % p.group;
                    x = act[p.q.offset + (span.first_row + query / p.group) * p.q.row_stride + head * p.q.head_stride + element];
                }
                qk_tile[i / SLICE * PITCH + i % SLICE / 4u][i % 4u] = x;
            }
            for (var i = index; i < TILE_KV * SLICE / 2u; i += WG) {
                let r = i / (SLICE / 2u);
                let pair = i % (SLICE / 2u);
                let element = slice / 2u + pair;
                var x = vec2<f32>();
                if (r < len && element * 2u < K_WIDTH) {
                    let k_start = (kv_row_of(r, first_kv_row) * kv_heads + kv_head) * K_WIDTH;
                    x = kv_pair(k_start, element, K_WIDTH, K_WIDTH);
                    if (element * 2u + 1u >= K_WIDTH) { x.y = 0.0; }
                }
                let dst = K_TILE + r * PITCH + pair / 2u;
                qk_tile[dst][pair % 2u * 2u] = x.x;
                qk_tile[dst][pair % 2u * 2u + 1u] = x.y;
            }
            workgroupBarrier();
            for (var d = 0u; d < SLICE / 4u; d++) {
                var k: array<vec4<f32>, 4>;
                // @unroll
                for (var j = 0u; j < 4u; j++) { k[j] = qk_tile[K_TILE + (x_thread + 16u * j) * PITCH + d]; }
                // @unroll
                for (var i = 0u; i < THREAD_QUERIES; i++) {
                    let q = qk_tile[(y_thread + 16u * i) * PITCH + d];
                    score[i] += vec4(dot(q, k[0]), dot(q, k[1]), dot(q, k[2]), dot(q, k[3]));
                }
            }
        }

        // @unroll
        for (var i = 0u; i < THREAD_QUERIES; i++) {
            let query = first + y_thread + 16u * i;
            score[i] = select(vec4(MASKED), score[i] * p.scale, visible_mask(query, tile + x_thread));
            v_tile[(y_thread + 16u * i) * 4u + x_thread / 4u][x_thread % 4u] =
                max(max(score[i].x, score[i].y), max(score[i].z, score[i].w));
        }
        workgroupBarrier();
        // @unroll
        for (var i = 0u; i < THREAD_QUERIES; i++) {
            let my_query = y_thread + 16u * i;
            let previous = max_score[i];
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                let maxima = v_tile[my_query * 4u + j];
                max_score[i] = max(max_score[i], max(max(maxima.x, maxima.y), max(maxima.z, maxima.w)));
            }
            let rescale = exp(previous - max_score[i]);
            let visible = visible_mask(first + my_query, tile + x_thread);
            let weight = select(vec4<f32>(), exp(score[i] - max_score[i]), visible);
            sum[i] = sum[i] * rescale + (weight.x + weight.y + weight.z + weight.w);
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                qk_tile[my_query * WEIGHTS_PITCH + (x_thread + 16u * j) / 4u][x_thread % 4u] = weight[j];
            }
            // @unroll
            for (var j = 0u; j < V_VECS; j++) { y[i * V_VECS + j] *= rescale; }
        }

        for (var block = 0u; block < len; block += V_ROWS) {
            workgroupBarrier();
            for (var i = index; i < V_ROWS * V_VECS * 32u; i += WG) {
                let r = i / (V_VECS * 32u);
                let pair = i % (V_VECS * 32u);
                var x = vec2<f32>();
                if (block + r < len && pair * 2u < V_WIDTH) {
                    var element = (kv_row_of(block + r, first_kv_row) * kv_heads + kv_head) * V_STRIDE;
                    if (LATENT == 0u) { element += span.v_offset; }
                    x = kv_pair(element, pair, V_WIDTH, V_STRIDE);
                }
                let dst = r * V_VECS * 16u + pair / 2u;
                v_tile[dst][pair % 2u * 2u] = x.x;
                v_tile[dst][pair % 2u * 2u + 1u] = x.y;
            }
            workgroupBarrier();
            for (var r = 0u; r < V_ROWS; r++) {
                var v: array<vec4<f32>, V_VECS>;
                // @unroll
                for (var j = 0u; j < V_VECS; j++) { v[j] = v_tile[r * V_VECS * 16u + x_thread + 16u * j]; }
                let n = block + r;
                // @unroll
                for (var i = 0u; i < THREAD_QUERIES; i++) {
                    let weight = qk_tile[(y_thread + 16u * i) * WEIGHTS_PITCH + n / 4u][n % 4u];
                    // @unroll
                    for (var j = 0u; j < V_VECS; j++) { y[i * V_VECS + j] += weight * v[j]; }
                }
            }
        }
    }

    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < THREAD_QUERIES; i++) {
        v_tile[(y_thread + 16u * i) * 4u + x_thread / 4u][x_thread % 4u] = sum[i];
    }
    workgroupBarrier();
    // @unroll
    for (var i = 0u; i < THREAD_QUERIES; i++) {
        let query = first + y_thread + 16u * i;
        if (query < queries) {
            var total = 0.0;
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                let sums = v_tile[(y_thread + 16u * i) * 4u + j];
                total += sums.x + sums.y + sums.z + sums.w;
            }
            let sink = sink_score(p.sinks, kv_head * p.group + query % p.group);
            let m = max(max_score[i], sink);
            let factor = exp(max_score[i] - m);
            let scale = factor * reciprocal(total * factor + sink_weight(p.sinks, sink, m));
            // @unroll
            for (var j = 0u; j < V_VECS; j++) { write_out(query, kv_head, (x_thread + 16u * j) * 4u, y[i * V_VECS + j] * scale); }
        }
    }
}

// Writes four columns of a query from `column` on, up to V_WIDTH.
fn write_out(query: u32, kv_head: u32, column: u32, y: vec4<f32>) {
    let row = span.first_row + query / p.group;
    let head = kv_head * p.group + query % p.group;
    for (var c = 0u; c < 4u && column + c < V_WIDTH; c++) {
        var gate = 1.0;
        if (p.gated == 1u) { gate = sigmoid(act[p.gate.offset + row * p.gate.row_stride + head * p.gate.head_stride + column + c]); }
        act[p.out.offset + row * p.out.row_stride + head * p.out.head_stride + column + c] = y[c] * gate;
    }
}

// Causal and window mask: which of the positions `t + 16 j` a query sees.
fn visible_mask(query: u32, t: u32) -> vec4<bool> {
    let position = span.position + query / p.group;
    let start = position + 1u - min(position + 1u, p.window);
    let positions_4 = vec4(t, t + 16u, t + 32u, t + 48u);
    return (positions_4 >= vec4(start)) & (positions_4 <= vec4(position)) & vec4(query < span.rows * p.group);
}

// Row of the KV cache (a ring buffer) of position `i` of a tile.
fn kv_row_of(i: u32, first_kv_row: u32) -> u32 {
    let kv_row = first_kv_row + i;
    return select(kv_row, kv_row - span.capacity, kv_row >= span.capacity);
}
