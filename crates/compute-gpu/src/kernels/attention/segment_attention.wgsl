// Bidirectional attention within segments of rows (flash attention, online softmax):
// out[h] = sum_t softmax_t(scale q[h] . k[t]) v[t] over all rows t of the row's segment.
// A workgroup takes QUERIES rows of a segment and one head. It loops over the rows of the segment
// in tiles of TILE_KEYS, from the first one on, so a row's bits do not depend on other segments. A
// thread scores THREAD_QUERIES queries (`y_thread + 16 i`) for 4 keys (`x_thread + 16 j`), from
// slices of SLICE elements in workgroup memory. Then it accumulates V_VECS times 4 columns of its
// queries, from V_ROWS rows of v at a time.
// WG: 256. QUERIES: 16, 32 or 64. K_WIDTH, V_WIDTH: head widths.
// Table in `words`: first row of the segment, its rows, first query of the tile in the segment.
// Grid: (tiles of queries, heads).
// needs: common/common, attention/softmax
// constants: K_WIDTH, QUERIES, V_WIDTH, WG

struct Params {
    q: View, k: View, v: View, out: View,
    table: u32, tiles: u32, heads: u32, group: u32, scale: f32,
}
var<immediate> p: Params;
@group(0) @binding(1) var<storage, read> words: array<u32>;

const TILE_KEYS = 64u;
const THREAD_QUERIES = QUERIES / 16u;
const SLICE = 32u;
// Pitches in vectors; odd, so that neighbours are in different banks.
const PITCH = SLICE / 4u + 1u;
const WEIGHTS_PITCH = TILE_KEYS / 4u + 1u;
const V_VECS = (V_WIDTH + 63u) / 64u;
// A divisor of TILE_KEYS, and a multiple of 4.
const V_ROWS = 1u << firstLeadingBit(max(32u / V_VECS, 4u));
// k follows the queries; the softmax weights replace both.
const K_TILE = QUERIES * PITCH;

var<workgroup> qk_tile: array<vec4<f32>, max((QUERIES + TILE_KEYS) * PITCH, QUERIES * WEIGHTS_PITCH)>;
// Rows of v, or partial results of the 16 threads of a query.
var<workgroup> v_tile: array<vec4<f32>, max(V_ROWS * V_VECS * 16u, QUERIES * 4u)>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let work = group_index(id, count);
    if (work >= p.tiles * p.heads) { return; }
    let head = work % p.heads;
    let entry = p.table + work / p.heads * 3u;
    let first_row = words[entry];
    let rows = words[entry + 1u];
    let first = words[entry + 2u];
    let q_start = p.q.offset + head * p.q.head_stride + (first_row + first) * p.q.row_stride;
    let k_start = p.k.offset + head / p.group * p.k.head_stride + first_row * p.k.row_stride;
    let v_start = p.v.offset + head / p.group * p.v.head_stride + first_row * p.v.row_stride;
    let queries = min(rows - first, QUERIES);

    let x_thread = index % 16u;
    let y_thread = index / 16u;
    var max_score: array<f32, THREAD_QUERIES>;
    var sum: array<f32, THREAD_QUERIES>;
    var y: array<vec4<f32>, THREAD_QUERIES * V_VECS>;
    // @unroll
    for (var i = 0u; i < THREAD_QUERIES; i++) { max_score[i] = MASKED; }

    for (var tile = 0u; tile < rows; tile += TILE_KEYS) {
        let len = min(TILE_KEYS, rows - tile);
        var score: array<vec4<f32>, THREAD_QUERIES>;
        // @unroll
        for (var i = 0u; i < THREAD_QUERIES; i++) { score[i] = vec4<f32>(); }
        for (var slice = 0u; slice < K_WIDTH; slice += SLICE) {
            workgroupBarrier();
            for (var i = index; i < (QUERIES + TILE_KEYS) * SLICE; i += WG) {
                let r = i / SLICE;
                let element = slice + i % SLICE;
                var x = 0.0;
                if (element < K_WIDTH) {
                    if (r < queries) {
                        x = act[q_start + r * p.q.row_stride + element];
                    } else if (r >= QUERIES && r - QUERIES < len) {
                        x = act[k_start + (tile + r - QUERIES) * p.k.row_stride + element];
                    }
                }
                qk_tile[r * PITCH + i % SLICE / 4u][i % 4u] = x;
            }
            workgroupBarrier();
            let vectors = (min(SLICE, K_WIDTH - slice) + 3u) / 4u;
            for (var d = 0u; d < vectors; d++) {
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

        let is_key = vec4(x_thread, x_thread + 16u, x_thread + 32u, x_thread + 48u) < vec4(len);
        // @unroll
        for (var i = 0u; i < THREAD_QUERIES; i++) {
            score[i] = select(vec4(MASKED), score[i] * p.scale, is_key);
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
            let weight = select(vec4<f32>(), exp(score[i] - max_score[i]), is_key);
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
            for (var i = index; i < V_ROWS * V_VECS * 64u; i += WG) {
                let r = i / (V_VECS * 64u);
                let column = i % (V_VECS * 64u);
                var x = 0.0;
                if (block + r < len && column < V_WIDTH) {
                    x = act[v_start + (tile + block + r) * p.v.row_stride + column];
                }
                v_tile[r * V_VECS * 16u + column / 4u][column % 4u] = x;
            }
            workgroupBarrier();
            for (var r = 0u; r < V_ROWS; r += 4u) {
                var weight: array<vec4<f32>, THREAD_QUERIES>;
                // @unroll
                for (var i = 0u; i < THREAD_QUERIES; i++) {
                    weight[i] = qk_tile[(y_thread + 16u * i) * WEIGHTS_PITCH + (block + r) / 4u];
                }
                // @unroll
                for (var c = 0u; c < 4u; c++) {
                    // @unroll
                    for (var j = 0u; j < V_VECS; j++) {
                        let v = v_tile[(r + c) * V_VECS * 16u + x_thread + 16u * j];
                        // @unroll
                        for (var i = 0u; i < THREAD_QUERIES; i++) { y[i * V_VECS + j] += weight[i][c] * v; }
                    }
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
        let query = y_thread + 16u * i;
        if (query < queries) {
            var total = 0.0;
            // @unroll
            for (var j = 0u; j < 4u; j++) {
                let sums = v_tile[query * 4u + j];
                total += sums.x + sums.y + sums.z + sums.w;
            }
            let scale = reciprocal(total);
            let out = p.out.offset + (first_row + first + query) * p.out.row_stride + head * p.out.head_stride;
            // @unroll
            for (var j = 0u; j < V_VECS; j++) {
                write_out(out, (x_thread + 16u * j) * 4u, y[i * V_VECS + j] * scale);
            }
        }
    }
}

// Writes four columns of a vector from `column` on, up to V_WIDTH.
fn write_out(out: u32, column: u32, y: vec4<f32>) {
    for (var c = 0u; c < 4u && column + c < V_WIDTH; c++) { act[out + column + c] = y[c]; }
}
