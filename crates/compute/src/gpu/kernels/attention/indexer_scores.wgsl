// The lightning indexer's scores: score[t] = sum_h weights[h] max(q[h] . K[t], 0), for positions that a row sees.
// WG: 256. HT: heads that are scored at once. KEY: width. HALF: f16 in the state.
// Grid: (rows, blocks of BLOCK positions). Rows that see no more than `n` positions need no scores.
// needs: common/common, attention/kv_cache, attention/block_scores
// constants: HT, KEY, WG

struct Params {
    q: View, weights: View, scores: View,
    rows: u32, position: u32, heads: u32, n: u32, blocks: u32,
}
var<immediate> p: Params;

var<workgroup> sums: array<f32, WG>;
var<private> first: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let row = group / p.blocks;
    first = group % p.blocks * BLOCK;
    let seen = p.position + row + 1u;
    if (row >= p.rows || seen <= p.n || group % p.blocks * BLOCK >= seen) { return; }
    let len = min(BLOCK, seen - group % p.blocks * BLOCK);
    let my_head = index / BLOCK * HPT;
    var sum = 0.0;
    for (var head = 0u; head < p.heads; head += HT) {
        let n_heads = min(HT, p.heads - head);
        let q = p.q.at + row * p.q.row + head * p.q.head;
        var score = scores_of(index, q, p.q.head, n_heads, len);
        for (var j = 0u; j < HPT; j++) {
            if (my_head + j < n_heads) {
                sum += a[p.weights.at + row * p.weights.row + head + my_head + j] * max(score[j], 0.0);
            }
        }
    }
    sums[index] = sum;
    workgroupBarrier();
    if (index < len) {
        var all = 0.0;
        for (var i = index; i < WG; i += BLOCK) { all += sums[i]; }
        a[p.scores.at + row * p.scores.row + first + index] = all;
    }
}

fn key_at(i: u32) -> u32 {
    return (first + i) * KEY;
}
