//! Names of models on the Hub.

use std::{fmt, str::FromStr};

use crate::{error::HubError, file_path::FilePath, selection::Selection, settings};

/// Bytes of a part of a name, at most: the Hub's limit.
const MAX_PART: usize = 96;

/// Bytes of a revision, at most.
const MAX_REVISION: usize = 255;

/// Revision of names without one.
pub(crate) const HEAD: &str = "main";

/// Hosts of the Hub.
const HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

/// Model on the Hub: `ORG/NAME`, perhaps with `@REVISION`, and with `:VARIANT` for one of several
/// GGUF files. It is also read from the address of a page or a file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModelName {
    organization: String,
    name: String,
    revision: Option<String>,
    variant: Option<String>,
}

impl ModelName {
    /// `ORG/NAME`, as in the Hub's addresses.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// Branch, tag or commit that the name has.
    pub fn revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The model at another revision.
    ///
    /// # Errors
    /// That is no branch, tag or commit.
    pub fn at(self, revision: &str) -> Result<Self, HubError> {
        match is_revision(revision) {
            true => Ok(Self { revision: Some(revision.to_owned()), ..self }),
            false => Err(HubError::Revision { revision: revision.to_owned() }),
        }
    }

    /// Quantization (`Q4_K_M`), folder or file of a GGUF repository.
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }

    /// Whether a text is an address, which may name no model, and no path.
    pub fn is_address(text: &str) -> bool {
        text.contains("://") || below_host(text, &settings::endpoint()).is_some()
    }

    /// Name of the repository's folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.organization, self.name)
    }

    /// The model of a folder in the cache.
    pub(crate) fn from_folder(folder: &str) -> Option<Self> {
        let (organization, name) = folder.strip_prefix("models--")?.split_once("--")?;
        Self::from_name(&format!("{organization}/{name}")).ok()
    }

    /// Reads a name, or an address on the Hub or on the server of `endpoint`.
    fn parse(text: &str, endpoint: &str) -> Result<Self, HubError> {
        let path = below_host(text, endpoint);
        let is_page = path.is_some() || text.matches('/').count() > 1;
        let first = path.unwrap_or(text).split('/').next().filter(|_| is_page);
        let kind = match first {
            Some("datasets") => Some("a data set"),
            Some("spaces") => Some("a space"),
            _ => None,
        };
        if let Some(kind) = kind {
            return Err(HubError::NotAModel { name: text.to_owned(), kind });
        }
        let read = path.map_or_else(|| Self::from_name(text), Self::from_page);
        read.map_err(|error| match error {
            HubError::ModelName { .. } => HubError::ModelName { name: text.to_owned() },
            other => other,
        })
    }

    /// Reads `ORG/NAME@REVISION:VARIANT`.
    fn from_name(text: &str) -> Result<Self, HubError> {
        let wrong = || HubError::ModelName { name: text.to_owned() };
        let (repository, mut rest) = text.split_at(text.find(['@', ':']).unwrap_or(text.len()));
        let (organization, name) = repository.split_once('/').ok_or_else(wrong)?;
        if !is_part(organization) || !is_part(name) {
            return Err(wrong());
        }
        let (organization, name) = (organization.to_owned(), name.to_owned());
        let mut model = Self { organization, name, revision: None, variant: None };
        while let Some(mark) = rest.chars().next() {
            let end = rest[1..].find(['@', ':']).map_or(rest.len(), |at| at + 1);
            let value = &rest[1..end];
            match mark {
                '@' if model.revision.is_none() => model = model.at(value)?,
                ':' if model.variant.is_none() && FilePath::new(value).is_ok() => {
                    model.variant = Some(value.to_owned());
                }
                _ => return Err(wrong()),
            }
            rest = &rest[end..];
        }
        Ok(model)
    }

    /// Reads the path of a page: `ORG/NAME`, perhaps with `tree/REVISION/FOLDER` or
    /// `blob/REVISION/FILE`.
    fn from_page(path: &str) -> Result<Self, HubError> {
        let wrong = || HubError::ModelName { name: path.to_owned() };
        let path = path.split(['?', '#']).next().unwrap_or(path).trim_end_matches('/');
        let mut parts = path.splitn(4, '/');
        let (organization, name) = (parts.next().unwrap_or(path), parts.next().unwrap_or_default());
        let (Some(view), false) = (parts.next(), name.contains(['@', ':'])) else {
            return Self::from_name(path);
        };
        if !["tree", "blob", "resolve", "raw"].contains(&view) {
            return Err(wrong());
        }
        let below = decoded(parts.next().unwrap_or_default()).ok_or_else(wrong)?;
        // Other references than branches and tags have slashes: refs/pr/1.
        let slashes = if below.starts_with("refs/") { 3 } else { 1 };
        let end = below.match_indices('/').nth(slashes - 1).map_or(below.len(), |(at, _)| at);
        let (revision, file) = below.split_at(end);
        let model = Self::from_name(&format!("{organization}/{name}"))?.at(revision)?;
        let Some(file) = file.strip_prefix('/') else { return Ok(model) };
        let is_gguf = file.to_ascii_lowercase().ends_with(".gguf");
        if FilePath::new(file).is_err() {
            return Err(wrong());
        }
        match view == "tree" || is_gguf {
            true => Ok(Self { variant: Some(file.to_owned()), ..model }),
            // Other files that a model needs stand for all of it.
            false if Selection::default().may_choose(file) => Ok(model),
            false => Err(wrong()),
        }
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.organization, self.name)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.variant.iter().try_for_each(|variant| write!(f, ":{variant}"))
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        Self::parse(text, &settings::endpoint())
    }
}

/// Path of an address on the Hub or on the server of `endpoint`, also without the scheme.
fn below_host<'a>(text: &'a str, endpoint: &str) -> Option<&'a str> {
    let rest = without_scheme(text);
    let mut hosts = HOSTS.into_iter().chain([without_scheme(endpoint)]);
    hosts.find_map(|host| strip_start(rest, host)?.strip_prefix('/'))
}

fn without_scheme(address: &str) -> &str {
    let mut schemes = ["https://", "http://"].iter();
    schemes.find_map(|scheme| strip_start(address, scheme)).unwrap_or(address)
}

/// A text without its start, whose letters may differ in case.
fn strip_start<'a>(text: &'a str, start: &str) -> Option<&'a str> {
    let (found, rest) = text.split_at_checked(start.len())?;
    found.eq_ignore_ascii_case(start).then_some(rest)
}

/// A text of an address without its percent encoding.
fn decoded(text: &str) -> Option<String> {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (hex, rest) = piece.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Whether this may be a branch, a tag or a commit. A reference's name is also a path in the cache.
fn is_revision(revision: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._/+".contains(c);
    revision.len() <= MAX_REVISION
        && revision.chars().all(is_plain)
        && FilePath::new(revision).is_ok()
}

/// Whether the Hub takes this as an organization or as a repository's name.
fn is_part(part: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_edge = |byte: Option<&u8>| byte.is_some_and(|&byte| byte != b'.' && byte != b'-');
    let bytes = part.as_bytes();
    bytes.len() <= MAX_PART
        && bytes.iter().all(|&byte| is_inner(byte))
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && !part.contains("--")
        && !part.contains("..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_organization_and_perhaps_a_variant() {
        let plain: ModelName = "Qwen/Qwen3-30B-A3B".parse().unwrap();
        assert_eq!(plain.folder(), "models--Qwen--Qwen3-30B-A3B");
        assert_eq!(ModelName::from_folder("models--Qwen--Qwen3-30B-A3B"), Some(plain.clone()));
        assert_eq!(plain.variant(), None);
        let variant: ModelName = "unsloth/GLM-4.6-GGUF:UD-Q2_K_XL".parse().unwrap();
        assert_eq!(variant.variant(), Some("UD-Q2_K_XL"));
        assert_eq!(variant.to_string(), "unsloth/GLM-4.6-GGUF:UD-Q2_K_XL");
        assert!("a/b:sub/c.gguf".parse::<ModelName>().is_ok());
        for name in ["a/b@v1.0", "a/b@refs/pr/1", "a/b@v1:Q8_0"] {
            assert_eq!(name.parse::<ModelName>().unwrap().to_string(), name);
        }
        let swapped: ModelName = "a/b:Q8_0@v1".parse().unwrap();
        assert_eq!((swapped.revision(), swapped.variant()), (Some("v1"), Some("Q8_0")));
    }

    #[test]
    fn addresses_of_pages_and_files_are_names() {
        for (address, name) in [
            ("https://huggingface.co/a/b", "a/b"),
            ("HTTPS://HuggingFace.co/a/b/", "a/b"),
            ("http://www.huggingface.co/a/b?library=vllm#usage", "a/b"),
            ("huggingface.co/a/b/tree/main", "a/b@main"),
            ("https://huggingface.co/a/b/tree/refs%2Fpr%2F1", "a/b@refs/pr/1"),
            ("https://huggingface.co/a/b/tree/refs/pr/1/x", "a/b@refs/pr/1:x"),
            ("https://huggingface.co/a/b/tree/v1/UD-Q2_K_XL", "a/b@v1:UD-Q2_K_XL"),
            ("https://huggingface.co/a/b/blob/v1/x/c%20d.GGUF", "a/b@v1:x/c d.GGUF"),
            ("https://huggingface.co/a/b/resolve/main/c.gguf?download=true", "a/b@main:c.gguf"),
            ("https://huggingface.co/a/b/resolve/main/model.safetensors", "a/b@main"),
            ("hf.co/a/b", "a/b"),
            ("hf.co/a/b:q4_k_m", "a/b:q4_k_m"),
            ("https://hf.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("hf.co/a/b@refs/pr/1", "a/b@refs/pr/1"),
            ("127.0.0.1:80/mirror/a/b/tree/v1", "a/b@v1"),
            ("http://127.0.0.1:80/mirror/a/b", "a/b"),
        ] {
            let parsed = ModelName::parse(address, "http://127.0.0.1:80/mirror");
            assert_eq!(parsed.unwrap().to_string(), name, "{address}");
        }
    }

    #[test]
    fn unclear_addresses_show_the_forms() {
        for wrong in [
            "https://huggingface.co",
            "https://huggingface.co/a",
            "https://huggingface.co/a/b/discussions/1",
            "https://huggingface.co/a/b/blob/main/README.md",
            "https://huggingface.co/a/b/blob/main/%2e%2e/c.gguf",
            "https://huggingface.co/a/b/blob/main/%zz.gguf",
            "https://huggingface.co.evil/a/b",
            "https://example.com/a/b",
            "hf.co/b",
        ] {
            let error = wrong.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")), "{error}");
            assert!(error.contains("ORG/NAME@REVISION"), "{error}");
        }
        for (other, kind) in [
            ("https://huggingface.co/datasets/a/b", "a data set"),
            ("datasets/a/b", "a data set"),
            ("hf.co/spaces/a/b", "a space"),
        ] {
            let error = other.parse::<ModelName>().unwrap_err().to_string();
            assert!(error.contains(kind) && error.contains(other), "{error}");
        }
        for revision in ["", "..", "../main", "a b", "a\0", "/x", "a?b"] {
            let error = format!("a/b@{revision}").parse::<ModelName>().unwrap_err();
            assert!(matches!(error, HubError::Revision { .. }), "{revision:?}");
        }
    }

    #[test]
    fn names_that_leave_the_cache_are_refused() {
        for wrong in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/.b",
            "a--b/c",
            "a/b--c",
            "a b/c",
            "a/b:",
            "a/b:Q4:Q8",
            "a/b@x@y",
            "a/b:../c",
            "a/b:c//d",
            "a\\b/c",
            "a/b\0",
            "~/x",
            "C:/x",
            "a/b:/c",
        ] {
            assert!(wrong.parse::<ModelName>().is_err(), "{wrong:?}");
        }
        assert!(format!("a/{}", "b".repeat(97)).parse::<ModelName>().is_err());
    }
}
