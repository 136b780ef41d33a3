// Codec of block types of 256 weights with integer scales: Q2_K to Q6_K and IQ4_XS.
// A block of 32 weights is a sub-block. But the quants of several sub-blocks share bytes: with
// PAIR_COLS a block is 16 weights each of two sub-blocks that share 16 bytes.
// implements: @codec
// needs: codec/packed_bytes
// constants: BLOCK_BYTES, ELEMENT

const QUANT_OFFSET = select(select(0.0, -4.0, ELEMENT == Q3_K), -32.0, ELEMENT == Q6_K);

// `low`, `high`: bytes with the lower and upper bits of the quants of this and other blocks; with
// PAIR_COLS only the first chunks. `start`: first byte of the eight blocks. `subs`, `groups`:
// sub-blocks of the halves, and groups of 16. `d`: scale and that of minima. `scales`: integer
// scales.
struct Block32 { low: TwoChunks, high: TwoChunks, start: u32, subs: vec2<u32>, groups: vec2<u32>, d: u32, scales: vec3<u32> }

fn load_block(row: u32, c: u32) -> Block32 {
    let start = row + c / 8u * BLOCK_BYTES;
    let i = c % 8u;
    var block: Block32;
    block.start = start;
    block.subs = vec2<u32>(i);
    block.groups = vec2<u32>(i * 2u, i * 2u + 1u);
    if (PAIR_COLS > 0u) {
        let first = select(i / 2u * 2u, i / 4u * 4u + i / 2u % 2u, PAIR_COLS == 128u);
        block.subs = vec2<u32>(first, first + PAIR_COLS / 64u);
        block.groups = block.subs * 2u + i % 2u;
    }
    let sub = block.subs.x;
    if (ELEMENT == Q2_K) {
        block.low = load_quants(start + 16u + sub / 4u * 32u, i);
        block.scales.x = w[(start >> 2u) + sub / 2u];
        block.d = w[(start >> 2u) + 20u];
    }
    if (ELEMENT == Q3_K) {
        block.low = load_quants(start + 32u + sub / 4u * 32u, i);
        block.high = load_quants(start, i);
        block.scales.x = load_unaligned(start + 96u + sub / 2u % 2u * 4u);
        block.scales.y = load_unaligned(start + 104u);
        block.d = load_low(start + 108u);
    }
    if (ELEMENT == Q4_K || ELEMENT == Q5_K) {
        let head = w4[start >> 4u];
        block.d = head.x;
        block.scales = head.yzw;
        block.low = load_quants(start + BLOCK_BYTES - 128u + sub / 2u * 32u, i);
        if (ELEMENT == Q5_K) { block.high = load_quants(start + 16u, i); }
    }
    if (ELEMENT == Q6_K) {
        block.low = load_quants(start + sub / 4u * 64u + sub % 2u * 32u, i);
        block.high = load_quants(start + 128u + sub / 4u * 32u, i);
        block.scales.x = load_low(start + 192u + block.groups.x);
        block.scales.y = load_low(start + 192u + block.groups.y);
        block.d = load_low(start + 208u);
    }
    if (ELEMENT == IQ4_XS) {
        block.low.first = load_16(start + 8u + sub * 16u);
        block.d = w[start >> 2u];
        block.scales.x = w[(start >> 2u) + 1u];
    }
    return block;
}

// 32 bytes; with PAIR_COLS 16 of them, for block `i` of eight.
fn load_quants(byte: u32, i: u32) -> TwoChunks {
    if (PAIR_COLS == 0u) { return load_32(byte); }
    let chunk = load_16(byte + i % 2u * 16u);
    return TwoChunks(chunk, chunk);
}

fn quants_word(q: Block32, chunks: TwoChunks, j: u32) -> u32 {
    // Chunks start at multiples of 16 after the start.
    if (j < 4u) { return chunk_word(chunks.first, q.start, j % 4u); }
    return chunk_word(chunks.second, q.start, j % 4u);
}

fn block_bytes(q: Block32, j: u32) -> u32 {
    if (ELEMENT == IQ4_XS) { return iq4_bytes(nibbles_of(chunk_word(q.low.first, q.start + 8u, j % 4u), j > 3u)); }
    let sub = q.subs[j / 4u];
    let low = quants_word(q, q.low, j);
    if (ELEMENT == Q2_K) { return low >> (sub % 4u * 2u) & 0x03030303u; }
    if (ELEMENT == Q4_K) { return low >> (sub % 2u * 4u) & 0x0f0f0f0fu; }
    let high = quants_word(q, q.high, j);
    if (ELEMENT == Q3_K) { return low >> (sub % 4u * 2u) & 0x03030303u | (high >> sub & 0x01010101u) << 2u; }
    if (ELEMENT == Q5_K) { return low >> (sub % 2u * 4u) & 0x0f0f0f0fu | (high >> sub & 0x01010101u) << 4u; }
    return low >> (sub / 2u % 2u * 4u) & 0x0f0f0f0fu | (high >> (sub % 4u * 2u) & 0x03030303u) << 4u;
}

fn block_factors(q: Block32) -> BlockFactors {
    let d = f16_of(q.d);
    let bytes = q.groups % 4u * 8u;
    if (ELEMENT == Q2_K) {
        let scales = vec2<u32>(q.scales.x) >> bytes;
        return BlockFactors(
            d * vec2<f32>(scales & vec2<u32>(15u)),
            -f16_of(q.d >> 16u) * vec2<f32>(scales >> vec2<u32>(4u) & vec2<u32>(15u)));
    }
    if (ELEMENT == Q3_K) {
        let low = vec2<u32>(q.scales.x) >> (bytes + q.groups / 8u * 4u) & vec2<u32>(15u);
        let high = vec2<u32>(q.scales.y) >> (bytes + q.groups / 4u * 2u) & vec2<u32>(3u);
        return BlockFactors(d * (vec2<f32>(low | high << vec2<u32>(4u)) - 32.0), vec2<f32>());
    }
    if (ELEMENT == Q6_K) {
        let scales = vec2<i32>(extractBits(i32(q.scales.x), 0u, 8u), extractBits(i32(q.scales.y), 0u, 8u));
        return BlockFactors(d * vec2<f32>(scales), vec2<f32>());
    }
    if (ELEMENT == IQ4_XS) {
        let scale = q.scales.x >> (q.subs.x * 4u) & 15u | (q.d >> (16u + q.subs.x * 2u) & 3u) << 4u;
        return BlockFactors(vec2<f32>(d * (f32(scale) - 32.0)), vec2<f32>());
    }
    let first = six_bits(q.scales, q.subs.x);
    var second = first;
    if (PAIR_COLS > 0u) { second = six_bits(q.scales, q.subs.y); }
    return BlockFactors(d * vec2<f32>(first.x, second.x), -f16_of(q.d >> 16u) * vec2<f32>(first.y, second.y));
}

// Scale and minimum of a sub-block, six bits each; those of the last four are in parts.
fn six_bits(words: vec3<u32>, sub: u32) -> vec2<f32> {
    let bytes = words >> vec3<u32>(sub % 4u * 8u) & vec3<u32>(255u);
    let first = bytes.xy & vec2<u32>(63u);
    let last = vec2<u32>(bytes.z & 15u, bytes.z >> 4u) | bytes.xy >> vec2<u32>(6u) << vec2<u32>(4u);
    return vec2<f32>(select(first, last, sub > 3u));
}
