// Codec of block types with a scale for each 32 weights, or 16 of NVFP4: Q4_0, Q4_1, Q5_0, Q5_1,
// Q8_0, IQ4_NL, MXFP4, NVFP4.
// implements: @codec
// needs: codec/packed_bytes
// constants: BLOCK_BYTES, ELEMENT

const FIVE_BITS = ELEMENT == Q5_0 || ELEMENT == Q5_1;
const FLOATS = ELEMENT == MXFP4 || ELEMENT == NVFP4;
const QUANT_OFFSET = select(select(0.0, -8.0, ELEMENT == Q4_0), -16.0, ELEMENT == Q5_0 || FLOATS);

// `quants` start at `byte`; `more`: the upper 16 of Q8_0. `head`: scale, and bias if there is one.
// `fifth`: the fifth bits.
struct Block32 { quants: Chunk, more: Chunk, byte: u32, head: u32, fifth: u32 }

fn load_block(row: u32, c: u32) -> Block32 {
    var block: Block32;
    if (ELEMENT == NVFP4) {
        let start = row + c / 2u * BLOCK_BYTES;
        block.byte = start + 4u + c % 2u * 16u;
        block.quants = load_16(block.byte);
        block.head = w[start >> 2u] >> (c % 2u * 16u);
        return block;
    }
    let start = row + c * BLOCK_BYTES;
    block.head = load_low(start);
    if (ELEMENT == Q8_0) {
        block.byte = start + 2u;
        let all = load_32(block.byte);
        block.quants = all.first;
        block.more = all.second;
        return block;
    }
    if (ELEMENT == Q5_0) { block.fifth = load_unaligned(start + 2u); }
    if (ELEMENT == Q5_1) { block.fifth = w[(start >> 2u) + 1u]; }
    block.byte = start + BLOCK_BYTES - 16u;
    block.quants = load_16(block.byte);
    return block;
}

fn block_bytes(q: Block32, j: u32) -> u32 {
    if (ELEMENT == NVFP4) {
        return e2m1_bytes(nibbles_of(chunk_word(q.quants, q.byte, j / 4u * 2u + j % 2u), j / 2u % 2u == 1u));
    }
    if (ELEMENT == Q8_0 && j > 3u) { return chunk_word(q.more, q.byte, j % 4u); }
    let word = chunk_word(q.quants, q.byte, j % 4u);
    if (ELEMENT == Q8_0) { return word; }
    let codes = nibbles_of(word, j > 3u);
    if (FIVE_BITS) { return codes | spread_bits(q.fifth >> (j * 4u)) << 4u; }
    if (ELEMENT == IQ4_NL) { return iq4_bytes(codes); }
    if (FLOATS) { return e2m1_bytes(codes); }
    return codes;
}

fn block_factors(q: Block32) -> BlockFactors {
    if (ELEMENT == NVFP4) {
        return BlockFactors(0.5 * vec2<f32>(ue4m3(q.head), ue4m3(q.head >> 8u)), vec2<f32>());
    }
    if (ELEMENT == MXFP4) { return BlockFactors(vec2<f32>(e8m0_half(q.head & 255u)), vec2<f32>()); }
    return BlockFactors(vec2<f32>(f16_of(q.head)), vec2<f32>(f16_of(q.head >> 16u)));
}
