//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators"): small, and the same numbers on every
//! platform.

/// What the state grows by with every number.
pub(crate) const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The number of a state.
#[inline]
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Numbers one after another, from a seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    /// Generator with the initial state `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next value of the sequence.
    pub fn next_u64(&mut self) -> u64 {
        self.next()
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// The published C code's first numbers for the seed 1234567.
    #[test]
    fn as_published() {
        let mut numbers = SplitMix64(1_234_567);
        assert_eq!(
            [numbers.next(), numbers.next()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
    }
}
