//! Device or CPU: the rule, and what there is to say about an answer.

/// Where the copy of an expert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There is none.
    CpuOnly,
    /// Queued or under way.
    CopyInFlight,
    /// On the device.
    GpuReady,
}

/// Why an answer is "compute on the CPU".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Reason {
    /// It is not: use the device.
    None = 0,
    /// `LLAMA_POSTFETCH_ENABLE=0`.
    Disabled = 1,
    /// `LLAMA_POSTFETCH_FORCE_CPU=1`.
    Forced = 2,
    /// No driver, no device, no memory for the scratchpad, or given up after errors.
    NoDevice = 3,
    /// No down-projection of the model: another tensor, or an expert that it has not.
    Foreign = 4,
    /// Nobody scheduled it.
    NotScheduled = 5,
    /// The scratchpad was full.
    NoRoom = 6,
    /// Still under way, and `LLAMA_POSTFETCH_BLOCK_ON_MISS=0`.
    Missed = 7,
    /// Its bytes could not be read.
    ReadFailed = 8,
    /// The driver refused something.
    DeviceFailed = 9,
    /// The copy did not end in time.
    TimedOut = 10,
    /// It is not in host memory: there is nothing to fetch.
    Elsewhere = 11,
}

impl Reason {
    /// All of them, by their numbers.
    pub const ALL: [Reason; 12] = [
        Reason::None,
        Reason::Disabled,
        Reason::Forced,
        Reason::NoDevice,
        Reason::Foreign,
        Reason::NotScheduled,
        Reason::NoRoom,
        Reason::Missed,
        Reason::ReadFailed,
        Reason::DeviceFailed,
        Reason::TimedOut,
        Reason::Elsewhere,
    ];

    /// For statistics.
    pub fn name(self) -> &'static str {
        match self {
            Reason::None => "none",
            Reason::Disabled => "disabled",
            Reason::Forced => "forced",
            Reason::NoDevice => "no_device",
            Reason::Foreign => "foreign",
            Reason::NotScheduled => "not_scheduled",
            Reason::NoRoom => "no_room",
            Reason::Missed => "missed",
            Reason::ReadFailed => "read_failed",
            Reason::DeviceFailed => "device_failed",
            Reason::TimedOut => "timed_out",
            Reason::Elsewhere => "elsewhere",
        }
    }
}

/// What to do about an expert that is about to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    UseDevice,
    Wait,
    UseCpu,
}

/// The rule of the seed: the device never has to be used.
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
    fn the_whole_table() {
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
