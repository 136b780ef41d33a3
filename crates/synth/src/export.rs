//! Exports of mlx-lm: prefixes, optional tensors, quantization and magnitudes of an architecture's
//! checkpoints.

use moeflux_model::blueprint::{Blueprint, RouterBlueprint};
use serde_json::Value;

use super::module::WeightQuant;

/// A key that is not written: whether the model has its head for multi-token prediction.
pub(super) const HEAD: &str = "synth_head";

/// Mean squares that the first layer adds to the residual stream, without the lead. Measured, or
/// within a third of a measured value. Layer `l` adds them divided by `l + 1`, so that the stream
/// of a deep model neither explodes nor loses the lead.
#[derive(Clone, Copy)]
pub(super) struct Growth {
    /// By a mixer, if its input had no lead (its norm removes the lead).
    pub(super) mixer: f32,
    pub(super) experts: f32,
}

/// Linear layers that have biases.
#[derive(Clone, Copy)]
enum LinearBiases {
    No,
    /// Projections to queries, keys and values.
    Attention,
    /// The same, if `attention_bias` is set.
    AttentionIfSet,
    /// All and LayerNorms, but no routers and experts.
    NoExperts,
    All,
}

/// Properties of the exports of some architectures.
pub(super) struct Export {
    model_types: &'static [&'static str],
    /// Prefix of the model and of `lm_head`.
    prefix: &'static str,
    /// Module of the layers.
    model: &'static str,
    /// Module of the embedding in that.
    embedding: &'static str,
    biases: LinearBiases,
    pub(super) growth: Growth,
    /// Whether the weights of `v_proj` apply to the lead. The output of attention then has a part
    /// that all tokens share, which dense layers before few experts would amplify.
    pub(super) values_have_lead: bool,
    /// Quantization of routed experts.
    pub(super) experts: WeightQuant,
    /// Quantization of routers and of the gates of shared experts.
    pub(super) routers: WeightQuant,
    /// Quantization of all other matrices.
    pub(super) others: WeightQuant,
    /// Quantization of the embedding and of the head, if it differs from `others`.
    pub(super) vocab: Option<WeightQuant>,
    /// Quantization of `o_proj` and of the experts' `down_proj`, if it differs from the above.
    pub(super) outputs: Option<WeightQuant>,
}

/// Export of an architecture that has no entry in [`EXPORTS`].
const COMMON: Export = Export {
    model_types: &[],
    prefix: "",
    model: "model",
    embedding: "embed_tokens",
    biases: LinearBiases::No,
    growth: Growth { mixer: 0.39, experts: 0.07 },
    values_have_lead: true,
    experts: WeightQuant::Affine(4),
    routers: WeightQuant::Affine(8),
    others: WeightQuant::Affine(4),
    vocab: None,
    outputs: None,
};

/// Export of a model without an entry in [`EXPORTS`] whose routers are modules with a correction
/// bias, beside shared experts. mlx-lm has such a router as a plain matrix, not a linear layer, and
/// does not quantize it.
const GROUPED: Export =
    Export { growth: Growth { mixer: 0.39, experts: 0.4 }, routers: WeightQuant::No, ..COMMON };

/// Exports that differ from [`COMMON`] and [`GROUPED`].
const EXPORTS: &[Export] = &[
    Export {
        model_types: &["qwen2_moe"],
        biases: LinearBiases::Attention,
        // As qwen3_next's, less the normalization of a token's weights.
        growth: Growth { mixer: 0.39, experts: 0.1 },
        // mlx-lm quantizes it like any other matrix.
        routers: WeightQuant::Affine(4),
        ..COMMON
    },
    Export {
        model_types: &["qwen3_5_moe"],
        prefix: "language_model.",
        growth: Growth { mixer: 0.24, experts: 0.15 },
        ..COMMON
    },
    Export { model_types: &["qwen3_vl_moe"], prefix: "language_model.", ..COMMON },
    Export { model_types: &["qwen3_omni_moe"], prefix: "thinker.language_model.", ..COMMON },
    Export {
        model_types: &["qwen3_next"],
        growth: Growth { mixer: 0.24, experts: 0.15 },
        ..COMMON
    },
    Export {
        model_types: &["bailing_hybrid"],
        embedding: "word_embeddings",
        // As that of deepseek_v3.
        growth: Growth { mixer: 0.3, experts: 0.65 },
        // mlx-lm has the router as a plain matrix.
        routers: WeightQuant::No,
        ..COMMON
    },
    Export {
        model_types: &["deepseek_v4"],
        // No module is above the embedding.
        embedding: "",
        // As that of deepseek_v3.
        growth: Growth { mixer: 0.3, experts: 0.65 },
        routers: WeightQuant::No,
        ..COMMON
    },
    Export {
        model_types: &["kimi_linear"],
        // As that of deepseek_v3; the router is a linear layer.
        growth: Growth { mixer: 0.3, experts: 0.65 },
        ..COMMON
    },
    Export {
        model_types: &["bailing_moe", "bailing_moe_v2"],
        embedding: "word_embeddings",
        // The shared experts are not gated.
        growth: Growth { mixer: 0.39, experts: 0.4 },
        ..COMMON
    },
    Export {
        model_types: &["sarvam_moe"],
        embedding: "word_embeddings",
        // As GROUPED's; its router is a linear layer.
        growth: GROUPED.growth,
        ..COMMON
    },
    Export {
        model_types: &["cohere2_moe"],
        // Four shared experts; shared and routed ones are halved.
        growth: Growth { mixer: 0.39, experts: 0.4 },
        // The norm that the router shares with attention keeps the lead.
        values_have_lead: false,
        ..COMMON
    },
    Export {
        model_types: &["deepseek_v2"],
        growth: Growth { mixer: 0.4, experts: 0.3 },
        ..GROUPED
    },
    Export {
        model_types: &[
            "axk1",
            "deepseek_v3",
            "deepseek_v32",
            "exaone_moe",
            "glm_moe_dsa",
            "hy_v3",
            "kimi_k2",
            "kimi_k25",
            "sarvam_mla",
        ],
        // The shared expert is not gated, and the scaling factor enters squared.
        growth: Growth { mixer: 0.4, experts: 0.65 },
        ..GROUPED
    },
    // Their routers are linear layers, unlike those of GROUPED.
    Export { model_types: &["ernie4_5_moe", "hunyuan_v1_moe"], growth: GROUPED.growth, ..COMMON },
    Export {
        model_types: &["mixtral"],
        // A token has few experts.
        growth: Growth { mixer: 0.39, experts: 0.3 },
        ..COMMON
    },
    Export {
        model_types: &["phimoe"],
        biases: LinearBiases::NoExperts,
        // A token has few experts, and their weights are not normalized.
        growth: Growth { mixer: 0.39, experts: 0.6 },
        ..COMMON
    },
    Export { model_types: &["glm4_moe"], biases: LinearBiases::AttentionIfSet, ..GROUPED },
    Export {
        model_types: &["laguna", "step3p5"],
        // The shared expert is not gated.
        growth: Growth { mixer: 0.39, experts: 0.4 },
        ..COMMON
    },
    Export { model_types: &["afmoe"], growth: Growth { mixer: 0.3, experts: 0.3 }, ..COMMON },
    Export {
        model_types: &["minimax_m3", "minimax_m3_vl"],
        prefix: "language_model.",
        // The shared expert is not gated, and the scaling factor enters squared.
        growth: Growth { mixer: 0.39, experts: 1.7 },
        values_have_lead: false,
        ..COMMON
    },
    Export {
        model_types: &["gpt_oss"],
        biases: LinearBiases::All,
        growth: Growth { mixer: 0.39, experts: 0.5 },
        experts: WeightQuant::Mxfp4,
        others: WeightQuant::Affine(8),
        ..COMMON
    },
    Export {
        model_types: &["flex_olmo"],
        // A norm after attention would amplify what all tokens share.
        growth: Growth { mixer: 1.0, experts: 1.0 },
        values_have_lead: false,
        ..COMMON
    },
    Export {
        model_types: &["flint"],
        prefix: "language_model.",
        // The shared expert is not gated.
        growth: Growth { mixer: 0.39, experts: 0.4 },
        ..COMMON
    },
    Export {
        model_types: &["kolibri1"],
        prefix: "language_model.",
        // As afmoe's, with as many norms.
        growth: Growth { mixer: 0.3, experts: 0.3 },
        routers: WeightQuant::No,
        vocab: Some(WeightQuant::No),
        ..COMMON
    },
    Export {
        model_types: &["granitemoe"],
        // Times the square of `residual_multiplier`, 0.22.
        growth: Growth { mixer: 0.02, experts: 0.003 },
        outputs: Some(WeightQuant::Affine(8)),
        ..COMMON
    },
    Export {
        model_types: &["granitemoehybrid"],
        // As that of granitemoe, with a shared expert; the gated norm of a mixer is the last.
        growth: Growth { mixer: 0.04, experts: 0.02 },
        ..COMMON
    },
    Export {
        model_types: &["nemotron_h"],
        model: "backbone",
        embedding: "embeddings",
        // A squared ReLU, and the scaling factor enters squared.
        growth: Growth { mixer: 0.9, experts: 3.0 },
        ..GROUPED
    },
    Export {
        model_types: &["gemma4"],
        prefix: "language_model.",
        growth: Growth { mixer: 0.3, experts: 0.3 },
        ..COMMON
    },
];

impl Export {
    /// The export of a `model_type`.
    pub(super) fn of(model_type: &str) -> &'static Self {
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        EXPORTS.iter().find(|e| e.model_types.contains(&plain)).unwrap_or(&COMMON)
    }

    /// This export, or [`GROUPED`] if it is [`COMMON`] and a router has its correction bias as a
    /// tensor of the module.
    pub(super) fn for_routers(&'static self, blueprint: &Blueprint) -> &'static Self {
        let is_module = |router: &RouterBlueprint| {
            let bias = format!("{}.e_score_correction_bias", router.weight.weight.name);
            router.correction.as_ref().is_some_and(|correction| correction.name == bias)
        };
        let is_common = self.model_types.is_empty();
        if is_common && blueprint.moe_layers().any(|(_, moe)| is_module(&moe.router)) {
            &GROUPED
        } else {
            self
        }
    }

    fn is_granite_hybrid(&self) -> bool {
        self.model_types.contains(&"granitemoehybrid")
    }

    /// Whether the export has a tensor that a model may lack, or that other layouts name
    /// differently. `text` is the language model's config.
    pub(super) fn has(&self, text: &Value, tensor: &str) -> bool {
        let embeddings = [".embed_tokens.weight", ".word_embeddings.weight", ".embeddings.weight"];
        if embeddings.iter().any(|embedding| tensor.ends_with(embedding)) {
            return tensor == format!("{}{}.{}.weight", self.prefix, self.model, self.embedding);
        }
        // Only a config that ties the embeddings asks for it: such an export has none.
        if tensor.ends_with("lm_head.weight") {
            return false;
        }
        // Of heads, whose names do not say whether a config has one: see `HEAD`.
        if tensor == "mtp.fc.weight" {
            return text[HEAD] == true;
        }
        if tensor.ends_with(".eh_proj.weight") {
            return text[HEAD] == true && text["num_nextn_predict_layers"].as_u64() > Some(0);
        }
        if let Some(linear) = tensor.strip_suffix(".bias") {
            let is_attention = ["q_proj", "k_proj", "v_proj"].iter().any(|p| linear.ends_with(p));
            return match self.biases {
                LinearBiases::No => false,
                LinearBiases::Attention => is_attention,
                LinearBiases::AttentionIfSet => is_attention && text["attention_bias"] == true,
                LinearBiases::NoExperts => !linear.contains(".block_sparse_moe."),
                LinearBiases::All => true,
            };
        }
        // Experts are stacked: neither fused nor one tensor each, nor beside the MLP. Shared ones
        // are there where the config names them.
        !tensor.ends_with(".gate_up_proj")
            && !tensor.ends_with(".input_linear.weight")
            && !tensor.contains(".moe.")
            && !tensor.contains(".experts.0.")
            && !tensor.contains(".shared_expert")
            // Granite has it in one matrix with `up_proj`.
            && (!tensor.ends_with(".shared_mlp.gate_proj.weight") || !self.is_granite_hybrid())
            // mlx-lm drops it.
            && !tensor.contains(".moe_statics.")
            // Names of an MLP on the Hub.
            && !tensor.ends_with(".feed_forward.w1.weight")
    }
}
