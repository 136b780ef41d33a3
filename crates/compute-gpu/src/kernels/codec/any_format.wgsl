// Weights of any format and alignment, one at a time. Specification: `Format::dequantize`.
// ELEMENT: 0 f32, 1 f16, 2 bf16, 3 affine quants of BITS bits, 4 e2m1, 5 e4m3; the codes of
// block_types.wgsl. SCALE: 0 f32, 1 f16, 2 bf16, 3 e8m0, 4 e4m3; 5 one f32 for a matrix of ggml's
// blocks. BLOCK_COLS, BLOCK_ROWS: weights that share a scale (and, of quants, a bias). Block types
// of ggml: BLOCK_COLS weights take BLOCK_BYTES bytes.
// needs: codec/any_block
// constants: BITS, BLOCK_BYTES, BLOCK_COLS, BLOCK_ROWS, ELEMENT, SCALE

// First bytes of weights, scales and biases; bytes of a row of weights and of scales.
struct Matrix { weights: u32, scales: u32, biases: u32, row_bytes: u32, scale_bytes: u32 }

@group(0) @binding(1) var<storage, read> w: array<u32>;

fn load_byte(byte: u32) -> u32 {
    return w[byte >> 2u] >> ((byte & 3u) * 8u) & 255u;
}

fn load_half(byte: u32) -> u32 {
    if ((byte & 1u) == 0u) { return w[byte >> 2u] >> ((byte & 2u) * 8u) & 65535u; }
    return load_byte(byte) | load_byte(byte + 1u) << 8u;
}

fn load_word(byte: u32) -> u32 {
    if ((byte & 3u) == 0u) { return w[byte >> 2u]; }
    return load_half(byte) | load_half(byte + 2u) << 16u;
}

fn e2m1(code: u32) -> f32 {
    let e = code >> 1u & 3u;
    let m = code & 1u;
    let size = select(f32((2u + m) << e) * 0.25, f32(m) * 0.5, e == 0u);
    return select(size, -size, (code & 8u) != 0u);
}

fn e4m3(code: u32) -> f32 {
    let e = code >> 3u & 15u;
    let m = code & 7u;
    var size = f32(m) / 512.0;
    if (e > 0u) { size = bitcast<f32>((e + 120u) << 23u | m << 20u); }
    if ((code & 127u) == 127u) { size = bitcast<f32>(0x7fc00000u | code << 24u & 0u); }
    return select(size, -size, (code & 128u) != 0u);
}

fn e8m0(code: u32) -> f32 {
    if (code == 0u) { return bitcast<f32>(0x00400000u | code); }
    if (code == 255u) { return bitcast<f32>(0x7fc00000u | code); }
    return bitcast<f32>(code << 23u);
}

fn scalar_at(kind: u32, byte: u32, i: u32) -> f32 {
    if (kind == 0u) { return bitcast<f32>(load_word(byte + i * 4u)); }
    if (kind == 1u) { return unpack2x16float(load_half(byte + i * 2u)).x; }
    if (kind == 2u) { return bitcast<f32>(load_half(byte + i * 2u) << 16u); }
    if (kind == 3u) { return e8m0(load_byte(byte + i)); }
    return e4m3(load_byte(byte + i));
}

// Zero, which the compiler must not know. A value passed through `no_contract` is rounded and not
// contracted into an fma with a following sum. Kernels that leave it unset allow contraction, for
// speed.
var<private> zero: u32;

fn no_contract(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) + zero);
}

// Weight `i` of row `row`.
fn weight_at(m: Matrix, row: u32, i: u32) -> f32 {
    let byte = m.weights + row * m.row_bytes;
    if (ELEMENT < 3u) { return scalar_at(ELEMENT, byte, i); }
    if (ELEMENT >= Q4_0) {
        let weight = block_weight(byte + i / BLOCK_COLS * BLOCK_BYTES, i % BLOCK_COLS);
        if (SCALE == 5u) { return no_contract(weight) * scalar_at(0u, m.scales, 0u); }
        return weight;
    }
    let scales = row / BLOCK_ROWS * m.scale_bytes;
    let scale = scalar_at(SCALE, m.scales + scales, i / BLOCK_COLS);
    if (ELEMENT == 3u) {
        let bit = i * BITS;
        let first_byte = byte + (bit >> 3u);
        var q = load_byte(first_byte) >> (bit & 7u);
        if ((bit & 7u) + BITS > 8u) { q |= load_byte(first_byte + 1u) << (8u - (bit & 7u)); }
        q = extractBits(q, 0u, BITS);
        return no_contract(scale * f32(q)) + scalar_at(SCALE, m.biases + scales, i / BLOCK_COLS);
    }
    if (ELEMENT == 4u) { return e2m1(load_byte(byte + (i >> 1u)) >> ((i & 1u) * 4u) & 15u) * scale; }
    return e4m3(load_byte(byte + i)) * scale;
}
