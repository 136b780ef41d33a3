//! Keys and names of tensors in GGUF.

use serde_json::Value;

use crate::parts::gguf::{architecture::GgufVector, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "phimoe",
    models: "Phi-3.5-MoE",
    model_types: &["phimoe"],
    keys: &[MODEL, HEADS, EXPERT_AS_MLP, LOCAL_EXPERTS, KEYS],
    names: &[BLOCK_SPARSE],
    vectors: |config, _| FACTORS.iter().map(|row| row.vector(config)).collect(),
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    // Not in the file: the same in all published models.
    fixed("router_jitter_noise", Fixed::Number(0.01)),
    reads(|keys, config| {
        config.insert("lm_head_bias".into(), keys.has("output.bias").into());
        Ok(())
    }),
    integer("sliding_window", "attention.sliding_window"),
    reads(read_rope),
];

/// Divisors of RoPE's frequencies: in the config and as a tensor.
struct FactorRow {
    config: &'static str,
    gguf: &'static str,
}

/// In the order of files.
const FACTORS: [FactorRow; 2] = [
    FactorRow { config: "long_factor", gguf: "rope_factors_long.weight" },
    FactorRow { config: "short_factor", gguf: "rope_factors_short.weight" },
];

impl FactorRow {
    fn vector(&self, config: &Value) -> GgufVector {
        let all = config["rope_scaling"][self.config].as_array().into_iter().flatten();
        let numbers = all.filter_map(|factor| Some(factor.as_f64()? as f32)).collect();
        GgufVector { name: self.gguf, numbers }
    }
}

fn read_rope(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    // In the published configs, at any length. The file has 1.19, by another formula.
    let scale = 1.243_163_121_016_122;
    let [long, short] = FACTORS;
    if let (Some(short), Some(long)) = (keys.floats(short.gguf)?, keys.floats(long.gguf)?) {
        let scaling = json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "short_mscale": scale,
            "long_mscale": scale,
            "original_max_position_embeddings":
                keys.integer("rope.scaling.original_context_length")?,
        });
        config.insert("rope_scaling".into(), scaling);
    }
    Ok(())
}
