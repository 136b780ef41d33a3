//! MXFP4 values: power-of-two scales per block, and random bits for the elements.

use super::values::RandomStream;

/// Mean square of E2M1 with four random bits: of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign.
const E2M1_SQUARE: f32 = 68.5 / 8.0;

/// Scales of MXFP4, one byte each: 2 to the power of the byte minus 127.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mxfp4Scales {
    /// The smaller of the two bytes in use.
    low: u8,
    /// Share of the larger byte, `low + 1`.
    share: f32,
}

impl Mxfp4Scales {
    /// Scales with which random elements have the standard deviation `std`. Elements have either
    /// sign, so the mean is zero.
    pub(crate) fn mxfp4(std: f32) -> Self {
        let square = std * std / E2M1_SQUARE;
        let power = (square.log2() / 2.0).floor().clamp(-127.0, 126.0);
        // The weighted mean of the two squared scales is the target.
        Mxfp4Scales { low: (power + 127.0) as u8, share: (square / 4f32.powf(power) - 1.0) / 3.0 }
    }

    /// The scales of the blocks from `first` on.
    pub(super) fn fill(&self, stream: RandomStream, first: u64, out: &mut [u8]) {
        for (i, out) in (first..).zip(out) {
            *out = self.low + u8::from(stream.unit(i) < self.share);
        }
    }
}
