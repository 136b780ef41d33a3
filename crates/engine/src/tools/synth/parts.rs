//! The parts that models are made of.

use std::ops::Range;

use moeflux_compute::Scalar;
use serde_json::{Map, Value};

use super::{
    arch::{Architecture, ExpertNames, Routing},
    fields::Fields,
    module::{Kind, Module, Quant},
    tokenizer,
    values::{GROUP, Lead, Stream},
};
use crate::base::error::Error;

/// More layers or experts than these are a mistake.
const MAX_LAYERS: u64 = 4096;
const MAX_EXPERTS: u64 = 1 << 16;

/// Mean of the first group of channels of every embedding: the lead. It stays in the residual stream, so each router
/// sees it at every token, and experts that a router gives a weight on it are popular.
const LEAD: f32 = 1.0;
/// Weight of the lead in the head for all ids but printable ASCII: their logits are so low that sampled text is
/// readable, and never ends before the limit that was asked for.
const UNPRINTED: f32 = -0.5;

/// Weight of the lead in the last norm where the embedding is the head as well: logits then differ as much.
const TIED_NORM: f32 = 0.625;

/// Standard deviation of the other channels of embeddings. Less than what the first mixer adds, so that a token's
/// experts follow from its context, not from the token alone.
const EMBEDDING: f32 = 0.35;
/// Of the `k` experts of a token, the share that is not among the popular ones.
const TAIL_SHARE: f32 = 0.3;

/// The numbers that every part of a model needs.
pub(super) struct Sizes {
    pub(super) hidden: u64,
    pub(super) layers: u64,
    pub(super) vocab: u64,
    pub(super) experts: u64,
    pub(super) top_k: u64,
    pub(super) intermediate: u64,
}

impl Sizes {
    fn new(c: &Fields<'_>, names: ExpertNames) -> Result<Self, Error> {
        let ExpertNames { experts, top_k, intermediate } = names;
        let sizes = Sizes {
            hidden: c.number("hidden_size")?,
            layers: c.number("num_hidden_layers")?,
            vocab: c.number("vocab_size")?,
            experts: c.number(experts)?,
            top_k: c.number(top_k)?,
            intermediate: c.number(intermediate)?,
        };
        if sizes.layers > MAX_LAYERS || sizes.experts > MAX_EXPERTS {
            return Err(c.wrong(format!(
                "num_hidden_layers {} and {experts} {} exceed {MAX_LAYERS} or {MAX_EXPERTS}",
                sizes.layers, sizes.experts
            )));
        }
        if sizes.top_k > sizes.experts {
            return Err(
                c.wrong(format!("{top_k} {} exceeds {experts} {}", sizes.top_k, sizes.experts))
            );
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

/// Mean squares that the first layer adds to the residual stream, without the lead: measured, or within a third of what
/// was measured. Layer `l` adds these
/// over `l + 1`, so that the stream of a deep model neither explodes nor forgets the lead.
#[derive(Clone, Copy)]
pub(super) struct Growth {
    /// By a mixer, if no part of what it reads were the lead, which its norm hides from it.
    pub(super) mixer: f32,
    pub(super) experts: f32,
}

impl Growth {
    /// Mean square of the residual stream before a layer, without the lead, and the share of a mixer's normed input
    /// that is not the lead.
    fn before(self, layer: u64, hidden: u64) -> (f32, f32) {
        let lead = GROUP as f32 * LEAD * LEAD;
        let own = hidden.saturating_sub(GROUP as u64).max(GROUP as u64) as f32;
        let seen = |square: f32| square * own / (square * own + lead);
        let mut square = EMBEDDING * EMBEDDING;
        for l in 0..layer {
            square += self.mixer * seen(square) / (l as f32 + 1.0);
            square += self.experts / (l as f32 + 1.0);
        }
        (square, seen(square))
    }

    /// Root mean square of the residual stream at the router of a layer.
    fn at_router(self, layer: u64, hidden: u64) -> f32 {
        let (square, seen) = self.before(layer, hidden);
        (square + self.mixer * seen / (layer as f32 + 1.0)).sqrt()
    }
}

/// The lead of an embedding that is the head as well, which has to tell printable ids from others. All ids of the
/// tokenizer have some of it, so that the token after any of them is printable.
fn tied_lead(mean: f32) -> Lead {
    let ranges = vec![(tokenizer::PRINTABLE, mean), (0..u64::from(tokenizer::COUNT), 0.5 * mean)];
    Lead::Ranges { ranges, rest: -mean }
}

/// Gain of the projections of a layer that write into the residual stream; see [`Growth`].
fn residual_gain(layer: u64) -> f32 {
    1.0 / (layer as f32 + 1.0).sqrt()
}

/// Grouped-query attention.
pub(super) struct Attention {
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    /// Queries come with an output gate each.
    pub(super) output_gate: bool,
    /// Values have a matrix of their own.
    pub(super) values: bool,
    /// Scores are divided by the root of `head_dim`.
    pub(super) scaled: bool,
    /// Lengths of the norms of queries and keys.
    pub(super) norms: Option<[u64; 2]>,
    /// The projections that have biases.
    pub(super) biases: &'static [&'static str],
}

impl Attention {
    /// The same with norms per head.
    pub(super) fn head_norms(self) -> Self {
        Attention { norms: Some([self.head_dim; 2]), ..self }
    }
}

/// Router and routed experts of a layer.
pub(super) struct Experts {
    pub(super) router: String,
    pub(super) router_quant: Quant,
    /// The tensor that corrects scores before the choice.
    pub(super) correction: Option<String>,
    /// What the stacked projections lie below.
    pub(super) stacked: String,
    /// Router and experts have biases.
    pub(super) biases: bool,
}

/// Collects a model's modules.
pub(super) struct Builder<'a> {
    pub(super) c: Fields<'a>,
    pub(super) sizes: Sizes,
    architecture: &'static Architecture,
    routing: Routing,
    out: Vec<Module>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        architecture: &'static Architecture,
        config: &'a Map<String, Value>,
        routing: Routing,
    ) -> Result<Self, Error> {
        let c = Fields(config);
        Ok(Builder {
            sizes: Sizes::new(&c, architecture.names)?,
            c,
            architecture,
            routing,
            out: Vec::new(),
        })
    }

    /// Embedding, layers, norm and head.
    pub(super) fn model(mut self) -> Result<Vec<Module>, Error> {
        let Architecture { prefix, layer, .. } = self.architecture;
        let tied = self.c.flag_or("tie_word_embeddings", self.architecture.tied)?;
        let scale = if self.architecture.scaled_embedding {
            (self.sizes.hidden as f32).sqrt()
        } else {
            1.0
        };
        let lead = if tied { tied_lead(LEAD / scale) } else { Lead::Same(LEAD / scale) };
        let gain = EMBEDDING / scale * (self.sizes.hidden as f32).sqrt();
        self.vocabulary(format!("{prefix}model.embed_tokens"), gain, lead);
        for i in 0..self.sizes.layers {
            layer(&mut self, i, &format!("{prefix}model.layers.{i}."))?;
        }
        let norm = format!("{prefix}model.norm");
        if tied {
            let kind = Kind::Plain {
                scalar: Scalar::BF16,
                low: 0.9,
                high: 1.1,
                lead: Lead::Same(TIED_NORM * scale),
            };
            self.out.push(Module {
                path: format!("{norm}.weight"),
                rows: vec![self.sizes.hidden],
                kind,
            });
        } else {
            self.norm(norm, self.sizes.hidden);
            let lead = Lead::Ranges { ranges: vec![(tokenizer::PRINTABLE, 0.0)], rest: UNPRINTED };
            self.vocabulary(format!("{prefix}lm_head"), 1.0, lead);
        }
        Ok(self.out)
    }

    fn vocabulary(&mut self, path: String, gain: f32, lead: Lead) {
        let Sizes { hidden, vocab, .. } = self.sizes;
        let kind = Kind::Linear { cols: hidden, quant: self.architecture.others, gain, lead };
        self.out.push(Module { path, rows: vec![vocab], kind });
    }

    /// The two norms of a layer.
    pub(super) fn norms(&mut self, at: &str) {
        self.mixer_norm(at);
        self.norm(format!("{at}post_attention_layernorm"), self.sizes.hidden);
    }

    /// The norm before a mixer. Mixers average over tokens, which would leave little but the lead: they do not see it.
    pub(super) fn mixer_norm(&mut self, at: &str) {
        let kind = Kind::Plain { scalar: Scalar::BF16, low: 0.9, high: 1.1, lead: Lead::Same(0.0) };
        let rows = vec![self.sizes.hidden];
        self.out.push(Module { path: format!("{at}input_layernorm.weight"), rows, kind });
    }

    /// Norms behind a mixer and behind experts, whose weights alone say how much a layer adds; see [`Growth`].
    pub(super) fn post_norms(&mut self, layer: u64, at: &str) {
        let Growth { mixer, experts } = self.architecture.growth;
        for (which, square) in [("attention", mixer), ("feedforward", experts)] {
            let size = square.sqrt() * residual_gain(layer);
            let path = format!("{at}post_{which}_layernorm.weight");
            self.plain(path, vec![self.sizes.hidden], Scalar::BF16, 0.9 * size..1.1 * size);
        }
    }

    /// The attention that a config describes: without norms and biases.
    pub(super) fn heads(&self) -> Result<Attention, Error> {
        let c = &self.c;
        let heads = c.number("num_attention_heads")?;
        Ok(Attention {
            heads,
            kv_heads: c.number("num_key_value_heads")?,
            head_dim: c.number_or("head_dim", self.sizes.hidden / heads)?,
            output_gate: false,
            values: true,
            scaled: true,
            norms: None,
            biases: &[],
        })
    }

    pub(super) fn attention(
        &mut self,
        layer: u64,
        at: &str,
        attention: Attention,
    ) -> Result<(), Error> {
        let Attention { heads, kv_heads, head_dim, .. } = attention;
        let hidden = self.sizes.hidden;
        self.c.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
        if head_dim < 2 || !head_dim.is_multiple_of(2) {
            return Err(self
                .c
                .wrong(format!("head_dim {head_dim} must be even, for rotary embeddings")));
        }
        // With this standard deviation of its scores a head attends to a few tokens, not to their mean.
        let sharp = 4.0f32;
        let (_, seen) = self.architecture.growth.before(layer, hidden);
        let q_gain = if attention.norms.is_some() { 1.0 } else { sharp / seen };
        let queries = heads * head_dim;
        let (q_rows, keys) =
            (if attention.output_gate { 2 * queries } else { queries }, kv_heads * head_dim);
        let projections = [
            ("q_proj", q_rows, hidden, q_gain),
            ("k_proj", keys, hidden, 1.0),
            ("v_proj", keys, hidden, 1.0),
            ("o_proj", hidden, queries, residual_gain(layer)),
        ];
        for (name, rows, cols, gain) in projections {
            if name == "v_proj" && !attention.values {
                continue;
            }
            self.linear(format!("{at}{name}"), [rows], cols, gain);
            if attention.biases.contains(&name) {
                self.bias(format!("{at}{name}"), vec![rows]);
            }
        }
        let Some([q, k]) = attention.norms else { return Ok(()) };
        let scores = if attention.scaled { 1.0 } else { (head_dim as f32).sqrt() };
        let size = (sharp / scores).sqrt();
        for (name, len) in [("q_norm", q), ("k_norm", k)] {
            self.plain(
                format!("{at}{name}.weight"),
                vec![len],
                Scalar::BF16,
                0.95 * size..1.05 * size,
            );
        }
        Ok(())
    }

    /// Multi-head latent attention. `whole` has the matrix that takes latents to keys and values as it was trained,
    /// else it is split by heads into one that takes queries to latents and one that takes latents to values.
    pub(super) fn latent_attention(
        &mut self,
        layer: u64,
        at: &str,
        whole: bool,
    ) -> Result<(), Error> {
        let c = &self.c;
        let (heads, latent) = (c.number("num_attention_heads")?, c.number("kv_lora_rank")?);
        let (nope, rotated) = (c.number("qk_nope_head_dim")?, c.number("qk_rope_head_dim")?);
        let value = c.number("v_head_dim")?;
        let q_rank = c.optional("q_lora_rank")?;
        let (hidden, queries) = (self.sizes.hidden, heads * (nope + rotated));
        // The standard deviation of scores; those of most models come out twice as large by YaRN's factor.
        let sharp = 2.5;
        if let Some(rank) = q_rank {
            self.linear(format!("{at}q_a_proj"), [rank], hidden, 1.0);
            self.norm(format!("{at}q_a_layernorm"), rank);
            self.linear(format!("{at}q_b_proj"), [queries], rank, sharp);
        } else {
            self.linear(format!("{at}q_proj"), [queries], hidden, sharp);
        }
        self.linear(format!("{at}kv_a_proj_with_mqa"), [latent + rotated], hidden, 1.0);
        self.norm(format!("{at}kv_a_layernorm"), latent);
        if whole {
            self.linear(format!("{at}kv_b_proj"), [heads * (nope + value)], latent, 1.0);
        } else {
            // The transpose of keys of unit size: a latent's score is that of the key it stands for.
            let gain = (nope as f32 / latent as f32).sqrt();
            self.linear(format!("{at}embed_q"), [heads, latent], nope, gain);
            self.linear(format!("{at}unembed_out"), [heads, value], latent, 1.0);
        }
        self.linear(format!("{at}o_proj"), [hidden], heads * value, residual_gain(layer));
        Ok(())
    }

    /// The lightning indexer of latent attention.
    pub(super) fn indexer(&mut self, at: &str) -> Result<(), Error> {
        let c = &self.c;
        let (heads, width) = (c.number("index_n_heads")?, c.number("index_head_dim")?);
        let (rank, hidden) = (c.number("q_lora_rank")?, self.sizes.hidden);
        self.linear(format!("{at}wq_b"), [heads * width], rank, 1.0);
        self.linear(format!("{at}wk"), [width], hidden, 1.0);
        self.norm(format!("{at}k_norm"), width);
        self.bias(format!("{at}k_norm"), vec![width]);
        self.linear(format!("{at}weights_proj"), [heads], hidden, 1.0);
        Ok(())
    }

    /// A gated delta-net. The older layout, `fused`, has two matrices of projections for the other's four, and rounds
    /// decays to bf16.
    pub(super) fn delta_net(&mut self, layer: u64, at: &str, fused: bool) -> Result<(), Error> {
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
        let projections: &[(&str, u64)] = match fused {
            true => &[("qkvz", channels + values), ("ba", 2 * value_heads)],
            false => &[("qkv", channels), ("z", values), ("b", value_heads), ("a", value_heads)],
        };
        for (which, rows) in projections {
            self.linear(format!("{at}in_proj_{which}"), [*rows], hidden, 1.0);
        }
        self.linear(format!("{at}out_proj"), [hidden], values, residual_gain(layer));
        // Small, where SiLU is nearly linear: else queries, keys and values would have a mean, the state would sum
        // it up, and all tokens would look alike.
        self.plain(
            format!("{at}conv1d.weight"),
            vec![channels, conv, 1],
            Scalar::BF16,
            -0.25..0.25,
        );
        // Decays exp(-exp(A_log) softplus(a + dt_bias)): memories from a few tokens to thousands.
        let scalar = if fused { Scalar::BF16 } else { Scalar::F32 };
        self.plain(format!("{at}A_log"), vec![value_heads], scalar, -2.3..2.0);
        self.plain(format!("{at}dt_bias"), vec![value_heads], Scalar::BF16, -4.0..-1.0);
        self.norm(format!("{at}norm"), value_dim);
        Ok(())
    }

    pub(super) fn mlp(&mut self, layer: u64, at: &str, intermediate: u64) {
        let hidden = self.sizes.hidden;
        self.linear(format!("{at}gate_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{at}up_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{at}down_proj"), [hidden], intermediate, residual_gain(layer));
    }

    pub(super) fn experts(&mut self, layer: u64, experts: &Experts) {
        let Experts { router, router_quant, correction, stacked, biases } = experts;
        let Sizes { hidden, experts, intermediate, .. } = self.sizes;
        let lead = self.popularity(layer, router);
        self.router(router.clone(), experts, *router_quant, lead);
        if *biases {
            self.bias(router.clone(), vec![experts]);
        }
        if let Some(correction) = correction {
            // A tenth of what scores differ by.
            self.plain(correction.clone(), vec![experts], Scalar::F32, -0.02..0.02);
        }
        let projections = [
            ("gate_proj", intermediate, hidden, 1.0),
            ("up_proj", intermediate, hidden, 1.0),
            ("down_proj", hidden, intermediate, residual_gain(layer)),
        ];
        for (name, rows, cols, gain) in projections {
            let path = format!("{stacked}.{name}");
            let kind =
                Kind::Linear { cols, quant: self.architecture.experts, gain, lead: Lead::Zero };
            self.out.push(Module { path: path.clone(), rows: vec![experts, rows], kind });
            if *biases {
                self.bias(path, vec![experts, rows]);
            }
        }
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
        let unit = self.architecture.growth.at_router(layer, self.sizes.hidden) * own.sqrt()
            / (lead * LEAD);

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

    /// A router or the gate of a shared expert.
    pub(super) fn router(&mut self, path: String, rows: u64, quant: Quant, lead: Lead) {
        let kind = Kind::Linear { cols: self.sizes.hidden, quant, gain: 1.0, lead };
        self.out.push(Module { path, rows: vec![rows], kind });
    }

    fn linear<const N: usize>(&mut self, path: String, rows: [u64; N], cols: u64, gain: f32) {
        let kind = Kind::Linear { cols, quant: self.architecture.others, gain, lead: Lead::Zero };
        self.out.push(Module { path, rows: rows.to_vec(), kind });
    }

    /// The bias of a module, small beside what it is added to.
    fn bias(&mut self, path: String, rows: Vec<u64>) {
        self.plain(format!("{path}.bias"), rows, Scalar::BF16, -0.1..0.1);
    }

    /// RMSNorm weights near 1, as exports for MLX store them: the 1 that some models add is in the weight already.
    pub(super) fn norm(&mut self, path: String, len: u64) {
        self.plain(format!("{path}.weight"), vec![len], Scalar::BF16, 0.9..1.1);
    }

    pub(super) fn plain(
        &mut self,
        path: String,
        rows: Vec<u64>,
        scalar: Scalar,
        bounds: Range<f32>,
    ) {
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
