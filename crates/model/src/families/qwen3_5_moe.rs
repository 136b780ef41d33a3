//! `qwen3_5_moe`: Qwen3.5-397B-A17B, Qwen3.6-35B-A3B and relatives; text only.
//!
//! Gated delta-net layers with a gated full-attention layer at intervals, softmax router, gated
//! shared expert. Sources: Yang et al., "Gated Delta Networks", 2024; the published `config.json`s
//! and model cards.

mod gguf;

use moeflux_ops::{GateFunction, KeySharing, LogDecay, NormGate};

use super::prelude::*;
use crate::{
    blueprint::{
        DeltaNetBlueprint, DeltaNetShape, DrafterBlueprint, GateSource, OutputGate,
        ProjectionSource,
    },
    checkpoint::{MatrixSource, VectorChange},
    parts::drafter::{self, HeadNames},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["qwen3_5_moe"],
        checkpoints: "Qwen3.6-35B-A3B, Qwen3.5-122B-A10B, 397B-A17B",
        special: "gated delta-net",
        checked: "mlx-lm, transformers",
    }],
    layer_types: DELTA_NET,
    presets: &[
        // Source: huggingface.co/Qwen/Qwen3.6-35B-A3B, config.json and model card.
        Preset {
            name: "qwen3.6-35b-a3b",
            description: "Qwen3.6-35B-A3B: 40 layers, 3 of 4 delta-net, 256 experts, 8 per token; \
                 20 GB",
            sizes: PresetSizes { parameters: 34.7, active: 3.0, expert_mb: 1.77 },
            config: published!("qwen3_5_moe/qwen3.6-35b-a3b.json"),
        },
        // Source: huggingface.co/Qwen/Qwen3.5-397B-A17B, config.json and model card.
        Preset {
            name: "qwen3.5-397b-a17b",
            description: "Qwen3.5-397B-A17B: 60 layers, 3 of 4 delta-net, 512 experts, 10 per \
                 token; 223 GB",
            sizes: PresetSizes { parameters: 396.0, active: 16.3, expert_mb: 7.08 },
            config: published!("qwen3_5_moe/qwen3.5-397b-a17b.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
pub(super) struct Qwen35MoeConfig {
    #[serde(flatten)]
    pub(super) body: Body,
    #[serde(flatten)]
    pub(super) gqa: GqaKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    linear_num_value_heads: usize,
    linear_num_key_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    linear_conv_kernel_dim: Option<usize>,
    full_attention_interval: Option<usize>,
    layer_types: Option<Vec<String>>,
    norm_topk_prob: Option<bool>,
    attn_output_gate: Option<bool>,
}

/// Input projections of a delta-net.
pub(super) struct DeltaNetProjections {
    /// Queries, keys and values.
    pub(super) qkv: MatrixSource,
    /// Output gate.
    pub(super) z: MatrixSource,
    /// Write strength.
    pub(super) b: MatrixSource,
    /// Decay.
    pub(super) a: MatrixSource,
}

/// Locates the projections of a delta-net module, by shape and hidden size.
pub(super) type FindProjections =
    fn(&Scope<'_>, &DeltaNetShape, usize) -> Result<DeltaNetProjections, Error>;

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    build(source, projections)
}

/// The model with the delta-net layout that `projections` reads.
pub(super) fn build(
    source: &dyn TensorSource,
    projections: FindProjections,
) -> Result<Blueprint, Error> {
    let config: Qwen35MoeConfig = parse_config(source)?;
    let delta_shape = delta_shape(source, &config)?;
    // The Hub stores `w` of `1 + w`. The sum is taken in f32, as in the authors' code. mlx-lm takes
    // it in the checkpoint's type, so its logits of a bf16 Hub checkpoint differ by that rounding.
    let mut blueprint = config.body.blueprint(source, NormWeights::OnePlus, |i, layer| {
        // The layer of a head, which GGUF has after the others, is no delta-net.
        let is_own = i < config.body.num_hidden_layers;
        let mixer = match is_own && is_linear(source, &config, i)? {
            true => config.delta_net(layer, &delta_shape, projections)?.into(),
            false => MixerBlueprint::from(attention(&config, &layer.child("self_attn"))?),
        };
        config.body.layer(layer, mixer, config.feed_forward(i, layer)?)
    })?;
    let head = Scope::new(source, "mtp".into(), NormWeights::OnePlus);
    let hidden = config.body.hidden_size;
    let layer = || config.head_layer(&head);
    let module = drafter::optional(&head, &HeadNames::QWEN, hidden, layer);
    blueprint.drafter = module.or(blueprint.drafter);
    Ok(blueprint)
}

/// The head of a separate folder, as mlx-vlm splits it from the Hub's checkpoint.
pub(super) fn split_drafter(source: &dyn TensorSource) -> Result<DrafterBlueprint, Error> {
    let config: Qwen35MoeConfig = parse_config(source)?;
    let head = Scope::new(source, String::new(), NormWeights::OnePlus);
    let layer = config.head_layer(&head)?;
    drafter::drafter(&head, &HeadNames::QWEN, config.body.hidden_size, layer)
}

impl Qwen35MoeConfig {
    /// Decoder layer of a head: full attention, whatever `layer_types` says of layer 0.
    fn head_layer(&self, head: &Scope<'_>) -> Result<LayerBlueprint, Error> {
        let layer = head.child("layers.0");
        let attention = attention(self, &layer.child("self_attn"))?;
        self.body.layer(&layer, attention, self.feed_forward(0, &layer)?)
    }

    /// Elements of a head of full attention.
    pub(super) fn head_dim(&self, source: &dyn TensorSource) -> Result<usize, Error> {
        Ok(self.gqa.heads.shape(source, self.body.hidden_size)?.head_dim)
    }

    /// The delta-net of a layer.
    pub(super) fn delta_net(
        &self,
        layer: &Scope<'_>,
        shape: &DeltaNetShape,
        projections: FindProjections,
    ) -> Result<DeltaNetBlueprint, Error> {
        let (module, hidden) = (layer.child("linear_attn"), self.body.hidden_size);
        let matrices = projections(&module, shape, hidden)?;
        delta_net(&module, *shape, hidden, matrices)
    }

    /// Feed-forward part of layer `i`.
    pub(super) fn feed_forward(
        &self,
        i: usize,
        layer: &Scope<'_>,
    ) -> Result<FeedForwardBlueprint, Error> {
        let normalize = self.norm_topk_prob.unwrap_or(true);
        self.moe.feed_forward(&layer.child("mlp"), i, self.body.hidden_size, normalize)
    }
}

pub(super) fn delta_shape(
    source: &dyn TensorSource,
    config: &Qwen35MoeConfig,
) -> Result<DeltaNetShape, Error> {
    let shape = DeltaNetShape {
        key_heads: config.linear_num_key_heads,
        value_heads: config.linear_num_value_heads,
        key_width: config.linear_key_head_dim,
        value_width: config.linear_value_head_dim,
        conv_width: config.linear_conv_kernel_dim.unwrap_or(4),
        sharing: match source.changes().value_heads_dealt {
            true => KeySharing::Strided,
            false => KeySharing::Adjacent,
        },
        decays: 1,
    };
    let require = Require(source);
    require.sizes(&[
        ("linear_num_value_heads", shape.value_heads),
        ("linear_num_key_heads", shape.key_heads),
        ("linear_key_head_dim", shape.key_width),
        ("linear_value_head_dim", shape.value_width),
        ("linear_conv_kernel_dim", shape.conv_width),
    ])?;
    require.that(shape.value_heads.is_multiple_of(shape.key_heads), || {
        "\"linear_num_value_heads\" is not a multiple of \"linear_num_key_heads\"".into()
    })?;
    require
        .that(shape.conv_width > 1, || "\"linear_conv_kernel_dim\" must be at least 2".into())?;
    Ok(shape)
}

/// Whether layer `i` is a delta-net, by `layer_types`. Without that key every
/// `full_attention_interval`-th layer is full attention.
pub(super) fn is_linear(
    source: &dyn TensorSource,
    config: &Qwen35MoeConfig,
    i: usize,
) -> Result<bool, Error> {
    let require = Require(source);
    let Some(types) = &config.layer_types else {
        let (key, purpose) = ("full_attention_interval", "which layers have full attention");
        let interval = require.named(key, config.full_attention_interval, purpose)?;
        require.sizes(&[(key, interval)])?;
        return Ok(!(i + 1).is_multiple_of(interval));
    };
    require.layers("layer_types", Some(types), i + 1)?;
    Ok(types[i] == "linear_attention")
}

pub(super) fn attention(
    config: &Qwen35MoeConfig,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.gqa.heads.shape(attention.source, hidden)?;
    let gate = OutputGate {
        function: GateFunction::Sigmoid,
        width: shape.v_head_dim,
        source: GateSource::Queries,
    };
    let is_gated = config.attn_output_gate.unwrap_or(true);
    let shape = GqaShape { gate: is_gated.then_some(gate), ..shape };
    let rotated = RotatedPart { dims: None, default_share: 0.25 };
    let rope = config.gqa.rope.of(attention.source, shape.head_dim, RopeStyle::Partial(rotated))?;
    Ok(GqaBlueprint {
        ..gqa(attention, GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD })?
    })
}

fn delta_net(
    delta_net: &Scope<'_>,
    shape: DeltaNetShape,
    hidden: usize,
    projections: DeltaNetProjections,
) -> Result<DeltaNetBlueprint, Error> {
    let a_log = delta_net.log_decays("A_log", shape.value_heads, VectorChange::LogOfNegative)?;
    Ok(DeltaNetBlueprint {
        shape,
        in_proj_qkv: vec![projections.qkv],
        in_proj_z: ProjectionSource::Full(projections.z),
        norm_gate: NormGate::Silu,
        in_proj_b: projections.b,
        in_proj_a: ProjectionSource::Full(projections.a),
        decay: LogDecay::Softplus,
        conv1d: vec![delta_net.array("conv1d.weight", &[shape.channels(), shape.conv_width, 1])?],
        a_log,
        dt_bias: delta_net.vector("dt_bias", shape.value_heads)?,
        // Every layout stores the factor of this norm itself, never `w` of `1 + w`.
        norm: delta_net.vector("norm.weight", shape.value_width)?,
        out_proj: delta_net.matrix("out_proj", hidden, shape.values())?,
    })
}

/// Layout with four matrices.
pub(super) fn projections(
    delta_net: &Scope<'_>,
    shape: &DeltaNetShape,
    hidden: usize,
) -> Result<DeltaNetProjections, Error> {
    Ok(DeltaNetProjections {
        qkv: delta_net.matrix("in_proj_qkv", shape.channels(), hidden)?,
        z: delta_net.matrix("in_proj_z", shape.values(), hidden)?,
        b: delta_net.matrix("in_proj_b", shape.value_heads, hidden)?,
        a: delta_net.matrix("in_proj_a", shape.value_heads, hidden)?,
    })
}
