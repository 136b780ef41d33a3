// x in workgroup memory as whole numbers of X_BYTES bytes, with a sign each: of each chunk of 32 eight words of upper bytes and, if
// there are two, eight of lower ones, in the order in which the quants of a word of weights lie, STRIDE apart; then scale and sum.
// What is not finite makes the scale so.
// implements: @activations
// needs: codec/load_blocks, @codec, gemv/stage_x
// constants: BITS, COLS, ELEMENT, OFFSET, UNIT, X_BYTES, X_ROWS

// Rows of x lie one behind another.
const CHUNKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_CHUNKS = X_ROWS * CHUNKS;
const STRIDE = select(select(1u, 4u, BITS == 2u), 2u, BITS == 4u);
const TWO = X_BYTES == 2u;
// Sums of halves of chunks are met where these have scales of their own, and numbers that do not count from 0.
const HALF_SUMS = HALVES && OFFSET != 0.0;

var<workgroup> x_upper: array<vec4<u32>, X_COLS / 16u>;
var<workgroup> x_lower: array<vec4<u32>, select(1u, X_COLS / 16u, TWO)>;
var<workgroup> x_scales: array<vec2<f32>, X_CHUNKS>;
var<workgroup> x_halves: array<vec2<f32>, select(1u, X_CHUNKS, HALF_SUMS)>;

// A number whose lowest bits are those of a small whole number that is added to it, rounded: there are few units that convert.
const ROUNDER = 12582912.0;
const ROUNDER_BITS = 0x4b400000;
// The largest size of a number: its upper byte is 127, and its lower one 0.
const MOST = select(127.0, 32512.0, TWO);

// Whole numbers of up to 22 bits.
fn floats_of(n: vec4<i32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(n + vec4<i32>(ROUNDER_BITS)) - vec4<f32>(ROUNDER);
}

// The lowest bytes of four numbers, or those above.
fn lower_bytes(q: vec4<u32>) -> u32 {
    return q.x & 0xffu | (q.y & 0xffu) << 8u | (q.z & 0xffu) << 16u | q.w << 24u;
}

fn upper_bytes(q: vec4<u32>) -> u32 {
    return q.x >> 8u & 0xffu | q.y & 0xff00u | (q.z & 0xff00u) << 8u | (q.w & 0xff00u) << 16u;
}

// Eight neighbouring threads make a chunk: each has four inputs and makes one word of each byte.
fn x_put(piece: u32, x: vec4<f32>) {
    let sizes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    var most = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
    most = max(most, subgroupShuffleXor(most, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    most = max(most, subgroupShuffleXor(most, 4u));
    let scale = bitcast<f32>(most) / MOST;
    let finite = most < 0x7f800000u && most > 0u;
    let inverse = select(0.0, 1.0 / max(scale, 1e-37), finite);
    let q = bitcast<vec4<u32>>(fma(x, vec4<f32>(inverse), vec4<f32>(ROUNDER)));
    let lower = lower_bytes(q);
    var upper = lower;
    var sum = dot4I8Packed(lower, 0x01010101u);
    if (TWO) {
        // A lower byte has a sign, too: the upper one is rounded.
        upper = upper_bytes(q + vec4<u32>(128u));
        sum += 256 * dot4I8Packed(upper, 0x01010101u);
    }
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    let other = subgroupShuffleXor(sum, 4u);
    let c = piece / 8u;
    if (c < X_CHUNKS) {
        let at = piece % 8u / 4u * X_CHUNKS + c;
        x_upper[at][piece % 4u] = upper;
        if (TWO) { x_lower[at][piece % 4u] = lower; }
        if (piece % 8u == 0u) {
            x_scales[c] = vec2<f32>(scale, scale * f32(sum + other));
            if (HALF_SUMS) { x_halves[c] = scale * vec2<f32>(f32(sum), f32(other)); }
        }
    }
}

// Products of a chunk's halves and the upper bytes of x, and the lower ones.
struct Sums { upper: vec2<i32>, lower: vec2<i32> }

fn chunk_sums(q: Chunk, c: u32) -> Sums {
    let upper = chunk_dot8(q, x_upper[c], x_upper[X_CHUNKS + c]);
    if (!TWO) { return Sums(upper, vec2<i32>()); }
    return Sums(upper, chunk_dot8(q, x_lower[c], x_lower[X_CHUNKS + c]));
}

fn both_bytes(upper: vec4<i32>, lower: vec4<i32>) -> vec4<f32> {
    if (!TWO) { return floats_of(upper); }
    return fma(floats_of(upper), vec4<f32>(256.0), floats_of(lower));
}

// What chunks of weights add to the products of their rows: with chunks `c` of x.
fn product(four: Loaded, c: vec4<u32>) -> vec4<f32> {
    let x0 = x_scales[c.x];
    let x1 = x_scales[c.y];
    let x2 = x_scales[c.z];
    var x3 = vec2<f32>();
    if (!THREE) { x3 = x_scales[c.w]; }
    let scales = vec4<f32>(x0.x, x1.x, x2.x, x3.x) * UNIT;
    let p0 = chunk_sums(four.q0, c.x);
    let p1 = chunk_sums(four.q1, c.y);
    let p2 = chunk_sums(four.q2, c.z);
    var p3 = Sums();
    if (!THREE) { p3 = chunk_sums(four.q3, c.w); }
    let upper = vec4<i32>(p0.upper.x, p1.upper.x, p2.upper.x, p3.upper.x);
    let lower = vec4<i32>(p0.lower.x, p1.lower.x, p2.lower.x, p3.lower.x);
    let other_upper = vec4<i32>(p0.upper.y, p1.upper.y, p2.upper.y, p3.upper.y);
    let other_lower = vec4<i32>(p0.lower.y, p1.lower.y, p2.lower.y, p3.lower.y);
    let by = scales_of(four);
    if (HALVES) {
        var one = both_bytes(upper, lower) * scales;
        var other = both_bytes(other_upper, other_lower) * scales;
        if (HALF_SUMS) {
            let h0 = x_halves[c.x];
            let h1 = x_halves[c.y];
            let h2 = x_halves[c.z];
            var h3 = vec2<f32>();
            if (!THREE) { h3 = x_halves[c.w]; }
            one += vec4<f32>(h0.x, h1.x, h2.x, h3.x) * OFFSET;
            other += vec4<f32>(h0.y, h1.y, h2.y, h3.y) * OFFSET;
        }
        return by.one * one + by.other * other;
    }
    let sums = vec4<f32>(x0.y, x1.y, x2.y, x3.y);
    var whole = both_bytes(upper + other_upper, lower + other_lower) * scales;
    if (OFFSET != 0.0) { whole += sums * OFFSET; }
    if (ELEMENT != 3u) { return by.one * whole; }
    return by.one * whole + by.other * sums;
}
