// Reads the KV cache of a sequence, at word `kv_start` of an arena: f32, or two f16 in a word
// (KV_F16 1). PER_WORD: elements of a word.
// constants: KV_F16

@group(0) @binding(1) var<storage, read> kv_cache: array<u32>;

const PER_WORD = 1u + KV_F16;

var<private> kv_start: u32;

fn kv_value(offset: u32) -> f32 {
    if (KV_F16 == 0u) { return bitcast<f32>(kv_cache[kv_start + offset]); }
    let two = unpack2x16float(kv_cache[kv_start + offset / 2u]);
    return select(two.x, two.y, offset % 2u == 1u);
}

// Word `w` of the vector of `width` elements at element `offset`. Vectors start at multiples of
// `stride`.
fn kv_word(offset: u32, w: u32, width: u32, stride: u32) -> u32 {
    if (KV_F16 == 0u) { return kv_cache[kv_start + offset + w]; }
    if (stride % 2u == 0u) { return kv_cache[kv_start + offset / 2u + w]; }
    var two = vec2(kv_value(offset + 2u * w), 0.0);
    if (2u * w + 1u < width) { two.y = kv_value(offset + 2u * w + 1u); }
    return pack2x16float(two);
}

// Elements 2 i and 2 i + 1 of such a vector. Past its end, any element of it.
fn kv_pair(offset: u32, i: u32, width: u32, stride: u32) -> vec2<f32> {
    if (KV_F16 == 1u && stride % 2u == 0u) { return unpack2x16float(kv_cache[kv_start + offset / 2u + i]); }
    return vec2(kv_value(offset + 2u * i), kv_value(offset + min(2u * i + 1u, width - 1u)));
}
