//! Progress and identity of a transfer.

/// Progress of a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not in use.
    #[default]
    Free,
    /// Waits for the fetching thread.
    Queued,
    /// The fetching thread issues the copy.
    Issuing,
    /// In the stream.
    InFlight,
    /// Done, or there was nothing to copy.
    Ready,
    /// Failed; the device may read the source until the stream is past the copy.
    Stuck,
}

/// One use of a transfer. A later use of the same transfer has another id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TransferId {
    /// Position of the transfer and of its events.
    pub index: usize,
    /// Differs each time the transfer is used.
    pub number: u64,
}
