// Sums over a row's chunks, behind chunk_*.wgsl and stage_*.wgsl.
//
// A part of PART neighbouring threads works on ROWS rows (1, 2 or 4) at a time. Each of its threads asks for four chunks at
// once: ACROSS of each row, PART chunks apart.

const ACROSS = 4u / ROWS;
// Of the four: their row, and how far their chunk lies behind the first.
const ROW_OF = vec4<u32>(0u, 1u / ACROSS, 2u / ACROSS, 3u / ACROSS);
const CHUNK_OF = vec4<u32>(0u, 1u % ACROSS, 2u % ACROSS, 3u % ACROSS) * PART;

// Words (vectors of four where chunks are so read) of a row of weights, and bytes of a row of scales.
const ROW_WORDS = select(COLS * BITS / 32u, CHUNKS * VECTORS, VECTORS > 0u);
const ROW_SCALES = select((COLS + BLOCK_COLS - 1u) / BLOCK_COLS * select(select(1u, 2u, SCALE < 3u), 4u, SCALE == 0u), 0u, ELEMENT < 3u);

struct Loaded { q0: Chunk, q1: Chunk, q2: Chunk, q3: Chunk, scales: vec4<f32>, biases: vec4<f32> }

// Four chunks from chunk `c` on; behind the end the last one.
fn load(rows: Rows, c: u32) -> Loaded {
    let at = min(vec4<u32>(c) + CHUNK_OF, vec4<u32>(CHUNKS - 1u));
    return Loaded(
        chunk_load(rows.weights.x, at.x), chunk_load(rows.weights.y, at.y),
        chunk_load(rows.weights.z, at.z), chunk_load(rows.weights.w, at.w),
        chunk_scales(rows.scales, at), chunk_biases(rows.biases, at));
}

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
