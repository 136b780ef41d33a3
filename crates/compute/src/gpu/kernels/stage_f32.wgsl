// x in workgroup memory as f32: number j of the eight vectors of each chunk of 32, chunk by chunk.

const CHUNKS = COLS / 32u;

var<workgroup> x_numbers: array<vec4<f32>, COLS / 4u>;

fn x_put(i: u32, x: f32) {
    x_numbers[i / 4u % 8u * CHUNKS + i / 32u][i % 4u] = x;
}

fn stage(at: u32) {
    fetch(at);
}

// What a chunk adds to the products of four rows.
fn product(of_rows: Loaded, c: u32) -> vec4<f32> {
    var x: array<vec4<f32>, 8>;
    var all = vec4<f32>();
    for (var j = 0u; j < 8u; j++) {
        x[j] = x_numbers[j * CHUNKS + c];
        all += x[j];
    }
    let p0 = chunk_dot(of_rows.q0, x);
    let p1 = chunk_dot(of_rows.q1, x);
    let p2 = chunk_dot(of_rows.q2, x);
    let p3 = chunk_dot(of_rows.q3, x);
    let one = vec4<f32>(p0.x, p1.x, p2.x, p3.x);
    let other = vec4<f32>(p0.y, p1.y, p2.y, p3.y);
    if (HALVES) { return of_rows.scales.one * one + of_rows.scales.other * other; }
    let sums = of_rows.scales.one * (one + other);
    if (ELEMENT != 3u) { return sums; }
    return sums + of_rows.scales.other * (all.x + all.y + all.z + all.w);
}
