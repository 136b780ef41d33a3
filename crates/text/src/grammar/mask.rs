//! Mask of one answer: free in its thoughts, then by the grammar.

use llguidance::toktrie::SimpleVob;
use moeflux_base::{Error, GrammarError};
use moeflux_sampling::TokenMask;

use super::{
    ahead::{NextMask, NextTokens},
    grammar::Grammar,
};
use crate::dialect::{AnswerFrame, FrameMark};

/// Most tokens of line ends between thoughts and the text.
const MAX_LINE_ENDS: u8 = 2;

/// Part of an answer in which it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AnswerPhase {
    /// In thoughts, which are free. The answer may end only if its text is free, too.
    Thoughts,
    /// In text that is free up to a mark.
    Text,
    /// In a message that is free up to its end.
    Message,
    /// In the grammar.
    Bound {
        /// Tokens of line ends that may precede it.
        line_ends: u8,
        /// Whether thoughts may begin in its place.
        may_think: bool,
    },
}

impl AnswerPhase {
    /// The phase at the start of an answer. In text that `is_free` the grammar begins at a mark.
    pub(super) fn first(frame: &AnswerFrame, is_free: bool) -> Self {
        match frame {
            AnswerFrame::Thoughts { is_open: true, .. } => Self::Thoughts,
            _ if is_free => Self::Text,
            AnswerFrame::Thoughts { open, .. } => {
                Self::Bound { line_ends: 0, may_think: open.is_some() }
            }
            AnswerFrame::Text | AnswerFrame::Channels { .. } => {
                Self::Bound { line_ends: 0, may_think: false }
            }
        }
    }
}

/// Mask of one answer.
pub(super) struct GrammarMask {
    grammar: Grammar,
    frame: AnswerFrame,
    phase: AnswerPhase,
    next: MaskState,
    /// Text since the last mark, as far as it may begin another one; of a header all of it.
    tail: Vec<u8>,
    /// Logits that stay whatever the grammar says. Kept to reuse the allocation.
    kept: Vec<KeptLogit>,
    /// A run of forced tokens that was taken, until all of them are accepted.
    forced: Vec<u32>,
    /// Tokens of the run that were accepted.
    accepted: usize,
}

/// The grammar behind the tokens so far, and the tokens that it allows next.
enum MaskState {
    /// At its start.
    Fresh,
    Computing(NextMask),
    Ready(Box<NextTokens>),
    /// The grammar failed.
    Failed,
}

/// The logit of a token.
struct KeptLogit {
    token: u32,
    logit: f32,
}

impl GrammarMask {
    pub(super) fn new(grammar: Grammar, frame: AnswerFrame, phase: AnswerPhase) -> Self {
        let mut mask = Self {
            grammar,
            frame,
            phase,
            next: MaskState::Fresh,
            tail: Vec::new(),
            kept: Vec::new(),
            forced: Vec::new(),
            accepted: 0,
        };
        if matches!(mask.phase, AnswerPhase::Bound { .. }) {
            mask.compute(Vec::new());
        }
        mask
    }

    /// Begins to compute the mask behind further tokens of the grammar.
    fn compute(&mut self, tokens: Vec<u32>) {
        let matcher = match std::mem::replace(&mut self.next, MaskState::Failed) {
            MaskState::Fresh => self.grammar.matcher(),
            MaskState::Ready(next) => next.matcher,
            // The error of a failure was returned.
            MaskState::Computing(_) | MaskState::Failed => return,
        };
        let thread = self.grammar.0.compiler.masks();
        self.next = MaskState::Computing(thread.begin(matcher, tokens));
    }

    /// Waits for the mask, if one is being computed. Behind the end of calls the text is free.
    fn settle(&mut self) -> Result<(), Error> {
        let computing = match std::mem::replace(&mut self.next, MaskState::Failed) {
            MaskState::Computing(computing) => computing,
            other => {
                self.next = other;
                return Ok(());
            }
        };
        let next = computing.wait()?;
        if self.watches() && next.allowed.is_none() {
            (self.phase, self.tail, self.next) = (AnswerPhase::Text, Vec::new(), MaskState::Fresh);
        } else {
            self.next = MaskState::Ready(Box::new(next));
        }
        Ok(())
    }

    /// Whether the grammar begins at a mark in the text.
    fn watches(&self) -> bool {
        !self.grammar.0.marks.is_empty()
    }

    /// Whether the answer may end outside its grammar.
    fn may_end_free(&self) -> bool {
        let has_calls_only = self.grammar.0.free_channels.len() > 1;
        self.watches() || has_calls_only
    }

    fn keep(&mut self, token: u32, logits: &[f32]) {
        self.kept.extend(logits.get(token as usize).map(|&logit| KeptLogit { token, logit }));
    }

    /// Allows the tokens of the grammar only.
    fn bound(&mut self, line_ends: u8, may_think: bool, logits: &mut [f32]) -> Result<(), Error> {
        let grammar = self.grammar.clone();
        self.kept.clear();
        let MaskState::Ready(next) = &self.next else { return Err(stopped("it has failed")) };
        let is_accepting = next.is_accepting;
        if let AnswerFrame::Thoughts { open: Some(open), .. } = self.frame
            && may_think
        {
            self.keep(open, logits);
        }
        if line_ends > 0 {
            let tokens = &grammar.0.compiler.vocabulary().line_ends;
            tokens.iter().for_each(|token| self.keep(*token, logits));
        }
        if is_accepting {
            grammar.0.end_tokens.ids().iter().for_each(|token| self.keep(*token, logits));
        } else {
            forbid(grammar.0.end_tokens.ids(), logits);
        }
        let MaskState::Ready(next) = &self.next else { return Err(stopped("it has failed")) };
        let has_any = apply(next.allowed.as_ref(), logits);
        for KeptLogit { token, logit } in &self.kept {
            logits[*token as usize] = *logit;
        }
        let has_kept = self.kept.iter().any(|kept| kept.logit > f32::NEG_INFINITY);
        match has_any || has_kept {
            true => Ok(()),
            false => Err(stopped("no token of the vocabulary continues it")),
        }
    }

    /// Begins the grammar anew.
    fn begin(&mut self, line_ends: u8) {
        self.next = MaskState::Fresh;
        self.tail.clear();
        self.phase = AnswerPhase::Bound { line_ends, may_think: false };
    }

    /// Takes a token of the grammar.
    fn follow(&mut self, token: u32) {
        if let AnswerFrame::Channels { message, .. } = self.frame {
            let bytes = self.grammar.0.compiler.vocabulary().bytes(token);
            if token != message {
                self.tail.extend_from_slice(bytes);
            } else if self.is_free_channel() {
                (self.phase, self.next) = (AnswerPhase::Message, MaskState::Fresh);
                return;
            }
        }
        self.compute(vec![token]);
    }

    /// Whether the header that ends names a channel that is free, and nothing else.
    fn is_free_channel(&self) -> bool {
        let header = String::from_utf8_lossy(&self.tail);
        let name = header.rsplit("<|channel|>").next().unwrap_or_default();
        self.grammar.0.free_channels.contains(&name)
    }

    /// Takes a token of free text. Returns the bytes behind the first mark that it completes.
    fn find(&mut self, token: u32, marks: &[FrameMark]) -> Option<Vec<u8>> {
        if marks.iter().any(|mark| mark.token == Some(token)) {
            return Some(Vec::new());
        }
        let bytes = self.grammar.0.compiler.vocabulary().bytes(token);
        self.tail.extend_from_slice(bytes);
        let spelled = || marks.iter().filter(|mark| mark.token.is_none()).map(|mark| &mark.text);
        for mark in spelled() {
            let mut windows = self.tail.windows(mark.len());
            if let Some(start) = windows.position(|window| window == mark.as_bytes()) {
                return Some(self.tail.split_off(start + mark.len()));
            }
        }
        let longest = spelled().map(String::len).max().unwrap_or(0);
        let excess = self.tail.len().saturating_sub(longest);
        self.tail.drain(..excess);
        None
    }

    /// Begins the grammar with text that came in the token of a mark.
    fn begin_with(&mut self, line_ends: u8, bytes: &[u8]) {
        self.begin(line_ends);
        let tokens = self.grammar.0.compiler.vocabulary().trie.greedy_tokenize(bytes);
        self.compute(tokens);
    }

    /// Takes a token of thoughts.
    fn think(&mut self, token: u32) {
        let AnswerFrame::Thoughts { close, .. } = self.frame.clone() else { return };
        let Some(rest) = self.find(token, &[close]) else { return };
        if self.watches() {
            (self.phase, self.tail) = (AnswerPhase::Text, Vec::new());
            return;
        }
        let start = rest.iter().position(|byte| *byte != b'\n').unwrap_or(rest.len());
        self.begin_with(MAX_LINE_ENDS, &rest[start..]);
    }

    /// Takes a token of text that is free.
    fn watch(&mut self, token: u32) {
        if let AnswerFrame::Thoughts { open: Some(open), .. } = self.frame
            && token == open
        {
            (self.phase, self.tail) = (AnswerPhase::Thoughts, Vec::new());
            return;
        }
        let vocabulary = self.grammar.0.compiler.vocabulary();
        let mark = |text: &String| FrameMark { text: text.clone(), token: vocabulary.mark(text) };
        let marks: Vec<FrameMark> = self.grammar.0.marks.iter().map(mark).collect();
        let Some(rest) = self.find(token, &marks) else { return };
        self.begin_with(0, &rest);
    }
}

impl TokenMask for GrammarMask {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        self.settle()?;
        match self.phase {
            AnswerPhase::Text => {}
            AnswerPhase::Thoughts | AnswerPhase::Message => {
                let grammar = &self.grammar.0;
                if !self.may_end_free() {
                    forbid(grammar.end_tokens.ids(), logits);
                    forbid(&grammar.call_marks, logits);
                }
                if let AnswerFrame::Channels { message, header, .. } = &self.frame {
                    forbid(&[*message], logits);
                    forbid(header, logits);
                }
            }
            AnswerPhase::Bound { line_ends, may_think } => {
                self.bound(line_ends, may_think, logits)?
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        self.settle()?;
        if self.grammar.0.end_tokens.contains(token) {
            return Ok(());
        }
        if self.forced.get(self.accepted) == Some(&token) {
            self.accepted += 1;
            if self.accepted == self.forced.len() {
                self.accepted = 0;
                let run = std::mem::take(&mut self.forced);
                self.compute(run);
            }
            return Ok(());
        }
        match (&mut self.phase, &self.frame) {
            (AnswerPhase::Thoughts, _) => self.think(token),
            (AnswerPhase::Text, _) => self.watch(token),
            (AnswerPhase::Message, AnswerFrame::Channels { end, .. }) => {
                if token == *end {
                    self.begin_with(0, &[]);
                }
            }
            (AnswerPhase::Message, _) => {}
            (AnswerPhase::Bound { may_think: true, .. }, AnswerFrame::Thoughts { open, .. })
                if *open == Some(token) =>
            {
                self.tail.clear();
                (self.phase, self.next) = (AnswerPhase::Thoughts, MaskState::Fresh);
            }
            (AnswerPhase::Bound { line_ends: line_ends @ 1.., .. }, _)
                if self.grammar.0.compiler.vocabulary().line_ends.contains(&token) =>
            {
                *line_ends -= 1;
            }
            (AnswerPhase::Bound { line_ends, may_think }, _) => {
                (*line_ends, *may_think) = (0, false);
                self.follow(token);
            }
        }
        Ok(())
    }

    fn take_forced(&mut self) -> Result<Vec<u32>, Error> {
        self.settle()?;
        // The headers of messages in channels are followed token by token.
        let has_header = matches!(self.frame, AnswerFrame::Channels { .. });
        let is_bound = self.phase == AnswerPhase::Bound { line_ends: 0, may_think: false };
        if let MaskState::Ready(next) = &mut self.next
            && is_bound
            && !has_header
        {
            self.forced = std::mem::take(&mut next.forced);
        }
        Ok(self.forced.clone())
    }
}

/// Forbids tokens.
fn forbid(tokens: &[u32], logits: &mut [f32]) {
    for token in tokens {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Forbids all tokens but the allowed ones. Returns whether one of those is possible.
fn apply(allowed: Option<&SimpleVob>, logits: &mut [f32]) -> bool {
    let words = allowed.map_or(&[][..], SimpleVob::as_slice);
    let (mut has_any, bits) = (false, u32::BITS as usize);
    for (word, logits) in words.iter().zip(logits.chunks_mut(bits)) {
        if *word == 0 {
            logits.fill(f32::NEG_INFINITY);
            continue;
        }
        for (bit, logit) in logits.iter_mut().enumerate() {
            match word & (1 << bit) {
                0 => *logit = f32::NEG_INFINITY,
                _ => has_any |= *logit > f32::NEG_INFINITY,
            }
        }
    }
    logits.iter_mut().skip(words.len() * bits).for_each(|logit| *logit = f32::NEG_INFINITY);
    has_any
}

pub(super) fn stopped(problem: impl ToString) -> Error {
    let problem = problem.to_string().lines().next().unwrap_or_default().to_owned();
    GrammarError::Stopped { problem }.into()
}
