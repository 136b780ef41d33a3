//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{heads::head_width, model::divided_rope, prelude::*};

/// Models with few experts under the name of the dense ones.
pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "llama",
    models: "Mixtral; dense models are refused",
    model_types: &["mixtral"],
    keys: &[&[reads(check_experts)], MODEL, HEADS, EXPERT_AS_MLP, LOCAL_EXPERTS, KEYS],
    names: &[BLOCK_SPARSE],
    pairs_adjacent: true,
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[reads(|keys, config| {
    let scaling = divided_rope(keys, head_width(keys)? / 2)?;
    add(config, json!({ "rope_scaling": scaling }));
    Ok(())
})];

fn check_experts(keys: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    if keys.integer(key::EXPERTS)?.unwrap_or(0) == 0 {
        let problem = "is missing: it is a dense model, which is not read under this architecture";
        return Err(keys.problem(key::EXPERTS, problem));
    }
    if keys.has("blk.0.ffn_gate.0.weight") {
        let problem = "experts have a tensor each, as in files before April 2024: take a newer one";
        return Err(keys.error(problem));
    }
    Ok(())
}
