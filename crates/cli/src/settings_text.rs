//! Text of a `moeflux.toml`: that of the user, or that of a folder of models.

use std::{fs, io, path::Path};

use anyhow::{Context, bail};

/// Name of the file.
pub(crate) const FILE: &str = "moeflux.toml";

/// Largest file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Text of a file; `None` if there is none.
///
/// # Errors
/// The file is too large or cannot be read.
pub(crate) fn read(path: &Path) -> anyhow::Result<Option<String>> {
    let text = match fs::metadata(path) {
        Ok(file) if file.len() > MAX_BYTES => bail!("{}: it is too large", path.display()),
        Ok(_) => fs::read_to_string(path),
        Err(error) => Err(error),
    };
    match text {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(Some).with_context(|| format!("{}: cannot be read", path.display())),
    }
}
