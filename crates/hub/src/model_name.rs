//! Names of models on the Hub.

use std::{fmt, str::FromStr};

use crate::error::HubError;

/// Bytes of a part of a name, at most: the Hub's limit.
const MAX_PART: usize = 96;

/// Model on the Hub: `ORG/NAME`, or `ORG/NAME:VARIANT` for one of several GGUF files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ModelName {
    organization: String,
    name: String,
    variant: Option<String>,
}

impl ModelName {
    /// `ORG/NAME`, as in the Hub's addresses.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    /// Quantization (`Q4_K_M`) or file of a GGUF repository.
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }

    /// Name of the repository's folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.organization, self.name)
    }

    /// The model of a folder in the cache.
    pub(crate) fn from_folder(folder: &str) -> Option<Self> {
        let (organization, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{organization}/{name}").parse().ok()
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.organization, self.name)?;
        self.variant.iter().try_for_each(|variant| write!(f, ":{variant}"))
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = || HubError::ModelName { name: text.to_owned() };
        let (repository, variant) = match text.split_once(':') {
            Some((repository, variant)) => (repository, Some(variant)),
            None => (text, None),
        };
        let (organization, name) = repository.split_once('/').ok_or_else(wrong)?;
        if !is_part(organization) || !is_part(name) {
            return Err(wrong());
        }
        let is_variant = |variant: &str| {
            !variant.is_empty() && variant.split('/').all(is_part) && !variant.contains("..")
        };
        if variant.is_some_and(|variant| !is_variant(variant)) {
            return Err(wrong());
        }
        Ok(Self {
            organization: organization.into(),
            name: name.into(),
            variant: variant.map(Into::into),
        })
    }
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
    }

    #[test]
    fn names_that_leave_the_cache_are_refused() {
        for wrong in [
            "", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/.b", "a--b/c", "a/b--c", "a b/c",
            "a/b:", "a/b:../c", "a/b:c//d", "a\\b/c", "a/b\0", "~/x", "C:/x", "a/b:/c",
        ] {
            assert!(wrong.parse::<ModelName>().is_err(), "{wrong:?}");
        }
        assert!(format!("a/{}", "b".repeat(97)).parse::<ModelName>().is_err());
    }
}
