//! `GET /moeflux/experts`: the live feed, for as long as its client reads.
//!
//! Frames follow each other, four a second. A frame is little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | `moe` and the version, 1 |
//! | 4 | length of the frame in bytes, as u32 |
//! | 4 | number of layers, as u32 |
//! | 4 | number of values, as u32 |
//! | 8 each | values, as f64: the fields of [`FeedValues`] |
//! | 4 each | number of experts of each layer, as u32 |
//! | 12 each | per expert, layer by layer, three u32: hits, prefetched, misses |
//!
//! Values and counters are totals, whose differences are rates; u32 counters wrap. Later versions
//! may append values. The feed ends when another model is loaded. Counters are read without the
//! engine's lock, and a frame is one allocation.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, header},
    response::Response,
};
use http_body::Frame;
use moeflux::{
    experts::{ExpertCount, ExpertCounters},
    serve::ServingStats,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Interval, MissedTickBehavior, interval},
};

use crate::{
    requests::{app::App, models::ServedModel},
    transport::error::ApiError,
};

/// Path of the feed.
pub(crate) const PATH: &str = "/moeflux/experts";

/// Most feeds at once. One that is not read would hold its connection for a minute.
const FEEDS: usize = 16;

/// Time between frames.
const PERIOD: Duration = Duration::from_millis(250);

/// Start of a frame.
const MAGIC: [u8; 4] = *b"moe\x01";

/// Bytes before the values.
const HEAD_BYTES: usize = 16;

/// Bytes of an expert.
const EXPERT_BYTES: usize = 12;

/// Values of a frame in their order. Times are in seconds.
struct FeedValues {
    /// Time since the feed began.
    time: f64,
    /// Requests with a session.
    running: f64,
    /// Requests that wait for one.
    waiting: f64,
    /// Requests that ended.
    ended: f64,
    /// Prompt tokens.
    prompt_tokens: f64,
    /// Those of them that were not computed.
    cached_tokens: f64,
    generated_tokens: f64,
    /// Tokens that steps computed.
    computed_tokens: f64,
    /// Bytes that were read from disk.
    bytes_read: f64,
    /// Time with at least one read in flight.
    disk: f64,
    /// Time in which work was submitted to the device; on a CPU the compute time.
    computing: f64,
    /// Time in which computation waited for reads.
    stalled: f64,
    /// Time in which the host waited for the GPU.
    waited: f64,
    /// Speed of the disk in bytes per second as it was measured; 0 if it is unknown.
    disk_speed: f64,
    /// Drafted tokens that were checked, and the right ones.
    drafted: f64,
    accepted: f64,
    /// Time of steps with drafts, and the time of the same tokens without.
    drafting: f64,
    undrafted: f64,
    /// Uses of experts that were counted, and the ones of experts in a card's own memory; zeros
    /// without a card, or if it holds every expert.
    expert_uses: f64,
    card_uses: f64,
}

/// Number of values.
const VALUES: usize = 20;

impl FeedValues {
    /// `has_small_card`: whether a card lacks slots for some experts.
    fn new(
        stats: &ServingStats,
        time: Duration,
        disk_speed: Option<f64>,
        has_small_card: bool,
    ) -> Self {
        let steps = &stats.steps;
        let seconds = |ns: u64| ns as f64 / 1e9;
        Self {
            time: time.as_secs_f64(),
            running: stats.running as f64,
            waiting: stats.waiting as f64,
            ended: stats.ended as f64,
            prompt_tokens: stats.prompt_tokens as f64,
            cached_tokens: stats.reused_tokens as f64,
            generated_tokens: stats.generated_tokens as f64,
            computed_tokens: steps.tokens as f64,
            bytes_read: steps.bytes_read as f64,
            disk: seconds(steps.disk_ns),
            computing: seconds(steps.computing_ns),
            stalled: seconds(steps.stalled_ns),
            waited: seconds(steps.waited_ns),
            disk_speed: disk_speed.unwrap_or(0.0),
            drafted: steps.drafted as f64,
            accepted: steps.accepted as f64,
            drafting: seconds(steps.drafting_ns),
            undrafted: seconds(steps.undrafted_ns),
            expert_uses: if has_small_card { steps.expert_uses as f64 } else { 0.0 },
            card_uses: if has_small_card { steps.card_uses as f64 } else { 0.0 },
        }
    }

    fn in_order(&self) -> [f64; VALUES] {
        [
            self.time,
            self.running,
            self.waiting,
            self.ended,
            self.prompt_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.computed_tokens,
            self.bytes_read,
            self.disk,
            self.computing,
            self.stalled,
            self.waited,
            self.disk_speed,
            self.drafted,
            self.accepted,
            self.drafting,
            self.undrafted,
            self.expert_uses,
            self.card_uses,
        ]
    }
}

/// The next frame of a feed that began `time` ago. Without a loaded model it has no layers.
fn frame(model: Option<&ServedModel>, time: Duration) -> Bytes {
    let counters = model.map(|model| model.core.engine().expert_counters());
    let layers = 0..counters.map_or(0, ExpertCounters::layers);
    let of_layer = |layer| counters.into_iter().flat_map(move |counts| counts.experts(layer));
    let len = |layer| of_layer(layer).count();
    let experts: usize = layers.clone().map(len).sum();
    let bytes = HEAD_BYTES + 8 * VALUES + 4 * layers.len() + EXPERT_BYTES * experts;
    let mut frame = Vec::with_capacity(bytes);
    frame.extend(MAGIC);
    for count in [bytes, layers.len(), VALUES] {
        frame.extend((count as u32).to_le_bytes());
    }
    let stats = model.map(|model| model.core.stats()).unwrap_or_default();
    let disk_speed = model.and_then(|model| model.disk_speed);
    let has_small_card = model.is_some_and(|model| {
        let (plan, blueprint) = (model.core.engine().plan(), model.core.engine().blueprint());
        plan.card().is_some() && plan.slots() < blueprint.experts()
    });
    for value in FeedValues::new(&stats, time, disk_speed, has_small_card).in_order() {
        frame.extend(value.to_le_bytes());
    }
    for layer in layers.clone() {
        frame.extend((len(layer) as u32).to_le_bytes());
    }
    for ExpertCount { hits, prefetched, misses, .. } in layers.flat_map(of_layer) {
        for count in [hits, prefetched, misses] {
            frame.extend((count as u32).to_le_bytes());
        }
    }
    frame.into()
}

/// Feeds that may still be opened. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Feeds(Arc<Semaphore>);

impl Default for Feeds {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(FEEDS)))
    }
}

/// Answers `GET /moeflux/experts`.
///
/// # Errors
/// There are [`FEEDS`] already.
pub(crate) async fn experts(
    State(app): State<Arc<App>>,
    State(Feeds(feeds)): State<Feeds>,
) -> Result<Response, ApiError> {
    let permit = feeds.try_acquire_owned();
    let permit = permit.map_err(|_| ApiError::no_feed(FEEDS))?;
    let mut tick = interval(PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (changes, since) = (app.models.changes(), Instant::now());
    let mut response =
        Response::new(Body::new(LiveFeed { app, changes, since, tick, _permit: permit }));
    let headers =
        [(header::CONTENT_TYPE, "application/octet-stream"), (header::CACHE_CONTROL, "no-store")];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Body of the feed. A client that does not read gets no frames. Ends when the server stops, or
/// another model is loaded.
struct LiveFeed {
    app: Arc<App>,
    /// Changes of the loaded model at the start.
    changes: u64,
    since: Instant,
    tick: Interval,
    _permit: OwnedSemaphorePermit,
}

impl http_body::Body for LiveFeed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.tick.poll_tick(cx).is_pending() {
            return Poll::Pending;
        }
        if self.app.models.is_stopping() || self.app.models.changes() != self.changes {
            return Poll::Ready(None);
        }
        let time = self.since.elapsed();
        let frame = self.app.models.with_current(|model| frame(model, time));
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }
}
