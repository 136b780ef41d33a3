//! What all models have: embedding, head, layers with two norms, heads of attention.

use serde::Deserialize;

use super::{Require, linear, model_type, skipped};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{
        Blueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape, LayerBlueprint, MixerBlueprint,
        RopeShape,
    },
};

/// What every config has.
#[derive(Deserialize)]
pub(super) struct Body {
    pub(super) hidden_size: usize,
    pub(super) num_hidden_layers: usize,
    vocab_size: usize,
    pub(super) max_position_embeddings: usize,
    rms_norm_eps: f32,
    /// Whether the embedding serves as head.
    pub(super) tie_word_embeddings: Option<bool>,
}

impl Body {
    /// The model whose layer `i`, below the name that it is given, is `layer(i, name)`. `norm_plus` is added to the
    /// weights of the last norm.
    pub(super) fn blueprint(
        &self,
        checkpoint: &Checkpoint,
        norm_plus: f32,
        layer: impl Fn(usize, &str) -> Result<LayerBlueprint, Error>,
    ) -> Result<Blueprint, Error> {
        let (hidden, vocab) = (self.hidden_size, self.vocab_size);
        Require(checkpoint).sizes(&[
            ("hidden_size", hidden),
            ("vocab_size", vocab),
            ("num_hidden_layers", self.num_hidden_layers),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        Require(checkpoint)
            .that(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0, || {
                format!("\"rms_norm_eps\" is {}: a small number is needed", self.rms_norm_eps)
            })?;
        let (model, head) = prefixes(checkpoint)?;
        // Composite configs may tie the embeddings at their top level. Some say so by default, and have a head.
        let outer = checkpoint.config().get("tie_word_embeddings").is_some_and(|t| t == true);
        let tied = self.tie_word_embeddings.unwrap_or(false)
            || (outer && !checkpoint.has(&format!("{head}lm_head.weight")));
        let head = (!tied).then(|| checkpoint.matrix(&format!("{head}lm_head"), vocab, hidden));
        let layers = (0..self.num_hidden_layers).map(|i| layer(i, &format!("{model}layers.{i}")));
        Ok(Blueprint {
            model_type: model_type(checkpoint)?.to_owned(),
            hidden,
            vocab,
            max_positions: self.max_position_embeddings,
            eps: self.rms_norm_eps,
            embed_scale: 1.0,
            logit_cap: None,
            embed: checkpoint.matrix(&format!("{model}embed_tokens"), vocab, hidden)?,
            layers: layers.collect::<Result<_, _>>()?,
            norm: checkpoint.vector(&format!("{model}norm.weight"), hidden, norm_plus)?,
            head: head.transpose()?,
            skipped: skipped(checkpoint, self.num_hidden_layers),
        })
    }

    /// The layer `name` with a norm before its mixer and one before its feed-forward part, as most models have it.
    /// `norm_plus` is added to the weights of both.
    pub(super) fn layer(
        &self,
        checkpoint: &Checkpoint,
        (name, norm_plus): (&str, f32),
        mixer: MixerBlueprint,
        feed_forward: FeedForwardBlueprint,
    ) -> Result<LayerBlueprint, Error> {
        let norm = |which: &str| {
            checkpoint.vector(&format!("{name}.{which}.weight"), self.hidden_size, norm_plus)
        };
        Ok(LayerBlueprint {
            mixer_norm: norm("input_layernorm")?,
            mixer,
            mixer_post_norm: None,
            feed_forward_norm: norm("post_attention_layernorm")?,
            feed_forward,
            feed_forward_post_norm: None,
            scale: None,
        })
    }
}

/// What comes before `embed_tokens`, `layers` and `norm`, and before `lm_head`, of the known ways to name them.
fn prefixes(checkpoint: &Checkpoint) -> Result<(&'static str, &'static str), Error> {
    let known = [
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("model.", ""),
    ];
    let found =
        known.into_iter().find(|(model, _)| checkpoint.has(&format!("{model}embed_tokens.weight")));
    found.ok_or_else(|| {
        checkpoint
            .tensor_error("model.embed_tokens.weight", "no shard has it under any known prefix")
    })
}

/// Grouped heads.
#[derive(Deserialize)]
pub(super) struct Heads {
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
}

impl Heads {
    /// Checked shapes of attention that sees all positions.
    pub(super) fn shape(&self, checkpoint: &Checkpoint, hidden: usize) -> Result<GqaShape, Error> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let head_dim = self.head_dim.unwrap_or(hidden / heads.max(1));
        gqa_shape(checkpoint, heads, kv_heads, head_dim)
    }
}

/// Checked shapes of attention that sees all positions.
pub(super) fn gqa_shape(
    checkpoint: &Checkpoint,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Result<GqaShape, Error> {
    let require = Require(checkpoint);
    require.sizes(&[
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
    ])?;
    require.that(heads.is_multiple_of(kv_heads), || {
        format!("\"num_attention_heads\" is {heads}, not a multiple of \"num_key_value_heads\", {kv_heads}")
    })?;
    Ok(GqaShape::new(heads, kv_heads, head_dim))
}

/// Attention below `name`: `q_proj`, `k_proj`, `o_proj` and, if it has values of its own, `v_proj`, with biases where there
/// are any; no norms, no sinks.
pub(super) fn gqa(
    checkpoint: &Checkpoint,
    (name, hidden): (&str, usize),
    (shape, own_values): (GqaShape, bool),
    rope: RopeShape,
) -> Result<GqaBlueprint, Error> {
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let project =
        |which: &str, rows, cols| linear(checkpoint, &format!("{name}.{which}"), rows, cols);
    Ok(GqaBlueprint {
        rope,
        q_proj: project("q_proj", if shape.output_gate { 2 * q } else { q }, hidden)?,
        k_proj: project("k_proj", kv, hidden)?,
        v_proj: own_values.then(|| project("v_proj", kv, hidden)).transpose()?,
        o_proj: project("o_proj", hidden, q)?,
        shape,
        q_norm: None,
        k_norm: None,
        v_norm: false,
        sinks: None,
    })
}
