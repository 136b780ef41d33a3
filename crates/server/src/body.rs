//! Bodies of requests: received within limits, and read off the threads that wait for clients.

use std::{future::poll_fn, pin::Pin, sync::Arc, time::Duration};

use axum::{
    body::{Body, HttpBody},
    extract::Request,
    http::{HeaderMap, header},
};
use serde_json::Value;
use tokio::{sync::OwnedSemaphorePermit, task::spawn_blocking, time::timeout};

use crate::{app::App, error::ApiError, json};

/// Largest body in bytes.
const BODY_BYTES: usize = 32 << 20;

/// Most bytes of bodies that are being received and parsed at once.
pub(crate) const BODIES_BYTES: usize = 256 << 20;

/// Time in which a body must arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// A body. Its bytes are free again once it is dropped.
struct ReceivedBody {
    bytes: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

/// Receives a body, within the limits of size and time.
async fn receive(app: &App, mut body: Body) -> Result<ReceivedBody, ApiError> {
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
        Ok(ReceivedBody { bytes, _room: room })
    };
    timeout(BODY_TIME, receive).await.unwrap_or_else(|_| Err(ApiError::too_slow()))
}

/// Reads a JSON body and computes with it, off the threads that wait for clients.
///
/// # Errors
/// The body is too large, too slow, compressed or not JSON; those of `compute`.
pub(crate) async fn with_body<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    compute: impl FnOnce(&App, &Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if is_compressed(request.headers()) {
        return Err(ApiError::encoding());
    }
    let body = receive(app, request.into_body()).await?;
    let app = Arc::clone(app);
    let computed = spawn_blocking(move || compute(&app, &json::parse(&body.bytes)?)).await;
    computed.unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

fn is_compressed(headers: &HeaderMap) -> bool {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    encodings.any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
}
