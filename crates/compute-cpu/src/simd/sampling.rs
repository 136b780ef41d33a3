//! Sampling over all logits: softmax weights, their histogram, and extrema.
//!
//! Arithmetic is bit-identical on every instruction set: no fused multiply-adds, and sums are of
//! integers. Plain loops, which the compiler vectorizes. Each step is applied to a whole block of
//! logits before the next step, so that vectors do not wait for their own previous result.

/// Bins of the histogram.
pub(crate) const BINS: usize = 2048;
/// Logits of a block.
const BLOCK: usize = 64;
/// 2^52: its sum with a smaller value has the nearest integer in the low bits.
const ROUND: f64 = (1u64 << 52) as f64;
/// Values from 16 to 32 are [`WEIGHT_UNIT`] apart.
const SIXTEEN: f64 = 16.0;
/// Unit of integer weights.
const WEIGHT_UNIT: f64 = SIXTEEN * f64::EPSILON;
/// Most logits of one [`tally`]: the sum of their weights, at most 1 each, in [`WEIGHT_UNIT`]s fits
/// in 64 bits.
pub(crate) const MAX_TALLIED: usize = 1 << 15;
const _: () = assert!(MAX_TALLIED as f64 / WEIGHT_UNIT < (1u128 << 64) as f64);

/// Mapping of logits to weights, and of weights to bins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogitScale {
    /// Logit of weight 1: at least as large as all others.
    pub(crate) largest: f64,
    /// Octaves (factors of 2) of weight per unit of logit.
    pub(crate) octaves: f64,
    /// `2^52` divided by the bins per octave, a power of two.
    pub(crate) round: f64,
}

impl LogitScale {
    /// `-log2` of a logit's weight.
    #[inline(always)]
    pub(crate) fn octaves_below(self, logit: f32) -> f64 {
        (self.largest - f64::from(logit)) * self.octaves
    }

    /// Bin of a logit; larger logits have lower bins. Octaves beyond [`BINS`] have no bin.
    #[inline(always)]
    pub(crate) fn bin(self, below: f64) -> usize {
        (below + self.round).to_bits() as u32 as usize
    }
}

/// `y = y * x + c`
#[inline(always)]
fn step<const N: usize>(y: &mut [f64; N], x: &[f64; N], c: f64) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = *y * x + c;
    }
}

/// `2^-x` for `x` from 0 to 1000, to 2 ulp.
///
/// The fraction is a polynomial of degree ten with constant term 1. Its other coefficients
/// interpolate `(2^r - 1) / r` at ten Chebyshev nodes; its error is below `2^-50`.
#[inline(always)]
pub(crate) fn exp2_neg<const N: usize>(x: &[f64; N]) -> [f64; N] {
    let (mut shifted, mut r, mut square) = ([0.0; N], [0.0; N], [0.0; N]);
    for i in 0..N {
        shifted[i] = x[i] + ROUND;
    }
    for i in 0..N {
        r[i] = (shifted[i] - ROUND) - x[i];
    }
    for i in 0..N {
        square[i] = r[i] * r[i];
    }
    // Even and odd powers separately: halves the dependency chain.
    let (mut even, mut odd) = ([7.070_977_866_508_138e-9; N], [1.020_590_541_376_559_5e-7; N]);
    step(&mut even, &square, 1.321_545_163_322_143_4e-6);
    step(&mut odd, &square, 1.525_267_292_485_073_7e-5);
    step(&mut even, &square, 1.540_353_042_477_652_9e-4);
    step(&mut odd, &square, 1.333_355_820_079_459_2e-3);
    step(&mut even, &square, 9.618_129_107_618_665e-3);
    step(&mut odd, &square, 5.550_410_866_465_167e-2);
    step(&mut even, &square, 2.402_265_069_591_007_5e-1);
    step(&mut odd, &square, 6.931_471_805_599_462e-1);
    step(&mut even, &square, 1.0);
    for i in 0..N {
        even[i] += odd[i] * r[i];
    }
    for i in 0..N {
        even[i] = f64::from_bits(even[i].to_bits().wrapping_sub(shifted[i].to_bits() << 52));
    }
    even
}

/// A weight of at most 1 in [`WEIGHT_UNIT`]s, rounded to nearest.
#[inline(always)]
pub(crate) fn weight_units(weight: f64) -> u64 {
    (SIXTEEN + weight).to_bits() - SIXTEEN.to_bits()
}

/// Adds the weights of a block of logits to their bins.
#[inline(always)]
fn tally_block<const N: usize>(logits: &[f32; N], scale: LogitScale, bins: &mut [u64; BINS]) {
    let (mut below, mut index, mut weights) = ([0.0; N], [0; N], [0; N]);
    for i in 0..N {
        below[i] = scale.octaves_below(logits[i]);
    }
    for i in 0..N {
        index[i] = scale.bin(below[i]) as u32;
    }
    let powers = exp2_neg(&below);
    for i in 0..N {
        weights[i] = weight_units(powers[i]);
    }
    for i in 0..N {
        let bin = &mut bins[index[i] as usize % BINS];
        *bin = bin.wrapping_add(weights[i]);
    }
}

/// Adds the weights of the logits of at least `least` to their bins, in [`WEIGHT_UNIT`]s. Takes at
/// most [`MAX_TALLIED`] logits, all with a bin, and bins that are 0.
#[inline(always)]
pub(super) fn tally(logits: &[f32], least: f32, scale: LogitScale, bins: &mut [u64; BINS]) {
    // Logits of at least `least` of blocks that also have smaller ones.
    let (mut pending, mut len) = ([0.0; 2 * BLOCK], 0);
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    for block in blocks {
        let mut count = 0;
        for logit in block {
            count += u32::from(*logit >= least);
        }
        if count as usize == BLOCK {
            tally_block(block, scale, bins);
        } else if count > 0 {
            for logit in block {
                pending[len % (2 * BLOCK)] = *logit;
                len += usize::from(*logit >= least);
            }
            if let (true, Some(block)) = (len >= BLOCK, pending.first_chunk::<BLOCK>()) {
                tally_block(block, scale, bins);
                pending.copy_within(BLOCK.., 0);
                len -= BLOCK;
            }
        }
    }
    for logit in pending[..len].iter().chain(rest.iter().filter(|logit| **logit >= least)) {
        tally_block(&[*logit], scale, bins);
    }
}

/// Largest and least logit, and whether every logit is finite or minus infinity. The extrema may
/// ignore NaN.
#[inline(always)]
pub(super) fn extent(logits: &[f32]) -> ([f32; 2], bool) {
    let (mut largest, mut least) = ([f32::NEG_INFINITY; BLOCK], [f32::INFINITY; BLOCK]);
    let mut invalid = [0; BLOCK];
    let mut add = |lane: usize, logit: f32| {
        largest[lane] = if logit > largest[lane] { logit } else { largest[lane] };
        least[lane] = if logit < least[lane] { logit } else { least[lane] };
        invalid[lane] |= u32::from(logit.is_nan());
    };
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    for block in blocks {
        for (i, logit) in block.iter().enumerate() {
            add(i, *logit);
        }
    }
    for (i, logit) in rest.iter().enumerate() {
        add(i, *logit);
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let least = least.into_iter().fold(f32::INFINITY, f32::min);
    ([largest, least], largest < f32::INFINITY && invalid.iter().all(|invalid| *invalid == 0))
}

/// Calls `f` with the index and the value of every logit in an inclusive range, in order.
#[inline(always)]
pub(super) fn for_each_between(
    logits: &[f32],
    [least, most]: [f32; 2],
    f: &mut dyn FnMut(usize, f32),
) {
    for (block, start) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let mut any = 0;
        for logit in block {
            any |= u32::from((*logit >= least) & (*logit <= most));
        }
        if any > 0 {
            for (logit, index) in block.iter().zip(start..) {
                if *logit >= least && *logit <= most {
                    f(index, *logit);
                }
            }
        }
    }
}
