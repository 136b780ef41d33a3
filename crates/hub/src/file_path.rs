//! Paths of a repository's files, as the server names them.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::error::HubError;

/// Bytes of a component, at most: the limit of common file systems.
const MAX_COMPONENT: usize = 255;

/// Bytes of a path, at most.
const MAX_PATH: usize = 1024;

/// Names that are devices on Windows, with any extension.
const DEVICES: [&str; 4] = ["con", "prn", "aux", "nul"];

/// Path of a file within a repository, with `/` between its components. It stays within the folder
/// that it is joined to, on every system.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FilePath(String);

impl FilePath {
    /// Checks a path of a server.
    ///
    /// # Errors
    /// The path could leave its folder, or is no file name on some system.
    pub fn new(path: &str) -> Result<Self, HubError> {
        match path.len() <= MAX_PATH && path.split('/').all(is_component) {
            true => Ok(Self(path.to_owned())),
            false => Err(HubError::FilePath { path: path.to_owned() }),
        }
    }

    /// The path as the server writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The last component.
    pub fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// Folders above the file.
    pub(crate) fn depth(&self) -> usize {
        self.0.matches('/').count()
    }

    /// The path below a folder.
    pub(crate) fn below(&self, folder: &Path) -> PathBuf {
        self.0.split('/').fold(folder.to_owned(), |path, component| path.join(component))
    }

    /// The path in an address, with percent encoding.
    pub(crate) fn encoded(&self) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
        let mut encoded = String::with_capacity(self.0.len());
        for byte in self.0.bytes() {
            match plain(byte) {
                true => encoded.push(byte.into()),
                false => encoded += &format!("%{byte:02X}"),
            }
        }
        encoded
    }
}

impl fmt::Display for FilePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a component is a plain file name on every system.
fn is_component(component: &str) -> bool {
    let stem = component.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let is_port = |stem: &str| {
        let number = stem.strip_prefix("com").or_else(|| stem.strip_prefix("lpt"));
        number.is_some_and(|number| number.chars().count() == 1)
    };
    let is_forbidden = |c: char| c.is_control() || "\\:*?\"<>|".contains(c);
    !component.is_empty()
        && component.len() <= MAX_COMPONENT
        && !component.contains(is_forbidden)
        && !component.ends_with(['.', ' '])
        && !DEVICES.contains(&stem.as_str())
        && !is_port(&stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_their_folder() {
        let path = FilePath::new("UD-Q4/model 00001.gguf").unwrap();
        assert_eq!(path.below(Path::new("x")), Path::new("x/UD-Q4/model 00001.gguf"));
        assert_eq!(path.encoded(), "UD-Q4/model%2000001.gguf");
        assert_eq!((path.name(), path.depth()), ("model 00001.gguf", 1));
        for wrong in [
            "",
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            ".",
            "..",
            "C:\\x",
            "c:x",
            "a\\b",
            "a\0b",
            "nul",
            "NUL.txt",
            "aux",
            "con.json",
            "com1",
            "LPT9.x",
            "a.",
            "a ",
            "a\nb",
        ] {
            assert!(FilePath::new(wrong).is_err(), "{wrong:?}");
        }
        assert!(FilePath::new(&"a".repeat(256)).is_err());
        assert!(FilePath::new(".gitattributes").is_ok());
        assert!(FilePath::new("console.json").is_ok());
    }
}
