//! The clock of a process that measures time itself.
//!
//! A process that has this library in `LD_PRELOAD` and `SIM_GGML_CLOCK` reads, from its monotonic
//! clock, the virtual time of the calling thread, so many times over, on top of the real time. A
//! large factor makes what is measured independent of the machine.

use std::sync::OnceLock;

use libc::{CLOCK_MONOTONIC, c_int, clockid_t, timespec};

use crate::host;

const SECOND: u64 = 1_000_000_000;

/// How often virtual time counts; 0 without the variable.
fn factor() -> u64 {
    static FACTOR: OnceLock<u64> = OnceLock::new();
    *FACTOR.get_or_init(|| {
        let value = std::env::var("SIM_GGML_CLOCK").ok();
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    })
}

/// Replaces the function of the C library.
///
/// # Safety
///
/// That of the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: as the caller ensures; a system call of this type.
    let result = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) } as c_int;
    let virtual_time = match clock {
        CLOCK_MONOTONIC => host::time() * factor(),
        _ => 0,
    };
    if result == 0 && virtual_time > 0 {
        // SAFETY: the call above wrote it.
        let time = unsafe { &mut *time };
        let nanoseconds = time.tv_nsec as u64 + virtual_time;
        time.tv_sec += (nanoseconds / SECOND) as i64;
        time.tv_nsec = (nanoseconds % SECOND) as i64;
    }
    result
}
