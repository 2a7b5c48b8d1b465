//! Atomics, locks and times of the modules that `tests/interleavings` also builds with others in their place.

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub use std::time::Instant;

pub use parking_lot::{Condvar, Mutex, MutexGuard};
