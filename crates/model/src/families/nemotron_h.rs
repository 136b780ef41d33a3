//! `nemotron_h`: Nemotron-3 Nano, Super and Ultra.
//!
//! Each layer is one part under a norm: a Mamba-2 mixer, grouped-query attention with NoPE, routed
//! experts or an MLP. Experts and MLPs have no gate; the routed experts of some models read and
//! write a latent. Sources: NVIDIA, "Nemotron 3", 2025; the published `config.json`; transformers,
//! `modeling_nemotron_h.py`.

mod gguf;

use moeflux_ops::StepLimits;
use serde_json::Value;

use super::prelude::*;
use crate::{
    blueprint::Mamba2Shape,
    parts::{
        gqa::Heads,
        mamba2::{Mamba2Keys, Mamba2Params, step_limits},
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["nemotron_h"],
        checkpoints: "Nemotron-3-Nano-30B-A3B, Super, Ultra",
        special: "Mamba-2, attention, experts or an MLP in each layer; squared ReLU without a gate, \
                 latent experts",
        checked: "transformers, mlx-lm",
    }],
    layer_types: &["linear_attention", "full_attention", "moe", "mlp"],
    // The model of huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, not compared with its
    // config.json.
    presets: &[Preset {
        name: "nemotron-3-nano",
        description: "Nemotron-3-Nano: 52 layers of one part, 23 Mamba-2, 6 attention, 23 of 128 \
             experts, 6 per token; 18 GB",
        sizes: PresetSizes { parameters: 31.6, active: 3.2, expert_mb: 5.61 },
        config: published!("nemotron_h/nemotron-3-nano.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

/// Least time step where the config names none: transformers' default.
const TIME_STEP_MIN: f32 = 0.001;

#[derive(Deserialize)]
struct NemotronHConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    moe: GroupedMoe,
    /// A letter for each layer, or the name of its part in one of the lists below.
    hybrid_override_pattern: Option<String>,
    layers_block_type: Option<Vec<String>>,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    mamba_num_heads: usize,
    #[serde(default)]
    mamba_head_dim: usize,
    #[serde(default)]
    n_groups: usize,
    #[serde(default)]
    ssm_state_size: usize,
    #[serde(default)]
    conv_kernel: usize,
    use_conv_bias: Option<bool>,
    time_step_limit: Option<Vec<Value>>,
    time_step_min: Option<f32>,
    moe_shared_expert_intermediate_size: Option<usize>,
    moe_latent_size: Option<usize>,
    mamba_proj_bias: Option<bool>,
    mamba_hidden_act: Option<String>,
    mlp_hidden_act: Option<String>,
    sliding_window: Option<Value>,
}

/// LayerPart of a layer.
#[derive(Clone, Copy)]
enum LayerPart {
    Mamba2,
    Attention,
    Moe,
    Mlp,
}

impl LayerPart {
    /// The part that a letter of `hybrid_override_pattern` or a name in a list stands for.
    fn by_name(name: &str) -> Option<Self> {
        match name {
            "M" | "mamba" | "linear_attention" => Some(Self::Mamba2),
            "*" | "attention" | "full_attention" => Some(Self::Attention),
            "E" | "moe" => Some(Self::Moe),
            "-" | "mlp" => Some(Self::Mlp),
            _ => None,
        }
    }
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: NemotronHConfig = parse_config(source)?;
    config.check(source)?;
    let parts = config.parts(source)?;
    config.body.num_hidden_layers = parts.len();
    config.moe.shared_expert_intermediate_size = config.moe_shared_expert_intermediate_size;
    let mamba2 = match parts.iter().any(|part| matches!(part, LayerPart::Mamba2)) {
        true => Some(config.mamba2(source)?),
        false => None,
    };
    config.body.blueprint_with("norm_f", source, NormWeights::Plain, |i, layer| {
        let mixer = layer.child("mixer");
        let body = match (parts[i], &mamba2) {
            (LayerPart::Mamba2, Some(mamba2)) => mixed(mamba2.mixer(&mixer)?),
            (LayerPart::Attention | LayerPart::Mamba2, _) => mixed(config.attention(&mixer)?),
            (LayerPart::Moe, _) => BodyBlueprint::FeedForward(config.experts(&mixer)?),
            (LayerPart::Mlp, _) => BodyBlueprint::FeedForward(config.mlp(&mixer)?),
        };
        let norm = layer.stream_norm("norm", config.body.hidden_size)?;
        Ok(LayerBlueprint::new([SubBlockBlueprint::new(norm, body)]))
    })
}

fn mixed(mixer: impl Into<MixerBlueprint>) -> BodyBlueprint {
    BodyBlueprint::Mixer(mixer.into())
}

impl NemotronHConfig {
    fn check(&self, source: &dyn TensorSource) -> Result<(), Error> {
        for (key, is_neutral) in [
            ("mamba_proj_bias", self.mamba_proj_bias != Some(true)),
            ("sliding_window", self.sliding_window.is_none()),
            ("mamba_hidden_act", self.mamba_hidden_act.as_deref().is_none_or(|act| act == "silu")),
            ("mlp_hidden_act", self.mlp_hidden_act.as_deref().is_none_or(|act| act == "relu2")),
        ] {
            Require(source)
                .that(is_neutral, || format!("\"{key}\" has a value that is not supported"))?;
        }
        Ok(())
    }

    /// The part of each layer.
    fn parts(&self, source: &dyn TensorSource) -> Result<Vec<LayerPart>, Error> {
        let lists = [
            ("layers_block_type", self.layers_block_type.as_ref()),
            ("layer_types", self.layer_types.as_ref()),
        ];
        let pattern = "hybrid_override_pattern";
        let letters = self.hybrid_override_pattern.iter();
        let letters = letters.map(|text| (pattern, text.chars().map(String::from).collect()));
        let lists = lists.into_iter().filter_map(|(key, list)| Some((key, list?.clone())));
        let named: Option<(&str, Vec<String>)> = letters.chain(lists).next();
        let require = Require(source);
        let (key, names) = require.named(pattern, named, "the part of each layer")?;
        // transformers ignores the number of layers, and does not save it.
        let layers = self.body.num_hidden_layers;
        require.that(layers == names.len() || layers == 0, || {
            format!("\"num_hidden_layers\" is {layers}, but \"{key}\" names {}", names.len())
        })?;
        let part = |(layer, name): (usize, &String)| {
            let problem = || format!("\"{key}\" has {name:?} for layer {layer}, an unknown part");
            LayerPart::by_name(name).ok_or_else(|| config_error(source, problem()))
        };
        names.iter().enumerate().map(part).collect()
    }

    /// Checked parameters of the Mamba-2 mixers.
    fn mamba2(&self, source: &dyn TensorSource) -> Result<Mamba2Params, Error> {
        let keys = Mamba2Keys {
            heads: "mamba_num_heads",
            head_width: "mamba_head_dim",
            groups: "n_groups",
            state_width: "ssm_state_size",
            conv_width: "conv_kernel",
        };
        let params = Mamba2Params {
            hidden: self.body.hidden_size,
            shape: Mamba2Shape {
                heads: self.mamba_num_heads,
                head_width: self.mamba_head_dim,
                groups: self.n_groups,
                state_width: self.ssm_state_size,
                conv_width: self.conv_kernel,
            },
            conv_bias: self.use_conv_bias.unwrap_or(true),
            limits: self.step_limits(source)?,
            scale: 1.0,
        };
        params.check(&Require(source), &keys)?;
        Ok(params)
    }

    /// Bounds of the time steps: `time_step_limit`, and not below `time_step_min`, as in
    /// transformers.
    fn step_limits(&self, source: &dyn TensorSource) -> Result<StepLimits, Error> {
        let limits = step_limits(source, self.time_step_limit.as_deref())?;
        let default = if self.time_step_limit.is_none() { TIME_STEP_MIN } else { limits.min };
        let min = self.time_step_min.unwrap_or(default);
        Require(source).that(min.is_finite() && min >= 0.0 && min <= limits.max, || {
            format!("\"time_step_min\" is {min}: a small number is needed")
        })?;
        Ok(StepLimits { min: min.max(limits.min), ..limits })
    }

    fn attention(&self, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
        let hidden = self.body.hidden_size;
        let shape = self.heads.shape(attention.source, hidden)?;
        let (rope, qk_norm) = (RopeShape::NONE, QkNorm::NONE);
        gqa(attention, GqaParams { hidden, shape, rope, qk_norm })
    }

    fn experts(&self, moe: &Scope<'_>) -> Result<FeedForwardBlueprint, Error> {
        if let Some(latent) = self.moe_latent_size {
            Require(moe.source).sizes(&[("moe_latent_size", latent)])?;
        }
        let style = MoeStyle {
            activation: Activation::Relu2,
            latent: self.moe_latent_size,
            ..MoeStyle::default()
        };
        Ok(self.moe.moe(&style, moe, self.body.hidden_size)?.into())
    }

    fn mlp(&self, mlp: &Scope<'_>) -> Result<FeedForwardBlueprint, Error> {
        let inner = self.moe.intermediate_size;
        Require(mlp.source).sizes(&[("intermediate_size", inner)])?;
        Ok(mlp.mlp_without_gate(self.body.hidden_size, inner)?.into())
    }
}
