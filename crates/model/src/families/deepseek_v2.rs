//! `deepseek_v2`: DeepSeek-V2, V2.5, V2-Lite, Coder-V2.
//!
//! The attention of `deepseek_v3`; a softmax router without correction; group-limited top-k, where
//! a group has the score of its best expert. Sources: DeepSeek-AI, "DeepSeek-V2", 2024; the
//! published `config.json`s and `modeling_deepseek.py`.

use moeflux_ops::GroupScore;

use super::{
    deepseek_v3::{DeepseekV3Config, build},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["deepseek_v2"],
        checkpoints: "DeepSeek-V2, V2.5, V2-Lite, Coder-V2",
        special: "latent attention, YaRN, group-limited top-k by best experts",
        checked: "transformers",
    }],
    presets: &[
        // The model of huggingface.co/deepseek-ai/DeepSeek-V2-Lite, not compared with its
        // config.json.
        Preset {
            name: "deepseek-v2-lite",
            description: "DeepSeek-V2-Lite: 27 layers of latent attention, 1 dense, 64 experts, 6 \
                 per token; 9 GB",
            sizes: PresetSizes { parameters: 15.7, active: 2.4, expert_mb: 4.87 },
            config: published!("deepseek_v2/deepseek-v2-lite.json"),
        },
        // The model of huggingface.co/deepseek-ai/DeepSeek-V2-Chat, not compared with its
        // config.json. mlx-lm leaves `kv_b_proj` whole.
        Preset {
            name: "deepseek-v2",
            description: "DeepSeek-V2: 60 layers of latent attention, 1 dense, 160 experts, 6 per \
                 token; 133 GB",
            sizes: PresetSizes { parameters: 235.7, active: 20.9, expert_mb: 13.27 },
            config: published!("deepseek_v2/deepseek-v2.json"),
        },
    ],
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.style = MoeStyle {
        correction: None,
        scoring: Scoring::Softmax,
        group_score: GroupScore::Best,
        ..MoeStyle::default()
    };
    // The authors' code scales the weights only where it does not normalize them.
    if *config.moe.norm_topk_prob.get_or_insert(false) {
        config.moe.routed_scaling_factor = None;
    }
    build(source, &config, &|_, _| Ok(None))
}
