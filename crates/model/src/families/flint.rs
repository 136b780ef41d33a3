//! `flint`: Flint of RecursiveSI.
//!
//! Sliding-window layers with RoPE and full NoPE layers between, all with sinks and QK-norm; the
//! first layers dense; a sigmoid router, mostly without correction, beside a shared expert without
//! a gate. Sources: transformers, `modeling_flint.py`; llama.cpp, `flint.cpp`.

mod gguf;

use super::prelude::*;

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["flint"],
        checkpoints: "Flint-40B-A2.5B",
        special: "sliding window, sinks, NoPE in full layers",
        checked: "transformers, mlx-vlm, llama.cpp",
    }],
    layer_types: SLIDING,
    harmless_keys: &["use_sliding_window"],
    // The sizes of the defaults of transformers, configuration_flint.py; the published config.json
    // was not seen.
    presets: &[Preset {
        name: "flint",
        description: "Flint: 49 layers, 3 of 4 sliding, 2 dense, 256 experts, 6 per token; 22 GB",
        sizes: PresetSizes { parameters: 39.8, active: 2.5, expert_mb: 1.77 },
        config: published!("flint/flint.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct FlintConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
    /// The dense layers: the first ones.
    mlp_only_layers: Option<Vec<usize>>,
    decoder_sparse_step: Option<usize>,
    /// The layers of full attention.
    no_rope_layer_indices: Option<Vec<usize>>,
    softmax_type: Option<String>,
}

fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: FlintConfig = parse_config(source)?;
    let require = Require(source);
    require.one_of("softmax_type", config.softmax_type.as_deref(), &["learnable"])?;
    let step = config.decoder_sparse_step.unwrap_or(1);
    require.that(step == 1, || format!("\"decoder_sparse_step\" is {step}: expected 1"))?;
    if config.moe.first_k_dense_replace.is_none() {
        let (key, purpose) = ("mlp_only_layers", "which layers are dense");
        let dense = require.named(key, config.mlp_only_layers.as_ref(), purpose)?;
        require.that(dense.iter().enumerate().all(|(i, layer)| i == *layer), || {
            format!("\"{key}\" is {dense:?}: expected the first layers in order")
        })?;
        config.moe.first_k_dense_replace = Some(dense.len());
    }
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, i, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        // Published checkpoints have no correction, but mlx-vlm's export adds one of zeros.
        let corrections = ["expert_bias", "gate.expert_bias", "gate.e_score_correction_bias"];
        let style = MoeStyle {
            correction: corrections.into_iter().find(|name| mlp.has(name)),
            shared: "shared_expert",
            ..MoeStyle::default()
        };
        let mut part = config.moe.feed_forward_with(&style, &mlp, i, body.hidden_size)?;
        if let FeedForwardBlueprint::Moe(moe) = &mut part {
            // The weight of a single expert, too.
            moe.router.normalize = config.moe.norm_topk_prob.unwrap_or(true);
        }
        body.layer(layer, attention, part)
    })
}

fn attention(config: &FlintConfig, i: usize, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let window = config.windows.of(source, i)?;
    let has_rope = config.no_rope_layer_indices.as_ref().is_none_or(|list| !list.contains(&i));
    // llama.cpp reads the list, transformers the types.
    let agrees = config.no_rope_layer_indices.is_none() || has_rope == window.is_some();
    Require(source).that(agrees, || {
        format!("layer {i} differs between \"layer_types\" and \"no_rope_layer_indices\"")
    })?;
    let rope = RopeStyle::whole_if(window.is_some(), RopePairs::Halves);
    let style = GqaStyle { window, rope, qk_norm: QkNorm::PER_HEAD };
    let shape = config.gqa.heads.shape(source, hidden)?;
    Ok(GqaBlueprint {
        sinks: Some(attention.vector("softmax_offset", shape.heads)?),
        ..config.gqa.attention(attention, hidden, style)?
    })
}
