//! Bodies of requests: received within limits, and read off the threads that wait for clients.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::Request,
    http::{HeaderMap, header},
};
use http_body::{Frame, SizeHint};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    error::ApiError,
    image_fields::image_bytes,
    json::{Fields, JsonText, Member, ValueCounts},
    timeouts::Timeouts,
    work::{ClientId, SMALL_BODY, WorkQueue, WorkSize},
};

/// Largest body in bytes, where memory allows it: a conversation with a few dozen screenshots.
const BODY_BYTES: usize = 64 << 20;

/// Copies of a text while it becomes a prompt: the field, the message, the same in the template's
/// form, rendered text, tokens.
const TEXT_COPIES: usize = 8;

/// The same of an image: the field without escapes, and the decoded file.
const IMAGE_COPIES: usize = 2;

/// A field that may be long, and the bytes of its values in all forms that they take.
struct LongField {
    name: &'static str,
    /// Bytes of a member of an object, of a list and of an object.
    member: usize,
    /// Bytes of a further element of a list.
    element: usize,
}

/// Fields whose length is not bounded, in all APIs.
const LONG_FIELDS: [LongField; 28] = [
    LongField::texts("messages"),
    LongField::texts("input"),
    LongField::texts("instructions"),
    LongField::texts("system"),
    LongField::texts("content"),
    LongField::texts("images"),
    LongField::texts("suffix"),
    LongField::texts("input_prefix"),
    LongField::texts("input_suffix"),
    LongField::texts("input_extra"),
    LongField::values("tools"),
    LongField::values("functions"),
    LongField::values("text"),
    LongField::values("format"),
    LongField::values("output_config"),
    LongField::values("output_format"),
    LongField::values("response_format"),
    LongField::values("json_schema"),
    LongField::values("structured_outputs"),
    LongField::values("guided_json"),
    LongField::values("guided_regex"),
    LongField::values("guided_choice"),
    LongField::values("guided_grammar"),
    LongField::values("grammar"),
    LongField::values("chat_template_kwargs"),
    LongField::numbers("prompt"),
    LongField::numbers("tokens"),
    LongField::numbers("context"),
];

impl LongField {
    /// Objects that are read field by field.
    const fn texts(name: &'static str) -> Self {
        Self { name, member: 100, element: 60 }
    }

    /// Values that are kept whole, and that templates and grammars copy.
    const fn values(name: &'static str) -> Self {
        Self { name, member: 400, element: 120 }
    }

    /// Lists of numbers.
    const fn numbers(name: &'static str) -> Self {
        Self { name, member: 100, element: 24 }
    }
}

/// Most bytes of a refused body that are discarded, and the time for it. A client that still sends
/// when its connection is closed sees a reset in place of the refusal.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// Body of a request that its handler reads, and whose rest can be discarded after a refusal.
#[derive(Clone)]
pub(crate) struct SharedBody(Arc<Mutex<SharedState>>);

struct SharedState {
    body: Body,
    /// Whether a part was asked for, upon which a client that waits for `100 Continue` sends it.
    is_read: bool,
}

impl SharedBody {
    /// The request with a body that is shared.
    pub(crate) fn share(request: Request) -> (Self, Request) {
        let (parts, body) = request.into_parts();
        let shared = Self(Arc::new(Mutex::new(SharedState { body, is_read: false })));
        (shared.clone(), Request::from_parts(parts, Body::new(shared)))
    }

    fn state(&self) -> MutexGuard<'_, SharedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards the rest of a refused body, within the limits. A client that `waits` to be asked
    /// for its body is not asked.
    pub(crate) async fn discard(mut self, waits: bool) {
        if waits && !self.state().is_read {
            return;
        }
        let discard = async {
            let mut bytes = 0;
            while bytes < DISCARD_BYTES
                && let Some(Ok(frame)) = poll_fn(|cx| Pin::new(&mut self).poll_frame(cx)).await
            {
                bytes += frame.data_ref().map_or(0, Bytes::len);
            }
        };
        // A client that sends for longer has its connection closed.
        let _ = timeout(DISCARD_TIME, discard).await;
    }
}

impl HttpBody for SharedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut state = self.state();
        state.is_read = true;
        Pin::new(&mut state.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.state().body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.state().body.size_hint()
    }
}

/// Memory for requests that are being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMemory {
    pub(crate) bytes: usize,
    /// Returns freed memory to the system.
    pub(crate) give_back: fn(),
}

/// Reader of bodies, with the limits that they share, also with clones of it.
#[derive(Clone, Debug)]
pub(crate) struct BodyReader {
    /// Turns of the work on bodies.
    work: WorkQueue,
    /// Most bytes of a body.
    bytes: usize,
    /// Bytes that bodies may still take.
    room: Arc<Semaphore>,
    /// Time in which a body must arrive.
    time: Duration,
}

impl BodyReader {
    /// A reader with `memory` for requests.
    pub(crate) fn new(memory: RequestMemory) -> Self {
        let RequestMemory { bytes, give_back } = memory;
        // The rest is for their fields, prompts and schemas.
        let bodies = (bytes / 4).min(Semaphore::MAX_PERMITS);
        Self {
            work: WorkQueue::new(bytes - bodies, give_back),
            bytes: BODY_BYTES.min(bodies),
            room: Arc::new(Semaphore::new(bodies)),
            time: Timeouts::default().body,
        }
    }

    /// The reader with a time in which a body must arrive.
    pub(crate) fn time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Receives a body, within the limits of size and time.
    async fn receive(&self, mut body: Body) -> Result<ReceivedBody, ApiError> {
        let (announced, limit) = (body.size_hint().lower(), self.bytes);
        let announced = usize::try_from(announced).ok().filter(|bytes| *bytes <= limit);
        let announced = announced.ok_or_else(|| ApiError::too_large(limit))?;
        let receive = async {
            let (mut bytes, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
            if announced > SMALL_BODY {
                room = Some(self.acquire(announced).await?);
                bytes.reserve_exact(announced);
            }
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                let frame =
                    frame.map_err(|e| ApiError::body(format!("the body ends early: {e}")))?;
                let Ok(data) = frame.into_data() else { continue };
                let len = bytes.len() + data.len();
                if len > limit {
                    return Err(ApiError::too_large(limit));
                }
                // A body of unknown length.
                if len > bytes.capacity().max(SMALL_BODY) {
                    let more = (2 * len).min(limit);
                    drop(room.take());
                    room = Some(self.try_acquire(more)?);
                    bytes.reserve_exact(more - bytes.len());
                }
                bytes.extend_from_slice(&data);
            }
            Ok(ReceivedBody { bytes, room })
        };
        timeout(self.time, receive).await.unwrap_or_else(|_| Err(ApiError::too_slow()))
    }

    /// Room for a body, once others have left it.
    async fn acquire(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).acquire_many_owned(bytes).await;
        room.map_err(|_| ApiError::overloaded())
    }

    /// Maximum bytes of a body.
    pub(crate) fn max_bytes(&self) -> usize {
        self.bytes
    }

    /// Room for a body or a part of it, if there is any now.
    pub(crate) fn try_acquire(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).try_acquire_many_owned(bytes);
        room.map_err(|_| ApiError::overloaded())
    }
}

/// A JSON body. Its bytes are free again once it is dropped.
pub(crate) struct JsonBody {
    text: JsonText,
    /// Work of reading its fields.
    size: WorkSize,
    room: Option<OwnedSemaphorePermit>,
}

impl JsonBody {
    /// Receives the body of a request and checks that it is JSON, off the threads that wait for
    /// clients.
    ///
    /// # Errors
    /// The body is too large, too slow, compressed or not JSON.
    pub(crate) async fn receive(bodies: &BodyReader, request: Request) -> Result<Self, ApiError> {
        if is_compressed(request.headers()) {
            return Err(ApiError::encoding());
        }
        let client = ClientId::of(request.extensions());
        let ReceivedBody { bytes, room } = bodies.receive(request.into_body()).await?;
        let size = WorkSize { client, bytes: bytes.len(), memory: 0 };
        let check = move || {
            let text = JsonText::new(bytes);
            let text = text.map_err(|e| ApiError::body(format!("the body is not JSON: {e}")))?;
            let size = reading(&text, client);
            Ok(Self { text, size, room })
        };
        bodies.work.run(size, check).await
    }

    /// Its fields.
    ///
    /// # Errors
    /// It is not an object.
    pub(crate) fn fields(&self) -> Result<Fields<'_>, ApiError> {
        Fields::of_body(self.text.value())
    }

    /// Whether it is read in a turn.
    pub(crate) fn takes_turn(&self) -> bool {
        self.size.bytes > SMALL_BODY
    }

    /// Has it read in a turn, as its images are decoded there.
    pub(crate) fn take_turn(&mut self) {
        self.size.bytes = self.size.bytes.max(SMALL_BODY + 1);
    }

    /// Holds the room of a file that belongs to it. Returns the bytes of all its room.
    pub(crate) fn add_room(&mut self, more: OwnedSemaphorePermit) -> usize {
        self.take_turn();
        self.size.bytes += more.num_permits();
        let Some(room) = &mut self.room else {
            return self.room.insert(more).num_permits();
        };
        room.merge(more);
        room.num_permits()
    }

    /// Drops the text, and keeps room for at most `bytes`.
    pub(crate) fn into_room(self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let mut room = self.room?;
        room.split(bytes.min(room.num_permits()))
    }

    /// Result of `compute` with the body, off the threads that wait for clients.
    ///
    /// # Errors
    /// Those of `compute`; the fields take more memory than there is.
    pub(crate) async fn read<T: Send + 'static>(
        self,
        bodies: &BodyReader,
        compute: impl FnOnce(Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        bodies.work.run(self.size, move || compute(self)).await
    }
}

/// Work of reading the fields of a body. Unknown fields are never read, and others are short.
fn reading(text: &JsonText, client: ClientId) -> WorkSize {
    let mut size = WorkSize { client, ..WorkSize::default() };
    let mut has_images = false;
    for Member { name, value } in text.value().members().into_iter().flatten() {
        let Some(field) = LONG_FIELDS.iter().find(|field| field.name == name) else { continue };
        let ValueCounts { members, elements } = value.counts();
        let values = members.saturating_mul(field.member) + elements.saturating_mul(field.element);
        let (all, images) = (value.raw().len(), image_bytes(&name, value));
        let texts = all.saturating_sub(images).saturating_mul(TEXT_COPIES);
        size.bytes += all;
        size.memory += texts + images.saturating_mul(IMAGE_COPIES) + values;
        has_images |= images > 0;
    }
    if has_images {
        // Small files may have many pixels.
        size.bytes = size.bytes.max(SMALL_BODY + 1);
    }
    size
}

/// Bytes of a body, and the room that they take.
struct ReceivedBody {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

fn is_compressed(headers: &HeaderMap) -> bool {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    encodings.any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}
