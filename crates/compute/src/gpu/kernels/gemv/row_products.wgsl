// Sums over a row's chunks, behind chunk_*.wgsl and stage_*.wgsl.
// needs: codec/load_blocks, @activations
// constants: PART, ROWS

// What this thread's chunks add to the products of the rows, the first of which have been loaded: memory is asked for the
// next before those are used. `x_row`: which of the rows of x.
fn products(first: Loaded, rows: Rows, from_chunk: u32, x_row: u32) -> vec4<f32> {
    // Where there are no next ones, a loop would hold registers for them.
    if (FULL) { return sums_of_rows(product(first, vec4<u32>(from_chunk) + CHUNK_OF + x_row * CHUNKS)); }
    if (WHOLE_ROWS) { return sums_of_rows(inside(first, from_chunk, x_row)); }
    var sums = vec4<f32>();
    var now = first;
    for (var c = from_chunk; c < CHUNKS; c += PART * ACROSS) {
        var next = now;
        if (c + PART * ACROSS < CHUNKS) { next = load(rows, c + PART * ACROSS); }
        sums += inside(now, c, x_row);
        now = next;
    }
    return sums_of_rows(sums);
}

// The products of four chunks from chunk `c` on, as far as they are chunks of their rows.
fn inside(four: Loaded, c: u32, x_row: u32) -> vec4<f32> {
    let at = vec4<u32>(c) + CHUNK_OF;
    let found = product(four, min(at, vec4<u32>(CHUNKS - 1u)) + x_row * CHUNKS);
    return select(vec4<f32>(), found, at < vec4<u32>(CHUNKS));
}

fn sums_of_rows(sums: vec4<f32>) -> vec4<f32> {
    if (ROWS == 2u) { return vec4<f32>(sums.x + sums.y, sums.z + sums.w, 0.0, 0.0); }
    if (ROWS == 1u) { return vec4<f32>((sums.x + sums.y) + (sums.z + sums.w), 0.0, 0.0, 0.0); }
    return sums;
}
