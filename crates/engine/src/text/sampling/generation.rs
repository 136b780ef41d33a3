use std::path::Path;

use serde_json::{Map, Value};

use super::Sampling;
use crate::{
    base::error::Error,
    text::tokenizer::{Tokenizer, TokenizerConfig},
};

/// What the makers of a model advise for its use, from `generation_config.json`. Without the file: `default()`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// How to choose tokens.
    pub sampling: Sampling,
    /// The tokens that end an answer; none where the file does not say.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Reads the contents of a `generation_config.json`; `path` is for error messages.
    ///
    /// Absent fields, `null` and a `top_k` of -1 or 0 leave a filter off; `do_sample: false` is greedy. Fields that are
    /// not known here are ignored.
    ///
    /// # Errors
    /// [`Error::Text`] when the bytes are no JSON object, or a field has a wrong type or range.
    pub fn from_bytes(
        generation_config_json: &[u8],
        path: &Path,
    ) -> Result<GenerationConfig, Error> {
        let file = Fields::parse(generation_config_json, path)?;
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

/// The tokens that end an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndTokens(Vec<u32>);

impl EndTokens {
    /// The end tokens of a checkpoint: those of generation_config.json; else `eos_token_id` in `config_json` (the
    /// contents of its `config.json`, with the path for error messages), at the top or in `text_config`; else the `eos_token`
    /// of tokenizer_config.json. There may be none: then only a limit ends an answer.
    ///
    /// # Errors
    /// [`Error::Text`] when `config.json` is no JSON object, or `eos_token_id` is neither an id nor a list of ids.
    pub fn new(
        generation: &GenerationConfig,
        config_json: &[u8],
        path: &Path,
        tokenizer_config: &TokenizerConfig,
        tokenizer: &Tokenizer,
    ) -> Result<EndTokens, Error> {
        if !generation.eos_token_ids.is_empty() {
            return Ok(EndTokens(generation.eos_token_ids.clone()));
        }
        let config = Fields::parse(config_json, path)?;
        let mut ids = config.eos_token_ids()?;
        if ids.is_empty()
            && let Some(text) =
                config.field("text_config", "an object", |value| value.as_object().cloned())?
        {
            ids = Fields { map: text, path }.eos_token_ids()?;
        }
        if ids.is_empty() {
            let eos = tokenizer_config.special_tokens.get("eos_token");
            ids.extend(eos.and_then(|token| tokenizer.token_to_id(token)));
        }
        Ok(EndTokens(ids))
    }

    /// Whether `id` ends an answer.
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains(&id)
    }

    /// All of them.
    pub fn ids(&self) -> &[u32] {
        &self.0
    }
}

/// A JSON object whose errors name the file and the field.
struct Fields<'a> {
    map: Map<String, Value>,
    path: &'a Path,
}

impl<'a> Fields<'a> {
    fn parse(bytes: &[u8], path: &'a Path) -> Result<Fields<'a>, Error> {
        let map = serde_json::from_slice(bytes).map_err(|e| Error::Text {
            path: path.to_path_buf(),
            problem: format!("not a JSON object: {e}"),
        })?;
        Ok(Fields { map, path })
    }

    fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.path.to_path_buf(), problem }
    }

    /// `None` when the field is absent or null.
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
