// out[r][o] = x[r] . W[o] + bias[o] for few rows of x, weights read once at the speed of memory. W is up to four matrices
// that meet the same x, one after another; each has a multiple of four rows, but for the last.
// Parts of PART threads work on ROWS rows of weights at a time, as products.wgsl has it. A workgroup walks `turns` blocks of
// ROWS WG / PART rows.
// COLS: inputs, a multiple of 32. TARGETS: matrices. BIASED: 1 where biases are added, which lie among the activations, 2
// where what out has is.
// NORM: x is normed on its way; the first workgroup of a row also writes it, to `x_row`, where others will read it. Rows lie one
// behind another, there and here.
// HEAD: x has heads that are yet to be normed, as fetch.wgsl has it; the sums of their squares begin at m2.out, rows m2.bias apart.
// ADDED: out of the only matrix is also added to what lies at m1.out, its rows m1.bias apart: the residual stream.
// Grid: rows of x x workgroups that walk all rows of W.
// needs: common/common, @team, @row_sums, gemv/row_products, gemv/stage_x
// constants: ADDED, BIASED, BLOCK_ROWS, COLS, HEAD, NORM, PART, ROWS, TARGETS, WG

// First word of the weights (or vector of four), first byte of scales and biases, first number of out, row of W that follows
// the last; first number of the bias, or, of several matrices and rows, which have none, how far rows of out are apart.
struct Matrix { weights: u32, scales: u32, biases: u32, out: u32, end: u32, bias: u32 }
struct Params {
    x: u32, x_row: u32, out_row: u32, rows: u32, walkers: u32, turns: u32,
    m0: Matrix, m1: Matrix, m2: Matrix, m3: Matrix,
    norm: u32, eps: f32, // first of the norm's weights
}
var<immediate> p: Params;

const X_ROWS = 1u;

// The rows of a part from row `o` of W on: their matrix, the first of them in it, and how many it has.
struct Block { m: Matrix, first: u32, count: u32, rows: Rows }

fn block_at(o: u32) -> Block {
    var m = p.m0;
    var start = 0u;
    if (TARGETS > 1u && o >= p.m0.end) { m = p.m1; start = p.m0.end; }
    if (TARGETS > 2u && o >= p.m1.end) { m = p.m2; start = p.m1.end; }
    if (TARGETS > 3u && o >= p.m2.end) { m = p.m3; start = p.m2.end; }
    let count = m.end - start;
    let stored = min(vec4<u32>(o - start) + ROW_OF, vec4<u32>(count - 1u));
    let scales = stored / BLOCK_ROWS * ROW_SCALES;
    return Block(m, o - start, count, Rows(m.weights + stored * ROW_WORDS, m.scales + scales, m.biases + scales));
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
    let x = p.x + row * select(p.x_row, COLS, NORM == 1u);
    let asked = ask(x, p.norm, 0u);
    var of_heads = 0.0;
    if (HEAD > 0u) { of_heads = head_squares(p.m2.out + row * p.m2.bias); }
    let first = (work % p.walkers * p.turns * (WG / PART) + index / PART) * ROWS;
    var now = block_at(first);
    var loaded = load(now.rows, chunk);
    if (HEAD > 0u) { head_factors(of_heads, p.eps); }
    stage(asked, x, p.norm);
    var factor = 1.0;
    if (NORM == 1u) {
        factor = x_factor(p.eps);
        if (work % p.walkers == 0u) {
            let to = p.x_row + row * COLS;
            for (var i = index; i < COLS; i += WG) { a[to + i] = a[x + i] * a[p.norm + i] * factor; }
        }
    }
    for (var turn = 0u; turn < p.turns; turn++) {
        let sums = part_sum(products(loaded, now.rows, chunk, 0u)) * factor;
        if (chunk == 0u) {
            let out = now.m.out + row * select(p.out_row, now.m.bias, TARGETS > 1u);
            for (var i = 0u; i < ROWS; i++) {
                let o = now.first + i;
                if (o < now.count) {
                    var y = sums[i];
                    if (BIASED == 1u) { y += a[now.m.bias + o]; }
                    if (BIASED == 2u) { y += a[out + o]; }
                    a[out + o] = y;
                    if (ADDED == 1u) { a[p.m1.out + row * p.m1.bias + o] += y; }
                }
            }
        }
        if (turn + 1u < p.turns) {
            now = block_at(first + (turn + 1u) * (WG / PART) * ROWS);
            loaded = load(now.rows, chunk);
        }
    }
}
