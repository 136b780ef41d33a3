/// xoshiro256++ (Blackman and Vigna, <https://prng.di.unimi.it>), seeded by splitmix64: small, and the same numbers
/// on every platform.
#[derive(Clone, Debug)]
pub(super) struct Rng([u64; 4]);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        let mut state = seed;
        Rng([0; 4].map(|_: u64| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ z >> 31
        }))
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

    /// Uniform in [0, 1): the upper 53 bits.
    pub(super) fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    /// The published C code's first numbers for the state 1, 2, 3, 4, and splitmix64's for the seed 1234567.
    #[test]
    fn as_published() {
        let mut rng = Rng([1, 2, 3, 4]);
        assert_eq!([rng.next(), rng.next(), rng.next()], [41_943_041, 58_720_359, 3_588_806_011_781_223]);
        let seeded = Rng::new(1_234_567).0;
        assert_eq!(seeded[..2], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]);
    }
}
