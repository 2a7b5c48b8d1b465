//! What link mode, the drop-in and the command share. Exports no C function.
//!
//! Modules, top to bottom. A module imports only modules below it; `tests/layers.rs` checks
//! that.
//!
//! | module | contents |
//! |---|---|
//! | [`reload`] | hot-swap: detect, compare, stage, commit, against a trait |
//! | [`stream`] | routed experts, read from disk as soon as routing is known |
//! | [`fetch`] | experts on a device: which of them stay, in how much memory, and who issues their copies |
//! | [`trace`] | which experts a workload uses |
//! | [`summary`] | figures and findings as sentences |
//! | [`protocol`] | messages of the control socket, events of the journal |
//! | [`error`] | errors of all modules |
//! | [`experts`] | names of expert tensors, and an index of them |
//! | [`gguf`] | the file format |
//! | [`parallel`] | work that is divided among threads |
//! | `priority` | the CPUs and the priority of a thread |
//! | [`memory`] | the free memory |
//! | [`logger`] | messages |
//! | [`config`] | variables |
//! | [`files`] | files in folders that other users may write |
//! | [`text`] | text from outside, for each kind of output |
//! | [`descriptors`] | descriptors inside a program that has its own |
//! | [`signals`] | signals that this library keeps from the program |
//! | `limits` | limits of this process |
//! | `sync` | atomics and locks, which a test replaces |
// Tests are no programs of users.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod config;
pub mod descriptors;
pub mod error;
pub mod experts;
pub mod fetch;
pub mod files;
pub mod gguf;
mod limits;
pub mod logger;
pub mod memory;
pub mod parallel;
mod priority;
pub mod protocol;
pub mod reload;
pub mod signals;
pub mod stream;
pub mod summary;
mod sync;
pub mod text;
pub mod trace;
