//! A model, and its end.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc::channel},
    thread,
    time::Duration,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryPlan,
    base::Stats,
    checkpoint::CheckpointOptions,
    model::blueprint::Blueprint,
    serve::{Pooling, ServingCore, ServingOptions},
    text::{Text, ToolSet},
};
use moeflux_hub::{Cache, HubError, ModelName, Pull, Settings};

use crate::{
    description::{Description, PlanSummary},
    fault::{Fault, unless_panics},
    host_process::HostProcess,
    open_options::OpenOptions,
    request::{Request, Wake},
    request_options::RequestOptions,
    session::Session,
    shared_model::{OpenedModel, SharedModel},
    wait::{Cancel, Waiting, Work},
};

/// Name of the built-in model.
const BUILT_IN: &str = "tales-18m";

/// Requests that wait for a session.
const WAITING: usize = 1024;

/// A model with its serving core. Clones share it.
#[derive(Clone)]
pub struct Model(SharedModel);

impl Model {
    /// Opens a folder, a GGUF file, a model of the Hub by its name, or the built-in `tales-18m`.
    ///
    /// # Errors
    /// The model is not there or not supported, the budget is too small, or `waiting` or `cancel`
    /// ended it.
    pub fn open(
        path: &str,
        options: &OpenOptions,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Self, Fault> {
        let beside = HostProcess::resident();
        let mut engine_options = options.engine()?;
        let (model, options) = (path.to_owned(), options.clone());
        let work = Arc::new(Work::default());
        engine_options.cancel = Some(work.cancel.shared());
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
                tracing::info!("{model}: open, on {}", engine.device().name);
                engine.notes().iter().for_each(|note| tracing::info!("{model}: {note}"));
                // A reader that is slow pauses its request, however long.
                let serving = ServingOptions::default().waiting(WAITING).stalled(Duration::MAX);
                Ok(OpenedModel { core: ServingCore::start(&engine, serving)?, config })
            };
            // A caller that is gone needs no model.
            let _ = sender.send(unless_panics(open));
        };
        let thread = thread::Builder::new().name("opening".into()).spawn(open);
        thread.map_err(|source| Error::Thread { purpose: "that opens a model", source })?;
        let opened = work.wait(&opened, cancel, waiting)??;
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

    /// Smallest budget in bytes with which a model opens.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn floor(path: &str, options: &OpenOptions) -> Result<u64, Fault> {
        let none = OpenOptions { memory: Some(0), ..options.clone() };
        match Self::inspect(path, &none) {
            Ok(plan) => Ok(plan.total),
            Err(fault) => fault.details().floor.ok_or(fault),
        }
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

    /// Submits an answer to tokens. `ends` are the ends of messages.
    ///
    /// # Errors
    /// An option is wrong, the model was closed, or too many requests wait.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        ends: Vec<usize>,
        options: &RequestOptions,
        wake: Option<Wake>,
    ) -> Result<Request, Fault> {
        let request = self.with_text(|text| options.request(text, &prompt))?;
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

    /// The memory plan.
    ///
    /// # Errors
    /// The model was closed.
    pub fn plan(&self) -> Result<PlanSummary, Fault> {
        self.with_engine(|engine| Ok(PlanSummary::of_engine(engine, self.0.beside())))
    }

    /// Its constants.
    ///
    /// # Errors
    /// The model was closed.
    pub fn describe(&self) -> Result<Description, Fault> {
        self.with_engine(|engine| Ok(Description::new(self.path(), engine)))
    }

    /// Identity of its weights: the same for every copy, packed or not.
    ///
    /// # Errors
    /// The weights that identify it cannot be read; the model was closed.
    pub fn digest(&self) -> Result<String, Fault> {
        self.with_engine(|engine| Ok(engine.model()?.to_string()))
    }

    /// Uses of the experts of each layer since it was opened; none in a layer without experts.
    ///
    /// # Errors
    /// The model was closed.
    pub fn expert_uses(&self) -> Result<Vec<Vec<u64>>, Fault> {
        self.with_engine(|engine| {
            let counters = engine.expert_counters();
            let layer = |layer| counters.experts(layer).map(|expert| expert.uses).collect();
            Ok((0..engine.blueprint().layers.len()).map(layer).collect())
        })
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
    if options.local {
        let source = io::Error::from(io::ErrorKind::NotFound);
        return Err(Error::file(path, "cannot open the model")(source).into());
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
    let run = move || drop(sender.send(unless_panics(|| pulled(name, true, &of_thread))));
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
