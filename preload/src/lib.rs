//! The drop-in: an unmodified llama.cpp program gains hot-swap, an expert trace, expert
//! streaming and post-fetch through `LD_PRELOAD`.
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that.
//!
//! | module | contents |
//! |---|---|
//! | [`interpose`] | the exported functions, which replace functions of ggml |
//! | [`lifecycle`] | the list of capabilities; start, exit, fork, internal errors |
//! | [`signals`] | work before a signal ends the process |
//! | [`control`] | requests over the control socket |
//! | [`overlays`] | overlays: the tensors that a request names in the models of the program |
//! | [`metrics`] | figures in the text format of Prometheus |
//! | [`round_files`] | rounds driven through files, as GGUF-Tool-Suite does |
//! | [`reloader`] | hot-swap: what starts reloads, and their results |
//! | [`rounds`] | rounds: llama-perplexity evaluates again and again |
//! | [`store`] | the program's tensors as the reload engine sees them |
//! | [`placement`] | the buffer type that llama.cpp would have chosen |
//! | [`expert_trace`] | the expert trace: which experts evaluations use |
//! | [`routes`] | routes: the experts of every token, in a file |
//! | [`saliency`] | saliency: how much each expert contributes to the output of its layer |
//! | [`streaming`] | expert streaming: experts from disk as soon as they are routed |
//! | [`postfetch`] | post-fetch: experts in host memory are copied early to the GPU that multiplies |
//! | [`page_lock`] | page locks on the mappings of models, for the copies to a GPU |
//! | [`load`] | loading a model without reading its experts |
//! | [`capability`] | the events that are reported to capabilities |
//! | [`routing`] | the moment at which the experts of a layer are known |
//! | [`parts`] | the graph whose parts a thread evaluates |
//! | [`sched`] | schedulers, their evaluations and kept graphs |
//! | [`own_cache`] | the expert cache that the program has of its own |
//! | [`models`] | the models that the program loaded |
//! | [`own_hotswap`] | the hot-swap that a program has of its own |
//! | [`loads`] | the models that the program is loading |
//! | [`derived`] | weights that are from no file, and how far they are known |
//! | [`maps`] | files that are mapped into the process |
//! | [`graph`] | what a graph reads |
//! | [`logits`] | a hash of the output of an evaluation |
//! | [`barrier`] | switches between evaluations |
//! | [`pool`] | buffers of replaced tensors, for the next ones |
//! | [`caller`] | the object that made a call, and the functions that it meant |
//! | [`redirect`] | calls of loaded objects that go to the drop-in |
//! | [`loaded`] | the objects that the dynamic loader has loaded |
//! | [`ggml`] | a copy of ggml: its functions and the layout of its tensors |
//! | [`clients`] | connections to the control socket |
//! | [`thread`] | threads of the drop-in |
//! | [`unwind`] | the unwinder of libgcc_s, loaded on demand |
//! | [`journal`] | events for `llama-sidecar run` and `doctor` |
//!
//! A capability is a module that implements [`capability::Capability`], and a line in the
//! list of [`lifecycle`].
//!
//! Except for the first line of [`journal`] and the redirections of [`rounds`], nothing here runs
//! before the program opens its first GGUF file with a variable set that enables a capability. A program
//! without ggml never enters this library.
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]

mod barrier;
mod caller;
mod capability;
mod clients;
mod control;
mod derived;
mod expert_trace;
mod ggml;
mod graph;
mod interpose;
mod journal;
mod lifecycle;
mod load;
mod loaded;
mod loads;
mod logits;
mod maps;
mod metrics;
mod models;
mod overlays;
mod own_cache;
mod own_hotswap;
mod page_lock;
mod parts;
mod placement;
mod pool;
mod postfetch;
mod redirect;
mod reloader;
mod round_files;
mod rounds;
mod routes;
mod routing;
mod saliency;
mod sched;
mod signals;
mod store;
mod streaming;
mod thread;
mod unwind;
