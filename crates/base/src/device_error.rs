//! Errors of devices and ops.

/// An error of a device or an op.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A shape, format or view is invalid.
    #[error("{0}")]
    Shape(String),
    /// The system refused an allocation.
    #[error("no memory for {bytes} bytes")]
    Memory {
        /// Bytes requested.
        bytes: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The states have reached their memory limit.
    #[error("the states of all sessions hold {held} bytes of {limit}, and {bytes} more are needed")]
    StatesFull {
        /// Bytes requested.
        bytes: u64,
        /// Bytes held.
        held: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// A router produced a NaN: its weights, or the activations before it, are damaged.
    #[error("NaN among the router's logits of row {row}")]
    RouterNan {
        /// Row of the op.
        row: usize,
    },
    /// The model produced a NaN: its weights, or the activations before them, are damaged.
    #[error("NaN or infinity among the logits of row {row}; the model's weights may be damaged")]
    LogitsNan {
        /// Row of the op.
        row: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        id: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// A handle was given to a device that did not make it.
    #[error("a {kind} handle of another device: a device takes only handles that it has made")]
    ForeignHandle {
        /// Kind of the object: buffer, weight, state, slot or slot table.
        kind: &'static str,
    },
    /// The requested device, instruction set, thread count or handle is not available.
    #[error("{0}")]
    Device(String),
    /// There is no such device, or this build lacks it.
    #[error("{0}")]
    Missing(String),
}
