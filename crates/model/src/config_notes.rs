//! Notes on tensors that are used although the config says otherwise.

use super::blueprint::Blueprint;
use crate::{
    checkpoint::{Checkpoint, text_config::text_config},
    parts::{config::config_number, expert_sizes::BY_LAYER},
};

/// Notes on a head beside a config that ties the embedding to it, and on layers with another number
/// of experts than the config says.
pub fn config_notes(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Vec<String> {
    let notes = [untied_head(checkpoint, blueprint), pruned_experts(checkpoint, blueprint)];
    let folder = checkpoint.folder().display();
    notes.into_iter().flatten().map(|note| format!("{folder}: {note}")).collect()
}

fn untied_head(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Option<String> {
    const KEY: &str = "tie_word_embeddings";
    let config = checkpoint.config();
    let is_tied = [config, text_config(config)].iter().any(|config| config[KEY] == true);
    (is_tied && blueprint.head.is_some()).then(|| {
        format!("the head of the file, such as lm_head.weight, is used, although {KEY} is true")
    })
}

fn pruned_experts(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Option<String> {
    let has_list =
        text_config(checkpoint.config()).get(BY_LAYER).is_some_and(|list| !list.is_null());
    let said = config_number(checkpoint, "n_routed_experts").filter(|_| !has_list)?;
    let counts = blueprint.moe_layers().map(|(layer, moe)| (layer, moe.experts.count));
    let others: Vec<_> = counts.filter(|(_, count)| *count as f64 != said).collect();
    let (layer, count) = others.first()?;
    Some(format!(
        "layers with another number of experts than the {said} of the config: {}, such as layer \
         {layer} with {count}; the numbers of the routers' rows are used",
        others.len()
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::*;

    /// Notes on the golden `name` with another config.
    fn notes(name: &str, edit: impl FnOnce(&mut Value)) -> Vec<String> {
        let (temp, golden) = (tempfile::tempdir().unwrap(), moeflux_goldens::golden(name));
        fs::copy(golden.join("model.safetensors"), temp.path().join("model.safetensors")).unwrap();
        let config = fs::read_to_string(golden.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        edit(&mut config);
        fs::write(temp.path().join("config.json"), config.to_string()).unwrap();
        let checkpoint = Checkpoint::open(temp.path()).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        config_notes(&checkpoint, &blueprint)
    }

    #[test]
    fn a_head_of_the_file_is_used_with_a_note() {
        let tied =
            |tied: bool| notes("qwen3_moe", |config| config["tie_word_embeddings"] = tied.into());
        assert!(tied(false).is_empty());
        assert!(tied(true)[0].contains("lm_head"));
    }

    #[test]
    fn experts_of_routers_are_used_with_a_note() {
        assert!(notes("qwen3_moe_ragged_hub", |_| ()).is_empty());
        let plain = notes("qwen3_moe_ragged_hub", |config| {
            config.as_object_mut().unwrap().remove(BY_LAYER);
        });
        assert_eq!(plain.len(), 1);
        assert!(plain[0].contains("the config: 2, such as") && plain[0].contains("layer 1 with 3"));
    }
}
