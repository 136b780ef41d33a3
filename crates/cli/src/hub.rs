//! Models by their names on the Hub: in the cache, or downloaded once the user agrees.

use std::{
    io::{self, BufRead, IsTerminal, Write},
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::bail;
use moeflux_bench::units;
use moeflux_hub::{Cache, HubError, ModelName, Progress, Pull, PullPlan, Settings};

use crate::{
    interrupt,
    progress::{Ui, error_line},
};

/// Revision of models whose name is all that is given.
pub(crate) const REVISION: &str = "main";

/// Folder or file of `--model`: a path, or the place of a name's files, which are downloaded if
/// the user agrees. `is_agreed` is `--yes`.
///
/// # Errors
/// The model is not in the cache, and is not or cannot be downloaded.
pub(crate) fn located(model: &Path, is_agreed: bool, ui: Ui) -> anyhow::Result<PathBuf> {
    let name = model.to_str().and_then(|text| text.parse::<ModelName>().ok());
    let Some(name) = name.filter(|_| !model.exists()) else { return Ok(model.to_owned()) };
    let settings = Settings::from_environment()?;
    if let Some(found) = Cache::new(&settings.cache).locate(&name, REVISION)? {
        return Ok(found);
    }
    let can_ask = io::stdin().is_terminal() && io::stderr().is_terminal();
    if !is_agreed && !can_ask {
        bail!(
            "{name} is neither a folder nor in {}: `moeflux pull {name}` or --yes downloads it",
            settings.cache.display()
        );
    }
    let plan = plan(Pull::new(settings, name.clone()))?;
    let size = units::disk(plan.missing() as f64);
    if !is_agreed && !asked(&format!("{name} is not here. Download {size}?"))? {
        bail!("{name} is not downloaded");
    }
    download(&name, plan, ui)
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

/// Asks the server for the files of a download; Ctrl-C ends the wait.
///
/// # Errors
/// As [`Pull::plan`].
pub(crate) fn plan(request: Pull) -> anyhow::Result<PullPlan> {
    let armed = interrupt::arm();
    request.plan(&|| armed.flag().is_cancelled()).map_err(error)
}

/// Downloads what is missing, with progress. Returns what `--model` takes.
///
/// # Errors
/// As [`PullPlan::run`].
pub(crate) fn download(name: &ModelName, plan: PullPlan, ui: Ui) -> anyhow::Result<PathBuf> {
    let (missing, total) = (plan.missing(), plan.total());
    let files = units::plural(plan.file_count() as u64, "file");
    let disk = |bytes: u64| units::disk(bytes as f64);
    if missing == 0 {
        ui.line(format_args!("{name}: all of {files}, {}, is in the cache", disk(total)));
        return plan.run(|_| ControlFlow::Continue(())).map_err(error);
    }
    let part = match missing == total {
        true => String::new(),
        false => format!(", of which {} are missing", disk(missing)),
    };
    ui.line(format_args!("{name}: {files}, {}{part}", disk(total)));
    let since = Instant::now();
    let location = {
        let (bar, armed) = (ui.bytes("downloading"), interrupt::arm());
        let mut has_waited = false;
        let mut report = |progress: Progress| {
            if progress.waits && !std::mem::replace(&mut has_waited, true) {
                ui.note("another process downloads the same model; this one waits for it");
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
        };
        plan.run(&mut report)
    };
    if matches!(location, Err(HubError::Cancelled)) {
        error_line("interrupted: what has arrived is kept, and the same command resumes");
    }
    let location = location.map_err(error)?;
    let seconds = since.elapsed().as_secs_f64();
    ui.line(format_args!(
        "{} downloaded in {seconds:.1} s, {}/s",
        disk(missing),
        units::disk(missing as f64 / seconds)
    ));
    Ok(location)
}

/// An error of the Hub; a cancellation ends the program as Ctrl-C does.
fn error(error: HubError) -> anyhow::Error {
    match error {
        HubError::Cancelled => moeflux::Error::Cancelled.into(),
        other => other.into(),
    }
}
