// x in workgroup memory as 8 bits: of each chunk of 32 eight words, in the order in which the quants of a word of weights
// lie, STRIDE apart; then scale and sum. What is not finite makes the scale so.
// FETCH: 1 where there is room for x itself, which then comes first. NORM is only then 1.

// Rows of x lie one behind another.
const CHUNKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_CHUNKS = X_ROWS * CHUNKS;
const STRIDE = select(select(1u, 4u, BITS == 2u), 2u, BITS == 4u);
const SPLIT = 8u / STRIDE; // threads of a chunk
const EACH = 4u * STRIDE; // their inputs

var<workgroup> x_words: array<vec4<u32>, X_COLS / 16u>;
var<workgroup> x_scales: array<vec2<f32>, X_CHUNKS>;

var<workgroup> x_fetched: array<f32, max(X_COLS * FETCH, 1u)>;

fn x_put(i: u32, x: f32) {
    x_fetched[i] = x;
}

fn x_at(i: u32) -> f32 {
    return x_fetched[i];
}

fn stage(at: u32, w: u32) {
    if (FETCH == 1u) { fetch(at, w); }
    for (var first = 0u; first < X_CHUNKS; first += WG / SPLIT) {
        let c = first + thread / SPLIT;
        let slice = thread % SPLIT;
        let base = min(c, X_CHUNKS - 1u) * 32u + slice * EACH;
        var x: array<f32, EACH>;
        var most = 0u;
        for (var i = 0u; i < EACH; i++) {
            if (FETCH == 1u) { x[i] = x_fetched[base + i]; } else { x[i] = a[at + base + i]; }
            most = max(most, bitcast<u32>(x[i]) & 0x7fffffffu);
        }
        for (var d = 1u; d < SPLIT; d *= 2u) { most = max(most, subgroupShuffleXor(most, d)); }
        let scale = bitcast<f32>(most) / 127.0;
        let finite = most < 0x7f800000u && most > 0u;
        let inverse = select(0.0, 1.0 / max(scale, 1e-37), finite);
        var sum = 0;
        var words: array<u32, STRIDE>;
        for (var k = 0u; k < STRIDE; k++) {
            var word = 0u;
            for (var t = 0u; t < 4u; t++) {
                let q = clamp(i32(round(x[k + STRIDE * t] * inverse)), -127, 127);
                sum += q;
                word |= (u32(q) & 255u) << (8u * t);
            }
            words[k] = word;
        }
        for (var d = 1u; d < SPLIT; d *= 2u) { sum += subgroupShuffleXor(sum, d); }
        if (c < X_CHUNKS) {
            for (var k = 0u; k < STRIDE; k++) {
                let j = slice * STRIDE + k;
                x_words[j / 4u * X_CHUNKS + c][j % 4u] = words[k];
            }
            if (slice == 0u) { x_scales[c] = vec2<f32>(scale, scale * f32(sum)); }
        }
    }
    workgroupBarrier();
}

// What chunks of weights add to the products of their rows: with chunks `c` of x.
fn product(four: Loaded, c: vec4<u32>) -> vec4<f32> {
    let x0 = x_scales[c.x];
    let x1 = x_scales[c.y];
    let x2 = x_scales[c.z];
    let x3 = x_scales[c.w];
    let scales = vec4<f32>(x0.x, x1.x, x2.x, x3.x) * UNIT;
    let p0 = chunk_dot8(four.q0, x_words[c.x], x_words[X_CHUNKS + c.x]);
    let p1 = chunk_dot8(four.q1, x_words[c.y], x_words[X_CHUNKS + c.y]);
    let p2 = chunk_dot8(four.q2, x_words[c.z], x_words[X_CHUNKS + c.z]);
    let p3 = chunk_dot8(four.q3, x_words[c.w], x_words[X_CHUNKS + c.w]);
    let one = vec4<i32>(p0.x, p1.x, p2.x, p3.x);
    let other = vec4<i32>(p0.y, p1.y, p2.y, p3.y);
    let by = scales_of(four);
    if (HALVES) { return (by.one * vec4<f32>(one) + by.other * vec4<f32>(other)) * scales; }
    let whole = vec4<f32>(one + other) * scales;
    if (ELEMENT != 3u) { return by.one * whole; }
    let sums = vec4<f32>(x0.y, x1.y, x2.y, x3.y);
    return by.one * (whole + sums * OFFSET) + by.other * sums;
}
