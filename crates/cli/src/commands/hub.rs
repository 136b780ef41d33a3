//! `pull`, `list`, `show` and `rm`: models of the Hub and of the cache of its tools.

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::bail;
use moeflux_bench::{table::Table, units};
use moeflux_hub::{Cache, CachedModel, HubError, Pull, Selection, Settings};
use serde::Serialize;

use crate::{
    args::{ListArgs, PullArgs, RmArgs, ShowArgs},
    hub, out,
    progress::Ui,
    wrong_use::WrongUse,
};

/// A model of the cache.
#[derive(Serialize)]
struct ModelReport {
    name: String,
    commit: String,
    /// Branches and tags that stand for the commit.
    references: Vec<String>,
    folder: PathBuf,
    /// Size of all files in bytes.
    bytes: u64,
    /// Files whose download was begun and not finished.
    unfinished: usize,
    files: Vec<FileReport>,
}

#[derive(Serialize)]
struct FileReport {
    path: String,
    bytes: u64,
}

impl From<CachedModel> for ModelReport {
    fn from(model: CachedModel) -> Self {
        let CachedModel { name, folder, commit, references, files, unfinished } = model;
        let files = files.iter().map(|f| FileReport { path: f.path.to_string(), bytes: f.size });
        let files: Vec<_> = files.collect();
        let bytes = files.iter().map(|file| file.bytes).sum();
        Self { name: name.repository(), commit, references, folder, bytes, unfinished, files }
    }
}

/// Runs `moeflux pull`.
///
/// # Errors
/// The model cannot be downloaded.
pub(crate) fn pull(args: &PullArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let model = hub::at(&args.model, args.revision.as_deref())?;
    if let (Some(variant), Some(include)) = (model.variant(), args.include.first()) {
        let problem = format!("{model} chooses {variant}, --include {include}: give one");
        return Err(WrongUse(problem).into());
    }
    let request = Pull::new(Settings::from_environment()?, model.clone())
        .selection(Selection::patterns(args.include.clone()))
        .connections(args.connections);
    let location = hub::download(&model, hub::plan(request, ui)?, ui)?;
    out::line(location.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `moeflux list`.
///
/// # Errors
/// The cache cannot be read.
pub(crate) fn list(args: &ListArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cache = Cache::new(Settings::from_environment()?.cache);
    let models: Vec<ModelReport> = cache.models()?.into_iter().map(Into::into).collect();
    if args.json {
        out::json(&models)?;
    } else if models.is_empty() {
        ui.line(format_args!(
            "no models in {}; `moeflux pull ORG/NAME` downloads one",
            cache.root().display()
        ));
    } else {
        let mut table = Table::new(2);
        table.head(["model", "revision", "size", ""]);
        for model in &models {
            let references = match model.references.is_empty() {
                true => model.commit.get(..12).unwrap_or_default().to_owned(),
                false => model.references.join(", "),
            };
            let remark = if model.unfinished > 0 { "unfinished" } else { "" };
            let size = units::disk(model.bytes as f64);
            table.row([&model.name, &references, &size, remark]);
        }
        out::write(table)?;
        if models.iter().any(|model| model.unfinished > 0) {
            ui.line("`moeflux pull ORG/NAME` goes on with one that is unfinished");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `moeflux show`.
///
/// # Errors
/// The model is not in the cache.
pub(crate) fn show(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let cache = Cache::new(Settings::from_environment()?.cache);
    let name = hub::at(&args.model, args.revision.as_deref())?;
    let missing =
        || HubError::NotCached { name: name.to_string(), folder: cache.root().to_owned() };
    let model = cache.find(&name)?.ok_or_else(missing)?;
    let model = ModelReport::from(model);
    if args.json {
        out::json(&model)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut head = Table::new(2);
    head.row(["model", &model.name]);
    head.row(["commit", &model.commit]);
    if !model.references.is_empty() {
        head.row(["revisions", &model.references.join(", ")]);
    }
    head.row(["size", &units::disk(model.bytes as f64)]);
    if model.unfinished > 0 {
        head.row(["unfinished", &units::plural(model.unfinished as u64, "file")]);
    }
    let mut files = Table::new(1);
    for file in &model.files {
        files.row([file.path.clone(), units::disk(file.bytes as f64)]);
    }
    // Whole, as users copy it.
    let folder = model.folder.display();
    out::write(format_args!("{head}\n{files}\nin {folder}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `moeflux rm`.
///
/// # Errors
/// The model is not in the cache or cannot be removed, or there is no terminal to ask on.
pub(crate) fn rm(args: &RmArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cache = Cache::new(Settings::from_environment()?.cache);
    let name = args.model.repository();
    if args.model.variant().is_some() || args.model.revision().is_some() {
        let problem = format!(
            "a model is removed with all its revisions and files, not {} alone: moeflux rm {name}",
            args.model
        );
        return Err(WrongUse(problem).into());
    }
    cache.check(&args.model)?;
    let models = cache.models()?.into_iter().filter(|model| model.name == args.model);
    let bytes: u64 = models.map(|model| ModelReport::from(model).bytes).sum();
    let question = format!("Remove {name}, {}, from {}?", units::disk(bytes as f64), {
        cache.root().display()
    });
    if !args.yes {
        if !io::stdin().is_terminal() {
            return Err(WrongUse(format!("{question} --yes says so without a terminal")).into());
        }
        if !hub::asked(&question)? {
            bail!("{name} is not removed");
        }
    }
    let freed = cache.remove(&args.model)?;
    ui.line(format_args!("{name} is removed: {} are free", units::disk(freed as f64)));
    Ok(ExitCode::SUCCESS)
}
