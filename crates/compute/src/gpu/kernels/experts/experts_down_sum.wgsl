// The down projections of the K experts of one row and their sum with the residual stream, as combine.wgsl has it:
//   parts[e][o] = down[e][o] . inner[e];  out[o] += sum over e, in rank order, of weights[e] parts[e][o],
// plus the shared expert (SHARED) times sigmoid of its gate (GATED).
// Parts of threads, their ROWS rows and chunks are those of products.wgsl. The parts of a workgroup share BLOCKS blocks of ROWS
// outputs of all K experts, of which it then makes the sums.
// Grid: blocks of BLOCKS ROWS outputs.
// needs: common/common, @team, @row_sums, experts/assignments, experts/slot_matrix
// needs: gemv/row_products, gemv/stage_x
// constants: BLOCKS, BLOCK_ROWS, GATED, K, PART, ROWS, SHARED, WG

struct Params {
    x: u32, uses: Uses, outputs: u32, one: Part,
    parts: u32, parts_row: u32, weights: u32, shared_out: u32, gate: u32, out: u32,
}
var<immediate> p: Params;

const X_ROWS = K;
const NORM = 0u;
const HEAD = 0u;
const SQUARES = 0u;
const USES = 2u;
const ONE_ROW = true;
const ITEMS = K * BLOCKS;
const OUTPUTS = BLOCKS * ROWS;

const AT_ONCE = WG / PART; // items of a turn

var<workgroup> found: array<f32, ITEMS * ROWS>;
var<workgroup> ranks: array<f32, K>;

// What a part works on in a turn: a block of an expert. Parts without one take the last.
struct Item { item: u32, slot: u32, rows: Rows }

fn item_at(first: u32, item: u32) -> Item {
    let i = min(item, ITEMS - 1u);
    let slot = use_of(p.uses, i / BLOCKS).slot;
    return Item(i, slot, rows_at(slot, first + i % BLOCKS * ROWS));
}

fn rows_at(slot: u32, o: u32) -> Rows {
    let stored = min(vec4<u32>(o) + ROW_OF, vec4<u32>(p.outputs - 1u));
    let of_row = stored / BLOCK_ROWS * ROW_SCALES + slot;
    return Rows(p.one.weights + slot / SLOT_UNIT + stored * ROW_WORDS, p.one.scales + of_row, p.one.biases + of_row);
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    team_begin(index);
    let first = group_index(id, count) * OUTPUTS;
    if (first >= p.outputs) { return; }
    let chunk = index % PART;
    let asked = ask(p.x, 0u, 0u);
    var now = item_at(first, index / PART);
    var loaded = load(now.rows, chunk);
    // Asked for behind the weights, which nothing is to wait for.
    let o = first + index;
    var before = 0.0;
    if (index < OUTPUTS && o < p.outputs) { before = a[p.out + o]; }
    var weight = 0.0;
    if (index < K) { weight = a[p.weights + index]; }
    stage(asked, p.x, 0u);
    if (index < K) { ranks[index] = weight; }
    for (var items = 0u; items < ITEMS; items += AT_ONCE) {
        if (items > 0u) {
            now = item_at(first, items + index / PART);
            loaded = load(now.rows, chunk);
        }
        let sums = part_sum(products(loaded, now.rows, chunk, now.item / BLOCKS));
        if (chunk == 0u && items + index / PART < ITEMS) {
            for (var j = 0u; j < ROWS; j++) {
                let o = min(first + now.item % BLOCKS * ROWS + j, p.outputs - 1u);
                found[now.item * ROWS + j] = sums[j] + bias_at(now.slot + p.one.bias, o);
            }
        }
    }
    workgroupBarrier();
    if (index < OUTPUTS && o < p.outputs) {
        var sum = 0.0;
        for (var rank = 0u; rank < K; rank++) {
            let part = found[rank * OUTPUTS + index];
            a[p.parts + rank * p.parts_row + o] = part;
            sum = fma(ranks[rank], part, sum);
        }
        if (SHARED == 1u) {
            var gate = 1.0;
            if (GATED == 1u) { gate = sigmoid(a[p.gate]); }
            sum = fma(gate, a[p.shared_out + o], sum);
        }
        a[p.out + o] = before + sum;
    }
}
