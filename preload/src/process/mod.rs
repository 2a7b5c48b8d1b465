//! The process: threads, signals, mappings and the journal. Nothing here knows ggml or models.
//!
//! | module | contents |
//! |---|---|
//! | [`signals`] | work before a signal ends the process |
//! | [`thread`] | threads of the drop-in |
//! | [`maps`] | files that are mapped into the process |
//! | [`memory`] | memory of the process that may be gone |
//! | [`reserve`] | memory where malloc has none left |
//! | [`thread_locals`] | destructors of thread-local data, where malloc has no memory left |
//! | [`unwind`] | the unwinder of libgcc_s, loaded on demand |
//! | [`journal`] | events for `llama-sidecar run` and `doctor` |

pub mod journal;
pub mod maps;
pub mod memory;
pub mod reserve;
pub mod signals;
pub mod thread;
mod thread_locals;
pub mod unwind;
