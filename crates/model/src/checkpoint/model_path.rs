//! The folder that a user means: a model's own, or a repository in the Hub's cache.

use std::{
    env,
    path::{Component, Path, PathBuf},
};

use moeflux_base::Error;

use super::gguf;

/// Folder of a model's files. In a repository of the Hub's cache (`models--ORG--NAME`) it is the
/// snapshot that `refs/main` names, or the only one.
///
/// # Errors
/// `path` is a file, a repository with several snapshots, or the name of a repository; the error
/// names the folder to give.
pub(super) fn model_folder(path: &Path) -> Result<PathBuf, Error> {
    let bad = |problem: String| Err(Error::Checkpoint { path: path.into(), problem });
    if path.is_file() {
        if let Some(problem) = path.file_name().and_then(|n| gguf::cut_piece(n.to_str()?)) {
            return bad(problem);
        }
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = folder.unwrap_or(Path::new("."));
        return bad(format!("this is a file: give the folder of the model, {}", folder.display()));
    }
    if !path.exists() {
        return match repository(path) {
            Some(problem) => bad(problem),
            None => Ok(path.into()),
        };
    }
    let is_repository =
        |folder: &Path| !folder.join("config.json").exists() && folder.join("snapshots").is_dir();
    let repository = if is_repository(path) {
        path
    } else if path.ends_with("snapshots") && path.parent().is_some_and(is_repository) {
        path.parent().unwrap_or(path)
    } else {
        return Ok(path.into());
    };
    snapshot(repository)
}

/// Snapshot of a repository in the Hub's cache.
fn snapshot(repository: &Path) -> Result<PathBuf, Error> {
    let folder = repository.join("snapshots");
    let main = std::fs::read_to_string(repository.join("refs/main")).unwrap_or_default();
    let is_name = |name: &str| {
        let mut parts = Path::new(name).components();
        matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none()
    };
    if is_name(main.trim()) && folder.join(main.trim()).is_dir() {
        return Ok(folder.join(main.trim()));
    }
    let entries =
        std::fs::read_dir(&folder).map_err(Error::file(&folder, "cannot list the snapshots"))?;
    let mut snapshots: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| p.is_dir()).collect();
    snapshots.sort();
    let problem = match snapshots.as_slice() {
        [only] => return Ok(only.clone()),
        [] => "this repository of the Hub's cache has no snapshot: download the model".to_owned(),
        several => {
            let list: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
            format!("refs/main names none of the snapshots: give one of {}", list.join(", "))
        }
    };
    Err(Error::Checkpoint { path: repository.into(), problem })
}

/// Advice for a path that does not exist but names a repository of the Hub: `ORG/NAME` or
/// `models--ORG--NAME`.
fn repository(path: &Path) -> Option<String> {
    let name = path.to_str()?;
    let (org, model) = match name.strip_prefix("models--") {
        Some(name) => name.split_once("--")?,
        None => name.split_once('/')?,
    };
    let is_plain = |part: &str| {
        !part.is_empty() && !part.starts_with(['.', '~']) && !part.contains(['/', '\\'])
    };
    if !is_plain(org) || !is_plain(model) {
        return None;
    }
    let cached = hub_cache()?.join(format!("models--{org}--{model}"));
    let problem = match cached.is_dir() {
        true => {
            format!("there is no such folder; the Hub's cache has it: give {}", cached.display())
        }
        false => format!(
            "there is no such folder; for the repository of the Hub, run \
             `hf download {org}/{model} --local-dir {model}` and give {model}"
        ),
    };
    Some(problem)
}

/// Folder of the Hub's cache, as its own tools find it.
fn hub_cache() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || {
        let cache = variable("XDG_CACHE_HOME").or_else(|| {
            variable("HOME").or_else(|| variable("USERPROFILE")).map(|h| h.join(".cache"))
        });
        cache.map(|cache| cache.join("huggingface"))
    };
    variable("HF_HUB_CACHE").or_else(|| Some(variable("HF_HOME").or_else(home)?.join("hub")))
}
