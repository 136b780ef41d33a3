// Numbers as whole numbers in the same order, so that they are compared exactly whatever a compiler thinks of infinities.

// Less than every number's.
const NO_KEY = 1u;

fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    // Zeros of both signs are equal.
    if (bits << 1u == 0u) { return 0x80000000u; }
    return max(select(bits | 0x80000000u, ~bits, bits >> 31u == 1u), NO_KEY + 1u);
}

fn number_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >> 31u == 1u));
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
}
