//! Softmax weights of logits in fixed point, and a histogram of them, for samplers.

use std::ops::RangeInclusive;

use moeflux_ops::Error;

use super::simd::{BINS, Isa, LogitScale, MAX_TALLIED, SamplingKernels, exp2_neg, weight_units};

/// Distance from the largest logit, in octaves, beyond which a weight is 0.
const OCTAVES: f64 = 1000.0;
/// Maximum bins per octave, as a power of two.
const MAX_BINS_LOG2: u32 = 30;

/// Softmax weights of logits: `exp((logit - largest) / temperature)`.
///
/// Weights are bit-identical on all machines and instruction sets: they are computed by f64
/// additions and multiplications, none of them fused. In [units](LogitWeights::units) a weight is
/// an integer, so sums do not depend on the order. A unit is `2^-48` of the largest weight, and a
/// weight is exact to one unit: the total error of the probabilities of 250,000 logits is less than
/// `2^-30`.
#[derive(Clone, Copy, Debug)]
pub struct LogitWeights {
    kernels: SamplingKernels,
    scale: LogitScale,
}

impl LogitWeights {
    /// Weights relative to the largest logit, which is finite, at a temperature above 0. Uses the
    /// best instruction set.
    pub fn new(largest: f32, temperature: f32) -> Self {
        Self::with_kernels(SamplingKernels::best(), largest, temperature)
    }

    /// Does the same as [`LogitWeights::new`] on a given instruction set.
    ///
    /// # Errors
    /// The machine does not have the instruction set.
    pub fn with_isa(isa: Isa, largest: f32, temperature: f32) -> Result<Self, Error> {
        Ok(Self::with_kernels(SamplingKernels::new(isa)?, largest, temperature))
    }

    fn with_kernels(kernels: SamplingKernels, largest: f32, temperature: f32) -> Self {
        let octaves = std::f64::consts::LOG2_E / f64::from(temperature);
        Self { kernels, scale: LogitScale { largest: f64::from(largest), octaves, round: 0.0 } }
    }

    /// Weight of a logit, from 0 to 1. Weights below `2^-1000` are 0.
    pub fn weight(&self, logit: f32) -> f64 {
        let below = self.scale.octaves_below(logit);
        if below > OCTAVES { 0.0 } else { exp2_neg(&[below])[0] }
    }

    /// Weight in units; the largest weight is `2^48` units.
    pub fn units(&self, logit: f32) -> u64 {
        weight_units(self.weight(logit))
    }

    /// Smallest logit whose weight is at least `weight`, which is at most 1. Minus infinity if
    /// `weight` is 0.
    pub fn least(&self, weight: f64) -> f32 {
        if weight > 0.0 {
            self.smallest(|logit| self.weight(logit) >= weight)
        } else {
            f32::NEG_INFINITY
        }
    }

    /// Smallest logit for which a monotonic predicate holds, by bisection over all f32 up to the
    /// largest logit.
    fn smallest(&self, holds: impl Fn(f32) -> bool) -> f32 {
        let (mut below, mut least) = (rank(f32::NEG_INFINITY), rank(self.scale.largest as f32));
        while below + 1 < least {
            let middle = below + (least - below) / 2;
            if holds(from_rank(middle)) { least = middle } else { below = middle }
        }
        from_rank(least)
    }
}

/// Rank of an f32 in the order of all f32, including infinities.
fn rank(x: f32) -> i64 {
    let bits = i64::from(x.to_bits() & i32::MAX as u32);
    // Minus zero comes before zero.
    if x.is_sign_negative() { -1 - bits } else { bits }
}

/// The f32 of a rank.
fn from_rank(rank: i64) -> f32 {
    if rank < 0 { -f32::from_bits((-1 - rank) as u32) } else { f32::from_bits(rank as u32) }
}

/// Largest and smallest logit, `[largest, smallest]`. `None` if a logit is NaN or plus infinity.
/// Without logits, minus and plus infinity.
pub fn logits_extent(logits: &[f32]) -> Option<[f32; 2]> {
    let (extent, valid) = SamplingKernels::best().extent(logits);
    valid.then_some(extent)
}

/// Calls `f` with the index and value of all logits in a range, in order.
pub fn logits_between(logits: &[f32], range: &RangeInclusive<f32>, mut f: impl FnMut(usize, f32)) {
    SamplingKernels::best().for_each_between(logits, [*range.start(), *range.end()], &mut f);
}

/// Histogram of softmax weights over the range of the logits, with about two thousand bins.
#[derive(Clone, Debug)]
pub struct LogitTally {
    weights: LogitWeights,
    least: f32,
    /// Sums per bin of a block of logits, in units.
    block_sums: Box<[u64; BINS]>,
    /// Sums per bin of all logits, in units.
    sums: Box<[u128; BINS]>,
}

impl Default for LogitTally {
    fn default() -> Self {
        Self::new()
    }
}

impl LogitTally {
    /// Empty histogram. No other function of the histogram allocates.
    pub fn new() -> Self {
        let (block_sums, sums) = (Box::new([0; BINS]), Box::new([0; BINS]));
        Self { weights: LogitWeights::new(0.0, 1.0), least: 0.0, block_sums, sums }
    }

    /// Recomputes the histogram for the logits that are at least `least`. `extent` is that of all
    /// `logits`, from [`logits_extent`]; its largest logit is that of the weights.
    pub fn fill(
        &mut self,
        mut weights: LogitWeights,
        logits: &[f32],
        extent: [f32; 2],
        least: f32,
    ) {
        // Smaller logits weigh zero units.
        let smallest_weighing = weights.smallest(|logit| weights.units(logit) > 0);
        self.least = least.max(extent[1]).max(smallest_weighing).min(extent[0]);
        let octaves = weights.scale.octaves_below(self.least);
        let fits = |bits: &u32| octaves * f64::from(1 << bits) <= (BINS - 1) as f64;
        let bits = (0..=MAX_BINS_LOG2).rev().find(fits).unwrap_or(0);
        weights.scale.round = f64::from_bits(f64::to_bits(1.0) + (u64::from(52 - bits) << 52));
        self.weights = weights;
        self.sums.fill(0);
        for logits in logits.chunks(MAX_TALLIED) {
            self.block_sums.fill(0);
            weights.kernels.tally(logits, self.least, weights.scale, &mut self.block_sums);
            self.sums
                .iter_mut()
                .zip(&*self.block_sums)
                .for_each(|(sum, block_sum)| *sum += u128::from(*block_sum));
        }
    }

    /// Sum of all weights, in units.
    pub fn sum(&self) -> u128 {
        self.sums.iter().sum()
    }

    /// Finds the bin in which the cumulative weight, from the largest logit down, reaches `units`,
    /// or else the last bin with a weight. Returns the logits of the bin, and the sum before it.
    pub fn reaching(&self, units: u128) -> (RangeInclusive<f32>, u128) {
        let (mut last, mut sum) = ((0, 0), 0);
        for (bin, bin_sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0) {
            last = (bin, sum);
            sum += bin_sum;
            if sum >= units {
                break;
            }
        }
        (self.range(last.0), last.1)
    }

    /// Sum of the weights of all logits that are at least `least`, which is a counted logit.
    pub fn sum_from(&self, logits: &[f32], least: f32) -> u128 {
        let bin = self.bin(least.max(self.least)).min(BINS - 1);
        let (start, end) = self.range(bin).into_inner();
        let mut sum = self.sums[..bin].iter().sum();
        logits_between(logits, &(start.max(least)..=end), |_, logit| {
            sum += u128::from(self.weights.units(logit));
        });
        sum
    }

    fn bin(&self, logit: f32) -> usize {
        self.weights.scale.bin(self.weights.scale.octaves_below(logit))
    }

    /// Range of the logits of a bin.
    fn range(&self, bin: usize) -> RangeInclusive<f32> {
        let first =
            |bin| self.weights.smallest(|logit| logit >= self.least && self.bin(logit) <= bin);
        let end = match bin.checked_sub(1) {
            Some(previous) => from_rank(rank(first(previous)) - 1),
            None => self.weights.scale.largest as f32,
        };
        first(bin)..=end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudo-random values from 0 to 1.
    fn random(n: usize) -> impl Iterator<Item = f32> {
        let mut state = 7u64;
        (0..n).map(move |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32
        })
    }

    /// Logits of several distributions: a wide range, a narrow range, all equal, and some masked.
    fn distributions(n: usize) -> [Vec<f32>; 4] {
        let masked = |(i, x): (usize, f32)| if i % 5 == 2 { f32::NEG_INFINITY } else { x * 30.0 };
        [
            random(n).map(|x| x * x * 90.0 - 50.0).collect(),
            random(n).map(|x| x * 1e-3).collect(),
            vec![3.5; n],
            random(n).enumerate().map(masked).collect(),
        ]
    }

    #[test]
    fn weights_are_exponentials() {
        let (weights, units_of_one) = (LogitWeights::new(0.0, 1.0), (1u64 << 48) as f64);
        for x in random(20_000).map(|x| -40.0 * x).chain([0.0, -0.0, -600.0]) {
            let exact = f64::from(x).exp();
            assert!((weights.units(x) as f64 - exact * units_of_one).abs() <= 1.0, "{x}");
            assert!(
                (weights.weight(x) - exact).abs() <= (4.0 - f64::from(x)) * f64::EPSILON * exact,
                "{x}"
            );
        }
        let bounds = [-690.0, -695.0, f32::MIN, f32::NEG_INFINITY].map(|x| weights.weight(x));
        assert!(bounds[0] > 0.0 && bounds[1..] == [0.0; 3], "{bounds:?}");
        // The unit, and exact weights, so that a deviating platform is detected.
        assert_eq!(weights.units(0.0), 1 << 48);
        assert_eq!(
            [-0.25, -1.25, -12.5].map(|x| weights.units(x)),
            [219_212_932_277_264, 80_643_931_023_713, 1_048_959_615]
        );
        assert_eq!(LogitWeights::new(1e30, 1e-30).weight(1e30), 1.0);
        assert_eq!(LogitWeights::new(f32::MAX, f32::MIN_POSITIVE).weight(f32::MIN), 0.0);
    }

    #[test]
    fn tallies_are_sums_on_every_instruction_set() {
        for isa in Isa::available() {
            // Lengths: whole SIMD blocks, a partial block, and several tally blocks.
            for logits in [64, 1000, 2 * MAX_TALLIED + 77].into_iter().flat_map(distributions) {
                for (temperature, least) in [(1.0, f32::NEG_INFINITY), (0.3, 0.5), (40.0, 20.0)] {
                    let extent = logits_extent(&logits).unwrap();
                    let weights = LogitWeights::with_isa(isa, extent[0], temperature).unwrap();
                    let mut tally = LogitTally::new();
                    tally.fill(weights, &logits, extent, least);
                    let mut expected = vec![0; BINS];
                    for logit in logits.iter().filter(|logit| **logit >= least.min(extent[0])) {
                        let units = u128::from(weights.units(*logit));
                        if units > 0 {
                            expected[tally.bin(*logit)] += units;
                        }
                    }
                    assert!(
                        expected == *tally.sums,
                        "{isa}, {} logits, {temperature}",
                        logits.len()
                    );
                    assert_eq!(tally.sum(), expected.iter().sum());
                }
            }
        }
    }

    #[test]
    fn bins_are_in_rank_order() {
        for logits in distributions(5000) {
            let extent = logits_extent(&logits).unwrap();
            let weights = LogitWeights::new(extent[0], 0.8);
            let mut tally = LogitTally::new();
            tally.fill(weights, &logits, extent, f32::NEG_INFINITY);
            let weights = |from: f32| {
                logits.iter().filter(move |logit| **logit >= from).map(|x| weights.units(*x))
            };
            let sum = |from: f32| weights(from).map(u128::from).sum::<u128>();
            for share in [0, 1, 300, 900, 999, 1000, 1001] {
                let target = tally.sum() * share / 1000;
                let (range, before) = tally.reaching(target);
                let (start, end) = range.clone().into_inner();
                assert_eq!(before, sum(from_rank(rank(end) + 1)));
                assert!(sum(start) >= target.min(tally.sum()) && before <= target, "{share}");
                let mut found = Vec::new();
                logits_between(&logits, &range, |i, logit| found.push((i, logit)));
                let all =
                    logits.iter().copied().enumerate().filter(|(_, logit)| range.contains(logit));
                assert!(!found.is_empty() && all.eq(found.iter().copied()));
                let within = found[found.len() / 2].1;
                assert_eq!(tally.sum_from(&logits, within), sum(within));
            }
        }
    }

    #[test]
    fn the_smallest_logit_of_a_weight() {
        let weights = LogitWeights::new(3.0, 0.7);
        for weight in [1.0, 0.999, 0.5, 0.1, 1e-9, 1e-200] {
            let least = weights.least(weight);
            assert!(weights.weight(least) >= weight, "{weight}");
            assert!(weights.weight(from_rank(rank(least) - 1)) < weight, "{weight}");
        }
        assert_eq!((weights.least(1.0), weights.least(0.0)), (3.0, f32::NEG_INFINITY));
    }

    #[test]
    fn extents_on_every_instruction_set() {
        for isa in Isa::available() {
            let kernels = SamplingKernels::new(isa).unwrap();
            for mut logits in [1, 63, 64, 200].into_iter().flat_map(distributions) {
                let fold = |f: fn(f32, f32) -> f32| logits.iter().copied().reduce(f).unwrap();
                assert_eq!(
                    kernels.extent(&logits),
                    ([fold(f32::max), fold(f32::min)], true),
                    "{isa}"
                );
                for wrong in [f32::NAN, f32::INFINITY] {
                    let middle = logits.len() / 2;
                    logits[middle] = wrong;
                    assert!(!kernels.extent(&logits).1, "{isa}, {wrong}");
                }
            }
        }
        assert_eq!(logits_extent(&[]), Some([f32::NEG_INFINITY, f32::INFINITY]));
    }

    #[test]
    fn ranks_of_values() {
        let values =
            [f32::NEG_INFINITY, f32::MIN, -1.0, -0.0, 0.0, f32::from_bits(1), 2.0, f32::INFINITY];
        for (i, x) in values.into_iter().enumerate() {
            assert_eq!(from_rank(rank(x)).to_bits(), x.to_bits());
            assert!(i == 0 || rank(values[i - 1]) < rank(x));
        }
        assert_eq!(rank(0.0) - rank(-0.0), 1);
    }
}
