//! Where the fixtures are: outside the repository, so that a clone stays small and
//! a new clone finds them again.

use std::path::PathBuf;

/// `LLAMA_SIDECAR_CACHE`, or `~/.cache/llama-sidecar`.
pub fn cache() -> PathBuf {
    match std::env::var_os("LLAMA_SIDECAR_CACHE") {
        Some(path) => path.into(),
        None => {
            let home = std::env::var_os("HOME").expect("HOME is set");
            PathBuf::from(home).join(".cache/llama-sidecar")
        }
    }
}

/// A fixture by name, for example `smollm2.gguf`.
///
/// Panics with the command that makes it when it is not there: a test that needs
/// a real model must not pass without one.
pub fn fixture(name: &str) -> PathBuf {
    let path = cache().join("fixtures").join(name);
    assert!(
        path.exists(),
        "{} is missing: run 'cargo xtask fixtures' first",
        path.display()
    );
    path
}

/// The fixture of 3.2 GB, a mixture of 64 experts of which each token uses 4; for benches only.
///
/// Panics with the command that makes it when it is not there.
pub fn large_model() -> PathBuf {
    let path = cache().join("fixtures/moe64.gguf");
    assert!(
        path.exists(),
        "{} is missing: run 'cargo xtask fixtures --large' first",
        path.display()
    );
    path
}

/// The same model in two shards, each with half of the experts' matrices of each two layers.
pub fn large_shards() -> [PathBuf; 2] {
    let folder = large_model().with_file_name("moe64-2-shards");
    [1, 2].map(|number| folder.join(format!("smollm2-0000{number}-of-00002.gguf")))
}

/// Folder of the prebuilt upstream libraries from npm (`libggml-base.so`, …).
pub fn upstream_libraries() -> PathBuf {
    fixture("upstream")
}
