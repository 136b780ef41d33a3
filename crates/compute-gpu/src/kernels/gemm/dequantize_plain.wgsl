// Converts a block of plain weights into the weight tile.
// implements: @dequantize
// needs: gemm/weights_blocks

fn dequantize_block(q: Block32, scale: vec2<f32>, inside: bool, dst: u32) {
    dequantize_any(q, scale, inside, dst);
}
