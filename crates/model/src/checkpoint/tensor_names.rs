//! Names of tensors: prefixes of training tools, and names that are like the name of a missing
//! tensor.

/// Names that torch.compile, FSDP and PyTorch's activation checkpointing give to the modules with
/// which they wrap others. They stand anywhere in a tensor's name.
const WRAPPERS: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// Prefixes of data parallelism and of PEFT.
const STARTS: [&str; 2] = ["module.", "base_model.model."];

/// Maximum length of a name that is compared with a missing one, in bytes.
const MAX_COMPARED: usize = 256;

/// Number of names whose edit distance to a missing one is computed.
const MAX_DISTANCES: usize = 64;

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

/// End of an error about a missing tensor: the name of another that resembles it, or two equally
/// near ones. Empty if none does.
pub(crate) fn like<'a>(missing: &str, names: impl Iterator<Item = &'a str>) -> String {
    if missing.len() > MAX_COMPARED {
        return String::new();
    }
    let mut best = 0;
    let mut alike: Vec<&str> = Vec::new();
    for name in names.filter(|name| name.len() <= MAX_COMPARED) {
        let common = common_parts(missing, name);
        if common > best {
            alike.clear();
            best = common;
        }
        if common == best {
            alike.push(name);
        }
    }
    alike.sort_unstable_by_key(|name| (name.len().abs_diff(missing.len()), *name));
    alike.truncate(MAX_DISTANCES);
    let distances: Vec<_> = alike.iter().map(|name| edit_distance(missing, name)).collect();
    let least = distances.iter().min().copied().filter(|least| least * 2 <= missing.len());
    let nearest = alike.iter().zip(&distances).filter(|(_, distance)| Some(**distance) == least);
    let nearest: Vec<&str> = nearest.map(|(name, _)| *name).take(2).collect();
    match nearest.is_empty() {
        true => String::new(),
        false => format!("; the file has {}", nearest.join(" and ")),
    }
}

/// Number of the components at the start and at the end that two names have in common.
fn common_parts(a: &str, b: &str) -> usize {
    let start = a.split('.').zip(b.split('.')).take_while(|(a, b)| a == b).count();
    let end = a.rsplit('.').zip(b.rsplit('.')).take_while(|(a, b)| a == b).count();
    start + end
}

/// Levenshtein distance in bytes.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::{edit_distance, like, plain_name};

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

    #[test]
    fn names_like_a_missing_one() {
        let names = [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.0.mlp.router.weight",
            "model.layers.0.mlp.experts.0.w1.weight",
            "model.layers.0.mlp.experts.0.w2.weight",
            "model.layers.0.mlp.experts.0.w3.weight",
            "model.layers.1.mlp.router.weight",
            "model.norm.weight",
        ];
        for (missing, expected) in [
            ("model.layers.0.mlp.gate.weight", "; the file has model.layers.0.mlp.router.weight"),
            (
                "model.layers.0.mlp.experts.0.up_proj.weight",
                "; the file has model.layers.0.mlp.experts.0.w1.weight and \
                 model.layers.0.mlp.experts.0.w2.weight",
            ),
            ("head.weight", "; the file has lm_head.weight"),
            ("x.bias", ""),
        ] {
            assert_eq!(like(missing, names.into_iter()), expected, "{missing}");
            assert_eq!(like(missing, names.into_iter().rev()), expected, "{missing}");
        }
        assert_eq!(like("norm.weight", [].into_iter()), "");
        let long = "a".repeat(1000);
        assert_eq!(like(&long, [&*long].into_iter()), "");
        assert_eq!(like("norm", [&*long].into_iter()), "");
    }

    /// The work does not grow with the square of the number of names.
    #[test]
    fn many_names_are_compared_in_linear_time() {
        let names: Vec<String> = (0..50_000)
            .map(|i| format!("model.layers.{}.mlp.experts.{}.w1.weight", i / 500, i % 500))
            .collect();
        let found =
            like("model.layers.7.mlp.experts.9.gate_proj.weight", names.iter().map(|n| &**n));
        assert_eq!(found, "; the file has model.layers.7.mlp.experts.9.w1.weight");
    }

    #[test]
    fn distances_are_those_of_levenshtein() {
        for (a, b, distance) in
            [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)]
        {
            assert_eq!(edit_distance(a, b), distance, "{a} {b}");
        }
    }
}
