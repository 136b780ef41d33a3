//! Integers times a power of two as floating-point numbers, in integer arithmetic.

/// A floating-point format with an implicit leading bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Float {
    exponent_bits: u32,
    mantissa_bits: u32,
}

impl Float {
    /// The format of a dtype's name in a safetensors header, or `None` if it is not one of floats.
    pub(crate) fn of_dtype(name: &str) -> Option<Self> {
        let (exponent_bits, mantissa_bits) = match name {
            "F32" => (8, 23),
            "BF16" => (8, 7),
            "F16" => (5, 10),
            "F8_E4M3" => (4, 3),
            _ => return None,
        };
        Some(Self { exponent_bits, mantissa_bits })
    }

    /// Bits of `value * 2^exponent`, rounded to nearest, ties to even. The result must be finite.
    pub(crate) fn bits(self, value: i64, exponent: i32) -> u64 {
        let Self { exponent_bits, mantissa_bits } = self;
        let sign = u64::from(value < 0) << (exponent_bits + mantissa_bits);
        let size = value.unsigned_abs();
        if size == 0 {
            return sign;
        }
        let bias = (1 << (exponent_bits - 1)) - 1;
        // Exponent of the leading bit; subnormal numbers have the least one.
        let power = (size.ilog2() as i32 + exponent).max(1 - bias);
        let shift = power - mantissa_bits as i32 - exponent;
        let kept = if shift <= 0 {
            size << -shift
        } else {
            let shift = shift.min(62) as u32;
            let (kept, rest, half) = (size >> shift, size % (1 << shift), 1 << (shift - 1));
            kept + u64::from(rest > half || rest == half && kept % 2 == 1)
        };
        // A mantissa that is rounded up to the next power of two carries into the exponent.
        let bits = ((power + bias) as u64) << mantissa_bits;
        sign | (bits + kept - (1 << mantissa_bits))
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use moeflux_base::SplitMix64;

    use super::*;

    #[test]
    fn f32_rounds_as_the_processor() {
        let float = Float::of_dtype("F32").unwrap();
        let mut random = SplitMix64::new(1);
        for i in 0..100_000 {
            let value = (random.next_u64() as i64) >> (11 + i % 50);
            let exponent = -((random.next_u64() % 190) as i32);
            let exact = value as f64 * 2f64.powi(exponent);
            let bits = u64::from((exact as f32).to_bits());
            assert_eq!(float.bits(value, exponent), bits, "{value} {exponent}");
        }
    }

    #[test]
    fn small_formats_round_to_even() {
        let f8 = Float::of_dtype("F8_E4M3").unwrap();
        let all = [
            (448, 0, 0x7e),
            (-448, 0, 0xfe),
            (1, 0, 0x38),
            (17, -4, 0x38),
            (19, -4, 0x3a),
            (31, -4, 0x40),
            (1, -9, 1),
            (1, -10, 0),
            (3, -10, 2),
        ];
        for (value, exponent, bits) in all {
            assert_eq!(f8.bits(value, exponent), bits, "{value} {exponent}");
        }
        let bf16 = Float::of_dtype("BF16").unwrap();
        assert_eq!(
            [(257, 0), (259, 0), (-3, -1)].map(|(v, e)| bf16.bits(v, e)),
            [0x4380, 0x4382, 0xbfc0]
        );
    }
}
