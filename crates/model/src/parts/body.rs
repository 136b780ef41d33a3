//! Parts that all models share: embedding, head, layers with two norms.

use moeflux_base::Error;
use serde::Deserialize;

use super::{
    config::{Require, skipped},
    drafter::{self, HeadNames},
    scope::{NormWeights, Scope},
};
use crate::{
    blueprint::{
        Blueprint, FeedForwardBlueprint, LayerBlueprint, MixerBlueprint, SubBlockBlueprint,
        SubBlockInput,
    },
    checkpoint::{source::TensorSource, tensor_names},
};

/// Config keys of every model.
#[derive(Deserialize)]
pub(crate) struct Body {
    pub(crate) hidden_size: usize,
    #[serde(default)]
    pub(crate) num_hidden_layers: usize,
    pub(crate) vocab_size: usize,
    pub(crate) max_position_embeddings: usize,
    pub(crate) rms_norm_eps: Option<f32>,
    /// Instead of it, where norms are LayerNorms.
    layer_norm_eps: Option<f32>,
    /// Whether the embedding serves as the head.
    pub(crate) tie_word_embeddings: Option<bool>,
    #[serde(default)]
    lm_head_bias: bool,
}

impl Body {
    /// A model with a final norm and a head. `layer` makes layer `i` of the module it is given.
    pub(crate) fn blueprint(
        &self,
        source: &dyn TensorSource,
        norms: NormWeights,
        layer: impl Fn(usize, &Scope<'_>) -> Result<LayerBlueprint, Error>,
    ) -> Result<Blueprint, Error> {
        self.blueprint_with("norm", source, norms, layer)
    }

    /// The same with another name of the final norm.
    pub(crate) fn blueprint_with(
        &self,
        final_norm: &str,
        source: &dyn TensorSource,
        norms: NormWeights,
        layer: impl Fn(usize, &Scope<'_>) -> Result<LayerBlueprint, Error>,
    ) -> Result<Blueprint, Error> {
        self.blueprint_of(source, norms, layer, |model| {
            let norm = model.stream_norm(final_norm, self.hidden_size)?;
            Ok(SubBlockInput::Residual { norm })
        })
    }

    /// The same with another input of the head, which `output` makes of the model's module.
    pub(crate) fn blueprint_of(
        &self,
        source: &dyn TensorSource,
        norms: NormWeights,
        layer: impl Fn(usize, &Scope<'_>) -> Result<LayerBlueprint, Error>,
        output: impl FnOnce(&Scope<'_>) -> Result<SubBlockInput, Error>,
    ) -> Result<Blueprint, Error> {
        let (hidden, vocab) = (self.hidden_size, self.vocab_size);
        Require(source).sizes(&[
            ("hidden_size", hidden),
            ("vocab_size", vocab),
            ("num_hidden_layers", self.num_hidden_layers),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        let (key, eps) = ("rms_norm_eps", self.rms_norm_eps.or(self.layer_norm_eps));
        let eps = Require(source).named(key, eps, "the result of norms")?;
        Require(source).that(eps.is_finite() && eps >= 0.0, || {
            format!("\"{key}\" is {eps}: a small number is needed")
        })?;
        let Prefixes { model, embedding, head, head_name } = Prefixes::find(source)?;
        // Composite configs may tie the embeddings at their top level. Some configs do so although
        // the checkpoint has a head, which then is the one that was trained.
        let outer = source.config().get("tie_word_embeddings").is_some_and(|t| t == true);
        let tied = (outer || self.tie_word_embeddings.unwrap_or(false))
            && !source.has(&format!("{head}{head_name}.weight"));
        let bias = format!("{head}{head_name}.bias");
        let head_bias = self.lm_head_bias.then(|| source.vector(&bias, &[vocab])).transpose()?;
        let head = (!tied).then(|| source.matrix(&format!("{head}{head_name}"), vocab, hidden));
        let model = Scope::new(source, model.to_owned(), norms);
        let module = |i| model.child(&format!("layers.{i}"));
        let layers = (0..self.num_hidden_layers).map(|i| layer(i, &module(i)));
        let next = module(self.num_hidden_layers);
        let drafter = drafter::optional(&next, &HeadNames::DEEPSEEK, hidden, || {
            layer(self.num_hidden_layers, &next)
        });
        Ok(Blueprint {
            // The registry sets it.
            model_type: String::new(),
            hidden,
            streams: 1,
            vocab,
            max_positions: self.max_position_embeddings,
            eps,
            embed_scale: 1.0,
            logit_cap: None,
            embed: model.matrix(embedding, vocab, hidden)?,
            layers: layers.collect::<Result<_, _>>()?,
            output: output(&model)?,
            head: head.transpose()?,
            head_bias,
            logit_scale: 1.0,
            drafter,
            images: None,
            skipped: skipped(source, self.num_hidden_layers),
        })
    }

    /// A layer of a mixer, then a feed-forward part, with a norm before each.
    pub(crate) fn layer(
        &self,
        layer: &Scope<'_>,
        mixer: impl Into<MixerBlueprint>,
        feed_forward: impl Into<FeedForwardBlueprint>,
    ) -> Result<LayerBlueprint, Error> {
        let (mixer, feed_forward): (MixerBlueprint, FeedForwardBlueprint) =
            (mixer.into(), feed_forward.into());
        let norm = |name| layer.stream_norm(name, self.hidden_size);
        Ok(LayerBlueprint::new([
            SubBlockBlueprint::new(norm("input_layernorm")?, mixer),
            SubBlockBlueprint::new(norm("post_attention_layernorm")?, feed_forward),
        ]))
    }
}

/// Name prefixes of a checkpoint's tensors.
#[derive(Clone, Copy)]
struct Prefixes {
    /// Module of the embedding, `layers` and `norm`.
    model: &'static str,
    embedding: &'static str,
    /// Text before the head.
    head: &'static str,
    head_name: &'static str,
}

impl Prefixes {
    /// Detects which of the known prefixes a checkpoint uses.
    fn find(source: &dyn TensorSource) -> Result<Self, Error> {
        const THINKER: &str = "thinker.language_model.model";
        let (embedding, head_name) = ("embed_tokens", "lm_head");
        let known = [
            Self { model: "thinker.model", embedding, head: "thinker.", head_name },
            Self { model: THINKER, embedding, head: "thinker.language_model.", head_name },
            Self { model: "language_model.model", embedding, head: "language_model.", head_name },
            Self { model: "model.language_model", embedding, head: "", head_name },
            Self { model: "model", embedding, head: "", head_name },
            Self { model: "model", embedding: "word_embeddings", head: "", head_name },
            Self { model: "", embedding: "embed", head: "", head_name: "head" },
            Self { model: "backbone", embedding: "embeddings", head: "", head_name },
        ];
        let uses = |p: &Self| {
            let dot = if p.model.is_empty() { "" } else { "." };
            source.has(&format!("{}{dot}{}.weight", p.model, p.embedding))
        };
        known.into_iter().find(uses).ok_or_else(|| {
            let name = "model.embed_tokens.weight";
            let like = tensor_names::like(name, source.tensor_bytes().map(|(name, _)| name));
            source.tensor_error(name, &format!("no shard has it under any known prefix{like}"))
        })
    }
}
