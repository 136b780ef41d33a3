//! Weights of a blueprint, in the order of the files, each with a distribution of random values.
//!
//! A blueprint that was made from a recorder says which tensor has which role. So there is one
//! distribution per role, and nothing per architecture.

use moeflux_model::{
    blueprint::{
        Blueprint, BodyBlueprint, CompressedBlueprint, CompressorBlueprint, DeltaNetBlueprint,
        DrafterBlueprint, EntryIndexerBlueprint, FeedForwardBlueprint, GqaBlueprint, GqaIndexer,
        IndexerBlueprint, LatentHeads, LatentQuery, LayerBlueprint, LayerExperts, LinearSource,
        Mamba2Blueprint, MixerBlueprint, MlaBlueprint, MlaIndexer, MlpBlueprint, MoeBlueprint,
        NgramMemoryBlueprint, NormKind, NormSource, ProjectionSource, RouterBlueprint,
        ShortConvBlueprint, StreamInput, StreamMix, SubBlockBlueprint, SubBlockInput,
    },
    checkpoint::{MatrixSource, Segment, VectorChange, VectorSource},
    seam::RecordedTensor,
};
use moeflux_ops::Scalar;

use super::{
    byte_tokenizer,
    export::{Export, Growth},
    module::{Module, ModuleKind},
    values::{AFFINE_GROUP, Lead, RandomStream},
};

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
/// Most that the other channels add to a logit of tied embeddings, as a standard deviation.
/// Unscaled embeddings are so large that they would outweigh the lead.
const TIED_SPREAD: f32 = 1.2;

/// Standard deviation of the other embedding channels. Smaller than the output of the first mixer,
/// so that a token's experts depend on its context, not on the token alone.
const EMBEDDING: f32 = 0.35;
/// Share of a token's `k` experts that are not popular ones.
const TAIL_SHARE: f32 = 0.3;

/// Parameters of the routers.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouterParams {
    pub(super) seed: u64,
    pub(super) skew: f64,
}

impl Growth {
    /// Mean square of the residual stream before a layer, without the lead, and the share of a
    /// mixer's normed input that is not the lead.
    fn before(self, layer: usize, hidden: usize) -> (f32, f32) {
        let lead = AFFINE_GROUP as f32 * LEAD * LEAD;
        let own = hidden.saturating_sub(AFFINE_GROUP).max(AFFINE_GROUP) as f32;
        let seen = |square: f32| square * own / (square * own + lead);
        let mut square = EMBEDDING * EMBEDDING;
        for l in 0..layer {
            square += self.mixer * seen(square) / (l as f32 + 1.0);
            square += self.experts / (l as f32 + 1.0);
        }
        (square, seen(square))
    }

    /// Root mean square of the residual stream at a layer's router.
    fn at_router(self, layer: usize, hidden: usize) -> f32 {
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
fn residual_gain(layer: usize) -> f32 {
    1.0 / (layer as f32 + 1.0).sqrt()
}

/// Uniform values in bf16.
fn uniform(low: f32, high: f32) -> ModuleKind {
    ModuleKind::Plain { scalar: Scalar::BF16, low, high, lead: Lead::Zero }
}

/// The values of a norm around 1, whose first channels have the mean `lead`.
fn leading_norm(lead: f32) -> ModuleKind {
    ModuleKind::Plain { scalar: Scalar::BF16, low: 0.9, high: 1.1, lead: Lead::Same(lead) }
}

/// The values of the last norm for tied embeddings. `scale` is the model's factor on embeddings,
/// times the divisor of its logits.
fn tied_norm(hidden: usize, scale: f32) -> ModuleKind {
    let size = (TIED_SPREAD * scale / (EMBEDDING * (hidden as f32).sqrt())).min(1.0);
    let (low, high, lead) = (0.9 * size, 1.1 * size, Lead::Same(TIED_NORM * scale));
    ModuleKind::Plain { scalar: Scalar::BF16, low, high, lead }
}

/// The modules of a model, in the order of the files.
pub(super) struct ModuleList<'a> {
    blueprint: &'a Blueprint,
    recorded: &'a [RecordedTensor],
    export: &'a Export,
    routing: RouterParams,
    modules: Vec<Module>,
}

impl<'a> ModuleList<'a> {
    /// A list for a blueprint whose segments refer to `recorded`.
    pub(super) fn new(
        blueprint: &'a Blueprint,
        recorded: &'a [RecordedTensor],
        export: &'a Export,
        routing: RouterParams,
    ) -> Self {
        Self { blueprint, recorded, export, routing, modules: Vec::new() }
    }

    /// Embedding, layers, norm and head.
    pub(super) fn collect(mut self) -> Vec<Module> {
        let Blueprint { embed_scale: scale, hidden, embed, layers, output, head, .. } =
            self.blueprint;
        let lead = LEAD / scale;
        let lead = if head.is_some() { Lead::Same(lead) } else { tied_lead(lead) };
        let gain = EMBEDDING / scale * (*hidden as f32).sqrt();
        let quant = self.export.vocab.unwrap_or(self.export.others);
        self.push(embed.segments.first(), ModuleKind::Linear { quant, gain, lead });
        for (i, layer) in layers.iter().enumerate() {
            self.layer(i, layer);
        }
        if let Some(head) = head {
            self.stream_mix(output);
            self.output_norm(output, uniform(0.9, 1.1));
            let lead =
                Lead::Ranges { ranges: vec![(byte_tokenizer::PRINTABLE, 0.0)], rest: UNPRINTED };
            self.push(head.segments.first(), ModuleKind::Linear { quant, gain: 1.0, lead });
        } else {
            self.stream_mix(output);
            self.output_norm(output, tied_norm(*hidden, *scale / self.blueprint.logit_scale));
        }
        self.bias(&self.blueprint.head_bias);
        if let Some(drafter) = &self.blueprint.drafter {
            self.drafter(drafter);
        }
        self.modules
    }

    /// A head for multi-token prediction.
    fn drafter(&mut self, drafter: &DrafterBlueprint) {
        let DrafterBlueprint { embed_norm, hidden_norm, fuse, layer, norm } = drafter;
        self.norm(embed_norm);
        self.norm(hidden_norm);
        self.matrix(fuse, 1.0);
        if let Some(layer) = layer {
            self.layer(self.blueprint.layers.len(), layer);
        }
        self.stream_norm(norm, uniform(0.9, 1.1));
    }

    /// Modules in the order of mlx-lm's files: with norms after the parts, the norm before the
    /// feed-forward part comes behind them.
    fn layer(&mut self, i: usize, layer: &LayerBlueprint) {
        if let Some(memory) = &layer.memory {
            self.ngram_memory(memory);
        }
        let is_mixer = |part: &&SubBlockBlueprint| matches!(part.body, BodyBlueprint::Mixer(_));
        let (mixers, feed_forwards): (Vec<_>, Vec<_>) = layer.sub_blocks.iter().partition(is_mixer);
        let has_post_norms = layer.sub_blocks.iter().any(|part| part.post_norm.is_some());
        let shares_norm = |part: &SubBlockBlueprint| matches!(part.input, SubBlockInput::Previous);
        let is_shared = feed_forwards.iter().any(|part| shares_norm(part));
        self.input_norms(&mixers, is_shared);
        if !has_post_norms {
            self.input_norms(&feed_forwards, false);
        }
        for part in &mixers {
            self.body(i, &part.body);
        }
        for part in &layer.sub_blocks {
            self.post_norm(i, part);
        }
        for part in &layer.sub_blocks {
            self.vector(&part.scale, uniform(0.98, 1.02));
        }
        if has_post_norms {
            self.input_norms(&feed_forwards, false);
        }
        for part in &feed_forwards {
            self.body(i, &part.body);
        }
        if let Some(MixerBlueprint::Mla(mla)) = layer.mixer()
            && let Some(indexer) = mla.indexer()
        {
            match indexer {
                MlaIndexer::Positions(indexer) => self.indexer(indexer),
                MlaIndexer::Entries(indexer) => self.entry_indexer(indexer),
            }
        }
    }

    /// A memory, with rows of the size of embeddings.
    fn ngram_memory(&mut self, memory: &NgramMemoryBlueprint) {
        for constants in &memory.constants {
            let values = ModuleKind::Integers(constants.values.clone());
            self.push(Some(&constants.segment), values);
        }
        let bound = EMBEDDING * 3f32.sqrt();
        for shard in &memory.table.shards {
            self.push(Some(&shard.first), uniform(-bound, bound));
        }
        let [key_proj, value_proj] = memory.matrices();
        self.matrix(key_proj, 1.0);
        self.matrix(value_proj, 0.3);
        self.norm(&memory.norm_key);
        self.norm(&memory.norm_query);
        self.norm(&memory.norm_conv);
        self.vector(&memory.conv, uniform(-0.25, 0.25));
    }

    fn input_norms(&mut self, parts: &[&SubBlockBlueprint], is_shared: bool) {
        for part in parts {
            self.stream_mix(&part.input);
            let Some(norm) = part.input.norm() else { continue };
            match part.body {
                // Without the lead: mixers average over tokens, which would leave little else.
                BodyBlueprint::Mixer(_) if !is_shared => self.stream_norm(norm, leading_norm(0.0)),
                _ => self.stream_norm(norm, uniform(0.9, 1.1)),
            }
        }
    }

    /// Weights of the sum of residual streams near equal ones.
    fn stream_mix(&mut self, input: &SubBlockInput) {
        let SubBlockInput::Streams(StreamInput { mix, .. }) = input else { return };
        match mix {
            StreamMix::Mean => {}
            StreamMix::Matrix(mix) => {
                let bound = (3.0 / mix.weight.shape.cols as f32).sqrt();
                let plain = |low, high| ModuleKind::Plain {
                    scalar: Scalar::F32,
                    low,
                    high,
                    lead: Lead::Zero,
                };
                self.push(mix.weight.segments.first(), plain(-bound, bound));
                self.vector(&mix.base, plain(-0.1, 0.1));
                self.vector(&mix.scale, plain(0.2, 0.4));
            }
            StreamMix::Gated(mix) => {
                self.norm(&mix.norm);
                self.matrix(&mix.down, 1.0);
                self.matrix(&mix.up, 1.0);
                mix.inject.iter().for_each(|inject| self.matrix(inject, 1.0));
            }
        }
    }

    fn output_norm(&mut self, output: &SubBlockInput, weights: ModuleKind) {
        if let Some(norm) = output.norm() {
            self.stream_norm(norm, weights);
        }
    }

    /// The weights of norms after a part alone determine what it adds; see [`Growth`].
    fn post_norm(&mut self, i: usize, part: &SubBlockBlueprint) {
        let square = match part.body {
            BodyBlueprint::Mixer(_) => self.export.growth.mixer,
            BodyBlueprint::FeedForward(_) => self.export.growth.experts,
        };
        let size = square.sqrt() * residual_gain(i);
        self.vector(&part.post_norm, uniform(0.9 * size, 1.1 * size));
    }

    fn body(&mut self, i: usize, body: &BodyBlueprint) {
        match body {
            BodyBlueprint::Mixer(MixerBlueprint::Gqa(gqa)) => self.attention(i, gqa),
            BodyBlueprint::Mixer(MixerBlueprint::Mla(mla)) => self.latent_attention(i, mla),
            BodyBlueprint::Mixer(MixerBlueprint::Compressed(c)) => self.compressed(i, c),
            BodyBlueprint::Mixer(MixerBlueprint::DeltaNet(net)) => self.delta_net(i, net),
            BodyBlueprint::Mixer(MixerBlueprint::Mamba2(mamba2)) => self.mamba2(i, mamba2),
            BodyBlueprint::Mixer(MixerBlueprint::ShortConv(conv)) => self.short_conv(i, conv),
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Dense(mlp)) => self.mlp(i, mlp),
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(moe)) => self.moe(i, moe),
        }
    }

    fn attention(&mut self, layer: usize, gqa: &GqaBlueprint) {
        // Standard deviation of the scores at which a head attends to a few tokens, not to their
        // mean.
        let sharp = 4.0f32;
        let (_, seen) = self.export.growth.before(layer, self.blueprint.hidden);
        let q_gain = if gqa.q_norm.is_some() { 1.0 } else { sharp / seen };
        // A matrix of queries, keys and values has one gain: the output undoes that of the values.
        let is_fused = gqa.q_proj.weight.name == gqa.k_proj.weight.name;
        let [q_gain, v_gain] = if is_fused { [q_gain.sqrt(); 2] } else { [q_gain, 1.0] };
        self.linear(&gqa.q_proj, q_gain);
        self.linear(&gqa.k_proj, 1.0);
        if let Some(v_proj) = &gqa.v_proj {
            let lead = match self.export.values_have_lead {
                true => Lead::Zero,
                false => Lead::Rows(Vec::new()),
            };
            let kind = ModuleKind::Linear { quant: self.export.others, gain: 1.0, lead };
            self.push(v_proj.weight.segments.first(), kind);
            self.bias(&v_proj.bias);
        }
        if let Some(gate_proj) = &gqa.gate_proj {
            self.linear(gate_proj, 1.0);
        }
        let quant = self.export.outputs.unwrap_or(self.export.others);
        let gain = residual_gain(layer) / v_gain;
        let o_proj = ModuleKind::Linear { quant, gain, lead: Lead::Zero };
        self.push(gqa.o_proj.weight.segments.first(), o_proj);
        self.bias(&gqa.o_proj.bias);
        let unscaled = gqa.shape.scale == 1.0;
        let scores = if unscaled { (gqa.shape.head_dim as f32).sqrt() } else { 1.0 };
        let size = (sharp / scores).sqrt();
        for norm in [&gqa.q_norm, &gqa.k_norm] {
            self.vector(norm, uniform(0.95 * size, 1.05 * size));
        }
        self.vector(&gqa.sinks, uniform(-1.0, 1.0));
        match &gqa.indexer {
            Some(GqaIndexer::Blocks(indexer)) => {
                self.linear(&indexer.q_proj, 1.0);
                self.linear(&indexer.k_proj, 1.0);
                self.norm(&indexer.q_norm);
                self.norm(&indexer.k_norm);
            }
            Some(GqaIndexer::Entries(indexer)) => self.entry_indexer(indexer),
            None => {}
        }
    }

    fn latent_attention(&mut self, layer: usize, mla: &MlaBlueprint) {
        // Standard deviation of the scores. YaRN's factor doubles it in most models.
        let sharp = 2.5;
        match &mla.q {
            LatentQuery::Direct(q_proj) => self.linear(q_proj, sharp),
            LatentQuery::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
                self.linear(q_a_proj, 1.0);
                self.norm(q_a_layernorm);
                self.linear(q_b_proj, sharp);
            }
        }
        self.linear(&mla.kv_a_proj_with_mqa, 1.0);
        self.norm(&mla.kv_a_layernorm);
        match &mla.kv_b {
            LatentHeads::Whole(kv_b_proj) => self.matrix(kv_b_proj, 1.0),
            LatentHeads::Split { embed_q, unembed_out } => {
                let (nope, latent) = (mla.shape.qk_nope_head_dim, mla.shape.kv_lora_rank);
                // The transpose of unit-size keys: a latent's score equals that of the key that it
                // encodes.
                self.matrix(embed_q, (nope as f32 / latent as f32).sqrt());
                self.matrix(unembed_out, 1.0);
            }
        }
        mla.gate_proj.iter().for_each(|gate_proj| self.linear(gate_proj, 1.0));
        self.linear(&mla.o_proj, residual_gain(layer));
    }

    fn indexer(&mut self, indexer: &IndexerBlueprint) {
        let [weight, bias] = &indexer.k_norm;
        self.linear(&indexer.wq_b, 1.0);
        self.linear(&indexer.wk, 1.0);
        self.norm(weight);
        self.bias(bias);
        self.linear(&indexer.weights_proj, 1.0);
    }

    fn compressed(&mut self, layer: usize, compressed: &CompressedBlueprint) {
        self.linear(&compressed.q_a_proj, 1.0);
        self.norm(&compressed.q_a_norm);
        self.linear(&compressed.q_b_proj, 1.0);
        self.linear(&compressed.kv_proj, 1.0);
        self.norm(&compressed.kv_norm);
        self.vector(&compressed.sinks, uniform(-1.0, 1.0));
        self.matrix(&compressed.o_a_proj, 1.0);
        self.linear(&compressed.o_b_proj, residual_gain(layer));
        compressed.compressor.iter().for_each(|compressor| self.compressor(compressor));
        compressed.indexer.iter().for_each(|indexer| self.entry_indexer(indexer));
    }

    fn entry_indexer(&mut self, indexer: &EntryIndexerBlueprint) {
        indexer.weights_proj.iter().for_each(|weights| self.linear(weights, 1.0));
        // Queries and keys may be rows of one tensor.
        self.linear(&indexer.q_proj, 1.0);
        self.compressor(&indexer.compressor);
        self.vector(&indexer.q_norm, uniform(0.9, 1.1));
    }

    fn compressor(&mut self, compressor: &CompressorBlueprint) {
        compressor.linears().for_each(|linear| self.linear(linear, 1.0));
        if let Some([weight, bias]) = &compressor.kv_norm {
            self.norm(weight);
            self.bias(bias);
        }
        self.vector(&compressor.gate_bias, uniform(-1.0, 1.0));
        self.vector(&compressor.norm, uniform(0.9, 1.1));
    }

    fn projection(&mut self, projection: &ProjectionSource) {
        match projection {
            ProjectionSource::Full(matrix) => self.matrix(matrix, 1.0),
            ProjectionSource::LowRank { down, up } => {
                self.matrix(down, 1.0);
                self.linear(up, 1.0);
            }
        }
    }

    fn delta_net(&mut self, layer: usize, delta_net: &DeltaNetBlueprint) {
        let DeltaNetBlueprint { in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, .. } = delta_net;
        in_proj_qkv.iter().for_each(|projection| self.matrix(projection, 1.0));
        self.projection(in_proj_z);
        self.matrix(in_proj_b, 1.0);
        self.projection(in_proj_a);
        self.matrix(&delta_net.out_proj, residual_gain(layer));
        // Small values, where SiLU is nearly linear. Otherwise queries, keys and values would have
        // a mean, the state would accumulate it, and all tokens would look alike.
        delta_net.conv1d.iter().for_each(|part| self.vector(part, uniform(-0.25, 0.25)));
        // Decays exp(-exp(A_log) softplus(a + dt_bias)): memory lengths from a few tokens to
        // thousands. The older layout, of fused projections, rounds them to bf16.
        let is_fused = in_proj_qkv.iter().any(|qkv| *qkv.name == *in_proj_z.name());
        let scalar = if is_fused { Scalar::BF16 } else { Scalar::F32 };
        let decays = ModuleKind::Plain { scalar, low: -2.3, high: 2.0, lead: Lead::Zero };
        self.vector(&delta_net.a_log, decays);
        self.vector(&delta_net.dt_bias, uniform(-4.0, -1.0));
        self.norm(&delta_net.norm);
    }

    fn mamba2(&mut self, layer: usize, mamba2: &Mamba2Blueprint) {
        self.matrix(&mamba2.in_proj, 1.0);
        // As before a delta net. Decays are exp(-exp(A_log) softplus(dt + dt_bias)).
        self.vector(&mamba2.conv1d, uniform(-0.25, 0.25));
        self.bias(&mamba2.conv_bias);
        let rates =
            ModuleKind::Plain { scalar: Scalar::F32, low: 0.0, high: 2.7, lead: Lead::Zero };
        self.vector(&mamba2.a_log, rates);
        self.vector(&mamba2.d, uniform(0.9, 1.1));
        self.vector(&mamba2.dt_bias, uniform(-6.9, -2.3));
        self.norm(&mamba2.norm);
        self.matrix(&mamba2.out_proj, residual_gain(layer));
    }

    fn short_conv(&mut self, layer: usize, short_conv: &ShortConvBlueprint) {
        for projection in [&short_conv.b_proj, &short_conv.c_proj, &short_conv.x_proj] {
            self.matrix(projection, 1.0);
        }
        // A sum over three taps of products of unit size has unit size.
        self.vector(&short_conv.conv, uniform(-1.0, 1.0));
        self.matrix(&short_conv.out_proj, residual_gain(layer));
    }

    fn mlp(&mut self, layer: usize, mlp: &MlpBlueprint) {
        mlp.gate_proj.iter().for_each(|gate| self.matrix(gate, 1.0));
        self.matrix(&mlp.up_proj, 1.0);
        self.matrix(&mlp.down_proj, residual_gain(layer));
    }

    fn moe(&mut self, layer: usize, moe: &MoeBlueprint) {
        // A shared expert with a norm is a dense MLP beside the experts, and comes first.
        let dense = moe.shared.as_ref().filter(|shared| shared.post_norm.is_some());
        if let Some(dense) = dense {
            self.mlp(layer, &dense.mlp);
            for norm in [&moe.experts_norm, &dense.post_norm, &moe.experts_post_norm] {
                self.vector(norm, uniform(0.9, 1.1));
            }
        }
        self.router(layer, &moe.router, moe.experts.count);
        if let Some(latent) = &moe.latent {
            self.matrix(&latent.down_proj, 1.0);
            self.matrix(&latent.up_proj, 1.0);
        }
        self.experts(layer, &moe.experts);
        if let Some(shared) = moe.shared.as_ref().filter(|_| dense.is_none()) {
            self.mlp(layer, &shared.mlp);
            if let Some(gate) = &shared.gate {
                self.gate(gate, Lead::Zero);
            }
        }
    }

    fn router(&mut self, layer: usize, router: &RouterBlueprint, experts: usize) {
        if let Some(norm) = &router.norm {
            // This norm divides by the square root of the hidden size.
            let root = (self.blueprint.hidden as f32).sqrt();
            self.vector(&norm.weight, uniform(0.9 * root, 1.1 * root));
        }
        self.vector(&router.expert_scale, uniform(0.9, 1.1));
        let lead = self.popularity(layer, router, experts);
        self.gate(&router.weight.weight, lead);
        self.bias(&router.weight.bias);
        if let Some(routes) = &router.fixed {
            self.push(Some(&routes.segment), ModuleKind::Ids { below: experts as u64 });
        }
        // A tenth of the spread of the scores.
        let correction =
            ModuleKind::Plain { scalar: Scalar::F32, low: -0.02, high: 0.02, lead: Lead::Zero };
        self.vector(&router.correction, correction);
    }

    /// Stacks of gate, up and down matrices, each followed by a stack of biases if there are any.
    fn experts(&mut self, layer: usize, experts: &LayerExperts) {
        let has_biases = experts.shape.output_bias.is_some();
        let inner = self.export.experts;
        let down = (self.export.outputs.unwrap_or(inner), residual_gain(layer));
        let gate = experts.shape.gate.map(|_| (inner, 1.0));
        let kinds = gate.into_iter().chain([(inner, 1.0), down]);
        let shards: Vec<Segment> = experts.segments(0).collect();
        for (shards, (quant, gain)) in shards.chunks(if has_biases { 2 } else { 1 }).zip(kinds) {
            self.push(shards.first(), ModuleKind::Linear { quant, gain, lead: Lead::Zero });
            self.push(shards.get(1), uniform(-0.1, 0.1));
        }
    }

    /// Popularity of a router's experts, as weights of the lead.
    ///
    /// A score is the lead times its weight, plus the token's contribution. About `1.2 k` experts
    /// get an advantage that puts them at the threshold of top-k, so about every other token
    /// chooses each of them. The other experts share the rest evenly. This head on a flat tail
    /// gives the hit rates of trained routers (see docs/measured/synth-skew.md).
    fn popularity(&self, layer: usize, router: &RouterBlueprint, count: usize) -> Lead {
        if self.routing.skew == 0.0 {
            // Not `Lead::Zero`: random weights must not apply to the lead either.
            return Lead::Rows(Vec::new());
        }
        let (k, experts, hidden) =
            (router.top_k as f32, count as f32, self.blueprint.hidden as f32);
        let hot = (1.2 * k).round().clamp(1.0, experts);
        let tail = (experts - hot).max(1.0);
        let threshold = normal_quantile((1.0 - TAIL_SHARE * k / tail).clamp(0.5, 0.9999));
        // Ratio of the standard deviation of a token's contribution to that of a weight of 1 on the
        // lead; both before the norm.
        let lead = (AFFINE_GROUP as f32).min(hidden);
        let own = (hidden - lead).max(lead) / hidden;
        let unit =
            self.export.growth.at_router(layer, self.blueprint.hidden) * own.sqrt() / (lead * LEAD);

        let stream = format!("{}.popularity", router.weight.weight.name);
        let order = RandomStream::new(self.routing.seed, &stream);
        let mut ids: Vec<u64> = (0..count as u64).collect();
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
    fn gate(&mut self, gate: &MatrixSource, lead: Lead) {
        let quant = self.export.routers;
        self.push(gate.segments.first(), ModuleKind::Linear { quant, gain: 1.0, lead });
    }

    fn linear(&mut self, linear: &LinearSource, gain: f32) {
        self.matrix(&linear.weight, gain);
        self.bias(&linear.bias);
    }

    fn matrix(&mut self, matrix: &MatrixSource, gain: f32) {
        let kind = ModuleKind::Linear { quant: self.export.others, gain, lead: Lead::Zero };
        self.push(matrix.segments.first(), kind);
    }

    /// A bias, small compared with the output.
    fn bias<'b>(&mut self, bias: impl Into<Option<&'b VectorSource>>) {
        self.vector(bias, uniform(-0.1, 0.1));
    }

    /// RMSNorm weights near 1, as in MLX exports: the 1 that some models add is already included.
    fn norm(&mut self, norm: &VectorSource) {
        self.vector(norm, uniform(0.9, 1.1));
    }

    /// A norm of the residual stream, with weights of this kind.
    fn stream_norm(&mut self, norm: &NormSource, weights: ModuleKind) {
        self.vector(&norm.weight, weights);
        if let NormKind::Layer { bias } = &norm.kind {
            self.bias(bias);
        }
    }

    /// A vector of values of this kind, if there is one.
    fn vector<'b>(&mut self, vector: impl Into<Option<&'b VectorSource>>, kind: ModuleKind) {
        let Some(VectorSource { segment, change, .. }) = vector.into() else { return };
        let kind = match (change, kind) {
            (VectorChange::PlusOne, ModuleKind::Plain { scalar, low, high, lead }) => {
                ModuleKind::Plain { scalar, low: low - 1.0, high: high - 1.0, lead }
            }
            (_, kind) => kind,
        };
        self.push(Some(segment), kind);
    }

    /// The tensor that a segment of the blueprint is part of, if there is one.
    fn push(&mut self, segment: Option<&Segment>, kind: ModuleKind) {
        let Some(tensor) = segment.and_then(|s| self.recorded.get(s.file as usize)) else { return };
        // Matrices that are made of rows of one tensor follow each other.
        if self.modules.last().is_some_and(|module| module.path == tensor.name) {
            return;
        }
        let cols = tensor.shape.last().copied().unwrap_or(1);
        let kind = match kind {
            ModuleKind::Linear { gain, lead, .. } if tensor.is_bare => {
                let bound = gain * (3.0 / cols as f32).sqrt();
                ModuleKind::Plain { scalar: Scalar::BF16, low: -bound, high: bound, lead }
            }
            kind => kind,
        };
        let shape = tensor.shape.iter().map(|n| *n as u64).collect();
        self.modules.push(Module { path: tensor.name.clone(), shape, kind });
    }
}

/// Quantile of the standard normal distribution for `p` of at least 0.5. Source: Abramowitz and
/// Stegun, 26.2.23; error below 5e-4.
fn normal_quantile(p: f32) -> f32 {
    let t = (-2.0 * (1.0 - p).ln()).sqrt();
    t - (2.515_517 + t * (0.802_853 + t * 0.010_328))
        / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)))
}
