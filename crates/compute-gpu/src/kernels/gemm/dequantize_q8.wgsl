// Dequantizes a block of 8-bit quants into the weight tile, in f16.
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
        w_tile[dst + j] = four_f16(q.a[j], s, b);
        w_tile[dst + j + 4u] = four_f16(q.b[j], s, b);
    }
}

fn four_f16(word: u32, s: vec2<f16>, b: vec2<f16>) -> Vec4 {
    let even = fma(quant_pair(word & 0x00ff00ffu | MAGIC), s, b);
    let odd = fma(quant_pair(word >> 8u & 0x00ff00ffu | MAGIC), s, b);
    return Vec4(even.x, odd.x, even.y, odd.y);
}
