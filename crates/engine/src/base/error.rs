use std::{io, path::PathBuf};

/// What can go wrong. Every message names the file, tensor, layer or expert, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder that cannot be opened, read or written.
    #[error("{}: {doing}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, with advice: "cannot read the folder; is the path right?"
        doing: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of a checkpoint whose contents are not what they must be.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A tensor that is missing, or not of the shape, type or place that it must have.
    #[error("{}: tensor {tensor}: {problem}", path.display())]
    Tensor {
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// The shard, or the folder when no shard has it.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// An expert that could not be read from disk.
    #[error("{}: layer {layer}, expert {expert}: reading {bytes} bytes at {offset}: {source}", path.display())]
    Expert {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How much was wanted.
        bytes: usize,
        /// The system's reason.
        source: io::Error,
    },
    /// An expert of a packed model whose bytes are not those that were packed.
    #[error(
        "{}: layer {layer}, expert {expert}: the {bytes} bytes at {offset} are not those that were packed: the file or \
         the disk is damaged; `moeflux pack --verify DIR` lists all that is, then pack again, or copy the file again \
         from where it is whole",
        path.display()
    )]
    Damaged {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
        /// The file.
        path: PathBuf,
        /// Where in the file.
        offset: u64,
        /// How long the expert is.
        bytes: usize,
    },
    /// The budget does not hold what the model needs.
    #[error("{0}")]
    Budget(String),
    /// Options, prompts or token ids that cannot be used as given.
    #[error("{0}")]
    Input(String),
    /// The tokenizer or the chat template failed.
    #[error("{}: {problem}", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A file that should be a routing trace.
    #[error("{}: {problem}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A file that should be a saved session, for this model as it is open now.
    #[error("{}: {problem}", path.display())]
    Snapshot {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: SnapshotProblem,
    },
    /// A device failed.
    #[error("{at}: {source}")]
    Compute {
        /// The layer or part of the model.
        at: String,
        /// The device's reason.
        source: moeflux_compute::Error,
    },
    /// The step was cancelled; the session is at its last good token.
    #[error("cancelled")]
    Cancelled,
}

/// Why a file cannot be used as a saved session. Sessions stay as they were.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotProblem {
    /// Another kind of file.
    #[error(
        "this is no saved session: give the path of a file that moeflux saved; the session is as it was"
    )]
    NotASnapshot,
    /// Written by a later version of moeflux.
    #[error(
        "it is of version {found}, this program reads {known}: use the version of moeflux that saved it; the session is \
         as it was"
    )]
    FutureVersion {
        /// The file's version.
        found: u32,
        /// The last version that this program reads.
        known: u32,
    },
    /// Shorter than it says.
    #[error(
        "the file is cut short: copy it again from where it is whole, or save the session anew; the session is as it was"
    )]
    Truncated,
    /// Its bytes are not those that were written, or contradict each other.
    #[error(
        "it is damaged ({what}): copy it again from where it is whole, or save the session anew; the session is as it \
         was"
    )]
    Damaged {
        /// Which part.
        what: String,
    },
    /// Saved with another model.
    #[error(
        "it was saved with another model, {of:?}: open that model to go on with it; the session is as it was"
    )]
    OtherModel {
        /// The name of that model's folder.
        of: String,
    },
    /// Saved with other settings: format of keys and values, exactness, context, device.
    #[error(
        "{0}: open the model with the settings that it was saved with; the session is as it was"
    )]
    OtherSettings(
        /// Which setting, as it was saved and as it is now.
        String,
    ),
}

impl Error {
    /// For `map_err`: puts the place before a device's error. The place is only spelled out on failure.
    pub(crate) fn at<S: Into<String>>(
        at: impl FnOnce() -> S,
    ) -> impl FnOnce(moeflux_compute::Error) -> Error {
        move |source| Error::Compute { at: at().into(), source }
    }

    /// What is wrong with a saved session.
    pub(crate) fn snapshot(path: impl Into<PathBuf>, problem: SnapshotProblem) -> Self {
        Self::Snapshot { path: path.into(), problem }
    }

    /// For `map_err`: puts the path and the attempt before a system error.
    pub(crate) fn file(
        path: impl Into<PathBuf>,
        doing: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Error {
        let (path, doing) = (path.into(), doing.into());
        move |source| Error::File { path, doing, source }
    }
}
