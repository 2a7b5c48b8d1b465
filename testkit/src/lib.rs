//! What tests, benches and xtask share: a writer of GGUF files, good and bad, the
//! paths of the fixtures, and programs that run llama.cpp.

pub mod fixtures;
pub mod ggml;
pub mod host;
pub mod process;
pub mod sim;
pub mod writer;
