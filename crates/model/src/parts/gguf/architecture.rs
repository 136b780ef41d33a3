//! An architecture as llama.cpp names it: its keys and its names of tensors.

use moeflux_base::Error;
use serde_json::Value;

use super::{
    row::KeyRow,
    writer::{KeyList, KeyWriter},
};
use crate::{
    blueprint::Blueprint,
    checkpoint::gguf::{
        keys::{Config, Converted, Keys},
        names::{self, NameRow},
    },
    parts::config::with_all_names,
};

/// An architecture of GGUF.
pub struct GgufArchitecture {
    /// `general.architecture`, and the prefix of its keys.
    pub name: &'static str,
    /// Published models, and limits: its cell in the table of the guide.
    pub models: &'static str,
    /// Values of `model_type` that it is written for. Configs of files have the first.
    pub(crate) model_types: &'static [&'static str],
    /// Whether it is written for a config of these types.
    pub(crate) fits: fn(&Value) -> bool,
    /// Keys, in the order of the config.
    pub(crate) keys: &'static [&'static [KeyRow]],
    /// Names of tensors besides the common ones.
    pub(crate) names: &'static [&'static [NameRow]],
    /// Whether value heads of delta-nets are dealt out to the key heads in turn.
    pub value_heads_dealt: bool,
    /// Whether rows of queries and keys are reordered, so that RoPE's pairs are neighbours.
    pub pairs_adjacent: bool,
    /// Whether decays are `-exp(A_log)`.
    pub decays_negative: bool,
    /// Vectors that the converter makes of the config of a model.
    pub vectors: fn(&Value, &Blueprint) -> Vec<GgufVector>,
    /// Whether files have a tensor of the Hub's name, where it differs from other architectures.
    pub has_tensor: fn(&Value, &str) -> Option<bool>,
}

/// A vector of f32 that the converter makes of a config.
#[derive(Clone, Debug)]
pub struct GgufVector {
    /// Name in GGUF.
    pub name: &'static str,
    /// Elements.
    pub numbers: Vec<f32>,
}

/// An architecture without keys and without names besides the common ones.
pub(crate) const PLAIN: GgufArchitecture = GgufArchitecture {
    name: "",
    models: "",
    model_types: &[],
    fits: |_| true,
    keys: &[],
    names: &[],
    value_heads_dealt: false,
    pairs_adjacent: false,
    decays_negative: true,
    vectors: |_, _| Vec::new(),
    has_tensor: |_, _| None,
};

impl GgufArchitecture {
    /// Whether files are written in it for a `model_type` with this config.
    pub(crate) fn is_for(&self, model_type: &str, config: &Value) -> bool {
        self.model_types.contains(&model_type) && (self.fits)(config)
    }

    /// Name in GGUF of a tensor that has this name on the Hub.
    pub fn tensor_name(&self, hub: &str) -> Option<String> {
        names::gguf_name(hub, self.names)
    }

    /// The config of a file, and how its tensors differ from the Hub's.
    ///
    /// # Errors
    /// A key is missing, or its value is not read.
    pub(crate) fn convert(&self, keys: &Keys<'_>) -> Result<Converted, Error> {
        let mut config = Config::new();
        config.insert("model_type".into(), self.model_types.first().copied().into());
        for row in self.keys.iter().copied().flatten() {
            row.read(keys, &mut config)?;
        }
        Ok(Converted {
            config,
            names: self.names,
            value_heads_dealt: self.value_heads_dealt,
            pairs_adjacent: self.pairs_adjacent,
        })
    }

    /// Keys of a model's file: `config` is the language model's part.
    pub fn key_list(&self, config: &Value, blueprint: &Blueprint) -> KeyList {
        let mut keys = KeyWriter::new(with_all_names(config), blueprint);
        self.keys.iter().copied().flatten().for_each(|row| row.write(&mut keys));
        keys.finish(self.name)
    }
}
