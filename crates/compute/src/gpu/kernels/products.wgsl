// Sums over a row's chunks, behind chunk_*.wgsl and stage_*.wgsl.

// What this thread's chunks add to the products of four rows, the first of which has been loaded: memory is asked for the
// next before one is used.
fn products(first: Loaded, rows: Rows, from_chunk: u32) -> vec4<f32> {
    var sums = vec4<f32>();
    var now = first;
    for (var c = from_chunk; c < CHUNKS; c += PART) {
        var next = now;
        if (c + PART < CHUNKS) { next = load(rows, c + PART); }
        sums += product(now, c);
        now = next;
    }
    return sums;
}
