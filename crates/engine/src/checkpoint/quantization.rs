//! What `config.json` says of quantised tensors. The shapes decide; this only has to agree.

use std::{collections::HashMap, path::Path};

use serde_json::Value;

use crate::base::error::Error;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Settings {
    bits: Option<usize>,
    group: Option<usize>,
    mode: Option<String>,
}

/// Modes of mlx.
const MODES: [&str; 4] = ["affine", "mxfp4", "nvfp4", "mxfp8"];

/// Outputs and inputs that share a scale in FP8 checkpoints that do not say it.
const FP8_BLOCK: [u16; 2] = [128, 128];

/// The `quantization` map of `config.json`: settings for all tensors, and for some by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quantization {
    all: Settings,
    by_name: HashMap<String, Settings>,
    fp8_block: Option<[u16; 2]>,
}

impl Quantization {
    pub(crate) fn from_config(config: &Value, path: &Path) -> Result<Self, Error> {
        let text = config.get("text_config");
        let find = |key: &str| {
            config.get(key).or_else(|| text.and_then(|t| t.get(key))).filter(|v| !v.is_null())
        };
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
                Some(v) => v.as_u64().map(|n| Some(n as usize)).ok_or_else(|| {
                    bad(format!("\"{key}\" in \"quantization\" is {v}, not a number"))
                }),
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
        let fp8_block = match map.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(size) => match serde_json::from_value::<[u16; 2]>(size.clone()) {
                Ok(block) if !block.contains(&0) => Some(block),
                _ => {
                    return Err(bad(format!(
                        "\"weight_block_size\" is {size}, not a block's rows and columns"
                    )));
                }
            },
        };
        Ok(Self { all: settings(map)?, by_name, fp8_block })
    }

    /// Outputs and inputs that share a scale in weights of FP8.
    pub(crate) fn fp8_block(&self) -> [u16; 2] {
        self.fp8_block.unwrap_or(FP8_BLOCK)
    }

    /// That the tensors' mode, bits and group are those that the map gives for this very tensor, if it names it. What
    /// it says of all tensors need not hold for each, but has to be known.
    pub(crate) fn agree(
        &self,
        name: &str,
        mode: &str,
        bits: usize,
        group: usize,
    ) -> Result<(), String> {
        if let Some(other) = self.all.mode.as_deref().filter(|mode| !MODES.contains(mode)) {
            return Err(format!("the mode {other:?} is not supported: {} are", MODES.join(", ")));
        }
        let Some(of) = self.by_name.get(name) else { return Ok(()) };
        let (want_bits, want_group) = (of.bits.or(self.all.bits), of.group.or(self.all.group));
        let want_mode = of.mode.as_deref().unwrap_or(mode);
        if want_mode != mode
            || want_bits.is_some_and(|b| b != bits)
            || want_group.is_some_and(|g| g != group)
        {
            return Err(format!(
                "\"quantization\" gives it {want_mode} with {} bits in groups of {}, its tensors say {mode}, {bits} \
                 and {group}",
                want_bits.map_or("?".into(), |b| b.to_string()),
                want_group.map_or("?".into(), |g| g.to_string()),
            ));
        }
        Ok(())
    }
}
