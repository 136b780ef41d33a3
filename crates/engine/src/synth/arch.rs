//! The tensors of each architecture, from its `config.json`.
//!
//! To add an architecture: a function from a config to its modules, and a line in [`ARCHITECTURES`].

use std::ops::Range;

use moeflux_compute::Scalar;
use serde_json::{Map, Value};

use super::{
    tokenizer,
    values::{Affine, GROUP, Lead, Stream, Values},
};
use crate::Error;

/// A number in a config above this is a mistake, and keeps every product of three within 64 bits.
const MOST: u64 = 1 << 20;
/// More layers or experts than these are a mistake.
const MOST_LAYERS: u64 = 4096;
const MOST_EXPERTS: u64 = 1 << 16;

/// Mean of the first group of channels of every embedding: the lead. It stays in the residual stream, so each router
/// sees it at every token, and experts that a router gives a weight on it are popular.
const LEAD: f32 = 1.0;
/// Weight of the lead in the head for all ids but printable ASCII: their logits are so low that sampled text is
/// readable, and never ends before the limit that was asked for.
const UNPRINTED: f32 = -0.5;

/// Standard deviation of the other channels of embeddings. Less than what the first mixer adds, so that a token's
/// experts follow from its context, not from the token alone.
const EMBEDDING: f32 = 0.35;
/// Of the `k` experts of a token, the share that is not among the popular ones.
const TAIL_SHARE: f32 = 0.3;

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
    Plain { scalar: Scalar, low: f32, high: f32, lead: Lead },
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

type Modules = fn(&Map<String, Value>, Routing) -> Result<Vec<Module>, Error>;

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
    make(text_config(config), routing)
}

/// The part of a config that describes the language model: nested, or all of it.
pub(super) fn text_config(config: &Map<String, Value>) -> &Map<String, Value> {
    config.get("text_config").and_then(Value::as_object).unwrap_or(config)
}

/// Source: mlx-lm, models/qwen3_moe.py.
fn qwen3_moe(config: &Map<String, Value>, routing: Routing) -> Result<Vec<Module>, Error> {
    let mut b = Builder::new(config, routing, Growth { mixer: 0.39, experts: 0.07 })?;
    let sparse_step = b.c.number_or("decoder_sparse_step", 1)?;
    let dense_layers = b.c.list("mlp_only_layers")?;
    b.embedding("model.embed_tokens");
    for layer in 0..b.sizes.layers {
        let at = format!("model.layers.{layer}.");
        b.norms(&at);
        b.attention(layer, &format!("{at}self_attn."), 1)?;
        if dense_layers.contains(&layer) || (layer + 1) % sparse_step != 0 {
            let intermediate = b.c.number("intermediate_size")?;
            b.mlp(layer, &format!("{at}mlp."), intermediate);
        } else {
            b.experts(layer, &format!("{at}mlp."));
        }
    }
    b.head("model.norm", "lm_head")?;
    Ok(b.out)
}

/// Source: mlx-lm, models/qwen3_5.py and qwen3_next.py.
fn qwen3_5_moe(config: &Map<String, Value>, routing: Routing) -> Result<Vec<Module>, Error> {
    let mut b = Builder::new(config, routing, Growth { mixer: 0.24, experts: 0.15 })?;
    let shared = b.c.number("shared_expert_intermediate_size")?;
    let full = full_attention(&b.c, b.sizes.layers)?;
    b.embedding("language_model.model.embed_tokens");
    for (layer, full) in (0..).zip(full) {
        let at = format!("language_model.model.layers.{layer}.");
        b.norms(&at);
        if full {
            // q_proj makes a query and an output gate per head.
            b.attention(layer, &format!("{at}self_attn."), 2)?;
        } else {
            b.delta_net(layer, &format!("{at}linear_attn."))?;
        }
        b.experts(layer, &format!("{at}mlp."));
        b.mlp(layer, &format!("{at}mlp.shared_expert."), shared);
        b.router(format!("{at}mlp.shared_expert_gate"), 1, Lead::Zero);
    }
    b.head("language_model.model.norm", "language_model.lm_head")?;
    Ok(b.out)
}

/// For each layer whether its mixer is full attention: each `full_attention_interval`th, as mlx-lm has it, and
/// `layer_types`, where there are any, must say the same.
fn full_attention(c: &Fields<'_>, layers: u64) -> Result<Vec<bool>, Error> {
    let interval = c.number_or("full_attention_interval", 4)?;
    let full: Vec<bool> = (1..=layers).map(|l| l % interval == 0).collect();
    if let Some(types) = c.config.get("layer_types").and_then(Value::as_array) {
        let names = full.iter().map(|full| if *full { "full_attention" } else { "linear_attention" });
        if !types.iter().map(Value::as_str).eq(names.map(Some)) {
            return Err(c.wrong(format!(
                "layer_types must name {layers} layers, each {interval}th full_attention (full_attention_interval) \
                 and the others linear_attention"
            )));
        }
    }
    Ok(full)
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
        if sizes.layers > MOST_LAYERS || sizes.experts > MOST_EXPERTS {
            return Err(c.wrong(format!(
                "num_hidden_layers {} and num_experts {} exceed {MOST_LAYERS} or {MOST_EXPERTS}",
                sizes.layers, sizes.experts
            )));
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
}

/// Mean squares that the first layer adds to the residual stream, without the lead; measured. Layer `l` adds these
/// over `l + 1`, so that the stream of a deep model neither explodes nor forgets the lead.
#[derive(Clone, Copy)]
struct Growth {
    /// By a mixer, if no part of what it reads were the lead, which its norm hides from it.
    mixer: f32,
    experts: f32,
}

impl Growth {
    /// Root mean square of the residual stream at the router of a layer.
    fn at_router(self, layer: u64, hidden: u64) -> f32 {
        let lead = GROUP as f32 * LEAD * LEAD;
        let own = hidden.saturating_sub(GROUP as u64).max(GROUP as u64) as f32;
        let mut square = EMBEDDING * EMBEDDING;
        for l in 0..=layer {
            let seen = square * own / (square * own + lead);
            square += self.mixer * seen / (l as f32 + 1.0);
            if l < layer {
                square += self.experts / (l as f32 + 1.0);
            }
        }
        square.sqrt()
    }
}

/// Gain of the projections of a layer that write into the residual stream; see [`Growth`].
fn residual_gain(layer: u64) -> f32 {
    1.0 / (layer as f32 + 1.0).sqrt()
}

/// The parts that models are made of.
struct Builder<'a> {
    c: Fields<'a>,
    sizes: Sizes,
    routing: Routing,
    growth: Growth,
    out: Vec<Module>,
}

impl<'a> Builder<'a> {
    fn new(config: &'a Map<String, Value>, routing: Routing, growth: Growth) -> Result<Self, Error> {
        let c = Fields { config };
        Ok(Builder { sizes: Sizes::new(&c)?, c, routing, growth, out: Vec::new() })
    }

    fn embedding(&mut self, path: &str) {
        let gain = EMBEDDING * (self.sizes.hidden as f32).sqrt();
        let kind = Kind::Linear { cols: self.sizes.hidden, bits: 4, gain, lead: Lead::Same(LEAD) };
        self.out.push(Module { path: path.into(), rows: vec![self.sizes.vocab], kind });
    }

    fn head(&mut self, norm: &str, head: &str) -> Result<(), Error> {
        self.norm(norm.into(), self.sizes.hidden);
        match self.c.config.get("tie_word_embeddings") {
            Some(Value::Bool(true)) => return Ok(()),
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(other) => {
                return Err(self.c.wrong(format!("tie_word_embeddings is {other}, not true or false")));
            }
        }
        let lead = Lead::Outside { rows: tokenizer::PRINTABLE, mean: UNPRINTED };
        let kind = Kind::Linear { cols: self.sizes.hidden, bits: 4, gain: 1.0, lead };
        self.out.push(Module { path: head.into(), rows: vec![self.sizes.vocab], kind });
        Ok(())
    }

    /// The two norms of a layer.
    fn norms(&mut self, at: &str) {
        // Mixers average over tokens, which would leave little but the lead: they do not see it.
        let kind = Kind::Plain { scalar: Scalar::BF16, low: 0.9, high: 1.1, lead: Lead::Same(0.0) };
        let rows = vec![self.sizes.hidden];
        self.out.push(Module { path: format!("{at}input_layernorm.weight"), rows, kind });
        self.norm(format!("{at}post_attention_layernorm"), self.sizes.hidden);
    }

    /// Grouped-query attention with norms of queries and keys; `per_query` is 2 where an output gate comes along.
    fn attention(&mut self, layer: u64, at: &str, per_query: u64) -> Result<(), Error> {
        let c = &self.c;
        let hidden = self.sizes.hidden;
        let heads = c.number("num_attention_heads")?;
        let kv_heads = c.number("num_key_value_heads")?;
        c.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
        let head_dim = match c.config.get("head_dim") {
            None | Some(Value::Null) => hidden / heads,
            Some(_) => c.number("head_dim")?,
        };
        if head_dim < 2 || !head_dim.is_multiple_of(2) {
            return Err(c.wrong(format!("head_dim {head_dim} must be even, for rotary embeddings")));
        }
        if c.config.get("attention_bias").and_then(Value::as_bool) == Some(true) {
            return Err(c.wrong("attention_bias true is not supported: published models have false"));
        }
        self.linear(format!("{at}q_proj"), [heads * head_dim * per_query], hidden, 1.0);
        self.linear(format!("{at}k_proj"), [kv_heads * head_dim], hidden, 1.0);
        self.linear(format!("{at}v_proj"), [kv_heads * head_dim], hidden, 1.0);
        self.linear(format!("{at}o_proj"), [hidden], heads * head_dim, residual_gain(layer));
        // Around 2 each, scores have a standard deviation of 4: a head attends to a few tokens, not to their mean.
        self.plain(format!("{at}q_norm.weight"), vec![head_dim], Scalar::BF16, 1.9..2.1);
        self.plain(format!("{at}k_norm.weight"), vec![head_dim], Scalar::BF16, 1.9..2.1);
        Ok(())
    }

    /// A gated delta-net.
    fn delta_net(&mut self, layer: u64, at: &str) -> Result<(), Error> {
        let c = &self.c;
        let hidden = self.sizes.hidden;
        let value_heads = c.number("linear_num_value_heads")?;
        let key_heads = c.number("linear_num_key_heads")?;
        c.divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)?;
        let value_dim = c.number("linear_value_head_dim")?;
        let keys = key_heads * c.number("linear_key_head_dim")?;
        let conv = c.number_or("linear_conv_kernel_dim", 4)?;
        let values = value_heads * value_dim;
        let channels = 2 * keys + values;
        self.linear(format!("{at}in_proj_qkv"), [channels], hidden, 1.0);
        self.linear(format!("{at}in_proj_z"), [values], hidden, 1.0);
        self.linear(format!("{at}in_proj_b"), [value_heads], hidden, 1.0);
        self.linear(format!("{at}in_proj_a"), [value_heads], hidden, 1.0);
        self.linear(format!("{at}out_proj"), [hidden], values, residual_gain(layer));
        // Small, where SiLU is nearly linear: else queries, keys and values would have a mean, the state would sum
        // it up, and all tokens would look alike.
        self.plain(format!("{at}conv1d.weight"), vec![channels, conv, 1], Scalar::BF16, -0.25..0.25);
        // Decays exp(-exp(A_log) softplus(a + dt_bias)): memories from a few tokens to thousands.
        self.plain(format!("{at}A_log"), vec![value_heads], Scalar::F32, -2.3..2.0);
        self.plain(format!("{at}dt_bias"), vec![value_heads], Scalar::BF16, -4.0..-1.0);
        self.norm(format!("{at}norm"), value_dim);
        Ok(())
    }

    fn mlp(&mut self, layer: u64, at: &str, intermediate: u64) {
        let hidden = self.sizes.hidden;
        self.linear(format!("{at}gate_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{at}up_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{at}down_proj"), [hidden], intermediate, residual_gain(layer));
    }

    /// Router and stacked experts of a layer.
    fn experts(&mut self, layer: u64, at: &str) {
        let gate = format!("{at}gate");
        let lead = self.popularity(layer, &gate);
        let Sizes { hidden, experts, intermediate, .. } = self.sizes;
        self.router(gate, experts, lead);
        self.linear(format!("{at}switch_mlp.gate_proj"), [experts, intermediate], hidden, 1.0);
        self.linear(format!("{at}switch_mlp.up_proj"), [experts, intermediate], hidden, 1.0);
        self.linear(
            format!("{at}switch_mlp.down_proj"),
            [experts, hidden],
            intermediate,
            residual_gain(layer),
        );
    }

    /// Which experts a router favours, as weights of the lead.
    ///
    /// A score is the lead times its weight, plus the token's own part. Some `1.2 k` experts get an advantage that
    /// puts them at the threshold of being chosen, so about every other token chooses each of them; the other
    /// experts share the rest evenly. Such a head on a flat tail gives the hit rates of trained routers (see
    /// docs/measured/synth-skew.md).
    fn popularity(&self, layer: u64, gate: &str) -> Lead {
        if self.routing.skew == 0.0 {
            // Not `Lead::Zero`: the lead must not meet random weights either.
            return Lead::Rows(Vec::new());
        }
        let (k, experts, hidden) =
            (self.sizes.top_k as f32, self.sizes.experts as f32, self.sizes.hidden as f32);
        let hot = (1.2 * k).round().clamp(1.0, experts);
        let tail = (experts - hot).max(1.0);
        let threshold = normal_quantile((1.0 - TAIL_SHARE * k / tail).clamp(0.5, 0.9999));
        // Standard deviation of a token's own part, over what a weight of 1 on the lead gives; both before the norm.
        let lead = (GROUP as f32).min(hidden);
        let own = (hidden - lead).max(lead) / hidden;
        let unit = self.growth.at_router(layer, self.sizes.hidden) * own.sqrt() / (lead * LEAD);

        let order = Stream::new(self.routing.seed, &format!("{gate}.popularity"));
        let mut ids: Vec<u64> = (0..self.sizes.experts).collect();
        ids.sort_by_key(|e| order.at(*e));
        let rows = ids.iter().take(hot as usize).enumerate().map(|(i, e)| {
            let slope = 0.8 * (0.5 - (i as f32 + 0.5) / hot);
            (*e, self.routing.skew as f32 * (threshold + slope) * unit)
        });
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by_key(|(e, _)| *e);
        Lead::Rows(rows)
    }

    /// A router or the gate of a shared expert: 8 bits, as mlx-lm keeps them.
    fn router(&mut self, path: String, rows: u64, lead: Lead) {
        let kind = Kind::Linear { cols: self.sizes.hidden, bits: 8, gain: 1.0, lead };
        self.out.push(Module { path, rows: vec![rows], kind });
    }

    fn linear<const N: usize>(&mut self, path: String, rows: [u64; N], cols: u64, gain: f32) {
        let kind = Kind::Linear { cols, bits: 4, gain, lead: Lead::Zero };
        self.out.push(Module { path, rows: rows.to_vec(), kind });
    }

    /// RMSNorm weights near 1, as exports for MLX store them: the 1 that some models add is in the weight already.
    fn norm(&mut self, path: String, len: u64) {
        self.plain(format!("{path}.weight"), vec![len], Scalar::BF16, 0.9..1.1);
    }

    fn plain(&mut self, path: String, rows: Vec<u64>, scalar: Scalar, bounds: Range<f32>) {
        let kind = Kind::Plain { scalar, low: bounds.start, high: bounds.end, lead: Lead::Zero };
        self.out.push(Module { path, rows, kind });
    }
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
            Kind::Plain { scalar, low, high, lead } => {
                let cols = rows.last().copied().unwrap_or(1);
                let values = Values::Uniform { scalar, low, high, cols, lead };
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
struct Fields<'a> {
    config: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn wrong(&self, what: impl std::fmt::Display) -> Error {
        Error::Input(format!("config: {what}"))
    }

    fn number(&self, name: &str) -> Result<u64, Error> {
        let Some(value) = self.config.get(name) else {
            return Err(self.wrong(format!("{name} is missing")));
        };
        match value.as_u64() {
            Some(n @ 1..=MOST) => Ok(n),
            _ => Err(self.wrong(format!("{name} is {value}; it must be a whole number from 1 to {MOST}"))),
        }
    }

    fn number_or(&self, name: &str, default: u64) -> Result<u64, Error> {
        match self.config.get(name) {
            None | Some(Value::Null) => Ok(default),
            Some(_) => self.number(name),
        }
    }

    fn list(&self, name: &str) -> Result<Vec<u64>, Error> {
        match self.config.get(name) {
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
