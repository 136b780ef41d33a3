//! Reasons to refuse a file as a saved session.

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
    /// A folder, where a session is to be saved.
    #[error("this is a folder; give the name of a file in it")]
    IsFolder,
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
