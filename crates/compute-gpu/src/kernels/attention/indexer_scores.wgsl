// Lightning indexer, scores: score[t] = sum_h weights[h] max(q[h] . K[t], 0), for the entries of
// `ratio` positions that a row sees. Rows are of any sequences whose keys are in one arena.
// WG: 256. TILE_HEADS: heads scored at once. K_WIDTH: head width. KV_F16: f16 in the KV cache.
// Rows that see at most `top_k` entries need no scores.
// Grid: (rows, blocks of BLOCK entries).
// needs: common/common, attention/kv_cache, attention/row_table, attention/block_scores
// constants: K_WIDTH, TILE_HEADS, WG

struct Params {
    q: View, weights: View, scores: View,
    rows: u32, table: u32, heads: u32, ratio: u32, top_k: u32, blocks: u32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;

var<workgroup> sums: array<f32, WG>;
var<private> first_entry: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let row = group / p.blocks;
    first_entry = group % p.blocks * BLOCK;
    if (row >= p.rows) { return; }
    kv_start = row_kv_start(p.table, row) * 4u;
    let visible = (row_position(p.table, row) + 1u) / p.ratio;
    if (visible <= p.top_k || group % p.blocks * BLOCK >= visible) { return; }
    let len = min(BLOCK, visible - group % p.blocks * BLOCK);
    let my_head = index / BLOCK * THREAD_HEADS;
    var sum = 0.0;
    for (var head = 0u; head < p.heads; head += TILE_HEADS) {
        let n_heads = min(TILE_HEADS, p.heads - head);
        let q = p.q.offset + row * p.q.row_stride + head * p.q.head_stride;
        var score = block_scores(index, q, p.q.head_stride, n_heads, len);
        for (var j = 0u; j < THREAD_HEADS; j++) {
            if (my_head + j < n_heads) {
                sum += act[p.weights.offset + row * p.weights.row_stride + head + my_head + j] * max(score[j], 0.0);
            }
        }
    }
    sums[index] = sum;
    workgroupBarrier();
    if (index < len) {
        var all = 0.0;
        for (var i = index; i < WG; i += BLOCK) { all += sums[i]; }
        act[p.scores.offset + row * p.scores.row_stride + first_entry + index] = all;
    }
}

fn k_offset(i: u32) -> u32 {
    return (first_entry + i) * K_WIDTH;
}
