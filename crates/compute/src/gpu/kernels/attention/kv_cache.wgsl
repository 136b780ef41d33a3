// Reading a state of keys and values: f32, or two f16 in a word (HALF 1). PER: numbers of a word.
// constants: HALF

@group(0) @binding(1) var<storage, read> state: array<u32>;

const PER = 1u + HALF;

fn state_number(at: u32) -> f32 {
    if (HALF == 0u) { return bitcast<f32>(state[at]); }
    let two = unpack2x16float(state[at / 2u]);
    return select(two.x, two.y, at % 2u == 1u);
}

// Word `w` of the vector of `width` numbers that begins at number `at`; `stride`: what vectors begin at multiples of.
fn state_word(at: u32, w: u32, width: u32, stride: u32) -> u32 {
    if (HALF == 0u) { return state[at + w]; }
    if (stride % 2u == 0u) { return state[at / 2u + w]; }
    var two = vec2(state_number(at + 2u * w), 0.0);
    if (2u * w + 1u < width) { two.y = state_number(at + 2u * w + 1u); }
    return pack2x16float(two);
}

// Numbers 2 i and 2 i + 1 of such a vector; what lies behind its end is any number of it.
fn state_pair(at: u32, i: u32, width: u32, stride: u32) -> vec2<f32> {
    if (HALF == 1u && stride % 2u == 0u) { return unpack2x16float(state[at / 2u + i]); }
    return vec2(state_number(at + 2u * i), state_number(at + min(2u * i + 1u, width - 1u)));
}
