//! Quantisation settings of `config.json`. Tensor shapes decide the format; these must agree.

use std::{collections::HashMap, path::Path};

use serde_json::Value;

use crate::base::error::Error;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct QuantSettings {
    bits: Option<usize>,
    group: Option<usize>,
    mode: Option<String>,
}

/// Quantisation modes of MLX.
const MODES: [&str; 4] = ["affine", "mxfp4", "nvfp4", "mxfp8"];

/// Default rows and columns of a block of FP8 weights.
const FP8_BLOCK: [u16; 2] = [128, 128];

/// The `quantization` map of `config.json`: global settings, and settings by tensor name.
#[derive(Clone, Debug, Default)]
pub(super) struct Quantization {
    global: QuantSettings,
    by_name: HashMap<String, QuantSettings>,
    fp8_block: Option<[u16; 2]>,
    /// Settings of weights in the groups of compressed-tensors.
    packed: Vec<PackedSettings>,
}

/// Weights of a group of compressed-tensors.
#[derive(Clone, Debug)]
struct PackedSettings {
    bits: Option<u64>,
    group: Option<u64>,
    is_symmetric: bool,
    kind: String,
}

impl PackedSettings {
    /// `weights` of a group.
    fn new(weights: &Value) -> Self {
        Self {
            bits: weights["num_bits"].as_u64(),
            group: weights["group_size"].as_u64(),
            is_symmetric: weights["symmetric"].as_bool().unwrap_or(true),
            kind: weights["type"].as_str().unwrap_or("int").to_owned(),
        }
    }
}

impl Quantization {
    /// Reads the settings of a config; `path` is for error messages.
    pub(super) fn from_config(config: &Value, path: &Path) -> Result<Self, Error> {
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
        let settings = |map: &serde_json::Map<String, Value>| -> Result<QuantSettings, Error> {
            let number = |key: &str| match map.get(key) {
                None | Some(Value::Null) => Ok(None),
                Some(v) => v.as_u64().map(|n| Some(n as usize)).ok_or_else(|| {
                    bad(format!("\"{key}\" in \"quantization\" is {v}, not a number"))
                }),
            };
            let mode = map.get("mode").and_then(Value::as_str).map(str::to_owned);
            Ok(QuantSettings { bits: number("bits")?, group: number("group_size")?, mode })
        };
        let mut by_name = HashMap::new();
        for (name, value) in map {
            if let Some(tensor) = value.as_object() {
                by_name.insert(name.clone(), settings(tensor)?);
            }
        }
        let fp8_block = match map.get("weight_block_size") {
            None | Some(Value::Null) => None,
            Some(size) => match serde_json::from_value::<[u16; 2]>(size.clone()) {
                Ok(block) if !block.contains(&0) => Some(block),
                _ => {
                    return Err(bad(format!(
                        "\"weight_block_size\" is {size}, not the rows and columns of a block"
                    )));
                }
            },
        };
        let groups = map.get("config_groups").and_then(Value::as_object);
        let weights = groups.into_iter().flatten().map(|(_, group)| &group["weights"]);
        let packed = weights.filter(|w| w.is_object()).map(PackedSettings::new).collect();
        Ok(Self { global: settings(map)?, by_name, fp8_block, packed })
    }

    /// Rows and columns of a block of FP8 weights that share a scale.
    pub(super) fn fp8_block(&self) -> [u16; 2] {
        self.fp8_block.unwrap_or(FP8_BLOCK)
    }

    /// Checks bits and group size of packed quants against the groups of compressed-tensors, if the
    /// config has any: one of them must agree.
    pub(super) fn check_packed(&self, bits: u8, group: u16) -> Result<(), String> {
        let agrees = |settings: &PackedSettings| {
            settings.is_symmetric
                && settings.kind == "int"
                && settings.bits.is_none_or(|b| b == u64::from(bits))
                && settings.group.is_none_or(|g| g == u64::from(group))
        };
        if self.packed.is_empty() || self.packed.iter().any(agrees) {
            return Ok(());
        }
        Err(format!(
            "its tensors have symmetric integers of {bits} bits in groups of {group}, which no group \
             of \"quantization_config\" in config.json has"
        ))
    }

    /// Checks mode, bits and group size of a tensor against the settings under its name, if any.
    /// Global settings may differ from a tensor's, but their mode must be a known one.
    pub(super) fn check(
        &self,
        name: &str,
        mode: &str,
        bits: usize,
        group: usize,
    ) -> Result<(), String> {
        if let Some(other) = self.global.mode.as_deref().filter(|mode| !MODES.contains(mode)) {
            return Err(format!(
                "the mode {other:?} is not supported; supported are: {}",
                MODES.join(", ")
            ));
        }
        let Some(named) = self.by_name.get(name) else { return Ok(()) };
        let named_bits = named.bits.or(self.global.bits);
        let named_group = named.group.or(self.global.group);
        let named_mode = named.mode.as_deref().unwrap_or(mode);
        if named_mode != mode
            || named_bits.is_some_and(|b| b != bits)
            || named_group.is_some_and(|g| g != group)
        {
            return Err(format!(
                "\"quantization\" gives it {named_mode} with {} bits in groups of {}, its tensors \
                 have {mode}, {bits} and {group}",
                named_bits.map_or("?".into(), |b| b.to_string()),
                named_group.map_or("?".into(), |g| g.to_string()),
            ));
        }
        Ok(())
    }
}
