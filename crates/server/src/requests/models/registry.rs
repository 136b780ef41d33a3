//! Registry of models: the loaded one, its leases, and requests that wait for one.

use std::{
    collections::VecDeque,
    ops::Deref,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{
    loaded::{AnswerOptions, ServedModel},
    models::{LoadError, OfferedModel},
};
use crate::transport::error::ApiError;

/// End of a name that Ollama's clients append.
const LATEST: &str = ":latest";

/// Models of a server, of which at most one is loaded.
pub(crate) struct ModelRegistry {
    offered: Vec<OfferedModel>,
    options: AnswerOptions,
    /// Whether a thread loads and unloads models. Otherwise the only one stays loaded.
    has_thread: bool,
    /// Most requests that wait for a model.
    waiting: usize,
    state: Mutex<RegistryState>,
    /// Notified when the thread that loads models may have something to do.
    changed: Condvar,
    /// The thread, until the end.
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// State that requests and the loading thread share. No lock is held during a load.
#[derive(Default)]
struct RegistryState {
    current: Option<CurrentModel>,
    /// Model that is being loaded, by index.
    loading: Option<usize>,
    /// Requests without a lease, in the order of their arrival.
    queue: VecDeque<WaitingRequest>,
    /// Whether the last load of each model failed.
    failed: Vec<bool>,
    /// Loads that succeeded.
    loads: u64,
    /// Loads and unloads.
    changes: u64,
    is_stopping: bool,
}

/// The loaded model.
struct CurrentModel {
    index: usize,
    model: Arc<ServedModel>,
    /// Requests that use it.
    leases: usize,
    /// End of the last request.
    idle_since: Instant,
    /// Time without requests after which it is unloaded.
    ttl: Option<Duration>,
}

/// A request that waits for a model, by index.
struct WaitingRequest {
    index: usize,
    granted: oneshot::Sender<Result<ModelLease, ApiError>>,
}

/// A loaded model in use. It is not unloaded before this is dropped.
pub(crate) struct ModelLease {
    model: Arc<ServedModel>,
    /// Dropped after the model.
    end: LeaseEnd,
}

/// Returns a lease when it is dropped.
struct LeaseEnd(Arc<ModelRegistry>);

/// State of a model in lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelState {
    Unloaded,
    /// Unloaded, after a load that failed.
    Failed,
    Loading,
    Loaded,
}

/// End of a loaded model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expiry {
    /// Index of the model.
    pub(crate) index: usize,
    /// Time until it is unloaded if no request comes; `None` is never.
    pub(crate) left: Option<Duration>,
}

/// A lease for a request that waits for it.
pub(super) struct Grant {
    granted: oneshot::Sender<Result<ModelLease, ApiError>>,
    lease: ModelLease,
}

/// Next duty of the thread that loads models.
pub(super) enum SwitchStep {
    /// Gives leases of the loaded model.
    Grant(Vec<Grant>),
    /// Loads the model with this index.
    Load(usize),
    /// Unloads a model without leases.
    Unload(Arc<ServedModel>),
}

impl Deref for ModelLease {
    type Target = ServedModel;

    fn deref(&self) -> &ServedModel {
        &self.model
    }
}

impl ModelLease {
    /// Sets the time without requests after which the model is unloaded.
    pub(crate) fn set_ttl(&self, ttl: Option<Duration>) {
        let LeaseEnd(registry) = &self.end;
        if let Some(current) = registry.lock().current.as_mut().filter(|_| registry.has_thread) {
            current.ttl = ttl;
        }
    }
}

impl Drop for LeaseEnd {
    fn drop(&mut self) {
        // A model that is leased is the current one.
        if let Some(current) = &mut self.0.lock().current {
            current.leases -= 1;
            current.idle_since = Instant::now();
        }
        self.0.changed.notify_all();
    }
}

impl Grant {
    /// Gives the lease. A request that is gone returns it.
    pub(super) fn give(self) {
        let _ = self.granted.send(Ok(self.lease));
    }
}

impl CurrentModel {
    fn new(index: usize, model: ServedModel, ttl: Option<Duration>) -> Self {
        Self { index, model: Arc::new(model), leases: 0, idle_since: Instant::now(), ttl }
    }

    /// Time until it is unloaded, if it has no leases and is not to stay.
    fn time_left(&self) -> Option<Duration> {
        let ttl = self.ttl.filter(|_| self.leases == 0)?;
        Some(ttl.saturating_sub(self.idle_since.elapsed()))
    }
}

impl ModelRegistry {
    /// Registry of `offered`, of which the only one may be loaded. Otherwise a thread loads them.
    pub(super) fn new(
        offered: Vec<OfferedModel>,
        loaded: Option<ServedModel>,
        options: AnswerOptions,
        waiting: usize,
    ) -> Arc<Self> {
        let has_thread = loaded.is_none();
        let failed = vec![false; offered.len()];
        let current = loaded.map(|model| CurrentModel::new(0, model, None));
        let state = Mutex::new(RegistryState { failed, current, ..RegistryState::default() });
        let (changed, thread) = (Condvar::new(), Mutex::default());
        Arc::new(Self { offered, options, has_thread, waiting, state, changed, thread })
    }

    /// Sets the thread that loads models, for which the end waits.
    pub(super) fn set_thread(&self, thread: JoinHandle<()>) {
        *self.thread() = Some(thread);
    }

    fn lock(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All models.
    pub(crate) fn offered(&self) -> &[OfferedModel] {
        &self.offered
    }

    pub(crate) fn options(&self) -> &AnswerOptions {
        &self.options
    }

    /// Index of the model with a name. A single model has any name; without a name it is the loaded
    /// one.
    ///
    /// # Errors
    /// There is none. The error has the names of all models.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        if self.offered.len() == 1 {
            return Ok(0);
        }
        let Some(name) = name else {
            let state = self.lock();
            let index = state.current.as_ref().map(|current| current.index).or(state.loading);
            return index.ok_or_else(|| self.no_model(None));
        };
        self.find_exact(name)
    }

    /// Index of the model that is called `name`, also where there is a single model.
    ///
    /// # Errors
    /// There is none. The error has the names of all models.
    pub(crate) fn find_exact(&self, name: &str) -> Result<usize, ApiError> {
        let is_called = |model: &OfferedModel, name: &str| {
            model.name == name || model.aliases.iter().any(|alias| alias == name)
        };
        let position = |name| self.offered.iter().position(|m| is_called(m, name));
        let index = position(name).or_else(|| position(name.strip_suffix(LATEST)?));
        index.ok_or_else(|| self.no_model(Some(name)))
    }

    fn no_model(&self, name: Option<&str>) -> ApiError {
        let names: Vec<&str> = self.offered.iter().map(|model| &*model.name).collect();
        ApiError::no_model(name, &names)
    }

    /// The model with an index, loaded. Waits for the requests before it that need another one.
    ///
    /// # Errors
    /// The model cannot be loaded, too many requests wait, or the server stops.
    pub(crate) async fn lease(self: &Arc<Self>, index: usize) -> Result<ModelLease, ApiError> {
        let waiting = {
            let mut state = self.lock();
            if state.is_stopping {
                return Err(ApiError::stopping());
            }
            state.queue.retain(|waiting| !waiting.granted.is_closed());
            if state.queue.is_empty()
                && state.loading.is_none()
                && let Some(current) = &mut state.current
                && current.index == index
            {
                return Ok(self.give(current));
            }
            if state.queue.len() >= self.waiting {
                return Err(ApiError::busy(state.queue.len()));
            }
            let (granted, waiting) = oneshot::channel();
            state.queue.push_back(WaitingRequest { index, granted });
            waiting
        };
        self.changed.notify_all();
        waiting.await.unwrap_or_else(|_| Err(ApiError::stopping()))
    }

    fn give(self: &Arc<Self>, current: &mut CurrentModel) -> ModelLease {
        current.leases += 1;
        ModelLease { model: Arc::clone(&current.model), end: LeaseEnd(Arc::clone(self)) }
    }

    /// Unloads the model with an index once its requests have ended, if it is loaded.
    pub(crate) fn unload(&self, index: usize) {
        if let Some(current) = &mut self.lock().current
            && current.index == index
            && self.has_thread
        {
            current.ttl = Some(Duration::ZERO);
        }
        self.changed.notify_all();
    }

    /// Reads the loaded model, if there is one. Requests wait meanwhile.
    pub(crate) fn with_current<T>(&self, read: impl FnOnce(Option<&ServedModel>) -> T) -> T {
        read(self.lock().current.as_ref().map(|current| &*current.model))
    }

    /// Reads the model with an index, if it is loaded. Requests wait meanwhile.
    pub(crate) fn read<T>(&self, index: usize, read: impl FnOnce(&ServedModel) -> T) -> Option<T> {
        let state = self.lock();
        let current = state.current.as_ref().filter(|current| current.index == index)?;
        Some(read(&current.model))
    }

    /// The loaded model, and when it is unloaded.
    pub(crate) fn expiry(&self) -> Option<Expiry> {
        let state = self.lock();
        let current = state.current.as_ref()?;
        Some(Expiry { index: current.index, left: current.time_left().or(current.ttl) })
    }

    pub(crate) fn state(&self, index: usize) -> ModelState {
        let state = self.lock();
        match state.failed.get(index) {
            _ if state.current.as_ref().is_some_and(|c| c.index == index) => ModelState::Loaded,
            _ if state.loading == Some(index) => ModelState::Loading,
            Some(true) => ModelState::Failed,
            _ => ModelState::Unloaded,
        }
    }

    /// Requests that wait for a model.
    pub(crate) fn queued(&self) -> usize {
        self.lock().queue.len()
    }

    /// Loads that succeeded.
    pub(crate) fn loads(&self) -> u64 {
        self.lock().loads
    }

    /// Loads and unloads so far.
    pub(crate) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Whether no more requests are accepted.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Accepts no more requests. Running ones are served, but not the ones that wait for a model.
    pub(crate) fn stop(&self) {
        let waiting = {
            let mut state = self.lock();
            state.is_stopping = true;
            if let Some(current) = &state.current {
                current.model.stop();
            }
            std::mem::take(&mut state.queue)
        };
        self.changed.notify_all();
        for WaitingRequest { granted, .. } in waiting {
            let _ = granted.send(Err(ApiError::stopping()));
        }
    }

    /// Stops, and waits for the last request and the thread. A load ends with the process.
    pub(crate) fn end(&self) {
        self.stop();
        let (current, is_loading) = {
            let mut state = self.lock();
            (state.current.take(), state.loading.is_some())
        };
        if let Some(current) = current {
            current.model.join();
        }
        let thread = self.thread().take();
        if let Some(thread) = thread.filter(|_| !is_loading) {
            // Its panic has stopped the registry.
            let _ = thread.join();
        }
    }

    /// Waits for the next duty of the thread that loads models; `None` at the end.
    pub(super) fn next_step(self: &Arc<Self>) -> Option<SwitchStep> {
        let mut state = self.lock();
        loop {
            if state.is_stopping {
                return None;
            }
            let RegistryState { current, queue, .. } = &mut *state;
            queue.retain(|waiting| !waiting.granted.is_closed());
            let next = queue.front().map(|waiting| waiting.index);
            let timeout = match (next, current.as_mut()) {
                (Some(index), Some(current)) if current.index == index => {
                    let (ours, others): (Vec<_>, Vec<_>) =
                        queue.drain(..).partition(|waiting| waiting.index == index);
                    queue.extend(others);
                    let grant = |WaitingRequest { granted, .. }| Grant {
                        granted,
                        lease: self.give(current),
                    };
                    return Some(SwitchStep::Grant(ours.into_iter().map(grant).collect()));
                }
                (Some(_), Some(current)) if current.leases > 0 => None,
                (Some(index), _) => {
                    state.loading = Some(index);
                    return Some(SwitchStep::Load(index));
                }
                (None, Some(idle)) => match idle.time_left() {
                    Some(Duration::ZERO) => {
                        state.changes += 1;
                        return state.current.take().map(|idle| SwitchStep::Unload(idle.model));
                    }
                    left => left,
                },
                (None, None) => None,
            };
            state = match timeout {
                Some(timeout) => {
                    let woken = self.changed.wait_timeout(state, timeout);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The loaded model, which has no leases, to unload it.
    pub(super) fn take_current(&self) -> Option<Arc<ServedModel>> {
        let mut state = self.lock();
        state.changes += 1;
        state.current.take().map(|current| current.model)
    }

    /// Takes the result of a load. Requests that wait for a model that failed get its error.
    pub(super) fn loaded(&self, index: usize, result: Result<ServedModel, LoadError>) {
        let mut state = self.lock();
        state.loading = None;
        state.failed[index] = result.is_err();
        match result {
            // Dropping the model ends its threads.
            Ok(_) if state.is_stopping => {}
            Ok(model) => {
                state.loads += 1;
                state.changes += 1;
                state.current = Some(CurrentModel::new(index, model, self.offered[index].ttl));
            }
            Err(error) => {
                let error = ApiError::not_loaded(&self.offered[index].name, &*error);
                let (failed, others): (Vec<_>, Vec<_>) =
                    state.queue.drain(..).partition(|waiting| waiting.index == index);
                state.queue.extend(others);
                drop(state);
                for WaitingRequest { granted, .. } in failed {
                    let _ = granted.send(Err(error.clone()));
                }
            }
        }
    }
}
