// f16 for KV caches and matrix units. Values beyond 65504, the largest f16, are clamped to it. NaN
// stays NaN: an error that is clamped is silent.

fn clamp_f16(x: vec4<f32>) -> vec4<f32> {
    let is_nan = (bitcast<vec4<u32>>(x) & vec4(0x7fffffffu)) > vec4(0x7f800000u);
    return select(clamp(x, vec4(-65504.0), vec4(65504.0)), x, is_nan);
}

// Two values as a word of the KV cache.
fn pack_f16(x: vec2<f32>) -> u32 {
    return pack2x16float(clamp_f16(x.xyxy).xy);
}
