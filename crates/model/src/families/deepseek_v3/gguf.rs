//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{SIGMOID, SOFTMAX, read_scores, write_scores},
    latent::{LATENT, PROJECTIONS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "deepseek2",
    models: "DeepSeek-V2, V3, R1 and V3.1, Kimi-K2, GLM-4.7-Flash; files before April 2025, too",
    model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2", "kimi_k25", "glm4_moe_lite"],
    keys: &[MODEL, GROUPED_SIZES, ROUTER, LATENT, &[reads(generation)]],
    names: &[PROJECTIONS, SHARED_EXPERTS],
    ..PLAIN
}];

const ROUTER: &[KeyRow] = &[
    group(
        Place::Routers,
        |keys, config| {
            // Files of GLM-4.7-Flash lack the key, as files of DeepSeek-V2 do. The correction of
            // the choice came with the sigmoid.
            let default = if keys.has_like(".exp_probs_b") { SIGMOID } else { SOFTMAX };
            read_scores(keys, config, default)
        },
        write_scores,
    ),
    NORMALIZED,
    ROUTED_SCALE,
];

fn generation(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    if config.get("scoring_func").is_some_and(|name| name == "softmax") {
        let grouped = keys.integer("expert_group_count")?.unwrap_or(1) > 1;
        let method = if grouped { "group_limited_greedy" } else { "greedy" };
        add(config, json!({"model_type": "deepseek_v2", "topk_method": method}));
    }
    Ok(())
}
