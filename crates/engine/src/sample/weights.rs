//! Weights of tokens, as whole numbers: their sum is the same in whatever order they are added.

/// Bins that halve a weight. Of a large vocabulary, few tokens are in one bin.
const BINS_PER_OCTAVE: usize = 16;
/// Bins of weights down to `2^-32` of the largest; in the last one are all that are less, which are hardly ever drawn.
pub(super) const BINS: usize = 32 * BINS_PER_OCTAVE + 1;
const LAST: usize = BINS - 1;
/// Weights that are computed together: there are registers for so many.
const BLOCK: usize = 4;
/// Logits that are looked at together.
const CHUNK: usize = 64;
/// Units of the largest weight.
const UNITS: u64 = 1 << 52;

/// How probable tokens are relative to the most probable one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    largest: f64,
    /// One over the temperature.
    inverse: f64,
}

impl Weights {
    /// Of the largest logit; the temperature is above 0.
    pub(super) fn new(largest: f32, temperature: f32) -> Weights {
        Weights { largest: f64::from(largest), inverse: 1.0 / f64::from(temperature) }
    }

    /// The logarithm of a weight.
    fn log(&self, logit: f32) -> f64 {
        (f64::from(logit) - self.largest) * self.inverse
    }

    /// The probability of a token relative to the most probable one.
    pub(super) fn of(&self, logit: f32) -> f64 {
        exp(self.log(logit))
    }

    /// The weight in units.
    pub(super) fn units(&self, logit: f32) -> u64 {
        units(self.of(logit))
    }

    /// The bin that a token is in: the larger the logit, the lower.
    fn bin(&self, logit: f32) -> u32 {
        bin(steps(bounded(self.log(logit))))
    }

    /// A bin before which no token's weight is below `least`.
    pub(super) fn bin_before(least: f64) -> usize {
        // Room for what rounding does to weights and bins.
        (-least.log2() * BINS_PER_OCTAVE as f64 - 2.0).clamp(0.0, LAST as f64) as usize
    }

    /// The sums of the weights in each bin.
    pub(super) fn tally(&self, logits: &[f32], bins: &mut [u128; BINS]) {
        bins.fill(0);
        let (chunks, rest) = logits.as_chunks::<CHUNK>();
        for chunk in chunks {
            // What vectors compute is written down before it is shared out, number by number.
            let (mut at, mut weights) = ([0; CHUNK], [0; CHUNK]);
            let to = at.as_chunks_mut::<BLOCK>().0.iter_mut().zip(weights.as_chunks_mut::<BLOCK>().0);
            for (block, (at, weights)) in chunk.as_chunks::<BLOCK>().0.iter().zip(to) {
                let logs = block.map(|logit| self.log(logit));
                *at = logs.map(|log| bin(steps(bounded(log))));
                *weights = exps(logs).map(units);
            }
            for (at, weight) in at.into_iter().zip(weights) {
                bins[at as usize] += u128::from(weight);
            }
        }
        for logit in rest {
            bins[self.bin(*logit) as usize] += u128::from(self.units(*logit));
        }
    }

    /// Calls `f` with the tokens of a bin, in order.
    pub(super) fn each_in(&self, bin: usize, logits: &[f32], mut f: impl FnMut(u32, f32)) {
        // Logits that a bin has none beyond, as f32, so that most are passed over at once.
        let bound = |bins: f64| {
            let logit = self.largest - bins * std::f64::consts::LN_2 / BINS_PER_OCTAVE as f64 / self.inverse;
            logit as f32
        };
        let least = if bin == LAST { f32::NEG_INFINITY } else { bound(bin as f64 + 2.0) };
        let most = if bin == 0 { f32::INFINITY } else { bound(bin as f64 - 2.0) };
        for (block, id) in logits.chunks(CHUNK).zip((0..).step_by(CHUNK)) {
            let mut any = false;
            for logit in block {
                any |= *logit >= least && *logit <= most;
            }
            if any {
                let tokens = (id..).zip(block).filter(|(_, logit)| self.bin(**logit) as usize == bin);
                tokens.for_each(|(id, logit)| f(id, *logit));
            }
        }
    }
}

/// A weight of at most 1 in units, rounded to the nearest.
fn units(weight: f64) -> u64 {
    // Between 1 and 2 the numbers are a unit apart.
    const _: () = assert!(f64::EPSILON * UNITS as f64 == 1.0);
    (1.0 + weight).to_bits() - 1f64.to_bits()
}

/// Steps of the table of powers, and how many bits their number has.
const STEPS: usize = 1 << STEP_BITS;
const STEP_BITS: u32 = 9;
/// `2^(i / STEPS)`
static POWERS: [f64; STEPS] = powers();

const fn powers() -> [f64; STEPS] {
    let mut powers = [1.0; STEPS];
    let mut i = 1;
    while i < STEPS {
        // The series is best near 0: the upper half of the octave is reached from its end.
        let (step, octave) = if 2 * i < STEPS { (i as f64, 1.0) } else { (i as f64 - STEPS as f64, 2.0) };
        let x = step * std::f64::consts::LN_2 / STEPS as f64;
        let (mut sum, mut n) = (1.0, 14);
        while n > 0 {
            sum = 1.0 + sum * x / n as f64;
            n -= 1;
        }
        powers[i] = octave * sum;
        i += 1;
    }
    powers
}

/// e^x for x <= 0 to about 2 ulp, from additions and multiplications only, so that it has the same bits on every platform;
/// 0 below the normal numbers.
pub(super) fn exp(x: f64) -> f64 {
    exps([x])[0]
}

/// Logarithms from which on weights are 0.
const LEAST: f64 = -708.0;

fn bounded(log: f64) -> f64 {
    if log < LEAST { LEAST } else { log }
}

/// Adding it leaves the nearest integer in the lowest bits.
const ROUND: f64 = 1.5 * (1u64 << 52) as f64;

/// How many steps a bounded logarithm is, as what [`ROUND`] makes of it.
fn steps(bounded: f64) -> f64 {
    bounded * (std::f64::consts::LOG2_E * STEPS as f64) + ROUND
}

/// The bin of a weight that is so many steps.
fn bin(steps: f64) -> u32 {
    let below = (steps.to_bits() as u32).wrapping_neg() / (STEPS / BINS_PER_OCTAVE) as u32;
    below.min(LAST as u32)
}

/// [`exp`] of several: one step of all after the other, which the compiler makes vectors of.
#[inline(always)]
fn exps<const N: usize>(x: [f64; N]) -> [f64; N] {
    const LN2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000) / STEPS as f64;
    const LN2_LOW: f64 = f64::from_bits(0x3DEA_39EF_3579_3C76) / STEPS as f64;
    const STEP: u64 = STEPS as u64 - 1;

    let shifted = x.map(|x| steps(bounded(x)));
    let mut powers = shifted.map(|shifted| POWERS[(shifted.to_bits() & STEP) as usize]);
    for i in 0..N {
        let n = shifted[i] - ROUND;
        let r = (bounded(x[i]) - n * LN2_HIGH) - n * LN2_LOW;
        // Taylor to r^4: |r| <= ln(2) / 2 / STEPS makes the rest smaller than rounding.
        let series = r + r * r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0)));
        let octave = (shifted[i].to_bits() & !STEP) << (52 - STEP_BITS);
        let power = f64::from_bits(powers[i].to_bits().wrapping_add(octave));
        let y = power + power * series;
        powers[i] = if x[i] < LEAST { 0.0 } else { y };
    }
    powers
}
