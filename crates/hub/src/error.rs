//! Errors of downloads and of the cache.

use std::{io, path::PathBuf};

/// Why a model cannot be downloaded, found or removed. Messages say what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name of a model has another form.
    #[error(
        "{name:?} is not the name of a model: write ORG/NAME, ORG/NAME:Q4_K_M for GGUF, \
         ORG/NAME@REVISION, or the address of its page, https://huggingface.co/ORG/NAME"
    )]
    ModelName {
        /// The name.
        name: String,
    },
    /// Name of another kind of repository.
    #[error("{name:?} is {kind}, not a model")]
    NotAModel {
        /// The name.
        name: String,
        /// The other kind.
        kind: &'static str,
    },
    /// A server names a file that could leave the cache.
    #[error("the server names a file {path:?}, which is not a path within a repository")]
    FilePath {
        /// The path.
        path: String,
    },
    /// A revision is no branch, tag or commit.
    #[error("{revision:?} is not the name of a branch, a tag or a commit")]
    Revision {
        /// The revision.
        revision: String,
    },
    /// An environment variable has a value that cannot be used.
    #[error("{variable} is {value:?}: {problem}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Problem.
        problem: &'static str,
    },
    /// The processor lacks what the implementation of TLS needs.
    #[error(
        "this processor lacks instructions that encrypted connections need ({needs}): download the \
         model with `hf download {repository}`, then the same name works here"
    )]
    NoTls {
        /// The instructions.
        needs: &'static str,
        /// `ORG/NAME`.
        repository: String,
    },
    /// The same, where images are fetched.
    #[error(
        "this processor lacks instructions that encrypted connections need ({needs}): no images \
         can be fetched by address"
    )]
    NoTlsForImages {
        /// The instructions.
        needs: &'static str,
    },
    /// `HF_HUB_OFFLINE` is set.
    #[error(
        "HF_HUB_OFFLINE is set, so the server is not asked for {repository}: unset it, or set it \
         to 0"
    )]
    Offline {
        /// `ORG/NAME`.
        repository: String,
    },
    /// No folder for the cache is known.
    #[error("no folder for downloads is known: set HF_HOME")]
    NoCache,
    /// The server does not know the model or the revision.
    #[error("{url}: there is no such model or revision; private models need HF_TOKEN ({status})")]
    NotFound {
        /// The address.
        url: String,
        /// Status line's code.
        status: u16,
    },
    /// The server wants another token, or none.
    #[error("{url}: access is denied ({status}): {advice}")]
    Denied {
        /// The address.
        url: String,
        /// Status line's code.
        status: u16,
        /// Remedy.
        advice: &'static str,
    },
    /// The server answers with a status that does not help.
    #[error("{url}: the server answers with status {status}{tries}{}", advice(*status))]
    Status {
        /// The address.
        url: String,
        /// Status line's code.
        status: u16,
        /// How often it was tried, if more than once.
        tries: String,
    },
    /// The connection fails.
    #[error("{url}: {problem}{tries}; run the command again to resume")]
    Connection {
        /// The address.
        url: String,
        /// Cause.
        problem: String,
        /// How often it was tried, if more than once.
        tries: String,
    },
    /// A proxy does not answer, or lets nothing through.
    #[error(
        "{url}: the proxy {proxy} {problem}{tries}: correct the variable, or name the server's host \
         in NO_PROXY"
    )]
    Proxy {
        /// The address.
        url: String,
        /// Host and port of the proxy, and the variable that names it.
        proxy: String,
        /// Problem.
        problem: String,
        /// How often it was tried, if more than once.
        tries: String,
    },
    /// Another program answers in the server's place.
    #[error(
        "expected {expected} from {url}, got {found}: a captive portal or a proxy may have \
         answered; open a page in a browser to log in, or correct HF_ENDPOINT"
    )]
    Portal {
        /// The address.
        url: String,
        /// Kind of the answer that was expected.
        expected: &'static str,
        /// The answer.
        found: String,
    },
    /// The server's answer has another form than the API's.
    #[error("{url}: {problem}")]
    Answer {
        /// The address.
        url: String,
        /// Problem.
        problem: String,
    },
    /// A file changed on the server.
    #[error(
        "{file} changed on the server during the download ({problem}): run the command again; \
         complete files are kept"
    )]
    Changed {
        /// The file.
        file: String,
        /// How it shows.
        problem: String,
    },
    /// A file's digest is not that of the server's list.
    #[error(
        "{file}: the downloaded bytes have the {kind} {found}, the server says {wanted}; they are \
         deleted: run the command again to download this file anew"
    )]
    Digest {
        /// The file.
        file: String,
        /// `SHA-256` or `git hash`.
        kind: &'static str,
        /// Digest of what arrived.
        found: String,
        /// Digest in the server's list.
        wanted: String,
    },
    /// A file's bytes differ from the bytes that were read while another process downloaded it.
    #[error(
        "{file}: the complete file differs from bytes that were read while another process \
         downloaded it: run the command again"
    )]
    OtherBytes {
        /// The file.
        file: String,
    },
    /// The disk has too little room.
    #[error("{folder}: {needed} bytes are needed and {free} are free; set HF_HOME to another disk")]
    NoRoom {
        /// The cache.
        folder: PathBuf,
        /// Bytes to download.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// No file of the repository was chosen.
    #[error("{repository} has no file for {wanted}; it has: {available}")]
    NothingSelected {
        /// `ORG/NAME`.
        repository: String,
        /// Variant or patterns.
        wanted: String,
        /// Files or variants of the repository.
        available: String,
    },
    /// A model is not in the cache.
    #[error("{name} is not in {folder}; `moeflux list` shows what is")]
    NotCached {
        /// The model.
        name: String,
        /// The cache.
        folder: PathBuf,
    },
    /// A file or folder of the cache fails.
    #[error("{path}: {doing} failed: {source}")]
    File {
        /// The path.
        path: PathBuf,
        /// The operation.
        doing: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The download was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Remedy for a status, after the message.
fn advice(status: u16) -> &'static str {
    match status {
        429 => ": too many requests; wait some minutes, or set HF_TOKEN for higher limits",
        _ => "",
    }
}

impl HubError {
    /// Wraps an error of the file system.
    pub(crate) fn file(
        path: impl Into<PathBuf>,
        doing: &'static str,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { path, doing, source }
    }

    /// The error with the number of tries in its message.
    pub(crate) fn with_tries(mut self, number: String) -> Self {
        if let Self::Connection { tries, .. }
        | Self::Status { tries, .. }
        | Self::Proxy { tries, .. } = &mut self
        {
            *tries = number;
        }
        self
    }

    /// The address and the reason of a wait, if another try may help.
    pub(crate) fn wait(&self) -> Option<(&str, String)> {
        match self {
            Self::Status { url, status: 429, .. } => Some((url, "too many requests".into())),
            Self::Status { url, status, .. } => Some((url, format!("status {status}"))),
            Self::Connection { url, problem, .. } => Some((url, problem.clone())),
            Self::Proxy { url, proxy, problem, .. } => {
                Some((url, format!("the proxy {proxy} {problem}")))
            }
            _ => None,
        }
    }
}
