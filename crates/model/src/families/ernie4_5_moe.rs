//! `ernie4_5_moe`: ERNIE-4.5-21B-A3B, 300B-A47B.
//!
//! Grouped-query attention with neighbours as RoPE's pairs; a softmax router with a correction bias
//! for the choice, shared experts; dense layers before and after the MoE layers. Sources: Baidu,
//! "ERNIE 4.5 Technical Report", 2025; the published `config.json`s; transformers,
//! `modeling_ernie4_5_moe.py`.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["ernie4_5_moe"],
        checkpoints: "ERNIE-4.5-21B-A3B, 300B-A47B",
        special: "softmax router with a correction",
        checked: "transformers",
    }],
    // Source: huggingface.co/baidu/ERNIE-4.5-21B-A3B-PT, config.json; transformers,
    // configuration_ernie4_5_moe.py.
    presets: &[Preset {
        name: "ernie-4.5-21b-a3b",
        description: "ERNIE-4.5-21B-A3B: 28 layers of attention, 1 dense, 64 experts, 6 per token; \
             12 GB",
        sizes: PresetSizes { parameters: 21.8, active: 3.35, expert_mb: 6.64 },
        config: published!("ernie4_5_moe/ernie-4.5-21b-a3b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct ErnieMoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    moe_layer_start_index: Option<usize>,
    /// The last layer that may have experts; `-1` for the last of all.
    moe_layer_end_index: Option<isize>,
    moe_layer_interval: Option<usize>,
    moe_gate: Option<String>,
    moe_gate_act: Option<String>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: ErnieMoeConfig = parse_config(source)?;
    Require(source).one_of("moe_gate", config.moe_gate.as_deref(), &["topk"])?;
    Require(source).one_of("moe_gate_act", config.moe_gate_act.as_deref(), &["softmax"])?;
    let (body, rope) = (&config.body, RopeStyle::Whole(RopePairs::Interleaved));
    let style = GqaStyle { rope, ..GqaStyle::default() };
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = config.gqa.attention(&layer.child("self_attn"), body.hidden_size, style)?;
        let feed_forward = feed_forward(&config, &layer.child("mlp"), i)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn feed_forward(
    config: &ErnieMoeConfig,
    mlp: &Scope<'_>,
    layer: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let (require, hidden) = (Require(mlp.source), config.body.hidden_size);
    let (start, every) = (config.moe_layer_start_index, config.moe_layer_interval.unwrap_or(1));
    let start = require.named("moe_layer_start_index", start, "which layers have experts")?;
    require.sizes(&[("moe_layer_interval", every)])?;
    // A negative index, which is no `usize`, ends nothing.
    let end = config.moe_layer_end_index.and_then(|end| usize::try_from(end).ok());
    let is_sparse =
        layer >= start && end.is_none_or(|end| layer <= end) && (layer + 1).is_multiple_of(every);
    if !is_sparse {
        return Ok(config.moe.dense(mlp, hidden)?.into());
    }
    // MLX's export lacks the bias.
    let correction = "moe_statics.e_score_correction_bias";
    let style = MoeStyle {
        correction: mlp.has(correction).then_some(correction),
        scoring: Scoring::Softmax,
        ..MoeStyle::default()
    };
    Ok(config.moe.moe(&style, mlp, hidden)?.into())
}
