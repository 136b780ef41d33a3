// A chunk of plain numbers on its way to workgroup memory.
// implements: @dequantize
// needs: gemm/weights_blocks

fn put_chunk(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    put_any(q, scale, inside, at);
}
