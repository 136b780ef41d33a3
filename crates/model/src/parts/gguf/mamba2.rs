//! Keys of Mamba-2 in some layers.

use moeflux_base::Error;

use super::key;
use super::writer::{KeyValue, KeyWriter};
use crate::{
    blueprint::{Mamba2Shape, MixerBlueprint},
    checkpoint::gguf::keys::Keys,
};

/// Sizes of Mamba-2 mixers.
pub(crate) struct MixerSizes {
    pub(crate) heads: u64,
    pub(crate) head_width: u64,
    pub(crate) groups: u64,
    pub(crate) state_width: u64,
    pub(crate) conv_width: u64,
    /// Whether the convolution has a bias.
    pub(crate) conv_bias: bool,
}

/// Whether layers of attention have RoPE.
pub(crate) const HAS_ROPE: &str = "rope.scaling.finetuned";

impl MixerSizes {
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Self, Error> {
        let heads = keys.size(key::STATE_HEADS)?;
        Ok(Self {
            heads,
            head_width: keys.size(key::STATE_INNER)? / heads,
            groups: keys.size(key::STATE_GROUPS)?,
            state_width: keys.size(key::STATE_WIDTH)?,
            conv_width: keys.size(key::TAPS)?,
            conv_bias: keys.has_like(".ssm_conv1d.bias"),
        })
    }
}

/// Sizes of Mamba-2 beside grouped-query attention: other layers have no KV heads.
pub(crate) fn write_mamba2(keys: &mut KeyWriter<'_>) {
    let shape = keys.mixers().find_map(|mixer| match mixer {
        Some(MixerBlueprint::Mamba2(mixer)) => Some(mixer.shape),
        _ => None,
    });
    let Some(shape) = shape else { return };
    let kv_heads = |mixer: Option<&MixerBlueprint>| match mixer {
        Some(MixerBlueprint::Gqa(gqa)) => gqa.shape.kv_heads as i32,
        _ => 0,
    };
    let heads = keys.mixers().map(kv_heads).collect();
    keys.push(key::KV_HEADS, KeyValue::I32s(heads));
    let Mamba2Shape { conv_width, state_width, groups, heads, .. } = shape;
    for (name, n) in [
        (key::TAPS, conv_width),
        (key::STATE_WIDTH, state_width),
        (key::STATE_GROUPS, groups),
        (key::STATE_INNER, shape.inner()),
        (key::STATE_HEADS, heads),
    ] {
        keys.push_integer(name, n);
    }
    let has_rope = keys.config["position_embedding_type"] == "rope";
    keys.push(HAS_ROPE, KeyValue::Bool(has_rope));
}
