//! Ends of the parts of a step, and the values of the semaphores between them.

/// Direction in which card or host waits between two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartEndKind {
    /// The card tells the host that it has its inputs.
    Signal,
    /// The card waits for the host.
    Wait,
}

/// End of a part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartEnd {
    /// Number of dispatches before it.
    pub(crate) dispatches: usize,
    pub(crate) kind: PartEndKind,
}

/// Values of both semaphores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimelineValues {
    /// Last value that submitted commands signal.
    pub(crate) card: u64,
    /// Last value that submitted commands wait for.
    pub(crate) host: u64,
}
