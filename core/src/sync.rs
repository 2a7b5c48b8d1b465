//! Atomics, locks and times of the modules that `tests/interleavings` also builds with others in their place.

pub use std::hint::spin_loop;
pub use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub use std::time::Instant;

pub use parking_lot::{Condvar, Mutex, MutexGuard};
