// Dequantization in f16 arithmetic: quants become f16 two at a time, as the low bits of 1024 and
// more, if f16 holds scale, bias and weights. The single rounding is then the same as in
// dequantize_any.
// needs: codec/block_scales, gemm/weights_blocks
// enables: f16
// constants: SCALE

fn use_f16_math(scale: vec2<f32>) -> bool {
    let magnitude = abs(scale);
    let normal = (magnitude == vec2<f32>(0.0)) | (magnitude >= vec2<f32>(6.1035156e-5));
    return SCALE != 0u && all(normal) && fits_f16(scale);
}

// Quants in the low bits of both halves of a word, over the bits of 1024.0.
const MAGIC = 0x64006400u;

fn quant_pair(bits: u32) -> vec2<f16> {
    return vec2<f16>(unpack2x16float(bits)) - vec2<f16>(1024.0h);
}
