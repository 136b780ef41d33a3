//! A model as its handles share it, and its end.

use std::sync::{
    Arc, Mutex, PoisonError, RwLock, Weak,
    atomic::{AtomicBool, Ordering},
};

use moeflux::{
    Engine, Error,
    base::SessionError,
    serve::{RequestHandle, ServingCore},
    session::Mark,
    text::Text,
};

use crate::{fault::Fault, host_process::HostProcess, locks::lock, session_thread::SessionThread};

/// Times that a session is asked for while the serving core takes the room that it made.
const TRIES: usize = 8;

/// A model with its serving core. Clones share it.
#[derive(Clone)]
pub(crate) struct SharedModel(Arc<ModelState>);

/// A model that was opened.
pub(crate) struct OpenedModel {
    pub(crate) core: ServingCore,
    /// Its config, as JSON.
    pub(crate) config: String,
}

struct ModelState {
    process: HostProcess,
    /// Path or name with which it was opened.
    path: String,
    is_closed: AtomicBool,
    /// Read by calls; written by `close`, which so waits for their end.
    open: RwLock<Option<ServingCore>>,
    sessions: Mutex<Vec<Weak<SessionThread>>>,
    marks: Mutex<Vec<Weak<Mutex<Option<Mark>>>>>,
    requests: Mutex<Vec<Weak<RequestHandle>>>,
    /// Ends of servers of the model.
    servers: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    /// Held by `close`: another call returns after it.
    closing: Mutex<()>,
    /// Bytes that the process held before.
    beside: u64,
    /// Its config, as JSON.
    config: String,
}

impl SharedModel {
    pub(crate) fn new(path: &str, opened: OpenedModel, beside: u64) -> Self {
        let OpenedModel { core, config } = opened;
        Self(Arc::new(ModelState {
            process: HostProcess::current(),
            path: path.to_owned(),
            is_closed: AtomicBool::new(false),
            open: RwLock::new(Some(core)),
            sessions: Mutex::default(),
            marks: Mutex::default(),
            requests: Mutex::default(),
            servers: Mutex::default(),
            closing: Mutex::default(),
            beside,
            config,
        }))
    }

    pub(crate) fn config(&self) -> &str {
        &self.0.config
    }

    pub(crate) fn path(&self) -> &str {
        &self.0.path
    }

    pub(crate) fn beside(&self) -> u64 {
        self.0.beside
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::SeqCst)
    }

    /// # Errors
    /// The process was forked, or the model closed.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        self.check_process()?;
        if self.is_closed() { Err(Fault::Closed) } else { Ok(()) }
    }

    pub(crate) fn check_process(&self) -> Result<(), Fault> {
        self.0.process.check()
    }

    /// Result of `call` with the serving core, for whose end `close` waits.
    pub(crate) fn with_core<T>(
        &self,
        call: impl FnOnce(&ServingCore) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.check()?;
        let open = self.0.open.read().unwrap_or_else(PoisonError::into_inner);
        call(open.as_ref().ok_or(Fault::Closed)?)
    }

    /// Result of `call` with the engine.
    ///
    /// # Errors
    /// As `call`; the model was closed.
    pub(crate) fn with_engine<T>(
        &self,
        call: impl FnOnce(&Engine) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.with_core(|core| call(core.engine()))
    }

    /// Result of `call` with tokenizer and template.
    ///
    /// # Errors
    /// As `call`; the checkpoint has no tokenizer.
    pub(crate) fn with_text<T>(
        &self,
        call: impl FnOnce(&Text) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.with_engine(|engine| call(engine.text()?))
    }

    /// Result of `make` that takes a place of a session. Idle sessions of the
    /// serving core end for it.
    pub(crate) fn with_room<T>(
        &self,
        mut make: impl FnMut() -> Result<T, Error>,
    ) -> Result<T, Fault> {
        for _ in 0..TRIES {
            match make() {
                Err(Error::Session(SessionError::TooManySessions { .. })) => {}
                made => return Ok(made?),
            }
            if !self.with_core(|core| Ok(core.end_idle_session()))? {
                break;
            }
        }
        Ok(make()?)
    }

    /// # Errors
    /// The model was closed meanwhile: the session has ended.
    pub(crate) fn adopt(&self, thread: &Arc<SessionThread>) -> Result<(), Fault> {
        keep(&self.0.sessions, thread);
        self.check().inspect_err(|_| thread.end())
    }

    /// # Errors
    /// The model was closed meanwhile: the mark is empty.
    pub(crate) fn adopt_mark(&self, mark: &Arc<Mutex<Option<Mark>>>) -> Result<(), Fault> {
        keep(&self.0.marks, mark);
        self.check().inspect_err(|_| drop(lock(mark).take()))
    }

    /// Calls `end` when the model is closed.
    pub(crate) fn on_close(&self, end: Box<dyn FnOnce() + Send>) {
        lock(&self.0.servers).push(end);
    }

    pub(crate) fn adopt_request(&self, request: &Arc<RequestHandle>) {
        keep(&self.0.requests, request);
        if self.is_closed() {
            request.cancel();
        }
    }

    /// Ends running calls, and frees the memory of host and devices before it returns, whoever
    /// holds handles: their calls return [`Fault::Closed`].
    ///
    /// # Errors
    /// The process was forked.
    pub(crate) fn close(&self) -> Result<(), Fault> {
        self.check_process()?;
        self.0.is_closed.store(true, Ordering::SeqCst);
        let _one = lock(&self.0.closing);
        for end in std::mem::take(&mut *lock(&self.0.servers)) {
            end();
        }
        let live = |handle: &Weak<RequestHandle>| handle.upgrade();
        lock(&self.0.requests).drain(..).filter_map(|h| live(&h)).for_each(|h| h.cancel());
        let sessions = std::mem::take(&mut *lock(&self.0.sessions));
        sessions.iter().filter_map(Weak::upgrade).for_each(|session| session.end());
        let marks = std::mem::take(&mut *lock(&self.0.marks));
        marks.iter().filter_map(Weak::upgrade).for_each(|mark| drop(lock(&mark).take()));
        let core = self.0.open.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(core) = core {
            core.join();
        }
        Ok(())
    }
}

impl Drop for ModelState {
    fn drop(&mut self) {
        let core = self.open.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match self.process.check() {
            Ok(()) => core.into_iter().for_each(|core| core.join()),
            // Its threads are another process's, whose memory is not freed here.
            Err(_) => std::mem::forget(core),
        }
    }
}

/// Keeps a handle, in place of the ones that are gone.
fn keep<T>(all: &Mutex<Vec<Weak<T>>>, new: &Arc<T>) {
    let mut all = lock(all);
    if all.len() == all.capacity() {
        all.retain(|handle| handle.strong_count() > 0);
    }
    all.push(Arc::downgrade(new));
}
