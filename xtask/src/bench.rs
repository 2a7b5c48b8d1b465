//! The benches, and the page of their figures.

use std::fmt::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::run::{command, output};
use crate::{cmake, fixtures, root};

/// A part of docs/benchmarks.md.
struct Bench {
    name: &'static str,
    heading: &'static str,
    /// How to read its figures.
    note: &'static str,
}

const BENCHES: [Bench; 5] = [
    Bench {
        name: "load",
        heading: "Opening and loading",
        note: "`load_all` reads through the page cache, which costs no page faults on the source and \
cannot end the process when a file is cut short; copying out of a mapping that is already in the page \
tables can be faster. On two shared cores its share of the limit varies from run to run.",
    },
    Bench {
        name: "swap",
        heading: "Hot-swap in link mode",
        note: "The switch does the same for both sizes: the larger reload has just moved 800 MiB \
through the caches, so its few pointers come from memory, and the longest of the waits is taken over \
many times as long a time. With eight threads on two cores the longest wait is that of an evaluation \
behind seven others: while a switch waits for evaluations that run, new ones wait, too.",
    },
    Bench {
        name: "dropin",
        heading: "The drop-in",
        note: "The host is `hosts/c/host.c`, linked with the libraries of the npm package (CPU only). \
Compare the rows of the drop-in with that of the second process without it: below the difference of \
the two nothing can be seen on this machine. The aim of a swap, 50 times faster than a new start, is for \
a model that is much larger than the tensor; the tensor of 113 MB is more than half of its model, so \
starting the C program again moves hardly more bytes than the swap. What that swap takes is mostly fresh \
memory: between 33 ms, with huge pages that the machine had in use before, and 260 ms, when the virtual \
machine is given new memory for it.",
    },
    Bench {
        name: "trace",
        heading: "The expert trace",
        note: "",
    },
    Bench {
        name: "postfetch",
        heading: "Post-fetch",
        note: "The simulated link has the figures of PCIe 4.0 x8: 13 GB/s from page-locked memory, 6 GB/s \
from pageable memory, 5 us for each copy beside its bytes. Its copies take no core, as a copy engine \
takes none, and move no bytes (the tests move and compare them). It shows what the scheduler adds, and \
not what a GPU does. A thread that is asleep has to be woken: on this virtual machine a wake by itself \
takes 5 to 14 us of the caller.",
    },
];

/// Runs one bench and prints what it prints.
pub fn one(name: &str) -> Result<()> {
    let bench = BENCHES.iter().find(|bench| bench.name == name);
    let bench = bench.with_context(|| {
        let names = BENCHES.map(|bench| bench.name).join(", ");
        format!("no bench is called '{name}': there are {names}")
    })?;
    print!("{}", figures(bench)?);
    Ok(())
}

/// Runs all benches, and writes docs/benchmarks.md.
pub fn all() -> Result<()> {
    let mut page = format!(
        "# Benchmarks\n\nWritten by `cargo xtask bench`, which runs all of them; `cargo xtask bench NAME` \
runs one. Both sides of a comparison alternate in one run; figures are medians unless they say \
\"longest\". The limit of each, what the machine itself allows, is named above its table.\n\n{}\n",
        machine()?
    );
    for bench in &BENCHES {
        println!("{} ...", bench.name);
        let figures = figures(bench)?;
        print!("{figures}");
        write!(
            page,
            "\n## {} (`{}`)\n\n{}\n",
            bench.heading,
            bench.name,
            figures.trim()
        )?;
        if !bench.note.is_empty() {
            write!(page, "\n{}\n", wrapped(bench.note))?;
        }
    }
    std::fs::write(root().join("docs/benchmarks.md"), page)?;
    println!("docs/benchmarks.md is written");
    Ok(())
}

fn figures(bench: &Bench) -> Result<String> {
    fixtures::make()?;
    if bench.name == "dropin" {
        cmake::build_hosts()?;
    }
    let cargo = || {
        let mut cargo = command("cargo", &root());
        cargo.args(["bench", "--quiet", "--bench", bench.name]);
        cargo
    };
    let mut text = printed(&mut cargo())?;
    if bench.name == "postfetch" {
        text += "\n";
        text += &printed(
            cargo()
                .env("LD_LIBRARY_PATH", cmake::sim_cuda()?)
                .env("SIM_CUDA_MOVE", "0"),
        )?;
    }
    Ok(text)
}

/// What a bench prints; what cargo says goes to the terminal.
fn printed(command: &mut Command) -> Result<String> {
    let out = command.stderr(Stdio::inherit()).output()?;
    ensure!(out.status.success(), "a bench ended with {}", out.status);
    Ok(String::from_utf8(out.stdout)?)
}

/// The machine and the versions, in a sentence each.
fn machine() -> Result<String> {
    let field = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_default()
            .to_owned();
        line.split_once(':')
            .map_or_else(String::new, |(_, value)| value.trim().to_owned())
    };
    let memory: u64 = field("/proc/meminfo", "MemTotal")
        .split(' ')
        .next()
        .and_then(|kib| kib.parse().ok())
        .unwrap_or(0);
    let kernel = output(command("uname", &root()).args(["-sr"]))?;
    let rustc = output(command("rustc", &root()).arg("--version"))?;
    let gpu = Command::new("nvidia-smi")
        .args(["--query-gpu=name", "--format=csv,noheader"])
        .output();
    let gpu = match gpu {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        _ => "no GPU was at hand".into(),
    };
    Ok(wrapped(&format!(
        "Machine: {}, {} cores, {} GiB, {}; {gpu}. Built with {}, release profile. Peer, where one is \
named upstream: the prebuilt libraries of the npm packages {}.",
        field("/proc/cpuinfo", "model name"),
        std::thread::available_parallelism()?,
        memory >> 20,
        // Without what its builder appended.
        kernel.trim().split('-').next().unwrap_or_default(),
        rustc.trim(),
        fixtures::NODE_PACKAGES.join(", "),
    )))
}

/// Lines of about a hundred characters.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is one");
        if !line.is_empty() && line.len() + word.len() > 100 {
            lines.push(word.to_owned());
            continue;
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.join("\n")
}
