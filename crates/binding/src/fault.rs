//! Errors of all calls, with their kinds.

use std::{path::PathBuf, sync::Arc};

use moeflux::{
    Error,
    base::{DeviceError, PlanError, SessionError, SnapshotProblem, guarded},
    serve::Rejected,
};
use moeflux_hub::HubError;

/// Error of a call.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Error of the library.
    #[error(transparent)]
    Engine(Arc<Error>),
    /// Error of the Hub.
    #[error(transparent)]
    Hub(Arc<HubError>),
    /// Argument that no call takes.
    #[error("{0}")]
    Invalid(String),
    /// Session in a call of another thread.
    #[error("the session is in use: a session takes one call at a time")]
    SessionBusy,
    /// Request that the serving core did not take.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// Model that was closed.
    #[error("the model was closed: open it again")]
    Closed,
    /// Call in a process that was forked after the model was opened.
    #[error(
        "this process was forked after the model was opened, and has none of its threads: open the \
         model in the child, or start workers by \"spawn\""
    )]
    Forked,
    /// Call that its caller interrupted.
    #[error("interrupted")]
    Interrupted,
}

/// Result of `run`; a panic is an error.
///
/// # Errors
/// As `run`.
pub(crate) fn unless_panics<T>(run: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    let failed = |panic| Err(Error::internal(format!("it failed by a panic: {panic}")).into());
    guarded(run).unwrap_or_else(failed)
}

/// Options of the command line that errors of the library advise, and their names in programs.
const OPTION_NAMES: [(&str, &str); 7] = [
    ("--ctx", "context"),
    ("--gpu-memory", "device_memory"),
    ("--memory", "memory"),
    ("--chunk", "chunk"),
    ("--device", "device"),
    ("--exact", "exact"),
    ("--threads", "threads"),
];

/// Kinds of errors. Their names are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[non_exhaustive]
pub enum Kind {
    /// Argument of a call.
    Invalid = 1,
    /// File that cannot be opened, read or written.
    File = 2,
    /// Contents of a checkpoint, a tensor, a tokenizer or a chat template.
    Checkpoint = 3,
    /// Architecture, format or device that this build lacks.
    Unsupported = 4,
    /// Budget below the floor, or sizes that no plan has.
    Memory = 5,
    /// More tokens than the context, tokens outside the vocabulary, more sessions than planned.
    Context = 6,
    /// Saved session that is damaged, or of another model.
    Snapshot = 7,
    /// Schema, regular expression or grammar that cannot be followed.
    Grammar = 8,
    /// Expert that could not be read.
    Read = 9,
    /// Device that failed.
    Device = 10,
    /// Cancelled call.
    Cancelled = 11,
    /// Session in use, or too many requests that wait.
    Busy = 12,
    /// Closed model.
    Closed = 13,
    /// Forked process.
    Forked = 14,
    /// Fault of moeflux.
    Internal = 15,
    /// Sampling parameters or stop strings.
    Sampling = 16,
    /// The Hub.
    Hub = 17,
}

/// Parts of an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultDetails {
    /// The file.
    pub path: Option<PathBuf>,
    /// Number of the operating system's error.
    pub errno: Option<i32>,
    /// The tensor.
    pub tensor: Option<String>,
    /// Smallest budget in bytes.
    pub floor: Option<u64>,
    /// Layer and number of an expert.
    pub expert: Option<(usize, usize)>,
    /// Problem of a saved session: `not_a_snapshot`.
    pub reason: Option<&'static str>,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 17] = [
        Self::Invalid,
        Self::File,
        Self::Checkpoint,
        Self::Unsupported,
        Self::Memory,
        Self::Context,
        Self::Snapshot,
        Self::Grammar,
        Self::Read,
        Self::Device,
        Self::Cancelled,
        Self::Busy,
        Self::Closed,
        Self::Forked,
        Self::Internal,
        Self::Sampling,
        Self::Hub,
    ];

    /// Its name: `memory`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::File => "file",
            Self::Checkpoint => "checkpoint",
            Self::Unsupported => "unsupported",
            Self::Memory => "memory",
            Self::Context => "context",
            Self::Snapshot => "snapshot",
            Self::Grammar => "grammar",
            Self::Read => "read",
            Self::Device => "device",
            Self::Cancelled => "cancelled",
            Self::Busy => "busy",
            Self::Closed => "closed",
            Self::Forked => "forked",
            Self::Internal => "internal",
            Self::Sampling => "sampling",
            Self::Hub => "hub",
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Engine(Arc::new(error))
    }
}

impl From<HubError> for Fault {
    fn from(error: HubError) -> Self {
        Self::Hub(Arc::new(error))
    }
}

impl Fault {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Engine(error) => kind_of(error),
            Self::Hub(_) => Kind::Hub,
            Self::Invalid(_) => Kind::Invalid,
            Self::SessionBusy | Self::Rejected(Rejected::Busy { .. }) => Kind::Busy,
            Self::Closed | Self::Rejected(_) => Kind::Closed,
            Self::Forked => Kind::Forked,
            Self::Interrupted => Kind::Cancelled,
        }
    }

    /// Its text for a program, with options by their names in [`crate::OpenOptions`].
    pub fn message(&self) -> String {
        let named = |text: String, (option, name): &(&str, &str)| text.replace(option, name);
        OPTION_NAMES.iter().fold(self.to_string(), named)
    }

    /// Its parts.
    pub fn details(&self) -> FaultDetails {
        let mut details = FaultDetails::default();
        let Self::Engine(error) = self else { return details };
        match &**error {
            Error::File { path, source, .. } => {
                details.path = Some(path.clone());
                details.errno = source.raw_os_error();
            }
            Error::Checkpoint { path, .. }
            | Error::Text { path, .. }
            | Error::Architecture { path, .. } => {
                details.path = Some(path.clone());
            }
            Error::Tensor { path, tensor, .. } => {
                details.path = Some(path.clone());
                details.tensor = Some(tensor.clone());
            }
            Error::Plan(PlanError::BelowFloor { floor, .. }) => details.floor = Some(*floor),
            Error::Expert { layer, expert, path, source, .. } => {
                details.path = Some(path.clone());
                details.errno = source.raw_os_error();
                details.expert = Some((*layer, *expert));
            }
            Error::Damaged { layer, expert, path, .. } => {
                details.path = Some(path.clone());
                details.expert = Some((*layer, *expert));
            }
            Error::Snapshot { path, problem } => {
                details.path = Some(path.clone());
                details.reason = Some(reason_of(problem));
            }
            _ => {}
        }
        details
    }
}

fn kind_of(error: &Error) -> Kind {
    match error {
        Error::File { .. } => Kind::File,
        Error::Checkpoint { .. } | Error::Tensor { .. } | Error::Text { .. } => Kind::Checkpoint,
        Error::Expert { .. } | Error::Damaged { .. } => Kind::Read,
        Error::Plan(PlanError::ContextTooLong { .. }) => Kind::Context,
        Error::Plan(_) => Kind::Memory,
        Error::Session(
            SessionError::WiderKvFormat { .. }
            | SessionError::Arriving
            | SessionError::NoTokens
            | SessionError::TruncatedToMore { .. }
            | SessionError::OtherEngineInStep
            | SessionError::OtherEngineInBatch
            | SessionError::OtherEngineOfMark
            | SessionError::NoImages
            | SessionError::WrongImage { .. },
        ) => Kind::Invalid,
        Error::Session(_) => Kind::Context,
        Error::Sampling(_) => Kind::Sampling,
        Error::Grammar(_) => Kind::Grammar,
        Error::Snapshot { .. } => Kind::Snapshot,
        Error::Architecture { .. } | Error::Compute { source: DeviceError::Missing(_), .. } => {
            Kind::Unsupported
        }
        Error::Compute { .. } => Kind::Device,
        Error::Cancelled => Kind::Cancelled,
        Error::Open(_) | Error::Image(_) | Error::Tool(_) | Error::Trace { .. } => Kind::Invalid,
        _ => Kind::Internal,
    }
}

fn reason_of(problem: &SnapshotProblem) -> &'static str {
    match problem {
        SnapshotProblem::OtherVersion { .. } => "other_version",
        SnapshotProblem::Truncated => "truncated",
        SnapshotProblem::Damaged { .. } => "damaged",
        SnapshotProblem::OtherModel { .. } => "other_model",
        SnapshotProblem::OtherSettings(_) => "other_settings",
        _ => "not_a_snapshot",
    }
}
