//! What tests, benches and xtask share: a writer of GGUF files, good and bad, and
//! the paths of the fixtures.

pub mod fixtures;
pub mod ggml;
pub mod process;
pub mod writer;
