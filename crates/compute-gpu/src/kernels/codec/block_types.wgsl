// Codes of ggml's block types in ELEMENT, in the order of `BlockType`; values of their scales
// and codes.

const Q4_0 = 16u;
const Q4_1 = 17u;
const Q5_0 = 18u;
const Q5_1 = 19u;
const Q8_0 = 20u;
const Q2_K = 21u;
const Q3_K = 22u;
const Q4_K = 23u;
const Q5_K = 24u;
const Q6_K = 25u;
const IQ2_XXS = 26u;
const IQ2_XS = 27u;
const IQ3_XXS = 28u;
const IQ1_S = 29u;
const IQ4_NL = 30u;
const IQ3_S = 31u;
const IQ2_S = 32u;
const IQ4_XS = 33u;
const IQ1_M = 34u;
const TQ1_0 = 35u;
const TQ2_0 = 36u;
const MXFP4 = 37u;
const NVFP4 = 38u;
const Q1_0 = 39u;
const Q2_0 = 40u;

// The f16 in the low bits of a word.
fn f16_of(bits: u32) -> f32 {
    return unpack2x16float(bits).x;
}

// Half of the value of an E8M0 code; exact also where that is subnormal.
fn e8m0_half(code: u32) -> f32 {
    return bitcast<f32>(select((code - 1u) << 23u, 0x00200000u << code, code < 2u));
}

// Value of an unsigned E4M3 code, whose sign bit is ignored; the code of NaN is 0.
fn ue4m3(code: u32) -> f32 {
    let size = unpack2x16float((code & 127u) << 7u).x * 256.0;
    return select(size, 0.0, (code & 127u) == 127u);
}

// 3^n for n up to 4.
fn power_of_3(n: u32) -> u32 {
    return select(0x1b090301u >> (n % 4u * 8u) & 255u, 81u, n == 4u);
}

// The byte of a 4-bit code of IQ4_NL and IQ4_XS.
fn iq4_byte(code: u32) -> u32 {
    let first = select(0xbfad9881u, 0xf6eaddcfu, (code & 4u) != 0u);
    let second = select(0x26190d01u, 0x71594535u, (code & 4u) != 0u);
    return select(first, second, code > 7u) >> (code % 4u * 8u) & 255u;
}
