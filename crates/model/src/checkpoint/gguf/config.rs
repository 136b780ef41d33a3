//! Metadata to the config that the Hub has: keys that several architectures have.

use std::collections::HashMap;

use moeflux_base::Error;
use moeflux_ops::Scalar;
use serde_json::{Map, Value, json};

use super::{super::data_file::DataFile, metadata::Metadata};
use crate::checkpoint::location::TensorInfo;

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

/// Layer of full attention among `n` layers in a row, of which the others have windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FullLayer {
    First,
    Last,
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

    /// Whether a key exists.
    pub(super) fn has_key(&self, name: &str) -> bool {
        self.metadata.has(&self.key(name))
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

    /// Numbers of an array.
    pub(super) fn integers(&self, name: &str) -> Result<Option<Vec<u64>>, Error> {
        self.metadata.integers(self.files, &self.key(name))
    }

    /// Numbers of an array that has one for each layer, and may go on.
    pub(super) fn first_layers(&self, name: &str) -> Result<Vec<u64>, Error> {
        let layers = self.layers()?;
        let mut numbers = self.integers(name)?.ok_or_else(|| self.missing(name))?;
        if numbers.len() < layers {
            let problem = format!("has {} values for {layers} layers", numbers.len());
            return Err(self.problem(name, &problem));
        }
        numbers.truncate(layers);
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

    /// A number that all layers with windows have, or all of full attention.
    pub(super) fn of_kind(
        &self,
        name: &str,
        slides: &[bool],
        of_windows: bool,
    ) -> Result<Option<u64>, Error> {
        let all = self.per_layer(name)?.ok_or_else(|| self.missing(name))?;
        let mut of_kind = slides.iter().zip(all).filter(|(slides, _)| **slides == of_windows);
        let first = of_kind.next().map(|(_, n)| n);
        match of_kind.all(|(_, n)| Some(n) == first) {
            true => Ok(first),
            false => Err(self.problem(name, "differs between layers of one kind")),
        }
    }

    /// A factor or bound for each layer: one for all, or an array.
    pub(super) fn floats_per_layer(&self, name: &str) -> Result<Option<Vec<f32>>, Error> {
        let layers = self.layers()?;
        if !self.metadata.is_array(&self.key(name)) {
            return Ok(self.number(name)?.map(|x| vec![x as f32; layers]));
        }
        let mut numbers = self.metadata.floats(self.files, &self.key(name))?;
        if let Some(numbers) = &mut numbers {
            numbers.truncate(layers);
        }
        Ok(numbers)
    }

    /// Whether each layer has experts: 0 or 1.
    pub(super) fn sparse_layers(&self) -> Result<Vec<u8>, Error> {
        let is_sparse = |layer| u8::from(self.has(&format!("blk.{layer}.ffn_gate_inp.weight")));
        Ok((0..self.layers()?).map(is_sparse).collect())
    }

    /// As [`Keys::uniform`], of a key that is needed.
    pub(super) fn uniform_size(&self, name: &str) -> Result<u64, Error> {
        self.uniform(name)?.ok_or_else(|| self.missing(name))
    }

    /// Keys of every model.
    pub(super) fn body(&self, model_type: &str) -> Result<Config, Error> {
        let eps = self.number("attention.layer_norm_rms_epsilon")?;
        let layer_eps = self.number("attention.layer_norm_epsilon")?;
        if eps.or(layer_eps).is_none() {
            return Err(self.missing("attention.layer_norm_rms_epsilon"));
        }
        let embedding = self.tensors.get("token_embd.weight");
        let rows = embedding.map_or(0, |t| t.shape.first().copied().unwrap_or(0));
        let mut config = Config::new();
        let entries = json!({
            "model_type": model_type,
            "hidden_size": self.size("embedding_length")?,
            "num_hidden_layers": self.layers()?,
            "vocab_size": self.integer("vocab_size")?.unwrap_or(rows as u64),
            "max_position_embeddings": self.size("context_length")?,
            "rms_norm_eps": eps,
            // Of LayerNorms, where all norms are.
            "layer_norm_eps": layer_eps.filter(|_| eps.is_none()),
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
            "attention_factor": self.number("rope.scaling.yarn_attn_factor")?,
        });
        add(&mut scaling, entries);
        Ok(scaling.into())
    }

    /// RoPE with a divisor for each of `pairs` frequencies, as the converter expresses the scaling
    /// of Llama 3; null without one.
    pub(super) fn divided_rope(&self, pairs: u64) -> Result<Value, Error> {
        let name = "rope_freqs.weight";
        let Some(mut divisors) = self.floats(name)? else { return Ok(Value::Null) };
        if (divisors.len() as u64) < pairs {
            let problem = format!("{name} has {} divisors of {pairs} pairs", divisors.len());
            return Err(self.metadata.error(problem));
        }
        divisors.truncate(pairs as usize);
        // The same at any length.
        Ok(json!({
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            "original_max_position_embeddings": self.size("context_length")?,
        }))
    }

    /// Elements of a key.
    pub(super) fn head_width(&self) -> Result<u64, Error> {
        match self.integer("attention.key_length")? {
            Some(_) => self.size("attention.key_length"),
            None => {
                let heads = self.uniform_size("attention.head_count")?;
                Ok(self.size("embedding_length")? / heads.max(1))
            }
        }
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

    /// Whether each layer has a sliding window: by a flag for each, or all but one of every `n`.
    pub(super) fn slides(&self, n: u64, full: FullLayer) -> Result<Vec<bool>, Error> {
        let name = "attention.sliding_window_pattern";
        if self.metadata.is_array(&self.key(name)) {
            let flags = self.per_layer(name)?.unwrap_or_default();
            return Ok(flags.into_iter().map(|flag| flag != 0).collect());
        }
        let n = self.integer(name)?.unwrap_or(n).max(1);
        let place = if full == FullLayer::First { 0 } else { n - 1 };
        Ok((0..self.layers()? as u64).map(|layer| layer % n != place).collect())
    }
}
