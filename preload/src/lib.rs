//! The drop-in: an unmodified llama.cpp program gains hot-swap, an expert trace, expert
//! streaming and post-fetch through `LD_PRELOAD`.
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that. The module of each folder has a map of its own.
//!
//! | module | contents |
//! |---|---|
//! | [`interpose`] | the exported functions, which replace functions of ggml |
//! | [`lifecycle`] | the list of capabilities; start, exit, fork, internal errors |
//! | [`control`] | the control socket: requests, figures |
//! | [`profile`] | overlays and masks that a model has from its first evaluation on |
//! | [`rounds`] | rounds: llama-perplexity evaluates again and again |
//! | [`hotswap`], [`postfetch`] | hot-swap; experts in host memory are copied early to the GPU that multiplies |
//! | [`streaming`], [`trace`] | experts from disk as soon as they are routed; which experts are used |
//! | [`masking`] | experts that are never chosen |
//! | [`logits`] | hashes of what evaluations computed |
//! | [`program`] | the program's models, graphs and schedulers, and the events of capabilities |
//! | [`loader`] | loaded objects, and the calls between them |
//! | [`ggml`] | a copy of ggml: its functions and the layout of its tensors |
//! | [`process`] | threads, signals, mappings, the journal |
//! | [`arch`] | code that depends on the processor |
//! | [`sync`] | atomics and locks, which a test replaces |
//!
//! A capability is a module that implements [`program::capability::Capability`], and a line in the
//! list of [`lifecycle`].
//!
//! Except for the first line of [`process::journal`] and the redirections of [`rounds`], nothing here runs
//! before the program opens its first GGUF file with a variable set that enables a capability. A program
//! without ggml never enters this library.
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]
// Tests are no programs of users.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

mod arch;
mod control;
mod ggml;
mod hotswap;
mod interpose;
mod lifecycle;
mod loader;
mod logits;
mod masking;
mod postfetch;
mod process;
mod profile;
mod program;
mod rounds;
mod streaming;
mod sync;
mod trace;

#[global_allocator]
static ALLOCATOR: process::reserve::Reserved = process::reserve::Reserved;
