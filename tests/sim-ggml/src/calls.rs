//! Calls of the host, by name: how often they came, and which of them fail or have no effect.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! calls {
    ($($call:ident = $name:literal,)*) => {
        /// A function that the host calls.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Call {
            $(#[doc = $name] $call,)*
        }

        impl Call {
            /// All of them, in the order of their numbers.
            pub const ALL: &[Call] = &[$(Call::$call,)*];

            /// Returns the name for variables and the report.
            pub fn name(self) -> &'static str {
                match self {
                    $(Call::$call => $name,)*
                }
            }
        }
    };
}

calls! {
    InitDevice = "init_device",
    AllocBuffer = "alloc_buffer",
    AllocHostBuffer = "alloc_host_buffer",
    FreeBuffer = "free_buffer",
    RegisterHostBuffer = "register_host_buffer",
    UnregisterHostBuffer = "unregister_host_buffer",
    SetTensor = "set_tensor",
    GetTensor = "get_tensor",
    MemsetTensor = "memset_tensor",
    ClearBuffer = "clear_buffer",
    SetTensorAsync = "set_tensor_async",
    GetTensorAsync = "get_tensor_async",
    CopyTensorAsync = "copy_tensor_async",
    GraphCompute = "graph_compute",
    Synchronize = "synchronize",
    EventNew = "event_new",
    EventFree = "event_free",
    EventRecord = "event_record",
    EventWait = "event_wait",
    EventSynchronize = "event_synchronize",
}

impl Call {
    /// Whether the function can report a failure to its caller.
    pub fn can_fail(self) -> bool {
        matches!(
            self,
            Call::InitDevice
                | Call::AllocBuffer
                | Call::AllocHostBuffer
                | Call::RegisterHostBuffer
                | Call::GraphCompute
                | Call::EventNew
        )
    }

    /// Whether calls are counted for each stream, too.
    pub fn has_stream(self) -> bool {
        matches!(
            self,
            Call::SetTensorAsync
                | Call::CopyTensorAsync
                | Call::GraphCompute
                | Call::Synchronize
                | Call::EventRecord
                | Call::EventWait
        )
    }

    /// Whether the function can hold up its caller for long.
    pub fn can_be_late(self) -> bool {
        self == Call::SetTensorAsync
    }

    /// Whether all that the function does is to order.
    pub fn is_wait(self) -> bool {
        matches!(
            self,
            Call::Synchronize | Call::EventRecord | Call::EventWait | Call::EventSynchronize
        )
    }
}

/// A call that is treated in another way.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    /// Of which function.
    pub call: Call,
    /// Of which stream; `None` for any.
    stream: Option<usize>,
    /// Which call, from 1; `None` for each.
    nth: Option<u64>,
}

impl Fault {
    /// Reads `CALL:N`, `CALL:all`, or the same with `CALL@STREAM`.
    pub fn parse(text: &str) -> Option<Fault> {
        let (name, nth) = text.split_once(':')?;
        let (name, stream) = match name.split_once('@') {
            Some((name, stream)) => (name, Some(stream.parse().ok()?)),
            None => (name, None),
        };
        let call = Call::ALL.iter().find(|call| call.name() == name);
        let nth = match nth {
            "all" => None,
            nth => Some(nth.parse().ok()?),
        };
        let call = *call?;
        (stream.is_none() || call.has_stream()).then_some(Fault { call, stream, nth })
    }

    /// Whether it means a call with these numbers among all and among those of its stream.
    fn means(&self, call: Call, number: u64, (stream, of_stream): (usize, u64)) -> bool {
        let number = match self.stream {
            None => number,
            Some(wanted) if wanted == stream => of_stream,
            Some(_) => return false,
        };
        self.call == call && self.nth.is_none_or(|nth| nth == number)
    }
}

/// Calls that are treated in another way.
#[derive(Debug, Default)]
pub struct Faults {
    /// Calls that fail.
    pub fail: Vec<Fault>,
    /// Calls without effect.
    pub ignore: Vec<Fault>,
    /// Calls that are late.
    pub late: Vec<Fault>,
}

/// What a call does.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// What it is for.
    Usual,
    /// It fails.
    Fails,
    /// Nothing, and it reports no failure.
    Nothing,
    /// What it is for, but much later.
    Late,
}

/// How often each function was called.
#[derive(Debug, Default)]
pub struct Counts {
    calls: [AtomicU64; Call::ALL.len()],
    /// By function and stream.
    of_streams: Mutex<BTreeMap<(&'static str, usize), u64>>,
    failed: AtomicU64,
    ignored: AtomicU64,
}

impl Counts {
    /// Counts a call, of stream 0 where it has none; returns what it does.
    pub fn count(&self, call: Call, stream: usize, faults: &Faults) -> Effect {
        let number = self.calls[call as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let of_stream = {
            let mut counts = self.of_streams.lock().expect("no panic");
            let count = counts.entry((call.name(), stream)).or_default();
            *count += 1;
            *count
        };
        let meant = |fault: &Fault| fault.means(call, number, (stream, of_stream));
        if faults.fail.iter().any(meant) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            return Effect::Fails;
        }
        if faults.ignore.iter().any(meant) {
            self.ignored.fetch_add(1, Ordering::Relaxed);
            return Effect::Nothing;
        }
        if faults.late.iter().any(meant) {
            return Effect::Late;
        }
        Effect::Usual
    }

    /// Returns the number of calls of a function.
    pub fn of(&self, call: Call) -> u64 {
        self.calls[call as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of calls of a function for a stream.
    pub fn of_stream(&self, call: Call, stream: usize) -> u64 {
        let counts = self.of_streams.lock().expect("no panic");
        counts.get(&(call.name(), stream)).copied().unwrap_or(0)
    }

    /// Returns how many calls failed, and how many had no effect.
    pub fn faults(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.failed), read(&self.ignored))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_name_a_call_and_its_number() {
        let fault = Fault::parse("event_wait:3").expect("a fault");
        assert!(fault.means(Call::EventWait, 3, (1, 1)));
        assert!(!fault.means(Call::EventWait, 2, (1, 3)));
        assert!(!fault.means(Call::EventRecord, 3, (1, 1)));
        let each = Fault::parse("synchronize:all").expect("a fault");
        assert!(each.means(Call::Synchronize, 7, (1, 7)));
        let of_stream = Fault::parse("event_wait@2:3").expect("a fault");
        assert!(of_stream.means(Call::EventWait, 9, (2, 3)));
        assert!(!of_stream.means(Call::EventWait, 3, (1, 3)));
        assert!(!of_stream.means(Call::EventWait, 3, (2, 2)));
        for wrong in [
            "event_wait",
            "event_wait:x",
            "wait:1",
            "event_new@1:1",
            "event_wait@:1",
            "",
        ] {
            assert_eq!(Fault::parse(wrong), None);
        }
    }
}
