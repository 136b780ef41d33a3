//! Access log: ids of requests, and a record of each once its response is sent.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    http::{HeaderMap, Method},
    response::Response,
};

use super::{guarded_body::GuardedBody, ids, notes::NOTES};

/// Header with the id of a request, in requests and responses.
pub(crate) const REQUEST_ID: &str = "x-request-id";

/// Longest id that is taken from a client.
const MAX_ID: usize = 128;

/// A request whose response was sent, or whose client left. Without bodies, queries and keys.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RequestRecord {
    /// Id of the request.
    pub id: String,
    /// Method, such as `POST`.
    pub method: String,
    /// Path without its query.
    pub path: String,
    /// Status of the response.
    pub status: u16,
    /// Time from the request's head to the end of the response.
    pub time: Duration,
    /// Parts of the request that were not enforced, as the header `x-moeflux-notes` has it.
    pub notes: Option<String>,
}

/// Function that takes a record.
type WriteRecord = dyn Fn(&RequestRecord) + Send + Sync;

/// Receiver of records. The default drops them.
#[derive(Clone, Default)]
pub struct RequestLog(Option<Arc<WriteRecord>>);

impl RequestLog {
    /// Gives each record to `write`, on the threads that wait for clients.
    pub fn new(write: impl Fn(&RequestRecord) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(write)))
    }
}

impl fmt::Debug for RequestLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestLog({})", if self.0.is_some() { "on" } else { "off" })
    }
}

/// Id of a request: the client's, if it is short and readable, or a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let is_readable = |id: &&str| {
        (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok()).filter(is_readable);
    given.map_or_else(|| ids::random_id("req_"), str::to_owned)
}

/// A request that is being answered.
pub(crate) struct OpenRequest {
    pub(crate) id: String,
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) since: Instant,
}

/// Logs the request once the body of its response is sent or dropped.
pub(crate) fn logged(response: Response, request: OpenRequest, log: &RequestLog) -> Response {
    let OpenRequest { id, method, path, since } = request;
    let (parts, body) = response.into_parts();
    let status = parts.status.as_u16();
    let time = Duration::ZERO;
    let notes = parts.headers.get(NOTES).and_then(|notes| notes.to_str().ok()).map(str::to_owned);
    let record = RequestRecord { id, method: method.to_string(), path, status, time, notes };
    let body = GuardedBody::guard(body, OpenRecord { record, since, log: log.clone() });
    Response::from_parts(parts, body)
}

/// Record of a request, which is logged at the end of its response.
struct OpenRecord {
    record: RequestRecord,
    since: Instant,
    log: RequestLog,
}

impl Drop for OpenRecord {
    fn drop(&mut self) {
        if let Some(write) = &self.log.0 {
            self.record.time = self.since.elapsed();
            write(&self.record);
        }
    }
}
