// A chunk of plain numbers on its way to workgroup memory.

fn put_chunk(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    put_any(q, scale, inside, at);
}
