//! `granitemoe`: Granite 3.0 and 3.1 MoE, PowerMoE-3B.
//!
//! Grouped-query attention, a softmax router, no shared expert; constant factors on the embedding,
//! the scores, the output of each sub-block and the logits. Sources: IBM, "Granite 3.0 Language
//! Models", 2024; transformers, `modeling_granitemoe.py`, the authors' release.

pub(super) mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[
        ModelRow {
            names: &["granitemoe"],
            checkpoints: "Granite-3.0 and 3.1 1B-A400M, 3B-A800M; PowerMoE-3B",
            special: "factors on embedding, scores, sub-blocks and logits",
            checked: "mlx-lm, transformers",
        },
        ModelRow {
            names: &["granitemoeshared"],
            checkpoints: "Granite MoE with a shared expert",
            special: "the same, a shared expert",
            checked: "transformers",
        },
    ],
    // The model of huggingface.co/ibm-granite/granite-3.1-3b-a800m-instruct, not compared with its
    // config.json.
    presets: &[Preset {
        name: "granite-3.1-3b-a800m",
        description: "Granite-3.1-3B-A800M: 32 layers of attention, 40 experts, 8 per token; 2 GB",
        sizes: PresetSizes { parameters: 3.3, active: 0.88, expert_mb: 1.72 },
        config: published!("granitemoe/granite-3.1-3b-a800m.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
pub(super) struct GraniteMoeConfig {
    #[serde(flatten)]
    pub(super) body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    pub(super) moe: SoftmaxMoe,
    #[serde(default)]
    attention_bias: bool,
    embedding_multiplier: f32,
    /// Replaces `1 / sqrt(head_dim)`.
    attention_multiplier: f32,
    /// Factor on the output of each sub-block.
    pub(super) residual_multiplier: f32,
    /// Divisor of the logits.
    logits_scaling: f32,
    /// Width of the shared expert; 0 without one.
    #[serde(default)]
    pub(super) shared_intermediate_size: usize,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: GraniteMoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    config.moe.ignore_shared();
    config.blueprint(source, |i, layer| {
        let attention = config.attention(&layer.child("self_attn"), true)?;
        let feed_forward = config.feed_forward(layer, i)?;
        config.body.layer(layer, attention, feed_forward)
    })
}

impl GraniteMoeConfig {
    /// The model of some layers, with factors on embedding and logits.
    pub(super) fn blueprint(
        &self,
        source: &dyn TensorSource,
        layer: impl Fn(usize, &Scope<'_>) -> Result<LayerBlueprint, Error>,
    ) -> Result<Blueprint, Error> {
        for (key, factor) in [
            ("embedding_multiplier", self.embedding_multiplier),
            ("attention_multiplier", self.attention_multiplier),
            ("residual_multiplier", self.residual_multiplier),
            ("logits_scaling", self.logits_scaling),
        ] {
            Require(source).factor(key, factor)?;
        }
        let model = self.body.blueprint(source, NormWeights::Plain, layer)?;
        let logit_scale = 1.0 / self.logits_scaling;
        Ok(Blueprint { embed_scale: self.embedding_multiplier, logit_scale, ..model })
    }

    pub(super) fn attention(
        &self,
        attention: &Scope<'_>,
        has_rope: bool,
    ) -> Result<GqaBlueprint, Error> {
        let (source, hidden) = (attention.source, self.body.hidden_size);
        let shape = GqaShape {
            scale: self.attention_multiplier,
            // The output of attention is linear in the values.
            value_scale: self.residual_multiplier,
            ..self.gqa.heads.shape(source, hidden)?
        };
        let rope = RopeStyle::whole_if(has_rope, RopePairs::Halves);
        let rope = self.gqa.rope.of(source, shape.head_dim, rope)?;
        let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::NONE };
        let attention = gqa(attention, params)?;
        Require(source).that(!self.attention_bias && attention.o_proj.bias.is_none(), || {
            "\"attention_bias\" is true: the bias of o_proj would lack a factor".to_owned()
        })?;
        Ok(attention)
    }

    pub(super) fn feed_forward(
        &self,
        layer: &Scope<'_>,
        i: usize,
    ) -> Result<FeedForwardBlueprint, Error> {
        let moe = &layer.child("block_sparse_moe");
        let experts = ExpertTensors {
            fused: moe.clone(),
            fused_names: ["input_linear.weight", "output_linear.weight"],
            ..ExpertTensors::in_block(moe)
        };
        let style = SoftmaxStyle {
            router: "router.layer",
            experts,
            normalize: true,
            scale: self.residual_multiplier,
            ..SoftmaxStyle::new(moe)
        };
        let mut part = self.moe.feed_forward_with(&style, moe, i, self.body.hidden_size)?;
        if let FeedForwardBlueprint::Moe(moe) = &mut part
            && self.shared_intermediate_size > 0
        {
            moe.shared = Some(SharedBlueprint {
                scale: self.residual_multiplier,
                ..SharedBlueprint::new(self.shared_mlp(&layer.child("shared_mlp"))?)
            });
        }
        Ok(part)
    }

    /// Shared expert, its gate and up in one matrix, which GGUF has apart.
    fn shared_mlp(&self, mlp: &Scope<'_>) -> Result<MlpBlueprint, Error> {
        let (hidden, inner) = (self.body.hidden_size, self.shared_intermediate_size);
        if mlp.has_matrix("gate_proj") {
            return mlp.mlp(hidden, inner);
        }
        let input = mlp.matrix("input_linear", 2 * inner, hidden)?;
        let half = |first: usize| {
            let rows = first..first + inner;
            mlp.source.gather_rows(&input, std::slice::from_ref(&rows))
        };
        Ok(MlpBlueprint {
            gate_proj: Some(half(0)?),
            up_proj: half(inner)?,
            down_proj: mlp.matrix("output_linear", hidden, inner)?,
            activation: Activation::SwiGlu,
        })
    }
}
