// Activations as int16 or int8 (X_BYTES 2 or 1) in workgroup memory, with a scale and a sum for
// each block of 32: eight words of upper bytes and, of int16, eight of lower bytes, both signed,
// in the order in which the codec packs quants, X_STRIDE apart. A non-finite activation makes the
// scale non-finite, so the error is not hidden. Rows of x are dense.
// implements: @activations
// needs: codec/load_blocks, @codec, gemv/stage_x
// constants: BITS, COLS, QUANT_OFFSET, QUANT_STEP, X_BYTES, X_ROWS

// Whether all blocks are 32 neighbours.
const X_IN_ORDER = false;
const ROW_BLOCKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_BLOCKS = X_ROWS * ROW_BLOCKS;
const X_STRIDE = select(select(1u, 4u, BITS == 2u), 2u, BITS == 4u);
const TWO_BYTES = X_BYTES == 2u;
// Sums of half blocks, for two scales per block and quants with an offset, and for two biases.
const HALF_BLOCK_SUMS = TWO_BIASES || TWO_SCALES && QUANT_OFFSET != 0.0;

var<workgroup> x_upper: array<vec4<u32>, X_COLS / 16u>;
var<workgroup> x_lower: array<vec4<u32>, select(1u, X_COLS / 16u, TWO_BYTES)>;
var<workgroup> x_scales: array<vec2<f32>, X_BLOCKS>;
var<workgroup> x_halves: array<vec2<f32>, select(1u, X_BLOCKS, HALF_BLOCK_SUMS)>;

// A float whose low bits are those of a small integer that is added to it, rounded: there are few
// units that convert.
const ROUND_MAGIC = 12582912.0;
const ROUND_MAGIC_BITS = 0x4b400000;
// Largest magnitude: upper byte 127, lower byte 0.
const MAX_INT = select(127.0, 32512.0, TWO_BYTES);

// Integers of up to 22 bits.
fn to_f32(n: vec4<i32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(n + vec4<i32>(ROUND_MAGIC_BITS)) - vec4<f32>(ROUND_MAGIC);
}

// Lower bytes of four integers, or upper bytes.
fn lower_bytes(q: vec4<u32>) -> u32 {
    return q.x & 0xffu | (q.y & 0xffu) << 8u | (q.z & 0xffu) << 16u | q.w << 24u;
}

fn upper_bytes(q: vec4<u32>) -> u32 {
    return q.x >> 8u & 0xffu | q.y & 0xff00u | (q.z & 0xff00u) << 8u | (q.w & 0xff00u) << 16u;
}

// Eight neighbouring threads quantize a block: each has four inputs and packs one word of each
// byte.
fn store_x(vec: u32, x: vec4<f32>) {
    let magnitudes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    var max_abs = max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
    max_abs = max(max_abs, subgroupShuffleXor(max_abs, 1u));
    max_abs = max(max_abs, subgroupShuffleXor(max_abs, 2u));
    max_abs = max(max_abs, subgroupShuffleXor(max_abs, 4u));
    let scale = bitcast<f32>(max_abs) / MAX_INT;
    let finite = max_abs < 0x7f800000u && max_abs > 0u;
    let inverse = select(0.0, 1.0 / max(scale, 1e-37), finite);
    let q = bitcast<vec4<u32>>(fma(x, vec4<f32>(inverse), vec4<f32>(ROUND_MAGIC)));
    let lower = lower_bytes(q);
    var upper = lower;
    var sum = dot4I8Packed(lower, 0x01010101u);
    if (TWO_BYTES) {
        // The lower byte is signed, too: the upper one is rounded.
        upper = upper_bytes(q + vec4<u32>(128u));
        sum += 256 * dot4I8Packed(upper, 0x01010101u);
    }
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    let other_half = subgroupShuffleXor(sum, 4u);
    let c = vec / 8u;
    if (c < X_BLOCKS) {
        let word = vec % 8u / 4u * X_BLOCKS + c;
        x_upper[word][vec % 4u] = upper;
        if (TWO_BYTES) { x_lower[word][vec % 4u] = lower; }
        if (vec % 8u == 0u) {
            x_scales[c] = vec2<f32>(scale, scale * f32(sum + other_half));
            if (HALF_BLOCK_SUMS) { x_halves[c] = scale * vec2<f32>(f32(sum), f32(other_half)); }
        }
    }
}

// Dot products of both halves of a block with the upper and lower bytes of x.
struct IntDots { upper: vec2<i32>, lower: vec2<i32> }

fn block_int_dots(q: Block32, c: u32) -> IntDots {
    let upper = block_dot_i8(q, x_upper[c], x_upper[X_BLOCKS + c]);
    if (!TWO_BYTES) { return IntDots(upper, vec2<i32>()); }
    return IntDots(upper, block_dot_i8(q, x_lower[c], x_lower[X_BLOCKS + c]));
}

fn combine_bytes(upper: vec4<i32>, lower: vec4<i32>) -> vec4<f32> {
    if (!TWO_BYTES) { return to_f32(upper); }
    return fma(to_f32(upper), vec4<f32>(256.0), to_f32(lower));
}

// Contributions of four blocks to the dot products of their rows, with blocks `c` of x.
fn four_products(blocks: FourBlocks, c: vec4<u32>) -> vec4<f32> {
    let x0 = x_scales[c.x];
    let x1 = x_scales[c.y];
    let x2 = x_scales[c.z];
    var x3 = vec2<f32>();
    if (!SKIP_FOURTH) { x3 = x_scales[c.w]; }
    let x_scale = vec4<f32>(x0.x, x1.x, x2.x, x3.x) * QUANT_STEP;
    let p0 = block_int_dots(blocks.q0, c.x);
    let p1 = block_int_dots(blocks.q1, c.y);
    let p2 = block_int_dots(blocks.q2, c.z);
    var p3 = IntDots();
    if (!SKIP_FOURTH) { p3 = block_int_dots(blocks.q3, c.w); }
    let upper = vec4<i32>(p0.upper.x, p1.upper.x, p2.upper.x, p3.upper.x);
    let lower = vec4<i32>(p0.lower.x, p1.lower.x, p2.lower.x, p3.lower.x);
    let second_upper = vec4<i32>(p0.upper.y, p1.upper.y, p2.upper.y, p3.upper.y);
    let second_lower = vec4<i32>(p0.lower.y, p1.lower.y, p2.lower.y, p3.lower.y);
    let w_scale = block_scales(blocks);
    if (TWO_SCALES) {
        var first_half = combine_bytes(upper, lower) * x_scale;
        var second_half = combine_bytes(second_upper, second_lower) * x_scale;
        var biased = vec4<f32>();
        if (HALF_BLOCK_SUMS) {
            let h0 = x_halves[c.x];
            let h1 = x_halves[c.y];
            let h2 = x_halves[c.z];
            var h3 = vec2<f32>();
            if (!SKIP_FOURTH) { h3 = x_halves[c.w]; }
            let first_sums = vec4<f32>(h0.x, h1.x, h2.x, h3.x);
            let second_sums = vec4<f32>(h0.y, h1.y, h2.y, h3.y);
            first_half = fma(first_sums, vec4<f32>(QUANT_OFFSET), first_half);
            second_half = fma(second_sums, vec4<f32>(QUANT_OFFSET), second_half);
            biased = fma(w_scale.bias, first_sums, w_scale.second_bias * second_sums);
        }
        let sums = fma(w_scale.first, first_half, w_scale.second * second_half);
        if (!TWO_BIASES) { return sums; }
        return sums + biased;
    }
    let sums = vec4<f32>(x0.y, x1.y, x2.y, x3.y);
    var whole = combine_bytes(upper + second_upper, lower + second_lower) * x_scale;
    if (QUANT_OFFSET != 0.0) { whole = fma(sums, vec4<f32>(QUANT_OFFSET), whole); }
    if (!HAS_BIAS) { return w_scale.first * whole; }
    return fma(w_scale.first, whole, w_scale.bias * sums);
}
