// Transposed GEMV per head: out[r][h][o] = sum_i x[r][h][i] W[h][i][o]. W[h] is the `head_rows`
// stored rows from first_row + h head_row_stride on, of COLS weights each. A workgroup computes
// GROUP_BLOCKS blocks of 32 outputs: WG / GROUP_BLOCKS threads share the rows of each, four at a
// time, and reduce in workgroup memory.
// Grid: rows x heads x groups of GROUP_BLOCKS blocks.
// needs: common/common, codec/load_blocks
// constants: BLOCK_ROWS, COLS, GROUP_BLOCKS, ROW_SCALES, WG

struct Params {
    x: View, out: View, weights: u32, scales: u32, biases: u32,
    first_row: u32, head_rows: u32, head_row_stride: u32, rows: u32, heads: u32,
}
var<immediate> p: Params;

const X_IN_ORDER = true;
const ROW_BLOCKS = COLS / 32u;
const SHARING_THREADS = WG / GROUP_BLOCKS;

var<workgroup> partials: array<vec4<f32>, 8u * WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
) {
    let groups = (ROW_BLOCKS + GROUP_BLOCKS - 1u) / GROUP_BLOCKS;
    let work = group_index(id, count);
    let head = work / groups % p.heads;
    let row = work / groups / p.heads;
    if (row >= p.rows) { return; }
    let first_block = work % groups * GROUP_BLOCKS;
    let block = min(first_block + index % GROUP_BLOCKS, ROW_BLOCKS - 1u);
    let x = p.x.offset + row * p.x.row_stride + head * p.x.head_stride;
    var sums: array<vec4<f32>, 8>;
    for (var i = index / GROUP_BLOCKS * 4u; i < p.head_rows; i += 4u * SHARING_THREADS) {
        let input = vec4<u32>(i) + vec4<u32>(0u, 1u, 2u, 3u);
        let clamped = min(input, vec4<u32>(p.head_rows - 1u));
        let stored = clamped + p.first_row + head * p.head_row_stride;
        let scale_row = stored / BLOCK_ROWS * ROW_SCALES;
        let loaded_blocks = load_blocks(RowOffsets(p.weights + stored * ROW_UNITS, p.scales + scale_row, p.biases + scale_row), block);
        let x_values = select(
            vec4<f32>(), vec4<f32>(act[x + clamped.x], act[x + clamped.y], act[x + clamped.z], act[x + clamped.w]), input == clamped);
        let scales = block_scales(loaded_blocks);
        let first_scaled = x_values * scales.first;
        let second_scaled = select(first_scaled, x_values * scales.second, TWO_SCALES);
        var first_bias = 0.0;
        if (HAS_BIAS) { first_bias = dot(x_values, scales.bias); }
        var second_bias = first_bias;
        if (TWO_BIASES) { second_bias = dot(x_values, scales.second_bias); }
        for (var j = 0u; j < 8u; j++) {
            let x_scaled = select(first_scaled, second_scaled, j >= 4u);
            let bias = select(first_bias, second_bias, j >= 4u);
            sums[j] += block_values(loaded_blocks.q0, j) * x_scaled.x + block_values(loaded_blocks.q1, j) * x_scaled.y
                + block_values(loaded_blocks.q2, j) * x_scaled.z + block_values(loaded_blocks.q3, j) * x_scaled.w + bias;
        }
    }
    for (var j = 0u; j < 8u; j++) { partials[j * WG + index] = sums[j]; }
    workgroupBarrier();
    let out = p.out.offset + row * p.out.row_stride + head * p.out.head_stride;
    for (var i = index; i < 8u * GROUP_BLOCKS; i += WG) {
        let o = first_block * 32u + i * 4u;
        if (o >= COLS) { break; }
        var sum = vec4<f32>();
        for (var k = 0u; k < SHARING_THREADS; k++) { sum += partials[i % 8u * WG + k * GROUP_BLOCKS + i / 8u]; }
        for (var k = 0u; k < 4u; k++) { act[out + o + k] = sum[k]; }
    }
}
