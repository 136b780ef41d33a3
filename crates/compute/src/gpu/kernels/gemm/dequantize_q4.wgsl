// A chunk of 4 bits on its way to workgroup memory.
// implements: @dequantize
// needs: gemm/dequantize_f16, gemm/weights_blocks
// enables: f16

fn put_chunk(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    if (!hold_halves(scale)) {
        put_any(q, scale, inside, at);
        return;
    }
    let s = vec2<f16>(f16(scale.x));
    let b = vec2<f16>(f16(scale.y));
    for (var j = 0u; j < 4u; j++) {
        let word = q[j];
        let w0 = fma(two_quants(word & 0x000f000fu | MAGIC), s, b);
        let w1 = fma(two_quants(word >> 4u & 0x000f000fu | MAGIC), s, b);
        let w2 = fma(two_quants(word >> 8u & 0x000f000fu | MAGIC), s, b);
        let w3 = fma(two_quants(word >> 12u & 0x000f000fu | MAGIC), s, b);
        ws[at + j * 2u] = Four(w0.x, w1.x, w2.x, w3.x);
        ws[at + j * 2u + 1u] = Four(w0.y, w1.y, w2.y, w3.y);
    }
}
