//! The softmax of all logits, for who chooses by it.

use std::ops::RangeInclusive;

use super::simd::{BINS, Isa, Kernels, LogitScale, MAX_TALLIED, exp2_neg, weight_units};
use crate::Error;

/// Octaves below which a weight is 0.
const OCTAVES: f64 = 1000.0;
/// Bins to an octave at most, as a power of two.
const MAX_BINS: u32 = 30;

/// What logits weigh in a softmax: the exponential of `(logit - largest) / temperature`.
///
/// A weight has the same bits on every machine and instruction set: it is made of additions and multiplications of f64, none of
/// them fused. In [units](LogitWeights::units) it is a whole number, so that sums of weights have no order. A unit is `2^-48` of
/// the largest weight, and a weight is right to one of them: the shares of 250,000 logits are off by less than `2^-30`, all
/// together.
#[derive(Clone, Copy, Debug)]
pub struct LogitWeights {
    kernels: Kernels,
    scale: LogitScale,
}

impl LogitWeights {
    /// Of the largest logit, a number, and a temperature above 0; on the best instruction set.
    pub fn new(largest: f32, temperature: f32) -> Self {
        Self::of(Kernels::best(), largest, temperature)
    }

    /// As [`LogitWeights::new`] on an instruction set.
    ///
    /// # Errors
    /// This machine does not have it.
    pub fn on(isa: Isa, largest: f32, temperature: f32) -> Result<Self, Error> {
        Ok(Self::of(Kernels::new(isa)?, largest, temperature))
    }

    fn of(kernels: Kernels, largest: f32, temperature: f32) -> Self {
        let octaves = std::f64::consts::LOG2_E / f64::from(temperature);
        Self { kernels, scale: LogitScale { largest: f64::from(largest), octaves, round: 0.0 } }
    }

    /// The weight of a logit, from 0 to 1; below `2^-1000` it is 0.
    pub fn weight(&self, logit: f32) -> f64 {
        let below = self.scale.octaves_below(logit);
        if below > OCTAVES { 0.0 } else { exp2_neg(&[below])[0] }
    }

    /// The weight in units, the largest being `2^48`.
    pub fn units(&self, logit: f32) -> u64 {
        weight_units(self.weight(logit))
    }

    /// The least logit that weighs `weight` or more; minus infinity if that is 0. The weight is at most 1.
    pub fn least(&self, weight: f64) -> f32 {
        if weight > 0.0 {
            self.first(|logit| self.weight(logit) >= weight)
        } else {
            f32::NEG_INFINITY
        }
    }

    /// The least logit that `holds`, where all larger ones do, up to the largest.
    fn first(&self, holds: impl Fn(f32) -> bool) -> f32 {
        let (mut below, mut least) =
            (ordered(f32::NEG_INFINITY), ordered(self.scale.largest as f32));
        while below + 1 < least {
            let middle = below + (least - below) / 2;
            if holds(number(middle)) { least = middle } else { below = middle }
        }
        number(least)
    }
}

/// A number's place among all f32, infinities included.
fn ordered(x: f32) -> i64 {
    let bits = i64::from(x.to_bits() & i32::MAX as u32);
    // Minus zero comes before zero.
    if x.is_sign_negative() { -1 - bits } else { bits }
}

/// The number at a place.
fn number(at: i64) -> f32 {
    if at < 0 { -f32::from_bits((-1 - at) as u32) } else { f32::from_bits(at as u32) }
}

/// The largest and the least of all logits; `None` where one is NaN or plus infinity. Of none they are minus and plus infinity.
pub fn logits_extent(logits: &[f32]) -> Option<[f32; 2]> {
    let (extent, legal) = Kernels::best().extent(logits);
    legal.then_some(extent)
}

/// Calls `f` with all logits in a range, and where they are, in order.
pub fn logits_between(logits: &[f32], range: &RangeInclusive<f32>, mut f: impl FnMut(usize, f32)) {
    Kernels::best().for_each_between(logits, [*range.start(), *range.end()], &mut f);
}

/// The sums of the weights of logits, by how large the logits are: a histogram of some thousand bins over those that there are.
#[derive(Clone, Debug)]
pub struct LogitTally {
    weights: LogitWeights,
    least: f32,
    /// Sums of a few logits, in units.
    some: Box<[u64; BINS]>,
    /// Sums in units.
    all: Box<[u128; BINS]>,
}

impl Default for LogitTally {
    fn default() -> Self {
        Self::new()
    }
}

impl LogitTally {
    /// Of nothing. The only thing here that allocates.
    pub fn new() -> Self {
        let (some, all) = (Box::new([0; BINS]), Box::new([0; BINS]));
        Self { weights: LogitWeights::new(0.0, 1.0), least: 0.0, some, all }
    }

    /// Forgets all sums and makes those of the logits that are `least` or more. `extent` is that of all `logits`, as
    /// [`logits_extent`] finds it; its largest one is that of the weights.
    pub fn fill(
        &mut self,
        mut weights: LogitWeights,
        logits: &[f32],
        extent: [f32; 2],
        least: f32,
    ) {
        // What is less has no weight in units.
        let weighs = weights.first(|logit| weights.units(logit) > 0);
        self.least = least.max(extent[1]).max(weighs).min(extent[0]);
        let octaves = weights.scale.octaves_below(self.least);
        let fits = |bits: &u32| octaves * f64::from(1 << bits) <= (BINS - 1) as f64;
        let bits = (0..=MAX_BINS).rev().find(fits).unwrap_or(0);
        weights.scale.round = f64::from_bits(f64::to_bits(1.0) + (u64::from(52 - bits) << 52));
        self.weights = weights;
        self.all.fill(0);
        for logits in logits.chunks(MAX_TALLIED) {
            self.some.fill(0);
            weights.kernels.tally(logits, self.least, weights.scale, &mut self.some);
            self.all.iter_mut().zip(&*self.some).for_each(|(all, some)| *all += u128::from(*some));
        }
    }

    /// The sum of all weights in units.
    pub fn sum(&self) -> u128 {
        self.all.iter().sum()
    }

    /// The bin with which the sum of the weights, from the largest logit on, reaches `units`, or else the last one that weighs
    /// anything: the logits that it has, and the sum before it.
    pub fn reaching(&self, units: u128) -> (RangeInclusive<f32>, u128) {
        let (mut last, mut sum) = ((0, 0), 0);
        for (bin, of_bin) in self.all.iter().enumerate().filter(|(_, of_bin)| **of_bin > 0) {
            last = (bin, sum);
            sum += of_bin;
            if sum >= units {
                break;
            }
        }
        (self.range(last.0), last.1)
    }

    /// The sum of the weights of all logits from `least` on, one of those that were counted.
    pub fn sum_from(&self, logits: &[f32], least: f32) -> u128 {
        let bin = self.bin(least.max(self.least)).min(BINS - 1);
        let (start, end) = self.range(bin).into_inner();
        let mut sum = self.all[..bin].iter().sum();
        logits_between(logits, &(start.max(least)..=end), |_, logit| {
            sum += u128::from(self.weights.units(logit));
        });
        sum
    }

    fn bin(&self, logit: f32) -> usize {
        self.weights.scale.bin(self.weights.scale.octaves_below(logit))
    }

    /// The logits that a bin has.
    fn range(&self, bin: usize) -> RangeInclusive<f32> {
        let first = |bin| self.weights.first(|logit| logit >= self.least && self.bin(logit) <= bin);
        let end = match bin.checked_sub(1) {
            Some(before) => number(ordered(first(before)) - 1),
            None => self.weights.scale.largest as f32,
        };
        first(bin)..=end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, from 0 to 1.
    fn some(n: usize) -> impl Iterator<Item = f32> {
        let mut state = 7u64;
        (0..n).map(move |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u32 << 24) as f32
        })
    }

    /// Logits of several kinds: of a wide range and a narrow one, all alike, and some that are banned.
    fn kinds(n: usize) -> [Vec<f32>; 4] {
        let banned = |(i, x): (usize, f32)| if i % 5 == 2 { f32::NEG_INFINITY } else { x * 30.0 };
        [
            some(n).map(|x| x * x * 90.0 - 50.0).collect(),
            some(n).map(|x| x * 1e-3).collect(),
            vec![3.5; n],
            some(n).enumerate().map(banned).collect(),
        ]
    }

    #[test]
    fn weights_are_exponentials() {
        let (weights, units_of_one) = (LogitWeights::new(0.0, 1.0), (1u64 << 48) as f64);
        for x in some(20_000).map(|x| -40.0 * x).chain([0.0, -0.0, -600.0]) {
            let exact = f64::from(x).exp();
            assert!((weights.units(x) as f64 - exact * units_of_one).abs() <= 1.0, "{x}");
            assert!(
                (weights.weight(x) - exact).abs() <= (4.0 - f64::from(x)) * f64::EPSILON * exact,
                "{x}"
            );
        }
        let bounds = [-690.0, -695.0, f32::MIN, f32::NEG_INFINITY].map(|x| weights.weight(x));
        assert!(bounds[0] > 0.0 && bounds[1..] == [0.0; 3], "{bounds:?}");
        // What a unit is, and bits of weights, so that a platform that differs is noticed.
        assert_eq!(weights.units(0.0), 1 << 48);
        assert_eq!(
            [-0.25, -1.25, -12.5].map(|x| weights.units(x)),
            [219_212_932_277_264, 80_643_931_023_713, 1_048_959_615]
        );
        assert_eq!(LogitWeights::new(1e30, 1e-30).weight(1e30), 1.0);
        assert_eq!(LogitWeights::new(f32::MAX, f32::MIN_POSITIVE).weight(f32::MIN), 0.0);
    }

    #[test]
    fn tallies_are_sums_on_every_set() {
        for isa in Isa::available() {
            // A length that fills blocks and one that does not, and one that takes several tallies.
            for logits in [64, 1000, 2 * MAX_TALLIED + 77].into_iter().flat_map(kinds) {
                for (temperature, least) in [(1.0, f32::NEG_INFINITY), (0.3, 0.5), (40.0, 20.0)] {
                    let extent = logits_extent(&logits).unwrap();
                    let weights = LogitWeights::on(isa, extent[0], temperature).unwrap();
                    let mut tally = LogitTally::new();
                    tally.fill(weights, &logits, extent, least);
                    let mut plain = vec![0; BINS];
                    for logit in logits.iter().filter(|logit| **logit >= least.min(extent[0])) {
                        let units = u128::from(weights.units(*logit));
                        if units > 0 {
                            plain[tally.bin(*logit)] += units;
                        }
                    }
                    assert!(plain == *tally.all, "{isa}, {} logits, {temperature}", logits.len());
                    assert_eq!(tally.sum(), plain.iter().sum());
                }
            }
        }
    }

    #[test]
    fn parts_of_tallies_are_in_rank_order() {
        for logits in kinds(5000) {
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
                assert_eq!(before, sum(number(ordered(end) + 1)));
                assert!(sum(start) >= target.min(tally.sum()) && before <= target, "{share}");
                let mut found = Vec::new();
                logits_between(&logits, &range, |at, logit| found.push((at, logit)));
                let all =
                    logits.iter().copied().enumerate().filter(|(_, logit)| range.contains(logit));
                assert!(!found.is_empty() && all.eq(found.iter().copied()));
                let within = found[found.len() / 2].1;
                assert_eq!(tally.sum_from(&logits, within), sum(within));
            }
        }
    }

    #[test]
    fn the_least_logit_of_a_weight() {
        let weights = LogitWeights::new(3.0, 0.7);
        for weight in [1.0, 0.999, 0.5, 0.1, 1e-9, 1e-200] {
            let least = weights.least(weight);
            assert!(weights.weight(least) >= weight, "{weight}");
            assert!(weights.weight(number(ordered(least) - 1)) < weight, "{weight}");
        }
        assert_eq!((weights.least(1.0), weights.least(0.0)), (3.0, f32::NEG_INFINITY));
    }

    #[test]
    fn extents_on_every_set() {
        for isa in Isa::available() {
            let kernels = Kernels::new(isa).unwrap();
            for mut logits in [1, 63, 64, 200].into_iter().flat_map(kinds) {
                let fold = |f: fn(f32, f32) -> f32| logits.iter().copied().reduce(f).unwrap();
                assert_eq!(
                    kernels.extent(&logits),
                    ([fold(f32::max), fold(f32::min)], true),
                    "{isa}"
                );
                for wrong in [f32::NAN, f32::INFINITY] {
                    let at = logits.len() / 2;
                    logits[at] = wrong;
                    assert!(!kernels.extent(&logits).1, "{isa}, {wrong}");
                }
            }
        }
        assert_eq!(logits_extent(&[]), Some([f32::NEG_INFINITY, f32::INFINITY]));
    }

    #[test]
    fn places_of_numbers() {
        let numbers =
            [f32::NEG_INFINITY, f32::MIN, -1.0, -0.0, 0.0, f32::from_bits(1), 2.0, f32::INFINITY];
        for (i, x) in numbers.into_iter().enumerate() {
            assert_eq!(number(ordered(x)).to_bits(), x.to_bits());
            assert!(i == 0 || ordered(numbers[i - 1]) < ordered(x));
        }
        assert_eq!(ordered(0.0) - ordered(-0.0), 1);
    }
}
