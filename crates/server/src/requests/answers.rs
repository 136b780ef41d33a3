//! Answers to a request, as the serving core generates them.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use moeflux::serve::{RequestEvent, RequestHandle};
use tokio::sync::{mpsc::Receiver, oneshot};

use super::{answer::AnswerDeltas, delta::Delta, models::ModelLease};
use crate::transport::error::ApiError;

/// A request that the serving core accepted. Dropping it cancels the request.
pub(crate) struct Accepted {
    events: Receiver<RequestEvent>,
    deltas: AnswerDeltas,
    _handle: RequestHandle,
}

/// Answers to a request. Dropping them cancels the request.
pub(crate) struct Answers {
    /// Choices by index; `None` after their end.
    choices: Vec<Option<Accepted>>,
    /// Choice that is asked first, so that each has its turn.
    next: usize,
    /// Messages that were dropped, as the prompt did not fit the context.
    pub(crate) dropped_messages: usize,
    /// Resolves when another request cancels the only answer.
    cancelled: Option<oneshot::Receiver<()>>,
    /// The model, which stays loaded until the last answer has ended.
    _lease: Option<ModelLease>,
}

/// Deltas of one choice.
pub(crate) struct ChoiceDeltas {
    pub(crate) choice: usize,
    pub(crate) deltas: Vec<Delta>,
}

impl Accepted {
    /// A request that sends these events, of which `deltas` makes deltas.
    pub(crate) fn new(
        events: Receiver<RequestEvent>,
        deltas: AnswerDeltas,
        handle: RequestHandle,
    ) -> Self {
        Self { events, deltas, _handle: handle }
    }
}

impl Answers {
    /// Answers of these choices.
    pub(crate) fn new(choices: Vec<Option<Accepted>>, dropped_messages: usize) -> Self {
        Self { choices, next: 0, dropped_messages, cancelled: None, _lease: None }
    }

    /// The answers, of which there is one, which end when `cancelled` resolves.
    pub(crate) fn cancelled_by(self, cancelled: Option<oneshot::Receiver<()>>) -> Self {
        Self { cancelled, ..self }
    }

    /// The answers with a lease of their model.
    pub(crate) fn lease(self, lease: ModelLease) -> Self {
        Self { _lease: Some(lease), ..self }
    }

    /// Ends the only answer, if it has not ended yet.
    fn cancel(&mut self) -> Option<ChoiceDeltas> {
        let choice = self.choices.iter().position(Option::is_some)?;
        let accepted = self.choices[choice].take();
        let deltas = accepted.map(|mut accepted| accepted.deltas.cancel()).unwrap_or_default();
        Some(ChoiceDeltas { choice, deltas })
    }

    /// Deltas that are ready; `None` after the last ones. Not again after an error.
    ///
    /// # Errors
    /// A request failed, or was ended before its answer.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<ChoiceDeltas>, ApiError>> {
        if let Some(cancelled) = &mut self.cancelled
            && let Poll::Ready(result) = Pin::new(cancelled).poll(cx)
        {
            self.cancelled = None;
            if result.is_ok() {
                return Poll::Ready(Ok(self.cancel()));
            }
        }
        let count = self.choices.len();
        for choice in (0..count).map(|i| (self.next + i) % count) {
            let Some(accepted) = &mut self.choices[choice] else { continue };
            if let Poll::Ready(event) = accepted.events.poll_recv(cx) {
                let deltas = accepted.deltas.on(event)?;
                if accepted.deltas.is_ended() {
                    self.choices[choice] = None;
                }
                self.next = choice + 1;
                return Poll::Ready(Ok(Some(ChoiceDeltas { choice, deltas })));
            }
        }
        match self.choices.iter().all(Option::is_none) {
            true => Poll::Ready(Ok(None)),
            false => Poll::Pending,
        }
    }
}
