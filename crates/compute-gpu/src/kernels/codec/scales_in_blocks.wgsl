// Scales and biases of four blocks of ggml's block types, which the codec decodes.
// implements: @scales
// needs: codec/load_blocks, codec/packed_bytes, @codec

// Nothing besides the blocks.
alias FourScales = u32;

fn load_scales(rows: RowOffsets, block: vec4<u32>) -> u32 {
    return 0u;
}

fn block_scales(blocks: FourBlocks) -> BlockScales {
    let f0 = block_factors(blocks.q0);
    let f1 = block_factors(blocks.q1);
    let f2 = block_factors(blocks.q2);
    var f3: BlockFactors;
    if (!SKIP_FOURTH) { f3 = block_factors(blocks.q3); }
    return BlockScales(
        vec4<f32>(f0.scale.x, f1.scale.x, f2.scale.x, f3.scale.x),
        vec4<f32>(f0.scale.y, f1.scale.y, f2.scale.y, f3.scale.y),
        vec4<f32>(f0.bias.x, f1.bias.x, f2.bias.x, f3.bias.x),
        vec4<f32>(f0.bias.y, f1.bias.y, f2.bias.y, f3.bias.y));
}
