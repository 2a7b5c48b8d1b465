//! The oldest Rust that `rust-version` in Cargo.toml promises.

use anyhow::Result;

use crate::install::target_folder;
use crate::run::{command, root, run};
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
    for (folder, arguments) in [
        (root(), &[][..]),
        (root().join("preload"), &[]),
        (root(), &["-p", "llama-sidecar-cli"]),
    ] {
        run(command("rustup", &folder)
            .args(["run", VERSION, "cargo", "check", "--quiet", "--locked"])
            .args(arguments)
            .env("CARGO_TARGET_DIR", &target))?;
    }
    Ok(())
}
