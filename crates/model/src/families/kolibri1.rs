//! `kolibri1`: Kolibri-1 of Aleph Alpha.
//!
//! Sliding-window layers with RoPE and full NoPE layers between; QK-norm; norms before and after
//! each part; experts that are chosen by the logit plus a bias and weighed by the sigmoid of the
//! logit, beside a shared expert. Sources: transformers, `modeling_kolibri1.py`; llama.cpp,
//! `kolibri1.cpp`.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["kolibri1"],
        checkpoints: "Kolibri-1-78B-A3.5B",
        special: "sliding window, NoPE in full layers, experts chosen by corrected logits",
        checked: "transformers, mlx-vlm, llama.cpp",
    }],
    layer_types: SLIDING,
    // The sizes of the defaults of transformers, configuration_kolibri1.py; the published
    // config.json was not seen.
    presets: &[Preset {
        name: "kolibri-1",
        description: "Kolibri-1: 50 layers, 4 of 5 sliding, 384 experts, 6 per token; 45 GB",
        sizes: PresetSizes { parameters: 78.3, active: 3.5, expert_mb: 2.21 },
        config: published!("kolibri1/kolibri-1.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Kolibri1Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
}

fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Kolibri1Config = parse_config(source)?;
    // No layer is dense.
    config.moe.first_k_dense_replace = Some(0);
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |i, layer| self::layer(&config, i, layer))
}

fn layer(config: &Kolibri1Config, i: usize, layer: &Scope<'_>) -> Result<LayerBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let window = config.windows.of(layer.source, i)?;
    let rope = RopeStyle::whole_if(window.is_some(), RopePairs::Halves);
    let style = GqaStyle { window, rope, qk_norm: QkNorm::PER_HEAD };
    let attention = config.gqa.attention(&layer.child("self_attn"), hidden, style)?;
    let moe = FeedForwardBlueprint::from(moe(config, layer)?);
    let sub_block = |body: BodyBlueprint, [before, after]: [&str; 2]| -> Result<_, Error> {
        let before = layer.stream_norm(before, hidden)?;
        let post_norm = Some(layer.norm(after, hidden)?);
        Ok(SubBlockBlueprint { post_norm, ..SubBlockBlueprint::new(before, body) })
    };
    Ok(LayerBlueprint::new([
        sub_block(MixerBlueprint::from(attention).into(), ["input_layernorm", "post_attn_norm"])?,
        sub_block(moe.into(), ["post_attention_layernorm", "post_ffn_norm"])?,
    ]))
}

fn moe(config: &Kolibri1Config, layer: &Scope<'_>) -> Result<MoeBlueprint, Error> {
    let style = MoeStyle { correction: None, ..MoeStyle::default() };
    let mut moe = config.moe.moe(&style, &layer.child("mlp"), config.body.hidden_size)?;
    // On the Hub it is in another module than the router.
    let names = ["moe.router.expert_bias", "mlp.gate.e_score_correction_bias"];
    let name = names.into_iter().find(|name| layer.has(name)).unwrap_or(names[0]);
    moe.router.correction = Some(layer.vector(name, moe.experts.count)?);
    moe.router.by_logit = true;
    moe.router.normalize = config.moe.norm_topk_prob.unwrap_or(false);
    Ok(moe)
}
