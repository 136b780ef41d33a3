//! Names that most families need, for `use super::prelude::*`.

pub(super) use moeflux_base::Error;
pub(super) use moeflux_ops::{Activation, RopePairs, Scoring};
pub(super) use serde::Deserialize;

pub(super) use super::family::{
    DELTA_NET, Family, ModelRow, Preset, PresetSizes, SLIDING, published,
};
pub(super) use crate::{
    blueprint::{
        Blueprint, BodyBlueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape, LayerBlueprint,
        MixerBlueprint, MlpBlueprint, MoeBlueprint, RopeShape, RouterBlueprint, SharedBlueprint,
        SubBlockBlueprint, SubBlockInput,
    },
    checkpoint::source::TensorSource,
    parts::{
        body::Body,
        config::{Require, config_error, parse_config},
        expert_tensors::{ExpertTensors, W_PROJECTIONS},
        gqa::{GqaKeys, GqaParams, GqaStyle, QkNorm, gqa},
        grouped_moe::{GroupedMoe, MoeStyle},
        rope::{RopeStyle, RotatedPart},
        scope::{NormWeights, Scope},
        softmax_moe::{SoftmaxMoe, SoftmaxStyle},
        windows::LayerWindows,
    },
};
