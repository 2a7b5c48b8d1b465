//! Progress of a copy, and the reasons to compute an expert on the CPU.

/// Progress of an expert's copy, with the numbers of `enum llama_postfetch_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Not copied.
    CpuOnly = 0,
    /// Queued, or in the stream.
    CopyInFlight = 1,
    /// On the device.
    GpuReady = 2,
}

/// Reason to compute an expert on the CPU, with the numbers of `enum llama_postfetch_reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// No reason: use the device.
    None = 0,
    /// Post-fetch is disabled (`LLAMA_POSTFETCH_ENABLE=0`).
    Disabled = 1,
    /// The CPU is forced for all experts (`LLAMA_POSTFETCH_FORCE_CPU=1`).
    ForcedCpu = 2,
    /// No driver, no device, no memory for the scratchpad, or the device is unused after errors.
    NoDevice = 3,
    /// Not an expert of the model: the layer has no routed experts, or fewer.
    NotAnExpert = 4,
    /// Not scheduled, or released.
    NotScheduled = 5,
    /// The scratchpad is full.
    NoRoom = 6,
    /// The copy is not done, and waiting is disabled (`LLAMA_POSTFETCH_BLOCK_ON_MISS=0`).
    Missed = 7,
    /// The expert's bytes cannot be read from the model.
    ReadFailed = 8,
    /// The driver returned an error, or another stream uses the expert.
    DeviceFailed = 9,
    /// The copy took longer than the timeout.
    TimedOut = 10,
    /// Not in host memory: the tensor is on a device already.
    NotInHostMemory = 11,
}

/// All reasons in the order of their numbers, with their names in the statistics.
pub const REASONS: [(Reason, &str); 12] = [
    (Reason::None, "none"),
    (Reason::Disabled, "disabled"),
    (Reason::ForcedCpu, "forced"),
    (Reason::NoDevice, "no_device"),
    (Reason::NotAnExpert, "foreign"),
    (Reason::NotScheduled, "not_scheduled"),
    (Reason::NoRoom, "no_room"),
    (Reason::Missed, "missed"),
    (Reason::ReadFailed, "read_failed"),
    (Reason::DeviceFailed, "device_failed"),
    (Reason::TimedOut, "timed_out"),
    (Reason::NotInHostMemory, "elsewhere"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_in_the_order_of_their_numbers() {
        for (number, (reason, _)) in REASONS.into_iter().enumerate() {
            assert_eq!(reason as usize, number);
        }
    }
}
