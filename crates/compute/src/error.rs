/// What can go wrong while computing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, format or window that cannot be.
    #[error("{0}")]
    Shape(String),
    /// The system gave no memory.
    #[error("no memory for {bytes} bytes")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// The system's reason.
        source: std::io::Error,
    },
    /// States hold as much as they may.
    #[error("the states of all sessions hold {held} bytes of {limit}, and {bytes} more are needed")]
    StatesFull {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes held.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// A router produced a NaN: the weights or the activations before it are broken.
    #[error("NaN among the router's logits of row {row}")]
    RouterNan {
        /// The row of the op.
        row: usize,
    },
    /// The model produced a NaN: its weights or the activations before them are broken.
    #[error("NaN among the logits of row {row}; the model's weights may be damaged")]
    LogitsNan {
        /// The row of the op.
        row: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        id: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// There is no device, instruction set or thread as asked for.
    #[error("{0}")]
    Device(String),
}
