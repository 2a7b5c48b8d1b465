//! Hosts with a simulated GPU and post-fetch.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program};
use testkit::server::{Options, Request, Server};
use testkit::sim_ggml::{Report, SimGgml};

use super::count;

/// The smallest batch that the host offloads. With 1, decoding is offloaded, too.
pub const DECODE: (&str, &str) = ("GGML_OP_OFFLOAD_MIN_BATCH", "1");

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
    pub fn from_source(mut self) -> Setup {
        self.from_source = true;
        self
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

/// llama-server from source gives the same answers without post-fetch, with it, and with experts
/// that stay on the device.
pub fn same_in_llama_server(model: &Path) {
    let mut answers = Vec::new();
    for (early, cache) in [("off", "0"), ("on", "0"), ("on", "auto")] {
        let sim = SimGgml::new(&[]);
        let mut options = Options::new(2);
        options.drop_in = DropIn::On(vec![
            ("LLAMA_POSTFETCH_MODE", early.into()),
            ("LLAMA_POSTFETCH_CACHE_MB", cache.into()),
        ]);
        let arguments = ["--device", "SIM0", "-cmoe"];
        options.arguments = arguments.map(str::to_owned).to_vec();
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
        if early == "on" {
            assert!(count(&figures, "early_bytes") > 0, "{figures}");
            assert_eq!(count(&figures, "cache_hits") > 0, cache == "auto");
            assert_eq!(figures["obstacle"], Value::Null);
        }
        let (status, log) = server.end();
        assert!(status.success(), "{}", log.join("\n"));
        // After a trial of each method, with graphs that the server was made to build.
        let is_choice = |line: &String| line.contains("=auto uses");
        assert_eq!(log.iter().any(is_choice), cache == "auto", "{log:#?}");
        sim.report().assert_ordered();
    }
    assert_eq!(answers[0], answers[1]);
    // The kernels of the simulated GPU are those of the CPU.
    assert_eq!(answers[0], answers[2]);
}
