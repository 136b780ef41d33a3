//! Settings that the Hub's tools share: endpoint, token, cache folder.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
};

use crate::{error::HubError, proxies::Proxies};

/// The Hub.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Values of a variable that is set.
const TRUE: [&str; 4] = ["1", "ON", "YES", "TRUE"];

/// Server, token and cache folder.
#[derive(Clone)]
pub struct Settings {
    /// Address of the server, without a slash at its end.
    pub endpoint: String,
    /// Token of the user, sent to the server alone.
    pub token: Option<String>,
    /// Cache folder: `hub` in `HF_HOME`.
    pub cache: PathBuf,
    /// Whether no server is asked.
    pub offline: bool,
    /// Proxies between here and the servers.
    pub proxies: Proxies,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = self.token.as_ref().map(|_| "…");
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("token", &token)
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Settings by the environment variables of `huggingface_hub`: `HF_ENDPOINT`, `HF_TOKEN` or the
    /// token that `hf auth login` has saved, `HF_HUB_CACHE`, `HF_HOME`, `HF_HUB_OFFLINE`; and of
    /// proxies by the variables of other programs.
    ///
    /// # Errors
    /// A variable has a value that cannot be used, or no cache folder is known.
    pub fn from_environment() -> Result<Self, HubError> {
        let endpoint = endpoint();
        if !["http://", "https://"].iter().any(|scheme| endpoint.starts_with(scheme)) {
            let problem = "an address begins with http:// or https://";
            return Err(HubError::Setting { variable: "HF_ENDPOINT", value: endpoint, problem });
        }
        let home = folder("HF_HOME").or_else(default_home);
        let cache = folder("HF_HUB_CACHE").or_else(|| folder("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub")));
        Ok(Self {
            endpoint,
            token: token(home.as_deref())?,
            cache: cache.ok_or(HubError::NoCache)?,
            offline: ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().any(is_true),
            proxies: Proxies::new(text),
        })
    }
}

/// Address of the server, without a slash at its end.
pub(crate) fn endpoint() -> String {
    let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into());
    endpoint.trim_end_matches('/').to_owned()
}

/// A variable's text, unless it is empty.
fn text(variable: &str) -> Option<String> {
    env::var(variable).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

fn is_true(variable: &str) -> bool {
    text(variable).is_some_and(|value| TRUE.contains(&value.to_ascii_uppercase().as_str()))
}

/// A variable's folder, with the home folder for `~`.
fn folder(variable: &str) -> Option<PathBuf> {
    let path = PathBuf::from(env::var_os(variable).filter(|value| !value.is_empty())?);
    match (path.strip_prefix("~"), env::home_dir()) {
        (Ok(below), Some(home)) => Some(home.join(below)),
        _ => Some(path),
    }
}

/// `HF_HOME`, where it is not set.
fn default_home() -> Option<PathBuf> {
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(env::home_dir()?.join(".cache")));
    Some(cache?.join("huggingface"))
}

/// The token of the variable, or of the file that `hf auth login` writes.
fn token(home: Option<&Path>) -> Result<Option<String>, HubError> {
    let saved = || {
        let path = folder("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")))?;
        let token = fs::read_to_string(path).ok()?.trim().to_owned();
        Some(token).filter(|token| !token.is_empty())
    };
    let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(saved);
    match token {
        Some(token) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
            let problem = "a token has letters, digits and underscores only";
            Err(HubError::Setting { variable: "HF_TOKEN", value: "…".into(), problem })
        }
        token => Ok(token),
    }
}
