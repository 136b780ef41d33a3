// Sums over a row's chunks, behind chunk_*.wgsl and stage_*.wgsl. The chunks are those of COLS inputs of a row of ROW_COLS.

// Words (vectors of four where chunks are so read) of a row of weights, and bytes of a row of scales.
const ROW_WORDS = select(ROW_COLS * BITS / 32u, ROW_COLS / 32u * VECTORS, VECTORS > 0u);
const ROW_SCALES = select((ROW_COLS + BLOCK_COLS - 1u) / BLOCK_COLS * SCALE_BYTES, 0u, ELEMENT < 3u);

// A chunk of each of four rows.
struct Loaded { q0: Chunk, q1: Chunk, q2: Chunk, q3: Chunk, scales: Scales }

fn load(rows: Rows, c: u32) -> Loaded {
    return Loaded(
        chunk_load(rows.weights.x, c), chunk_load(rows.weights.y, c),
        chunk_load(rows.weights.z, c), chunk_load(rows.weights.w, c),
        chunk_scales(rows, c));
}

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
