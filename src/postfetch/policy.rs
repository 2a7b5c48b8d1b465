//! The choice between device and CPU, and its reasons.

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

impl Reason {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Reason; 12] = [
        Reason::None,
        Reason::Disabled,
        Reason::ForcedCpu,
        Reason::NoDevice,
        Reason::NotAnExpert,
        Reason::NotScheduled,
        Reason::NoRoom,
        Reason::Missed,
        Reason::ReadFailed,
        Reason::DeviceFailed,
        Reason::TimedOut,
        Reason::NotInHostMemory,
    ];

    /// Returns the name in the statistics.
    pub fn name(self) -> &'static str {
        match self {
            Reason::None => "none",
            Reason::Disabled => "disabled",
            Reason::ForcedCpu => "forced",
            Reason::NoDevice => "no_device",
            Reason::NotAnExpert => "foreign",
            Reason::NotScheduled => "not_scheduled",
            Reason::NoRoom => "no_room",
            Reason::Missed => "missed",
            Reason::ReadFailed => "read_failed",
            Reason::DeviceFailed => "device_failed",
            Reason::TimedOut => "timed_out",
            Reason::NotInHostMemory => "elsewhere",
        }
    }
}

/// What to do with an expert that is about to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    UseDevice,
    Wait,
    UseCpu,
}

/// Chooses what to do. Using the device is always optional; the CPU is the fallback.
pub(super) fn action(state: State, block_on_miss: bool) -> Action {
    match state {
        State::GpuReady => Action::UseDevice,
        State::CopyInFlight if block_on_miss => Action::Wait,
        State::CopyInFlight | State::CpuOnly => Action::UseCpu,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_action() {
        use State::*;
        for (state, block, expected) in [
            (CpuOnly, true, Action::UseCpu),
            (CpuOnly, false, Action::UseCpu),
            (CopyInFlight, true, Action::Wait),
            (CopyInFlight, false, Action::UseCpu),
            (GpuReady, true, Action::UseDevice),
            (GpuReady, false, Action::UseDevice),
        ] {
            assert_eq!(action(state, block), expected, "{state:?} {block}");
        }
    }

    #[test]
    fn reasons_are_in_the_order_of_their_numbers() {
        for (number, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, number);
        }
    }
}
