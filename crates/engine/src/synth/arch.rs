//! The tensors of each architecture, from its `config.json`.
//!
//! To add an architecture: a function from a config to its modules, and a line in [`ARCHITECTURES`].

use moeflux_compute::Scalar;
use serde_json::{Map, Value};

use super::{
    tokenizer,
    values::{Affine, GROUP, Lead, Stream, Values},
};
use crate::Error;

/// A number in a config above this is a mistake, and keeps every product of three within 64 bits.
const MOST: u64 = 1 << 20;
/// More layers than this are a mistake.
const MOST_LAYERS: u64 = 10_000;

/// Mean of the first group of every embedding, whose other channels have standard deviation 1. It stays in the
/// residual stream, so each router sees it at every token: what a router weighs it with makes experts popular.
const LEAD: f32 = 1.0;
/// Weight of the lead in the head for ids that the tokenizer cannot spell, and for the special tokens: their logits
/// are so low that generated text is always printable and ends at the limit that was asked for.
const UNSPELLED: f32 = -0.5;

/// Standard deviation that projections into the residual stream give, relative to `1 / sqrt(inputs)`. Small, so that
/// a deep model's residual stream neither explodes nor forgets the lead.
const MIXER_GAIN: f32 = 0.2;
const EXPERT_GAIN: f32 = 0.4;
/// By how much one layer raises the mean square of the residual stream, which begins at 1.
const GROWTH: f32 = 0.02;

/// What the routers are asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routing {
    pub(super) seed: u64,
    pub(super) skew: f64,
}

/// A named matrix or vector, before it is split into tensors.
pub(super) struct Module {
    pub(super) path: String,
    /// Outputs; for stacked experts `[experts, outputs]`. For a vector its whole shape.
    pub(super) rows: Vec<u64>,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    /// `[.., cols]`, quantised where `cols` is a whole number of groups, else bf16.
    Linear { cols: u64, bits: u32, gain: f32, lead: Lead },
    /// Uniform numbers under this very name.
    Plain { scalar: Scalar, low: f32, high: f32 },
}

/// One tensor of the checkpoint: its name, what it holds, and where its random numbers come from.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: u64,
    pub(super) values: Values,
    pub(super) stream: Stream,
}

type Modules = fn(&Fields<'_>, Routing) -> Result<Vec<Module>, Error>;

/// `model_type`, and what makes its modules.
const ARCHITECTURES: &[(&str, Modules)] = &[("qwen3_moe", qwen3_moe), ("qwen3_5_moe", qwen3_5_moe)];

/// The modules of the model that a config describes.
///
/// # Errors
/// The architecture is not supported, or a number is missing, absurd, or does not fit the others.
pub(super) fn modules(config: &Map<String, Value>, routing: Routing) -> Result<Vec<Module>, Error> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    let Some((_, make)) = ARCHITECTURES.iter().find(|(name, _)| *name == model_type) else {
        let names: Vec<_> = ARCHITECTURES.iter().map(|(name, _)| *name).collect();
        return Err(Error::Input(format!(
            "the config's model_type {model_type:?} cannot be made; supported are {}",
            names.join(", ")
        )));
    };
    make(&Fields(text_config(config)), routing)
}

/// The part of a config that describes the language model: nested, or all of it.
pub(super) fn text_config(config: &Map<String, Value>) -> &Map<String, Value> {
    config.get("text_config").and_then(Value::as_object).unwrap_or(config)
}

/// Source: mlx-lm, models/qwen3_moe.py.
fn qwen3_moe(c: &Fields<'_>, routing: Routing) -> Result<Vec<Module>, Error> {
    let sizes = Sizes::new(c)?;
    let sparse_step = c.number_or("decoder_sparse_step", 1)?;
    let dense_layers = c.list("mlp_only_layers")?;
    let mut out = Vec::new();
    sizes.embedding(&mut out, "model.");
    for layer in 0..sizes.layers {
        let at = format!("model.layers.{layer}.");
        sizes.norms(&mut out, &at);
        attention(c, &mut out, &format!("{at}self_attn."), &sizes, 1)?;
        if dense_layers.contains(&layer) || (layer + 1) % sparse_step != 0 {
            mlp(&mut out, &format!("{at}mlp."), sizes.hidden, c.number("intermediate_size")?);
        } else {
            sizes.experts(&mut out, &format!("{at}mlp."), layer, routing);
        }
    }
    sizes.head(c, &mut out, "model.", "")?;
    Ok(out)
}

/// Source: mlx-lm, models/qwen3_5.py and qwen3_next.py.
fn qwen3_5_moe(c: &Fields<'_>, routing: Routing) -> Result<Vec<Module>, Error> {
    let sizes = Sizes::new(c)?;
    let shared = c.number("shared_expert_intermediate_size")?;
    let full = full_attention(c, sizes.layers)?;
    let mut out = Vec::new();
    sizes.embedding(&mut out, "language_model.model.");
    for layer in 0..sizes.layers {
        let at = format!("language_model.model.layers.{layer}.");
        sizes.norms(&mut out, &at);
        if full[layer as usize] {
            // q_proj makes a query and an output gate per head.
            attention(c, &mut out, &format!("{at}self_attn."), &sizes, 2)?;
        } else {
            delta_net(c, &mut out, &format!("{at}linear_attn."), sizes.hidden)?;
        }
        sizes.experts(&mut out, &format!("{at}mlp."), layer, routing);
        mlp(&mut out, &format!("{at}mlp.shared_expert."), sizes.hidden, shared);
        out.push(router(format!("{at}mlp.shared_expert_gate"), 1, sizes.hidden, Lead::Zero));
    }
    sizes.head(c, &mut out, "language_model.model.", "language_model.")?;
    Ok(out)
}

/// For each layer whether its mixer is full attention: by `layer_types`, else every `full_attention_interval`th.
fn full_attention(c: &Fields<'_>, layers: u64) -> Result<Vec<bool>, Error> {
    let interval = c.number_or("full_attention_interval", 4)?;
    let by_interval: Vec<bool> = (1..=layers).map(|l| l % interval == 0).collect();
    let Some(types) = c.0.get("layer_types").and_then(Value::as_array) else {
        return Ok(by_interval);
    };
    let by_type: Vec<bool> = types.iter().map(|t| t == "full_attention").collect();
    if by_type != by_interval {
        return Err(c.wrong(format!(
            "layer_types must name {layers} layers, each {interval}th full_attention and the others linear_attention"
        )));
    }
    Ok(by_type)
}

/// Grouped-query attention with norms of queries and keys; `per_query` is 2 where an output gate comes along.
fn attention(
    c: &Fields<'_>,
    out: &mut Vec<Module>,
    at: &str,
    sizes: &Sizes,
    per_query: u64,
) -> Result<(), Error> {
    let heads = c.number("num_attention_heads")?;
    let kv_heads = c.number("num_key_value_heads")?;
    c.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
    let head_dim = match c.0.get("head_dim") {
        None | Some(Value::Null) => sizes.hidden / heads,
        Some(_) => c.number("head_dim")?,
    };
    if head_dim < 2 || !head_dim.is_multiple_of(2) {
        return Err(c.wrong(format!("head_dim {head_dim} must be even, for rotary embeddings")));
    }
    if c.0.get("attention_bias").and_then(Value::as_bool) == Some(true) {
        return Err(c.wrong("attention_bias true is not supported: published models have false"));
    }
    out.push(linear(format!("{at}q_proj"), [heads * head_dim * per_query], sizes.hidden, 1.0));
    out.push(linear(format!("{at}k_proj"), [kv_heads * head_dim], sizes.hidden, 1.0));
    out.push(linear(format!("{at}v_proj"), [kv_heads * head_dim], sizes.hidden, 1.0));
    out.push(linear(format!("{at}o_proj"), [sizes.hidden], heads * head_dim, MIXER_GAIN));
    out.push(norm(format!("{at}q_norm"), head_dim));
    out.push(norm(format!("{at}k_norm"), head_dim));
    Ok(())
}

/// A gated delta-net.
fn delta_net(c: &Fields<'_>, out: &mut Vec<Module>, at: &str, hidden: u64) -> Result<(), Error> {
    let value_heads = c.number("linear_num_value_heads")?;
    let key_heads = c.number("linear_num_key_heads")?;
    c.divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)?;
    let key_dim = c.number("linear_key_head_dim")?;
    let value_dim = c.number("linear_value_head_dim")?;
    let conv = c.number_or("linear_conv_kernel_dim", 4)?;
    let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
    let channels = 2 * keys + values;
    out.push(linear(format!("{at}in_proj_qkv"), [channels], hidden, 1.0));
    out.push(linear(format!("{at}in_proj_z"), [values], hidden, 1.0));
    out.push(linear(format!("{at}in_proj_b"), [value_heads], hidden, 1.0));
    out.push(linear(format!("{at}in_proj_a"), [value_heads], hidden, 1.0));
    out.push(linear(format!("{at}out_proj"), [hidden], values, MIXER_GAIN));
    out.push(plain(format!("{at}conv1d.weight"), vec![channels, conv, 1], Scalar::BF16, -0.9, 0.9));
    // Decays exp(-exp(A_log) softplus(a + dt_bias)): memories from a few tokens to thousands.
    out.push(plain(format!("{at}A_log"), vec![value_heads], Scalar::F32, -2.3, 2.0));
    out.push(plain(format!("{at}dt_bias"), vec![value_heads], Scalar::BF16, -4.0, -1.0));
    out.push(norm(format!("{at}norm"), value_dim));
    Ok(())
}

/// The numbers that every part of a model needs.
struct Sizes {
    hidden: u64,
    layers: u64,
    vocab: u64,
    experts: u64,
    top_k: u64,
    intermediate: u64,
}

impl Sizes {
    fn new(c: &Fields<'_>) -> Result<Self, Error> {
        let sizes = Sizes {
            hidden: c.number("hidden_size")?,
            layers: c.number("num_hidden_layers")?,
            vocab: c.number("vocab_size")?,
            experts: c.number("num_experts")?,
            top_k: c.number("num_experts_per_tok")?,
            intermediate: c.number("moe_intermediate_size")?,
        };
        if sizes.layers > MOST_LAYERS {
            return Err(c.wrong(format!("num_hidden_layers {} exceeds {MOST_LAYERS}", sizes.layers)));
        }
        if sizes.top_k > sizes.experts {
            return Err(c.wrong(format!(
                "num_experts_per_tok {} exceeds num_experts {}",
                sizes.top_k, sizes.experts
            )));
        }
        if sizes.vocab < u64::from(tokenizer::COUNT) {
            return Err(c.wrong(format!(
                "vocab_size {} is smaller than the tokenizer's {} ids",
                sizes.vocab,
                tokenizer::COUNT
            )));
        }
        Ok(sizes)
    }

    fn embedding(&self, out: &mut Vec<Module>, at: &str) {
        let kind = Kind::Linear {
            cols: self.hidden,
            bits: 4,
            gain: (self.hidden as f32).sqrt(),
            lead: Lead::Same(LEAD),
        };
        out.push(Module { path: format!("{at}embed_tokens"), rows: vec![self.vocab], kind });
    }

    fn norms(&self, out: &mut Vec<Module>, at: &str) {
        out.push(norm(format!("{at}input_layernorm"), self.hidden));
        out.push(norm(format!("{at}post_attention_layernorm"), self.hidden));
    }

    fn head(&self, c: &Fields<'_>, out: &mut Vec<Module>, model: &str, at: &str) -> Result<(), Error> {
        out.push(norm(format!("{model}norm"), self.hidden));
        match c.0.get("tie_word_embeddings") {
            Some(Value::Bool(true)) => return Ok(()),
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(other) => return Err(c.wrong(format!("tie_word_embeddings is {other}, not true or false"))),
        }
        let lead = Lead::From { rows: u64::from(tokenizer::BYTES), mean: UNSPELLED };
        let kind = Kind::Linear { cols: self.hidden, bits: 4, gain: 1.0, lead };
        out.push(Module { path: format!("{at}lm_head"), rows: vec![self.vocab], kind });
        Ok(())
    }

    /// Router and stacked experts of a layer.
    fn experts(&self, out: &mut Vec<Module>, at: &str, layer: u64, routing: Routing) {
        let gate = format!("{at}gate");
        let lead = self.popularity(&gate, layer, routing);
        out.push(router(gate, self.experts, self.hidden, lead));
        let (e, i) = (self.experts, self.intermediate);
        out.push(linear(format!("{at}switch_mlp.gate_proj"), [e, i], self.hidden, 1.0));
        out.push(linear(format!("{at}switch_mlp.up_proj"), [e, i], self.hidden, 1.0));
        out.push(linear(format!("{at}switch_mlp.down_proj"), [e, self.hidden], i, EXPERT_GAIN));
    }

    /// Which experts a router favours, as weights of the lead.
    ///
    /// A score is the lead times its weight, plus noise of the token. Some `1.2 k` experts get an advantage that
    /// puts them at the threshold of being chosen, so each is chosen by every other token; the others share the
    /// rest evenly. That is the head and the flat tail of trained routers (see docs/measured/synth-skew.md).
    fn popularity(&self, gate: &str, layer: u64, routing: Routing) -> Lead {
        if routing.skew == 0.0 {
            return Lead::Zero;
        }
        let (k, n) = (self.top_k as f32, self.experts as f32);
        let hot = (1.2 * k).round().clamp(1.0, n);
        let tail = (n - hot).max(1.0);
        let threshold = normal_quantile((1.0 - 0.4 * k / tail).clamp(0.5, 0.9999));
        // Channels of the lead against those of the noise, which a token's score draws from.
        let lead = (GROUP as f32).min(self.hidden as f32);
        let noise = (self.hidden as f32 - lead).max(lead);
        let residual = (1.0 + GROWTH * (layer as f32 + 0.5)).sqrt();
        let unit = residual * (noise / self.hidden as f32).sqrt() / (lead * LEAD);

        let order = Stream::new(routing.seed, &format!("{gate}.popularity"));
        let mut experts: Vec<u64> = (0..self.experts).collect();
        experts.sort_by_key(|e| order.at(*e));
        let rows = experts.iter().take(hot as usize).enumerate().map(|(i, e)| {
            let slope = 0.8 * (0.5 - (i as f32 + 0.5) / hot);
            (*e, routing.skew as f32 * (threshold + slope) * unit)
        });
        Lead::Rows(rows.collect())
    }
}

/// A router or the gate of a shared expert: 8 bits, as mlx-lm keeps them.
fn router(path: String, rows: u64, hidden: u64, lead: Lead) -> Module {
    Module { path, rows: vec![rows], kind: Kind::Linear { cols: hidden, bits: 8, gain: 1.0, lead } }
}

fn mlp(out: &mut Vec<Module>, at: &str, hidden: u64, intermediate: u64) {
    out.push(linear(format!("{at}gate_proj"), [intermediate], hidden, 1.0));
    out.push(linear(format!("{at}up_proj"), [intermediate], hidden, 1.0));
    out.push(linear(format!("{at}down_proj"), [hidden], intermediate, EXPERT_GAIN));
}

fn linear<const N: usize>(path: String, rows: [u64; N], cols: u64, gain: f32) -> Module {
    Module { path, rows: rows.to_vec(), kind: Kind::Linear { cols, bits: 4, gain, lead: Lead::Zero } }
}

/// RMSNorm weights near 1, as exports for MLX store them: the 1 that some models add is in the weight already.
fn norm(path: String, len: u64) -> Module {
    plain(format!("{path}.weight"), vec![len], Scalar::BF16, 0.9, 1.1)
}

fn plain(path: String, rows: Vec<u64>, scalar: Scalar, low: f32, high: f32) -> Module {
    Module { path, rows, kind: Kind::Plain { scalar, low, high } }
}

/// Where the standard normal distribution has `p` (at least a half) of its mass below.
/// Source: Abramowitz and Stegun, 26.2.23; off by less than 5e-4.
fn normal_quantile(p: f32) -> f32 {
    let t = (-2.0 * (1.0 - p).ln()).sqrt();
    t - (2.515_517 + t * (0.802_853 + t * 0.010_328))
        / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)))
}

impl Module {
    /// Bits and group size that `config.json` names for this module: only those that differ from the rest.
    pub(super) fn named_bits(&self) -> Option<u32> {
        match self.kind {
            Kind::Linear { cols, bits: 8, .. } if cols.is_multiple_of(GROUP as u64) => Some(8),
            _ => None,
        }
    }

    /// The tensors of the module.
    ///
    /// # Errors
    /// A size overflows.
    pub(super) fn tensors(self, seed: u64) -> Result<Vec<Tensor>, Error> {
        let Module { path, rows, kind } = self;
        let tensor = |name: String, shape: Vec<u64>, dtype, size: u64, values, stream: &str| {
            let bytes = shape.iter().try_fold(size, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 60);
            let bytes =
                bytes.ok_or_else(|| Error::Input(format!("tensor {name} of {shape:?} is too large")))?;
            Ok(Tensor { name, dtype, shape, bytes, values, stream: Stream::new(seed, stream) })
        };
        let with = |last: u64| rows.iter().copied().chain([last]).collect::<Vec<_>>();
        match kind {
            Kind::Plain { scalar, low, high } => {
                let values = Values::Uniform { scalar, low, high, cols: 1, lead: Lead::Zero };
                let stream = path.clone();
                Ok(vec![tensor(path, rows, scalar.name(), scalar.bytes() as u64, values, &stream)?])
            }
            Kind::Linear { cols, bits, gain, lead } => {
                let std = gain / (cols as f32).sqrt();
                let weight = format!("{path}.weight");
                if !cols.is_multiple_of(GROUP as u64) {
                    let (low, high) = (-std * 3f32.sqrt(), std * 3f32.sqrt());
                    let values = Values::Uniform { scalar: Scalar::BF16, low, high, cols, lead };
                    return Ok(vec![tensor(weight.clone(), with(cols), "BF16", 2, values, &weight)?]);
                }
                let groups = cols / GROUP as u64;
                let affine = Affine { bits, groups, std, lead };
                let scales = format!("{path}.scales");
                Ok(vec![
                    tensor(
                        weight.clone(),
                        with(cols * u64::from(bits) / 32),
                        "U32",
                        4,
                        Values::Quants,
                        &weight,
                    )?,
                    tensor(scales.clone(), with(groups), "BF16", 2, Values::Scales(affine.clone()), &scales)?,
                    tensor(
                        format!("{path}.biases"),
                        with(groups),
                        "BF16",
                        2,
                        Values::Biases(affine),
                        &scales,
                    )?,
                ])
            }
        }
    }
}

/// The fields of a config, read with errors that name them.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn wrong(&self, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("config: {what}"))
    }

    fn number(&self, name: &str) -> Result<u64, Error> {
        let Some(value) = self.0.get(name) else {
            return Err(self.wrong(format!("{name} is missing")));
        };
        match value.as_u64() {
            Some(n @ 1..=MOST) => Ok(n),
            _ => Err(self.wrong(format!("{name} is {value}; it must be a whole number from 1 to {MOST}"))),
        }
    }

    fn number_or(&self, name: &str, default: u64) -> Result<u64, Error> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.number(name),
        }
    }

    fn list(&self, name: &str) -> Result<Vec<u64>, Error> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(value) => value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_u64).collect())
                .ok_or_else(|| self.wrong(format!("{name} must be a list of layers"))),
        }
    }

    fn divides(&self, part: &str, n: u64, whole: &str, of: u64) -> Result<(), Error> {
        if of.is_multiple_of(n) {
            return Ok(());
        }
        Err(self.wrong(format!("{whole} {of} is not a multiple of {part} {n}")))
    }
}
