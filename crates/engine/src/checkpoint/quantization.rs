//! What `config.json` says of quantised tensors. The shapes decide; this only has to agree.

use std::{collections::HashMap, path::Path};

use serde_json::Value;

use crate::Error;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Settings {
    bits: Option<usize>,
    group: Option<usize>,
    mode: Option<String>,
}

/// The `quantization` map of `config.json`: settings for all tensors, and for some by name.
#[derive(Debug, Default)]
pub(crate) struct Quantization {
    all: Settings,
    by_name: HashMap<String, Settings>,
}

impl Quantization {
    pub(crate) fn from_config(config: &Value, path: &Path) -> Result<Self, Error> {
        let text = config.get("text_config");
        let find =
            |key: &str| config.get(key).or_else(|| text.and_then(|t| t.get(key))).filter(|v| !v.is_null());
        let Some(map) = find("quantization").or_else(|| find("quantization_config")) else {
            return Ok(Self::default());
        };
        let bad = |problem: String| Error::Checkpoint { path: path.into(), problem };
        let Some(map) = map.as_object() else {
            return Err(bad("\"quantization\" is not a map".into()));
        };
        let settings = |of: &serde_json::Map<String, Value>| -> Result<Settings, Error> {
            let number = |key: &str| match of.get(key) {
                None | Some(Value::Null) => Ok(None),
                Some(v) => v
                    .as_u64()
                    .map(|n| Some(n as usize))
                    .ok_or_else(|| bad(format!("\"{key}\" in \"quantization\" is {v}, not a number"))),
            };
            let mode = of.get("mode").and_then(Value::as_str).map(str::to_owned);
            Ok(Settings { bits: number("bits")?, group: number("group_size")?, mode })
        };
        let mut by_name = HashMap::new();
        for (name, value) in map {
            if let Some(of) = value.as_object() {
                by_name.insert(name.clone(), settings(of)?);
            }
        }
        let mut all = settings(map)?;
        if let Some(method) = map.get("quant_method").and_then(Value::as_str) {
            all.mode = Some(method.to_owned());
        }
        Ok(Self { all, by_name })
    }

    /// That `name` is quantised in the one mode that is supported.
    pub(crate) fn require_affine(&self, name: &str, has_biases: bool) -> Result<(), String> {
        let named = self.by_name.get(name).and_then(|s| s.mode.as_deref());
        let mode = named.or(self.all.mode.as_deref()).unwrap_or("affine");
        if mode != "affine" {
            return Err(format!("its quantisation mode {mode:?} is not supported: \"affine\" is"));
        }
        if !has_biases {
            return Err(
                "it has scales but no biases, so its quantisation mode is not \"affine\", which is the only \
                        one supported"
                    .into(),
            );
        }
        Ok(())
    }

    /// That the shapes' bits and group are those that the map gives for this very tensor, if it names it.
    pub(crate) fn agree(&self, name: &str, bits: usize, group: usize) -> Result<(), String> {
        let Some(of) = self.by_name.get(name) else { return Ok(()) };
        let (want_bits, want_group) = (of.bits.or(self.all.bits), of.group.or(self.all.group));
        if want_bits.is_some_and(|b| b != bits) || want_group.is_some_and(|g| g != group) {
            return Err(format!(
                "\"quantization\" gives it {} bits in groups of {}, its shapes say {bits} and {group}",
                want_bits.map_or("?".into(), |b| b.to_string()),
                want_group.map_or("?".into(), |g| g.to_string()),
            ));
        }
        Ok(())
    }
}
