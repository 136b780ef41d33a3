// Codec of block types of 256 weights that are entries of codebooks: IQ1_S to IQ3_S.
// implements: @codec
// needs: codec/grids, codec/packed_bytes
// constants: BLOCK_BYTES, ELEMENT

const QUANT_OFFSET = select(0.0, -9.0, ELEMENT == IQ1_S || ELEMENT == IQ1_M);

// `indexes`: lower bits of the indexes; `upper`: the upper ones. `sub`: index of the block among
// its eight. `d`: the f16 scale.
struct Block32 { indexes: vec2<u32>, upper: u32, signs: u32, scales: u32, d: u32, sub: u32 }

fn load_block(row: u32, c: u32) -> Block32 {
    let start = row + c / 8u * BLOCK_BYTES;
    let sub = c % 8u;
    var block: Block32;
    block.sub = sub;
    block.d = load_low(start);
    if (ELEMENT == IQ2_XXS) {
        block.indexes.x = load_unaligned(start + 2u + sub * 8u);
        block.signs = load_unaligned(start + 6u + sub * 8u);
    }
    if (ELEMENT == IQ2_XS) {
        block.indexes = vec2<u32>(load_unaligned(start + 2u + sub * 8u), load_unaligned(start + 6u + sub * 8u));
        block.scales = load_low(start + 66u + sub);
    }
    if (ELEMENT == IQ2_S) {
        block.indexes.x = load_unaligned(start + 2u + sub * 4u);
        block.signs = load_unaligned(start + 34u + sub * 4u);
        block.upper = load_low(start + 66u + sub);
        block.scales = load_low(start + 74u + sub);
    }
    if (ELEMENT == IQ3_XXS) {
        block.indexes = vec2<u32>(load_unaligned(start + 2u + sub * 8u), load_unaligned(start + 6u + sub * 8u));
        block.signs = load_unaligned(start + 66u + sub * 4u);
    }
    if (ELEMENT == IQ3_S) {
        block.indexes = vec2<u32>(load_unaligned(start + 2u + sub * 8u), load_unaligned(start + 6u + sub * 8u));
        block.upper = load_low(start + 66u + sub);
        block.signs = load_unaligned(start + 74u + sub * 4u);
        block.scales = load_low(start + 106u + sub / 2u) >> (sub % 2u * 4u);
    }
    if (ELEMENT == IQ1_S) {
        block.indexes.x = load_unaligned(start + 2u + sub * 4u);
        block.upper = load_low(start + 34u + sub * 2u);
    }
    if (ELEMENT == IQ1_M) {
        block.indexes.x = w[(start >> 2u) + sub];
        block.upper = load_low(start + 32u + sub * 2u);
        let words = vec2<u32>(w[(start >> 2u) + 12u], w[(start >> 2u) + 13u]);
        block.scales = load_low(start + 48u + sub / 2u * 2u) >> (sub % 2u * 6u);
        let top = words >> vec2<u32>(12u) & vec2<u32>(0x000f000fu);
        let bytes = (top | top >> vec2<u32>(12u)) & vec2<u32>(255u);
        block.d = bytes.x | bytes.y << 8u;
    }
    return block;
}

fn block_bytes(q: Block32, j: u32) -> u32 {
    // Index of the group of eight weights, and its half.
    let eight = j / 2u;
    let half = j % 2u;
    let index = q.indexes.x >> (eight * 8u) & 255u;
    if (ELEMENT == IQ1_S) {
        return grid_iq1(index | (q.upper >> (eight * 3u) & 7u) << 8u, half, (q.upper & 0x8000u) != 0u);
    }
    if (ELEMENT == IQ1_M) {
        let bits = q.upper >> (eight * 4u);
        return grid_iq1(index | (bits & 7u) << 8u, half, (bits & 8u) != 0u);
    }
    if (ELEMENT == IQ2_XXS) {
        return with_signs(grid_iq2(GRID_IQ2_XXS, index, half), with_parity(q.signs >> (eight * 7u)) >> (half * 4u));
    }
    if (ELEMENT == IQ2_XS) {
        let code = q.indexes[eight / 2u] >> (eight % 2u * 16u) & 0xffffu;
        return with_signs(grid_iq2(GRID_IQ2_XS, code & 511u, half), with_parity(code >> 9u) >> (half * 4u));
    }
    if (ELEMENT == IQ2_S) {
        let entry = index | (q.upper >> (eight * 2u) & 3u) << 8u;
        return with_signs(grid_iq2(GRID_IQ2_S, entry, half), q.signs >> (j * 4u));
    }
    let index3 = q.indexes[j / 4u] >> (j % 4u * 8u) & 255u;
    if (ELEMENT == IQ3_XXS) {
        return with_signs(grid_iq3_xxs(index3), with_parity(q.signs >> (eight * 7u)) >> (half * 4u));
    }
    return with_signs(grid_iq3_s(index3 | (q.upper >> j & 1u) << 8u), q.signs >> (j * 4u));
}

fn block_factors(q: Block32) -> BlockFactors {
    let d = f16_of(q.d);
    if (ELEMENT == IQ2_XXS) { return without_bias(vec2<f32>(d * (0.5 + f32(q.signs >> 28u)) * 0.25)); }
    if (ELEMENT == IQ3_XXS) { return without_bias(vec2<f32>(d * (0.5 + f32(q.signs >> 28u)) * 0.5)); }
    if (ELEMENT == IQ3_S) { return without_bias(vec2<f32>(d * (1.0 + 2.0 * f32(q.scales & 15u)))); }
    if (ELEMENT == IQ1_S) { return without_bias(vec2<f32>(d * f32(2u * (q.upper >> 12u & 7u) + 1u) * 0.125)); }
    if (ELEMENT == IQ1_M) {
        let scales = vec2<u32>(q.scales, q.scales >> 3u) & vec2<u32>(7u);
        return without_bias(d * vec2<f32>(scales * 2u + 1u) * 0.125);
    }
    let scales = vec2<u32>(q.scales, q.scales >> 4u) & vec2<u32>(15u);
    return without_bias(d * (vec2<f32>(scales) + 0.5) * 0.25);
}

fn without_bias(scale: vec2<f32>) -> BlockFactors {
    return BlockFactors(scale, vec2<f32>());
}
