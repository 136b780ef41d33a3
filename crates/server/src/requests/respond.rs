//! Responses: the events of an answer as they come, or the whole answer as their fold.
//!
//! A stream whose model is not loaded yet begins before its answer: with pings.

use std::{
    convert::Infallible,
    future::poll_fn,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderName, HeaderValue, header},
    response::Response,
};
use http_body::Frame;
use moeflux::text::PlacedImage;
use serde::Serialize;
use tokio::{
    sync::{OwnedSemaphorePermit, oneshot},
    time::{Instant, Interval, MissedTickBehavior, interval_at, timeout},
};

use super::{
    answers::{Answers, ChoiceDeltas},
    app::App,
    ask::Ask,
    delta::Delta,
    images::ImageTable,
    models::{ModelLease, ServedModel},
    prompt::{self, Prompt},
    submit,
};
use crate::transport::{
    body::JsonBody,
    error::ApiError,
    error_shape::ApiShape,
    json::{self, Fields},
    notes::{self, NOTES},
    work,
};

/// Longest silence of a stream.
const PING: Duration = Duration::from_secs(4);

/// Bytes of events in one frame, from which the next event waits for the next frame.
const FRAME_BYTES: usize = 16 << 10;

/// Headers of a stream of events, besides its type.
const HEADERS: [(HeaderName, &str); 2] =
    [(header::CACHE_CONTROL, "no-cache"), (HeaderName::from_static("x-accel-buffering"), "no")];

/// Header with the number of messages that were dropped from the prompt.
const DROPPED: HeaderName = HeaderName::from_static("x-moeflux-dropped-messages");

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
    /// Bytes that a silent stream sends before its answer.
    const EARLY_PING: &'static str = ": ping\n\n";
    /// Whether an answer is a stream unless its request says otherwise.
    const IS_STREAM: bool = false;

    /// Takes the images of the request with their files, before its prompts.
    fn images(&mut self, _images: &ImageTable) {}

    /// Takes the prompts of the request, before its answer.
    ///
    /// # Errors
    /// Their tokens cannot be decoded.
    fn prompts(&mut self, _model: &ServedModel, _prompts: &[Prompt]) -> Result<(), ApiError> {
        Ok(())
    }

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
        Self::EARLY_PING.to_owned()
    }

    /// Bytes of an event that ends a stream with an error before its answer.
    fn early_error(error: &ApiError) -> String {
        format!("data: {}\n\n", error.to_json(ApiShape::OpenAi, None))
    }

    /// Bytes of an event that ends the stream with an error.
    fn error(&mut self, error: &ApiError) -> String {
        Self::early_error(error)
    }
}

/// A request as it was read: the ask, and the encoder of its answer.
pub(crate) struct Asked<E> {
    ask: Ask,
    encoder: E,
    /// Resolves when another request cancels the answer.
    cancelled: Option<oneshot::Receiver<()>>,
}

impl<E> Asked<E> {
    /// A request that no other one cancels.
    pub(crate) fn new(ask: Ask, encoder: E) -> Self {
        Self { ask, encoder, cancelled: None }
    }

    /// The request, cancelled when `cancelled` resolves.
    pub(crate) fn cancelled_by(self, cancelled: oneshot::Receiver<()>) -> Self {
        Self { cancelled: Some(cancelled), ..self }
    }
}

/// An answer that was submitted, and its encoder.
struct Submitted<E> {
    answers: Answers,
    encoder: E,
    notes: Option<HeaderValue>,
}

/// Future of a submitted answer.
type Submission<E> = Pin<Box<dyn Future<Output = Result<Submitted<E>, ApiError>> + Send>>;

/// A whole answer made of the events of its stream.
pub(crate) trait Fold<Event> {
    /// Adds the next event.
    fn add(&mut self, event: Event);
}

/// Answers a request that `read` reads, with the model that it names.
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn answer<E: Encoder>(
    app: &Arc<App>,
    request: Request,
    read: impl FnOnce(&ModelLease, &Fields<'_>) -> Result<Asked<E>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = JsonBody::receive(&app.bodies, request).await?;
    answer_body(app, body, read).await
}

/// Answers a request with this body: see [`answer`].
///
/// # Errors
/// The request is wrong, or cannot be served.
pub(crate) async fn answer_body<E: Encoder>(
    app: &Arc<App>,
    body: JsonBody,
    read: impl FnOnce(&ModelLease, &Fields<'_>) -> Result<Asked<E>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let is_stream = is_stream::<E>(&body.fields()?)?;
    let app = Arc::clone(app);
    let submit = async move {
        let model = app.model(&body).await?;
        let read = move |body: JsonBody| {
            let Asked { ask, encoder, cancelled } = read(&model, &body.fields()?)?;
            let prompts = Vec::new();
            let mut request = Box::new(ReadRequest { model, ask, encoder, cancelled, prompts });
            let images = request.ask.images();
            match images.has_addresses() || images.has_files() && !body.takes_turn() {
                true => Ok(Stage::BeforeImages(request, body)),
                false => request.render(body),
            }
        };
        let mut stage = body.read(&app.bodies, read).await?;
        loop {
            stage = match stage {
                Stage::BeforeImages(mut request, mut body) => {
                    let ReadRequest { ask, model, .. } = &mut *request;
                    app.fetches.fetch(ask.images(), model, &mut body, &app.bodies).await?;
                    body.take_turn();
                    body.read(&app.bodies, |body| request.render(body)).await?
                }
                Stage::WithImages(request, room) => {
                    let request = request.see().await?;
                    drop(room);
                    return work::run_beside(move || request.submit()).await;
                }
                Stage::Submitted(submitted) => return Ok(submitted),
            };
        }
    };
    if !is_stream {
        let submitted = submit.await?;
        let headers = submitted.headers();
        return Ok(with_headers(json::response(&whole(submitted).await?), headers));
    }
    let mut submit: Submission<E> = Box::pin(submit);
    // Errors within the time of a ping have their status.
    match timeout(PING, &mut submit).await {
        Ok(submitted) => {
            let submitted = submitted?;
            let headers = submitted.headers();
            Ok(with_headers(stream(StreamPart::Answer(submitted)), headers))
        }
        Err(_) => Ok(stream(StreamPart::Early(submit))),
    }
}

/// A request that was read.
struct ReadRequest<E> {
    model: ModelLease,
    ask: Ask,
    encoder: E,
    cancelled: Option<oneshot::Receiver<()>>,
    /// Tokens of its prompts, once they are rendered.
    prompts: Vec<Prompt>,
}

impl<E: Encoder> ReadRequest<E> {
    /// Renders its prompts, and submits it unless images are yet to be computed.
    ///
    /// # Errors
    /// The request is wrong, or cannot be served.
    fn render(mut self: Box<Self>, body: JsonBody) -> Result<Stage<E>, ApiError> {
        self.encoder.images(self.ask.images());
        self.prompts = prompt::prompts(&self.model, &mut self.ask)?;
        self.encoder.prompts(&self.model, &self.prompts)?;
        match self.prompts.iter().all(|prompt| prompt.files.is_empty()) {
            true => self.submit().map(Stage::Submitted),
            false => {
                let files = self.prompts.iter().flat_map(|prompt| &prompt.files);
                let bytes = files.map(|file| file.image.file.len()).sum();
                Ok(Stage::WithImages(self, body.into_room(bytes)))
            }
        }
    }

    /// Computes its images, each in a turn of the vision tower unless its rows are kept. They have
    /// room until its prompts are computed.
    ///
    /// # Errors
    /// They take more room than there is, or the tower failed.
    async fn see(mut self: Box<Self>) -> Result<Box<Self>, ApiError> {
        let files = self.prompts.iter().flat_map(|prompt| &prompt.files);
        let placed: Vec<_> = files.map(|file| file.placed).collect();
        let room = Arc::new(self.model.row_room(placed.into_iter()).await?);
        for i in 0..self.prompts.len() {
            for file in mem::take(&mut self.prompts[i].files) {
                let PlacedImage { place, digest, .. } = file.placed;
                let rows;
                (self, rows) = match self.model.kept_rows(&file.placed) {
                    Some(rows) => (self, rows),
                    None => {
                        let turn = self.model.tower_turn().await;
                        // The model is leased until the tower stops, also if the client goes.
                        let compute = move || {
                            let _turn = turn;
                            let rows = self.model.rows(&file)?;
                            Ok((self, rows))
                        };
                        work::run_beside(compute).await?
                    }
                };
                self.prompts[i].images.push(place, digest, rows);
            }
            self.prompts[i].images.hold(Arc::<OwnedSemaphorePermit>::clone(&room));
        }
        Ok(self)
    }

    fn submit(self) -> Result<Submitted<E>, ApiError> {
        let Self { model, ask, encoder, cancelled, prompts } = self;
        // All prompts of a request have the same form.
        let notes = prompts.first().map_or(&[][..], |prompt| &prompt.notes);
        let notes = notes::header(notes);
        let answers = submit::submit(&model, &ask, prompts)?.cancelled_by(cancelled).lease(model);
        Ok(Submitted { answers, encoder, notes })
    }
}

/// Request after its body was read.
enum Stage<E> {
    /// Images are yet to be fetched, or come from an earlier response and are yet to be decoded in
    /// a turn.
    BeforeImages(Box<ReadRequest<E>>, JsonBody),
    /// Its images are yet to be computed. Their files take this room.
    WithImages(Box<ReadRequest<E>>, Option<OwnedSemaphorePermit>),
    Submitted(Submitted<E>),
}

impl<E> Submitted<E> {
    /// Headers of the response that say what was done to the request: messages that were dropped,
    /// and what is not enforced.
    fn headers(&self) -> [(HeaderName, Option<HeaderValue>); 2] {
        let dropped = self.answers.dropped_messages;
        let dropped = (dropped > 0).then(|| HeaderValue::from(dropped));
        [(DROPPED, dropped), (NOTES, self.notes.clone())]
    }
}

fn with_headers(
    mut response: Response,
    headers: [(HeaderName, Option<HeaderValue>); 2],
) -> Response {
    for (name, value) in headers {
        if let Some(value) = value {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// Whether a request asks for a stream.
///
/// # Errors
/// The field has a wrong type.
pub(crate) fn is_stream<E: Encoder>(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.flag("stream")?.unwrap_or(E::IS_STREAM))
}

/// The whole answer. Dropped with the connection, which cancels the request.
async fn whole<E: Encoder>(submitted: Submitted<E>) -> Result<E::Whole, ApiError> {
    let Submitted { mut answers, mut encoder, .. } = submitted;
    let mut whole = E::Whole::default();
    while let Some(ChoiceDeltas { choice, deltas }) = poll_fn(|cx| answers.poll(cx)).await? {
        for delta in deltas {
            encoder.on(choice, delta).into_iter().for_each(|event| whole.add(event));
        }
    }
    Ok(whole)
}

fn stream<E: Encoder>(part: StreamPart<E>) -> Response {
    let mut ping = interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if matches!(part, StreamPart::Early(_)) {
        // The client has waited already.
        ping.reset_immediately();
    }
    let mut response = Response::new(Body::new(EventStream { part, ping }));
    for (name, value) in HEADERS.into_iter().chain([(header::CONTENT_TYPE, E::STREAM_TYPE)]) {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Part of a stream.
enum StreamPart<E> {
    /// Before the answer: its model is being loaded, or others are served first.
    Early(Submission<E>),
    Answer(Submitted<E>),
    End,
}

impl<E: Encoder> StreamPart<E> {
    /// Bytes of a silent stream.
    fn ping(&mut self) -> String {
        match self {
            Self::Answer(Submitted { encoder, .. }) => encoder.ping(),
            Self::Early(_) | Self::End => E::EARLY_PING.to_owned(),
        }
    }

    /// Bytes of an event that ends the stream with an error.
    fn error(&mut self, error: &ApiError) -> String {
        match self {
            Self::Answer(Submitted { encoder, .. }) => encoder.error(error),
            Self::Early(_) | Self::End => E::early_error(error),
        }
    }
}

/// Body of a streamed answer. The connection polls it as its client reads. Dropping it cancels the
/// request.
struct EventStream<E> {
    part: StreamPart<E>,
    ping: Interval,
}

impl<E: Encoder> EventStream<E> {
    /// Appends the events that are ready.
    fn fill(&mut self, cx: &mut Context<'_>, out: &mut String) -> Result<(), ApiError> {
        if let StreamPart::Early(submission) = &mut self.part
            && let Poll::Ready(submitted) = submission.as_mut().poll(cx)
        {
            self.part = StreamPart::Answer(submitted?);
        }
        let StreamPart::Answer(Submitted { answers, encoder, .. }) = &mut self.part else {
            return Ok(());
        };
        while out.len() < FRAME_BYTES
            && let Poll::Ready(ready) = answers.poll(cx)
        {
            let Some(ChoiceDeltas { choice, deltas }) = ready? else {
                *out += E::END;
                self.part = StreamPart::End;
                break;
            };
            for event in deltas.into_iter().flat_map(|delta| encoder.on(choice, delta)) {
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
        if matches!(self.part, StreamPart::End) {
            return Poll::Ready(None);
        }
        let mut out = String::new();
        if let Err(error) = self.fill(cx, &mut out) {
            out += &self.part.error(&error);
            self.part = StreamPart::End;
        }
        if !out.is_empty() {
            self.ping.reset();
        } else if matches!(self.part, StreamPart::End) {
            return Poll::Ready(None);
        } else if self.ping.poll_tick(cx).is_ready() {
            out += &self.part.ping();
        } else {
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use crate::requests::delta::{AnswerFinish, AnswerUsage, Delta};

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
