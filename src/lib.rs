//! llama-sidecar: change what a llama.cpp process holds and fetches, while it runs, without
//! patching it. This crate is the library of link mode; the drop-in is `preload/`, and both are
//! built on [`sidecar_core`].
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that.
//!
//! | module | contents |
//! |---|---|
//! | [`ffi`] | the C ABI |
//! | [`postfetch`] | routed experts, copied to a GPU while others are computed |
//! | [`model`] | an open model: lazy tensors, loading, evaluations, contexts |
//! | [`device`] | memory of tensors: host and CUDA |

pub mod device;
pub mod ffi;
pub mod model;
pub mod postfetch;
