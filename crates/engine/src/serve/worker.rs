//! Worker of the serving core: admits requests to sessions, computes steps, hands out events.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use moeflux_base::{Error, SessionError};
use moeflux_compute::Error as ComputeError;

use super::{
    core::{
        Command, CoreShared, EventSink, RequestEvent, RequestFlags, ServingOptions, ServingStats,
        SinkState, Submission,
    },
    prefix_search::{FoundPrefix, SavedPrefix},
    saver::Saver,
    scheduler::{Event, RequestId, Scheduler},
};
use crate::{
    runtime::control::StepControl,
    session::{
        engine::Engine,
        prefix_key::PrefixKey,
        session::{MIN_CACHED_PREFIX, Session, Synced},
    },
};

/// Interval at which full sinks are tried again while nothing else happens.
const RETRY: Duration = Duration::from_millis(5);

/// Interval at which the result of a search is looked for while nothing else happens.
const SEARCH_RETRY: Duration = Duration::from_millis(1);

/// A request that waits for a session.
struct WaitingRequest {
    number: u64,
    submission: Box<Submission>,
    /// Whether the folder of saved prompts is being searched for it.
    is_searched: bool,
    /// A prefix of the prompt in the folder.
    found: Option<SavedPrefix>,
}

/// A request with a session.
struct Running {
    id: RequestId,
    client: Client,
    prompt_tokens: usize,
    /// Lengths of prefixes that other prompts are likely to share.
    ends: Vec<usize>,
    /// Reuse and work that the client knows.
    reported: Synced,
}

/// Receiver of one request's events.
struct Client {
    sink: Box<dyn EventSink>,
    flags: Arc<RequestFlags>,
    /// Events that are handed out with the next step, or that the sink had no room for.
    backlog: VecDeque<RequestEvent>,
    /// When the sink was first full; `None` while it is not.
    full_since: Option<Instant>,
    /// Whether the sink is closed, or stayed full for too long.
    is_gone: bool,
}

impl Client {
    fn new(sink: Box<dyn EventSink>, flags: Arc<RequestFlags>) -> Self {
        Self { sink, flags, backlog: VecDeque::new(), full_since: None, is_gone: false }
    }

    fn is_cancelled(&self) -> bool {
        self.is_gone || self.flags.cancelled.load(Ordering::SeqCst)
    }

    /// Hands out an event, after the backlog.
    fn send(&mut self, event: RequestEvent) {
        self.backlog.push_back(event);
        self.flush();
    }

    /// Hands out the backlog, unless the sink was full.
    fn flush_unless_full(&mut self) {
        if self.full_since.is_none() {
            self.flush();
        }
    }

    /// Hands out the backlog, as far as the sink takes it.
    fn flush(&mut self) {
        while let Some(event) = self.backlog.pop_front() {
            match self.sink.send(event) {
                SinkState::Taken => self.full_since = None,
                SinkState::Full(event) => {
                    self.backlog.push_front(event);
                    self.full_since.get_or_insert_with(Instant::now);
                    return;
                }
                SinkState::Closed => {
                    self.is_gone = true;
                    return self.backlog.clear();
                }
            }
        }
    }
}

/// Whether no session can be made as long as no request leaves one behind: the device failed, or
/// sessions outside the serving core have all places.
fn is_lasting(error: &Error) -> bool {
    match error {
        Error::Compute { source, .. } => !matches!(source, ComputeError::StatesFull { .. }),
        Error::Session(SessionError::TooManySessions { .. }) => true,
        _ => false,
    }
}

/// A session without a request. It keeps its tokens for the next turn.
struct IdleSession {
    session: Session,
    /// Number of the request that ended last in it.
    used: u64,
}

/// The thread's state.
pub(super) struct Worker {
    engine: Engine,
    options: ServingOptions,
    shared: Arc<CoreShared>,
    commands: Receiver<Command>,
    scheduler: Scheduler,
    waiting: VecDeque<WaitingRequest>,
    /// Requests received so far.
    received: u64,
    running: Vec<Running>,
    /// Clients of requests that have ended, with events left to hand out.
    ending: Vec<Client>,
    idle: Vec<IdleSession>,
    saver: Option<Saver>,
    stats: ServingStats,
    is_stopping: bool,
}

impl Worker {
    pub(super) fn new(
        engine: &Engine,
        options: ServingOptions,
        shared: Arc<CoreShared>,
        commands: Receiver<Command>,
    ) -> Result<Self, Error> {
        let folder = options.prefix_cache.clone();
        let saver = folder.map(|folder| Saver::start(engine, folder)).transpose()?;
        Ok(Self {
            engine: engine.clone(),
            scheduler: Scheduler::new(engine, options.scheduler),
            options,
            shared,
            commands,
            waiting: VecDeque::new(),
            received: 0,
            running: Vec::new(),
            ending: Vec::new(),
            idle: Vec::new(),
            saver,
            stats: ServingStats::default(),
            is_stopping: false,
        })
    }

    /// Serves until it is stopped and the last request has ended, or no handle is left.
    pub(super) fn run(mut self) {
        while self.receive() {
            self.remove_cancelled();
            self.take_found();
            self.admit();
            self.flush();
            if self.scheduler.has_work() {
                self.step();
            }
            self.stats.state_bytes = self.engine.states_held();
            if let Some(saver) = &mut self.saver {
                saver.advance(!self.scheduler.has_work());
                self.stats.saved_prefixes = saver.saved;
            }
            self.shared.publish(self.stats);
            if self.is_between_answers() {
                // An error of the device recurs in the next step.
                let _ = self.engine.correct_plan();
            }
        }
        self.saver.into_iter().for_each(Saver::finish);
    }

    fn is_between_answers(&self) -> bool {
        let is_idle = self.running.is_empty() && self.waiting.is_empty() && self.ending.is_empty();
        is_idle && !self.is_stopping
    }

    /// Takes commands; waits for one if there is nothing else to do. Returns whether to go on.
    fn receive(&mut self) -> bool {
        let has_clients = !self.running.is_empty() || !self.ending.is_empty();
        let mut received = if self.scheduler.has_work() {
            self.commands.try_recv().map_err(|_| RecvTimeoutError::Timeout)
        } else if self.waiting.iter().any(|waiting| waiting.is_searched) {
            self.commands.recv_timeout(SEARCH_RETRY)
        } else if has_clients || !self.waiting.is_empty() {
            self.commands.recv_timeout(RETRY)
        } else if self.is_stopping {
            return false;
        } else if self.saver.as_ref().is_some_and(Saver::is_busy) {
            self.commands.recv_timeout(RETRY)
        } else {
            self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        loop {
            match received {
                Ok(Command::Submit(submission)) => self.enqueue(submission),
                Ok(Command::Wake) => {}
                Ok(Command::EndIdle(ended)) => {
                    // A caller that is gone needs no answer.
                    let _ = ended.send(self.end_idle());
                }
                Ok(Command::Stop) => self.is_stopping = true,
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
            received = self.commands.try_recv().map_err(|_| RecvTimeoutError::Timeout);
        }
    }

    /// Puts a request into the waiting line, and begins to search the folder for it.
    fn enqueue(&mut self, submission: Box<Submission>) {
        self.received += 1;
        let number = self.received;
        let key = submission.key();
        let is_searched = self.saver.as_ref().is_some_and(|saver| {
            let of_idle = self.idle.iter().map(|idle| idle.session.usable_prefix_len(key));
            let in_memory = of_idle.max().unwrap_or(0).max(self.engine.cached_prefix_len(key));
            !submission.request.computes_all() && saver.begin_search(number, key, in_memory)
        });
        self.waiting.push_back(WaitingRequest { number, submission, is_searched, found: None });
    }

    /// Takes the results of searches.
    fn take_found(&mut self) {
        let Some(saver) = &self.saver else { return };
        let has_ended = saver.search_has_ended();
        for FoundPrefix { request, prefix } in saver.found() {
            // A request that was cancelled needs none.
            if let Some(waiting) = self.waiting.iter_mut().find(|w| w.number == request) {
                (waiting.is_searched, waiting.found) = (false, prefix);
            }
        }
        if has_ended {
            self.waiting.iter_mut().for_each(|waiting| waiting.is_searched = false);
        }
    }

    /// Ends the requests that were cancelled or whose clients are gone.
    fn remove_cancelled(&mut self) {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| !waiting.submission.flags.cancelled.load(Ordering::SeqCst));
        let removed = before - self.waiting.len();
        self.shared.waiting.fetch_sub(removed, Ordering::SeqCst);
        self.stats.ended += removed as u64;
        let stalled = self.options.stalled;
        let is_stalled =
            |client: &Client| client.full_since.is_some_and(|since| since.elapsed() >= stalled);
        self.ending.retain(|client| !client.is_cancelled() && !is_stalled(client));
        for i in (0..self.running.len()).rev() {
            let client = &mut self.running[i].client;
            client.is_gone |= is_stalled(client);
            if client.is_cancelled() {
                let session = self.scheduler.cancel(self.running[i].id);
                self.end(i, session);
            }
        }
    }

    /// Gives sessions to waiting requests, first come, first served.
    fn admit(&mut self) {
        while let Some(waiting) = self.waiting.pop_front() {
            if waiting.is_searched {
                return self.waiting.push_front(waiting);
            }
            let submission = &waiting.submission;
            let reusable = match submission.request.computes_all() {
                true => PrefixKey::from(&[]),
                false => submission.key(),
            };
            let mut session = match self.take_session(reusable) {
                Ok(session) => session,
                // No request will leave a session behind.
                Err(error) if self.running.is_empty() && is_lasting(&error) => {
                    self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
                    let Submission { sink, flags, .. } = *waiting.submission;
                    self.reject(Client::new(sink, flags), error);
                    continue;
                }
                Err(_) => return self.waiting.push_front(waiting),
            };
            let found = waiting.found.as_ref();
            let is_restored = found.is_some_and(|f| Saver::restore(&mut session, reusable, f));
            self.stats.restored_prompts += u64::from(is_restored);
            self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
            let Submission { prompt, request, sink, flags } = *waiting.submission;
            let mut client = Client::new(sink, flags);
            match self.scheduler.add(session, &prompt, &request) {
                Ok(id) => {
                    client.flags.running.store(true, Ordering::SeqCst);
                    self.shared.running.fetch_add(1, Ordering::SeqCst);
                    let synced = self.scheduler.synced(id).unwrap_or_default();
                    client.send(RequestEvent::Started(synced));
                    self.stats.prompt_tokens += prompt.len() as u64;
                    self.stats.reused_tokens += synced.reused as u64;
                    let (prompt_tokens, ends, reported) = (prompt.len(), request.ends, synced);
                    self.running.push(Running { id, client, prompt_tokens, ends, reported });
                }
                Err(rejected) => {
                    self.keep(*rejected.session);
                    self.reject(client, rejected.error);
                }
            }
        }
    }

    /// Ends a request that has not run.
    fn reject(&mut self, mut client: Client, error: Error) {
        self.stats.ended += 1;
        client.send(RequestEvent::Failed(Arc::new(error)));
        self.ending.push(client);
    }

    /// A session for a request that may reuse a prefix of `key`: the idle one that it continues;
    /// else a copy of the idle one with the longest usable prefix, or a new one; without room for
    /// it, an idle one, rather the one with that prefix than the least recently used.
    ///
    /// # Errors
    /// No session is idle, and the engine makes none.
    fn take_session(&mut self, key: PrefixKey<'_>) -> Result<Session, Error> {
        let usable = |idle: &IdleSession| idle.session.usable_prefix_len(key);
        let best = (0..self.idle.len()).max_by_key(|i| usable(&self.idle[*i]));
        let best = best.filter(|i| usable(&self.idle[*i]) >= MIN_CACHED_PREFIX);
        let oldest = || (0..self.idle.len()).min_by_key(|i| self.idle[*i].used);
        let Some(index) = best.or_else(oldest) else { return self.engine.session() };
        let new = match best.map(|i| &self.idle[i].session) {
            Some(session) if session.is_continued_by(key) => None,
            Some(session) => session.fork().ok(),
            None => self.engine.session().ok(),
        };
        if let Some(new) = new {
            return Ok(new);
        }
        let mut taken = self.idle.swap_remove(index).session;
        if !taken.is_continued_by(key) {
            // Its conversation may go on. If its state cannot be kept, that turn computes it again.
            let _ = taken.cache_prefix();
        }
        Ok(taken)
    }

    /// Ends the idle session that was not used for the longest time. Returns whether there is one.
    fn end_idle(&mut self) -> bool {
        let oldest = (0..self.idle.len()).min_by_key(|i| self.idle[*i].used);
        let Some(oldest) = oldest else { return false };
        let mut oldest = self.idle.swap_remove(oldest).session;
        // A state that cannot be kept is computed again.
        let _ = oldest.cache_prefix();
        true
    }

    fn keep(&mut self, session: Session) {
        self.idle.push(IdleSession { session, used: self.stats.ended });
    }

    /// Tries full sinks again, and lets sequences run whose sinks have room.
    fn flush(&mut self) {
        for Running { id, client, .. } in &mut self.running {
            if client.full_since.is_some() {
                client.flush();
            }
            self.scheduler.pause(*id, client.full_since.is_some());
        }
        self.ending.iter_mut().for_each(Client::flush);
        self.ending.retain(|client| !client.backlog.is_empty());
    }

    /// Computes a step and hands out its events.
    ///
    /// Tokens wait for the next step where a GPU computes it: their receivers are woken while it
    /// does, not while it waits for the step.
    fn step(&mut self) {
        let shared = Arc::clone(&self.shared);
        shared.step.reset();
        // A request that was cancelled before the reset is removed before the step.
        if self.running.iter().any(|running| running.client.is_cancelled()) {
            return;
        }
        let Self { scheduler, running, .. } = self;
        let mut hand_out = |_| running.iter_mut().for_each(|r| r.client.flush_unless_full());
        let mut control = StepControl::default().cancel(&shared.step).progress(&mut hand_out);
        let events = scheduler.step(&mut control);
        // A step that failed may not have begun.
        hand_out(1.0);
        self.stats.steps = self.scheduler.stats();
        match events {
            Ok(events) => events.into_iter().for_each(|event| self.hand_out(event)),
            Err(Error::Cancelled) => {}
            // A state that is being written holds memory. No session has changed: the next step
            // tries again.
            Err(_) if self.saver.as_mut().is_some_and(Saver::wait) => {}
            Err(error) => self.fail_all(&Arc::new(error)),
        }
        if !self.engine.device().graphics || !self.scheduler.has_work() {
            self.running.iter_mut().for_each(|running| running.client.flush_unless_full());
        }
        for Running { id, client, prompt_tokens, reported, .. } in &mut self.running {
            let Some(progress) = self.scheduler.prefilled(*id) else { continue };
            let synced = self.scheduler.synced(*id).unwrap_or(*reported);
            self.stats.reused_tokens += (synced.reused - reported.reused) as u64;
            *reported = synced;
            // Progress is not worth a place in a full sink.
            if client.backlog.is_empty() {
                let total = *prompt_tokens;
                client.send(RequestEvent::Prefilled { done: progress, total });
            }
        }
    }

    fn hand_out(&mut self, event: Event) {
        let (Event::PromptLogprobs { id, .. }
        | Event::Embedding { id, .. }
        | Event::Token { id, .. }
        | Event::Finished { id, .. }
        | Event::Failed { id, .. }) = &event;
        let Some(i) = self.running.iter().position(|running| running.id == *id) else { return };
        let client = &mut self.running[i].client;
        match event {
            Event::PromptLogprobs { first, logprobs, .. } => {
                client.send(RequestEvent::PromptLogprobs { first, logprobs });
            }
            Event::Embedding { values, .. } => client.send(RequestEvent::Embedding(values)),
            Event::Token { token, logprobs, drafts, .. } => {
                self.stats.generated_tokens += 1;
                client.backlog.push_back(RequestEvent::Token { token, logprobs, drafts });
            }
            Event::Finished { finish, mut session, .. } => {
                client.send(RequestEvent::Finished(finish));
                let Running { ends, reported, .. } = &self.running[i];
                if let Some(saver) = &mut self.saver {
                    saver.take(&mut session, ends, reported.computed);
                }
                self.end(i, Some(session));
            }
            Event::Failed { error, session, .. } => {
                client.send(RequestEvent::Failed(Arc::new(error)));
                self.end(i, Some(session));
            }
        }
    }

    /// Ends every running request after a step that failed: an expert that cannot be read, a device
    /// that is lost.
    fn fail_all(&mut self, error: &Arc<Error>) {
        for i in (0..self.running.len()).rev() {
            let session = self.scheduler.cancel(self.running[i].id);
            self.running[i].client.send(RequestEvent::Failed(Arc::clone(error)));
            self.end(i, session);
        }
    }

    /// Ends running request `i`. Its session becomes idle.
    fn end(&mut self, i: usize, session: Option<Session>) {
        let Running { client, .. } = self.running.remove(i);
        client.flags.running.store(false, Ordering::SeqCst);
        self.shared.running.fetch_sub(1, Ordering::SeqCst);
        self.stats.ended += 1;
        if let Some(session) = session {
            self.keep(session);
        }
        if !client.backlog.is_empty() && !client.is_cancelled() {
            self.ending.push(client);
        }
    }
}
