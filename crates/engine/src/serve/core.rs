//! Serving core: the thread that owns the scheduler, and handles to it.
//!
//! Handles submit, cancel and read statistics; they never wait for a step. Events of a request go
//! to its sink, which must not block: a full sink pauses its own sequence only.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender, SyncSender, TrySendError},
    },
    thread::JoinHandle,
    time::Duration,
};

use moeflux_base::{Error, setters};
use moeflux_sampling::TokenLogprobs;

use super::{
    request::{Finish, GenerateRequest},
    scheduler::SchedulerOptions,
    worker::Worker,
};
use crate::{
    experts::stats::Stats,
    runtime::control::CancelToken,
    session::{
        drafts::DraftTotals,
        engine::Engine,
        prefix_key::{PrefixKey, Prompt},
        session::Synced,
        snapshot::SnapshotFolder,
    },
};

/// Default requests in the waiting line.
const WAITING: usize = 64;

/// Default time after which a request whose sink stays full is cancelled.
const STALLED: Duration = Duration::from_secs(60);

/// Options of a [`ServingCore`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServingOptions {
    /// Most requests that wait for a session; default 64.
    pub waiting: usize,
    /// Time after which a request is cancelled whose sink stays full; default one minute.
    pub stalled: Duration,
    /// Token budgets of a step.
    pub scheduler: SchedulerOptions,
    /// Folder for states of prompts, from which later prompts with the same prefix go on, also
    /// after a restart. Needs room for the prefix cache in the memory plan. Default: none.
    pub prefix_cache: Option<SnapshotFolder>,
}

impl Default for ServingOptions {
    fn default() -> Self {
        Self {
            waiting: WAITING,
            stalled: STALLED,
            scheduler: SchedulerOptions::default(),
            prefix_cache: None,
        }
    }
}

setters!(ServingOptions {
    waiting: usize,
    stalled: Duration,
    scheduler: SchedulerOptions,
    prefix_cache: impl Into<Option<SnapshotFolder>>,
});

/// Event of a request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RequestEvent {
    /// The request has a session.
    Started(Synced),
    /// Part of the prompt was prefilled.
    Prefilled {
        /// Prompt tokens in the session.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// Log-probabilities of the next tokens of the prompt, each given the tokens before it.
    PromptLogprobs {
        /// Position of the first of these tokens; at least 1.
        first: usize,
        /// Log-probabilities, token by token.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The embedding of the prompt: pooled hidden states, not normalised.
    Embedding(Vec<f32>),
    /// The next token.
    Token {
        /// The token.
        token: u32,
        /// Its log-probabilities, if the request asks for them.
        logprobs: Option<Box<TokenLogprobs>>,
        /// Drafts of the answer, up to the step that chose the token.
        drafts: DraftTotals,
    },
    /// The last event: the answer is complete.
    Finished(Finish),
    /// The last event: the request failed.
    Failed(Arc<Error>),
}

/// Result of [`EventSink::send`].
#[derive(Clone, Debug)]
pub enum SinkState {
    /// The event was taken.
    Taken,
    /// The event is returned: the sink has no room for it now.
    Full(RequestEvent),
    /// The receiver is gone: the request is cancelled.
    Closed,
}

/// Receiver of a request's events. Called on the worker's thread; must not block.
pub trait EventSink: Send {
    /// Takes an event, or returns it.
    fn send(&mut self, event: RequestEvent) -> SinkState;
}

impl EventSink for SyncSender<RequestEvent> {
    fn send(&mut self, event: RequestEvent) -> SinkState {
        match self.try_send(event) {
            Ok(()) => SinkState::Taken,
            Err(TrySendError::Full(event)) => SinkState::Full(event),
            Err(TrySendError::Disconnected(_)) => SinkState::Closed,
        }
    }
}

/// A submitted request. Dropping it cancels the request.
#[derive(Debug)]
pub struct RequestHandle {
    flags: Arc<RequestFlags>,
    shared: Arc<CoreShared>,
    commands: Sender<Command>,
}

impl RequestHandle {
    /// Cancels the request. It ends at the next step boundary, or at the next layer if it is alone.
    /// No event follows.
    pub fn cancel(&self) {
        if self.flags.cancelled.swap(true, Ordering::SeqCst) {
            return;
        }
        let is_running = self.flags.running.load(Ordering::SeqCst);
        if is_running && self.shared.running.load(Ordering::SeqCst) == 1 {
            self.shared.step.cancel();
        }
        // A worker that has ended has no requests.
        let _ = self.commands.send(Command::Wake);
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// A request that was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejected {
    /// The waiting line is full.
    #[error("{waiting} requests wait already: try again later")]
    Busy {
        /// Requests in the waiting line.
        waiting: usize,
    },
    /// The serving core ends.
    #[error("the server is shutting down")]
    Stopping,
}

/// Statistics of a [`ServingCore`]: a copy made at the end of the last step.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ServingStats {
    /// Cost of all steps so far.
    pub steps: Stats,
    /// Requests with a session.
    pub running: usize,
    /// Requests that wait for a session.
    pub waiting: usize,
    /// Requests that ended, in any way.
    pub ended: u64,
    /// Prompt tokens of all requests that got a session.
    pub prompt_tokens: u64,
    /// Those of them that were not computed.
    pub reused_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Prompts that went on from a file of the folder.
    pub restored_prompts: u64,
    /// Files that were written to the folder.
    pub saved_prefixes: u64,
    /// Bytes of all states: of sessions, and of the prefix cache. Memory that they share counts
    /// once.
    pub state_bytes: u64,
}

/// Messages to the worker.
pub(super) enum Command {
    Submit(Box<Submission>),
    /// A request was cancelled.
    Wake,
    /// Ends an idle session, and says whether there was one.
    EndIdle(Sender<bool>),
    /// Accepts no more requests; ends with the last one.
    Stop,
}

/// A request on its way to the worker.
pub(super) struct Submission {
    pub(super) prompt: Vec<u32>,
    pub(super) request: GenerateRequest,
    pub(super) sink: Box<dyn EventSink>,
    pub(super) flags: Arc<RequestFlags>,
}

impl Submission {
    /// Contents of the prompt.
    pub(super) fn key(&self) -> PrefixKey<'_> {
        Prompt::new(&self.prompt, &self.request.images).key()
    }
}

/// State that a request's handle and the worker share.
#[derive(Debug, Default)]
pub(super) struct RequestFlags {
    pub(super) cancelled: AtomicBool,
    /// Whether the request has a session.
    pub(super) running: AtomicBool,
}

/// State that handles and the worker share. No lock is held during a step.
#[derive(Debug, Default)]
pub(super) struct CoreShared {
    /// Cancels the running step.
    pub(super) step: CancelToken,
    /// Requests with a session.
    pub(super) running: AtomicUsize,
    /// Requests without one.
    pub(super) waiting: AtomicUsize,
    pub(super) stopping: AtomicBool,
    stats: Mutex<ServingStats>,
}

impl CoreShared {
    pub(super) fn publish(&self, stats: ServingStats) {
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }
}

/// Handle to the thread that serves requests. Clones share it.
#[derive(Clone)]
pub struct ServingCore {
    engine: Engine,
    options: ServingOptions,
    shared: Arc<CoreShared>,
    commands: Sender<Command>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl fmt::Debug for ServingCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServingCore").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ServingCore {
    /// Starts the thread. It uses all sessions of the engine's plan; sessions that exist already
    /// are not among them.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn start(engine: &Engine, options: ServingOptions) -> Result<Self, Error> {
        let (commands, received): (Sender<Command>, Receiver<Command>) = mpsc::channel();
        let shared = Arc::new(CoreShared::default());
        let worker = Worker::new(engine, options.clone(), Arc::clone(&shared), received)?;
        let thread = std::thread::Builder::new().name("serving".into()).spawn(|| worker.run());
        let thread = thread.map_err(Error::thread("that serves requests"))?;
        Ok(Self {
            engine: engine.clone(),
            options,
            shared,
            commands,
            thread: Arc::new(Mutex::new(Some(thread))),
        })
    }

    /// The engine, for what needs no step: its tokenizer, plan and model. Steps and sessions beside
    /// the serving core wait for its steps.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Puts a request into the waiting line. Events go to `sink`; `Finished` or `Failed` is the
    /// last one.
    ///
    /// # Errors
    /// The waiting line is full, or the core ends.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        request: GenerateRequest,
        sink: Box<dyn EventSink>,
    ) -> Result<RequestHandle, Rejected> {
        if self.shared.stopping.load(Ordering::SeqCst) {
            return Err(Rejected::Stopping);
        }
        let waiting = self.shared.waiting.fetch_add(1, Ordering::SeqCst);
        if waiting >= self.options.waiting {
            self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(Rejected::Busy { waiting });
        }
        let flags = Arc::new(RequestFlags::default());
        let handle = RequestHandle {
            flags: Arc::clone(&flags),
            shared: Arc::clone(&self.shared),
            commands: self.commands.clone(),
        };
        let submission = Submission { prompt, request, sink, flags };
        let sent = self.commands.send(Command::Submit(Box::new(submission)));
        sent.map(|()| handle).map_err(|_| Rejected::Stopping)
    }

    /// Ends the idle session that was not used for the longest time, which makes room for another
    /// [`Engine::session`] or [`Session::fork`](crate::Session::fork). Its state enters the prefix
    /// cache, if that has room. Returns false if no session is idle. Waits for the end of a step.
    pub fn end_idle_session(&self) -> bool {
        let (ended, receiver) = mpsc::channel();
        let sent = self.commands.send(Command::EndIdle(ended));
        sent.is_ok() && receiver.recv().unwrap_or(false)
    }

    /// Statistics as of the last step.
    pub fn stats(&self) -> ServingStats {
        let stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        ServingStats {
            running: self.shared.running.load(Ordering::SeqCst),
            waiting: self.shared.waiting.load(Ordering::SeqCst),
            ..stats
        }
    }

    /// Whether the core accepts no more requests.
    pub fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::SeqCst)
    }

    /// Accepts no more requests. Accepted ones are served.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // A worker that has ended needs no command.
        let _ = self.commands.send(Command::Stop);
    }

    /// Stops, and waits for the last request.
    pub fn join(&self) {
        self.stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the worker has ended its requests: their sinks are gone.
            let _ = thread.join();
        }
    }
}
