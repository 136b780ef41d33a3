//! `granitemoehybrid`: Granite 4.0 H Small and Tiny.
//!
//! Mamba-2 or grouped-query attention with NoPE, beside the experts and the constant factors of
//! `granitemoe`, and a shared expert. Sources: transformers, `modeling_granitemoehybrid.py`, the
//! authors' release; the published `config.json`.

mod gguf;

use serde_json::Value;

use super::{granitemoe::GraniteMoeConfig, prelude::*};
use crate::{
    blueprint::Mamba2Shape,
    parts::mamba2::{Mamba2Keys, Mamba2Params, step_limits},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["granitemoehybrid"],
        checkpoints: "Granite-4.0-H-Small and H-Tiny",
        special: "Mamba-2 or NoPE attention, the same factors, a shared expert",
        checked: "transformers, mlx-lm",
    }],
    layer_types: &["mamba", "attention", "linear_attention", "full_attention"],
    presets: &[
        // The model of huggingface.co/ibm-granite/granite-4.0-h-tiny, not compared with its
        // config.json.
        Preset {
            name: "granite-4.0-h-tiny",
            description: "Granite-4.0-H-Tiny: 40 layers, 36 of them Mamba-2, 64 experts, 6 per \
                 token; 4 GB",
            sizes: PresetSizes { parameters: 6.94, active: 1.46, expert_mb: 1.33 },
            config: published!("granitemoehybrid/granite-4.0-h-tiny.json"),
        },
        // The model of huggingface.co/ibm-granite/granite-4.0-h-small, not compared with its
        // config.json.
        Preset {
            name: "granite-4.0-h-small",
            description: "Granite-4.0-H-Small: 40 layers, 36 of them Mamba-2, 72 experts, 10 per \
                 token; 18 GB",
            sizes: PresetSizes { parameters: 32.2, active: 8.8, expert_mb: 5.31 },
            config: published!("granitemoehybrid/granite-4.0-h-small.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct GraniteMoeHybridConfig {
    #[serde(flatten)]
    base: GraniteMoeConfig,
    #[serde(default)]
    layer_types: Vec<String>,
    position_embedding_type: Option<String>,
    #[serde(default)]
    mamba_n_heads: usize,
    /// A number, or `auto`.
    mamba_d_head: Option<Value>,
    #[serde(default)]
    mamba_n_groups: usize,
    #[serde(default)]
    mamba_d_state: usize,
    #[serde(default)]
    mamba_d_conv: usize,
    mamba_expand: Option<usize>,
    mamba_conv_bias: Option<bool>,
    mamba_proj_bias: Option<bool>,
    time_step_limit: Option<Vec<Value>>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: GraniteMoeHybridConfig = parse_config(source)?;
    let require = Require(source);
    require.that(config.base.moe.has_experts(), || {
        "\"num_local_experts\" is 0: Granite 4 without experts is not supported".to_owned()
    })?;
    require.sizes(&[("shared_intermediate_size", config.base.shared_intermediate_size)])?;
    config.base.moe.size_experts_as_mlp();
    config.base.moe.ignore_shared();
    let layers = config.base.body.num_hidden_layers;
    require.layers("layer_types", Some(&config.layer_types), layers)?;
    let mamba = config.mamba(source)?;
    config.base.blueprint(source, |i, layer| {
        let mixer: MixerBlueprint = match config.layer_types.get(i).map(String::as_str) {
            Some("mamba" | "linear_attention") => mamba.mixer(&layer.child("mamba"))?.into(),
            _ => {
                let positions = config.position_embedding_type.as_deref();
                let has_rope = match positions {
                    None | Some("nope") => false,
                    Some("rope") => true,
                    Some(other) => {
                        let problem =
                            format!("the \"position_embedding_type\" {other:?} is unknown");
                        return Err(config_error(source, problem));
                    }
                };
                config.base.attention(&layer.child("self_attn"), has_rope)?.into()
            }
        };
        let feed_forward = config.base.feed_forward(layer, i)?;
        config.base.body.layer(layer, mixer, feed_forward)
    })
}

impl GraniteMoeHybridConfig {
    /// Checked parameters of the Mamba-2 mixers.
    fn mamba(&self, source: &dyn TensorSource) -> Result<Mamba2Params, Error> {
        let (require, hidden) = (Require(source), self.base.body.hidden_size);
        let keys = Mamba2Keys {
            heads: "mamba_n_heads",
            head_width: "mamba_d_head",
            groups: "mamba_n_groups",
            state_width: "mamba_d_state",
            conv_width: "mamba_d_conv",
        };
        let expand = self.mamba_expand.unwrap_or(2);
        require.sizes(&[("hidden_size", hidden), ("mamba_expand", expand)])?;
        let heads = self.mamba_n_heads;
        let head_width = match self.mamba_d_head.as_ref().and_then(Value::as_u64) {
            Some(width) => usize::try_from(width).unwrap_or(0),
            None => expand * hidden / heads.max(1),
        };
        let params = Mamba2Params {
            hidden,
            shape: Mamba2Shape {
                heads,
                head_width,
                groups: self.mamba_n_groups,
                state_width: self.mamba_d_state,
                conv_width: self.mamba_d_conv,
            },
            conv_bias: self.mamba_conv_bias.unwrap_or(true),
            limits: step_limits(source, self.time_step_limit.as_deref())?,
            scale: self.base.residual_multiplier,
        };
        params.check(&require, &keys)?;
        require.that(params.shape.inner() == expand * hidden, || {
            format!(
                "\"mamba_expand\" is {expand}, but {heads} heads of \"mamba_d_head\", \
                 {head_width}, are not {expand} x {hidden}"
            )
        })?;
        require.unset(&[("mamba_proj_bias", self.mamba_proj_bias == Some(true))])?;
        Ok(params)
    }
}
