//! Parts of an answer, whatever the API.

use std::time::Duration;

use moeflux::session::DraftTotals;
use serde::Serialize;

/// Part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    /// The answer has a session. Always the first delta.
    Start(AnswerUsage),
    /// Tokens and times so far, if the request asks for reports.
    Usage(AnswerUsage),
    /// A token of the answer, before the text that it completes, if the request asks for tokens.
    Token(u32),
    /// Log-probabilities of the tokens of the next text.
    Logprobs(Vec<TokenEntry>),
    /// More of the thoughts before the answer: whole characters.
    Reasoning(String),
    /// More text: whole characters.
    Text(String),
    /// A call of a tool begins.
    CallStart {
        /// Number of the call within the answer, from 0.
        index: usize,
        /// Id by which the client names the call's result.
        id: String,
        name: String,
    },
    /// More of a call's arguments. All parts together are one JSON object.
    CallArguments { index: usize, json: String },
    /// A call is complete.
    CallEnd {
        /// Number of the call within the answer.
        index: usize,
    },
    /// The end. Always the last delta.
    End { finish: AnswerFinish, usage: AnswerUsage },
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenEntry {
    pub(crate) text: String,
    /// Its bytes, which may be a part of a character; `None` for an id without a token.
    pub(crate) bytes: Option<Vec<u8>>,
    /// `None` for the first token of a prompt.
    pub(crate) logprob: Option<f64>,
    /// The most probable tokens in its place, in their order.
    pub(crate) top: Vec<TopEntry>,
}

/// One of the most probable tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TopEntry {
    pub(crate) text: String,
    pub(crate) bytes: Option<Vec<u8>>,
    pub(crate) logprob: f64,
}

/// Reason for the end of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerFinish {
    /// The model ended it.
    Stop,
    /// This stop string occurred.
    StopString(String),
    /// The requested number of tokens is reached.
    Length,
    /// The context is full.
    Context,
    /// The model ended it after at least one complete call.
    Calls,
    /// Another request cancelled it.
    Cancelled,
}

/// Tokens and times of an answer and its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerUsage {
    pub(crate) prompt: usize,
    /// Tokens of the prompt that were not computed.
    pub(crate) cached: usize,
    /// Tokens of the prompt that are in the session.
    pub(crate) prefilled: usize,
    pub(crate) generated: usize,
    /// Generated tokens that are thoughts.
    pub(crate) reasoning: usize,
    pub(crate) drafts: DraftTotals,
    /// Time from the session to the first token.
    pub(crate) prefill: Duration,
    /// Time from the first token to the last one.
    pub(crate) decode: Duration,
    /// Whether the answer ended in its thoughts, without text and calls. Set at the end.
    pub(crate) is_all_thoughts: bool,
}

/// The field `moeflux` of an answer, for what the APIs have no field for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct AnswerNote {
    /// Whether the answer never left its thoughts.
    unfinished_reasoning: bool,
}

impl AnswerNote {
    /// The field of an answer; `None` if there is nothing to say.
    pub(crate) fn new(usage: &AnswerUsage) -> Option<Self> {
        usage.is_all_thoughts.then_some(Self { unfinished_reasoning: true })
    }
}
