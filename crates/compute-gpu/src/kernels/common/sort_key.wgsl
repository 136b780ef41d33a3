// Order-preserving integer keys of f32 values: exact comparisons, independent of how a compiler
// treats infinities.

// Less than the key of any value.
const NO_KEY = 1u;

fn sort_key(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    // Both zeros are equal.
    if (bits << 1u == 0u) { return 0x80000000u; }
    return max(select(bits | 0x80000000u, ~bits, bits >> 31u == 1u), NO_KEY + 1u);
}

fn from_sort_key(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >> 31u == 1u));
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}
