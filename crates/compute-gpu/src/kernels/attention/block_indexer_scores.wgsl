// Block indexer, scores: score[h][b] = max_t q[h] . K[t] over the positions t of block b that a row
// sees; LOCAL_SCORE for the last `local` blocks. Rows are of any sequences whose keys are in one
// arena.
// WG: 256. TILE_HEADS: heads scored at once. K_WIDTH: head width. KV_F16: f16 in the KV cache.
// KEY_BLOCK: positions of a block, a power of two. Rows that see at most TOP_BLOCKS blocks need no
// scores.
// Grid: (rows, tiles of SPAN positions). Row `row * heads + h` of `scores` is that of head h.
// needs: common/common, attention/kv_cache, attention/row_table, attention/block_scores
// constants: KEY_BLOCK, K_WIDTH, TILE_HEADS, TOP_BLOCKS, WG

struct Params {
    q: View, scores: View,
    rows: u32, table: u32, heads: u32, local: u32, tiles: u32,
}
var<immediate> p: Params;
@group(0) @binding(2) var<storage, read> words: array<u32>;

// More than any score: it is finite, as Metal's fast math does not support infinity.
const LOCAL_SCORE = 3e38;
const LEAST_SCORE = -3e38;
// Positions of a workgroup: whole blocks.
const SPAN = max(KEY_BLOCK, BLOCK);
const SPAN_BLOCKS = SPAN / KEY_BLOCK;
// Positions of a block among those scored at once.
const PART = min(KEY_BLOCK, BLOCK);
const PARTS = BLOCK / PART;

var<workgroup> tile_scores: array<f32, TILE_HEADS * BLOCK>;
var<workgroup> best: array<f32, TILE_HEADS * SPAN_BLOCKS>;
var<private> first_position: u32;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let group = group_index(id, count);
    let row = group / p.tiles;
    let span = group % p.tiles * SPAN;
    if (row >= p.rows) { return; }
    kv_start = row_kv_start(p.table, row) * 4u;
    let visible = row_position(p.table, row) + 1u;
    let blocks = (visible + KEY_BLOCK - 1u) / KEY_BLOCK;
    if (blocks <= TOP_BLOCKS || span >= visible) { return; }
    let my_head = index / BLOCK * THREAD_HEADS;
    for (var head = 0u; head < p.heads; head += TILE_HEADS) {
        let n_heads = min(TILE_HEADS, p.heads - head);
        let q = p.q.offset + row * p.q.row_stride + head * p.q.head_stride;
        for (var i = index; i < TILE_HEADS * SPAN_BLOCKS; i += WG) { best[i] = LEAST_SCORE; }
        for (var start = span; start < min(span + SPAN, visible); start += BLOCK) {
            first_position = start;
            let len = min(BLOCK, visible - start);
            var score = block_scores(index, q, p.q.head_stride, n_heads, len);
            for (var j = 0u; j < THREAD_HEADS; j++) {
                if (my_head + j < TILE_HEADS) {
                    tile_scores[(my_head + j) * BLOCK + index % BLOCK] = score[j];
                }
            }
            workgroupBarrier();
            for (var i = index; i < n_heads * PARTS; i += WG) {
                let first = i % PARTS * PART;
                let slot = i / PARTS * SPAN_BLOCKS + (start - span + first) / KEY_BLOCK;
                var largest = best[slot];
                for (var t = first; t < min(first + PART, len); t++) {
                    largest = max(largest, tile_scores[i / PARTS * BLOCK + t]);
                }
                best[slot] = largest;
            }
            workgroupBarrier();
        }
        for (var i = index; i < n_heads * SPAN_BLOCKS; i += WG) {
            let block = span / KEY_BLOCK + i % SPAN_BLOCKS;
            let scores_row = row * p.heads + head + i / SPAN_BLOCKS;
            if (block < blocks) {
                let is_local = block + p.local >= blocks;
                act[p.scores.offset + scores_row * p.scores.row_stride + block] =
                    select(best[i], LOCAL_SCORE, is_local);
            }
        }
        workgroupBarrier();
    }
}

fn k_offset(i: u32) -> u32 {
    return (first_position + i) * K_WIDTH;
}
