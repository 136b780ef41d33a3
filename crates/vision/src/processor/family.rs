//! Families of processors: which one a model has, and what it does without a file.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    fields::Fields,
    patches::PatchOrder,
    size_rule::{Fit, MAX_PIXELS, SizeRule},
};

/// Mean and deviation of CLIP's training images.
const CLIP_MEAN: [f32; 3] = [0.48145466, 0.4578275, 0.40821073];
const CLIP_DEVIATION: [f32; 3] = [0.26862954, 0.261_302_6, 0.275_777_1];

/// Largest maximum of pixels that a file may state. Larger images are refused by [`MAX_PIXELS`].
const MAX_STATED: u64 = 1 << 40;

/// Largest limit of tokens or patches that a file may state.
const MAX_TOKENS: u64 = 1 << 20;

/// Processor of several models. Missing fields have the defaults of transformers 5.24, Kimi's the
/// defaults of the authors' code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Qwen2-VL's processor with the constants of Qwen3-VL.
    Qwen,
    /// GLM-4V's.
    Glm,
    /// Gemma 4's.
    Gemma,
    /// Kimi-K2.5's.
    Kimi,
}

/// Constants that turn samples into values.
pub(super) struct Normalization {
    pub(super) mean: [f32; 3],
    pub(super) deviation: [f32; 3],
    pub(super) is_default: bool,
}

impl Family {
    /// Family of a `model_type` of `config.json`.
    pub(super) fn named(model_type: &str) -> Option<Self> {
        match model_type {
            "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe" | "qwen4_exp" => {
                Some(Self::Qwen)
            }
            "glm4v" | "glm4v_moe" => Some(Self::Glm),
            "gemma4" => Some(Self::Gemma),
            "kimi_k25" => Some(Self::Kimi),
            _ => None,
        }
    }

    /// Mean and deviation of each channel, and whether they are applied by default.
    pub(super) fn normalization(self) -> Normalization {
        let (mean, deviation) = match self {
            Self::Qwen | Self::Kimi => ([0.5; 3], [0.5; 3]),
            Self::Glm => (CLIP_MEAN, CLIP_DEVIATION),
            Self::Gemma => ([0.0; 3], [1.0; 3]),
        };
        Normalization { mean, deviation, is_default: self != Self::Gemma }
    }

    /// Rule by which an image gets its size, and the order of its patches.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a field of a wrong type or range, and for one that asks for
    /// another computation.
    pub(super) fn read(self, fields: &Fields<'_>) -> Result<(SizeRule, PatchOrder), Error> {
        fields.refuse_unless("resample", json!(3))?;
        fields.refuse_unless("fixed_output_tokens", Value::Null)?;
        fields.refuse_unless("do_center_crop", json!(false))?;
        if self != Self::Kimi {
            fields.refuse_unless("do_pad", json!(false))?;
        }
        let whole = |name, most, default| {
            Ok::<u64, Error>(fields.whole(name, 1..=most)?.unwrap_or(default))
        };
        let (patch, merge_name, merge) = match self {
            Self::Qwen => (16, "merge_size", 2),
            Self::Glm => (14, "merge_size", 2),
            Self::Gemma => (16, "pooling_kernel_size", 3),
            Self::Kimi => (14, "merge_kernel_size", 2),
        };
        let patch = whole("patch_size", 256, patch)?;
        let merge = whole(merge_name, 16, merge)?;
        let frames = match self {
            Self::Qwen | Self::Glm => whole("temporal_patch_size", 4, 2)?,
            Self::Gemma | Self::Kimi => 1,
        };
        let fit = match self {
            Self::Qwen => {
                let (min, max) = pixel_counts(fields, 65_536, 16_777_216)?;
                Fit::Pixels { min, max, frames: 1, widens: false }
            }
            Self::Glm => {
                let (min, max) = pixel_counts(fields, 12_544, 9_633_792)?;
                Fit::Pixels { min, max, frames, widens: true }
            }
            Self::Gemma => Fit::Tokens { most: whole("max_soft_tokens", MAX_TOKENS, 280)? },
            Self::Kimi => Fit::Patches {
                most: whole("in_patch_limit", MAX_TOKENS, 16_384)?,
                side: whole("patch_limit_on_one_side", MAX_TOKENS, 512)?,
            },
        };
        let resizes = fields.flag("do_resize")?.unwrap_or(true);
        let block = match self {
            Self::Qwen | Self::Glm => merge,
            Self::Gemma | Self::Kimi => 1,
        };
        let patches = PatchOrder {
            patch: patch as usize,
            block: block as usize,
            frames: frames as usize,
            channels_last: self == Self::Gemma,
        };
        Ok((SizeRule { patch, merge, frames, resizes, fit }, patches))
    }
}

/// Minimum and maximum of pixels, by their names in new and old files.
fn pixel_counts(fields: &Fields<'_>, min: u64, max: u64) -> Result<(u64, u64), Error> {
    let count = |names: [&str; 3], most, default| {
        for name in names {
            if let Some(count) = fields.whole(name, 1..=most)? {
                return Ok::<u64, Error>(count);
            }
        }
        Ok(default)
    };
    let min = count(["min_pixels", "size.shortest_edge", "size.min_pixels"], MAX_PIXELS, min)?;
    let max = count(["max_pixels", "size.longest_edge", "size.max_pixels"], MAX_STATED, max)?;
    if min > max {
        let problem = format!("expected a minimum of pixels up to their maximum {max}, got {min}");
        return Err(fields.problem("size", &problem));
    }
    Ok((min, max))
}
