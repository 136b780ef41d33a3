// Codec of block types with one scale and quants of up to two bits: TQ1_0, TQ2_0, Q1_0, Q2_0.
// implements: @codec
// needs: codec/packed_bytes
// constants: BLOCK_BYTES, BLOCK_COLS, ELEMENT

const QUANT_OFFSET = -1.0;

// `quants` of TQ2_0, which start at multiples of 16 after `start`; `words` of other types. `sub`:
// index of these 32 weights in their block. `d`: the f16 scale.
struct Block32 { quants: TwoChunks, words: array<u32, 8>, start: u32, sub: u32, d: u32 }

fn load_block(row: u32, c: u32) -> Block32 {
    let blocks = BLOCK_COLS / 32u;
    let start = row + c / blocks * BLOCK_BYTES;
    var block: Block32;
    block.sub = c % blocks;
    if (ELEMENT == TQ2_0) {
        block.start = start;
        block.quants = load_32(start + block.sub / 4u * 32u);
        block.d = load_low(start + 64u);
    }
    if (ELEMENT == TQ1_0) {
        // @unroll
        for (var i = 0u; i < 8u; i++) { block.words[i] = load_unaligned(start + trit_word(block.sub, i) * 4u); }
        block.d = load_low(start + 52u);
    }
    if (ELEMENT == Q1_0) { block.words[0] = load_unaligned(start + 2u + block.sub * 4u); }
    if (ELEMENT == Q2_0) {
        block.words[0] = load_unaligned(start + 2u + block.sub * 8u);
        block.words[1] = load_unaligned(start + 6u + block.sub * 8u);
    }
    if (ELEMENT == Q1_0 || ELEMENT == Q2_0) { block.d = load_low(start); }
    return block;
}

// Word of a block with four ternary digits for each of its bytes, and the digit.
fn trit_word(sub: u32, j: u32) -> u32 {
    if (sub < 5u) { return j; }
    return select(8u + j % 4u, 12u, sub == 7u && j > 3u);
}

fn trit_digit(sub: u32, j: u32) -> u32 {
    if (sub < 5u) { return sub; }
    if (sub < 7u) { return (sub - 5u) * 2u + j / 4u; }
    return select(4u, j % 4u, j > 3u);
}

fn block_bytes(q: Block32, j: u32) -> u32 {
    if (ELEMENT == TQ2_0) {
        var word = chunk_word(q.quants.first, q.start, j % 4u);
        if (j > 3u) { word = chunk_word(q.quants.second, q.start, j % 4u); }
        return word >> (q.sub % 4u * 2u) & 0x03030303u;
    }
    if (ELEMENT == TQ1_0) {
        let power = power_of_3(trit_digit(q.sub, j));
        let even = (q.words[j] & 0x00ff00ffu) * power & 0x00ff00ffu;
        let odd = (q.words[j] >> 8u & 0x00ff00ffu) * power & 0x00ff00ffu;
        return even * 3u >> 8u & 0x00ff00ffu | odd * 3u & 0xff00ff00u;
    }
    if (ELEMENT == Q1_0) { return spread_bits(q.words[0] >> (j * 4u)) * 2u; }
    let bits = q.words[j / 4u] >> (j % 4u * 8u) & 255u;
    let pairs = (bits | bits << 12u) & 0x000f000fu;
    return (pairs | pairs << 6u) & 0x03030303u;
}

fn block_factors(q: Block32) -> BlockFactors {
    return BlockFactors(vec2<f32>(f16_of(q.d)), vec2<f32>());
}
