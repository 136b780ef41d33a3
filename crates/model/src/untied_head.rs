//! Heads beside a config that says that the embedding serves as head.

use super::blueprint::Blueprint;
use crate::checkpoint::{Checkpoint, text_config::text_config};

/// Note on a head that is used although the config says that the embedding serves as head.
pub fn untied_head(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Option<String> {
    const KEY: &str = "tie_word_embeddings";
    let config = checkpoint.config();
    let is_tied = [config, text_config(config)].iter().any(|config| config[KEY] == true);
    (is_tied && blueprint.head.is_some()).then(|| {
        format!(
            "{}: the head of the file, such as lm_head.weight, is used, although {KEY} is true",
            checkpoint.folder().display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_head_of_the_file_is_used_with_a_note() {
        let (temp, golden) = (tempfile::tempdir().unwrap(), moeflux_goldens::golden("qwen3_moe"));
        fs::copy(golden.join("model.safetensors"), temp.path().join("model.safetensors")).unwrap();
        let config = fs::read_to_string(golden.join("config.json")).unwrap();
        let note = |is_tied: bool| {
            let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
            config["tie_word_embeddings"] = is_tied.into();
            fs::write(temp.path().join("config.json"), config.to_string()).unwrap();
            let checkpoint = Checkpoint::open(temp.path()).unwrap();
            let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
            assert!(blueprint.head.is_some());
            untied_head(&checkpoint, &blueprint)
        };
        assert_eq!(note(false), None);
        assert!(note(true).unwrap().contains("lm_head"));
    }
}
