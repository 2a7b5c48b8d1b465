//! The oldest Rust that `rust-version` in Cargo.toml promises.

use anyhow::{Result, bail};

use crate::install::target_folder;
use crate::root;
use crate::run::{command, exists, run};

const VERSION: &str = env!("CARGO_PKG_RUST_VERSION");

/// Why it cannot run here, if so. Installs that Rust where rustup can.
pub fn missing() -> Option<String> {
    if !exists("rustup") {
        return Some(format!(
            "Rust {VERSION} needs rustup, which is not installed"
        ));
    }
    let there = command("rustup", &root())
        .args(["run", VERSION, "cargo", "--version"])
        .output()
        .is_ok_and(|out| out.status.success());
    let install = ["toolchain", "install", VERSION, "--profile", "minimal"];
    if there || run(command("rustup", &root()).args(install)).is_ok() {
        return None;
    }
    Some(format!("cannot run rustup {}", install.join(" ")))
}

/// Checks that the library, the command and the drop-in compile.
pub fn check() -> Result<()> {
    if let Some(reason) = missing() {
        bail!(reason);
    }
    let target = target_folder()?.join("msrv");
    for folder in [root(), root().join("preload")] {
        run(command("rustup", &folder)
            .args(["run", VERSION, "cargo", "check", "--quiet", "--locked"])
            .env("CARGO_TARGET_DIR", &target))?;
    }
    let cli = ["-p", "llama-sidecar-cli"];
    run(command("rustup", &root())
        .args(["run", VERSION, "cargo", "check", "--quiet", "--locked"])
        .args(cli)
        .env("CARGO_TARGET_DIR", &target))
}
