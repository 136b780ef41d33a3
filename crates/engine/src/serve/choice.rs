//! Choice of an answer's next token by all that its request names: sampling, bias, masks, logprobs.

use std::{collections::VecDeque, sync::Arc};

use moeflux_base::Error;
use moeflux_sampling::{Sampler, TokenLogprobs, TokenMask};

use super::request::GenerateRequest;
use crate::session::{engine::Engine, steps::RowSink};

/// A chosen token.
#[derive(Debug)]
pub(crate) struct ChosenToken {
    pub(crate) token: u32,
    /// Its log-probabilities, if the request asks for them.
    pub(crate) logprobs: Option<Box<TokenLogprobs>>,
}

/// Choice of the tokens of one answer, alone or in a [`Scheduler`](crate::serve::Scheduler).
pub(crate) struct TokenChoice {
    sampler: Sampler,
    masks: Vec<Box<dyn TokenMask>>,
    /// Number of the most probable tokens beside each log-probability.
    logprobs: Option<usize>,
    /// Rest of a run of tokens that the only mask forces.
    forced: VecDeque<u32>,
}

impl TokenChoice {
    /// The choice for a valid prompt, by a request. Starts the masks.
    ///
    /// # Errors
    /// A sampling value, a bias or the number of log-probabilities is out of range; a mask does not
    /// start.
    pub(crate) fn for_request(
        engine: &Engine,
        prompt: &[u32],
        request: &GenerateRequest,
    ) -> Result<Self, Error> {
        let mut sampler = Sampler::new(request.sampling.clone(), engine.blueprint().vocab)?;
        sampler.set_logit_bias(&request.logit_bias)?;
        sampler.set_bans(request.bans(engine.end_tokens()));
        sampler.prompt(prompt);
        request.logprobs.map_or(Ok(()), TokenLogprobs::check_count)?;
        let masks = request.masks.iter().map(|source| source.start()).collect::<Result<_, _>>()?;
        Ok(Self { sampler, masks, logprobs: request.logprobs, forced: VecDeque::new() })
    }

    /// Chooses the next token from all logits. A token that the only mask forces needs none.
    ///
    /// # Errors
    /// As [`Sampler::sample_masked`].
    pub(crate) fn choose(&mut self, logits: &[f32]) -> Result<ChosenToken, Error> {
        // Other masks might forbid a forced token.
        if let ([mask], true) = (self.masks.as_mut_slice(), self.forced.is_empty()) {
            self.forced.extend(mask.take_forced()?);
        }
        let token = match self.take_forced()? {
            Some(token) => token,
            None => self.sampler.sample_masked(logits, &mut self.masks)?,
        };
        let logprobs = self.logprobs.map(|top| Box::new(TokenLogprobs::new(logits, token, top)));
        Ok(ChosenToken { token, logprobs })
    }

    /// The next token of a run that is forced, so that all of it is fed in one step. `None` behind
    /// its end, or if each token needs its log-probabilities.
    ///
    /// # Errors
    /// The mask fails.
    pub(crate) fn next_in_run(&mut self) -> Result<Option<ChosenToken>, Error> {
        if self.logprobs.is_some() {
            return Ok(None);
        }
        Ok(self.take_forced()?.map(|token| ChosenToken { token, logprobs: None }))
    }

    fn take_forced(&mut self) -> Result<Option<u32>, Error> {
        let Some(token) = self.forced.pop_front() else { return Ok(None) };
        self.sampler.accept(token);
        self.masks.iter_mut().try_for_each(|mask| mask.accept(token))?;
        Ok(Some(token))
    }

    /// Whether the sampler alone decides, so that candidates may suffice.
    fn is_plain(&self) -> bool {
        self.masks.is_empty() && self.logprobs.is_none() && self.forced.is_empty()
    }

    /// Number of the highest logits that probably suffice; `None` if all are needed.
    pub(crate) fn candidates(&self, vocab: usize) -> Option<usize> {
        self.sampler.candidates(vocab).filter(|_| self.is_plain())
    }

    /// As [`TokenChoice::choose`], from the highest logits alone. `None`, without any change, if
    /// the choice depends on others.
    ///
    /// # Errors
    /// As [`TokenChoice::choose`].
    pub(crate) fn choose_candidate(
        &mut self,
        ids: &[f32],
        logits: &[f32],
    ) -> Result<Option<ChosenToken>, Error> {
        let token = self.sampler.sample_candidates(ids, logits)?;
        Ok(token.map(|token| ChosenToken { token, logprobs: None }))
    }
}

/// Log-probabilities of a prompt's tokens but the first, from the logits after each token.
pub(crate) struct PromptLogprobs {
    /// Number of the most probable tokens beside each.
    top: usize,
    prompt: Arc<[u32]>,
    /// Position of the first token of the current step.
    start: usize,
    /// Results of the current step.
    of_step: Vec<TokenLogprobs>,
}

impl PromptLogprobs {
    /// `None` if the request does not ask for them.
    pub(crate) fn for_request(prompt: &Arc<[u32]>, request: &GenerateRequest) -> Option<Self> {
        let top = request.logprobs.unwrap_or_default();
        let of_step = Vec::new();
        request.prompt_logprobs.then(|| Self { top, prompt: Arc::clone(prompt), start: 0, of_step })
    }

    /// The sink of a step whose tokens start at a position of the prompt.
    pub(crate) fn start_at(&mut self, start: usize) -> &mut dyn RowSink {
        self.start = start;
        self.of_step.clear();
        self
    }

    /// Position of the first token with a result of the current step.
    pub(crate) fn first(&self) -> usize {
        self.start + 1
    }

    /// Results of the current step, token by token.
    pub(crate) fn take(&mut self) -> Vec<TokenLogprobs> {
        std::mem::take(&mut self.of_step)
    }
}

impl RowSink for PromptLogprobs {
    fn row(&mut self, row: usize, logits: &[f32]) {
        let next = self.prompt.get(self.start + row + 1);
        self.of_step.extend(next.map(|next| TokenLogprobs::new(logits, *next, self.top)));
    }
}
