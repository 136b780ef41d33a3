//! Random values of tensors.

use std::ops::Range;

use half::bf16;
use moeflux_ops::{SPLITMIX_STEP, Scalar, splitmix_mix};

use super::{blocks::BlockParams, mxfp4::Mxfp4Scales};

/// Weights per scale and bias.
pub(crate) const AFFINE_GROUP: usize = 64;

/// Number of distinct scales around the mean scale.
const SIZES: usize = 16;

/// Factor on the random part of a group that carries a mean, so that the mean is nearly the same in
/// all rows with equal settings.
pub(super) const LEAD_SHRINK: f32 = 1.0 / 8.0;

/// [`SplitMix64`](moeflux_ops::SplitMix64) with random access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomStream(u64);

impl RandomStream {
    /// The stream of a tensor name under a seed.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        RandomStream(name.bytes().fold(splitmix_mix(seed ^ SPLITMIX_STEP), |h, b| {
            splitmix_mix(h ^ u64::from(b)).wrapping_add(SPLITMIX_STEP)
        }))
    }

    /// 64 random bits for index `i`.
    #[inline]
    pub(crate) fn word(self, i: u64) -> u64 {
        splitmix_mix(self.0.wrapping_add(i.wrapping_add(1).wrapping_mul(SPLITMIX_STEP)))
    }

    /// Uniform value in `[0, 1)` for index `i`.
    pub(crate) fn unit(self, i: u64) -> f32 {
        (self.word(i) >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Mean of the first group of each row; all other groups have mean zero.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lead {
    /// Zero.
    Zero,
    /// The same in every row.
    Same(f32),
    /// By range of rows. The first range that contains a row applies; all other rows have `rest`.
    Ranges {
        /// Rows and their mean.
        ranges: Vec<(Range<u64>, f32)>,
        /// Mean of the other rows.
        rest: f32,
    },
    /// By row, ascending; zero in the other rows.
    Rows(Vec<(u64, f32)>),
}

impl Lead {
    pub(super) fn mean(&self, row: u64) -> f32 {
        match self {
            Lead::Zero => 0.0,
            Lead::Same(mean) => *mean,
            Lead::Ranges { ranges, rest } => {
                ranges.iter().find(|(rows, _)| rows.contains(&row)).map_or(*rest, |(_, mean)| *mean)
            }
            Lead::Rows(rows) => {
                rows.binary_search_by_key(&row, |(r, _)| *r).map_or(0.0, |i| rows[i].1)
            }
        }
    }
}

/// Distribution of a tensor's values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TensorValues {
    /// Packed quants: all bits are random.
    Quants,
    /// Scales of the quants, from the standard deviation of the weights; bf16.
    Scales(AffineParams),
    /// Biases that set the mean of each group; bf16.
    Biases(AffineParams),
    /// Scales of MXFP4 blocks; bytes.
    Mxfp4Scales(Mxfp4Scales),
    /// Blocks of ggml.
    Blocks(BlockParams),
    /// f32 of `exp(x)` or `-exp(x)`, with uniform `x` between two bounds.
    Decays {
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
        /// Whether it is `-exp(x)`.
        is_negative: bool,
    },
    /// Ids below a bound, of `bytes` bytes: those of a row of `cols` follow each other, from a
    /// random one on.
    Ids { below: u64, cols: u64, bytes: usize },
    /// 64-bit integers, one by one.
    Integers(Vec<i64>),
    /// f32, one by one.
    Numbers(Vec<f32>),
    /// Uniform values between two bounds.
    Uniform {
        /// Element type.
        scalar: Scalar,
        /// Lower bound.
        low: f32,
        /// Upper bound.
        high: f32,
        /// Elements per row; only used with a mean.
        cols: u64,
        /// Means of the first `AFFINE_GROUP` elements of each row.
        lead: Lead,
    },
}

/// An affine matrix with uniform quants.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AffineParams {
    /// Bits per quant.
    pub(crate) bits: u32,
    /// Groups per row.
    pub(crate) groups: u64,
    /// Standard deviation of the weights.
    pub(crate) std: f32,
    /// Mean of each row's first group.
    pub(crate) lead: Lead,
}

impl AffineParams {
    /// The scale number `size` of [`SIZES`], in bf16.
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

    /// Fills scales or biases of the groups from `first` on. `pick` computes one from scale and
    /// mean.
    fn fill(
        &self,
        sizes: RandomStream,
        first: u64,
        out: &mut [u8],
        pick: impl Fn(bf16, f32) -> bf16,
    ) {
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
            let offset = (group - first) as usize * 2;
            out[offset..offset + 2]
                .copy_from_slice(&pick(scale, self.lead.mean(row)).to_le_bytes());
        }
    }
}

/// Index of a group's scale. Scales and biases are different tensors and must agree.
#[inline]
fn size_of_group(sizes: RandomStream, group: u64) -> usize {
    (sizes.word(group / 16) >> (group % 16 * 4)) as usize % SIZES
}

impl TensorValues {
    /// Bytes of which offsets are multiples when a tensor is filled in chunks.
    pub(crate) fn unit_bytes(&self) -> usize {
        match self {
            TensorValues::Blocks(params) => params.block_bytes(),
            _ => 8,
        }
    }

    /// Writes the bytes of the tensor from `offset` on into `out`. `offset` is a multiple of
    /// [`TensorValues::unit_bytes`].
    pub(crate) fn fill(&self, stream: RandomStream, offset: u64, out: &mut [u8]) {
        match self {
            TensorValues::Quants => {
                let first = offset / 8;
                let mut words = out.chunks_exact_mut(8);
                let mut next = first;
                for word in &mut words {
                    word.copy_from_slice(&stream.word(next).to_le_bytes());
                    next += 1;
                }
                let rest = words.into_remainder();
                let len = rest.len();
                rest.copy_from_slice(&stream.word(next).to_le_bytes()[..len]);
            }
            TensorValues::Scales(affine) => affine.fill(stream, offset / 2, out, |scale, _| scale),
            TensorValues::Biases(affine) => {
                affine.fill(stream, offset / 2, out, |scale, mean| affine.bias(scale, mean));
            }
            TensorValues::Mxfp4Scales(powers) => powers.fill(stream, offset, out),
            TensorValues::Blocks(params) => params.fill(stream, offset, out),
            TensorValues::Decays { low, high, is_negative } => {
                for (i, out) in (offset / 4..).zip(out.chunks_exact_mut(4)) {
                    let value = (low + (high - low) * stream.unit(i)).exp();
                    let value = if *is_negative { -value } else { value };
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
            TensorValues::Ids { below, cols, bytes } => {
                for (i, out) in (offset / *bytes as u64..).zip(out.chunks_exact_mut(*bytes)) {
                    let first = stream.word(i / cols) % below;
                    let id = ((first + i % cols) % below).to_le_bytes();
                    out.copy_from_slice(&id[..*bytes]);
                }
            }
            TensorValues::Integers(integers) => {
                let integers = integers.iter().skip(offset as usize / 8);
                for (integer, out) in integers.zip(out.chunks_exact_mut(8)) {
                    out.copy_from_slice(&integer.to_le_bytes());
                }
            }
            TensorValues::Numbers(numbers) => {
                let numbers = numbers.iter().skip(offset as usize / 4);
                for (number, out) in numbers.zip(out.chunks_exact_mut(4)) {
                    out.copy_from_slice(&number.to_le_bytes());
                }
            }
            TensorValues::Uniform { scalar, low, high, cols, lead } => {
                let first = offset / scalar.bytes() as u64;
                for (i, out) in out.chunks_exact_mut(scalar.bytes()).enumerate() {
                    let i = first + i as u64;
                    let (middle, spread) =
                        ((low + high) / 2.0, (high - low) * (stream.unit(i) - 0.5));
                    let leads = *lead != Lead::Zero && i % cols < AFFINE_GROUP as u64;
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
