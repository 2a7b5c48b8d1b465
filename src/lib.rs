//! llama-sidecar: change what a llama.cpp process holds and fetches, while it
//! runs, without patching it.
//!
//! The map of the house. Dependencies point downwards only:
//!
//! | room | what it is for |
//! |---|---|
//! | [`gguf`] | the file format |
#![deny(unsafe_op_in_unsafe_fn, missing_docs)]

pub mod gguf;
