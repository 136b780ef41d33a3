// A chunk of 8 bits on its way to workgroup memory.
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
        ws[at + j] = four_halves(q.a[j], s, b);
        ws[at + j + 4u] = four_halves(q.b[j], s, b);
    }
}

fn four_halves(word: u32, s: vec2<f16>, b: vec2<f16>) -> Four {
    let even = fma(two_quants(word & 0x00ff00ffu | MAGIC), s, b);
    let odd = fma(two_quants(word >> 8u & 0x00ff00ffu | MAGIC), s, b);
    return Four(even.x, odd.x, even.y, odd.y);
}
