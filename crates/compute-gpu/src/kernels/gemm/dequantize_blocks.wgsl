// Dequantizes a block of one of ggml's types into the weight tile. `scale` is not used: the codec
// decodes scales and biases.
// implements: @dequantize
// needs: codec/packed_bytes, gemm/weights_blocks, @codec

fn dequantize_block(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    let factors = block_factors(q);
    let scales = select(vec2<f32>(), select(factors.scale.xx, factors.scale, TWO_SCALES), inside);
    let biases = select(vec2<f32>(), select(factors.bias.xx, factors.bias, TWO_BIASES), inside && HAS_BIAS);
    // Quants are bytes.
    let fits = max(abs(scales.x), abs(scales.y)) * 256.0 + max(abs(biases.x), abs(biases.y)) <= 65504.0;
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        let values = fma(block_values(q, j), vec4<f32>(scales[j / 4u]), vec4<f32>(biases[j / 4u]));
        if (fits) { w_tile[dst + j] = Vec4(values); } else { w_tile[dst + j] = w_vec4(values); }
    }
}
