//! Responses: the events of an answer as they come, or the whole answer as their fold.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use http_body::Frame;
use serde::Serialize;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::{
    answer::Delta,
    app::{Answers, ChoiceDeltas},
    error::ApiError,
    json,
};

/// Longest silence of a stream.
const PING: Duration = Duration::from_secs(4);

/// Bytes of events in one frame, from which the next event waits for the next frame.
const FRAME_BYTES: usize = 16 << 10;

/// Headers of a stream of events, besides its type.
const HEADERS: [(header::HeaderName, &str); 2] = [
    (header::CACHE_CONTROL, "no-cache"),
    (header::HeaderName::from_static("x-accel-buffering"), "no"),
];

/// Header with the number of messages that were dropped from the prompt.
const DROPPED: header::HeaderName = header::HeaderName::from_static("x-moeflux-dropped-messages");

/// Encoder of one answer in an API: deltas in, events of a stream out. Pure.
pub(crate) trait Encoder: Send + Unpin + 'static {
    /// Event of a stream.
    type Event: Serialize;
    /// Whole answer.
    type Whole: Fold<Self::Event> + Default + Serialize;

    /// Type of a stream: by default server-sent events.
    const STREAM_TYPE: &'static str = "text/event-stream; charset=utf-8";
    /// Bytes after the last event.
    const END: &'static str = "";

    /// Events of a delta of a choice.
    fn on(&mut self, choice: usize, delta: Delta) -> Vec<Self::Event>;

    /// Name of an event, if the API has names.
    fn name(_: &Self::Event) -> Option<&'static str> {
        None
    }

    /// Appends the bytes of an event.
    ///
    /// # Errors
    /// The event has no JSON form.
    fn write(event: &Self::Event, out: &mut String) -> Result<(), ApiError> {
        let line = json::line(event)?;
        if let Some(name) = Self::name(event) {
            *out += &format!("event: {name}\n");
        }
        *out += &format!("data: {line}\n\n");
        Ok(())
    }

    /// Bytes that a silent stream sends.
    fn ping(&mut self) -> String {
        ": ping\n\n".to_owned()
    }

    /// Bytes of an event that ends the stream with an error.
    fn error(&mut self, error: &ApiError) -> String;
}

/// A whole answer made of the events of its stream.
pub(crate) trait Fold<Event> {
    /// Adds the next event.
    fn add(&mut self, event: Event);
}

/// The response: a stream, or the whole answer.
///
/// # Errors
/// The answer failed before it was whole.
pub(crate) async fn response<E: Encoder>(
    answers: Answers,
    encoder: E,
    is_stream: bool,
) -> Result<Response, ApiError> {
    let dropped = answers.dropped_messages;
    let mut response = match is_stream {
        true => stream(answers, encoder),
        false => json::response(&whole(answers, encoder).await?),
    };
    if dropped > 0 {
        response.headers_mut().insert(DROPPED, HeaderValue::from(dropped));
    }
    Ok(response)
}

/// The whole answer. Dropped with the connection, which cancels the request.
async fn whole<E: Encoder>(mut answers: Answers, mut encoder: E) -> Result<E::Whole, ApiError> {
    let mut whole = E::Whole::default();
    while let Some(ChoiceDeltas { choice, deltas }) = poll_fn(|cx| answers.poll(cx)).await? {
        for delta in deltas {
            encoder.on(choice, delta).into_iter().for_each(|event| whole.add(event));
        }
    }
    Ok(whole)
}

fn stream<E: Encoder>(answers: Answers, encoder: E) -> Response {
    let mut ping = interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stream = EventStream { answers, encoder, ping, is_ended: false };
    let mut response = Response::new(Body::new(stream));
    for (name, value) in HEADERS.into_iter().chain([(header::CONTENT_TYPE, E::STREAM_TYPE)]) {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Body of a streamed answer. The connection polls it as its client reads. Dropping it cancels the
/// request.
struct EventStream<E> {
    answers: Answers,
    encoder: E,
    ping: Interval,
    is_ended: bool,
}

impl<E: Encoder> EventStream<E> {
    /// Appends the events that are ready.
    fn fill(&mut self, cx: &mut Context<'_>, out: &mut String) -> Result<(), ApiError> {
        while out.len() < FRAME_BYTES
            && let Poll::Ready(ready) = self.answers.poll(cx)
        {
            let Some(ChoiceDeltas { choice, deltas }) = ready? else {
                *out += E::END;
                self.is_ended = true;
                break;
            };
            for event in deltas.into_iter().flat_map(|delta| self.encoder.on(choice, delta)) {
                E::write(&event, out)?;
            }
        }
        Ok(())
    }
}

impl<E: Encoder> http_body::Body for EventStream<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_ended {
            return Poll::Ready(None);
        }
        let mut out = String::new();
        if let Err(error) = self.fill(cx, &mut out) {
            self.is_ended = true;
            out += &self.encoder.error(&error);
        }
        if !out.is_empty() {
            self.ping.reset();
        } else if self.is_ended {
            return Poll::Ready(None);
        } else if self.ping.poll_tick(cx).is_ready() {
            out += &self.encoder.ping();
        } else {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::answer::{AnswerFinish, AnswerUsage, Delta};

    /// Thoughts, text and two calls.
    pub(crate) fn parallel_calls() -> Vec<Delta> {
        let start = AnswerUsage { prompt: 10, cached: 4, ..AnswerUsage::default() };
        let usage = AnswerUsage { generated: 5, reasoning: 1, ..start };
        let call = |index, id: &str, name: &str| Delta::CallStart {
            index,
            id: id.into(),
            name: name.into(),
        };
        let arguments = |index, json: &str| Delta::CallArguments { index, json: json.into() };
        vec![
            Delta::Start(start),
            Delta::Reasoning("Hm.".into()),
            Delta::Text("Let me look.\n".into()),
            call(0, "call_a", "list"),
            arguments(0, "{\"path\": "),
            arguments(0, "\".\"}"),
            Delta::CallEnd { index: 0 },
            call(1, "call_b", "read"),
            arguments(1, "{}"),
            Delta::CallEnd { index: 1 },
            Delta::End { finish: AnswerFinish::Calls, usage },
        ]
    }
}
