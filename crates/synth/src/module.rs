//! Modules: matrices and vectors of a model, and the tensors that store them.

use moeflux_base::{Error, ToolError};
use moeflux_ops::{Affine, Format, Scalar};
use serde_json::{Value, json};

use super::values::{AFFINE_GROUP, AffineParams, Lead, Mxfp4Scales, RandomStream, TensorValues};

/// A named matrix or vector, before it is split into tensors.
pub(super) struct Module {
    pub(super) path: String,
    /// Dimensions, outermost first; `[experts, outputs, inputs]` for stacked experts.
    pub(super) shape: Vec<u64>,
    pub(super) kind: ModuleKind,
}

pub(super) enum ModuleKind {
    /// Matrix, quantized if its inputs are a multiple of the group size, else bf16.
    Linear { quant: WeightQuant, gain: f32, lead: Lead },
    /// Uniform random values, stored under the module's exact name.
    Plain { scalar: Scalar, low: f32, high: f32, lead: Lead },
    /// 64-bit ids below a bound, different ones in a row, stored under the module's exact name.
    Ids { below: u64 },
    /// These 64-bit integers, stored under the module's exact name.
    Integers(Vec<i64>),
}

/// Storage format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightQuant {
    /// bf16, not quantized.
    No,
    /// Affine: quants of 2 to 8 bits in groups of 64, with a scale and a bias in bf16.
    Affine(u32),
    /// MXFP4: 4-bit floats in groups of 32, with a power-of-two scale.
    Mxfp4,
}

impl WeightQuant {
    /// The format of the table.
    fn format(self) -> Format {
        match self {
            WeightQuant::No => Format::Plain(Scalar::BF16),
            WeightQuant::Affine(bits) => Format::Affine(Affine {
                bits: bits as u8,
                group: AFFINE_GROUP as u16,
                scale: Scalar::BF16,
            }),
            WeightQuant::Mxfp4 => Format::MXFP4,
        }
    }

    fn group(self) -> u64 {
        self.format().block().cols as u64
    }

    /// Bits of a quant.
    fn bits(self) -> u64 {
        let group = self.format().block().cols;
        (self.format().row_bytes(group) * 8 / group) as u64
    }

    fn mode(self) -> &'static str {
        match self {
            WeightQuant::No | WeightQuant::Affine(_) => "affine",
            WeightQuant::Mxfp4 => "mxfp4",
        }
    }

    /// Entry in `config.json` that applies to all matrices.
    pub(super) fn setting(self) -> Value {
        json!({ "group_size": self.group(), "bits": self.bits(), "mode": self.mode() })
    }

    /// Entry for a matrix with another quantization than the default.
    pub(super) fn setting_among(self, default: WeightQuant) -> Value {
        match default.mode() == self.mode() {
            true => json!({ "group_size": self.group(), "bits": self.bits() }),
            false => self.setting(),
        }
    }
}

/// A tensor of the checkpoint: name, layout, and random stream.
#[derive(Clone, Debug)]
pub(super) struct SynthTensor {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    pub(super) values: TensorValues,
    pub(super) stream: RandomStream,
}

impl Module {
    /// Quantization of the module, if any.
    pub(super) fn quant(&self) -> Option<WeightQuant> {
        match self.kind {
            ModuleKind::Linear { quant, .. }
                if quant != WeightQuant::No && self.cols().is_multiple_of(quant.group()) =>
            {
                Some(quant)
            }
            _ => None,
        }
    }

    /// Inputs of a matrix, elements of a vector.
    fn cols(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The tensors of the module.
    ///
    /// # Errors
    /// A size overflows.
    pub(super) fn tensors(self, seed: u64) -> Result<Vec<SynthTensor>, Error> {
        let (quant, cols) = (self.quant(), self.cols());
        let Module { path, shape, kind } = self;
        let tensor = |name: String, shape: Vec<u64>, dtype, size: u64, values, stream: &str| {
            let bytes =
                shape.iter().try_fold(size, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 60);
            let bytes = bytes.ok_or_else(|| ToolError::TensorTooLarge {
                name: name.clone(),
                shape: shape.clone(),
            })?;
            let stream = RandomStream::new(seed, stream);
            Ok::<_, Error>(SynthTensor { name, dtype, shape, bytes, values, stream })
        };
        let (gain, lead) = match kind {
            ModuleKind::Plain { scalar, low, high, lead } => {
                let values = TensorValues::Uniform { scalar, low, high, cols, lead };
                let stream = path.clone();
                return Ok(vec![tensor(
                    path,
                    shape,
                    scalar.name(),
                    scalar.bytes() as u64,
                    values,
                    &stream,
                )?]);
            }
            ModuleKind::Ids { below } => {
                let values = TensorValues::Ids { below, cols, bytes: 8 };
                let stream = path.clone();
                return Ok(vec![tensor(path, shape, "I64", 8, values, &stream)?]);
            }
            ModuleKind::Integers(integers) => {
                let (values, stream) = (TensorValues::Integers(integers), path.clone());
                return Ok(vec![tensor(path, shape, "I64", 8, values, &stream)?]);
            }
            ModuleKind::Linear { gain, lead, .. } => (gain, lead),
        };
        let with = |last: u64| {
            let rows = shape.iter().take(shape.len() - 1);
            rows.copied().chain([last]).collect::<Vec<_>>()
        };
        let std = gain / (cols as f32).sqrt();
        let (weight, scales) = (format!("{path}.weight"), format!("{path}.scales"));
        let Some(quant) = quant else {
            let (low, high) = (-std * 3f32.sqrt(), std * 3f32.sqrt());
            let values = TensorValues::Uniform { scalar: Scalar::BF16, low, high, cols, lead };
            return Ok(vec![tensor(weight.clone(), with(cols), "BF16", 2, values, &weight)?]);
        };
        let packed = with(cols * quant.bits() / 32);
        let groups = cols / quant.group();
        let mut tensors =
            vec![tensor(weight.clone(), packed, "U32", 4, TensorValues::Quants, &weight)?];
        if let WeightQuant::Affine(bits) = quant {
            let affine = AffineParams { bits, groups, std, lead };
            let plane =
                |name: String, values| tensor(name, with(groups), "BF16", 2, values, &scales);
            tensors.push(plane(scales.clone(), TensorValues::Scales(affine.clone()))?);
            tensors.push(plane(format!("{path}.biases"), TensorValues::Biases(affine))?);
        } else {
            let values = TensorValues::Mxfp4Scales(Mxfp4Scales::mxfp4(std));
            tensors.push(tensor(scales.clone(), with(groups), "U8", 1, values, &scales)?);
        }
        Ok(tensors)
    }
}
