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
use tokio::{sync::OwnedSemaphorePermit, task::spawn_blocking, time::timeout};

use crate::{
    app::App,
    error::ApiError,
    json::{Fields, Json, JsonText},
    models::{ModelLease, ServedModel},
};

/// Largest body in bytes.
const BODY_BYTES: usize = 32 << 20;

/// Most bytes of bodies that are being received and parsed at once.
pub(crate) const BODIES_BYTES: usize = 256 << 20;

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

/// A JSON body. Its bytes are free again once it is dropped.
pub(crate) struct JsonBody {
    text: JsonText,
    _room: Option<OwnedSemaphorePermit>,
}

impl JsonBody {
    /// Receives and reads the body of a request, off the threads that wait for clients.
    ///
    /// # Errors
    /// The body is too large, too slow, compressed or not JSON.
    pub(crate) async fn receive(app: &App, request: Request) -> Result<Self, ApiError> {
        if is_compressed(request.headers()) {
            return Err(ApiError::encoding());
        }
        let ReceivedBody { bytes, room } = receive(app, request.into_body()).await?;
        blocking(move || {
            let text = JsonText::new(bytes);
            let text = text.map_err(|e| ApiError::body(format!("the body is not JSON: {e}")))?;
            Ok(Self { text, _room: room })
        })
        .await
    }

    /// Its fields.
    ///
    /// # Errors
    /// It is not an object.
    pub(crate) fn fields(&self) -> Result<Fields<'_>, ApiError> {
        Fields::of_body(self.text.value())
    }

    /// The model that it names, loaded. Waits for it.
    ///
    /// # Errors
    /// There is no such model, it cannot be loaded, or too many requests wait.
    pub(crate) async fn model(&self, app: &App) -> Result<ModelLease, ApiError> {
        let name = self.fields()?.get("model").and_then(Json::as_str);
        app.models.lease(app.models.find(name.as_deref())?).await
    }
}

/// Bytes of a body, and the room that they take.
struct ReceivedBody {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

/// Receives a body, within the limits of size and time.
async fn receive(app: &App, mut body: Body) -> Result<ReceivedBody, ApiError> {
    if body.size_hint().lower() > BODY_BYTES as u64 {
        return Err(ApiError::too_large(BODY_BYTES));
    }
    let receive = async {
        let (mut bytes, mut room) = (Vec::new(), None::<OwnedSemaphorePermit>);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let frame = frame.map_err(|e| ApiError::body(format!("the body ends early: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > BODY_BYTES {
                return Err(ApiError::too_large(BODY_BYTES));
            }
            let more = u32::try_from(data.len()).unwrap_or(u32::MAX);
            let more = Arc::clone(&app.body_room).try_acquire_many_owned(more);
            let more = more.map_err(|_| ApiError::overloaded())?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            bytes.extend_from_slice(&data);
        }
        Ok(ReceivedBody { bytes, room })
    };
    timeout(app.body_time, receive).await.unwrap_or_else(|_| Err(ApiError::too_slow()))
}

/// Result of a computation, off the threads that wait for clients.
pub(crate) async fn blocking<T: Send + 'static>(
    compute: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let computed = spawn_blocking(compute).await;
    computed.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

/// Result of a computation with a body and the model that it names, and a lease of the model.
pub(crate) struct ModelResult<T> {
    pub(crate) model: ModelLease,
    pub(crate) value: T,
}

/// Reads a JSON body and computes with its fields and the model that it names, off the threads that
/// wait for clients.
///
/// # Errors
/// Those of [`JsonBody::receive`], [`JsonBody::model`] and `compute`.
pub(crate) async fn with_model<T: Send + 'static>(
    app: &App,
    request: Request,
    compute: impl FnOnce(&ServedModel, &Fields<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<ModelResult<T>, ApiError> {
    let body = JsonBody::receive(app, request).await?;
    let model = body.model(app).await?;
    blocking(move || {
        let value = compute(&model, &body.fields()?)?;
        Ok(ModelResult { model, value })
    })
    .await
}

fn is_compressed(headers: &HeaderMap) -> bool {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    encodings.any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}
