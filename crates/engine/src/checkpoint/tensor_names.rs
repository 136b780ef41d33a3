//! Names of tensors, without what training tools put into them.

/// Modules that wrap others, anywhere in a name: those of torch.compile, of FSDP, and of PyTorch's
/// activation checkpointing.
const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Starts of names: those of data parallelism and of PEFT.
const STARTS: [&str; 2] = ["module.", "base_model.model."];

/// Name of a tensor without what training tools put into it, as the model's publisher has it.
pub(super) fn plain_name(name: &str) -> String {
    let parts: Vec<_> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    let joined = parts.join(".");
    let mut plain = &*joined;
    while let Some(rest) = STARTS.iter().find_map(|start| plain.strip_prefix(start)) {
        plain = rest;
    }
    plain.to_owned()
}

#[cfg(test)]
mod tests {
    use super::plain_name;

    #[test]
    fn what_tools_put_into_names_is_left_out() {
        for (name, plain) in [
            ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
            ("module.model.norm.weight", "model.norm.weight"),
            ("_orig_mod.lm_head.weight", "lm_head.weight"),
            (
                "model._orig_mod.layers.0._orig_mod.mlp.gate.weight",
                "model.layers.0.mlp.gate.weight",
            ),
            ("module._orig_mod.model.norm.weight", "model.norm.weight"),
            ("_orig_mod.module.model.norm.weight", "model.norm.weight"),
            ("base_model.model.model.norm.weight", "model.norm.weight"),
            ("module.base_model.model.lm_head.weight_packed", "lm_head.weight_packed"),
            ("_fsdp_wrapped_module.model.norm.weight", "model.norm.weight"),
            // Only whole components at the start.
            ("model.module.weight", "model.module.weight"),
            ("submodule.weight", "submodule.weight"),
            ("base_model.norm.weight", "base_model.norm.weight"),
            ("module", "module"),
            ("", ""),
        ] {
            assert_eq!(plain_name(name), plain, "{name}");
        }
    }
}
