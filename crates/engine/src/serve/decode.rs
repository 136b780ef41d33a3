//! Decode loop: prompt ids in, token ids out, one after another until the answer ends.

use std::time::Instant;

use moeflux_base::Error;
use moeflux_sampling::TokenLogprobs;

use super::{
    answer::{AnswerFeed, RunningAnswer},
    choice::{ChosenToken, PromptLogprobs},
    request::{AnswerEnd, Finish, GenerateRequest},
};
use crate::{
    runtime::control::{CancelToken, StepControl},
    session::{
        drafts::StepKind,
        prefix_key::Prompt,
        session::{CheckedFeed, Session, SessionFeed, Synced},
    },
    text::AnswerText,
};

/// Iterator over generated tokens: see [`Session::generate`].
pub struct Tokens<'a> {
    session: &'a mut Session,
    answer: RunningAnswer,
    cancel: Option<&'a CancelToken>,
    synced: Synced,
    prompt_logprobs: Vec<TokenLogprobs>,
    last: Option<ChosenToken>,
    finish: Option<Finish>,
    /// An error after the tokens that are chosen.
    error: Option<Error>,
    failed: bool,
}

impl<'a> Tokens<'a> {
    pub(crate) fn start<'w: 'a>(
        session: &'a mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
        end: AnswerEnd,
        control: &mut StepControl<'w>,
    ) -> Result<Self, Error> {
        let with_images = Prompt::new(prompt, &request.images);
        session.check_prompt(with_images)?;
        let answer = RunningAnswer::start(session, prompt, request, end)?;
        let mut of_prompt = PromptLogprobs::for_request(&prompt.into(), request);
        let synced = match &mut of_prompt {
            Some(sink) => session.sync_anew(with_images, &request.ends, control, sink)?,
            None => session.sync_with(with_images, &request.ends, control)?,
        };
        let prompt_logprobs = of_prompt.map(|mut of_prompt| of_prompt.take()).unwrap_or_default();
        Ok(Self {
            session,
            answer,
            cancel: control.cancel,
            synced,
            prompt_logprobs,
            last: None,
            finish: None,
            error: None,
            failed: false,
        })
    }

    /// The session. It holds all tokens that are chosen but the last one, or a run of forced ones,
    /// which are fed together when a token is requested that depends on them. A step that checks
    /// drafts chooses several tokens.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Reuse and work for the prompt.
    pub fn synced(&self) -> Synced {
        self.synced
    }

    /// Log-probabilities of the prompt's tokens but the first, if the request asks for them.
    pub fn prompt_logprobs(&self) -> &[TokenLogprobs] {
        &self.prompt_logprobs
    }

    /// Log-probabilities of the last token, if the request asks for them.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.last.as_ref()?.logprobs.as_deref()
    }

    /// Reason for the end; `None` while generating, and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Text so far, if it is decoded. It includes chosen tokens that the iterator has not returned.
    pub(crate) fn text(&mut self) -> Option<&mut AnswerText> {
        self.answer.text()
    }

    /// Chosen tokens that the iterator has not returned.
    pub(crate) fn take_rest(&mut self) -> impl Iterator<Item = ChosenToken> {
        std::iter::from_fn(|| self.answer.take())
    }

    /// Chooses at least one token. Those before an error stay.
    fn choose(&mut self) -> Result<(), Error> {
        let Self { session, answer, cancel, .. } = self;
        let count = answer.pending().len();
        if count == 0 {
            return answer.choose_first(session);
        }
        let since = Instant::now();
        let kind = StepKind { sequences: 1, certain: count, ..StepKind::default() };
        let room = session.engine().plan().chunk.saturating_sub(count);
        let kind = answer.prepare(session, count, room, kind);
        let mut control = StepControl { cancel: *cancel, ..StepControl::default() };
        let AnswerFeed { tokens, drafts, head_drafts, choice } = answer.feed();
        let Some(choice) = choice else { return Ok(()) };
        let feed = SessionFeed::answer(tokens, drafts, head_drafts);
        let CheckedFeed { accepted, chosen, drafted } =
            session.choose_after(feed, choice, &mut control)?;
        let ended = answer.end_step(session, accepted, Some(chosen), drafted);
        answer.record(kind, since.elapsed().as_secs_f64(), session.stats_mut());
        ended
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<u32, Error>;

    /// The next token. Ends after an error; the session is then at its last good token.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(chosen) = self.answer.take() {
                let token = chosen.token;
                self.last = Some(chosen);
                return Some(Ok(token));
            }
            if self.failed || self.finish.is_some() {
                return None;
            }
            if let Some(error) = self.error.take() {
                self.failed = true;
                return Some(Err(error));
            }
            let is_cancelled = self.cancel.is_some_and(CancelToken::is_cancelled);
            let cancelled = is_cancelled.then_some(Finish::Cancelled);
            self.finish = self.answer.reached(self.session).or(cancelled);
            if self.finish.is_some() {
                return None;
            }
            match self.choose() {
                Ok(()) => {}
                Err(Error::Cancelled) => self.finish = Some(Finish::Cancelled),
                Err(error) => self.error = Some(error),
            }
        }
    }
}

impl Session {
    /// Brings the session to `prompt` and generates tokens by `request.sampling`. The iterator ends
    /// after an end token, a stop string, `request.max_tokens`, or when the context is full.
    /// Setting `control.cancel` ends it at the next layer. `control.progress` covers the prompt.
    ///
    /// # Errors
    /// As [`Session::sync`]; also if a sampling value or a bias is out of range, a stop string is
    /// empty, the checkpoint has no tokenizer for stop strings, or a mask does not start.
    pub fn generate<'a, 'w: 'a>(
        &'a mut self,
        prompt: &[u32],
        request: &GenerateRequest,
        control: &mut StepControl<'w>,
    ) -> Result<Tokens<'a>, Error> {
        let end = AnswerEnd::for_request(self.engine(), prompt, request)?;
        Tokens::start(self, prompt, request, end, control)
    }
}
