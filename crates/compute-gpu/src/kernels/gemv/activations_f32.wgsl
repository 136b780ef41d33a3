// Activations as f32 in workgroup memory: vector j of eight of block b is at j X_BLOCKS + b. Rows
// of x are dense.
// implements: @activations
// needs: codec/load_blocks, @codec, gemv/stage_x
// constants: COLS, X_ROWS

// Whether all blocks are 32 neighbours.
const X_IN_ORDER = false;
const ROW_BLOCKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_BLOCKS = X_ROWS * ROW_BLOCKS;
const X_STRIDE = 1u;

var<workgroup> x_values: array<vec4<f32>, X_COLS / 4u>;

fn store_x(vec: u32, x: vec4<f32>) {
    if (vec < X_VECS) { x_values[vec % 8u * X_BLOCKS + vec / 8u] = x; }
}

// Dot products of the halves of a block with x, and the sum of x: of its halves with TWO_BIASES.
fn block_products(q: Block32, c: u32) -> vec4<f32> {
    var x: array<vec4<f32>, 8>;
    var x_sum = vec4<f32>();
    var x_second = vec4<f32>();
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        x[j] = x_values[j * X_BLOCKS + c];
        if (TWO_BIASES && j > 3u) { x_second += x[j]; } else { x_sum += x[j]; }
    }
    return vec4<f32>(
        block_dot(q, x), x_sum.x + x_sum.y + x_sum.z + x_sum.w, x_second.x + x_second.y + x_second.z + x_second.w);
}

// Contributions of four blocks to the dot products of their rows, with blocks `c` of x.
fn four_products(blocks: FourBlocks, c: vec4<u32>) -> vec4<f32> {
    let p0 = block_products(blocks.q0, c.x);
    let p1 = block_products(blocks.q1, c.y);
    let p2 = block_products(blocks.q2, c.z);
    var p3 = vec4<f32>();
    if (!SKIP_FOURTH) { p3 = block_products(blocks.q3, c.w); }
    let first_half = vec4<f32>(p0.x, p1.x, p2.x, p3.x);
    let second_half = vec4<f32>(p0.y, p1.y, p2.y, p3.y);
    let w_scale = block_scales(blocks);
    let x_sums = vec4<f32>(p0.z, p1.z, p2.z, p3.z);
    if (TWO_SCALES) {
        let sums = fma(w_scale.first, first_half, w_scale.second * second_half);
        if (!TWO_BIASES) { return sums; }
        return fma(w_scale.second_bias, vec4<f32>(p0.w, p1.w, p2.w, p3.w), fma(w_scale.bias, x_sums, sums));
    }
    let sums = w_scale.first * (first_half + second_half);
    if (!HAS_BIAS) { return sums; }
    return fma(w_scale.bias, x_sums, sums);
}
