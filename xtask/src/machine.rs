//! The processors that libraries and packages are made for.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::run::{command, exists, output, root, run};

/// A processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Machine {
    /// AArch64, also arm64
    Aarch64,
    /// x86-64, also amd64
    #[value(name = "x86_64")]
    X86_64,
}

impl Machine {
    /// The processor of this machine.
    pub const HERE: Machine = match cfg!(target_arch = "aarch64") {
        true => Machine::Aarch64,
        false => Machine::X86_64,
    };

    /// Its name in the names of files.
    pub fn name(self) -> &'static str {
        match self {
            Machine::Aarch64 => "aarch64",
            Machine::X86_64 => "x86_64",
        }
    }

    /// Its name in Debian.
    pub fn debian(self) -> &'static str {
        match self {
            Machine::Aarch64 => "arm64",
            Machine::X86_64 => "amd64",
        }
    }

    /// The name of the dynamic loader.
    pub fn loader(self) -> &'static str {
        match self {
            Machine::Aarch64 => "ld-linux-aarch64.so.1",
            Machine::X86_64 => "ld-linux-x86-64.so.2",
        }
    }

    /// Its name for rustc.
    pub fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// Returns the name of a program of gcc or binutils that makes or reads files for it.
    pub fn tool(self, name: &str) -> String {
        match self == Machine::HERE {
            true => name.to_owned(),
            false => format!("{}-linux-gnu-{name}", self.name()),
        }
    }

    /// Returns the program, with its arguments, that runs programs for another processor.
    pub fn emulator(self) -> [String; 3] {
        let name = self.name();
        [
            format!("qemu-{name}-static"),
            "-L".into(),
            format!("/usr/{name}-linux-gnu"),
        ]
    }

    /// Returns a command of cargo that builds for it.
    pub fn cargo(self, subcommand: &str) -> Command {
        let mut cargo = command("cargo", &root());
        cargo.args([subcommand, "--quiet"]);
        if self != Machine::HERE {
            let variable = self.triple().to_uppercase().replace('-', "_");
            cargo
                .args(["--target", &self.triple()])
                .env(format!("CARGO_TARGET_{variable}_LINKER"), self.tool("gcc"))
                .env(
                    format!("CARGO_TARGET_{variable}_RUNNER"),
                    self.emulator().join(" "),
                );
        }
        cargo
    }

    /// Returns where cargo builds for it, in the folder that cargo builds to.
    pub fn folder(self, target: &Path) -> PathBuf {
        match self == Machine::HERE {
            true => target.to_owned(),
            false => target.join(self.triple()),
        }
    }

    /// Returns a command that runs a program for it.
    pub fn start(self, program: &Path) -> Command {
        if self == Machine::HERE {
            return command(program, &root());
        }
        let [emulator, arguments @ ..] = self.emulator();
        let mut started = command(emulator, &root());
        started.args(arguments).arg(program);
        started
    }

    /// Fails where a program that builds or runs for another processor is missing; installs Rust's library for it.
    pub fn prepare(self) -> Result<()> {
        if self == Machine::HERE {
            return Ok(());
        }
        let [emulator, ..] = self.emulator();
        let (gcc, gxx) = (self.tool("gcc"), self.tool("g++"));
        let packages = [
            (&gcc, format!("gcc-{}-linux-gnu", self.name())),
            (&gxx, format!("g++-{}-linux-gnu", self.name())),
            (&emulator, "qemu-user-static".to_owned()),
        ];
        for (program, package) in packages {
            ensure!(
                exists(program),
                "{program} is missing: install it (Debian: apt-get install {package})"
            );
        }
        ensure!(
            exists("rustup"),
            "rustup is missing: install it from https://rustup.rs"
        );
        let installed = output(command("rustup", &root()).args(["target", "list", "--installed"]))?;
        if installed.lines().any(|line| line == self.triple()) {
            return Ok(());
        }
        run(command("rustup", &root()).args(["target", "add", &self.triple()]))
    }
}
