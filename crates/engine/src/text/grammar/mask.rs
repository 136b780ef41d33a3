//! Mask of one answer: free in its thoughts, then by the grammar.

use llguidance::{Matcher, toktrie::SimpleVob};

use super::Grammar;
use crate::{
    base::error::{Error, GrammarError},
    text::{
        dialect::{Frame, FrameMark},
        sampling::TokenMask,
    },
};

/// Most tokens of line ends between thoughts and the text.
const MAX_LINE_ENDS: u8 = 2;

/// Part of an answer in which it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Phase {
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

impl Phase {
    /// The phase at the start of an answer. In text that `is_free` the grammar begins at a mark.
    pub(super) fn first(frame: &Frame, is_free: bool) -> Self {
        match frame {
            Frame::Thoughts { is_open: true, .. } => Self::Thoughts,
            _ if is_free => Self::Text,
            Frame::Thoughts { open, .. } => Self::Bound { line_ends: 0, may_think: open.is_some() },
            Frame::Text | Frame::Channels { .. } => Self::Bound { line_ends: 0, may_think: false },
        }
    }
}

/// Mask of one answer.
pub(super) struct GrammarMask {
    grammar: Grammar,
    frame: Frame,
    phase: Phase,
    matcher: Matcher,
    /// Text since the last mark, as far as it may begin another one; of a header all of it.
    tail: Vec<u8>,
    /// Logits that stay whatever the grammar says. Kept to reuse the allocation.
    kept: Vec<KeptLogit>,
}

/// The logit of a token.
struct KeptLogit {
    token: u32,
    logit: f32,
}

impl GrammarMask {
    pub(super) fn new(grammar: Grammar, frame: Frame, phase: Phase) -> Self {
        let matcher = grammar.matcher();
        Self { grammar, frame, phase, matcher, tail: Vec::new(), kept: Vec::new() }
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
        let is_accepting =
            self.matcher.is_stopped() || self.matcher.is_accepting().map_err(stopped)?;
        if let Frame::Thoughts { open: Some(open), .. } = self.frame
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
        let allowed = match self.matcher.is_stopped() {
            true => None,
            // The library reports the end of a grammar as an error.
            false => match self.matcher.compute_mask() {
                Err(_) if is_accepting => None,
                allowed => Some(allowed.map_err(stopped)?),
            },
        };
        let has_any = apply(allowed.as_ref(), logits);
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
        self.matcher = self.grammar.matcher();
        self.tail.clear();
        self.phase = Phase::Bound { line_ends, may_think: false };
    }

    /// Takes a token of the grammar.
    fn follow(&mut self, token: u32) -> Result<(), Error> {
        self.matcher.consume_token(token).map_err(stopped)?;
        if let Frame::Channels { message, .. } = self.frame {
            let bytes = self.grammar.0.compiler.vocabulary().bytes(token);
            if token != message {
                self.tail.extend_from_slice(bytes);
            } else if self.is_free_channel() {
                self.phase = Phase::Message;
            }
        }
        if self.watches() && self.matcher.is_stopped() {
            (self.phase, self.tail) = (Phase::Text, Vec::new());
        }
        Ok(())
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

    /// Takes text of the grammar that came in the token of a mark.
    fn follow_bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        let tokens = self.grammar.0.compiler.vocabulary().trie.greedy_tokenize(bytes);
        self.matcher.consume_tokens(&tokens).map_err(stopped)
    }

    /// Takes a token of thoughts.
    fn think(&mut self, token: u32) -> Result<(), Error> {
        let Frame::Thoughts { close, .. } = self.frame.clone() else { return Ok(()) };
        let Some(rest) = self.find(token, &[close]) else { return Ok(()) };
        if self.watches() {
            (self.phase, self.tail) = (Phase::Text, Vec::new());
            return Ok(());
        }
        self.begin(MAX_LINE_ENDS);
        let start = rest.iter().position(|byte| *byte != b'\n').unwrap_or(rest.len());
        self.follow_bytes(&rest[start..])
    }

    /// Takes a token of text that is free.
    fn watch(&mut self, token: u32) -> Result<(), Error> {
        if let Frame::Thoughts { open: Some(open), .. } = self.frame
            && token == open
        {
            (self.phase, self.tail) = (Phase::Thoughts, Vec::new());
            return Ok(());
        }
        let vocabulary = self.grammar.0.compiler.vocabulary();
        let mark = |text: &String| FrameMark { text: text.clone(), token: vocabulary.mark(text) };
        let marks: Vec<FrameMark> = self.grammar.0.marks.iter().map(mark).collect();
        let Some(rest) = self.find(token, &marks) else { return Ok(()) };
        self.begin(0);
        self.follow_bytes(&rest)
    }
}

impl TokenMask for GrammarMask {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        match self.phase {
            Phase::Text => {}
            Phase::Thoughts | Phase::Message => {
                if !self.may_end_free() {
                    forbid(self.grammar.0.end_tokens.ids(), logits);
                }
            }
            Phase::Bound { line_ends, may_think } => self.bound(line_ends, may_think, logits)?,
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        if self.grammar.0.end_tokens.contains(token) {
            return Ok(());
        }
        match (&self.phase, &self.frame) {
            (Phase::Thoughts, _) => self.think(token),
            (Phase::Text, _) => self.watch(token),
            (Phase::Message, Frame::Channels { end, .. }) => {
                if token == *end {
                    self.begin(0);
                }
                Ok(())
            }
            (Phase::Message, _) => Ok(()),
            (Phase::Bound { may_think: true, .. }, Frame::Thoughts { open, .. })
                if *open == Some(token) =>
            {
                (self.phase, self.tail) = (Phase::Thoughts, Vec::new());
                Ok(())
            }
            (Phase::Bound { line_ends: 1.., .. }, _)
                if self.grammar.0.compiler.vocabulary().line_ends.contains(&token) =>
            {
                if let Phase::Bound { line_ends, .. } = &mut self.phase {
                    *line_ends -= 1;
                }
                Ok(())
            }
            (Phase::Bound { .. }, _) => {
                self.phase = Phase::Bound { line_ends: 0, may_think: false };
                self.follow(token)
            }
        }
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

fn stopped(problem: impl ToString) -> Error {
    let problem = problem.to_string().lines().next().unwrap_or_default().to_owned();
    GrammarError::Stopped { problem }.into()
}
