//! The user's folders: cache, state, settings.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux::runtime::{PipelineFolder, PipelineStore};

/// Cache folder, for data that can be recreated: the built-in model.
pub(crate) fn cache() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME", if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" })
}

/// Folder of disk measurements.
pub(crate) fn probes() -> Option<PathBuf> {
    Some(cache()?.join("probes"))
}

/// Compiled GPU kernels.
pub(crate) fn pipelines() -> Option<Arc<dyn PipelineStore>> {
    Some(Arc::new(PipelineFolder::new(cache()?.join("pipelines"))))
}

/// Uses of experts in earlier runs.
pub(crate) fn use_counts() -> Option<PathBuf> {
    Some(cache()?.join("uses"))
}

/// State folder, for data that should persist: the chat history.
pub(crate) fn state() -> Option<PathBuf> {
    let below_home =
        if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/state" };
    folder("XDG_STATE_HOME", below_home)
}

/// Folder of settings.
pub(crate) fn settings() -> Option<PathBuf> {
    folder("XDG_CONFIG_HOME", ".config")
}

/// The path with the home folder in place of `~` at its start.
pub(crate) fn below_home(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), env::home_dir()) {
        (Ok(below), Some(home)) if below != Path::new("") => home.join(below),
        (Ok(_), Some(home)) => home,
        _ => path.to_owned(),
    }
}

fn folder(variable: &str, below_home: &str) -> Option<PathBuf> {
    // The XDG specification says to ignore relative paths.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| match cfg!(windows) {
        true => absolute("LOCALAPPDATA"),
        false => env::home_dir().filter(|h| h.is_absolute()).map(|home| home.join(below_home)),
    });
    Some(base?.join("moeflux"))
}
