//! An answer in progress: the choice of its tokens, its drafts, and its end.

use std::collections::VecDeque;

use moeflux_base::Error;

use super::{
    choice::{ChosenToken, TokenChoice},
    drafts::Drafts,
    request::{AnswerEnd, Finish, GenerateRequest},
};
use crate::{
    experts::stats::Stats,
    runtime::logits_request::LogitsOutput,
    session::{
        drafts::{DraftList, DraftTotals, RowChoice, RowOutcome, StepKind},
        session::Session,
    },
    text::AnswerText,
};

/// An answer in progress, alone or in a [`Scheduler`](crate::serve::Scheduler).
pub(crate) struct RunningAnswer {
    tokens: AnswerTokens,
    /// Chosen tokens that the session does not hold: the last one, and forced ones after it.
    pending: Vec<u32>,
    drafts: Drafts,
    /// Tokens of the current step: pending ones, then drafts.
    fed: Vec<u32>,
    /// Number of the last of them that are drafted, and of the drafts that were right.
    drafted: usize,
    right: usize,
    totals: DraftTotals,
    /// Number of drafts that the model's head is to make in the current step.
    head_drafts: usize,
}

/// Tokens of an answer, as far as they are chosen.
pub(crate) struct AnswerTokens {
    choice: TokenChoice,
    end: AnswerEnd,
    /// Tokens that no caller has taken. After a step that failed, its choices are chosen
    /// again without the sampler, which has recorded them.
    new: VecDeque<ChosenToken>,
    /// Number of the first of them whose steps have succeeded.
    ready: usize,
    /// Number of the first of them that are chosen; more than `ready` within a step.
    next: usize,
}

/// Tokens of an answer to append to a session, and the choice of the tokens after them.
pub(crate) struct AnswerFeed<'a> {
    pub(crate) tokens: &'a [u32],
    /// Number of the last tokens that are drafted.
    pub(crate) drafts: usize,
    /// Number of drafts that the model's head makes.
    pub(crate) head_drafts: usize,
    /// `None` before the last pending token.
    pub(crate) choice: Option<&'a mut dyn RowChoice>,
}

impl RunningAnswer {
    /// An answer to a valid prompt.
    ///
    /// # Errors
    /// As [`TokenChoice::for_request`].
    pub(crate) fn start(
        session: &mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
        end: AnswerEnd,
    ) -> Result<Self, Error> {
        let choice = TokenChoice::for_request(session.engine(), prompt, request)?;
        let drafts = Drafts::for_request(session.engine(), request);
        session.set_drafts_by_head(drafts.uses_head());
        Ok(Self {
            tokens: AnswerTokens { choice, end, new: VecDeque::new(), ready: 0, next: 0 },
            pending: Vec::new(),
            drafts,
            fed: Vec::new(),
            drafted: 0,
            right: 0,
            totals: DraftTotals::default(),
            head_drafts: 0,
        })
    }

    /// Chosen tokens that the session does not hold.
    pub(crate) fn pending(&self) -> &[u32] {
        &self.pending
    }

    /// The next token that no caller has taken.
    pub(crate) fn take(&mut self) -> Option<ChosenToken> {
        let AnswerTokens { new, ready, next, .. } = &mut self.tokens;
        (*ready, *next) = (ready.checked_sub(1)?, next.saturating_sub(1));
        new.pop_front()
    }

    /// Text so far, if it is decoded. It includes tokens that no caller has taken.
    pub(crate) fn text(&mut self) -> Option<&mut AnswerText> {
        self.tokens.end.text()
    }

    /// Whether the requested number of tokens is reached.
    pub(crate) fn has_all_tokens(&self) -> bool {
        self.tokens.end.has_all_tokens()
    }

    /// Reason for the end before the next token, if there is one.
    pub(crate) fn reached(&self, session: &Session) -> Option<Finish> {
        let is_current = self.tokens.ready == self.tokens.new.len();
        self.tokens.end.reached(session).filter(|_| is_current)
    }

    /// Chooses the first token of the answer from the logits after the prompt, and the forced ones
    /// after it.
    ///
    /// # Errors
    /// As [`TokenChoice::choose`].
    pub(crate) fn choose_first(&mut self, session: &Session) -> Result<(), Error> {
        let chosen = self.tokens.choice.choose(session.logits())?;
        self.pending.push(chosen.token);
        self.tokens.push(chosen)?;
        self.tokens.ready = self.tokens.next;
        self.extend_run(session)
    }

    /// Prepares to append the next `count` pending tokens to the session, and up to `drafts` drafts
    /// if those are all, in a step of a kind. Returns the kind with the drafts of the answer.
    pub(crate) fn prepare(
        &mut self,
        session: &Session,
        count: usize,
        drafts: usize,
        kind: StepKind,
    ) -> StepKind {
        let Self { tokens: AnswerTokens { end, ready, next, .. }, pending, fed, .. } = self;
        *next = *ready;
        fed.clear();
        fed.extend_from_slice(&pending[..count]);
        self.head_drafts = 0;
        if count == pending.len() {
            // A draft that is right needs a row, and is not the last token.
            let context = session.engine().plan().context;
            let rows = context.saturating_sub(session.tokens().len() + count);
            let max = drafts.min(rows).min(end.remaining().saturating_sub(1));
            let has_head = count == 1 && session.can_draft_by_head();
            self.head_drafts = self.drafts.propose(session.tokens(), fed, max, kind, has_head);
        }
        self.drafted = fed.len() - count;
        StepKind { drafts: kind.drafts + self.drafted.max(self.head_drafts), ..kind }
    }

    /// The prepared tokens.
    pub(crate) fn feed(&mut self) -> AnswerFeed<'_> {
        let drafts = self.drafted;
        let is_last = self.fed.len() - drafts == self.pending.len();
        let choice = is_last.then_some(&mut self.tokens as &mut dyn RowChoice);
        AnswerFeed { tokens: &self.fed, drafts, head_drafts: self.head_drafts, choice }
    }

    /// Ends a step that has appended `accepted` of the prepared tokens and of the head's `drafted`
    /// ones, and `chosen` the next one.
    ///
    /// # Errors
    /// The choice failed, or a mask.
    pub(crate) fn end_step(
        &mut self,
        session: &Session,
        accepted: usize,
        chosen: Option<Result<u32, Error>>,
        drafted: DraftList,
    ) -> Result<(), Error> {
        let certain = self.fed.len() - self.drafted;
        self.drafted += drafted.as_slice().len();
        self.right = accepted.saturating_sub(certain);
        self.totals.drafted += self.drafted as u64;
        self.totals.accepted += self.right as u64;
        self.pending.drain(..certain);
        self.tokens.ready = self.tokens.next;
        match chosen {
            Some(chosen) => self.pending.push(chosen?),
            None => return Ok(()),
        }
        self.extend_run(session)
    }

    /// Drafts so far.
    pub(crate) fn draft_totals(&self) -> DraftTotals {
        self.totals
    }

    /// Takes the time of the last step, and adds its drafts to `stats` if it only decoded: of
    /// several sequences each has a share of the step.
    pub(crate) fn record(&mut self, kind: StepKind, seconds: f64, stats: &mut Stats) {
        let Self { drafts, drafted, right, .. } = self;
        if let Some(undrafted) = drafts.record(kind, *drafted, *right, seconds) {
            let sequences = kind.sequences.max(1) as f64;
            stats.add_drafting(seconds / sequences, undrafted / sequences);
        }
    }

    /// Chooses the forced tokens after the pending ones, as far as the answer goes.
    fn extend_run(&mut self, session: &Session) -> Result<(), Error> {
        let context = session.engine().plan().context;
        while self.tokens.next == self.tokens.new.len()
            && session.tokens().len() + self.pending.len() < context
            && !self.tokens.end.is_reached()
            && let Some(forced) = self.tokens.choice.next_in_run()?
        {
            self.pending.push(forced.token);
            self.tokens.push(forced)?;
            self.tokens.ready = self.tokens.next;
        }
        Ok(())
    }
}

impl AnswerTokens {
    fn push(&mut self, chosen: ChosenToken) -> Result<(), Error> {
        self.end.push(chosen.token)?;
        self.new.push_back(chosen);
        self.next = self.new.len();
        Ok(())
    }
}

impl RowChoice for AnswerTokens {
    fn candidates(&self, vocab: usize) -> Option<usize> {
        self.choice.candidates(vocab)
    }

    fn choose(&mut self, output: &LogitsOutput<'_>) -> Result<RowOutcome, Error> {
        if let Some(again) = self.new.get(self.next) {
            let token = again.token;
            self.next += 1;
            let ends = self.next == self.new.len() && self.end.is_reached();
            return Ok(RowOutcome::Chosen { token, ends });
        }
        let chosen = match *output {
            LogitsOutput::TopK { ids, logits } => self.choice.choose_candidate(ids, logits)?,
            LogitsOutput::Logits(logits) | LogitsOutput::Hidden(logits) => {
                Some(self.choice.choose(logits)?)
            }
            LogitsOutput::Drafts(_) => None,
        };
        let Some(chosen) = chosen else { return Ok(RowOutcome::NeedsAll) };
        let token = chosen.token;
        self.push(chosen)?;
        Ok(RowOutcome::Chosen { token, ends: self.end.is_reached() })
    }
}
