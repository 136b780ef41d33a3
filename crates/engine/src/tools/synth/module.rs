//! Modules: matrices and vectors of a model, and the tensors that store them.

use moeflux_compute::Scalar;
use serde_json::{Value, json};

use super::values::{Affine, GROUP, Lead, Powers, Stream, Values};
use crate::base::error::Error;

/// Weights per scale in MXFP4.
const MXFP4_GROUP: u64 = 32;

/// A named matrix or vector, before it is split into tensors.
pub(super) struct Module {
    pub(super) path: String,
    /// Number of outputs; `[experts, outputs]` for stacked experts; the whole shape for a vector.
    pub(super) rows: Vec<u64>,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    /// Matrix `[.., cols]`, quantized if `cols` is a multiple of the group size, else bf16.
    Linear { cols: u64, quant: Quant, gain: f32, lead: Lead },
    /// Uniform random values, stored under the module's exact name.
    Plain { scalar: Scalar, low: f32, high: f32, lead: Lead },
}

/// Storage format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quant {
    /// bf16, not quantized.
    No,
    /// Affine: quants of 2 to 8 bits in groups of 64, with a scale and a bias in bf16.
    Affine(u32),
    /// MXFP4: 4-bit floats in groups of 32, with a power-of-two scale.
    Mxfp4,
}

impl Quant {
    fn group(self) -> u64 {
        match self {
            Quant::No => 1,
            Quant::Affine(_) => GROUP as u64,
            Quant::Mxfp4 => MXFP4_GROUP,
        }
    }

    fn bits(self) -> u32 {
        match self {
            Quant::No => 16,
            Quant::Affine(bits) => bits,
            Quant::Mxfp4 => 4,
        }
    }

    fn mode(self) -> &'static str {
        match self {
            Quant::No | Quant::Affine(_) => "affine",
            Quant::Mxfp4 => "mxfp4",
        }
    }

    /// Entry in `config.json` that applies to all matrices.
    pub(super) fn setting(self) -> Value {
        json!({ "group_size": self.group(), "bits": self.bits(), "mode": self.mode() })
    }

    /// Entry for a matrix with another quantization than the default `all`.
    pub(super) fn setting_among(self, all: Quant) -> Value {
        match all.mode() == self.mode() {
            true => json!({ "group_size": self.group(), "bits": self.bits() }),
            false => self.setting(),
        }
    }
}

/// A tensor of the checkpoint: name, layout, and random stream.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    pub(super) values: Values,
    pub(super) stream: Stream,
}

impl Module {
    /// Quantization of the module, if any.
    pub(super) fn quant(&self) -> Option<Quant> {
        match self.kind {
            Kind::Linear { cols, quant, .. }
                if quant != Quant::No && cols.is_multiple_of(quant.group()) =>
            {
                Some(quant)
            }
            _ => None,
        }
    }

    /// The tensors of the module.
    ///
    /// # Errors
    /// A size overflows.
    pub(super) fn tensors(self, seed: u64) -> Result<Vec<Tensor>, Error> {
        let quant = self.quant();
        let Module { path, rows, kind } = self;
        let tensor = |name: String, shape: Vec<u64>, dtype, size: u64, values, stream: &str| {
            let bytes =
                shape.iter().try_fold(size, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 60);
            let bytes = bytes
                .ok_or_else(|| Error::Input(format!("tensor {name} of {shape:?} is too large")))?;
            let stream = Stream::new(seed, stream);
            Ok::<_, Error>(Tensor { name, dtype, shape, bytes, values, stream })
        };
        let with = |last: u64| rows.iter().copied().chain([last]).collect::<Vec<_>>();
        let (cols, gain, lead) = match kind {
            Kind::Plain { scalar, low, high, lead } => {
                let cols = rows.last().copied().unwrap_or(1);
                let values = Values::Uniform { scalar, low, high, cols, lead };
                let stream = path.clone();
                return Ok(vec![tensor(
                    path,
                    rows,
                    scalar.name(),
                    scalar.bytes() as u64,
                    values,
                    &stream,
                )?]);
            }
            Kind::Linear { cols, gain, lead, .. } => (cols, gain, lead),
        };
        let std = gain / (cols as f32).sqrt();
        let (weight, scales) = (format!("{path}.weight"), format!("{path}.scales"));
        let Some(quant) = quant else {
            let (low, high) = (-std * 3f32.sqrt(), std * 3f32.sqrt());
            let values = Values::Uniform { scalar: Scalar::BF16, low, high, cols, lead };
            return Ok(vec![tensor(weight.clone(), with(cols), "BF16", 2, values, &weight)?]);
        };
        let packed = with(cols * u64::from(quant.bits()) / 32);
        let groups = cols / quant.group();
        let mut tensors = vec![tensor(weight.clone(), packed, "U32", 4, Values::Quants, &weight)?];
        if let Quant::Affine(bits) = quant {
            let affine = Affine { bits, groups, std, lead };
            let of = |name: String, values| tensor(name, with(groups), "BF16", 2, values, &scales);
            tensors.push(of(scales.clone(), Values::Scales(affine.clone()))?);
            tensors.push(of(format!("{path}.biases"), Values::Biases(affine))?);
        } else {
            let values = Values::Powers(Powers::mxfp4(std));
            tensors.push(tensor(scales.clone(), with(groups), "U8", 1, values, &scales)?);
        }
        Ok(tensors)
    }
}
