// Weights of ggml's block types, one at a time. Specification: `format/blocks`.
// needs: codec/any_format, codec/block_types, codec/grids
// constants: ELEMENT

// Code `i` of `bits` bits (1, 2 or 4) in a run of bytes, lowest bits first.
fn code_at(byte: u32, bits: u32, i: u32) -> u32 {
    let bit = i * bits;
    return load_byte(byte + bit / 8u) >> (bit % 8u) & ((1u << bits) - 1u);
}

// Code `i` of nibbles of which the low ones are the first half of `count` weights.
fn nibble_at(byte: u32, count: u32, i: u32) -> u32 {
    let half = count / 2u;
    return load_byte(byte + i % half) >> (i / half * 4u) & 15u;
}

fn f16_at(byte: u32) -> f32 {
    return f16_of(load_half(byte));
}

fn i8_at(byte: u32) -> f32 {
    return signed_byte(load_byte(byte), 0u);
}

// Byte `i` of a word, as a signed number.
fn signed_byte(word: u32, i: u32) -> f32 {
    return f32(extractBits(i32(word), i * 8u, 8u));
}

// Weight `i` of the block at a byte.
fn block_weight(b: u32, i: u32) -> f32 {
    // Its group of 8, its half of that, and its place in the half.
    let eight = i / 8u;
    let half = i / 4u % 2u;
    let n = i % 4u;
    switch ELEMENT {
        case Q4_0: { return f16_at(b) * (f32(nibble_at(b + 2u, 32u, i)) - 8.0); }
        case Q4_1: { return no_contract(f16_at(b) * f32(nibble_at(b + 4u, 32u, i))) + f16_at(b + 2u); }
        case Q5_0: { return f16_at(b) * (f32(nibble_at(b + 6u, 32u, i) | code_at(b + 2u, 1u, i) << 4u) - 16.0); }
        case Q5_1: {
            let q = nibble_at(b + 8u, 32u, i) | code_at(b + 4u, 1u, i) << 4u;
            return no_contract(f16_at(b) * f32(q)) + f16_at(b + 2u);
        }
        case Q8_0: { return f16_at(b) * i8_at(b + 2u + i); }
        case Q2_K: {
            let scale = load_byte(b + i / 16u);
            let q = load_byte(b + 16u + i / 128u * 32u + i % 32u) >> (i / 32u % 4u * 2u) & 3u;
            return no_contract(f16_at(b + 80u) * f32(scale & 15u) * f32(q)) - f16_at(b + 82u) * f32(scale >> 4u);
        }
        case Q3_K: {
            let j = i / 16u;
            let low = load_byte(b + 32u + i / 128u * 32u + i % 32u) >> (i / 32u % 4u * 2u) & 3u;
            let q = low | (load_byte(b + i % 32u) >> (i / 32u) & 1u) << 2u;
            let scale = nibble_at(b + 96u, 16u, j) | (load_byte(b + 104u + j % 4u) >> (j / 4u * 2u) & 3u) << 4u;
            return f16_at(b + 108u) * (f32(scale) - 32.0) * (f32(q) - 4.0);
        }
        case Q4_K, Q5_K: {
            let j = i / 32u;
            let low = load_byte(b + 4u + j % 4u);
            let middle = load_byte(b + 8u + j % 4u);
            let high = load_byte(b + 12u + j % 4u);
            let scale = select(high & 15u | low >> 6u << 4u, low & 63u, j < 4u);
            let minimum = select(high >> 4u | middle >> 6u << 4u, middle & 63u, j < 4u);
            let quants = select(b + 48u, b + 16u, ELEMENT == Q4_K);
            var q = load_byte(quants + i / 64u * 32u + i % 32u) >> (j % 2u * 4u) & 15u;
            if (ELEMENT == Q5_K) { q |= (load_byte(b + 16u + i % 32u) >> j & 1u) << 4u; }
            return no_contract(f16_at(b) * f32(scale) * f32(q)) - f16_at(b + 2u) * f32(minimum);
        }
        case Q6_K: {
            let quarter = i / 32u % 4u;
            let low = load_byte(b + i / 128u * 64u + quarter % 2u * 32u + i % 32u) >> (quarter / 2u * 4u) & 15u;
            let high = load_byte(b + 128u + i / 128u * 32u + i % 32u) >> (quarter * 2u) & 3u;
            return f16_at(b + 208u) * i8_at(b + 192u + i / 16u) * (f32(low | high << 4u) - 32.0);
        }
        case IQ2_XXS: {
            let bits = load_word(b + 6u + i / 32u * 8u);
            let entry = load_byte(b + 2u + i / 32u * 8u + eight % 4u);
            let bytes = with_signs(grid_iq2(GRID_IQ2_XXS, entry, half), with_parity(bits >> (eight % 4u * 7u)) >> (half * 4u));
            return f16_at(b) * (0.5 + f32(bits >> 28u)) * 0.25 * signed_byte(bytes, n);
        }
        case IQ2_XS: {
            let code = load_half(b + 2u + eight * 2u);
            let bytes = with_signs(grid_iq2(GRID_IQ2_XS, code & 511u, half), with_parity(code >> 9u) >> (half * 4u));
            return f16_at(b) * (0.5 + f32(code_at(b + 66u, 4u, i / 16u))) * 0.25 * signed_byte(bytes, n);
        }
        case IQ2_S: {
            let entry = load_byte(b + 2u + eight) | code_at(b + 66u, 2u, eight) << 8u;
            let bytes = with_signs(grid_iq2(GRID_IQ2_S, entry, half), load_byte(b + 34u + eight) >> (half * 4u));
            return f16_at(b) * (0.5 + f32(code_at(b + 74u, 4u, i / 16u))) * 0.25 * signed_byte(bytes, n);
        }
        case IQ3_XXS: {
            let bits = load_word(b + 66u + i / 32u * 4u);
            let bytes = with_signs(grid_iq3_xxs(load_byte(b + 2u + i / 4u)), with_parity(bits >> (eight % 4u * 7u)) >> (half * 4u));
            return f16_at(b) * (0.5 + f32(bits >> 28u)) * 0.5 * signed_byte(bytes, n);
        }
        case IQ3_S: {
            let entry = load_byte(b + 2u + i / 4u) | code_at(b + 66u, 1u, i / 4u) << 8u;
            let bytes = with_signs(grid_iq3_s(entry), load_byte(b + 74u + eight) >> (half * 4u));
            return f16_at(b) * (1.0 + 2.0 * f32(code_at(b + 106u, 4u, i / 32u))) * signed_byte(bytes, n);
        }
        case IQ1_S: {
            let bits = load_half(b + 34u + i / 32u * 2u);
            let entry = load_byte(b + 2u + eight) | (bits >> (eight % 4u * 3u) & 7u) << 8u;
            let bytes = grid_iq1(entry, half, bits >> 15u == 1u);
            return f16_at(b) * f32(2u * (bits >> 12u & 7u) + 1u) * ((signed_byte(bytes, n) - 9.0) * 0.125);
        }
        case IQ1_M: {
            let d = load_half(b + 48u) >> 12u | load_half(b + 50u) >> 12u << 4u | load_half(b + 52u) >> 12u << 8u
                | load_half(b + 54u) >> 12u << 12u;
            let scale = load_half(b + 48u + i / 64u * 2u) >> (i / 16u % 4u * 3u) & 7u;
            let bits = code_at(b + 32u, 4u, eight);
            let bytes = grid_iq1(load_byte(b + eight) | (bits & 7u) << 8u, half, bits >> 3u == 1u);
            return f16_of(d) * f32(2u * scale + 1u) * ((signed_byte(bytes, n) - 9.0) * 0.125);
        }
        case IQ4_NL: { return f16_at(b) * signed_byte(iq4_byte(nibble_at(b + 2u, 32u, i)), 0u); }
        case IQ4_XS: {
            let j = i / 32u;
            let scale = code_at(b + 4u, 4u, j) | code_at(b + 2u, 2u, j) << 4u;
            return f16_at(b) * (f32(scale) - 32.0) * signed_byte(iq4_byte(nibble_at(b + 8u + j * 16u, 32u, i % 32u)), 0u);
        }
        case TQ1_0: {
            var byte = b + i % 32u;
            var digit = i / 32u;
            if (i >= 240u) {
                byte = b + 48u + i % 4u;
                digit = (i - 240u) / 4u;
            } else if (i >= 160u) {
                byte = b + 32u + i % 16u;
                digit = (i - 160u) / 16u;
            }
            let rest = load_byte(byte) * power_of_3(digit) & 255u;
            return f16_at(b + 52u) * (f32(rest * 3u >> 8u) - 1.0);
        }
        case TQ2_0: {
            let q = load_byte(b + i / 128u * 32u + i % 32u) >> (i / 32u % 4u * 2u) & 3u;
            return f16_at(b + 64u) * (f32(q) - 1.0);
        }
        case MXFP4: { return e8m0_half(load_byte(b)) * (e2m1(nibble_at(b + 1u, 32u, i)) * 2.0); }
        case NVFP4: {
            let group = i / 16u;
            return ue4m3(load_byte(b + group)) * 0.5 * (e2m1(nibble_at(b + 4u + group * 8u, 16u, i % 16u)) * 2.0);
        }
        case Q1_0: { return f16_at(b) * (f32(code_at(b + 2u, 1u, i)) * 2.0 - 1.0); }
        case Q2_0: { return f16_at(b) * (f32(code_at(b + 2u, 2u, i)) - 1.0); }
        default: { return 0.0; }
    }
}
