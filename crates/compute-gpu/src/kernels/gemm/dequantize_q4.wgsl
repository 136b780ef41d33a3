// Dequantizes a block of 4-bit quants into the weight tile, in f16.
// implements: @dequantize
// needs: gemm/dequantize_f16, gemm/weights_blocks
// enables: f16

fn dequantize_block(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    if (!use_f16_math(scale)) {
        dequantize_any(q, scale, inside, dst);
        return;
    }
    let s = vec2<f16>(f16(scale.x));
    let b = vec2<f16>(f16(scale.y));
    for (var j = 0u; j < 4u; j++) {
        let word = q[j];
        let w0 = fma(quant_pair(word & 0x000f000fu | MAGIC), s, b);
        let w1 = fma(quant_pair(word >> 4u & 0x000f000fu | MAGIC), s, b);
        let w2 = fma(quant_pair(word >> 8u & 0x000f000fu | MAGIC), s, b);
        let w3 = fma(quant_pair(word >> 12u & 0x000f000fu | MAGIC), s, b);
        w_tile[dst + j * 2u] = Vec4(w0.x, w1.x, w2.x, w3.x);
        w_tile[dst + j * 2u + 1u] = Vec4(w0.y, w1.y, w2.y, w3.y);
    }
}
