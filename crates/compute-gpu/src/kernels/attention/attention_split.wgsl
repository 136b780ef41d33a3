// Split-KV attention (flash-decoding) for a row and the query heads that share a KV head, with rows
// of any sequences whose KV caches are in one arena. Over
// the positions t of a split, with score[h][t] = scale q[h] . K[t]: m[h] = max_t score, sum[h] =
// sum_t exp(score - m), y[h] = sum_t exp(score - m) V[t].
// With a single split (SINGLE_SPLIT 1), out[h] = y / (sum + exp(sink - m)) * sigmoid(gate). Else
// m, sum and y go to scratch for merge_splits.wgsl.
// A workgroup loops over its split in blocks of BLOCK positions. block_scores.wgsl scores a block.
// Then each thread owns a pair of columns of V, for all heads and every V_GROUPS-th quad of
// positions. So K and V are read once for all heads, and reads are coalesced.
// WG: 256. TILE_HEADS: most heads of a workgroup, a power of two. K_WIDTH, V_WIDTH: head widths.
// LATENT 1: V is the first elements of K (MLA). LISTED 1: attends to a list of entries of the
// cache (sparse attention); the window is the list, and the position at least that of its end.
// V_COLUMNS: threads side by side, one for each pair of columns of V; a power of two from 16 to
// WG. KV_F16: f16 in the KV cache.
// Scratch: m and sum by (row, head, split), then y. Grid: (rows, KV heads, tiles of heads,
// splits).
// needs: common/common, @team, attention/kv_cache, attention/row_table, attention/block_scores
// needs: attention/visible_splits, attention/softmax
// constants: K_WIDTH, LATENT, LISTED, SINGLE_SPLIT, TEAM, TILE_HEADS, V_COLUMNS, V_WIDTH, WG

struct Params {
    q: View, out: View, gate: View, list: View,
    rows: u32, splits: Splits,
    heads: u32, group: u32, tiles: u32, sinks: u32, gated: u32, scale: f32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;
@group(0) @binding(3) var<storage, read_write> scratch: array<f32>;

const TEAMS_PER_BLOCK = BLOCK / TEAM;
const V_PAIRS = (V_WIDTH + 1u) / 2u;
const PASSES = (V_PAIRS + V_COLUMNS - 1u) / V_COLUMNS;
const V_GROUPS = WG / V_COLUMNS;
const V_STRIDE = LATENT * K_WIDTH + (1u - LATENT) * V_WIDTH;
// Pairs of heads whose sums fit in workgroup memory at once.
const ROUND_PAIRS = K_TILE_VECS / WG;

var<workgroup> weights: array<vec4<f32>, TILE_HEADS * BLOCK / 4u>;
var<workgroup> team_partials: array<f32, TILE_HEADS * TEAMS_PER_BLOCK>;
var<workgroup> rescale: array<f32, TILE_HEADS>;
var<workgroup> max_scores: array<f32, TILE_HEADS>;
var<workgroup> listed_rows: array<u32, BLOCK>;
// Capacity of the row's cache; cache row of the first position of the block; KV head.
var<private> capacity: u32;
var<private> first_kv_row: u32;
var<private> kv_head: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let group = group_index(id, count);
    let split = group % p.splits.count;
    let head_tile = group / p.splits.count % p.tiles;
    let kv_heads = p.heads / p.group;
    kv_head = group / p.splits.count / p.tiles % kv_heads;
    let row = group / p.splits.count / p.tiles / kv_heads;
    if (row >= p.rows) { return; }
    kv_start = row_kv_start(p.splits.position, row) * 4u;
    let position = row_position(p.splits.position, row);
    capacity = row_capacity(p.splits.position, row);
    let v_offset = row_v_offset(p.splits.position, row);
    let visible = visible_at(position, p.splits);
    let start = split * visible.per_split;
    if (start >= visible.count) { return; }
    let end = min(visible.count, start + visible.per_split);

    // Heads of this workgroup, counted within the group of the KV head.
    let first_head = head_tile * TILE_HEADS;
    let head = kv_head * p.group + first_head;
    let n_heads = min(TILE_HEADS, p.group - first_head);
    let q = p.q.offset + row * p.q.row_stride + head * p.q.head_stride;
    // The head stride is 0 if all KV heads share a list.
    let list = p.list.offset + row * p.list.row_stride + kv_head * p.list.head_stride;

    // Position and heads that this thread scores.
    let t = index % BLOCK;
    let my_head = index / BLOCK * THREAD_HEADS;
    let scores_heads = my_head < TILE_HEADS;
    var max_score: array<f32, THREAD_HEADS>;
    var sum: array<f32, THREAD_HEADS>;
    var score: array<f32, THREAD_HEADS>;
    for (var j = 0u; j < THREAD_HEADS; j++) { max_score[j] = MASKED; }
    // Columns of V that this thread sums.
    let column = index % V_COLUMNS;
    let g = index / V_COLUMNS;
    var y: array<vec2<f32>, PASSES * TILE_HEADS>;

    for (var block = start; block < end; block += BLOCK) {
        let len = min(BLOCK, end - block);
        first_kv_row = (visible.start + block) % capacity;
        if (LISTED == 1u) {
            workgroupBarrier();
            if (index < BLOCK) {
                let bits = bitcast<u32>(act[list + min(block + index, end - 1u)]);
                // Neither negative nor NaN; -0.0 counts as 0.
                var kv_row = NONE;
                if (index < len && (bits < 0x7f800000u || bits == 0x80000000u)) {
                    kv_row = u32(min(bitcast<f32>(bits & 0x7fffffffu), 16777216.0)) % capacity;
                }
                listed_rows[index] = kv_row;
            }
            workgroupBarrier();
            // Padding is at the end.
            if (listed_rows[0] == NONE) { break; }
        }

        score = block_scores(index, q, p.q.head_stride, n_heads, len);
        var sees = t < len;
        if (LISTED == 1u) { sees = sees && listed_rows[t] != NONE; }
        for (var j = 0u; j < THREAD_HEADS; j++) {
            score[j] = select(MASKED, score[j] * p.scale, sees);
            let team_value = team_max(score[j]);
            if (lane == 0u && scores_heads) { team_partials[(my_head + j) * TEAMS_PER_BLOCK + t / TEAM] = team_value; }
        }
        workgroupBarrier();
        if (scores_heads) {
            for (var j = 0u; j < THREAD_HEADS; j++) {
                let h = my_head + j;
                let previous = max_score[j];
                for (var i = 0u; i < TEAMS_PER_BLOCK; i++) { max_score[j] = max(max_score[j], team_partials[h * TEAMS_PER_BLOCK + i]); }
                let factor = exp(previous - max_score[j]);
                let weight = select(0.0, exp(score[j] - max_score[j]), sees);
                sum[j] = sum[j] * factor + weight;
                weights[h * (BLOCK / 4u) + t / 4u][t % 4u] = weight;
                if (t == 0u) { rescale[h] = factor; }
            }
        }
        workgroupBarrier();

        for (var pass_index = 0u; pass_index < PASSES; pass_index++) {
            let pair = pass_index * V_COLUMNS + column;
            for (var h = 0u; h < TILE_HEADS; h++) { y[pass_index * TILE_HEADS + h] *= rescale[h]; }
            if (pair >= V_PAIRS) { continue; }
            for (var four = g; four * 4u < len; four += V_GROUPS) {
                var v: array<vec2<f32>, 4>;
                for (var i = 0u; i < 4u; i++) {
                    // Positions past the end have weight 0.
                    let kv_row = kv_row_of(min(four * 4u + i, len - 1u));
                    var element = (kv_row * kv_heads + kv_head) * V_STRIDE;
                    if (LATENT == 0u) { element += v_offset; }
                    v[i] = kv_pair(element, pair, V_WIDTH, V_STRIDE);
                }
                for (var h = 0u; h < TILE_HEADS; h++) {
                    let w = weights[h * (BLOCK / 4u) + four];
                    y[pass_index * TILE_HEADS + h] += w.x * v[0] + w.y * v[1] + w.z * v[2] + w.w * v[3];
                }
            }
        }
    }

    // Reduces over the threads of a head, then over the threads of a column.
    for (var j = 0u; j < THREAD_HEADS; j++) {
        let team_value = team_sum(sum[j]);
        if (lane == 0u && scores_heads) { team_partials[(my_head + j) * TEAMS_PER_BLOCK + t / TEAM] = team_value; }
        if (t == 0u && scores_heads) { max_scores[my_head + j] = max_score[j]; }
    }
    for (var pass_index = 0u; pass_index < PASSES; pass_index++) {
        if (V_GROUPS > 1u) {
            for (var h = 0u; h < TILE_HEADS; h += 2u * ROUND_PAIRS) {
                workgroupBarrier();
                for (var i = 0u; i < ROUND_PAIRS && h + 2u * i < TILE_HEADS; i++) {
                    let column_sum = pass_index * TILE_HEADS + h + 2u * i;
                    k_tile[i * WG + index] = bitcast<vec4<u32>>(vec4(y[column_sum], y[min(column_sum + 1u, PASSES * TILE_HEADS - 1u)]));
                }
                workgroupBarrier();
                if (g == 0u) {
                    for (var i = 0u; i < ROUND_PAIRS && h + 2u * i < TILE_HEADS; i++) {
                        var all = vec4<f32>();
                        for (var j = 0u; j < V_GROUPS; j++) {
                            all += bitcast<vec4<f32>>(k_tile[i * WG + j * V_COLUMNS + column]);
                        }
                        let column_sum = pass_index * TILE_HEADS + h + 2u * i;
                        y[column_sum] = all.xy;
                        if (TILE_HEADS > 1u) { y[min(column_sum + 1u, PASSES * TILE_HEADS - 1u)] = all.zw; }
                    }
                }
            }
        }
    }
    workgroupBarrier();

    let vectors = p.rows * p.heads * p.splits.count;
    for (var h = 0u; h < n_heads; h++) {
        var total = 0.0;
        for (var i = 0u; i < TEAMS_PER_BLOCK; i++) { total += team_partials[h * TEAMS_PER_BLOCK + i]; }
        let vector = (row * p.heads + head + h) * p.splits.count + split;
        var factor = 1.0;
        if (SINGLE_SPLIT == 1u) {
            let sink = sink_score(p.sinks, head + h);
            let m = max(max_scores[h], sink);
            factor = exp(max_scores[h] - m);
            total = fma(total, factor, sink_weight(p.sinks, sink, m));
        } else if (index == 0u) {
            scratch[vector * 2u] = max_scores[h];
            scratch[vector * 2u + 1u] = total;
        }
        if (g > 0u) { continue; }
        for (var pass_index = 0u; pass_index < PASSES; pass_index++) {
            let element = (pass_index * V_COLUMNS + column) * 2u;
            for (var i = 0u; i < 2u && element + i < V_WIDTH; i++) {
                let x = y[pass_index * TILE_HEADS + h][i];
                if (SINGLE_SPLIT == 1u) {
                    var gate = 1.0;
                    if (p.gated == 1u) {
                        gate = sigmoid(act[p.gate.offset + row * p.gate.row_stride + (head + h) * p.gate.head_stride + element + i]);
                    }
                    let out = p.out.offset + row * p.out.row_stride + (head + h) * p.out.head_stride + element + i;
                    act[out] = x * factor * reciprocal(total) * gate;
                } else {
                    scratch[vectors * 2u + vector * V_WIDTH + element + i] = x;
                }
            }
        }
    }
}

// Row of the KV cache of position `i` of a block. Padding of a list stands for the first entry of
// the block.
fn kv_row_of(i: u32) -> u32 {
    if (LISTED == 1u) { return select(listed_rows[i], listed_rows[0], listed_rows[i] == NONE); }
    let kv_row = first_kv_row + i;
    return select(kv_row, kv_row - capacity, kv_row >= capacity);
}

fn k_offset(i: u32) -> u32 {
    return (kv_row_of(i) * (p.heads / p.group) + kv_head) * K_WIDTH;
}
