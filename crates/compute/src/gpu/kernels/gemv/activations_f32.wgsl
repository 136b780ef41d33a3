// x in workgroup memory as f32: number j of the eight vectors of each chunk of 32, chunk by chunk.
// implements: @activations
// needs: codec/load_blocks, @codec, gemv/stage_x
// constants: COLS, ELEMENT, X_ROWS

// Rows of x lie one behind another.
const CHUNKS = COLS / 32u;
const X_COLS = X_ROWS * COLS;
const X_CHUNKS = X_ROWS * CHUNKS;
const STRIDE = 1u;

var<workgroup> x_numbers: array<vec4<f32>, X_COLS / 4u>;

fn x_put(piece: u32, x: vec4<f32>) {
    if (piece < X_PIECES) { x_numbers[piece % 8u * X_CHUNKS + piece / 8u] = x; }
}

// The products of a chunk's halves with their parts of x, and the sum of those.
fn chunk_product(q: Chunk, c: u32) -> vec3<f32> {
    var x: array<vec4<f32>, 8>;
    var all = vec4<f32>();
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        x[j] = x_numbers[j * X_CHUNKS + c];
        all += x[j];
    }
    return vec3<f32>(chunk_dot(q, x), all.x + all.y + all.z + all.w);
}

// What chunks of weights add to the products of their rows: with chunks `c` of x.
fn product(four: Loaded, c: vec4<u32>) -> vec4<f32> {
    let p0 = chunk_product(four.q0, c.x);
    let p1 = chunk_product(four.q1, c.y);
    let p2 = chunk_product(four.q2, c.z);
    var p3 = vec3<f32>();
    if (!THREE) { p3 = chunk_product(four.q3, c.w); }
    let one = vec4<f32>(p0.x, p1.x, p2.x, p3.x);
    let other = vec4<f32>(p0.y, p1.y, p2.y, p3.y);
    let by = scales_of(four);
    if (HALVES) { return by.one * one + by.other * other; }
    let sums = by.one * (one + other);
    if (ELEMENT != 3u) { return sums; }
    return sums + by.other * vec4<f32>(p0.z, p1.z, p2.z, p3.z);
}
