//! Server-sent events of one answer.

use std::{
    convert::Infallible,
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

use crate::{chat::ChatEncoder, error::ApiError, json, routes::Accepted};

/// Longest silence of a stream.
const PING: Duration = Duration::from_secs(4);

/// Bytes of events in one frame, from which the next event waits for the next frame.
const FRAME_BYTES: usize = 16 << 10;

/// Headers of a stream of events.
const HEADERS: [(header::HeaderName, &str); 3] = [
    (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
    (header::CACHE_CONTROL, "no-cache"),
    (header::HeaderName::from_static("x-accel-buffering"), "no"),
];

/// Body of a streamed answer. The connection polls it as its client reads. Dropping it cancels the
/// request.
pub(crate) struct ChatStream {
    answer: Accepted,
    encoder: ChatEncoder,
    ping: Interval,
    stage: StreamStage,
}

#[derive(PartialEq, Eq)]
enum StreamStage {
    New,
    Started,
    Ended,
}

/// Response that streams an answer.
pub(crate) fn response(answer: Accepted, encoder: ChatEncoder) -> Response {
    let mut ping = interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stream = ChatStream { answer, encoder, ping, stage: StreamStage::New };
    let mut response = Response::new(Body::new(stream));
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Appends an event.
fn push_event(out: &mut String, data: &impl Serialize) -> Result<(), ApiError> {
    let line = json::line(data)?;
    *out += &format!("data: {line}\n\n");
    Ok(())
}

impl ChatStream {
    /// Appends the events that are ready.
    fn fill(&mut self, cx: &mut Context<'_>, out: &mut String) -> Result<(), ApiError> {
        if self.stage == StreamStage::New {
            self.stage = StreamStage::Started;
            push_event(out, &self.encoder.start())?;
        }
        while out.len() < FRAME_BYTES
            && let Poll::Ready(event) = self.answer.events.poll_recv(cx)
        {
            let is_last = crate::answer::is_last(event.as_ref());
            for delta in self.answer.deltas.on(event)? {
                for chunk in self.encoder.on(delta) {
                    push_event(out, &chunk)?;
                }
            }
            if is_last {
                *out += "data: [DONE]\n\n";
                self.stage = StreamStage::Ended;
                break;
            }
        }
        Ok(())
    }
}

impl http_body::Body for ChatStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.stage == StreamStage::Ended {
            return Poll::Ready(None);
        }
        let mut out = String::new();
        if let Err(error) = self.fill(cx, &mut out) {
            self.stage = StreamStage::Ended;
            // An error is made of strings, which always have a JSON form.
            let _ = push_event(&mut out, &error.to_json());
        }
        if !out.is_empty() {
            self.ping.reset();
        } else if self.ping.poll_tick(cx).is_ready() {
            out += ": ping\n\n";
        } else {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }
}
