//! Random numbers, and the bytes of tensors made of them.
//!
//! Every byte is a function of the seed, the tensor's name and the offset alone, so layers do not depend on how
//! many others there are, nor on how a writer cuts its work.

mod scaled;

use std::ops::Range;

use half::bf16;
use moeflux_compute::Scalar;
pub(super) use scaled::Powers;

use crate::base::random::{STEP, mix};

/// Inputs that share a scale and a bias.
pub(super) const GROUP: usize = 64;

/// Scales come in this many sizes around the mean one.
const SIZES: usize = 16;

/// In a group that carries a mean, the random part is this much smaller than elsewhere: the mean shall be the same
/// for all rows that ask for the same.
const LEAD_SHRINK: f32 = 1.0 / 8.0;

/// [SplitMix64](crate::base::random) with random access.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream(u64);

impl Stream {
    /// The stream of one name under one seed.
    pub(super) fn new(seed: u64, name: &str) -> Self {
        Stream(name.bytes().fold(mix(seed ^ STEP), |h, b| mix(h ^ u64::from(b)).wrapping_add(STEP)))
    }

    /// 64 random bits.
    #[inline]
    pub(super) fn at(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_add(1).wrapping_mul(STEP)))
    }

    /// Uniform in `[0, 1)`.
    fn unit(self, i: u64) -> f32 {
        (self.at(i) >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// What the first group of each row has for a mean; all other groups have mean zero.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Lead {
    /// Zero too.
    Zero,
    /// The same in every row.
    Same(f32),
    /// In rows of these ranges their mean, in all others `rest`; of ranges that share rows the first counts.
    Ranges {
        /// Rows and their mean.
        ranges: Vec<(Range<u64>, f32)>,
        /// The mean of the other rows.
        rest: f32,
    },
    /// These means in these rows, in ascending order; zero in the others.
    Rows(Vec<(u64, f32)>),
}

impl Lead {
    fn mean(&self, row: u64) -> f32 {
        match self {
            Lead::Zero => 0.0,
            Lead::Same(mean) => *mean,
            Lead::Ranges { ranges, rest } => {
                ranges.iter().find(|(rows, _)| rows.contains(&row)).map_or(*rest, |(_, mean)| *mean)
            }
            Lead::Rows(rows) => {
                rows.binary_search_by_key(&row, |(r, _)| *r).map_or(0.0, |at| rows[at].1)
            }
        }
    }
}

/// How a tensor's numbers are drawn.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Values {
    /// Packed quants: every bit is random.
    Quants,
    /// Scales of the quants, around `std` of the weights; bf16.
    Scales(Affine),
    /// Biases that give every group its mean; bf16.
    Biases(Affine),
    /// Scales of small floats; bytes.
    Powers(Powers),
    /// Uniform numbers between two bounds.
    Uniform {
        /// Element type.
        scalar: Scalar,
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
        /// Elements of a row; only used with a mean.
        cols: u64,
        /// Means of the first `GROUP` elements of each row.
        lead: Lead,
    },
}

/// An affine matrix with uniform quants.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Affine {
    /// Bits of a quant.
    pub(super) bits: u32,
    /// Groups of a row.
    pub(super) groups: u64,
    /// Standard deviation of the weights.
    pub(super) std: f32,
    /// Mean of each row's first group.
    pub(super) lead: Lead,
}

impl Affine {
    /// The scale in bf16 and what it becomes when read back.
    fn scale(&self, size: usize, shrink: f32) -> bf16 {
        let levels = 2f32.powi(self.bits as i32);
        let quant_std = ((levels * levels - 1.0) / 12.0).sqrt();
        let size = 0.85 + 0.3 * size as f32 / (SIZES - 1) as f32;
        bf16::from_f32(self.std / quant_std * size * shrink)
    }

    /// `mean - (2^bits - 1) / 2 * scale`: the bias of a group with this scale.
    fn bias(&self, scale: bf16, mean: f32) -> bf16 {
        bf16::from_f32(mean - (2f32.powi(self.bits as i32) - 1.0) / 2.0 * scale.to_f32())
    }

    /// Fills in scales or biases of the groups from `first` on. `pick` makes one of them from scale and mean.
    fn fill(&self, sizes: Stream, first: u64, out: &mut [u8], pick: impl Fn(bf16, f32) -> bf16) {
        let table: [[u8; 2]; SIZES] =
            std::array::from_fn(|i| pick(self.scale(i, 1.0), 0.0).to_le_bytes());
        for (i, out) in out.chunks_exact_mut(2).enumerate() {
            out.copy_from_slice(&table[size_of_group(sizes, first + i as u64)]);
        }
        if self.lead == Lead::Zero {
            return;
        }
        let end = first + out.len() as u64 / 2;
        for row in first.div_ceil(self.groups)..end.div_ceil(self.groups) {
            let group = row * self.groups;
            let scale = self.scale(size_of_group(sizes, group), LEAD_SHRINK);
            let at = (group - first) as usize * 2;
            out[at..at + 2].copy_from_slice(&pick(scale, self.lead.mean(row)).to_le_bytes());
        }
    }
}

/// Scales and biases lie in different tensors and must agree, so both ask here.
#[inline]
fn size_of_group(sizes: Stream, group: u64) -> usize {
    (sizes.at(group / 16) >> (group % 16 * 4)) as usize % SIZES
}

impl Values {
    /// Writes the bytes `offset ..` of the tensor into `out`. `offset` is a multiple of eight.
    pub(super) fn fill(&self, stream: Stream, offset: u64, out: &mut [u8]) {
        match self {
            Values::Quants => {
                let first = offset / 8;
                let mut words = out.chunks_exact_mut(8);
                let mut next = first;
                for word in &mut words {
                    word.copy_from_slice(&stream.at(next).to_le_bytes());
                    next += 1;
                }
                let rest = words.into_remainder();
                let len = rest.len();
                rest.copy_from_slice(&stream.at(next).to_le_bytes()[..len]);
            }
            Values::Scales(affine) => affine.fill(stream, offset / 2, out, |scale, _| scale),
            Values::Biases(affine) => {
                affine.fill(stream, offset / 2, out, |scale, mean| affine.bias(scale, mean));
            }
            Values::Powers(powers) => powers.fill(stream, offset, out),
            Values::Uniform { scalar, low, high, cols, lead } => {
                let first = offset / scalar.bytes() as u64;
                for (i, out) in out.chunks_exact_mut(scalar.bytes()).enumerate() {
                    let i = first + i as u64;
                    let (middle, spread) =
                        ((low + high) / 2.0, (high - low) * (stream.unit(i) - 0.5));
                    let leads = *lead != Lead::Zero && i % cols < GROUP as u64;
                    let value = if leads {
                        lead.mean(i / cols) + spread * LEAD_SHRINK
                    } else {
                        middle + spread
                    };
                    match scalar {
                        Scalar::F32 => out.copy_from_slice(&value.to_le_bytes()),
                        Scalar::F16 => {
                            out.copy_from_slice(&half::f16::from_f32(value).to_le_bytes())
                        }
                        Scalar::BF16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                    }
                }
            }
        }
    }
}
