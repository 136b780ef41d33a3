//! Keys of an architecture in the metadata, and the config that they become.

use std::collections::HashMap;

use moeflux_base::Error;
use moeflux_ops::Scalar;
use serde_json::{Map, Value};

use super::{super::data_file::DataFile, metadata::Metadata, names::NameRow};
use crate::checkpoint::location::TensorInfo;

/// Maximum bytes of a vector that the config depends on.
const MAX_VECTOR: u64 = 1 << 16;

/// Config as the Hub has it.
pub(crate) type Config = Map<String, Value>;

/// Adds the entries of an object to a config, except nulls.
pub(crate) fn add(config: &mut Config, entries: Value) {
    if let Value::Object(entries) = entries {
        config.extend(entries.into_iter().filter(|(_, value)| !value.is_null()));
    }
}

/// Keys of an architecture, and tensors of the file.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    /// `general.architecture`.
    pub(crate) prefix: &'a str,
    pub(super) metadata: &'a Metadata,
    pub(super) files: &'a [DataFile],
    /// By their names in the file.
    pub(super) tensors: &'a HashMap<String, TensorInfo>,
}

/// A file's metadata as the config that the Hub has, and how its tensors differ from the Hub's.
pub(crate) struct Converted {
    pub(crate) config: Config,
    /// Names of tensors besides the common ones.
    pub(crate) names: &'static [&'static [NameRow]],
    /// See `SourceChanges`.
    pub(crate) value_heads_dealt: bool,
    /// See `SourceChanges`.
    pub(crate) pairs_adjacent: bool,
}

/// Converts the metadata of a file by the tables of its architecture.
pub(crate) type Convert = fn(&Keys<'_>) -> Result<Converted, Error>;

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(crate) fn integer(&self, name: &str) -> Result<Option<u64>, Error> {
        self.metadata.integer(&self.key(name))
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f64>, Error> {
        self.metadata.number(&self.key(name))
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        self.metadata.boolean(&self.key(name))
    }

    /// Whether a key exists.
    pub(crate) fn has_key(&self, name: &str) -> bool {
        self.metadata.has(&self.key(name))
    }

    /// Whether the value of a key is an array.
    pub(crate) fn is_array(&self, name: &str) -> bool {
        self.metadata.is_array(&self.key(name))
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<String>, Error> {
        self.metadata.text(self.files, &self.key(name))
    }

    /// Whether a tensor exists.
    pub(crate) fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether a tensor exists whose name has this part.
    pub(crate) fn has_like(&self, part: &str) -> bool {
        self.tensors.keys().any(|name| name.contains(part))
    }

    /// Rows of a tensor, or experts of a stack.
    pub(crate) fn rows(&self, tensor: &str) -> Option<u64> {
        Some(*self.tensors.get(tensor)?.shape.first()? as u64)
    }

    /// Elements of a small vector of F32, if it exists.
    pub(crate) fn floats(&self, tensor: &str) -> Result<Option<Vec<f32>>, Error> {
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

    pub(crate) fn missing(&self, name: &str) -> Error {
        self.metadata.missing(&self.key(name))
    }

    pub(crate) fn problem(&self, name: &str, problem: &str) -> Error {
        self.metadata.problem(&self.key(name), problem)
    }

    /// Error about the file.
    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        self.metadata.error(problem)
    }

    /// A factor that is needed.
    pub(crate) fn factor(&self, name: &str) -> Result<f64, Error> {
        self.number(name)?.ok_or_else(|| self.missing(name))
    }

    /// A positive number.
    pub(crate) fn size(&self, name: &str) -> Result<u64, Error> {
        match self.integer(name)? {
            Some(0) => Err(self.problem(name, "is 0")),
            Some(n) => Ok(n),
            None => Err(self.missing(name)),
        }
    }

    /// Number of layers, without layers for multi-token prediction.
    pub(crate) fn layers(&self) -> Result<usize, Error> {
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
    pub(crate) fn per_layer(&self, name: &str) -> Result<Option<Vec<u64>>, Error> {
        let layers = self.layers()?;
        let all = layers + self.integer("nextn_predict_layers")?.unwrap_or(0) as usize;
        let mut numbers = self.metadata.per_layer(self.files, &self.key(name), all)?;
        if let Some(numbers) = &mut numbers {
            numbers.truncate(layers);
        }
        Ok(numbers)
    }

    /// The same of a key that is needed.
    pub(crate) fn each_layer(&self, name: &str) -> Result<Vec<u64>, Error> {
        self.per_layer(name)?.ok_or_else(|| self.missing(name))
    }

    /// Numbers of an array.
    pub(crate) fn integers(&self, name: &str) -> Result<Option<Vec<u64>>, Error> {
        self.metadata.integers(self.files, &self.key(name))
    }

    /// Numbers of an array that has one for each layer, and may go on.
    pub(crate) fn first_layers(&self, name: &str) -> Result<Vec<u64>, Error> {
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
    pub(crate) fn uniform(&self, name: &str) -> Result<Option<u64>, Error> {
        let Some(all) = self.per_layer(name)? else { return Ok(None) };
        let first = all.iter().copied().find(|n| *n > 0);
        match all.iter().all(|n| *n == 0 || Some(*n) == first) {
            true => Ok(Some(first.unwrap_or(0))),
            false => Err(self.problem(name, "differs between layers, which is not read")),
        }
    }

    /// A number that all layers with windows have, or all of full attention.
    pub(crate) fn of_kind(
        &self,
        name: &str,
        slides: &[bool],
        of_windows: bool,
    ) -> Result<Option<u64>, Error> {
        let all = self.each_layer(name)?;
        let mut of_kind = slides.iter().zip(all).filter(|(slides, _)| **slides == of_windows);
        let first = of_kind.next().map(|(_, n)| n);
        match of_kind.all(|(_, n)| Some(n) == first) {
            true => Ok(first),
            false => Err(self.problem(name, "differs between layers of one kind")),
        }
    }

    /// A factor or bound for each layer: one for all, or an array.
    pub(crate) fn floats_per_layer(&self, name: &str) -> Result<Option<Vec<f32>>, Error> {
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
    pub(crate) fn sparse_layers(&self) -> Result<Vec<u8>, Error> {
        let is_sparse = |layer| u8::from(self.has(&format!("blk.{layer}.ffn_gate_inp.weight")));
        Ok((0..self.layers()?).map(is_sparse).collect())
    }

    /// As [`Keys::uniform`], of a key that is needed.
    pub(crate) fn uniform_size(&self, name: &str) -> Result<u64, Error> {
        self.uniform(name)?.ok_or_else(|| self.missing(name))
    }
}
