//! Module builder: model components (attention, MLA, delta-net, experts) as modules with random
//! values.

use std::ops::Range;

use moeflux_compute::Scalar;
use serde_json::{Map, Value};

use super::{
    architectures::{ExpertKeyNames, RouterParams, SynthArchitecture},
    byte_tokenizer,
    config_fields::ConfigFields,
    module::{Module, ModuleKind, WeightQuant},
    values::{AFFINE_GROUP, Lead, RandomStream},
};
use crate::base::error::Error;

/// Sanity limits.
const MAX_LAYERS: u64 = 4096;
const MAX_EXPERTS: u64 = 1 << 16;

/// Mean of the first channel group of every embedding: the lead. It persists in the residual
/// stream, so each router sees it at every token. An expert whose router row weights the lead is
/// popular.
const LEAD: f32 = 1.0;
/// Weight of the lead in the output head for all ids but printable ASCII. Their logits are so low
/// that sampled text is readable and never contains an end token.
const UNPRINTED: f32 = -0.5;

/// Weight of the lead in the last norm for tied embeddings, which gives the same difference of
/// logits.
const TIED_NORM: f32 = 0.625;

/// Standard deviation of the other embedding channels. Smaller than the output of the first mixer,
/// so that a token's experts depend on its context, not on the token alone.
const EMBEDDING: f32 = 0.35;
/// Share of a token's `k` experts that are not popular ones.
const TAIL_SHARE: f32 = 0.3;

/// Dimensions that all components need.
pub(super) struct ModelDims {
    pub(super) hidden: u64,
    pub(super) layers: u64,
    pub(super) vocab: u64,
    pub(super) experts: u64,
    pub(super) top_k: u64,
    pub(super) intermediate: u64,
}

impl ModelDims {
    fn new(c: &ConfigFields<'_>, names: ExpertKeyNames) -> Result<Self, Error> {
        let ExpertKeyNames { experts, top_k, intermediate } = names;
        let sizes = ModelDims {
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
        if sizes.vocab < u64::from(byte_tokenizer::COUNT) {
            return Err(c.wrong(format!(
                "vocab_size {} is smaller than the tokenizer's {} ids",
                sizes.vocab,
                byte_tokenizer::COUNT
            )));
        }
        Ok(sizes)
    }
}

/// Mean squares that the first layer adds to the residual stream, without the lead. Measured, or
/// within a third of a measured value. Layer `l` adds them divided by `l + 1`, so that the stream
/// of a deep model neither explodes nor loses the lead.
#[derive(Clone, Copy)]
pub(super) struct Growth {
    /// By a mixer, if its input had no lead (its norm removes the lead).
    pub(super) mixer: f32,
    pub(super) experts: f32,
}

impl Growth {
    /// Mean square of the residual stream before a layer, without the lead, and the share of a
    /// mixer's normed input that is not the lead.
    fn before(self, layer: u64, hidden: u64) -> (f32, f32) {
        let lead = AFFINE_GROUP as f32 * LEAD * LEAD;
        let own = hidden.saturating_sub(AFFINE_GROUP as u64).max(AFFINE_GROUP as u64) as f32;
        let seen = |square: f32| square * own / (square * own + lead);
        let mut square = EMBEDDING * EMBEDDING;
        for l in 0..layer {
            square += self.mixer * seen(square) / (l as f32 + 1.0);
            square += self.experts / (l as f32 + 1.0);
        }
        (square, seen(square))
    }

    /// Root mean square of the residual stream at a layer's router.
    fn at_router(self, layer: u64, hidden: u64) -> f32 {
        let (square, seen) = self.before(layer, hidden);
        (square + self.mixer * seen / (layer as f32 + 1.0)).sqrt()
    }
}

/// The lead of tied embeddings, which must separate printable ids from others. All ids of the
/// tokenizer have part of it, so that the token after any of them is printable.
fn tied_lead(mean: f32) -> Lead {
    let ranges =
        vec![(byte_tokenizer::PRINTABLE, mean), (0..u64::from(byte_tokenizer::COUNT), 0.5 * mean)];
    Lead::Ranges { ranges, rest: -mean }
}

/// Gain of a layer's projections into the residual stream; see [`Growth`].
fn residual_gain(layer: u64) -> f32 {
    1.0 / (layer as f32 + 1.0).sqrt()
}

/// Grouped-query attention.
pub(super) struct AttentionSpec {
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    /// Whether `q_proj` also yields an output gate per head.
    pub(super) output_gate: bool,
    /// Whether there is a separate `v_proj`.
    pub(super) values: bool,
    /// Whether scores are divided by the square root of `head_dim`.
    pub(super) scaled: bool,
    /// Lengths of the norms of queries and keys.
    pub(super) norms: Option<[u64; 2]>,
    /// Projections with biases.
    pub(super) biases: &'static [&'static str],
}

impl AttentionSpec {
    /// Adds norms per head.
    pub(super) fn head_norms(self) -> Self {
        AttentionSpec { norms: Some([self.head_dim; 2]), ..self }
    }
}

/// Router and routed experts of a layer.
pub(super) struct ExpertSpec {
    pub(super) router: String,
    pub(super) router_quant: WeightQuant,
    /// Name of the tensor added to the scores before top-k.
    pub(super) correction: Option<String>,
    /// Prefix of the stacked projections.
    pub(super) stacked: String,
    /// Whether router and experts have biases.
    pub(super) biases: bool,
}

/// Collects a model's modules.
pub(super) struct ModuleBuilder<'a> {
    pub(super) c: ConfigFields<'a>,
    pub(super) sizes: ModelDims,
    architecture: &'static SynthArchitecture,
    routing: RouterParams,
    out: Vec<Module>,
}

impl<'a> ModuleBuilder<'a> {
    pub(super) fn new(
        architecture: &'static SynthArchitecture,
        config: &'a Map<String, Value>,
        routing: RouterParams,
    ) -> Result<Self, Error> {
        let c = ConfigFields(config);
        Ok(ModuleBuilder {
            sizes: ModelDims::new(&c, architecture.names)?,
            c,
            architecture,
            routing,
            out: Vec::new(),
        })
    }

    /// Embedding, layers, norm and head.
    pub(super) fn model(mut self) -> Result<Vec<Module>, Error> {
        let SynthArchitecture { prefix, layer, .. } = self.architecture;
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
            let kind = ModuleKind::Plain {
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
            let lead =
                Lead::Ranges { ranges: vec![(byte_tokenizer::PRINTABLE, 0.0)], rest: UNPRINTED };
            self.vocabulary(format!("{prefix}lm_head"), 1.0, lead);
        }
        Ok(self.out)
    }

    fn vocabulary(&mut self, path: String, gain: f32, lead: Lead) {
        let ModelDims { hidden, vocab, .. } = self.sizes;
        let kind = ModuleKind::Linear { cols: hidden, quant: self.architecture.others, gain, lead };
        self.out.push(Module { path, rows: vec![vocab], kind });
    }

    /// The two norms of a layer.
    pub(super) fn norms(&mut self, prefix: &str) {
        self.mixer_norm(prefix);
        self.norm(format!("{prefix}post_attention_layernorm"), self.sizes.hidden);
    }

    /// Norm before a mixer. It removes the lead: mixers average over tokens, which would leave
    /// little else.
    pub(super) fn mixer_norm(&mut self, prefix: &str) {
        let kind =
            ModuleKind::Plain { scalar: Scalar::BF16, low: 0.9, high: 1.1, lead: Lead::Same(0.0) };
        let rows = vec![self.sizes.hidden];
        self.out.push(Module { path: format!("{prefix}input_layernorm.weight"), rows, kind });
    }

    /// Norms after mixer and experts. Their weights alone determine what a layer adds; see
    /// [`Growth`].
    pub(super) fn post_norms(&mut self, layer: u64, prefix: &str) {
        let Growth { mixer, experts } = self.architecture.growth;
        for (which, square) in [("attention", mixer), ("feedforward", experts)] {
            let size = square.sqrt() * residual_gain(layer);
            let path = format!("{prefix}post_{which}_layernorm.weight");
            self.plain(path, vec![self.sizes.hidden], Scalar::BF16, 0.9 * size..1.1 * size);
        }
    }

    /// Attention as the config describes it, without norms and biases.
    pub(super) fn heads(&self) -> Result<AttentionSpec, Error> {
        let c = &self.c;
        let heads = c.number("num_attention_heads")?;
        Ok(AttentionSpec {
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
        prefix: &str,
        attention: AttentionSpec,
    ) -> Result<(), Error> {
        let AttentionSpec { heads, kv_heads, head_dim, .. } = attention;
        let hidden = self.sizes.hidden;
        self.c.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)?;
        if head_dim < 2 || !head_dim.is_multiple_of(2) {
            return Err(self
                .c
                .wrong(format!("head_dim {head_dim} must be even, for rotary embeddings")));
        }
        // Standard deviation of the scores at which a head attends to a few tokens, not to their
        // mean.
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
            self.linear(format!("{prefix}{name}"), [rows], cols, gain);
            if attention.biases.contains(&name) {
                self.bias(format!("{prefix}{name}"), vec![rows]);
            }
        }
        let Some([q, k]) = attention.norms else { return Ok(()) };
        let scores = if attention.scaled { 1.0 } else { (head_dim as f32).sqrt() };
        let size = (sharp / scores).sqrt();
        for (name, len) in [("q_norm", q), ("k_norm", k)] {
            self.plain(
                format!("{prefix}{name}.weight"),
                vec![len],
                Scalar::BF16,
                0.95 * size..1.05 * size,
            );
        }
        Ok(())
    }

    /// Multi-head latent attention. With `whole`, one matrix maps latents to keys and values as
    /// trained (`kv_b_proj`). Otherwise it is split per head: one maps queries to latents, one maps
    /// latents to values.
    pub(super) fn latent_attention(
        &mut self,
        layer: u64,
        prefix: &str,
        whole: bool,
    ) -> Result<(), Error> {
        let c = &self.c;
        let (heads, latent) = (c.number("num_attention_heads")?, c.number("kv_lora_rank")?);
        let (nope, rotated) = (c.number("qk_nope_head_dim")?, c.number("qk_rope_head_dim")?);
        let value = c.number("v_head_dim")?;
        let q_rank = c.optional("q_lora_rank")?;
        let (hidden, queries) = (self.sizes.hidden, heads * (nope + rotated));
        // Standard deviation of the scores. YaRN's factor doubles it in most models.
        let sharp = 2.5;
        if let Some(rank) = q_rank {
            self.linear(format!("{prefix}q_a_proj"), [rank], hidden, 1.0);
            self.norm(format!("{prefix}q_a_layernorm"), rank);
            self.linear(format!("{prefix}q_b_proj"), [queries], rank, sharp);
        } else {
            self.linear(format!("{prefix}q_proj"), [queries], hidden, sharp);
        }
        self.linear(format!("{prefix}kv_a_proj_with_mqa"), [latent + rotated], hidden, 1.0);
        self.norm(format!("{prefix}kv_a_layernorm"), latent);
        if whole {
            self.linear(format!("{prefix}kv_b_proj"), [heads * (nope + value)], latent, 1.0);
        } else {
            // The transpose of unit-size keys: a latent's score equals that of the key that it
            // encodes.
            let gain = (nope as f32 / latent as f32).sqrt();
            self.linear(format!("{prefix}embed_q"), [heads, latent], nope, gain);
            self.linear(format!("{prefix}unembed_out"), [heads, value], latent, 1.0);
        }
        self.linear(format!("{prefix}o_proj"), [hidden], heads * value, residual_gain(layer));
        Ok(())
    }

    /// The lightning indexer of sparse latent attention.
    pub(super) fn indexer(&mut self, prefix: &str) -> Result<(), Error> {
        let c = &self.c;
        let (heads, width) = (c.number("index_n_heads")?, c.number("index_head_dim")?);
        let (rank, hidden) = (c.number("q_lora_rank")?, self.sizes.hidden);
        self.linear(format!("{prefix}wq_b"), [heads * width], rank, 1.0);
        self.linear(format!("{prefix}wk"), [width], hidden, 1.0);
        self.norm(format!("{prefix}k_norm"), width);
        self.bias(format!("{prefix}k_norm"), vec![width]);
        self.linear(format!("{prefix}weights_proj"), [heads], hidden, 1.0);
        Ok(())
    }

    /// A gated delta-net. The older layout, `fused`, has two projection matrices in place of four,
    /// and rounds decays to bf16.
    pub(super) fn delta_net(&mut self, layer: u64, prefix: &str, fused: bool) -> Result<(), Error> {
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
            self.linear(format!("{prefix}in_proj_{which}"), [*rows], hidden, 1.0);
        }
        self.linear(format!("{prefix}out_proj"), [hidden], values, residual_gain(layer));
        // Small values, where SiLU is nearly linear. Otherwise queries, keys and values would have
        // a mean, the state would accumulate it, and all tokens would look alike.
        self.plain(
            format!("{prefix}conv1d.weight"),
            vec![channels, conv, 1],
            Scalar::BF16,
            -0.25..0.25,
        );
        // Decays exp(-exp(A_log) softplus(a + dt_bias)): memory lengths from a few tokens to
        // thousands.
        let scalar = if fused { Scalar::BF16 } else { Scalar::F32 };
        self.plain(format!("{prefix}A_log"), vec![value_heads], scalar, -2.3..2.0);
        self.plain(format!("{prefix}dt_bias"), vec![value_heads], Scalar::BF16, -4.0..-1.0);
        self.norm(format!("{prefix}norm"), value_dim);
        Ok(())
    }

    pub(super) fn mlp(&mut self, layer: u64, prefix: &str, intermediate: u64) {
        let hidden = self.sizes.hidden;
        self.linear(format!("{prefix}gate_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{prefix}up_proj"), [intermediate], hidden, 1.0);
        self.linear(format!("{prefix}down_proj"), [hidden], intermediate, residual_gain(layer));
    }

    pub(super) fn experts(&mut self, layer: u64, experts: &ExpertSpec) {
        let ExpertSpec { router, router_quant, correction, stacked, biases } = experts;
        let ModelDims { hidden, experts, intermediate, .. } = self.sizes;
        let lead = self.popularity(layer, router);
        self.router(router.clone(), experts, *router_quant, lead);
        if *biases {
            self.bias(router.clone(), vec![experts]);
        }
        if let Some(correction) = correction {
            // A tenth of the spread of the scores.
            self.plain(correction.clone(), vec![experts], Scalar::F32, -0.02..0.02);
        }
        let projections = [
            ("gate_proj", intermediate, hidden, 1.0),
            ("up_proj", intermediate, hidden, 1.0),
            ("down_proj", hidden, intermediate, residual_gain(layer)),
        ];
        for (name, rows, cols, gain) in projections {
            let path = format!("{stacked}.{name}");
            let kind = ModuleKind::Linear {
                cols,
                quant: self.architecture.experts,
                gain,
                lead: Lead::Zero,
            };
            self.out.push(Module { path: path.clone(), rows: vec![experts, rows], kind });
            if *biases {
                self.bias(path, vec![experts, rows]);
            }
        }
    }

    /// Popularity of a router's experts, as weights of the lead.
    ///
    /// A score is the lead times its weight, plus the token's contribution. About `1.2 k` experts
    /// get an advantage that puts them at the threshold of top-k, so about every other token
    /// chooses each of them. The other experts share the rest evenly. This head on a flat tail
    /// gives the hit rates of trained routers (see docs/measured/synth-skew.md).
    fn popularity(&self, layer: u64, gate: &str) -> Lead {
        if self.routing.skew == 0.0 {
            // Not `Lead::Zero`: random weights must not apply to the lead either.
            return Lead::Rows(Vec::new());
        }
        let (k, experts, hidden) =
            (self.sizes.top_k as f32, self.sizes.experts as f32, self.sizes.hidden as f32);
        let hot = (1.2 * k).round().clamp(1.0, experts);
        let tail = (experts - hot).max(1.0);
        let threshold = normal_quantile((1.0 - TAIL_SHARE * k / tail).clamp(0.5, 0.9999));
        // Ratio of the standard deviation of a token's contribution to that of a weight of 1 on the
        // lead; both before the norm.
        let lead = (AFFINE_GROUP as f32).min(hidden);
        let own = (hidden - lead).max(lead) / hidden;
        let unit = self.architecture.growth.at_router(layer, self.sizes.hidden) * own.sqrt()
            / (lead * LEAD);

        let order = RandomStream::new(self.routing.seed, &format!("{gate}.popularity"));
        let mut ids: Vec<u64> = (0..self.sizes.experts).collect();
        ids.sort_by_key(|e| order.word(*e));
        let rows = ids.iter().take(hot as usize).enumerate().map(|(i, e)| {
            let slope = 0.8 * (0.5 - (i as f32 + 0.5) / hot);
            (*e, self.routing.skew as f32 * (threshold + slope) * unit)
        });
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by_key(|(e, _)| *e);
        Lead::Rows(rows)
    }

    /// A router or the gate of a shared expert.
    pub(super) fn router(&mut self, path: String, rows: u64, quant: WeightQuant, lead: Lead) {
        let kind = ModuleKind::Linear { cols: self.sizes.hidden, quant, gain: 1.0, lead };
        self.out.push(Module { path, rows: vec![rows], kind });
    }

    fn linear<const N: usize>(&mut self, path: String, rows: [u64; N], cols: u64, gain: f32) {
        let kind =
            ModuleKind::Linear { cols, quant: self.architecture.others, gain, lead: Lead::Zero };
        self.out.push(Module { path, rows: rows.to_vec(), kind });
    }

    /// The bias of a module, small compared with the output.
    fn bias(&mut self, path: String, rows: Vec<u64>) {
        self.plain(format!("{path}.bias"), rows, Scalar::BF16, -0.1..0.1);
    }

    /// RMSNorm weights near 1, as in MLX exports: the 1 that some models add is already included.
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
        let kind =
            ModuleKind::Plain { scalar, low: bounds.start, high: bounds.end, lead: Lead::Zero };
        self.out.push(Module { path, rows, kind });
    }
}

/// Quantile of the standard normal distribution for `p` of at least 0.5. Source: Abramowitz and
/// Stegun, 26.2.23; error below 5e-4.
fn normal_quantile(p: f32) -> f32 {
    let t = (-2.0 * (1.0 - p).ln()).sqrt();
    t - (2.515_517 + t * (0.802_853 + t * 0.010_328))
        / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)))
}
