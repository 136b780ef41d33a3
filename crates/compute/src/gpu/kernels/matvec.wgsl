// out[r][o] = x[r] . W[o] + bias[o] for few rows of x, weights read once at the speed of memory. W is up to four matrices
// that meet the same x, one after another; each has a multiple of four rows, but for the last.
// A part of PART neighbouring threads works on four rows of weights at a time; its threads take every PART-th chunk of 32
// inputs. A workgroup walks `turns` blocks of 4 WG / PART rows.
// COLS: inputs, a multiple of 32. TARGETS: matrices. BIASED: 1 where biases are added, which lie among the activations, 2
// where what out has is.
// Grid: rows of x x workgroups that walk all rows of W.

// First word of the weights (or vector of four), first byte of scales and biases, first number of out, row of W that follows
// the last, first number of the bias.
struct Matrix { weights: u32, scales: u32, biases: u32, out: u32, end: u32, bias: u32 }
struct Params {
    x: u32, x_row: u32, out_row: u32, rows: u32, walkers: u32, turns: u32,
    m0: Matrix, m1: Matrix, m2: Matrix, m3: Matrix,
}
var<immediate> p: Params;

// The four rows that begin at row `o` of W.
struct Four { m: Matrix, at: vec4<u32>, count: u32, rows: Rows }

fn four(o: u32) -> Four {
    var m = p.m0;
    var start = 0u;
    if (TARGETS > 1u && o >= p.m0.end) { m = p.m1; start = p.m0.end; }
    if (TARGETS > 2u && o >= p.m1.end) { m = p.m2; start = p.m1.end; }
    if (TARGETS > 3u && o >= p.m2.end) { m = p.m3; start = p.m2.end; }
    let count = m.end - start;
    let at = vec4<u32>(o - start) + vec4<u32>(0u, 1u, 2u, 3u);
    let stored = min(at, vec4<u32>(count - 1u));
    let scales = stored / BLOCK_ROWS * ROW_SCALES;
    return Four(m, at, count, Rows(m.weights + stored * ROW_WORDS, m.scales + scales, m.biases + scales));
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let work = group_index(id, count);
    let row = work / p.walkers;
    if (row >= p.rows) { return; }
    let chunk = index % PART;
    let first = (work % p.walkers * p.turns * (WG / PART) + index / PART) * 4u;
    var now = four(first);
    var loaded = load(now.rows, min(chunk, CHUNKS - 1u));
    stage(p.x + row * p.x_row);
    for (var turn = 0u; turn < p.turns; turn++) {
        let sums = part_sum(products(loaded, now.rows, chunk));
        if (chunk == 0u) {
            let out = now.m.out + row * p.out_row;
            for (var i = 0u; i < 4u; i++) {
                if (now.at[i] < now.count) {
                    var y = sums[i];
                    if (BIASED == 1u) { y += a[now.m.bias + now.at[i]]; }
                    if (BIASED == 2u) { y += a[out + now.at[i]]; }
                    a[out + now.at[i]] = y;
                }
            }
        }
        if (turn + 1u < p.turns) {
            now = four(first + (turn + 1u) * (WG / PART) * 4u);
            loaded = load(now.rows, min(chunk, CHUNKS - 1u));
        }
    }
}
