// x in workgroup memory as 8 bits: of each chunk of 32 eight words, in the order in which the quants of a word of weights
// lie, STRIDE apart; then scale and sum. What is not finite makes the scale so.

// Rows of x lie one behind another.
const CHUNKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_CHUNKS = X_ROWS * CHUNKS;
const STRIDE = select(select(1u, 4u, BITS == 2u), 2u, BITS == 4u);

var<workgroup> x_words: array<vec4<u32>, X_COLS / 16u>;
var<workgroup> x_scales: array<vec2<f32>, X_CHUNKS>;

// A number whose lowest bits are those of a small whole number that is added to it, rounded: there are few units that convert.
const ROUNDER = 12582912.0;
const ROUNDER_BITS = 0x4b400000;

// Whole numbers of up to 22 bits.
fn floats_of(n: vec4<i32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(n + vec4<i32>(ROUNDER_BITS)) - vec4<f32>(ROUNDER);
}

// The bytes 0 and 2 of a word, or 1 and 3.
fn every_other(word: u32, first: u32) -> u32 {
    let two = word >> (8u * first);
    return two & 255u | two >> 8u & 0xff00u;
}

// Eight neighbouring threads make a chunk: each has four inputs and makes one word.
fn x_put(piece: u32, x: vec4<f32>) {
    let sizes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    var most = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
    most = max(most, subgroupShuffleXor(most, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    most = max(most, subgroupShuffleXor(most, 4u));
    let scale = bitcast<f32>(most) / 127.0;
    let finite = most < 0x7f800000u && most > 0u;
    let inverse = select(0.0, 1.0 / max(scale, 1e-37), finite);
    let q = bitcast<vec4<u32>>(fma(x, vec4<f32>(inverse), vec4<f32>(ROUNDER))) & vec4<u32>(255u);
    let own = q.x | q.y << 8u | q.z << 16u | q.w << 24u;
    var sum = dot4I8Packed(own, 0x01010101u);
    sum += subgroupShuffleXor(sum, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    sum += subgroupShuffleXor(sum, 4u);
    var word = own;
    if (STRIDE == 2u) {
        let k = thread % 2u;
        let other = every_other(subgroupShuffleXor(own, 1u), k);
        word = every_other(own, k);
        word = select(word | other << 16u, other | word << 16u, k == 1u);
    }
    if (STRIDE == 4u) {
        let k = thread % 4u;
        word = (own >> (8u * k) & 255u) << (8u * k)
            | (subgroupShuffleXor(own, 1u) >> (8u * k) & 255u) << (8u * (k ^ 1u))
            | (subgroupShuffleXor(own, 2u) >> (8u * k) & 255u) << (8u * (k ^ 2u))
            | (subgroupShuffleXor(own, 3u) >> (8u * k) & 255u) << (8u * (k ^ 3u));
    }
    let c = piece / 8u;
    if (c < X_CHUNKS) {
        x_words[piece % 8u / 4u * X_CHUNKS + c][piece % 4u] = word;
        if (piece % 8u == 0u) { x_scales[c] = vec2<f32>(scale, scale * f32(sum)); }
    }
}

// What chunks of weights add to the products of their rows: with chunks `c` of x.
fn product(four: Loaded, c: vec4<u32>) -> vec4<f32> {
    let x0 = x_scales[c.x];
    let x1 = x_scales[c.y];
    let x2 = x_scales[c.z];
    var x3 = vec2<f32>();
    if (!THREE) { x3 = x_scales[c.w]; }
    let scales = vec4<f32>(x0.x, x1.x, x2.x, x3.x) * UNIT;
    let p0 = chunk_dot8(four.q0, x_words[c.x], x_words[X_CHUNKS + c.x]);
    let p1 = chunk_dot8(four.q1, x_words[c.y], x_words[X_CHUNKS + c.y]);
    let p2 = chunk_dot8(four.q2, x_words[c.z], x_words[X_CHUNKS + c.z]);
    var p3 = vec2<i32>();
    if (!THREE) { p3 = chunk_dot8(four.q3, x_words[c.w], x_words[X_CHUNKS + c.w]); }
    let one = vec4<i32>(p0.x, p1.x, p2.x, p3.x);
    let other = vec4<i32>(p0.y, p1.y, p2.y, p3.y);
    let by = scales_of(four);
    if (HALVES) { return (by.one * floats_of(one) + by.other * floats_of(other)) * scales; }
    let whole = floats_of(one + other) * scales;
    if (ELEMENT != 3u) { return by.one * whole; }
    let sums = vec4<f32>(x0.y, x1.y, x2.y, x3.y);
    return by.one * (whole + sums * OFFSET) + by.other * sums;
}
