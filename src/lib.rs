//! llama-sidecar: change what a llama.cpp process holds and fetches, while it
//! runs, without patching it.
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that.
//!
//! | module | contents |
//! |---|---|
//! | [`ffi`] | the C ABI |
//! | [`postfetch`] | routed experts, copied to a GPU while others are computed |
//! | [`model`] | an open model: lazy tensors, loading, evaluations, contexts |
//! | [`reload`] | hot-swap: detect, compare, stage, commit, against a trait |
//! | [`stream`] | routed experts, read from disk as soon as routing is known |
//! | [`expert_cache`] | which experts stay on a device |
//! | [`trace`] | which experts a workload uses |
//! | [`protocol`] | messages of the control socket, events of the journal |
//! | [`error`] | errors of all modules |
//! | [`device`] | memory of tensors: host and CUDA |
//! | [`experts`] | names of expert tensors, and an index of them |
//! | [`gguf`] | the file format |
//! | `background` | threads that run while the program goes on |
//! | [`parallel`] | work that is divided among threads |
//! | [`logger`] | messages |
//! | [`config`] | variables |
//! | [`files`] | files in folders that other users may write |
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]

mod background;
pub mod config;
pub mod device;
pub mod error;
pub mod expert_cache;
pub mod experts;
#[cfg(feature = "c-abi")]
pub mod ffi;
pub mod files;
pub mod gguf;
pub mod logger;
pub mod model;
pub mod parallel;
pub mod postfetch;
pub mod protocol;
pub mod reload;
pub mod stream;
pub mod trace;
