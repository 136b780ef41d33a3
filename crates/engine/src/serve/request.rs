//! Requests of answers, and the end of each: end tokens, stop strings, limits.

use std::sync::Arc;

use moeflux_base::{Error, setters};
use moeflux_sampling::{EndTokens, MaskSource, Sampling, StopStrings, seam::TokenBans};
use serde::Serialize;

use super::embedding::Pooling;
use crate::{
    runtime::PromptImages,
    session::{
        drafts::{DraftMode, DrafterSource},
        engine::Engine,
        session::Session,
    },
    text::{AnswerText, ToolSet},
};

/// A generation request.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct GenerateRequest {
    /// Sampling parameters. The model's recommended ones are in
    /// [`Text::generation`](moeflux_text::Text::generation).
    pub sampling: Sampling,
    /// Maximum tokens to generate. With 0 only the prompt is computed. Default: up to the context
    /// length.
    pub max_tokens: Option<usize>,
    /// Tokens before which neither end tokens nor stop strings end the answer. End tokens are not
    /// chosen before, unless a mask allows no others. Default 0.
    pub min_tokens: usize,
    /// Whether the model's own end tokens are not chosen, unless a mask allows no others, as a
    /// grammar does at its end.
    pub ignore_eos: bool,
    /// Tokens that end the answer, besides the model's own.
    pub end_tokens: Vec<u32>,
    /// Sequences of tokens that the answer may not have, unless a mask forces them:
    /// [`Text::word_tokens`](moeflux_text::Text::word_tokens) spells words.
    pub bad_words: Vec<Vec<u32>>,
    /// Stop strings; not part of the text. A token stream includes the tokens up to the one that
    /// completes a stop string; [`StopStrings`](moeflux_sampling::StopStrings) removes it from the
    /// decoded text. They do not end thoughts.
    pub stop: Vec<String>,
    /// Whether the text includes the stop string that ends it, or the text of the token of
    /// `end_tokens`.
    pub include_stop: bool,
    /// Tools whose calls the answer may have. Stop strings do not end calls. Without tools the
    /// syntax of calls is text.
    pub tools: ToolSet,
    /// Images of the prompt, by the places of their placeholders.
    pub images: PromptImages,
    /// Lengths of prompt prefixes that other prompts are likely to share, ascending: see
    /// [`Session::sync_with`].
    pub ends: Vec<usize>,
    /// Biases of tokens' logits, from -100 to 100: pairs of token and bias. In effect -100 forbids
    /// a token, and 100 forces it.
    pub logit_bias: Vec<(u32, f32)>,
    /// Masks of the answer's tokens, applied in order after bias and penalties.
    pub masks: Vec<Arc<dyn MaskSource>>,
    /// Log-probabilities of the answer's tokens under the model's own distribution, before bias,
    /// penalties, temperature and masks. The value is the number of the most probable tokens that
    /// come with each, up to [`MAX_TOP_LOGPROBS`](moeflux_sampling::MAX_TOP_LOGPROBS). Default:
    /// none.
    pub logprobs: Option<usize>,
    /// Whether each token of the prompt but the first gets log-probabilities, given the tokens
    /// before it, with as many of the most probable tokens as `logprobs` says. All of the prompt is
    /// then computed, without reuse. With `max_tokens` of 0 the request ends there.
    pub prompt_logprobs: bool,
    /// Pooling of the prompt's hidden states after the final norm, for a request without an answer
    /// in a [`Scheduler`](crate::serve::Scheduler): it ends with the embedding. All of the prompt
    /// is computed, without reuse. Log-probabilities of the prompt exclude it.
    pub embedding: Option<Pooling>,
    /// Drafts of the answer. Default: [`EngineOptions::draft`](crate::EngineOptions::draft).
    pub draft: Option<DraftMode>,
    /// Drafter in place of the drafters that the mode names. If the model's head is one of them, it
    /// makes as many drafts, which are not used: for measurements.
    pub drafter: Option<Arc<dyn DrafterSource>>,
}

impl GenerateRequest {
    /// Whether all of the prompt must be computed, without reuse.
    pub(crate) fn computes_all(&self) -> bool {
        self.prompt_logprobs || self.embedding.is_some()
    }

    /// End tokens of an answer: the model's end tokens, `own`, and the request's end tokens.
    pub fn all_end_tokens(&self, own: &EndTokens) -> EndTokens {
        let (mut all, named) = (own.clone(), self.end_tokens.iter().copied());
        if self.include_stop {
            all.include(named);
            return all;
        }
        all.extend(named);
        all
    }

    /// Tokens that the answer may not have.
    pub(crate) fn bans(&self, own: &EndTokens) -> TokenBans {
        let is_ignored = |id: &u32| self.ignore_eos && !self.end_tokens.contains(id);
        let always = own.ids().iter().copied().filter(is_ignored).collect();
        let early = self.all_end_tokens(own).ids().to_vec();
        TokenBans::new(always, early, self.min_tokens, self.bad_words.clone())
    }

    /// Matcher of the stop strings.
    ///
    /// # Errors
    /// One is empty.
    pub fn stop_strings(&self) -> Result<StopStrings, Error> {
        let stops = StopStrings::new(self.stop.clone())?;
        Ok(stops.included(self.include_stop).min_tokens(self.min_tokens))
    }
}

setters!(GenerateRequest {
    sampling: Sampling,
    max_tokens: impl Into<Option<usize>>,
    min_tokens: usize,
    ignore_eos: bool,
    end_tokens: Vec<u32>,
    bad_words: Vec<Vec<u32>>,
    images: PromptImages,
    ends: Vec<usize>,
    logit_bias: Vec<(u32, f32)>,
    masks: Vec<Arc<dyn MaskSource>>,
    logprobs: impl Into<Option<usize>>,
    prompt_logprobs: bool,
    embedding: impl Into<Option<Pooling>>,
    draft: impl Into<Option<DraftMode>>,
    drafter: impl Into<Option<Arc<dyn DrafterSource>>>,
    stop: Vec<String>,
    include_stop: bool,
    tools: ToolSet,
});

/// Reason for the end of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model produced an end token.
    EndToken,
    /// A stop string occurred.
    StopString,
    /// The requested number of tokens is reached.
    MaxTokens,
    /// The context is full.
    Context,
    /// The caller cancelled.
    Cancelled,
}

/// End of one answer by end tokens, stop strings and limits. Every answer ends here, alone or in a
/// [`Scheduler`](crate::serve::Scheduler).
pub(crate) struct AnswerEnd {
    end_tokens: EndTokens,
    text: Option<AnswerText>,
    max_tokens: usize,
    generated: usize,
    /// Set by the last token: an end token, or one that completed a stop string.
    finish: Option<Finish>,
}

impl AnswerEnd {
    /// End by a request's limits and the model's end tokens.
    fn by_ids(engine: &Engine, request: &GenerateRequest) -> Self {
        Self {
            end_tokens: request.all_end_tokens(engine.end_tokens()),
            text: None,
            max_tokens: match request.embedding {
                Some(_) => 0,
                None => request.max_tokens.unwrap_or(usize::MAX),
            },
            generated: 0,
            finish: None,
        }
    }

    /// End by all that a request names. Decodes the text only if there are stop strings.
    ///
    /// # Errors
    /// A stop string is empty, or there is no tokenizer for stop strings.
    pub(crate) fn for_request(
        engine: &Engine,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        if !request.stop.is_empty() {
            let text = Self::parser(engine, prompt, request)?;
            return Ok(Self { text: Some(text), ..Self::by_ids(engine, request) });
        }
        Ok(Self::by_ids(engine, request))
    }

    /// End by all that a request names. Decodes the text in any case: see [`AnswerEnd::text`].
    ///
    /// # Errors
    /// A stop string is empty, or there is no tokenizer.
    #[cfg(feature = "text")]
    pub(crate) fn with_text(
        engine: &Engine,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        let text = Self::parser(engine, prompt, request)?.keep_deltas();
        Ok(Self { text: Some(text), ..Self::by_ids(engine, request) })
    }

    /// Text of an answer without tokens.
    fn parser(
        engine: &Engine,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<AnswerText, Error> {
        let parser = engine.text()?.parser(prompt, &request.tools)?;
        Ok(AnswerText::new(parser, request.stop_strings()?))
    }

    /// Takes the next token. End tokens are no text, unless the request includes them.
    pub(crate) fn push(&mut self, token: u32) -> Result<(), Error> {
        self.generated += 1;
        if self.end_tokens.contains(token) {
            self.finish = Some(Finish::EndToken);
            if !self.end_tokens.includes(token) {
                self.text.iter_mut().for_each(AnswerText::end_token);
            } else if let Some(text) = &mut self.text {
                text.push(token)?;
            }
            return Ok(());
        }
        if let Some(text) = &mut self.text
            && text.push(token)?
        {
            self.finish = Some(Finish::StopString);
        }
        Ok(())
    }

    /// Reason for the end before the next token, if there is one. `session` holds all tokens but
    /// the last one.
    pub(crate) fn reached(&self, session: &Session) -> Option<Finish> {
        let is_full = || session.tokens().len() == session.engine().plan().context;
        match self.finish {
            Some(finish) => Some(finish),
            None if self.generated > 0 && is_full() => Some(Finish::Context),
            None if self.has_all_tokens() => Some(Finish::MaxTokens),
            None => None,
        }
    }

    /// Whether no token follows, whatever the session has room for.
    pub(crate) fn is_reached(&self) -> bool {
        self.finish.is_some() || self.has_all_tokens()
    }

    /// Tokens that are left of the requested number.
    pub(crate) fn remaining(&self) -> usize {
        self.max_tokens.saturating_sub(self.generated)
    }

    /// Whether the requested number of tokens is reached.
    pub(crate) fn has_all_tokens(&self) -> bool {
        self.generated >= self.max_tokens
    }

    /// Text so far, if it is decoded.
    pub(crate) fn text(&mut self) -> Option<&mut AnswerText> {
        self.text.as_mut()
    }
}
