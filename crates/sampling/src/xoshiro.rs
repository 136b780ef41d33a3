//! xoshiro256++ random generator of the sampler, seeded by SplitMix64.
//!
//! Blackman and Vigna, <https://prng.di.unimi.it>.

use moeflux_base::SplitMix64;

/// Generator with the same sequence on every platform; the field is its state.
#[derive(Clone, Debug)]
pub(super) struct Xoshiro256([u64; 4]);

impl Xoshiro256 {
    pub(super) fn new(seed: u64) -> Xoshiro256 {
        let mut seeds = SplitMix64::new(seed);
        Xoshiro256([0; 4].map(|_: u64| seeds.next_u64()))
    }

    fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform value in [0, 1), from the upper 53 bits.
    pub(super) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Xoshiro256;

    /// First values of the published C code for the state 1, 2, 3, 4, and its seeding.
    #[test]
    fn matches_the_published_code() {
        let mut rng = Xoshiro256([1, 2, 3, 4]);
        assert_eq!(
            [rng.next(), rng.next(), rng.next()],
            [41_943_041, 58_720_359, 3_588_806_011_781_223]
        );
        let seeded = Xoshiro256::new(1_234_567).0;
        assert_eq!(seeded[..2], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
