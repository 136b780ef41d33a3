// A chunk of quants on its way to workgroup memory by f32.
// implements: @dequantize
// needs: gemm/weights_blocks, @codec

fn put_chunk(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    if (!are_halves(scale)) {
        put_any(q, scale, inside, at);
        return;
    }
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        // The low bits of 2^23 and more, in place of a conversion.
        let four = bitcast<vec4<f32>>(chunk_quants(q, j) | vec4<u32>(0x4b000000u)) - vec4<f32>(8388608.0);
        ws[at + j] = Four(fma(four, vec4<f32>(scale.x), vec4<f32>(scale.y)));
    }
}
