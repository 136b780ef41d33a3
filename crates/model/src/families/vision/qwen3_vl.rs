//! Tower of Qwen3-VL, Qwen3.5 and Qwen3.6: a vision transformer with learned positions, 2-D RoPE
//! and a merger of 2 x 2 patches; Qwen3-VL also has DeepStack.
//!
//! Source: Bai et al., "Qwen3-VL Technical Report", 2025; the published `config.json`s.

use std::fmt::Debug;

use moeflux_base::Error;
use moeflux_ops::MAX_SEGMENT_WIDTH;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    blueprint::{
        DeepstackMerger, LayerNormSource, PatchEmbedding, PatchLayout, PositionTable, VisionBlock,
        VisionBlueprint, VisionMerger,
    },
    checkpoint::source::TensorSource,
    parts::{
        config::config_error,
        scope::{NormWeights, Scope},
    },
};

/// Names of the tower's module: the Hub's, older ones of the Hub, and MLX's.
const MODULES: [&str; 3] = ["model.visual", "visual", MLX_MODULE];
const MLX_MODULE: &str = "vision_tower";

/// Activation of the blocks' MLPs. Mergers have the exact GELU.
const ACTIVATION: &str = "gelu_pytorch_tanh";

/// Maximum of any size.
const MAX_SIZE: usize = 1 << 20;

#[derive(Deserialize)]
struct QwenVisionConfig {
    depth: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_heads: usize,
    out_hidden_size: usize,
    patch_size: usize,
    #[serde(default = "QwenVisionConfig::two")]
    spatial_merge_size: usize,
    #[serde(default = "QwenVisionConfig::two")]
    temporal_patch_size: usize,
    num_position_embeddings: usize,
    #[serde(default)]
    deepstack_visual_indexes: Vec<usize>,
    hidden_act: Option<String>,
    in_channels: Option<usize>,
}

impl QwenVisionConfig {
    const fn two() -> usize {
        2
    }

    /// Checks the values.
    ///
    /// # Errors
    /// The first key with a wrong value, the expected and the found one.
    fn check(&self) -> Result<(), String> {
        let expect = |key: &str, is_right: bool, expected: &str, found: &dyn Debug| match is_right {
            true => Ok(()),
            false => Err(format!("\"{key}\": expected {expected}, got {found:?}")),
        };
        for (key, size) in [
            ("depth", self.depth),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_heads", self.num_heads),
            ("out_hidden_size", self.out_hidden_size),
            ("patch_size", self.patch_size),
            ("spatial_merge_size", self.spatial_merge_size),
            ("temporal_patch_size", self.temporal_patch_size),
            ("num_position_embeddings", self.num_position_embeddings),
        ] {
            expect(key, (1..=MAX_SIZE).contains(&size), &format!("1 to {MAX_SIZE}"), &size)?;
        }
        let act = self.hidden_act.as_deref().unwrap_or(ACTIVATION);
        expect("hidden_act", act == ACTIVATION, &format!("{ACTIVATION:?}"), &act)?;
        let channels = self.in_channels.unwrap_or(3);
        expect("in_channels", channels == 3, "3", &channels)?;
        let (hidden, unit) = (self.hidden_size, 4 * self.num_heads);
        let multiple = format!("a multiple of 4 * \"num_heads\" = {unit}");
        expect("hidden_size", hidden.is_multiple_of(unit), &multiple, &hidden)?;
        let count = self.num_position_embeddings;
        let is_square = self.side() * self.side() == count;
        expect("num_position_embeddings", is_square, "a square", &count)?;
        let width = hidden / self.num_heads;
        let narrow = format!("heads of at most {MAX_SEGMENT_WIDTH} elements");
        expect("hidden_size", width <= MAX_SEGMENT_WIDTH, &narrow, &width)?;
        let indexes = &self.deepstack_visual_indexes;
        let is_ascending = indexes.windows(2).all(|pair| pair[0] < pair[1]);
        let is_inside = indexes.last().is_none_or(|last| *last < self.depth);
        let ascending = format!("ascending indexes below {}", self.depth);
        expect("deepstack_visual_indexes", is_ascending && is_inside, &ascending, indexes)
    }

    /// Side of the square of position embeddings.
    fn side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }
}

/// Name of the first tensor in the tower's module.
const EMBEDDING: &str = "patch_embed.proj.weight";

/// Name of the tower's module, if the checkpoint has one.
fn module(source: &dyn TensorSource) -> Option<&'static str> {
    MODULES.into_iter().find(|module| source.has(&format!("{module}.{EMBEDDING}")))
}

/// Whether a checkpoint has the tower's tensors.
pub(super) fn has_tower(source: &dyn TensorSource) -> bool {
    module(source).is_some()
}

/// The tower of a checkpoint; `None` if its tensors are missing.
pub(super) fn tower(
    source: &dyn TensorSource,
    config: &Value,
) -> Result<Option<VisionBlueprint>, Error> {
    let Some(name) = module(source) else { return Ok(None) };
    let wrong = |problem: String| config_error(source, format!("vision_config: {problem}"));
    let config = QwenVisionConfig::deserialize(config).map_err(|e| wrong(e.to_string()))?;
    config.check().map_err(wrong)?;
    let module = Scope::new(source, name.to_owned(), NormWeights::Plain);
    let (hidden, merge) = (config.hidden_size, config.spatial_merge_size);
    let (patch, frames) = (config.patch_size, config.temporal_patch_size);
    let (layout, shape) = match name == MLX_MODULE {
        true => (PatchLayout::ChannelsLast, [hidden, frames, patch, patch, 3]),
        false => (PatchLayout::ChannelsFirst, [hidden, 3, frames, patch, patch]),
    };
    let weight = module.array(EMBEDDING, &shape)?;
    let bias = module.optional_vector("patch_embed.proj.bias", hidden)?;
    let side = config.side();
    let merged = hidden * merge * merge;
    let merger = |name: &str, width| merger(&module.child(name), width, merged, &config);
    let deepstack = config.deepstack_visual_indexes.iter().enumerate().map(|(i, after)| {
        let merger = merger(&format!("deepstack_merger_list.{i}"), merged)?;
        Ok(DeepstackMerger { after: *after, merger })
    });
    let blocks = (0..config.depth).map(|i| block(&module.child(&format!("blocks.{i}")), &config));
    Ok(Some(VisionBlueprint {
        hidden,
        heads: config.num_heads,
        patch,
        merge,
        eps: 1e-6,
        inner: config.intermediate_size,
        out: config.out_hidden_size,
        embedding: PatchEmbedding { weight, layout, frames, bias },
        positions: PositionTable {
            table: module.array("pos_embed.weight", &[side * side, hidden])?,
            side,
        },
        blocks: blocks.collect::<Result<_, Error>>()?,
        merger: merger("merger", hidden)?,
        deepstack: deepstack.collect::<Result<_, Error>>()?,
    }))
}

fn block(module: &Scope<'_>, config: &QwenVisionConfig) -> Result<VisionBlock, Error> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    Ok(VisionBlock {
        attention_norm: layer_norm(module, "norm1", hidden)?,
        qkv: module.linear("attn.qkv", 3 * hidden, hidden)?,
        proj: module.linear("attn.proj", hidden, hidden)?,
        mlp_norm: layer_norm(module, "norm2", hidden)?,
        up: module.linear("mlp.linear_fc1", inner, hidden)?,
        down: module.linear("mlp.linear_fc2", hidden, inner)?,
    })
}

/// A merger with a norm of `width` elements.
fn merger(
    module: &Scope<'_>,
    width: usize,
    merged: usize,
    config: &QwenVisionConfig,
) -> Result<VisionMerger, Error> {
    Ok(VisionMerger {
        norm: layer_norm(module, "norm", width)?,
        up: module.linear("linear_fc1", merged, merged)?,
        down: module.linear("linear_fc2", config.out_hidden_size, merged)?,
    })
}

fn layer_norm(module: &Scope<'_>, name: &str, len: usize) -> Result<LayerNormSource, Error> {
    Ok(LayerNormSource {
        weight: module.vector(&format!("{name}.weight"), len)?,
        bias: module.vector(&format!("{name}.bias"), len)?,
    })
}
