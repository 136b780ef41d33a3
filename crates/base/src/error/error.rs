//! The error of all operations.

use std::{io, path::PathBuf};

use super::{
    super::system::limit_reached,
    operations::{
        GrammarError, ImageError, OpenError, PlanError, SamplingError, SessionError, ToolError,
    },
    snapshot_problem::SnapshotProblem,
};
use crate::device_error::DeviceError;

/// Error of any call of this crate. Every message names the file, tensor, layer or expert, and the
/// remedy.
///
/// Causes that belong to one operation are in an enum for it. Other variants are causes of several
/// operations: files, devices, cancellation.
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
    /// Architecture that is not supported.
    #[error(
        "{}: the model_type {found:?} is not supported; supported are: {supported}",
        path.display()
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// The `model_type`.
        found: String,
        /// Names of all architectures.
        supported: String,
    },
    /// Options with which a model cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Budget below the floor, or sizes that no plan can have.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Tokens or sessions that a step or another call on a session cannot take.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Sampling parameters, stop strings or logits that cannot be sampled from.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Constraints of answers that cannot be compiled or followed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// Image that cannot be decoded, or that a model cannot take.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Options or folders that a tool cannot use.
    #[error(transparent)]
    Tool(#[from] ToolError),
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
        source: DeviceError,
    },
    /// Failure to start a thread.
    #[error("cannot start a thread {purpose}: {source}")]
    Thread {
        /// The thread's work: "that reads".
        purpose: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Contradiction inside the library, which no input should cause.
    #[error("{problem}")]
    Internal {
        /// The contradiction.
        problem: String,
    },
    /// Cancelled step; the session is at its last good token.
    #[error("cancelled")]
    Cancelled,
}

impl Error {
    /// Wraps a device error with its location, for `map_err`. `at` runs only on failure.
    #[doc(hidden)]
    pub fn at<S: Into<String>>(at: impl FnOnce() -> S) -> impl FnOnce(DeviceError) -> Error {
        move |source| Error::Compute { at: at().into(), source }
    }

    /// Contradiction inside the library.
    #[doc(hidden)]
    pub fn internal(problem: impl Into<String>) -> Self {
        Self::Internal { problem: problem.into() }
    }

    /// Wraps the error of starting a thread for `purpose`, for `map_err`.
    #[doc(hidden)]
    pub fn thread(purpose: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Thread { purpose, source }
    }

    /// Error about a saved session at `path`.
    #[doc(hidden)]
    pub fn snapshot(path: impl Into<PathBuf>, problem: SnapshotProblem) -> Self {
        Self::Snapshot { path: path.into(), problem }
    }

    /// Wraps an I/O error with its path and the failed operation, for `map_err`.
    #[doc(hidden)]
    pub fn file(
        path: impl Into<PathBuf>,
        doing: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Error {
        let (path, doing) = (path.into(), doing.into());
        move |source| {
            let doing = limit_reached(&source).unwrap_or(doing);
            Error::File { path, doing, source }
        }
    }
}
