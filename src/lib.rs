//! llama-sidecar: change what a llama.cpp process holds and fetches, while it
//! runs, without patching it.
//!
//! The map of the house. Each room knows only rooms further down:
//!
//! | room | what it is for |
//! |---|---|
//! | [`ffi`] | the C ABI, and nothing but |
//! | [`model`] | an open model: lazy tensors, loading, evaluations, contexts |
//! | [`reload`] | hot-swap: detect, compare, stage, commit, against a trait |
//! | [`postfetch`] | fetches routed experts to a GPU while others are computed |
//! | [`trace`] | which experts a workload uses |
//! | [`device`] | memory where tensors live |
//! | [`gguf`], [`experts`] | the file format; names of expert tensors |
//! | [`config`], [`error`], [`logger`] | variables, errors, messages |
//! | [`protocol`] | messages of the control socket, events of the journal |
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]

mod background;
pub mod config;
pub mod device;
pub mod error;
pub mod experts;
#[cfg(feature = "c-abi")]
pub mod ffi;
pub mod gguf;
pub mod logger;
pub mod model;
mod parallel;
pub mod postfetch;
pub mod protocol;
pub mod reload;
pub mod trace;
