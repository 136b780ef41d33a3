// Sums over a row's chunks, behind chunk_*.wgsl and stage_*.wgsl.

// What this thread's chunks add to the products of the rows, the first of which have been loaded: memory is asked for the
// next before those are used. `x_row`: which of the rows of x.
fn products(first: Loaded, rows: Rows, from_chunk: u32, x_row: u32) -> vec4<f32> {
    var sums = vec4<f32>();
    var now = first;
    for (var c = from_chunk; c < CHUNKS; c += PART * ACROSS) {
        var next = now;
        if (c + PART * ACROSS < CHUNKS) { next = load(rows, c + PART * ACROSS); }
        let at = vec4<u32>(c) + CHUNK_OF;
        let inside = at < vec4<u32>(CHUNKS);
        sums += select(vec4<f32>(), product(now, min(at, vec4<u32>(CHUNKS - 1u)) + x_row * CHUNKS), inside);
        now = next;
    }
    if (ROWS == 2u) { return vec4<f32>(sums.x + sums.y, sums.z + sums.w, 0.0, 0.0); }
    if (ROWS == 1u) { return vec4<f32>((sums.x + sums.y) + (sums.z + sums.w), 0.0, 0.0, 0.0); }
    return sums;
}
