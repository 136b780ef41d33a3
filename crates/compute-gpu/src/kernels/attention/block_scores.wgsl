// Scores of a block of positions: score[h][t] = q[h] . K[t], for the heads of one row.
// K and q are staged in workgroup memory, in slices of SLICE words of a key. Each thread scores
// position `index % BLOCK` for THREAD_HEADS heads from head `index / BLOCK * THREAD_HEADS` on.
// WG: 4 BLOCK. TILE_HEADS: most heads, a power of two. K_WIDTH: head width. The kernel defines
// `k_offset(i)`: the element of the KV cache at which the key of position `i` of the block starts.
// needs: common/common, attention/kv_cache
// constants: KV_F16, K_WIDTH, TILE_HEADS, WG

const BLOCK = 64u;
const K_WORDS = (K_WIDTH + PER_WORD - 1u) / PER_WORD;
const SLICES = (K_WORDS + 63u) / 64u;
const SLICE = ((K_WORDS + SLICES - 1u) / SLICES + 3u) / 4u * 4u;
// Pitch of a slice of a key in vectors; odd, so that neighbours are in different banks.
const K_PITCH = (SLICE / 4u) | 1u;
const K_TILE_VECS = max(BLOCK * K_PITCH, WG);
const THREAD_HEADS = (TILE_HEADS + 3u) / 4u;

var<workgroup> k_tile: array<vec4<u32>, K_TILE_VECS>;
var<workgroup> q_tile: array<vec4<f32>, TILE_HEADS * SLICE * PER_WORD / 4u>;

// Scores `len` positions for `n_heads` queries, the first of which starts at element `q` of the
// activations. Other heads score zero. All threads of a workgroup call this together.
fn block_scores(index: u32, q: u32, head_stride: u32, n_heads: u32, len: u32) -> array<f32, THREAD_HEADS> {
    let t = index % BLOCK;
    let my_head = index / BLOCK * THREAD_HEADS;
    var score: array<f32, THREAD_HEADS>;
    for (var slice = 0u; slice < K_WORDS; slice += SLICE) {
        workgroupBarrier();
        for (var i = index; i < TILE_HEADS * SLICE * PER_WORD; i += WG) {
            let h = i / (SLICE * PER_WORD);
            let element = slice * PER_WORD + i % (SLICE * PER_WORD);
            var x = 0.0;
            if (h < n_heads && element < K_WIDTH) { x = act[q + h * head_stride + element]; }
            q_tile[i / 4u][i % 4u] = x;
        }
        for (var i = index; i < BLOCK * SLICE; i += WG) {
            let position = i / SLICE;
            let w = i % SLICE;
            var x = 0u;
            if (position < len && slice + w < K_WORDS) { x = kv_word(k_offset(position), slice + w, K_WIDTH, K_WIDTH); }
            k_tile[position * K_PITCH + w / 4u][w % 4u] = x;
        }
        workgroupBarrier();
        if (my_head >= TILE_HEADS) { continue; }
        for (var w = 0u; w < SLICE / 4u; w++) {
            let k = k_tile[t * K_PITCH + w];
            if (KV_F16 == 1u) {
                let low = vec4(unpack2x16float(k.x), unpack2x16float(k.y));
                let high = vec4(unpack2x16float(k.z), unpack2x16float(k.w));
                for (var j = 0u; j < THREAD_HEADS; j++) {
                    let head_offset = (my_head + j) * (SLICE / 2u) + w * 2u;
                    score[j] += dot(low, q_tile[head_offset]) + dot(high, q_tile[head_offset + 1u]);
                }
            } else {
                let low = bitcast<vec4<f32>>(k);
                for (var j = 0u; j < THREAD_HEADS; j++) {
                    score[j] += dot(low, q_tile[(my_head + j) * (SLICE / 4u) + w]);
                }
            }
        }
    }
    return score;
}
