//! A model, and its end.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryPlan, Message,
    base::Stats,
    checkpoint::CheckpointOptions,
    model::blueprint::Blueprint,
    runtime::LineName,
    serve::{Pooling, ServingCore, ServingOptions},
    text::{Text, ToolSet},
};
use moeflux_hub::{Cache, HubError, ModelName, Pull, Settings};

use crate::{
    fault::Fault,
    host_process::HostProcess,
    open_options::OpenOptions,
    request::{Request, Wake},
    request_options::RequestOptions,
    session::Session,
    shared_model::{OpenedModel, SharedModel},
    wait::{Cancel, POLL, Waiting, Work},
};

/// Name of the built-in model.
const BUILT_IN: &str = "tales-18m";

/// Requests that wait for a session.
const WAITING: usize = 1024;

/// A model with its serving core. Clones share it.
#[derive(Clone)]
pub struct Model(SharedModel);

/// A memory plan by its lines.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PlanSummary {
    /// Name and bytes of each line, over all pools.
    pub lines: Vec<(&'static str, u64)>,
    /// Bytes of all lines, the host program left out.
    pub total: u64,
    /// Bytes that the host program held before.
    pub beside: u64,
    /// Slots for experts.
    pub slots: usize,
    /// Experts of the model.
    pub experts: usize,
    /// Positions per session.
    pub context: usize,
    /// Sequences that compute together.
    pub sessions: usize,
    /// Remarks.
    pub notes: Vec<String>,
}

impl PlanSummary {
    fn of_engine(engine: &Engine, beside: u64) -> Self {
        let experts = engine.blueprint().experts();
        let notes = engine.notes().to_vec();
        Self { notes, ..Self::new(&engine.plan(), experts, beside) }
    }

    fn new(plan: &MemoryPlan, experts: usize, beside: u64) -> Self {
        let mut lines: Vec<(&'static str, u64)> = Vec::new();
        for line in plan.pools().iter().flat_map(|pool| pool.lines.iter()) {
            let name = line_name(line.name);
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, bytes)) => *bytes += line.bytes(),
                None => lines.push((name, line.bytes())),
            }
        }
        Self {
            total: lines.iter().map(|(_, bytes)| bytes).sum(),
            lines,
            beside,
            slots: plan.slots().max(plan.host().slots()),
            experts,
            context: plan.context,
            sessions: plan.sessions,
            notes: Vec::new(),
        }
    }
}

fn line_name(name: LineName) -> &'static str {
    match name {
        LineName::Process => "process",
        LineName::Staging => "staging",
        LineName::Reserved => "reserved",
        LineName::Rows => "rows",
        LineName::Images => "images",
        LineName::Grammars => "grammars",
        LineName::Dense => "dense",
        LineName::State => "state",
        LineName::Marks => "marks",
        LineName::PrefixIndex => "prefix_index",
        LineName::Scratch => "scratch",
        LineName::Slots => "slots",
    }
}

impl Model {
    /// Opens a folder, a GGUF file, a model of the Hub by its name, or the built-in `tales-18m`.
    ///
    /// # Errors
    /// The model is not there or not supported, the budget is too small, or `waiting` or `cancel`
    /// ended it: the model is then opened in vain.
    pub fn open(
        path: &str,
        options: &OpenOptions,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Self, Fault> {
        let beside = HostProcess::resident();
        let engine_options = options.engine()?;
        let (model, options) = (path.to_owned(), options.clone());
        let work = Arc::new(Work::default());
        let of_thread = Arc::clone(&work);
        let (sender, opened) = channel();
        let open = move || {
            let open = || -> Result<OpenedModel, Fault> {
                let checkpoint = checkpoint(&model, &options, &of_thread)?;
                let config = checkpoint.config().to_string();
                let mut progress = |done: u64, total: u64| {
                    of_thread.report(done as f64 / total.max(1) as f64);
                };
                let engine = Engine::open(checkpoint, engine_options, &mut progress)?;
                let serving = ServingOptions::default().waiting(WAITING);
                Ok(OpenedModel { core: ServingCore::start(&engine, serving)?, config })
            };
            // A caller that is gone needs no model.
            let _ = sender.send(open());
        };
        let thread = thread::Builder::new().name("opening".into()).spawn(open);
        thread.map_err(|source| Error::Thread { purpose: "that opens a model", source })?;
        let opened = loop {
            match opened.recv_timeout(POLL) {
                Ok(opened) => break opened?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal("the thread that opens the model has ended").into());
                }
                Err(RecvTimeoutError::Timeout) => {
                    if cancel.is_some_and(Cancel::is_set) {
                        work.cancel.set();
                        return Err(Error::Cancelled.into());
                    }
                    waiting(work.done()).inspect_err(|_| work.cancel.set())?;
                }
            }
        };
        Ok(Self(SharedModel::new(path, opened, beside)))
    }

    /// Path or name with which it was opened.
    pub fn path(&self) -> &str {
        self.0.path()
    }

    /// The memory plan of a model, without loading it.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn inspect(path: &str, options: &OpenOptions) -> Result<PlanSummary, Fault> {
        let beside = HostProcess::resident();
        let EngineOptions { memory, device, placement, .. } = options.engine()?;
        let checkpoint = checkpoint(path, options, &Work::default())?;
        let model = Blueprint::for_checkpoint(&checkpoint)?;
        let (plan, _) =
            MemoryPlan::for_checkpoint(&checkpoint, &model, &memory, &device, &placement)?;
        Ok(PlanSummary::new(&plan, model.experts(), beside))
    }

    /// Its config, as JSON.
    pub fn config(&self) -> &str {
        self.0.config()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Result of `call` with the engine.
    ///
    /// # Errors
    /// As `call`; the model was closed.
    pub fn with_engine<T>(
        &self,
        call: impl FnOnce(&Engine) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.0.with_engine(call)
    }

    /// Result of `call` with tokenizer and template.
    ///
    /// # Errors
    /// As `call`; the checkpoint has no tokenizer.
    pub fn with_text<T>(&self, call: impl FnOnce(&Text) -> Result<T, Fault>) -> Result<T, Fault> {
        self.0.with_text(call)
    }

    /// The serving core, for a server of the model. `end` of [`Model::on_close`] drops it.
    ///
    /// # Errors
    /// The model was closed.
    pub fn core(&self) -> Result<ServingCore, Fault> {
        self.0.with_core(|core| Ok(core.clone()))
    }

    /// Calls `end` when the model is closed: it ends a server, and drops its core.
    pub fn on_close(&self, end: impl FnOnce() + Send + 'static) {
        self.0.on_close(Box::new(end));
    }

    /// Ends running calls, and frees the memory of host and devices before it returns, whoever
    /// holds handles: their calls return [`Fault::Closed`].
    ///
    /// # Errors
    /// The process was forked.
    pub fn close(&self) -> Result<(), Fault> {
        self.0.close()
    }

    /// A new session.
    ///
    /// # Errors
    /// Named sessions and running requests take all places.
    pub fn session(&self) -> Result<Session, Fault> {
        self.0.check()?;
        let session = self.0.with_room(|| {
            // Closed since the check.
            self.with_engine(|engine| Ok(engine.session())).map_err(|_| Error::Cancelled)?
        })?;
        Session::start(&self.0, session)
    }

    /// Submits an answer to tokens, which are text as it is (`is_raw`) or a conversation.
    ///
    /// # Errors
    /// An option is wrong, the model was closed, or too many requests wait.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        ends: Vec<usize>,
        options: &RequestOptions,
        is_raw: bool,
        wake: Option<Wake>,
    ) -> Result<Request, Fault> {
        let request = self.with_text(|text| options.request(text, &prompt, is_raw))?;
        let tools = options.callable();
        Request::submit(&self.0, prompt, &tools, request.ends(ends), wake)
    }

    /// Submits the embedding of tokens.
    ///
    /// # Errors
    /// As [`Model::submit`].
    pub fn submit_embedding(
        &self,
        prompt: Vec<u32>,
        pooling: Pooling,
        wake: Option<Wake>,
    ) -> Result<Request, Fault> {
        let request = moeflux::GenerateRequest::default().embedding(pooling);
        Request::submit(&self.0, prompt, &ToolSet::default(), request, wake)
    }

    /// Tokens of a conversation, and the ends of its messages.
    ///
    /// # Errors
    /// The chat template fails.
    pub fn chat_tokens(
        &self,
        messages: &[Message],
        options: &RequestOptions,
    ) -> Result<(Vec<u32>, Vec<usize>), Fault> {
        self.with_text(|text| {
            let prompt = text.prompt(messages, &options.chat())?;
            Ok((prompt.tokens, prompt.ends))
        })
    }

    /// The memory plan.
    ///
    /// # Errors
    /// The model was closed.
    pub fn plan(&self) -> Result<PlanSummary, Fault> {
        self.with_engine(|engine| Ok(PlanSummary::of_engine(engine, self.0.beside())))
    }

    /// Counters of all steps. Does not wait for a step.
    ///
    /// # Errors
    /// The model was closed.
    pub fn stats(&self) -> Result<Stats, Fault> {
        self.0.with_core(|core| Ok(core.stats().steps))
    }
}

/// # Errors
/// The checkpoint is not there, or cannot be opened.
pub(crate) fn checkpoint(
    model: &str,
    options: &OpenOptions,
    work: &Work,
) -> Result<Checkpoint, Fault> {
    let path = match located(model, options, work)? {
        Some(path) => path,
        None => return Ok(Checkpoint::embedded(&moeflux_tales::FILES)?),
    };
    Ok(Checkpoint::open_with(&path, &CheckpointOptions::default())?)
}

/// Folder or file of a model, which is downloaded if it is of the Hub; `None` for the built-in one.
fn located(model: &str, options: &OpenOptions, work: &Work) -> Result<Option<PathBuf>, Fault> {
    let path = Path::new(model);
    if path.exists() {
        return Ok(Some(path.to_owned()));
    }
    if model == BUILT_IN {
        return Ok(None);
    }
    let Ok(name) = model.parse::<ModelName>() else { return Ok(Some(path.to_owned())) };
    let name = match &options.revision {
        Some(revision) => name.at(revision)?,
        None => name,
    };
    pulled(name, options.download.unwrap_or(true), work).map(Some)
}

/// Downloads a model of the Hub unless it is in the cache. Returns its folder or file.
///
/// # Errors
/// It is no model of the Hub, or cannot be downloaded; `waiting` ended it.
pub fn pull(
    name: &str,
    revision: Option<&str>,
    cancel: Option<&Cancel>,
    waiting: &mut Waiting<'_>,
) -> Result<PathBuf, Fault> {
    let name: ModelName = name.parse()?;
    let name = revision.map_or(Ok(name.clone()), |revision| name.at(revision))?;
    let work = Arc::new(Work::default());
    let of_thread = Arc::clone(&work);
    let (sender, pulled_to) = channel();
    let run = move || drop(sender.send(pulled(name, true, &of_thread)));
    let thread = thread::Builder::new().name("download".into()).spawn(run);
    thread.map_err(|source| Error::Thread { purpose: "that downloads", source })?;
    work.wait(&pulled_to, cancel, waiting)?
}

/// Folder of a model of the Hub.
///
/// # Errors
/// It is not in the cache, and is not or cannot be downloaded.
fn pulled(name: ModelName, download: bool, work: &Work) -> Result<PathBuf, Fault> {
    let mut settings = Settings::from_environment()?;
    if let Some(found) = Cache::new(&settings.cache).locate(&name)? {
        return Ok(found);
    }
    settings.offline |= !download;
    let plan = Pull::new(settings, name).plan(&|| work.cancel.is_set())?;
    let path = plan.run(|progress| {
        work.report(progress.present as f64 / progress.total.max(1) as f64);
        match work.cancel.is_set() {
            true => std::ops::ControlFlow::Break(()),
            false => std::ops::ControlFlow::Continue(()),
        }
    });
    path.map_err(|error: HubError| error.into())
}
