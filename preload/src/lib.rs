//! The drop-in: an unmodified llama.cpp program gains hot-swap and
//! an expert trace through `LD_PRELOAD`.
//!
//! The map of the house. Each room knows only rooms further down:
//!
//! | room | what it is for |
//! |---|---|
//! | [`interpose`] | the functions that are put in front of ggml's, thin |
//! | [`lifecycle`], [`control`], [`sigterm`] | threads beside the host, the socket, termination |
//! | [`reloader`], [`metrics`] | what starts reloads, what came of them, figures for operators |
//! | [`store`] | the host's tensors as the reload engine sees them |
//! | [`journal`] | what happened, for `llama-sidecar run` and `doctor` |
//! | [`models`] | which files a host loaded, and which of its tensors came out of them |
//! | [`sched`] | what each scheduler of the host is doing, and what its graph needs after a switch |
//! | [`barrier`] | switches between evaluations |
//! | [`placement`] | the buffer type that the host would have chosen |
//! | [`expert_trace`] | which experts the evaluations of a model used |
//! | [`logits`] | a hash of what an evaluation put out |
//! | [`ggml`] | a copy of ggml: its functions, the layout of its tensors |
//! | [`caller`] | the object that called, and the functions that it meant |
//! | [`loaded`] | the objects that the loader has loaded: what each defines, refers to and needs |
//!
//! But for the line of [`journal`] that a wrapper asks for, nothing here runs before a host opens its first GGUF file with
//! `LLAMA_HOTSWAP_ENABLED` or `LLAMA_EXPERT_TRACE_STATS` set. A host without ggml never enters this library.
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]

mod barrier;
mod caller;
mod control;
mod expert_trace;
mod ggml;
mod interpose;
mod journal;
mod lifecycle;
mod loaded;
mod logits;
mod metrics;
mod models;
mod placement;
mod reloader;
mod sched;
mod sigterm;
mod store;
mod thread;
