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
/// that it is joined to, and can be the name of a file on this system.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FilePath(String);

impl FilePath {
    /// Checks a path of a server.
    ///
    /// # Errors
    /// The path could leave its folder, or is no file name on this system.
    pub fn new(path: &str) -> Result<Self, HubError> {
        let is_name = |part: &str| is_component(part) && (!cfg!(windows) || is_windows_name(part));
        match path.len() <= MAX_PATH && path.split('/').all(is_name) {
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

/// Whether a component is the name of a file. A backslash is a separator of Windows, with which a
/// cache may be shared.
fn is_component(component: &str) -> bool {
    !component.is_empty()
        && ![".", ".."].contains(&component)
        && component.len() <= MAX_COMPONENT
        && !component.contains(|c: char| c.is_control() || c == '\\')
}

/// Whether Windows, too, takes a component for the name of a file.
fn is_windows_name(component: &str) -> bool {
    let stem = component.split('.').next().unwrap_or_default().trim_end().to_ascii_lowercase();
    let is_port = |stem: &str| {
        let number = stem.strip_prefix("com").or_else(|| stem.strip_prefix("lpt"));
        number.is_some_and(|number| number.chars().count() == 1)
    };
    !component.contains(|c: char| ":*?\"<>|".contains(c))
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
            "a\\b",
            "a\0b",
            "a\nb",
        ] {
            assert!(FilePath::new(wrong).is_err(), "{wrong:?}");
        }
        let of_windows =
            ["c:x", "nul", "NUL.txt", "aux", "con.json", "com1", "LPT9.x", "a.", "a ", "what?.md"];
        for name in of_windows {
            assert!(!is_windows_name(name), "{name:?}");
            assert_eq!(FilePath::new(name).is_err(), cfg!(windows), "{name:?}");
        }
        assert!(is_windows_name("console.json"));
        assert!(FilePath::new(&"a".repeat(256)).is_err());
        assert!(FilePath::new(".gitattributes").is_ok());
        assert!(FilePath::new("console.json").is_ok());
    }
}
