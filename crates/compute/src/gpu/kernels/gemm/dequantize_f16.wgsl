// Quants on their way to workgroup memory: they become f16 two at a time, as the low bits of 1024 and more, where f16 holds
// scale, bias and weights; the one rounding is then the same as that of put_any.
// needs: codec/block_scales, gemm/weights_blocks
// enables: f16
// constants: SCALE

fn hold_halves(scale: vec2<f32>) -> bool {
    let size = abs(scale);
    let held = (size == vec2<f32>(0.0)) | (size >= vec2<f32>(6.1035156e-5));
    return SCALE != 0u && all(held) && are_halves(scale);
}

// The quants in the low bits of both halves of a word, above which MAGIC is.
const MAGIC = 0x64006400u;

fn two_quants(bits: u32) -> vec2<f16> {
    return vec2<f16>(unpack2x16float(bits)) - vec2<f16>(1024.0h);
}
