// Dequantizes a block of minifloats into the weight tile: scale and F16_FACTOR are applied in one
// product.
// implements: @dequantize
// needs: gemm/weights_blocks, @codec
// constants: F16_FACTOR

fn dequantize_block(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    let scaled = scale * F16_FACTOR;
    // The largest minifloat is 448; with its scale it must fit f16.
    if (!inside || !(max(abs(scale.x), abs(scale.y)) * 448.0 <= 65504.0) || block_has_nan(q)) {
        dequantize_any(q, scale, inside, dst);
        return;
    }
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        w_tile[dst + j] = Vec4(block_f16_bits(q, j) * select(scaled.y, scaled.x, j < 4u));
    }
}
