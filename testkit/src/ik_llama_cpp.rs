//! Programs of ik_llama.cpp from source.

use std::net::TcpListener;
use std::path::PathBuf;

use crate::fixtures::cache;
use crate::host::software_device;
use crate::server::Options;

/// The commit that is built, of `ikawrakow/ik_llama.cpp` on GitHub.
pub const COMMIT: &str = "8337e4cd3861406fc04e0854b1409cd1b027fbc9";

/// Returns the commit as it is written in short.
pub fn short_commit() -> &'static str {
    &COMMIT[..9]
}

/// Where `cargo xtask hosts ik-llama-server` puts a program of ik_llama.cpp.
pub fn ik_llama_cpp(program: &str) -> PathBuf {
    of_build("", program)
}

/// Where `cargo xtask hosts ik-llama-server-vulkan` puts a program that computes on a GPU, too.
pub fn ik_llama_cpp_vulkan(program: &str) -> PathBuf {
    of_build("-vulkan", program)
}

fn of_build(kind: &str, program: &str) -> PathBuf {
    let folder = format!("ik-llama-cpp-{}{kind}", short_commit());
    cache().join(folder).join("bin").join(program)
}

/// Returns how a server of ik_llama.cpp is started, with so many slots.
pub fn server(slots: usize) -> Options {
    // Its server does not choose a port by itself.
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Options {
        build: ik_llama_cpp,
        port: Some(free.expect("a free port").port()),
        ..Options::new(slots)
    }
}

/// The same with the Vulkan device of the fixtures.
pub fn server_vulkan(slots: usize) -> Options {
    Options {
        build: ik_llama_cpp_vulkan,
        variables: software_device().to_vec(),
        ..server(slots)
    }
}
