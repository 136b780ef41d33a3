//! Where this user's files go.

use std::{env, path::PathBuf};

/// For what can be made again: the built-in model.
pub(crate) fn cache() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME", if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" })
}

/// For what was measured of this machine's disks.
pub(crate) fn probes() -> Option<PathBuf> {
    Some(cache()?.join("probes"))
}

/// For what should last: the history of conversations.
pub(crate) fn state() -> Option<PathBuf> {
    let below_home =
        if cfg!(target_os = "macos") { "Library/Application Support" } else { ".local/state" };
    folder("XDG_STATE_HOME", below_home)
}

fn folder(variable: &str, below_home: &str) -> Option<PathBuf> {
    // The XDG specification wants relative paths ignored.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute(variable).or_else(|| match cfg!(windows) {
        true => absolute("LOCALAPPDATA"),
        false => env::home_dir().filter(|h| h.is_absolute()).map(|home| home.join(below_home)),
    });
    Some(base?.join("moeflux"))
}
