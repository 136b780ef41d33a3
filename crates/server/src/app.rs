//! State of the server.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tokio::sync::Semaphore;

use crate::{
    access::RequestLog, body::BODY_BYTES, guard::Guard, models::ModelRegistry, page::feed::FEEDS,
    responses::ResponseStore, server::Timeouts, work::WorkQueue,
};

/// State of the server.
pub(crate) struct App {
    pub(crate) models: Arc<ModelRegistry>,
    pub(crate) guard: Guard,
    pub(crate) log: RequestLog,
    /// Start of the server, in seconds since 1970.
    pub(crate) created: u64,
    /// Turns of the work on bodies.
    pub(crate) work: WorkQueue,
    /// Most bytes of a body.
    pub(crate) body_bytes: usize,
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
    /// The state of a server with `memory` for requests.
    pub(crate) fn new(models: Arc<ModelRegistry>, guard: Guard, memory: RequestMemory) -> Self {
        let RequestMemory { bytes, give_back } = memory;
        // The rest is for their fields, prompts and schemas.
        let bodies = (bytes / 4).min(Semaphore::MAX_PERMITS);
        Self {
            models,
            guard,
            log: RequestLog::default(),
            created: now(),
            work: WorkQueue::new(bytes - bodies, give_back),
            body_bytes: BODY_BYTES.min(bodies),
            body_room: Arc::new(Semaphore::new(bodies)),
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

/// Memory for requests that are being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestMemory {
    pub(crate) bytes: usize,
    /// Returns freed memory to the system.
    pub(crate) give_back: fn(),
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
