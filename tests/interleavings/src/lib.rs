//! The protocols between threads on which results rest, in each interleaving of a few threads. The modules are
//! those of the product, with [`sync`] in place of its atomics and locks; `tests` has what they must hold to.

pub mod sync;

#[path = "../../../core/src/stream/arrivals.rs"]
pub mod arrivals;
#[path = "../../../preload/src/program/barrier.rs"]
pub mod barrier;
#[path = "../../../core/src/fetch/copy_queue.rs"]
pub mod copy_queue;
