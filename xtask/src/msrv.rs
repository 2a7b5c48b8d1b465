//! The oldest Rust that `rust-version` in Cargo.toml promises.

use anyhow::Result;

use crate::install::target_folder;
use crate::run::{command, root, run};
use crate::third_party::INSTALLED;
use crate::toolchain;

const VERSION: &str = env!("CARGO_PKG_RUST_VERSION");

/// Returns why this check cannot run. Installs that Rust where rustup can.
pub fn missing() -> Option<String> {
    toolchain::rust(VERSION, &[])
        .err()
        .map(|error| format!("{error:#}"))
}

/// Checks that the library, the command and the drop-in compile.
pub fn check() -> Result<()> {
    toolchain::rust(VERSION, &[])?;
    let target = target_folder()?.join("msrv");
    run(command("rustup", &root())
        .args(["run", VERSION, "cargo", "check", "--quiet", "--locked"])
        .args(INSTALLED.map(|name| format!("--package={name}")))
        .env("CARGO_TARGET_DIR", &target))
}
