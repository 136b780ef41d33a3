//! `lfm2_moe`: LFM2-8B-A1B and LFM2-24B-A2B of Liquid AI.
//!
//! Gated short convolutions in most layers, grouped-query attention with QK-norm in the others; the
//! feed-forward parts of DeepSeek-V3 without shared experts. Sources: Liquid AI, "LFM2 Technical
//! Report", 2025; the published `config.json`; transformers, `modeling_lfm2_moe.py`; mlx-lm,
//! `lfm2_moe.py`.

mod gguf;

use super::prelude::*;
use crate::{
    blueprint::ShortConvBlueprint,
    parts::gqa::{GqaProjections, gqa_of},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["lfm2_moe"],
        checkpoints: "LFM2-8B-A1B, LFM2-24B-A2B",
        special: "gated short convolutions, attention in every fourth layer",
        checked: "transformers, mlx-lm",
    }],
    layer_types: &["conv", "full_attention"],
    // The model of huggingface.co/LiquidAI/LFM2-8B-A1B, not compared with its config.json.
    presets: &[Preset {
        name: "lfm2-8b-a1b",
        description: "LFM2-8B-A1B: 24 layers, 18 short convolutions, 2 dense, 32 experts, 4 per \
             token; 5 GB",
        sizes: PresetSizes { parameters: 8.34, active: 1.56, expert_mb: 6.19 },
        config: published!("lfm2_moe/lfm2-8b-a1b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Lfm2MoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    layer_types: Option<Vec<String>>,
    /// Indices of the layers with attention, in configs without `layer_types`.
    full_attn_idxs: Option<Vec<usize>>,
    #[serde(rename = "conv_L_cache")]
    conv_taps: usize,
    #[serde(default)]
    conv_bias: bool,
    #[serde(default = "yes")]
    use_expert_bias: bool,
}

const fn yes() -> bool {
    true
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Lfm2MoeConfig = parse_config(source)?;
    let require = Require(source);
    require.unset(&[("conv_bias", config.conv_bias)])?;
    require.sizes(&[("conv_L_cache", config.conv_taps)])?;
    require.that(config.conv_taps > 1, || "\"conv_L_cache\" is 1: 2 or more are needed".into())?;
    let body = &mut config.body;
    body.tie_word_embeddings.get_or_insert(true);
    require.layers("layer_types", config.layer_types.as_ref(), body.num_hidden_layers)?;
    let (config, body) = (&config, &config.body);
    body.blueprint_with("embedding_norm", source, NormWeights::Plain, |i, layer| {
        let mixer: MixerBlueprint = match config.has_attention(source, i)? {
            true => config.attention(&layer.child("self_attn"))?.into(),
            false => config.short_conv(&layer.child("conv"))?.into(),
        };
        let feed_forward = config.feed_forward(&layer.child("feed_forward"), i)?;
        let norm = |name| layer.stream_norm(name, body.hidden_size);
        Ok(LayerBlueprint::new([
            SubBlockBlueprint::new(norm("operator_norm")?, mixer),
            SubBlockBlueprint::new(norm("ffn_norm")?, feed_forward),
        ]))
    })
}

impl Lfm2MoeConfig {
    /// Whether layer `i` has attention instead of a convolution.
    fn has_attention(&self, source: &dyn TensorSource, i: usize) -> Result<bool, Error> {
        match (&self.layer_types, &self.full_attn_idxs) {
            (Some(types), _) => Ok(types.get(i).is_some_and(|name| name == "full_attention")),
            (None, Some(layers)) => Ok(layers.contains(&i)),
            (None, None) => {
                let problem =
                    "it has no \"layer_types\", which decides which layers have attention";
                Err(config_error(source, problem))
            }
        }
    }

    fn attention(&self, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
        let (source, hidden) = (attention.source, self.body.hidden_size);
        let shape = self.gqa.heads.shape(source, hidden)?;
        let rope = RopeStyle::Whole(RopePairs::Halves);
        let rope = self.gqa.rope.of(source, shape.head_dim, rope)?;
        let qk_norm = QkNorm { names: ["q_layernorm", "k_layernorm"], ..QkNorm::PER_HEAD };
        let params = GqaParams { hidden, shape, rope, qk_norm };
        gqa_of(attention, params, "out_proj", || GqaProjections::new(attention, hidden, &shape))
    }

    fn short_conv(&self, conv: &Scope<'_>) -> Result<ShortConvBlueprint, Error> {
        let (hidden, taps) = (self.body.hidden_size, self.conv_taps);
        let in_proj = conv.matrix("in_proj", 3 * hidden, hidden)?;
        let part = |i: usize| {
            let rows = i * hidden..(i + 1) * hidden;
            conv.source.gather_rows(&in_proj, std::slice::from_ref(&rows))
        };
        Ok(ShortConvBlueprint {
            taps,
            b_proj: part(0)?,
            c_proj: part(1)?,
            x_proj: part(2)?,
            conv: conv.array("conv.weight", &[hidden, taps, 1])?,
            out_proj: conv.matrix("out_proj", hidden, hidden)?,
        })
    }

    fn feed_forward(&self, mlp: &Scope<'_>, i: usize) -> Result<FeedForwardBlueprint, Error> {
        let hidden = self.body.hidden_size;
        if !self.moe.is_sparse(mlp.source, i)? {
            return Ok(match mlp.has_matrix("w1") {
                true => self.moe.dense_of(W_PROJECTIONS, mlp, hidden)?,
                // In MLX's export.
                false => self.moe.dense(mlp, hidden)?,
            }
            .into());
        }
        let style = MoeStyle {
            correction: self.use_expert_bias.then_some("expert_bias"),
            projections: W_PROJECTIONS,
            ..MoeStyle::default()
        };
        Ok(self.moe.moe(&style, mlp, hidden)?.into())
    }
}
