//! One answer: from the events of the serving core to deltas, whatever the API.

use moeflux::{
    Finish,
    serve::{EventSink, RequestEvent, SinkState},
    text::{self, AnswerText, EndTokens},
};
use serde::Serialize;
use tokio::sync::mpsc::{Sender, error::TrySendError};

use crate::error::ApiError;

/// Events of a request that its client has not read. More pause the request.
pub(crate) const UNREAD: usize = 256;

/// Sink of a request's events: a bounded channel to the task of its connection.
pub(crate) struct ChannelSink(pub(crate) Sender<RequestEvent>);

impl EventSink for ChannelSink {
    fn send(&mut self, event: RequestEvent) -> SinkState {
        match self.0.try_send(event) {
            Ok(()) => SinkState::Taken,
            Err(TrySendError::Full(event)) => SinkState::Full(event),
            Err(TrySendError::Closed(_)) => SinkState::Closed,
        }
    }
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    /// More of the thoughts before the answer: whole characters.
    Reasoning(String),
    /// More text: whole characters.
    Text(String),
    /// The end.
    End {
        /// Reason for the end.
        finish: Finish,
        /// Tokens of prompt and answer.
        usage: TokenUsage,
    },
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct TokenUsage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptTokens,
}

/// Tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PromptTokens {
    /// Tokens that were not computed.
    pub(crate) cached_tokens: usize,
}

/// Whether an event is the last one of its request.
pub(crate) fn is_last(event: Option<&RequestEvent>) -> bool {
    matches!(event, None | Some(RequestEvent::Finished(_) | RequestEvent::Failed(_)))
}

/// Deltas of one answer.
pub(crate) struct AnswerDeltas {
    text: AnswerText,
    end_tokens: EndTokens,
    usage: TokenUsage,
}

impl AnswerDeltas {
    /// Deltas of the answer to a prompt of `prompt_tokens` tokens.
    pub(crate) fn new(text: AnswerText, end_tokens: EndTokens, prompt_tokens: usize) -> Self {
        let usage = TokenUsage { prompt_tokens, ..TokenUsage::default() };
        Self { text, end_tokens, usage }
    }

    /// Takes an event; `None` is a channel that closed. Returns the deltas that it completes.
    ///
    /// # Errors
    /// The request failed, or was ended before its answer.
    pub(crate) fn on(&mut self, event: Option<RequestEvent>) -> Result<Vec<Delta>, ApiError> {
        let mut deltas = Vec::new();
        match event {
            Some(RequestEvent::Started(synced)) => {
                self.usage.prompt_tokens_details.cached_tokens = synced.reused;
            }
            Some(RequestEvent::Token { token, .. }) => {
                self.usage.completion_tokens += 1;
                if !self.end_tokens.contains(token) {
                    self.text.push(token)?;
                    deltas.extend(self.completed());
                }
            }
            Some(RequestEvent::Finished(finish)) => {
                if finish != Finish::StopString {
                    self.text.finish()?;
                    deltas.extend(self.completed());
                }
                let mut usage = self.usage;
                usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
                deltas.push(Delta::End { finish, usage });
            }
            Some(RequestEvent::Failed(error)) => return Err(ApiError::internal(error.to_string())),
            // Progress of the prompt.
            Some(_) => {}
            None => {
                let message = "the request was ended: its client did not read, or the server stops";
                return Err(ApiError::internal(message));
            }
        }
        Ok(deltas)
    }

    /// Parts that the last token, or the end, completed.
    fn completed(&self) -> impl Iterator<Item = Delta> {
        self.text.deltas().filter_map(|delta| match delta {
            text::Delta::Reasoning(thoughts) => Some(Delta::Reasoning(thoughts.into())),
            text::Delta::Text(text) => Some(Delta::Text(text.into())),
            _ => None,
        })
    }
}
