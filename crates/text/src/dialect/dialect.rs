//! The dialect of a model.

use moeflux_base::Error;

use super::{
    bracketed::{self, Bracketed, Label},
    calls::{CallFinder, CallSink, CallSyntax},
    delta::DeltaBuffer,
    harmony,
    machine::{AnswerCalls, AnswerMark, Machine, Syntax},
    parser::AnswerParser,
};
use crate::{chat::ToolSet, tokenizer::Tokenizer};

/// Marks around thoughts, as published models spell them. The first pair that a template or a
/// tokenizer knows counts.
const THOUGHT_MARKS: [[&str; 2]; 9] = [
    ["<think>", "</think>"],
    ["[THINK]", "[/THINK]"],
    ["<seed:think>", "</seed:think>"],
    ["<|START_THINKING|>", "<|END_THINKING|>"],
    ["<|begin_of_thought|>", "<|end_of_thought|>"],
    ["◁think▷", "◁/think▷"],
    ["<thinking>", "</thinking>"],
    ["<thought>", "</thought>"],
    ["<reasoning>", "</reasoning>"],
];

/// Marks of a block with a name in its first line, and the name of thoughts.
const NAMED_BLOCK_MARKS: [&str; 2] = ["<|channel>", "<channel|>"];
pub(super) const THOUGHT_NAME: &str = "thought";
const THOUGHT_LINE: &str = "thought\n";

/// Tokens at the end of a prompt that may open thoughts.
pub(super) const PROMPT_TAIL: usize = 16;

/// Structure of a model's answers.
#[derive(Clone, Debug)]
pub(crate) struct Dialect {
    pub(super) kind: DialectKind,
    pub(super) marks: Vec<AnswerMark>,
    calls: Option<CallSyntax>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialectKind {
    /// All is text.
    Plain,
    /// Thoughts between two marks.
    Thoughts,
    /// Named blocks between two marks.
    NamedBlocks,
    /// Messages with channels.
    Harmony,
}

/// Tools that an answer may call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerTools<'a> {
    pub(crate) tools: &'a ToolSet,
    /// Syntax of the calls.
    pub(crate) calls: Option<CallSyntax>,
}

impl Dialect {
    /// Dialect of a model, by the source of its template, if it has one, and its tokens.
    pub(crate) fn detect(template: Option<&str>, tokenizer: &Tokenizer) -> Dialect {
        let is_in_template = |text: &str| template.is_some_and(|source| source.contains(text));
        let mark =
            |text: &str| AnswerMark { text: text.to_owned(), token: tokenizer.token_to_id(text) };
        let is_token = |text: &&str| tokenizer.token_to_id(text).is_some();
        let dialect = |kind, marks: &[&str]| Dialect {
            kind,
            marks: marks.iter().map(|text| mark(text)).collect(),
            calls: template
                .and_then(|source| CallSyntax::detect(source, kind == DialectKind::Harmony)),
        };
        if harmony::REQUIRED.iter().all(is_token)
            && is_in_template(harmony::MARKS[harmony::CHANNEL])
        {
            return dialect(DialectKind::Harmony, &harmony::MARKS);
        }
        if NAMED_BLOCK_MARKS.iter().all(is_token) && is_in_template(NAMED_BLOCK_MARKS[0]) {
            return dialect(DialectKind::NamedBlocks, &NAMED_BLOCK_MARKS);
        }
        let in_template = THOUGHT_MARKS.iter().find(|[_, close]| is_in_template(close));
        let in_tokens = || THOUGHT_MARKS.iter().find(|marks| marks.iter().all(is_token));
        match in_template.or_else(in_tokens) {
            Some(marks) => dialect(DialectKind::Thoughts, marks),
            None => dialect(DialectKind::Plain, &[]),
        }
    }

    /// Whether all tokens of an answer are its text.
    pub(crate) fn is_plain(&self) -> bool {
        self.kind == DialectKind::Plain
    }

    /// Syntax of calls, if the template has one.
    pub(crate) fn call_syntax(&self) -> Option<CallSyntax> {
        self.calls
    }

    /// Tokens that end an answer by the syntax of calls, as far as the template has them.
    pub(crate) fn end_tokens(&self, template: Option<&str>, tokenizer: &Tokenizer) -> Vec<u32> {
        let Some((syntax, template)) = self.calls.zip(template) else { return Vec::new() };
        let texts = syntax.end_tokens().iter().filter(|text| template.contains(*text));
        texts.filter_map(|text| tokenizer.token_to_id(text)).collect()
    }

    /// Parser of an answer to `prompt`, which may open thoughts or a message. The answer may call
    /// tools; without tools, the syntax of calls is text.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub(crate) fn parser(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        tools: AnswerTools<'_>,
    ) -> Result<AnswerParser, Error> {
        let syntax = match self.kind {
            DialectKind::Plain => Syntax::Plain,
            DialectKind::Harmony => Syntax::Harmony(Box::default()),
            DialectKind::Thoughts => Syntax::Bracketed(Bracketed::default()),
            DialectKind::NamedBlocks => {
                Syntax::Bracketed(Bracketed::named(Label { thoughts: THOUGHT_NAME }))
            }
        };
        let mut parser = AnswerParser {
            decoder: tokenizer.decoder(),
            machine: Machine::new(self.marks.clone(), syntax),
            deltas: DeltaBuffer::default(),
        };
        self.take_prompt(tokenizer, prompt, &mut parser)?;
        parser.machine.begin_answer(self.answer_calls(tokenizer, tools));
        parser.decoder = tokenizer.decoder();
        parser.deltas.clear();
        Ok(parser)
    }

    /// Calls that an answer may have.
    fn answer_calls(&self, tokenizer: &Tokenizer, tools: AnswerTools<'_>) -> Option<AnswerCalls> {
        let AnswerTools { tools, calls } = tools;
        let syntax = calls.filter(|_| !tools.is_empty())?;
        if syntax == CallSyntax::Harmony {
            return Some(AnswerCalls::InMessages(CallSink::new(tools.clone())));
        }
        let close = self.marks.get(bracketed::OPEN + 1).filter(|mark| mark.token.is_none());
        let close = close.map(|mark| mark.text.clone());
        let finder = CallFinder::new(syntax, tools.clone(), tokenizer, close);
        Some(AnswerCalls::InText(Box::new(finder)))
    }

    /// Brings a parser to the state at the end of the prompt.
    fn take_prompt(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        parser: &mut AnswerParser,
    ) -> Result<(), Error> {
        if self.kind == DialectKind::Harmony {
            let is_start = |token: &u32| parser.machine.mark_for(*token) == Some(harmony::START);
            let start = prompt.iter().rposition(is_start).unwrap_or(prompt.len());
            return prompt[start..].iter().try_for_each(|token| parser.advance(*token));
        }
        let Some(open) = self.marks.get(bracketed::OPEN) else { return Ok(()) };
        // A message may spell the marks; only the prompt's end opens anything.
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        let text = tokenizer.decode(tail, false)?;
        let (text, name) = match (self.kind, text.trim_end().strip_suffix(THOUGHT_NAME)) {
            (DialectKind::NamedBlocks, Some(before)) => (before, THOUGHT_LINE),
            _ => (text.trim_end(), ""),
        };
        if text.ends_with(&open.text) {
            parser.machine.mark(bracketed::OPEN, &mut parser.deltas);
            parser.machine.text(name, &mut parser.deltas);
        }
        Ok(())
    }
}
#[cfg(test)]
mod tests;
