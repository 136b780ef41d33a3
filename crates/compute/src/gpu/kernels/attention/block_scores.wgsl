// Scores of a block of positions for some heads of one row: q[h] . K[t]. Keys and queries go to workgroup memory in chunks of
// CHUNK words of a key; each thread scores position `index % BLOCK` for heads `index / BLOCK * HPT ..` of HPT.
// WG: 4 BLOCK. HT: most heads, a power of two. KEY: width. The kernel says by `key_at` at which number of the state the key of
// a position of the block begins.
// needs: common/common, attention/kv_cache
// constants: HALF, HT, KEY, WG

const BLOCK = 64u;
const KW = (KEY + PER - 1u) / PER;
const CHUNKS = (KW + 63u) / 64u;
const CHUNK = ((KW + CHUNKS - 1u) / CHUNKS + 3u) / 4u * 4u;
// Vectors of a key's chunk in workgroup memory; odd, so that neighbours lie in different banks.
const ROW = (CHUNK / 4u) | 1u;
const TILE = max(BLOCK * ROW, WG);
const HPT = (HT + 3u) / 4u;

var<workgroup> keys: array<vec4<u32>, TILE>;
var<workgroup> queries: array<vec4<f32>, HT * CHUNK * PER / 4u>;

// Of `n_heads` queries, the first of which begins at number `q` of the activations, and `len` positions; other heads score
// zero. All threads of a workgroup call it together.
fn scores_of(index: u32, q: u32, head_stride: u32, n_heads: u32, len: u32) -> array<f32, HPT> {
    let t = index % BLOCK;
    let my_head = index / BLOCK * HPT;
    var score: array<f32, HPT>;
    for (var chunk = 0u; chunk < KW; chunk += CHUNK) {
        workgroupBarrier();
        for (var i = index; i < HT * CHUNK * PER; i += WG) {
            let h = i / (CHUNK * PER);
            let at = chunk * PER + i % (CHUNK * PER);
            var x = 0.0;
            if (h < n_heads && at < KEY) { x = a[q + h * head_stride + at]; }
            queries[i / 4u][i % 4u] = x;
        }
        for (var i = index; i < BLOCK * CHUNK; i += WG) {
            let r = i / CHUNK;
            let w = i % CHUNK;
            var x = 0u;
            if (r < len && chunk + w < KW) { x = state_word(key_at(r), chunk + w, KEY, KEY); }
            keys[r * ROW + w / 4u][w % 4u] = x;
        }
        workgroupBarrier();
        if (my_head >= HT) { continue; }
        for (var w = 0u; w < CHUNK / 4u; w++) {
            let k = keys[t * ROW + w];
            if (HALF == 1u) {
                let one = vec4(unpack2x16float(k.x), unpack2x16float(k.y));
                let two = vec4(unpack2x16float(k.z), unpack2x16float(k.w));
                for (var j = 0u; j < HPT; j++) {
                    let of_head = (my_head + j) * (CHUNK / 2u) + w * 2u;
                    score[j] += dot(one, queries[of_head]) + dot(two, queries[of_head + 1u]);
                }
            } else {
                let one = bitcast<vec4<f32>>(k);
                for (var j = 0u; j < HPT; j++) {
                    score[j] += dot(one, queries[(my_head + j) * (CHUNK / 4u) + w]);
                }
            }
        }
    }
    return score;
}
