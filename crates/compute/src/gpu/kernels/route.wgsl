// From a mixer's output to the choice of experts, for one row, in one workgroup: x += other; normed = RMSNorm(x); logits = W
// normed + bias; then topk_rank.wgsl. One after another these are small, and each dispatch that waits for the one before costs
// more than it computes.
// A team works on four rows of W at a time. COLS: numbers of x, a multiple of 32. EACH: those of a thread, at most.
// Grid: one workgroup of WG threads.

struct Params {
    logits: View, ids: View, weights: View, correction: u32, expert_scale: u32, scale: f32,
    x: u32, other: u32, normed: u32, norm: u32, eps: f32,
    w: u32, w_scales: u32, w_biases: u32, bias: u32,
}
var<immediate> p: Params;
@group(0) @binding(3) var<storage, read_write> report: array<atomic<u32>>;

const ROW_WORDS = select(COLS * BITS / 32u, CHUNKS * VECTORS, VECTORS > 0u);
const ROW_SCALES = select((COLS + BLOCK_COLS - 1u) / BLOCK_COLS * select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u), 0u, ELEMENT < 3u);

fn rows_of(o: u32) -> Rows {
    let stored = min(vec4<u32>(o) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
    let scales = stored / BLOCK_ROWS * ROW_SCALES;
    return Rows(p.w + stored * ROW_WORDS, p.w_scales + scales, p.w_biases + scales);
}

@compute @workgroup_size(WG)
fn main(@builtin(local_invocation_index) index: u32) {
    team_begin(index);
    let chunk = index % PART;
    let first = index / PART * 4u;
    var rows = rows_of(first);
    var loaded = load(rows, min(chunk, CHUNKS - 1u));
    var kept: array<f32, EACH>;
    var squares = 0.0;
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i >= COLS) { break; }
        let v = a[p.x + i] + a[p.other + i];
        a[p.x + i] = v;
        kept[j] = v;
        squares += v * v;
    }
    let scale = 1.0 / sqrt(group_sum(squares) / f32(COLS) + p.eps);
    for (var j = 0u; j < EACH; j++) {
        let i = index + j * WG;
        if (i >= COLS) { break; }
        let y = kept[j] * scale * a[p.norm + i];
        a[p.normed + i] = y;
        x_numbers[i / 4u % 8u * CHUNKS + i / 32u][i % 4u] = y;
    }
    workgroupBarrier();
    for (var o = first; o - first < N; o += WG / PART * 4u) {
        let sums = part_sum(products(loaded, rows, chunk));
        if (chunk == 0u) {
            for (var i = 0u; i < 4u; i++) {
                if (o + i < N) {
                    var y = sums[i];
                    if (BIASED == 1u) { y += a[p.bias + o + i]; }
                    a[p.logits.at + o + i] = y;
                }
            }
        }
        rows = rows_of(o + WG / PART * 4u);
        if (o - first + WG / PART * 4u < N) { loaded = load(rows, min(chunk, CHUNKS - 1u)); }
    }
    storageBarrier();
    workgroupBarrier();
    rank_row(0u);
}
