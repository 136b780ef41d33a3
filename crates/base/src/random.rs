//! SplitMix64 random generator: small, with the same sequence on every platform.
//!
//! Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.

/// Increment of the state per value: 2^64 divided by the golden ratio, made odd.
pub const SPLITMIX_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Output function of [`SplitMix64`]: the random value of state `z`.
///
/// With the states `seed + i * SPLITMIX_STEP`, `i` from 1 on, it gives random access to the
/// sequence.
#[inline]
pub fn splitmix_mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Sequential random generator; the field is the state, at first the seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator with the initial state `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(SPLITMIX_STEP);
        splitmix_mix(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// First values of the published C code for the seed 1234567.
    #[test]
    fn matches_the_published_code() {
        let mut random = SplitMix64::new(1_234_567);
        assert_eq!(
            [random.next_u64(), random.next_u64()],
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
    }
}
