// Sums over a row's chunks, behind chunk_*.wgsl. Memory is asked for up to four chunks of four rows before one is used: a
// thread rarely has more, and then waits for memory once.

const DEPTH = min((CHUNKS + PART - 1u) / PART, 4u);

// A chunk of each of four rows.
struct Loaded { q0: Chunk, q1: Chunk, q2: Chunk, q3: Chunk, scales: vec4<f32>, biases: vec4<f32> }
struct Chunks { c0: Loaded, c1: Loaded, c2: Loaded, c3: Loaded }

fn load(rows: Rows, chunk: u32) -> Loaded {
    let c = min(chunk, CHUNKS - 1u);
    return Loaded(
        chunk_load(rows.weights.x, c), chunk_load(rows.weights.y, c),
        chunk_load(rows.weights.z, c), chunk_load(rows.weights.w, c),
        chunk_scales(rows.scales, c), chunk_biases(rows.biases, c));
}

fn load_four(rows: Rows, c: u32) -> Chunks {
    var all: Chunks;
    all.c0 = load(rows, c);
    if (DEPTH > 1u) { all.c1 = load(rows, c + PART); }
    if (DEPTH > 2u) { all.c2 = load(rows, c + 2u * PART); }
    if (DEPTH > 3u) { all.c3 = load(rows, c + 3u * PART); }
    return all;
}

// What a chunk adds, if there is one.
fn added(of_rows: Loaded, c: u32) -> vec4<f32> {
    if (c >= CHUNKS) { return vec4<f32>(); }
    return product(of_rows, c);
}

// What this thread's chunks add to the products of four rows, the first of which have been loaded.
fn products(first: Chunks, rows: Rows, from_chunk: u32) -> vec4<f32> {
    var sums = vec4<f32>();
    var now = first;
    for (var c = from_chunk; c < CHUNKS; c += DEPTH * PART) {
        if (c != from_chunk) { now = load_four(rows, c); }
        sums += added(now.c0, c);
        if (DEPTH > 1u) { sums += added(now.c1, c + PART); }
        if (DEPTH > 2u) { sums += added(now.c2, c + 2u * PART); }
        if (DEPTH > 3u) { sums += added(now.c3, c + 3u * PART); }
    }
    return sums;
}
