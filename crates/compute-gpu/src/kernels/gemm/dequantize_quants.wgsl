// Dequantizes a block of quants into the weight tile, in f32.
// implements: @dequantize
// needs: gemm/weights_blocks, @codec

fn dequantize_block(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    if (!fits_f16(scale)) {
        dequantize_any(q, scale, inside, dst);
        return;
    }
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        // Low bits of 2^23 and more, instead of an int-to-float conversion.
        let values = bitcast<vec4<f32>>(block_quants(q, j) | vec4<u32>(0x4b000000u)) - vec4<f32>(8388608.0);
        w_tile[dst + j] = Vec4(fma(values, vec4<f32>(scale.x), vec4<f32>(scale.y)));
    }
}
