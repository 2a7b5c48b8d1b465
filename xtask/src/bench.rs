//! Runs the benchmarks and writes docs/benchmarks.md.

use std::fmt::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::run::{command, output, root};
use crate::{cmake, fixtures, llama_cpp};

/// A section of docs/benchmarks.md.
struct Bench {
    name: &'static str,
    heading: &'static str,
    /// Explains the figures of the section.
    note: &'static str,
}

const BENCHES: [Bench; 13] = [
    Bench {
        name: "load",
        heading: "Opening and loading",
        note: "`load_all` reads through the page cache, without page faults on the source. Copying from a \
mapping that is already in the page tables can be faster. A file in the page cache in pages of 4 KB takes \
longer to read. Half of the time of opening is the walk over the lengths of 98,000 strings. The rows were \
measured while other processes used both cores.",
    },
    Bench {
        name: "swap",
        heading: "Hot-swap in link mode",
        note: "The switch does the same work for both sizes. The larger reload has just moved 800 MiB through \
the caches, so its pointers come from memory. With eight threads on two cores, the longest wait is that of an \
evaluation queued after seven others.",
    },
    Bench {
        name: "dropin",
        heading: "The drop-in",
        note: "The program is `hosts/c/host.c`, linked with the libraries of the npm package (CPU only). \
Differences smaller than that of the second process without the drop-in are noise. The target of a swap, 50 \
times faster than a restart, applies to a model that is much larger than the tensor: the tensor of 113 MB is \
more than half of its model. The rows of overlays were measured while other processes used both cores.",
    },
    Bench {
        name: "trace",
        heading: "The expert trace",
        note: "",
    },
    Bench {
        name: "postfetch",
        heading: "Post-fetch",
        note: "The simulated link has the speed of PCIe 4.0 x8: 13 GB/s from page-locked memory, 6 GB/s from \
pageable memory, and 5 us for each copy. Its copies use no core and move no bytes. The figures show the cost \
of the scheduler, not the behaviour of a GPU.",
    },
    Bench {
        name: "postfetch_host",
        heading: "Post-fetch in an unmodified program",
        note: "No GPU was measured: the program is `hosts/python/host.py` with the libraries of the npm \
package and a simulated GPU (`tests/sim-ggml`), whose time is virtual. The link copies 12 GB/s from mapped \
memory and 24 GB/s from page-locked memory, with 8 us for each copy. Kernels read 800 GB/s, compute 60 TFLOPS \
and take 3 us each; a kernel's time is the sum of these. Models have the sizes of the named ones; the last two \
in a plain architecture: no shared expert, full attention in each layer. The router chooses at random, so a \
prompt uses nearly all experts.",
    },
    Bench {
        name: "expert_cache",
        heading: "Experts that stay on the device",
        note: "No GPU was measured: the program and the simulated GPU are those of the section above. The \
first two models have 8 layers, slots for a tenth of the experts, and generated routes, in which an LRU of \
each size has the published share of hits. The last model is the test model of 30 layers with a random router. \
The CPU of stock reads experts at the speed of the row (table of the section above). The bound is the longer \
of the misses' bytes over the link and the products of experts on the GPU; attention, launches, latencies and \
waits come on top of it. The share of hits includes the first tokens, in which the slots fill. `slots`: misses \
are fetched. The last columns: misses are computed on the CPU, and one or two of a layer are copied for later \
(`LLAMA_POSTFETCH_CACHE_UPLOADS`). There the CPU keeps its speed while the link copies, which a machine whose \
memory is busy does not. These columns vary by up to 15 % between runs. Tables of llama.cpp's own cache are those of \
llama.cpp from source, with as many MiB as the slots: its uploads come from memory that is not page-locked, at \
12 GB/s or the speed of the link where that is less, and hold up the thread that makes them.",
    },
    Bench {
        name: "routes",
        heading: "Hits of slots with routes of real models",
        note: "These are shares of uses that find their expert in a slot, counted from published routes: no \
program ran, and no time was measured. The routes are those of BigMoeOnEdge \
(github.com/Helldez/BigMoeOnEdge, commit 2d4f2b1, `docs/bench-data/2026-07-15-route-trace`): one prompt and \
its answer for each model, tokens one after the other, recorded on a telephone with fewer experts per \
token than the models have by default. 150 tokens are few: caches begin empty, and the first use of an \
expert misses with each policy, so `best` is far from 100 %. `best` knows the routes to come. A half-life is in uses of any \
expert of the layer (`LLAMA_POSTFETCH_CACHE_HALF_LIFE`); 1 is an LRU. Put files into the folder `routes` of the \
cache, or name them: `cargo xtask bench routes FILE.routes` reads those of `--expert-trace-routes`.",
    },
    Bench {
        name: "stream",
        heading: "Experts from disk",
        note: "The disk is emulated by a FUSE file system whose process shares the two cores with the program; \
both sides have this cost. The LRU is exact and has no read-ahead. The bound has one latency for each layer in \
which the LRU misses an expert, because the experts of a layer are known only when its router has chosen.",
    },
    Bench {
        name: "stream_gpu",
        heading: "Prompts from disk to a GPU",
        note: "The disk is the emulated one of the section above, and the simulated GPU computes on the same two \
cores: both cost the same on both sides, and the longer prompts are limited by that. The bytes are those of the whole run, \
with the load and three single tokens, and their share of the disk's bandwidth is that of the prompt's time.",
    },
    Bench {
        name: "margins",
        heading: "Experts in memory preferred",
        note: "The experts of this mixture are those of one dense model, each without other neurons (2 to 25 %), behind a router \
that was not trained, whose scores are close to each other: a small margin replaces more experts than in a model that was \
trained as a mixture. The row of flash attention is the model as it is: its divergence is that of rounding. \
`llama-sidecar ctl margins` measures another model.",
    },
    Bench {
        name: "tune",
        heading: "Tuning",
        note: "A row is a sweep with one type: the time of the whole command, with the start of the program, the \
evaluation of the model as it is, and quantising; the base logits exist. The peer writes a file for each tensor and \
starts a program with it. The log of the program has the times at which an evaluation begins and ends.",
    },
    Bench {
        name: "plan",
        heading: "Plans",
        note: "All commands that a plan has run are run again, in turn, more often.",
    },
];

/// Runs one benchmark, with arguments for it, and prints its tables.
pub fn one(name: &str, arguments: &[String]) -> Result<()> {
    let bench = BENCHES.iter().find(|bench| bench.name == name);
    let bench = bench.with_context(|| {
        let names = BENCHES.map(|bench| bench.name).join(", ");
        format!("no benchmark is called '{name}': use one of {names}")
    })?;
    print!("{}", figures(bench, arguments)?);
    Ok(())
}

/// Runs all benchmarks and writes docs/benchmarks.md.
pub fn all() -> Result<()> {
    let mut page = format!(
        "# Benchmarks\n\n`cargo xtask bench` runs all benchmarks and writes this page; `cargo xtask bench NAME` runs one. \
Both sides of a comparison alternate in one run. Figures are medians unless marked \"longest\". The \
text above each table names the peer and the limit that the machine sets.\n\n{}\n",
        machine()?
    );
    for bench in &BENCHES {
        println!("{} ...", bench.name);
        let figures = figures(bench, &[])?;
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

fn figures(bench: &Bench, arguments: &[String]) -> Result<String> {
    fixtures::make()?;
    if [
        "dropin",
        "postfetch_host",
        "expert_cache",
        "stream",
        "stream_gpu",
        "margins",
        "tune",
        "plan",
    ]
    .contains(&bench.name)
    {
        cmake::build_hosts()?;
    }
    if ["postfetch_host", "expert_cache", "stream_gpu"].contains(&bench.name) {
        cmake::sim_ggml()?;
    }
    if ["margins", "tune", "stream_gpu", "plan"].contains(&bench.name) {
        llama_cpp::make()?;
    }
    if ["stream", "stream_gpu", "plan"].contains(&bench.name) {
        fixtures::make_large()?;
    }
    if bench.name == "margins" {
        fixtures::make_parts()?;
    }
    let cargo = || {
        let mut cargo = command("cargo", &root());
        cargo.args(["bench", "--quiet", "--bench", bench.name, "--"]);
        cargo.args(arguments);
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

/// Returns the standard output of a benchmark; standard error goes to the terminal.
fn printed(command: &mut Command) -> Result<String> {
    let out = command.stderr(Stdio::inherit()).output()?;
    ensure!(
        out.status.success(),
        "a benchmark ended with {}",
        out.status
    );
    Ok(String::from_utf8(out.stdout)?)
}

/// Describes the machine and the versions.
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
        _ => "no GPU".into(),
    };
    Ok(wrapped(&format!(
        "Machine: {}, {} cores, {} GiB, {}; {gpu}. Built with {}, release profile. \"Upstream\" \
means the prebuilt libraries of the npm packages {}.",
        field("/proc/cpuinfo", "model name"),
        std::thread::available_parallelism()?,
        memory >> 20,
        // Drops the suffix of the kernel build.
        kernel.trim().split('-').next().unwrap_or_default(),
        rustc.trim(),
        fixtures::NODE_PACKAGES.join(", "),
    )))
}

/// Wraps text at about a hundred characters.
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
