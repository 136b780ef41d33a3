// x in workgroup memory as f32: number j of the eight vectors of each chunk of 32, chunk by chunk.

const CHUNKS = COLS / 32u;

var<workgroup> x_numbers: array<vec4<f32>, COLS / 4u>;

fn stage(at: u32) {
    for (var i = thread; i < COLS / 4u; i += WG) {
        let base = at + i * 4u;
        x_numbers[i % 8u * CHUNKS + i / 8u] = vec4<f32>(a[base], a[base + 1u], a[base + 2u], a[base + 3u]);
    }
    workgroupBarrier();
}

// What this thread's chunks add to the products of four rows.
fn products(rows: Rows, from_chunk: u32) -> vec4<f32> {
    var sums = vec4<f32>();
    for (var c = from_chunk; c < CHUNKS; c += PART) {
        let q0 = chunk_load(rows.weights.x, c);
        let q1 = chunk_load(rows.weights.y, c);
        let q2 = chunk_load(rows.weights.z, c);
        let q3 = chunk_load(rows.weights.w, c);
        let scales = chunk_scales(rows.scales, c);
        var x: array<vec4<f32>, 8>;
        var all = vec4<f32>();
        for (var j = 0u; j < 8u; j++) {
            x[j] = x_numbers[j * CHUNKS + c];
            all += x[j];
        }
        sums += scales * vec4<f32>(chunk_dot(q0, x), chunk_dot(q1, x), chunk_dot(q2, x), chunk_dot(q3, x));
        if (ELEMENT == 3u) { sums += chunk_scales(rows.biases, c) * (all.x + all.y + all.z + all.w); }
    }
    return sums;
}
