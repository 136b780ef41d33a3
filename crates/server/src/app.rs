//! State of the server.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::Semaphore;

use crate::{
    access::RequestLog, body::BODIES_BYTES, guard::Guard, models::ModelRegistry, page::feed::FEEDS,
    responses::ResponseStore, server::Timeouts,
};

/// State of the server.
pub(crate) struct App {
    pub(crate) models: Arc<ModelRegistry>,
    pub(crate) guard: Guard,
    pub(crate) log: RequestLog,
    /// Start of the server, in seconds since 1970.
    pub(crate) created: u64,
    /// Bytes that bodies may still take.
    pub(crate) body_room: Arc<Semaphore>,
    /// Time in which a body must arrive.
    pub(crate) body_time: Duration,
    /// Feeds that may still be opened.
    pub(crate) feeds: Arc<Semaphore>,
    /// Responses that later requests continue.
    pub(crate) responses: Arc<ResponseStore>,
}

impl App {
    pub(crate) fn new(models: Arc<ModelRegistry>, guard: Guard) -> Self {
        Self {
            models,
            guard,
            log: RequestLog::default(),
            created: now(),
            body_room: Arc::new(Semaphore::new(BODIES_BYTES)),
            body_time: Timeouts::default().body,
            feeds: Arc::new(Semaphore::new(FEEDS)),
            responses: Arc::default(),
        }
    }

    /// The state with a receiver of records.
    pub(crate) fn log(self, log: RequestLog) -> Self {
        Self { log, ..self }
    }

    /// The state with a time in which a body must arrive.
    pub(crate) fn body_time(self, body_time: Duration) -> Self {
        Self { body_time, ..self }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
