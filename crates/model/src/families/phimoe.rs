//! `phimoe`: Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE.
//!
//! LayerNorms and biases everywhere but in the experts; LongRoPE; a router that weighs each rank
//! among the experts near it. Sources: Microsoft, "GRIN: GRadient-INformed MoE", 2024; the
//! published `config.json`s and `modeling_phimoe.py`.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["phimoe"],
        checkpoints: "Phi-3.5-MoE, Phi-mini-MoE",
        special: "LayerNorm, LongRoPE, SparseMixer",
        checked: "transformers",
    }],
    // The model of huggingface.co/microsoft/Phi-3.5-MoE-instruct, not compared with its
    // config.json: the divisors of RoPE are not the published ones.
    presets: &[Preset {
        name: "phi-3.5-moe",
        description: "Phi-3.5-MoE: 32 layers of attention, 16 experts, 2 per token; 24 GB",
        sizes: PresetSizes { parameters: 41.9, active: 6.5, expert_mb: 44.24 },
        config: published!("phimoe/phi-3.5-moe.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct PhimoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    /// Half of the relative distance within which experts weigh against each other.
    router_jitter_noise: f32,
    sliding_window: Option<usize>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: PhimoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    let (body, hidden, noise) = (&config.body, config.body.hidden_size, config.router_jitter_noise);
    let band = 2.0 * noise;
    Require(source)
        .that(band.is_finite() && band >= 0.0, || format!("\"router_jitter_noise\" is {noise}"))?;
    let window = config.sliding_window.filter(|w| (1..body.max_position_embeddings).contains(w));
    let scoring = Scoring::SparseMixer { band };
    let style = GqaStyle { window, ..GqaStyle::default() };
    body.blueprint(source, NormWeights::Layer, |i, layer| {
        let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
        let moe = layer.child("block_sparse_moe");
        let experts = ExpertTensors { projections: W_PROJECTIONS, ..ExpertTensors::in_block(&moe) };
        let style = SoftmaxStyle { experts, scoring, ..SoftmaxStyle::new(&moe) };
        let feed_forward = config.moe.feed_forward_with(&style, &moe, i, hidden)?;
        body.layer(layer, attention, feed_forward)
    })
}
