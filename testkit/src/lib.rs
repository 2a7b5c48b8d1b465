//! Shared by tests, benches and xtask: a writer of valid and malformed GGUF files, the paths of the
//! fixtures, and programs that run llama.cpp.
//!
//! This crate must not depend on the library: unit tests of the library link it, and the exported
//! C functions would then be defined twice.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `ik_llama_cpp` | programs of ik_llama.cpp from source |
//! | `architectures` | models of many architectures, and processes that evaluate them |
//! | `server`, `sim_ggml`, `slow_disk` | llama-server, driven through HTTP; a simulated GPU; an emulated disk |
//! | `host` | programs that run llama.cpp, driven by a test |
//! | `llama_cpp` | where programs of llama.cpp are |
//! | `mixtures`, `moe`, `seeds` | mixtures of experts, small and without data; files that fuzzing starts from |
//! | `writer`, `ggml`, `fixtures` | valid and malformed files; quantisation of ggml to compare with; where fixtures are |
//! | `graph` | which tensors scale or bias a weight in a graph |
//! | `process`, `calls`, `memory_limit` | memory of a process; its system calls; a limit of its memory |
//! | `caches`, `sim` | simulated caches of experts; the simulated CUDA driver |

pub mod architectures;
pub mod caches;
pub mod calls;
pub mod fixtures;
pub mod ggml;
pub mod graph;
pub mod host;
pub mod ik_llama_cpp;
pub mod llama_cpp;
pub mod memory_limit;
pub mod mixtures;
pub mod moe;
pub mod process;
pub mod seeds;
pub mod server;
pub mod sim;
pub mod sim_ggml;
pub mod slow_disk;
pub mod writer;

use std::fs::File;
use std::io::Write;

/// Names the file to which [`skipped`] adds its reasons: `cargo xtask test` sums them up.
pub const SKIPPED: &str = "SIDECAR_SKIPPED";

/// Reports why a test, or a part of it, does not run on this machine.
pub fn skipped(reason: &str) {
    // `eprintln` would be captured.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {reason}");
    if let Some(file) = std::env::var_os(SKIPPED) {
        let file = File::options().append(true).create(true).open(file);
        let mut file = file.expect("the folder of the file exists");
        // In one call: tests run at the same time.
        let written = file.write_all(format!("{reason}\n").as_bytes());
        written.expect("free space");
    }
}

/// Whether the long form of the tests was requested: `cargo xtask check --long` sets
/// `SIDECAR_LONG_TESTS`.
pub fn long_tests() -> bool {
    std::env::var_os("SIDECAR_LONG_TESTS").is_some()
}

/// The middle of some figures, which are sorted for it. Panics when there are none.
pub fn median(figures: &mut [f64]) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}
