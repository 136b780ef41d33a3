//! Metadata to the config that the Hub has: keys that several architectures have.

use std::collections::HashMap;

use moeflux_compute::Scalar;
use serde_json::{Map, Value, json};

use super::{super::data_file::DataFile, metadata::Metadata};
use crate::{base::error::Error, checkpoint::TensorInfo};

/// Maximum bytes of a vector that the config depends on.
const MAX_VECTOR: u64 = 1 << 16;

/// Config as the Hub has it.
pub(super) type Config = Map<String, Value>;

/// Adds the entries of an object to a config, except nulls.
pub(super) fn add(config: &mut Config, entries: Value) {
    if let Value::Object(entries) = entries {
        config.extend(entries.into_iter().filter(|(_, value)| !value.is_null()));
    }
}

/// Keys of an architecture, and tensors of the file.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    /// `general.architecture`.
    pub(super) prefix: &'static str,
    pub(super) metadata: &'a Metadata,
    pub(super) files: &'a [DataFile],
    /// By their names in the file.
    pub(super) tensors: &'a HashMap<String, TensorInfo>,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<u64>, Error> {
        self.metadata.integer(&self.key(name))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, Error> {
        self.metadata.number(&self.key(name))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        self.metadata.boolean(&self.key(name))
    }

    /// Whether a tensor exists.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Elements of a small vector of F32, if it exists.
    pub(super) fn floats(&self, tensor: &str) -> Result<Option<Vec<f32>>, Error> {
        let Some(info) = self.tensors.get(tensor) else { return Ok(None) };
        let file = &self.files[info.file as usize];
        if info.dtype != Scalar::F32.name() || info.bytes > MAX_VECTOR {
            let (tensor, path) = (tensor.to_owned(), file.path().into());
            let problem =
                format!("it is no small vector of F32, but {:?} {}", info.shape, info.dtype);
            return Err(Error::Tensor { tensor, path, problem });
        }
        let mut bytes = vec![0; info.bytes as usize];
        file.read_exact_at(&mut bytes, info.offset)
            .map_err(Error::file(file.path(), format!("cannot read tensor {tensor}")))?;
        Ok(Some((0..bytes.len() / 4).map(|i| Scalar::F32.get(&bytes, i)).collect()))
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        self.metadata.missing(&self.key(name))
    }

    pub(super) fn problem(&self, name: &str, problem: &str) -> Error {
        self.metadata.problem(&self.key(name), problem)
    }

    /// A positive number.
    pub(super) fn size(&self, name: &str) -> Result<u64, Error> {
        match self.integer(name)? {
            Some(0) => Err(self.problem(name, "is 0")),
            Some(n) => Ok(n),
            None => Err(self.missing(name)),
        }
    }

    /// Number of layers, without those of multi-token prediction.
    pub(super) fn layers(&self) -> Result<usize, Error> {
        let name = "block_count";
        let count = self.size(name)?;
        let predicted = self.integer("nextn_predict_layers")?.unwrap_or(0);
        let tensors = self.tensors.len();
        match usize::try_from(count.saturating_sub(predicted)) {
            Ok(layers) if (1..=tensors).contains(&layers) && count <= 2 * tensors as u64 => {
                Ok(layers)
            }
            _ => {
                let problem = format!(
                    "is {count}, with {predicted} of them for multi-token prediction, in a file \
                     of {tensors} tensors"
                );
                Err(self.problem(name, &problem))
            }
        }
    }

    /// A number for each layer: one for all, or an array.
    pub(super) fn per_layer(&self, name: &str) -> Result<Option<Vec<u64>>, Error> {
        let layers = self.layers()?;
        let all = layers + self.integer("nextn_predict_layers")?.unwrap_or(0) as usize;
        let mut numbers = self.metadata.per_layer(self.files, &self.key(name), all)?;
        if let Some(numbers) = &mut numbers {
            numbers.truncate(layers);
        }
        Ok(numbers)
    }

    /// A number of which all layers have the same, except layers that have none: 0.
    pub(super) fn uniform(&self, name: &str) -> Result<Option<u64>, Error> {
        let Some(all) = self.per_layer(name)? else { return Ok(None) };
        let first = all.iter().copied().find(|n| *n > 0);
        match all.iter().all(|n| *n == 0 || Some(*n) == first) {
            true => Ok(Some(first.unwrap_or(0))),
            false => Err(self.problem(name, "differs between layers, which is not read")),
        }
    }

    /// As [`Keys::uniform`], of a key that is needed.
    pub(super) fn uniform_size(&self, name: &str) -> Result<u64, Error> {
        self.uniform(name)?.ok_or_else(|| self.missing(name))
    }

    /// Keys of every model.
    pub(super) fn body(&self, model_type: &str) -> Result<Config, Error> {
        let eps = "attention.layer_norm_rms_epsilon";
        let embedding = self.tensors.get("token_embd.weight");
        let rows = embedding.map_or(0, |t| t.shape.first().copied().unwrap_or(0));
        let mut config = Config::new();
        let entries = json!({
            "model_type": model_type,
            "hidden_size": self.size("embedding_length")?,
            "num_hidden_layers": self.layers()?,
            "vocab_size": self.integer("vocab_size")?.unwrap_or(rows as u64),
            "max_position_embeddings": self.size("context_length")?,
            "rms_norm_eps": self.number(eps)?.ok_or_else(|| self.missing(eps))?,
            "tie_word_embeddings": !self.tensors.contains_key("output.weight"),
            "rope_theta": self.number("rope.freq_base")?.unwrap_or(10_000.0),
            "rope_scaling": self.rope_scaling()?,
        });
        add(&mut config, entries);
        Ok(config)
    }

    /// Scaling of RoPE; null without one.
    fn rope_scaling(&self) -> Result<Value, Error> {
        let key = self.key("rope.scaling.type");
        let kind = self.metadata.text(self.files, &key)?;
        let kind = match kind.as_deref() {
            None | Some("none") => return Ok(Value::Null),
            Some(kind @ ("linear" | "yarn")) => kind,
            Some(other) => {
                let problem = format!("is {other:?}, which is not read");
                return Err(self.metadata.problem(&key, &problem));
            }
        };
        let mut scaling = Config::new();
        let entries = json!({
            "rope_type": kind,
            "factor": self.number("rope.scaling.factor")?,
            "original_max_position_embeddings":
                self.number("rope.scaling.original_context_length")?,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast")?,
            "beta_slow": self.number("rope.scaling.yarn_beta_slow")?,
        });
        add(&mut scaling, entries);
        Ok(scaling.into())
    }

    /// Keys of grouped-query attention.
    pub(super) fn heads(&self, config: &mut Config) -> Result<(), Error> {
        let heads = self.uniform_size("attention.head_count")?;
        let (keys, values) =
            (self.integer("attention.key_length")?, self.integer("attention.value_length")?);
        if keys != values {
            return Err(self.problem("attention.value_length", "differs from key_length"));
        }
        let entries = json!({
            "num_attention_heads": heads,
            "num_key_value_heads": self.uniform("attention.head_count_kv")?.unwrap_or(heads),
            "head_dim": keys,
        });
        add(config, entries);
        Ok(())
    }

    /// Whether each layer has a sliding window: by a flag for each, or all but every `n`th.
    pub(super) fn slides(&self, every: u64) -> Result<Vec<bool>, Error> {
        let (name, layers) = ("attention.sliding_window_pattern", self.layers()?);
        let by_interval = |every: u64| {
            (1..=layers as u64).map(|layer| !layer.is_multiple_of(every.max(1))).collect()
        };
        match self.metadata.is_array(&self.key(name)) {
            true => {
                let flags = self.per_layer(name)?.unwrap_or_default();
                Ok(flags.into_iter().map(|flag| flag != 0).collect())
            }
            false => Ok(by_interval(self.integer(name)?.unwrap_or(every))),
        }
    }
}
