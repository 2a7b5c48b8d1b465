//! The project's own commands: `cargo xtask --help` lists them.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | `demo` | the demo of the README |
//! | `suite` | its tests |
//! | `arm64` | the library, the drop-in and the command for AArch64, under emulation |
//! | `matrix` | what the drop-in does in each program, as a table |
//! | `bench` | the benches, and docs/benchmarks.md |
//! | `image` | the image of the example, built and run |
//! | `clean_root`, `wheel` | the packages on a clean root; the wheel and its Python module |
//! | `pages` | pages of the command in a browser |
//! | `soak` | a long run of llama-server while its model is swapped |
//! | `ik_llama_cpp` | programs of ik_llama.cpp from source |
//! | `llama_cpp` | programs of llama.cpp from source |
//! | `archs` | the drop-in with models of every architecture |
//! | `packaging` | the installed tree, away from the repository |
//! | `sanitize`, `tsan` | AddressSanitizer, valgrind, miri, fuzzing; ThreadSanitizer |
//! | `abi` | what the shared library exports |
//! | `cmake`, `browser` | the C and C++ examples; a real browser |
//! | `site` | the documentation as a site |
//! | `dist`, `fixtures`, `msrv` | packages; downloads and fixtures; the oldest Rust |
//! | `header` | the header, generated |
//! | `install` | the library and the command in the places where users find them |
//! | `prose`, `variables` | the prose linter; tables of variables and metrics in the documentation |
//! | `third_party`, `toolchain` | notices of linked code; toolchains that checks install |
//! | `machine` | the processors that packages are for |
//! | `run` | running other programs, in folders of the repository |

mod abi;
mod archs;
mod arm64;
mod bench;
mod browser;
mod clean_root;
mod cmake;
mod demo;
mod dist;
mod fixtures;
mod header;
mod ik_llama_cpp;
mod image;
mod install;
mod llama_cpp;
mod machine;
mod matrix;
mod msrv;
mod packaging;
mod pages;
mod prose;
mod run;
mod sanitize;
mod site;
mod soak;
mod suite;
mod third_party;
mod toolchain;
mod tsan;
mod variables;
mod wheel;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser};
use install::DebugInfo;
use machine::Machine;

/// The project's own commands
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Command {
    /// Show what the library and the drop-in do with a real model, step by step
    Demo,
    /// Run every check of CI
    Test,
    /// Run a bench, or all of them and write docs/benchmarks.md
    Bench {
        /// The name of the section in docs/benchmarks.md
        name: Option<String>,
        /// Arguments of the benchmark: files for routes
        arguments: Vec<String>,
    },
    /// Download and make the models that the tests use
    Fixtures {
        /// Make the model of 3.2 GB for the bench of streaming, too
        #[arg(long)]
        large: bool,
    },
    /// Get the programs that the drop-in is tested with, test it in them, and write docs/hosts.md
    Hosts {
        /// Those to build and test: node, python, c, llama-server, ...; without names all that are built
        names: Vec<String>,
        /// Get and build only
        #[arg(long, conflicts_with = "names")]
        build: bool,
    },
    /// Build for AArch64, and test under emulation what emulation can do
    Arm64 {
        /// Those to run: build, unit, program, examples, packages; without names all
        steps: Vec<String>,
    },
    /// Check the words of documentation, comments and messages
    Prose,
    /// Write the tables of variables in docs/variables.md, and of metrics in docs/protocol.md
    Docs {
        /// Compare them only
        #[arg(long)]
        check: bool,
    },
    /// Make the documentation as a site, and check its links
    Site,
    /// Write include/llama_sidecar.h
    Header {
        /// Compare it only
        #[arg(long)]
        check: bool,
    },
    /// Build in release mode and install
    Install {
        /// Where the installed files will be
        #[arg(long, value_name = "DIR")]
        prefix: PathBuf,
        /// Put before the prefix, for packagers
        #[arg(long, value_name = "DIR")]
        destdir: Option<PathBuf>,
        /// Install debug information, too, in files of its own
        #[arg(long)]
        debug_info: bool,
    },
    /// Build in release mode and make packages: an archive, and one for Debian
    Dist {
        /// Where the packages are written; without, in the folder dist of the target folder
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// The processor that the packages are for; without, that of this machine
        #[arg(long, value_name = "NAME")]
        machine: Option<Machine>,
    },
    /// Run one check
    Check(Check),
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Check {
    /// Exported symbols
    #[arg(long)]
    abi: bool,
    /// The installed tree
    #[arg(long)]
    package: bool,
    /// The packages on a clean root
    #[arg(long)]
    dist: bool,
    /// The drop-in with models of every architecture, those whose names match, or those of the
    /// daily test (daily); writes docs/model-architectures.md if all are tested
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, default_missing_value = "")]
    archs: Option<String>,
    /// The image of the example
    #[arg(long)]
    image: bool,
    /// The crates for crates.io
    #[arg(long)]
    crates: bool,
    /// The wheel, and the Python module in it
    #[arg(long)]
    wheel: bool,
    /// Pages of the command in a browser
    #[arg(long)]
    pages: bool,
    /// The oldest supported Rust
    #[arg(long)]
    msrv: bool,
    /// The C examples with sanitizers
    #[arg(long)]
    asan: bool,
    /// The C examples under valgrind
    #[arg(long)]
    valgrind: bool,
    /// Unit tests under miri
    #[arg(long)]
    miri: bool,
    /// Reloads and the drop-in with ThreadSanitizer
    #[arg(long)]
    tsan: bool,
    /// Events beside the drop-in: signals, limits, denied calls, files that go
    #[arg(long)]
    chaos: bool,
    /// The long form of the property, fault and swap tests, and ten minutes of fuzzing of each target
    #[arg(long)]
    long: bool,
    /// The parser under libFuzzer
    #[arg(long, value_name = "MINUTES")]
    fuzz: Option<u64>,
    /// llama-server under load
    #[arg(long, value_name = "MINUTES")]
    soak: Option<u64>,
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Demo => demo::run_all(),
        Command::Test => suite::test(),
        Command::Bench { name: None, .. } => bench::all(),
        Command::Bench {
            name: Some(name),
            arguments,
        } => bench::one(&name, &arguments),
        Command::Fixtures { large: false } => fixtures::make().map(|_| ()),
        Command::Fixtures { large: true } => {
            fixtures::make_parts()?;
            fixtures::make_large()
        }
        Command::Hosts { names, build } => {
            if let Err(reason) = fixtures::vulkan() {
                println!("no software Vulkan device: {reason:#}");
            }
            suite::hosts()?;
            llama_cpp::make()?;
            if names.iter().any(|name| name == matrix::OLDER) {
                llama_cpp::make_older()?;
            }
            if names
                .iter()
                .any(|name| matrix::IK_LLAMA_CPP.contains(&name.as_str()))
            {
                ik_llama_cpp::make()?;
            }
            if names.iter().any(|name| name == matrix::IK_LLAMA_VULKAN) {
                ik_llama_cpp::make_vulkan()?;
            }
            match build {
                true => Ok(()),
                false => matrix::write(&names),
            }
        }
        Command::Arm64 { steps } => arm64::run(&steps),
        Command::Prose => prose::check(),
        Command::Docs { check: false } => variables::write(),
        Command::Docs { check: true } => variables::check(),
        Command::Site => site::make().map(|_| ()),
        Command::Header { check: false } => header::write(),
        Command::Header { check: true } => header::check(),
        Command::Install {
            prefix,
            destdir,
            debug_info,
        } => {
            let destdir = destdir.map(std::path::absolute).transpose()?;
            let debug_info = match debug_info {
                true => DebugInfo::Separate,
                false => DebugInfo::Left,
            };
            install::install_to(
                &std::path::absolute(prefix)?,
                destdir.as_deref(),
                debug_info,
            )
        }
        Command::Dist { out, machine } => {
            let out = match out {
                Some(out) => std::path::absolute(out)?,
                None => install::target_folder()?.join("dist"),
            };
            let packages = dist::make(&out, machine.unwrap_or(Machine::HERE))?;
            for package in packages.all() {
                println!("{}", package.display());
            }
            Ok(())
        }
        Command::Check(check) => check.run(),
    }
}

impl Check {
    fn run(&self) -> Result<()> {
        if let Some(minutes) = self.fuzz {
            return sanitize::fuzz(minutes);
        }
        if let Some(pattern) = &self.archs {
            return archs::check(pattern);
        }
        if let Some(minutes) = self.soak {
            return soak::run(minutes);
        }
        type Run = fn() -> Result<()>;
        let checks: [(bool, Run); 14] = [
            (self.abi, abi::check),
            (self.package, packaging::check),
            (self.dist, clean_root::check),
            (self.image, image::check),
            (self.crates, dist::crates),
            (self.wheel, wheel::check),
            (self.pages, pages::check),
            (self.msrv, msrv::check),
            (self.asan, sanitize::asan),
            (self.valgrind, sanitize::valgrind),
            (self.miri, sanitize::miri),
            (self.tsan, tsan::check),
            (self.chaos, suite::chaos),
            (self.long, suite::long),
        ];
        for (chosen, check) in checks {
            if chosen {
                check()?;
            }
        }
        Ok(())
    }
}
