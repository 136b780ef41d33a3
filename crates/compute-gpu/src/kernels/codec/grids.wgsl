// Codebooks of the IQ types, which are the first words of the activations: indexes of 2 or 3 bits,
// as `grids.bin` has them. Entries become bytes of the values that the indexes stand for.
// needs: common/common

// First words of the grids.
const GRID_IQ1 = 0u;
const GRID_IQ2_XXS = 1024u;
const GRID_IQ2_XS = 1152u;
const GRID_IQ2_S = 1408u;
const GRID_IQ3_XXS = 1920u;
const GRID_IQ3_S = 2016u;

// Half `half` of an entry of eight indexes of 2 bits, as four bytes.
fn grid_indexes(grid: u32, entry: u32, half: u32) -> u32 {
    let bits = bitcast<u32>(act[grid + entry / 2u]) >> (entry % 2u * 16u + half * 8u) & 255u;
    let pairs = (bits | bits << 12u) & 0x000f000fu;
    return (pairs | pairs << 6u) & 0x03030303u;
}

// Four of 8, 25 and 43: magnitudes of IQ2.
fn grid_iq2(grid: u32, entry: u32, half: u32) -> u32 {
    let indexes = grid_indexes(grid, entry, half);
    return 0x08080808u + indexes * 17u + (indexes >> 1u & 0x01010101u);
}

// An entry of four indexes of 3 bits, as four bytes.
fn grid_indexes3(grid: u32, entry: u32) -> u32 {
    let bit = entry * 12u;
    let word = grid + bit / 32u;
    let low = bitcast<u32>(act[word]) >> (bit % 32u);
    let high = bitcast<u32>(act[word + 1u]) << (31u - bit % 32u) << 1u;
    let bits = low | high;
    let pairs = bits & 63u | (bits >> 6u & 63u) << 16u;
    return pairs & 0x00070007u | (pairs & 0x00380038u) << 5u;
}

// Four of 4, 12, 20, 28, 36, 44, 52 and 62: magnitudes of IQ3_XXS.
fn grid_iq3_xxs(entry: u32) -> u32 {
    let indexes = grid_indexes3(GRID_IQ3_XXS, entry);
    let sevens = indexes & indexes >> 1u & indexes >> 2u & 0x01010101u;
    return 0x04040404u + indexes * 8u + sevens * 2u;
}

// Four odd numbers up to 15: magnitudes of IQ3_S.
fn grid_iq3_s(entry: u32) -> u32 {
    return grid_indexes3(GRID_IQ3_S, entry) * 2u + 0x01010101u;
}

// Four numbers -9 .. 9, eight times those of an entry plus or minus an eighth, plus 9.
fn grid_iq1(entry: u32, half: u32, down: bool) -> u32 {
    return grid_indexes(GRID_IQ1, entry, half) * 8u + select(0x02020202u, 0u, down);
}

// Eight signs of seven bits and their parity.
fn with_parity(bits: u32) -> u32 {
    return bits & 127u | (countOneBits(bits & 127u) & 1u) << 7u;
}

// Negates bytes of which the bit in `signs` is set, lowest first.
fn with_signs(bytes: u32, signs: u32) -> u32 {
    let ones = (signs & 15u) * 0x00204081u & 0x01010101u;
    return (bytes ^ ones * 255u) + ones;
}
