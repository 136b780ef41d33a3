// out[r][h][o] = sum_i x[r][h][i] W[h][i][o]: matrices of heads the other way. W[h] is the `inputs` rows of the weight from
// first + h * head_rows on; each has COLS numbers. A workgroup takes WIDE chunks of 32 outputs: WG / WIDE threads share the
// rows of each, four at a time, and add up in workgroup memory.
// Grid: rows x heads x blocks of WIDE chunks.
// needs: common/common, codec/load_blocks
// constants: BLOCK_ROWS, COLS, ELEMENT, WG, WIDE

struct Params {
    x: View, out: View, weights: u32, scales: u32, biases: u32,
    first: u32, inputs: u32, head_rows: u32, rows: u32, heads: u32,
}
var<immediate> p: Params;

const CHUNKS = COLS / 32u;
const SHARING = WG / WIDE;

var<workgroup> sums_of: array<vec4<f32>, 8u * WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let blocks = (CHUNKS + WIDE - 1u) / WIDE;
    let work = group_index(id, count);
    let head = work / blocks % p.heads;
    let row = work / blocks / p.heads;
    if (row >= p.rows) { return; }
    let first = work % blocks * WIDE;
    let chunk = min(first + index % WIDE, CHUNKS - 1u);
    let x = p.x.at + row * p.x.row + head * p.x.head;
    var sums: array<vec4<f32>, 8>;
    for (var i = index / WIDE * 4u; i < p.inputs; i += 4u * SHARING) {
        let at = vec4<u32>(i) + vec4<u32>(0u, 1u, 2u, 3u);
        let here = min(at, vec4<u32>(p.inputs - 1u));
        let stored = here + p.first + head * p.head_rows;
        let of_row = stored / BLOCK_ROWS * ROW_SCALES;
        let loaded = load(Rows(p.weights + stored * ROW_WORDS, p.scales + of_row, p.biases + of_row), chunk);
        let numbers = select(
            vec4<f32>(), vec4<f32>(a[x + here.x], a[x + here.y], a[x + here.z], a[x + here.w]), at == here);
        let scales = scales_of(loaded);
        let one = numbers * scales.one;
        let other = select(one, numbers * scales.other, HALVES);
        var bias = 0.0;
        if (ELEMENT == 3u) { bias = dot(numbers, scales.other); }
        for (var j = 0u; j < 8u; j++) {
            let by = select(one, other, j >= 4u);
            sums[j] += chunk_four(loaded.q0, j) * by.x + chunk_four(loaded.q1, j) * by.y
                + chunk_four(loaded.q2, j) * by.z + chunk_four(loaded.q3, j) * by.w + bias;
        }
    }
    for (var j = 0u; j < 8u; j++) { sums_of[j * WG + index] = sums[j]; }
    workgroupBarrier();
    let out = p.out.at + row * p.out.row + head * p.out.head;
    for (var i = index; i < 8u * WIDE; i += WG) {
        let o = first * 32u + i * 4u;
        if (o >= COLS) { break; }
        var sum = vec4<f32>();
        for (var k = 0u; k < SHARING; k++) { sum += sums_of[i % 8u * WG + k * WIDE + i / 8u]; }
        for (var k = 0u; k < 4u; k++) { a[out + o + k] = sum[k]; }
    }
}
