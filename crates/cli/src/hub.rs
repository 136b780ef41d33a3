//! Models by their names on the Hub: in the cache, or downloaded once the user agrees.

use std::{
    fmt,
    io::{self, BufRead, IsTerminal, Write},
    ops::{ControlFlow, Range},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::bail;
use moeflux::checkpoint::{ArrivingBytes, ArrivingFile};
use moeflux_bench::units;
use moeflux_hub::{Cache, Download, HubError, ModelName, Progress, Pull, PullPlan, Settings};
use serde::Serialize;

use crate::{
    interrupt,
    progress::{Ui, error_line},
    wrong_use::WrongUse,
};

/// Time between an error of a download in the background and the next try, at first and at last.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LAST_PAUSE: Duration = Duration::from_secs(300);

/// A model that `--model` names.
enum Found {
    /// Folder or file on the disk.
    Here(PathBuf),
    /// A model of the Hub, which the user wants downloaded.
    Wanted(ModelName, Box<PullPlan>),
}

/// Name of a model of the Hub, unless it is the path of a folder or a file.
///
/// # Errors
/// It is an address of the Hub that names no model.
pub(crate) fn name(model: &Path) -> Result<Option<ModelName>, HubError> {
    let Some(text) = model.to_str().filter(|_| !model.exists()) else { return Ok(None) };
    match text.parse() {
        Ok(name) => Ok(Some(name)),
        Err(error) if ModelName::is_address(text) => Err(error),
        Err(error @ HubError::NotAModel { .. }) => Err(error),
        Err(_) => Ok(None),
    }
}

/// A model at the revision that an option names, if any.
///
/// # Errors
/// The name has another revision.
pub(crate) fn at(model: &ModelName, option: Option<&str>) -> anyhow::Result<ModelName> {
    match (model.revision(), option) {
        (Some(own), Some(option)) if own != option => {
            let problem = format!("{model} has the revision {own}, --revision {option}: give one");
            Err(WrongUse(problem).into())
        }
        (None, Some(option)) => Ok(model.clone().at(option)?),
        _ => Ok(model.clone()),
    }
}

/// Folder or file of `--model`: a path, or the place of a name's files, which are downloaded if
/// the user agrees. `is_agreed` is `--yes`.
///
/// # Errors
/// The model is not in the cache, and is not or cannot be downloaded.
pub(crate) fn located(model: &Path, is_agreed: bool, ui: Ui) -> anyhow::Result<PathBuf> {
    match find(model, is_agreed, ui)? {
        Found::Here(path) => Ok(path),
        Found::Wanted(name, plan) => download(&name, *plan, ui),
    }
}

/// As [`located`], but returns once all but the tensors is downloaded.
///
/// # Errors
/// As [`located`].
pub(crate) fn streamed(model: &Path, is_agreed: bool, ui: Ui) -> anyhow::Result<Located> {
    let (name, plan) = match find(model, is_agreed, ui)? {
        Found::Here(path) => return Ok(Located { path, download: None }),
        Found::Wanted(name, plan) => (name, plan),
    };
    if plan.missing() == 0 {
        return Ok(Located { path: download(&name, *plan, ui)?, download: None });
    }
    announce(&name, &plan, ui);
    let download = watched(ui, |report| plan.stream(report))?;
    let path = download.location().to_owned();
    Ok(Located { path, download: Some(ModelDownload { name, download, before_token: None }) })
}

/// A model that `--model` names, which may still be downloaded.
pub(crate) struct Located {
    /// Folder or file.
    pub(crate) path: PathBuf,
    pub(crate) download: Option<ModelDownload>,
}

/// Download of a model that is already in use.
pub(crate) struct ModelDownload {
    name: ModelName,
    download: Download,
    /// Bytes that had arrived before the first token.
    before_token: Option<u64>,
}

/// A file of the download, as the engine reads it.
#[derive(Debug)]
struct StreamedFile(moeflux_hub::ArrivingFile);

impl ArrivingBytes for StreamedFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(buf, offset)
    }

    fn check(&self) -> io::Result<bool> {
        self.0.check()
    }

    fn expect(&self, ranges: &[Range<u64>]) {
        self.0.expect(ranges);
    }
}

impl ModelDownload {
    /// The files that are not complete.
    pub(crate) fn arriving(&self) -> Vec<ArrivingFile> {
        let files = self.download.arriving().into_iter();
        let files = files.map(|file| ArrivingFile {
            path: file.path.clone(),
            len: file.len,
            bytes: Arc::new(StreamedFile(file)),
        });
        files.collect()
    }

    /// Bytes of memory that the download holds.
    pub(crate) fn memory(&self) -> u64 {
        self.download.memory()
    }

    /// A result of reading the model: where the download failed, its error.
    pub(crate) fn cause<T, E: Into<anyhow::Error>>(
        download: Option<&Self>,
        result: Result<T, E>,
    ) -> anyhow::Result<T> {
        result.map_err(|other| match download.and_then(|this| this.download.take_error()) {
            Some(failed) => error(failed),
            None => other.into(),
        })
    }

    /// Fetches the rest too, as the first token is computed.
    pub(crate) fn on_first_token(&mut self) {
        if self.before_token.is_none() {
            self.before_token = Some(self.download.received());
            self.download.fetch_rest();
        }
    }

    /// Bytes that had arrived before the first token, and of the whole model.
    pub(crate) fn cost(&self) -> DownloadCost {
        let bytes_before_first_token =
            self.before_token.unwrap_or_else(|| self.download.received());
        DownloadCost { bytes_before_first_token, bytes: self.download.total() }
    }

    /// Waits until the model is complete, with progress.
    ///
    /// # Errors
    /// The download fails or is interrupted. Bytes that have arrived are kept.
    pub(crate) fn finish(self, ui: Ui) -> anyhow::Result<PathBuf> {
        watched(ui, |report| self.download.finish(report))
    }

    /// Downloads the rest while the model is in use, until the program ends.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn finish_in_background(self, ui: Ui) -> io::Result<()> {
        let Self { name, download, .. } = self;
        let finish = move || {
            let (mut pause, mut is_broken) = (FIRST_PAUSE, false);
            let path = download.finish_in_time(|error| {
                is_broken |= matches!(error, HubError::Digest { .. } | HubError::OtherBytes { .. });
                let seconds = pause.as_secs();
                error_line(format_args!("error: {name}: {error}; next try in {seconds} s"));
                let after = pause;
                pause = (pause * 2).min(LAST_PAUSE);
                after
            });
            match path {
                Ok(_) if is_broken => ui.line(format_args!(
                    "{name} is downloaded, and must be started again: wrong bytes were read before"
                )),
                Ok(_) => ui.line(format_args!("{name} is downloaded")),
                Err(error) => error_line(format_args!("error: {name}: {error}")),
            }
        };
        thread::Builder::new().name("download".into()).spawn(finish).map(|_| ())
    }
}

/// Bytes that were downloaded for the first token. Part of the output of `--json`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct DownloadCost {
    bytes_before_first_token: u64,
    /// Bytes of all files.
    bytes: u64,
}

impl fmt::Display for DownloadCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = |bytes: u64| units::disk(bytes as f64);
        let (before, all) = (disk(self.bytes_before_first_token), disk(self.bytes));
        write!(f, "{before} of {all} downloaded before the first token")
    }
}

/// Finds a model on the disk, or asks whether to download it.
fn find(model: &Path, is_agreed: bool, ui: Ui) -> anyhow::Result<Found> {
    let Some(name) = name(model)? else { return Ok(Found::Here(model.to_owned())) };
    let settings = Settings::from_environment()?;
    if let Some(found) = Cache::new(&settings.cache).locate(&name)? {
        return Ok(Found::Here(found));
    }
    let can_ask = io::stdin().is_terminal() && io::stderr().is_terminal();
    if !is_agreed && !can_ask {
        bail!(
            "{name} is neither a folder nor in {}: `moeflux pull {name}` or --yes downloads it",
            settings.cache.display()
        );
    }
    let plan = plan(Pull::new(settings, name.clone()), ui)?;
    let size = units::disk(plan.missing() as f64);
    if !is_agreed && !asked(&format!("{name} is not here. Download {size}?"))? {
        bail!("{name} is not downloaded");
    }
    Ok(Found::Wanted(name, Box::new(plan)))
}

/// Asks a question on the terminal; the answer is no unless it says yes.
///
/// # Errors
/// The terminal cannot be read.
pub(crate) fn asked(question: &str) -> anyhow::Result<bool> {
    let mut terminal = io::stderr().lock();
    write!(terminal, "{question} [y/N] ")?;
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// Asks the server for the files of a download, and says what it waits for; Ctrl-C ends the wait.
///
/// # Errors
/// As [`Pull::plan`].
pub(crate) fn plan(request: Pull, ui: Ui) -> anyhow::Result<PullPlan> {
    let armed = interrupt::arm();
    let request = request.on_wait(move |wait| ui.line(wait));
    request.plan(&|| armed.flag().is_cancelled()).map_err(error)
}

/// Downloads what is missing, with progress. Returns what `--model` takes.
///
/// # Errors
/// As [`PullPlan::run`].
pub(crate) fn download(name: &ModelName, plan: PullPlan, ui: Ui) -> anyhow::Result<PathBuf> {
    let missing = plan.missing();
    announce(name, &plan, ui);
    if missing == 0 {
        return plan.run(|_| ControlFlow::Continue(())).map_err(error);
    }
    let since = Instant::now();
    let location = watched(ui, |report| plan.run(report))?;
    let seconds = since.elapsed().as_secs_f64();
    ui.line(format_args!(
        "{} downloaded in {}, {}/s",
        units::disk(missing as f64),
        units::time(seconds),
        units::disk(missing as f64 / seconds)
    ));
    Ok(location)
}

/// Says what is to be downloaded.
fn announce(name: &ModelName, plan: &PullPlan, ui: Ui) {
    let (missing, total) = (plan.missing(), plan.total());
    let files = units::plural(plan.file_count() as u64, "file");
    let disk = |bytes: u64| units::disk(bytes as f64);
    match missing {
        0 => ui.line(format_args!("{name}: all of {files}, {}, is in the cache", disk(total))),
        _ if missing == total => ui.line(format_args!("{name}: {files}, {}", disk(total))),
        _ => {
            let (total, missing) = (disk(total), disk(missing));
            ui.line(format_args!("{name}: {files}, {total}, of which {missing} are missing"));
        }
    }
}

/// Runs a download with a progress bar; Ctrl-C ends it.
fn watched<T>(
    ui: Ui,
    run: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<T, HubError>,
) -> anyhow::Result<T> {
    let mut is_joined = false;
    let result = {
        let (bar, armed) = (ui.bytes("downloading"), interrupt::arm());
        let mut has_noted = false;
        run(&mut |progress: Progress| {
            let Progress { waits, joins, .. } = progress;
            is_joined = joins;
            if (waits || joins) && !std::mem::replace(&mut has_noted, true) {
                ui.note(match joins {
                    true => "another process downloads the same model; this one joins it",
                    false => "another program downloads the same model; this one waits for it",
                });
            }
            match progress.present < progress.total {
                true => bar.bytes(progress.present, progress.total),
                false => {
                    bar.rename("checking");
                    bar.bytes(progress.checked, progress.total);
                }
            }
            match armed.flag().is_cancelled() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
    };
    if matches!(result, Err(HubError::Cancelled)) {
        error_line(match is_joined {
            true => "interrupted: the other process goes on with the download",
            false => "interrupted: what has arrived is kept, and the same command resumes",
        });
    }
    result.map_err(error)
}

/// An error of the Hub; a cancellation ends the program as Ctrl-C does.
fn error(error: HubError) -> anyhow::Error {
    match error {
        HubError::Cancelled => moeflux::Error::Cancelled.into(),
        other => other.into(),
    }
}
