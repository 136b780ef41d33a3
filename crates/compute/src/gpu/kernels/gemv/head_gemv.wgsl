// out[r][h][o] = x[r][h] . W[h][o]: a matrix for each head, weights read once for each row of x. W[h] is the rows of the
// weight from first + h * head_rows on. Parts of PART threads work on ROWS rows of weights at a
// time, as chunk.wgsl has it.
// Grid: rows x heads x blocks of ROWS WG / PART outputs.
// needs: common/common, @team, @row_sums, gemv/row_products, gemv/stage_x
// constants: BLOCK_ROWS, PART, ROWS, WG

struct Params {
    x: View, out: View, weights: u32, scales: u32, biases: u32,
    first: u32, outputs: u32, head_rows: u32, rows: u32, heads: u32,
}
var<immediate> p: Params;

const X_ROWS = 1u;
const NORM = 0u;
const HEAD = 0u;
const SQUARES = 0u;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let of_block = ROWS * WG / PART;
    let blocks = (p.outputs + of_block - 1u) / of_block;
    let work = group_index(id, count);
    let head = work / blocks % p.heads;
    let row = work / blocks / p.heads;
    if (row >= p.rows) { return; }
    let chunk = index % PART;
    let o = work % blocks * of_block + index / PART * ROWS;
    let stored = min(vec4<u32>(o) + ROW_OF, vec4<u32>(p.outputs - 1u)) + p.first + head * p.head_rows;
    let of_row = stored / BLOCK_ROWS * ROW_SCALES;
    let rows = Rows(p.weights + stored * ROW_WORDS, p.scales + of_row, p.biases + of_row);
    let x = p.x.at + row * p.x.row + head * p.x.head;
    let asked = ask(x, 0u, 0u);
    let loaded = load(rows, chunk);
    stage(asked, x, 0u);
    let sums = part_sum(products(loaded, rows, chunk, 0u));
    if (chunk > 0u) { return; }
    let out = p.out.at + row * p.out.row + head * p.out.head;
    for (var i = 0u; i < ROWS; i++) {
        if (o + i < p.outputs) { a[out + o + i] = sums[i]; }
    }
}
