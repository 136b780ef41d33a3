// Blocks of 32 weights of ggml's block types: products of weights that are bytes.
// A codec defines for a block: `block_bytes`, weights 4 j .. 4 j + 4 without scale and QUANT_OFFSET
// as signed bytes; `block_factors`, scales and biases.
// needs: codec/block_scales, codec/block_types, @codec
// constants: BLOCK_BYTES, QUANT_OFFSET

const QUANT_STEP = 1.0;
// Bytes of a load unit: blocks start anywhere.
const UNIT_BYTES = 1u;

// Scales and biases of the halves of a block.
struct BlockFactors { scale: vec2<f32>, bias: vec2<f32> }

// The vectors that contain 16 bytes at any address, and two such runs, one behind the other.
struct Chunk { a: vec4<u32>, b: vec4<u32> }
struct TwoChunks { first: Chunk, second: Chunk }

fn load_16(byte: u32) -> Chunk {
    let a = w4[byte >> 4u];
    if (BLOCK_BYTES % 16u == 0u) { return Chunk(a, a); }
    return Chunk(a, w4[(byte + 15u) >> 4u]);
}

fn load_32(byte: u32) -> TwoChunks {
    let b = w4[(byte >> 4u) + 1u];
    var c = b;
    if (BLOCK_BYTES % 16u != 0u) { c = w4[(byte + 31u) >> 4u]; }
    return TwoChunks(Chunk(w4[byte >> 4u], b), Chunk(b, c));
}

// Word `k` of the bytes of a chunk, which start at `byte`.
fn chunk_word(chunk: Chunk, byte: u32, k: u32) -> u32 {
    if (BLOCK_BYTES % 16u == 0u) { return chunk.a[k]; }
    let low = whole_word(chunk, byte, k);
    if (BLOCK_BYTES % 4u == 0u) { return low; }
    let next = whole_word(chunk, byte, k + 1u);
    if (BLOCK_BYTES % 2u == 0u) { return select(low, low >> 16u | next << 16u, (byte & 2u) != 0u); }
    return low >> bit_of(byte) | next << (31u - bit_of(byte)) << 1u;
}

// Word `k` of the words that contain the bytes.
fn whole_word(chunk: Chunk, byte: u32, k: u32) -> u32 {
    let even = select(word_of_two(chunk, k), word_of_two(chunk, k + 2u), (byte & 8u) != 0u);
    let odd = select(word_of_two(chunk, k + 1u), word_of_two(chunk, k + 3u), (byte & 8u) != 0u);
    return select(even, odd, (byte & 4u) != 0u);
}

fn word_of_two(chunk: Chunk, i: u32) -> u32 {
    if (i < 4u) { return chunk.a[i % 4u]; }
    return chunk.b[i % 4u];
}

// Bit of a word at which a byte starts.
fn bit_of(byte: u32) -> u32 {
    return (byte & 3u) * 8u;
}

// The word at a byte.
fn load_unaligned(byte: u32) -> u32 {
    let shift = bit_of(byte);
    return w[byte >> 2u] >> shift | w[(byte + 3u) >> 2u] << (31u - shift) << 1u;
}

// Two bytes at a multiple of 2, or one, in the low bits of a word.
fn load_low(byte: u32) -> u32 {
    return w[byte >> 2u] >> bit_of(byte);
}

// The bits of low nibbles, or of high ones, as bytes.
fn nibbles_of(word: u32, high: bool) -> u32 {
    return select(word, word >> 4u, high) & 0x0f0f0f0fu;
}

// Four bits as bytes, lowest first.
fn spread_bits(bits: u32) -> u32 {
    return (bits & 15u) * 0x00204081u & 0x01010101u;
}

// Bytes of IQ4 values for four codes.
fn iq4_bytes(codes: u32) -> u32 {
    return iq4_byte(codes & 15u) | iq4_byte(codes >> 8u & 15u) << 8u | iq4_byte(codes >> 16u & 15u) << 16u
        | iq4_byte(codes >> 24u) << 24u;
}

// Twice the values of four E2M1 codes plus 16: bytes without sign do not interfere.
fn e2m1_bytes(codes: u32) -> u32 {
    // Twice the magnitude is the code without sign, plus 1 if bits 0 and 2 are set, 2 if 1 and 2
    // are, 2 if all are.
    let ones = codes & codes >> 2u & 0x01010101u;
    let sizes = (codes & 0x07070707u) + (ones | ones << 1u & codes) + (codes & codes >> 1u & 0x02020202u);
    let negative = codes >> 3u & 0x01010101u;
    return 0x10101010u + sizes - (sizes & negative * 15u) * 2u;
}

fn block_values(q: Block32, j: u32) -> vec4<f32> {
    // Low bits of 2^23 and more, instead of an int-to-float conversion.
    let bits = vec4<u32>(block_bytes(q, j) ^ 0x80808080u) >> vec4<u32>(0u, 8u, 16u, 24u) & vec4<u32>(255u);
    return bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u)) - vec4<f32>(8388736.0 - QUANT_OFFSET);
}

fn block_dot(q: Block32, x: array<vec4<f32>, 8>) -> vec2<f32> {
    return block_dot_of_values(q, x);
}

fn block_dot_i8(q: Block32, x0: vec4<u32>, x1: vec4<u32>) -> vec2<i32> {
    return vec2<i32>(
        (dot4I8Packed(block_bytes(q, 0u), x0.x) + dot4I8Packed(block_bytes(q, 1u), x0.y))
            + (dot4I8Packed(block_bytes(q, 2u), x0.z) + dot4I8Packed(block_bytes(q, 3u), x0.w)),
        (dot4I8Packed(block_bytes(q, 4u), x1.x) + dot4I8Packed(block_bytes(q, 5u), x1.y))
            + (dot4I8Packed(block_bytes(q, 6u), x1.z) + dot4I8Packed(block_bytes(q, 7u), x1.w)));
}
