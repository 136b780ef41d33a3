//! `generation_config.json` and end tokens.

use std::path::Path;

use moeflux_base::{Error, TextFile, TextFiles, seam::json};
use serde_json::{Map, Value};

use super::sampling::Sampling;

/// Settings that a model's authors recommend, from `generation_config.json`. Without the file:
/// `default()`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationConfig {
    /// Recommended sampling.
    pub sampling: Sampling,
    /// Tokens that end an answer; empty if the file names none.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Settings of a checkpoint.
    #[doc(hidden)]
    pub fn for_checkpoint(checkpoint: &dyn TextFiles) -> Result<Self, Error> {
        match checkpoint.text_file("generation_config.json") {
            Some(file) => Self::from_bytes(file.bytes, &file.path),
            None => Ok(Self::default()),
        }
    }

    /// Reads the contents of a `generation_config.json`; `path` is for error messages.
    ///
    /// Missing fields, `null` and a `top_k` of -1 or 0 leave a filter off. `do_sample: false` is
    /// greedy. Unknown fields are ignored.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a JSON object, or a field has a wrong type or range.
    pub fn from_bytes(
        generation_config_json: &[u8],
        path: &Path,
    ) -> Result<GenerationConfig, Error> {
        let file = JsonFields::parse(generation_config_json, path)?;
        let mut sampling = Sampling::default();
        let numbers = [
            ("temperature", &mut sampling.temperature),
            ("top_p", &mut sampling.top_p),
            ("min_p", &mut sampling.min_p),
            ("repetition_penalty", &mut sampling.repetition_penalty),
        ];
        for (name, target) in numbers {
            if let Some(number) =
                file.field(name, "a number", |value| Some(value.as_f64()? as f32))?
            {
                *target = number;
            }
        }
        let top_k =
            file.field("top_k", "a whole number", |value| value.as_i64().filter(|&k| k >= -1))?;
        sampling.top_k = top_k.map_or(0, |k| usize::try_from(k).unwrap_or(0));
        if file.field("do_sample", "true or false", Value::as_bool)? == Some(false) {
            sampling.temperature = 0.0;
        }
        sampling.validate().map_err(|e| file.problem(e.to_string()))?;
        Ok(GenerationConfig { sampling, eos_token_ids: file.eos_token_ids()? })
    }
}

/// Tokens that end an answer (EOS).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens {
    ids: Vec<u32>,
    /// Ids of tokens whose text is part of the answer.
    included: Vec<u32>,
}

impl EndTokens {
    /// End tokens of a checkpoint: all that generation_config.json names, all in `named`, which the
    /// tokenizer's files and the chat template name, and `eos_token_id` of `config.json`, at the
    /// top level and in `text_config`, which may be in `thinker_config`. Beside the others, the ids
    /// of `config.json` count only if `is_special`: configs that were saved again hold default ids
    /// of their class, which may be ordinary text. Without any, only a limit ends an answer.
    ///
    /// # Errors
    /// [`Error::Text`] if `config.json` is not a JSON object, or `eos_token_id` is neither an id
    /// nor a list of ids.
    pub fn new(
        generation: &GenerationConfig,
        config: &TextFile<'_>,
        named: &[u32],
        is_special: impl Fn(u32) -> bool,
    ) -> Result<EndTokens, Error> {
        let TextFile { bytes, path } = config;
        let mut end = EndTokens::default();
        end.extend(generation.eos_token_ids.iter().chain(named).copied());
        let config = JsonFields::parse(bytes, path)?;
        let mut ids = config.eos_token_ids()?;
        let thinker = config.object("thinker_config")?;
        for outer in [Some(&config), thinker.as_ref()].into_iter().flatten() {
            if let Some(text) = outer.object("text_config")? {
                ids.extend(text.eos_token_ids()?);
            }
        }
        if !end.ids.is_empty() {
            ids.retain(|id| is_special(*id));
        }
        end.extend(ids);
        Ok(end)
    }

    /// Adds ids that it lacks.
    pub fn extend(&mut self, ids: impl IntoIterator<Item = u32>) {
        for id in ids {
            if !self.contains(id) {
                self.ids.push(id);
            }
        }
    }

    /// Whether `id` ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Adds ids that it lacks, whose text is part of the answer that they end.
    pub fn include(&mut self, ids: impl IntoIterator<Item = u32>) {
        for id in ids {
            if !self.contains(id) {
                self.ids.push(id);
                self.included.push(id);
            }
        }
    }

    /// Whether the text of `id`, which ends an answer, is part of it.
    pub fn includes(&self, id: u32) -> bool {
        self.included.contains(&id)
    }

    /// Ids of all end tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// A JSON object whose errors name the file and the field.
struct JsonFields<'a> {
    map: Map<String, Value>,
    path: &'a Path,
}

impl<'a> JsonFields<'a> {
    fn parse(bytes: &[u8], path: &'a Path) -> Result<JsonFields<'a>, Error> {
        let map = json::parse(bytes).map_err(|e| Error::Text {
            path: path.to_path_buf(),
            problem: format!("not a JSON object: {}", json::problem(&e)),
        })?;
        Ok(JsonFields { map, path })
    }

    fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.path.to_path_buf(), problem }
    }

    /// Reads a field; `None` if it is missing or null.
    fn field<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.map.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(self.problem(format!("{name} is {value}: it must be {kind}"))),
            },
        }
    }

    /// Fields of an object inside.
    fn object(&self, name: &str) -> Result<Option<Self>, Error> {
        let map = self.field(name, "an object", |value| value.as_object().cloned())?;
        Ok(map.map(|map| Self { map, path: self.path }))
    }

    fn eos_token_ids(&self) -> Result<Vec<u32>, Error> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let ids =
            self.field("eos_token_id", "a token id or a list of token ids", |value| match value {
                Value::Array(list) => list.iter().map(id).collect(),
                _ => id(value).map(|id| vec![id]),
            })?;
        Ok(ids.unwrap_or_default())
    }
}
