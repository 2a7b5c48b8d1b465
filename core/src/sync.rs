//! Atomics and locks of the modules that `tests/interleavings` also builds with others in their place.

pub use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

pub use parking_lot::{Condvar, Mutex};
