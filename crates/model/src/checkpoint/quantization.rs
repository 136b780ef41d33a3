//! Quantisation settings of `config.json`. Tensor shapes decide the format; these must agree.

use std::{collections::HashMap, fmt, path::Path};

use moeflux_base::Error;
use serde_json::Value;

use super::text_config::text_config;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct QuantSettings {
    bits: Option<usize>,
    group: Option<usize>,
    mode: Option<String>,
}

/// Quantisation modes of MLX.
const MODES: [&str; 4] = ["affine", "mxfp4", "nvfp4", "mxfp8"];

/// The `quantization` map of `config.json`: global settings, and settings by tensor name.
#[derive(Clone, Debug, Default)]
pub(super) struct Quantization {
    global: QuantSettings,
    by_name: HashMap<String, QuantSettings>,
    fp8_block: Option<[u16; 2]>,
    /// Settings of weights in the groups of compressed-tensors and ModelOpt.
    groups: Vec<WeightGroup>,
    stored_by_inputs: InputMajorSettings,
}

/// Settings of AWQ and GPTQ.
#[derive(Clone, Debug, Default)]
struct InputMajorSettings {
    /// Value of `quant_method`.
    method: Option<String>,
    /// Value of `version` of AWQ, or of `checkpoint_format` of GPTQ.
    variant: Option<String>,
    /// Value of `desc_act`.
    orders_inputs: Option<bool>,
    /// Whether some modules have other settings, chosen by patterns.
    has_exceptions: bool,
}

impl InputMajorSettings {
    fn new(map: &serde_json::Map<String, Value>) -> Self {
        let text = |key: &str| map.get(key).and_then(Value::as_str).map(str::to_lowercase);
        let method = text("quant_method");
        let is_gptq = method.as_deref() == Some("gptq");
        Self {
            method,
            variant: text(if is_gptq { "checkpoint_format" } else { "version" }),
            orders_inputs: map.get("desc_act").and_then(Value::as_bool),
            has_exceptions: map.get("dynamic").is_some_and(Value::is_object),
        }
    }
}

/// Numbers that quantised weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberKind {
    /// Symmetric integers.
    Integer,
    Float,
}

/// Weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaledPart {
    /// Inputs of a row.
    Group(usize),
    /// Rows and columns.
    Block([u16; 2]),
    Row,
    Matrix,
}

/// Quantisation of a matrix as its tensors have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightScheme {
    pub(super) kind: NumberKind,
    pub(super) bits: u8,
    pub(super) part: ScaledPart,
}

impl fmt::Display for WeightScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            NumberKind::Integer => "symmetric integers",
            NumberKind::Float => "floats",
        };
        write!(f, "{kind} of {} bits ", self.bits)?;
        match self.part {
            ScaledPart::Group(group) => write!(f, "in groups of {group}"),
            ScaledPart::Block([rows, cols]) => write!(f, "in blocks of {rows} x {cols}"),
            ScaledPart::Row => f.write_str("with a scale per row"),
            ScaledPart::Matrix => f.write_str("with a scale per matrix"),
        }
    }
}

/// Weights of a group of `config_groups`.
#[derive(Clone, Debug)]
struct WeightGroup {
    bits: Option<u64>,
    group: Option<u64>,
    block: Option<[u16; 2]>,
    strategy: Option<String>,
    is_symmetric: bool,
    is_float: bool,
}

impl WeightGroup {
    /// `weights` of a group.
    fn new(weights: &Value) -> Self {
        Self {
            bits: weights["num_bits"].as_u64(),
            group: weights["group_size"].as_u64(),
            block: serde_json::from_value(weights["block_structure"].clone()).ok(),
            strategy: weights["strategy"].as_str().map(str::to_owned),
            is_symmetric: weights["symmetric"].as_bool().unwrap_or(true),
            is_float: weights["type"] == "float",
        }
    }

    /// Whether tensors of this scheme can be of the group.
    fn agrees(&self, scheme: WeightScheme) -> bool {
        let strategy = |names: &[&str]| {
            self.strategy.as_deref().is_none_or(|strategy| names.contains(&strategy))
        };
        self.is_symmetric
            && self.is_float == (scheme.kind == NumberKind::Float)
            && self.bits.is_none_or(|bits| bits == u64::from(scheme.bits))
            && match scheme.part {
                ScaledPart::Group(group) => self.group.is_none_or(|g| g == group as u64),
                ScaledPart::Block(block) => {
                    strategy(&["block", "group"]) && self.block.is_none_or(|b| b == block)
                }
                ScaledPart::Row => strategy(&["channel"]),
                ScaledPart::Matrix => strategy(&["tensor"]),
            }
    }
}

impl Quantization {
    /// Reads the settings of a config; `path` is for error messages.
    pub(super) fn from_config(config: &Value, path: &Path) -> Result<Self, Error> {
        let text = text_config(config);
        let find = |key: &str| config.get(key).or_else(|| text.get(key)).filter(|v| !v.is_null());
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
                // AWQ and GPTQ: one group for all inputs.
                Some(v) if v.as_i64() == Some(-1) => Ok(None),
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
        let groups = weights.filter(|w| w.is_object()).map(WeightGroup::new).collect();
        let stored_by_inputs = InputMajorSettings::new(map);
        Ok(Self { global: settings(map)?, by_name, fp8_block, groups, stored_by_inputs })
    }

    /// Rows and columns of the blocks of all FP8 weights, as `weight_block_size` gives them.
    pub(super) fn fp8_block(&self) -> Option<[u16; 2]> {
        self.fp8_block
    }

    /// Rows and columns of blocks that some groups of weights have.
    pub(super) fn group_blocks(&self) -> impl Iterator<Item = [u16; 2]> + '_ {
        self.groups.iter().filter_map(|group| group.block).filter(|block| !block.contains(&0))
    }

    /// Checks the quantisation of a matrix against the groups of `config_groups`, if the config has
    /// any: one of them must agree.
    pub(super) fn check_scheme(&self, scheme: WeightScheme) -> Result<(), String> {
        if self.groups.is_empty() || self.groups.iter().any(|group| group.agrees(scheme)) {
            return Ok(());
        }
        Err(format!(
            "its tensors have {scheme}, which no group of \"quantization_config\" in config.json has"
        ))
    }

    /// Whether `g_idx` of GPTQ may hold an order of inputs that its group size does not give.
    pub(super) fn may_order_inputs(&self) -> bool {
        self.stored_by_inputs.orders_inputs != Some(false)
    }

    /// Value that GPTQ's zero points lack: one, except in its second format.
    pub(super) fn gptq_zero_offset(&self) -> u8 {
        u8::from(self.stored_by_inputs.variant.as_deref() != Some("gptq_v2"))
    }

    /// Checks method, bits and group size of weights in the layout of AWQ or GPTQ, which `method`
    /// says, against the settings for all tensors.
    pub(super) fn check_input_major(
        &self,
        method: &str,
        bits: u8,
        group: usize,
    ) -> Result<(), String> {
        let settings = &self.stored_by_inputs;
        if let Some(other) = settings.method.as_deref().filter(|m| *m != method) {
            return Err(format!(
                "its tensors are in the layout of {method}, \"quant_method\" in config.json is \
                 {other:?}"
            ));
        }
        let read: &[&str] = if method == "awq" { &["gemm"] } else { &["gptq", "gptq_v2"] };
        if let Some(variant) = settings.variant.as_deref().filter(|v| !read.contains(v)) {
            return Err(format!(
                "it is in the variant {variant:?} of {method}; read are {}",
                read.join(" and ")
            ));
        }
        let differs = self.global.bits.is_some_and(|b| b != usize::from(bits))
            || self.global.group.is_some_and(|g| g != group);
        if differs && !settings.has_exceptions {
            return Err(format!(
                "its tensors have {bits} bits in groups of {group}, which differs from \
                 \"quantization_config\" in config.json"
            ));
        }
        Ok(())
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
