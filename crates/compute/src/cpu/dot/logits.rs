//! The algorithms on all logits: arithmetic that has the same bits on every instruction set, for the compiler to make vectors of.
//!
//! Nothing here is fused, and what is summed are whole numbers. Each step is taken by a whole block before the next one, so that
//! vectors do not wait for their own last result.

/// Bins of a tally.
pub(crate) const BINS: usize = 2048;
/// Logits that are looked at together.
const BLOCK: usize = 64;
/// Added to a number below `2^52` it leaves the nearest integer in the lowest bits.
const ROUND: f64 = (1u64 << 52) as f64;
/// From here up to twice as much, numbers are [`UNIT`] apart.
const SIXTEEN: f64 = 16.0;
/// What weights are multiples of.
const UNIT: f64 = SIXTEEN * f64::EPSILON;
/// Most logits of one tally: their weights of at most 1 have a sum in units of 64 bits.
pub(crate) const MAX_TALLIED: usize = 1 << 15;
const _: () = assert!(MAX_TALLIED as f64 / UNIT < (1u128 << 64) as f64);

/// How logits become weights, and weights are shared out to bins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    /// The logit of weight 1, at least as large as all others.
    pub(crate) largest: f64,
    /// Octaves of a weight to a logit.
    pub(crate) octaves: f64,
    /// `2^52` over the bins to an octave, a power of two.
    pub(crate) round: f64,
}

impl Scale {
    /// How many octaves less than 1 a weight is.
    #[inline(always)]
    pub(crate) fn below(self, logit: f32) -> f64 {
        (self.largest - f64::from(logit)) * self.octaves
    }

    /// The bin of a logit, the lower the larger it is. Only so many octaves have bins as make up for [`BINS`].
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

/// `2^-x` for x from 0 to 1000, with an error of two units in the last place.
///
/// Between whole numbers it is a polynomial of the tenth degree through 1, whose other coefficients are those that meet
/// `(2^r - 1) / r` at ten Chebyshev nodes: its own error is less than `2^-50`.
#[inline(always)]
pub(crate) fn halved<const N: usize>(x: &[f64; N]) -> [f64; N] {
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
    // Even and odd powers apart: half as many steps wait for each other.
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

/// A weight of at most 1 in units, rounded to the nearest.
#[inline(always)]
pub(crate) fn units(weight: f64) -> u64 {
    (SIXTEEN + weight).to_bits() - SIXTEEN.to_bits()
}

/// Adds the weights of some logits to their bins.
#[inline(always)]
fn tally_block<const N: usize>(logits: &[f32; N], scale: Scale, bins: &mut [u64; BINS]) {
    let (mut below, mut at, mut weights) = ([0.0; N], [0; N], [0; N]);
    for i in 0..N {
        below[i] = scale.below(logits[i]);
    }
    for i in 0..N {
        at[i] = scale.bin(below[i]) as u32;
    }
    let halved = halved(&below);
    for i in 0..N {
        weights[i] = units(halved[i]);
    }
    for i in 0..N {
        let bin = &mut bins[at[i] as usize % BINS];
        *bin = bin.wrapping_add(weights[i]);
    }
}

/// Adds the weights in units of the logits of at least `least` to their bins: at most [`MAX_TALLIED`] logits to bins that are
/// zero. All of them have a bin.
#[inline(always)]
pub(super) fn tally(logits: &[f32], least: f32, scale: Scale, bins: &mut [u64; BINS]) {
    // What counts of blocks that do not count as a whole.
    let (mut some, mut len) = ([0.0; 2 * BLOCK], 0);
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
                some[len % (2 * BLOCK)] = *logit;
                len += usize::from(*logit >= least);
            }
            if let (true, Some(block)) = (len >= BLOCK, some.first_chunk::<BLOCK>()) {
                tally_block(block, scale, bins);
                some.copy_within(BLOCK.., 0);
                len -= BLOCK;
            }
        }
    }
    for logit in some[..len].iter().chain(rest.iter().filter(|logit| **logit >= least)) {
        tally_block(&[*logit], scale, bins);
    }
}

/// The largest logit, the least one, and whether all are numbers or minus infinity. Others are passed over or not.
#[inline(always)]
pub(super) fn extent(logits: &[f32]) -> ([f32; 2], bool) {
    let (mut largest, mut least) = ([f32::NEG_INFINITY; BLOCK], [f32::INFINITY; BLOCK]);
    let mut wrong = [0; BLOCK];
    let mut look = |at: usize, logit: f32| {
        largest[at] = if logit > largest[at] { logit } else { largest[at] };
        least[at] = if logit < least[at] { logit } else { least[at] };
        wrong[at] |= u32::from(logit.is_nan());
    };
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    for block in blocks {
        for (i, logit) in block.iter().enumerate() {
            look(i, *logit);
        }
    }
    for (i, logit) in rest.iter().enumerate() {
        look(i, *logit);
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let least = least.into_iter().fold(f32::INFINITY, f32::min);
    ([largest, least], largest < f32::INFINITY && wrong.iter().all(|wrong| *wrong == 0))
}

/// Calls `f` with the logits from the one to the other, and where they are, in order.
#[inline(always)]
pub(super) fn between(logits: &[f32], [least, most]: [f32; 2], f: &mut dyn FnMut(usize, f32)) {
    for (block, at) in logits.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let mut any = 0;
        for logit in block {
            any |= u32::from((*logit >= least) & (*logit <= most));
        }
        if any > 0 {
            for (logit, at) in block.iter().zip(at..) {
                if *logit >= least && *logit <= most {
                    f(at, *logit);
                }
            }
        }
    }
}
