// A chunk of small floating-point numbers on its way to workgroup memory: what their bits are as f16 meets scale and factor at
// once.
// implements: @dequantize
// needs: gemm/weights_blocks, @codec
// constants: FACTOR

fn put_chunk(q: Chunk, scale: vec2<f32>, inside: bool, at: u32) {
    let factors = scale * FACTOR;
    // No number is larger than 448, which f16 has to hold with its scale.
    if (!inside || !(max(abs(scale.x), abs(scale.y)) * 448.0 <= 65504.0) || chunk_has_nans(q)) {
        put_any(q, scale, inside, at);
        return;
    }
    // @unroll
    for (var j = 0u; j < 8u; j++) {
        ws[at + j] = Four(chunk_bits(q, j) * select(factors.y, factors.x, j < 4u));
    }
}
