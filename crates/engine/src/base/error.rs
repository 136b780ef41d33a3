//! Error type of the crate: causes with file, tensor, layer or expert, and advice.

use std::{io, path::PathBuf};

/// Error of any call of this crate. Every message names the file, tensor, layer or expert, and the
/// remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Failure to open, read or write a file or folder.
    #[error("{}: {doing}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The failed operation, with advice: "cannot read the folder; is the path right?"
        doing: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Invalid contents of a checkpoint file.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// Missing tensor, or one of the wrong shape, type or location.
    #[error("{}: tensor {tensor}: {problem}", path.display())]
    Tensor {
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// The file, or the folder if no file has the tensor.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// Failed read of an expert from disk.
    #[error(
        "{}: layer {layer}, expert {expert}: reading {bytes} bytes at {offset}: {source}",
        path.display()
    )]
    Expert {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// The file.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Requested length in bytes.
        bytes: usize,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Digest mismatch of an expert in a packed model.
    #[error(
        "{}: layer {layer}, expert {expert}: the {bytes} bytes at {offset} differ from the packed \
         ones: the file or the disk is damaged; `moeflux pack --verify DIR` lists all damage, then \
         pack again, or copy the file again from an intact copy",
        path.display()
    )]
    Damaged {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// The file.
        path: PathBuf,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Length of the expert in bytes.
        bytes: usize,
    },
    /// Memory budget too small for the model.
    #[error("{0}")]
    Budget(String),
    /// Invalid options, prompt or token ids.
    #[error("{0}")]
    Input(String),
    /// Failure of the tokenizer or the chat template.
    #[error("{}: {problem}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// Invalid routing trace.
    #[error("{}: {problem}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// The problem and its remedy.
        problem: String,
    },
    /// Saved session that is invalid, or not usable with the open model.
    #[error("{}: {problem}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// The problem and its remedy.
        problem: SnapshotProblem,
    },
    /// Failure of a compute device.
    #[error("{at}: {source}")]
    Compute {
        /// The layer or part of the model.
        at: String,
        /// Error of the device.
        source: moeflux_compute::Error,
    },
    /// Cancelled step; the session is at its last good token.
    #[error("cancelled")]
    Cancelled,
}

/// Reason why a file is not usable as a saved session. The session is left unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotProblem {
    /// Another kind of file.
    #[error(
        "this is no saved session: give the path of a file that moeflux saved; the session is as \
         it was"
    )]
    NotASnapshot,
    /// Format version that this program does not read.
    #[error(
        "it has version {found}, this program reads {known}: use the version of moeflux that saved \
         it, or start a new session with --session and another file; the session is as it was"
    )]
    OtherVersion {
        /// Version of the file.
        found: u32,
        /// Version that this program reads.
        known: u32,
    },
    /// Shorter than its header claims.
    #[error(
        "the file is cut short: copy it again from an intact copy, or save the session again; the \
         session is as it was"
    )]
    Truncated,
    /// Digest mismatch, or contents that contradict each other.
    #[error(
        "it is damaged ({what}): copy it again from an intact copy, or save the session again; the \
         session is as it was"
    )]
    Damaged {
        /// The damaged part.
        what: String,
    },
    /// Saved with another model.
    #[error(
        "it was saved with another model, {of:?}: open that model to continue it; the session is \
         as it was"
    )]
    OtherModel {
        /// Folder name of that model.
        of: String,
    },
    /// Saved with other settings: KV cache format, exactness, context, device.
    #[error(
        "{0}: open the model with the settings that it was saved with; the session is as it was"
    )]
    OtherSettings(
        /// The setting, with its saved and its current value.
        String,
    ),
}

impl Error {
    /// Wraps a device error with its location, for `map_err`. `at` runs only on failure.
    pub(crate) fn at<S: Into<String>>(
        at: impl FnOnce() -> S,
    ) -> impl FnOnce(moeflux_compute::Error) -> Error {
        move |source| Error::Compute { at: at().into(), source }
    }

    /// Error about a saved session at `path`.
    pub(crate) fn snapshot(path: impl Into<PathBuf>, problem: SnapshotProblem) -> Self {
        Self::Snapshot { path: path.into(), problem }
    }

    /// Wraps an I/O error with its path and the failed operation, for `map_err`.
    pub(crate) fn file(
        path: impl Into<PathBuf>,
        doing: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Error {
        let (path, doing) = (path.into(), doing.into());
        move |source| Error::File { path, doing, source }
    }
}
