//! Hosts with a simulated GPU and post-fetch.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program};
use testkit::llama_cpp::llama_cpp;
use testkit::server::{Answer, Options, Request, Server};
use testkit::sim_ggml::{Report, SimGgml};

use super::count;

/// The smallest batch that the host offloads. With 1, decoding is offloaded, too.
pub const DECODE: (&str, &str) = ("GGML_OP_OFFLOAD_MIN_BATCH", "1");

const SECOND_GPU: &str = "second-gpu";

/// What a host answered, the figures of post-fetch, and the report of the simulated GPU.
pub struct Run {
    pub answers: Vec<String>,
    pub figures: Value,
    pub report: Report,
}

/// How a host is run.
#[derive(Clone, Default)]
pub struct Setup {
    /// The model, if it is not the fixture.
    model: Option<PathBuf>,
    /// Settings of the simulated GPU.
    device: Vec<(&'static str, String)>,
    /// Variables of the drop-in.
    variables: Vec<(&'static str, String)>,
    /// Options of the host.
    options: Vec<String>,
    /// Whether the host has the libraries of llama.cpp from source, not those of node-llama-cpp.
    from_source: bool,
}

impl Setup {
    pub fn model(mut self, path: &Path) -> Setup {
        self.model = Some(path.to_owned());
        self
    }

    pub fn device(mut self, name: &'static str, value: &str) -> Setup {
        self.device.push((name, value.into()));
        self
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Setup {
        self.variables.push((name, value.into()));
        self
    }

    pub fn option(mut self, option: &str) -> Setup {
        self.options.push(option.into());
        self
    }

    /// On llama.cpp from source, whose scheduler calls back before it copies weights.
    pub fn built_from_source(mut self) -> Setup {
        self.from_source = true;
        self
    }

    /// With the last layers on a second simulated GPU.
    pub fn two_gpus(self) -> Setup {
        self.option(SECOND_GPU)
    }

    pub fn simulation(&self) -> SimGgml {
        let settings = self.device.iter();
        let settings: Vec<_> = settings
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        SimGgml::new(&settings)
    }

    pub fn start(&self, sim: &SimGgml, model: &Path) -> Host {
        // At debug level, the drop-in waits for the device after each evaluation.
        let mut variables = vec![("LLAMA_SIDECAR_LOG", "info".into())];
        variables.extend(self.variables.clone());
        let drop_in = DropIn::On(variables);
        let prepare = |command: &mut Command| {
            sim.prepare(command);
            command.args(&self.options);
        };
        let program = match self.from_source {
            true => Program::PythonExpertsOnCpuFromSource,
            false => Program::PythonExpertsOnCpu,
        };
        Host::start_with(program, model, &drop_in, prepare)
    }

    pub fn run(&self, commands: &[&str]) -> Run {
        let sim = self.simulation();
        let model = self.model.clone();
        let model = model.unwrap_or_else(|| fixture("small-moe.gguf"));
        let mut host = self.start(&sim, &model);
        let answers = commands.iter().map(|command| host.ask(command)).collect();
        let figures = host.control("status")["post_fetch"].clone();
        assert_eq!(host.end(), Some(0));
        let report = sim.report();
        report.assert_ordered();
        if self.options.iter().any(|option| option == SECOND_GPU) {
            let second = sim.second_report();
            second.assert_ordered();
            assert!(second.calls("graph_compute") > 0);
        }
        Run {
            answers,
            figures,
            report,
        }
    }
}

/// Early copies where the host copies experts itself.
pub fn on() -> Setup {
    Setup::default().with("LLAMA_POSTFETCH_MODE", "on")
}

/// Decoding on the device with `mib` MiB of slots, into which each miss is copied.
pub fn cached(mib: &str) -> Setup {
    with_slots(mib, "fetch")
}

/// Decoding on the device with `mib` MiB of slots, while the CPU computes each miss.
pub fn cached_beside_cpu(mib: &str) -> Setup {
    with_slots(mib, "cpu")
}

fn with_slots(mib: &str, misses: &str) -> Setup {
    let setup = Setup::default().with("LLAMA_POSTFETCH_CACHE_MB", mib);
    setup.with("LLAMA_POSTFETCH_CACHE_MISSES", misses)
}

/// The same placement without early copies, and without slots: there is no memory for them.
pub fn offloaded() -> Setup {
    Setup::default()
        .with("LLAMA_POSTFETCH_MODE", "all")
        .with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "1")
}

/// The logits are those of the host without post-fetch, and experts were copied early.
pub fn same_as_without(setup: &Setup, commands: &[&str]) -> Run {
    let mut without = setup.clone();
    without.variables.clear();
    let expected = without.run(commands);
    let found = setup.run(commands);
    assert_eq!(found.answers, expected.answers);
    assert!(
        count(&found.figures, "early_bytes") > 0,
        "{}",
        found.figures
    );
    assert!(
        count(&found.figures, "left_out_bytes") > 0,
        "{}",
        found.figures
    );
    assert_eq!(found.figures["obstacle"], Value::Null);
    found
}

/// Whether a scheduler of the tested build asks a callback before it copies weights.
fn has_copy_callback() -> bool {
    let library = std::fs::read(llama_cpp("libggml-base.so")).expect("a library");
    let name = b"ggml_backend_sched_set_copy_callback";
    library.windows(name.len()).any(|bytes| bytes == name)
}

/// The server has copied no experts itself, where its scheduler reports what it copies.
pub fn copied_none_itself(figures: &Value) {
    let copies = figures["host_copies"].as_object().expect("an object");
    assert!(!has_copy_callback() || copies.is_empty(), "{figures}");
}

/// llama-server from source gives the same answers without post-fetch, with it, and with experts
/// that stay on the device, whatever computes the others. Returns these answers.
///
/// `obstacles`: why the CPU does not compute experts of all layers, each once in the log.
pub fn same_in_llama_server(
    model: &Path,
    more_arguments: &[&str],
    obstacles: &[&str],
) -> [Answer; 3] {
    let mut answers = Vec::new();
    for (early, cache, misses) in [
        ("off", "0", "auto"),
        ("on", "0", "auto"),
        ("on", "auto", "auto"),
        ("on", "auto", "fetch"),
        ("on", "auto", "cpu"),
    ] {
        let sim = SimGgml::new(&[]);
        let mut options = Options::new(2);
        options.drop_in = DropIn::On(vec![
            ("LLAMA_POSTFETCH_MODE", early.into()),
            ("LLAMA_POSTFETCH_CACHE_MB", cache.into()),
            ("LLAMA_POSTFETCH_CACHE_MISSES", misses.into()),
        ]);
        let arguments = [&["--device", "SIM0", "-cmoe"], more_arguments].concat();
        options.arguments = arguments.into_iter().map(str::to_owned).collect();
        options.variables = sim.variables().to_vec();
        let server = Server::start(model, &options);
        let text = |words: &str| Request::new(&words.repeat(20), 60);
        answers.push([
            server.complete(&text("one two three ")),
            server.complete(&text("four five six ")),
            server.complete(&text("seven eight ")),
        ]);
        let figures = server.control("status")["post_fetch"].clone();
        assert_eq!(figures.is_null(), early == "off");
        let uses_cpu = cache == "auto" && misses != "fetch";
        let expected = if uses_cpu { obstacles } else { &[] };
        if early == "on" {
            assert!(count(&figures, "early_bytes") > 0, "{figures}");
            assert_eq!(count(&figures, "cache_hits") > 0, cache == "auto");
            let obstacle = expected.last().copied();
            assert_eq!(figures["obstacle"].as_str(), obstacle, "{cache} {misses}");
            copied_none_itself(&figures);
        }
        let (status, log) = server.end();
        assert!(status.success(), "{}", log.join("\n"));
        let warnings = log
            .iter()
            .filter_map(|line| line.split_once("warn: post-fetch: "));
        let warnings: Vec<_> = warnings.map(|(_, text)| text).collect();
        assert_eq!(warnings, expected, "{cache} {misses}");
        // After a trial of each method, with graphs that the server was made to build.
        let is_choice = |line: &String| line.contains("=auto uses");
        let chooses = cache == "auto" && misses == "auto";
        assert_eq!(log.iter().any(is_choice), chooses, "{log:#?}");
        sim.report().assert_ordered();
        // The kernels of the simulated GPU are those of the CPU.
        assert_eq!(answers.last(), answers.first(), "{early} {cache} {misses}");
    }
    answers.swap_remove(0)
}
