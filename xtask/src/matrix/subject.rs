//! The hosts of the table, and how each is started.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::host::{self, DropIn, Host};
use testkit::ik_llama_cpp::{self, ik_llama_cpp, short_commit};
use testkit::server::{
    LlamaCpp, Options, Server, llama_cpp, llama_cpp_dl, llama_cpp_linked, older_llama_cpp,
};
use testkit::sim_ggml::SimGgml;

use super::running::{PROMPT, Program, Running};
use crate::{fixtures, ik_llama_cpp as ik_build, llama_cpp as build};

/// A host.
pub struct Subject {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// Its version.
    pub version: String,
    /// Why it cannot run here, if so.
    pub missing: Option<String>,
    /// Why its experts cannot be in host memory beside a simulated GPU, if so.
    pub no_gpu: Option<&'static str>,
    /// Whether its experts are in the memory of a GPU.
    pub experts_on_gpu: bool,
    /// Whether it has an option for llama.cpp's own expert cache.
    pub has_own_cache: bool,
    /// How it can divide a model over several simulated GPUs.
    pub split_modes: &'static [&'static str],
    kind: Kind,
}

enum Kind {
    /// A program of `hosts/`.
    Host(host::Program),
    Server(Build),
    /// A server of ik_llama.cpp, with so many slots.
    IkServer(fn(usize) -> Options),
    IkCompletion,
    Completion(Build),
    Perplexity(Build),
    Bench(Build),
}

/// Where programs of llama.cpp are.
type Build = fn(&str) -> PathBuf;

/// How a host is started.
pub struct Start<'a> {
    /// A folder for its files.
    pub folder: &'a Path,
    /// The model.
    pub model: &'a Path,
    /// How the drop-in takes part.
    pub drop_in: DropIn,
    /// Simulated GPUs, and what they are for.
    pub gpu: Option<(&'a SimGgml, Gpu)>,
}

/// What a program uses simulated GPUs for.
#[derive(Clone, Copy)]
pub enum Gpu {
    /// One, for all but the experts.
    AllButExperts,
    /// The same, and a third of the mixture's experts has a slot in llama.cpp's own cache.
    OwnCache,
    /// Two, for the whole model, which is divided in this way.
    Split(&'static str),
}

/// How a model is divided by the programs of llama.cpp.
const SPLIT_MODES: &[&str] = &["layer", "tensor"];
/// A text for llama-perplexity.
const TEXT: &str = include_str!("../../../hosts/c/text.txt");

/// The C program for AArch64.
pub const ARM64: &str = "c-arm64";
/// Programs of llama.cpp without shared libraries.
pub const LINKED: [&str; 2] = ["llama-server-linked", "llama-completion-linked"];
/// The server of a build from before llama.cpp had an expert cache of its own.
pub const OLDER: &str = "llama-server-older";
/// Programs of ik_llama.cpp from source.
pub const IK_LLAMA_CPP: [&str; 3] = ["ik-llama-server", "ik-llama-perplexity", "ik-llama-cli"];
/// The server of ik_llama.cpp with Vulkan.
pub const IK_LLAMA_VULKAN: &str = "ik-llama-server-vulkan";
const IK_NO_GPU: &str = "ik_llama.cpp has no functions for devices";

/// Returns all hosts.
pub fn all() -> Vec<Subject> {
    let built = LlamaCpp::tested().build;
    let node = fixtures::NODE_PACKAGES[0].replace('@', " ");
    let vulkan = || fixtures::vulkan().err().map(|error| format!("{error:#}"));
    let python = "ctypes, libraries of node-llama-cpp";
    let mut all = vec![
        Subject::new("node", "node-llama-cpp", &node, host::Program::Node),
        Subject {
            missing: vulkan(),
            ..Subject::new(
                "node-vulkan",
                "node-llama-cpp, Vulkan",
                &node,
                host::Program::NodeVulkan(99),
            )
        },
        Subject::new(
            "python",
            "Python",
            python,
            host::Program::PythonExpertsOnCpu,
        ),
        Subject::new("c", "C", "libraries of node-llama-cpp", host::Program::C),
        Subject {
            missing: host::missing_arm64().map(str::to_owned),
            ..Subject::new(
                ARM64,
                "C, AArch64 under emulation",
                "libraries of node-llama-cpp",
                host::Program::CArm64,
            )
        },
        Subject {
            missing: build::missing(),
            ..Subject::new(
                "llama-cpp-python",
                "llama-cpp-python",
                &format!(
                    "{}, llama.cpp b{built}",
                    fixtures::llama_cpp_python_version()
                ),
                host::Program::LlamaCppPython,
            )
        },
        Subject::new(
            "ik-llama",
            "ik_llama.cpp, Python",
            &fixtures::IK_LLAMA.replace("==", " "),
            host::Program::IkLlama(&[]),
        ),
        Subject::new(
            "xllamacpp",
            "xllamacpp",
            &fixtures::XLLAMACPP.replace("==", " "),
            host::Program::Xllamacpp,
        ),
        Subject::new(
            "llama-node",
            "llama.node",
            &fixtures::LLAMA_NODE
                .replace("@fugood/", "")
                .replace('@', " "),
            host::Program::LlamaNode,
        ),
    ];
    type Make = fn(Build) -> Kind;
    let programs: [(&str, &str, Make); 4] = [
        ("llama-server", "llama-server-dl", Kind::Server),
        ("llama-completion", "llama-completion-dl", Kind::Completion),
        ("llama-perplexity", "llama-perplexity-dl", Kind::Perplexity),
        ("llama-bench", "llama-bench-dl", Kind::Bench),
    ];
    // llama-bench has options of its own.
    let has_own_cache = |name: &str| name != "llama-bench";
    for (name, name_dl, kind) in programs {
        all.push(Subject {
            missing: build::missing(),
            has_own_cache: has_own_cache(name),
            split_modes: SPLIT_MODES,
            ..Subject::of(name, name, &format!("b{built}"), kind(llama_cpp))
        });
        let version = format!("b{built}, GGML_BACKEND_DL");
        all.push(Subject {
            missing: build::missing_dl(),
            has_own_cache: has_own_cache(name),
            split_modes: SPLIT_MODES,
            ..Subject::of(name_dl, name, &version, kind(llama_cpp_dl))
        });
    }
    let version = format!("b{built}, BUILD_SHARED_LIBS=OFF");
    for (name, title, kind) in [
        (LINKED[0], "llama-server", Kind::Server(llama_cpp_linked)),
        (
            LINKED[1],
            "llama-completion",
            Kind::Completion(llama_cpp_linked),
        ),
    ] {
        all.push(Subject {
            missing: build::missing_linked(),
            no_gpu: Some("a program without shared libraries loads no simulated GPU"),
            ..Subject::of(name, title, &version, kind)
        });
    }
    let version = format!("b{}", LlamaCpp::older().build);
    let older = Kind::Server(older_llama_cpp);
    all.push(Subject {
        missing: build::missing_older(),
        split_modes: SPLIT_MODES,
        ..Subject::of(OLDER, "llama-server", &version, older)
    });
    let ik_kinds = [
        Kind::IkServer(ik_llama_cpp::server),
        Kind::Perplexity(ik_llama_cpp),
        Kind::IkCompletion,
    ];
    for (name, kind) in IK_LLAMA_CPP.into_iter().zip(ik_kinds) {
        let title = match kind {
            Kind::IkServer(_) => "ik_llama.cpp, llama-server",
            Kind::IkCompletion => "ik_llama.cpp, llama-cli",
            _ => "ik_llama.cpp, llama-perplexity",
        };
        all.push(Subject {
            missing: ik_build::missing(),
            no_gpu: Some(IK_NO_GPU),
            ..Subject::of(name, title, short_commit(), kind)
        });
    }
    all.push(Subject {
        missing: ik_build::missing_vulkan().or_else(vulkan),
        no_gpu: Some(IK_NO_GPU),
        experts_on_gpu: true,
        ..Subject::of(
            IK_LLAMA_VULKAN,
            "ik_llama.cpp, llama-server, Vulkan",
            short_commit(),
            Kind::IkServer(ik_llama_cpp::server_vulkan),
        )
    });
    all
}

impl Subject {
    fn of(name: &'static str, title: &'static str, version: &str, kind: Kind) -> Subject {
        Subject {
            name,
            title,
            version: version.to_owned(),
            missing: None,
            no_gpu: None,
            experts_on_gpu: false,
            has_own_cache: false,
            split_modes: &[],
            kind,
        }
    }

    fn new(
        name: &'static str,
        title: &'static str,
        version: &str,
        program: host::Program,
    ) -> Subject {
        Subject {
            no_gpu: match program {
                host::Program::PythonExpertsOnCpu => None,
                host::Program::IkLlama(_) => Some(IK_NO_GPU),
                _ => Some("the program has no setting for experts in host memory beside a GPU"),
            },
            experts_on_gpu: matches!(program, host::Program::NodeVulkan(_)),
            ..Subject::of(name, title, version, Kind::Host(program))
        }
    }

    /// Starts it and waits until its model is loaded.
    pub fn start(&self, start: &Start<'_>) -> Box<dyn Running> {
        match &self.kind {
            Kind::Host(program) => Box::new(Host::start_with(
                *program,
                start.model,
                &start.drop_in,
                |command| {
                    if let Some((gpu, _)) = start.gpu {
                        gpu.prepare(command);
                    }
                },
            )),
            Kind::Server(build) => {
                let mut options = Options::new(1);
                options.build = *build;
                options.drop_in = start.drop_in.clone();
                if let Some((gpu, used)) = start.gpu {
                    options.variables = gpu.variables().to_vec();
                    let arguments = used.arguments().into_iter();
                    options.arguments = arguments.map(str::to_owned).collect();
                }
                Box::new(Server::start(start.model, &options))
            }
            Kind::IkServer(make) => {
                let mut options = make(1);
                if self.experts_on_gpu {
                    options.arguments = ["-ngl", "99"].map(str::to_owned).to_vec();
                }
                options.drop_in = start.drop_in.clone();
                let mut server = Server::start(start.model, &options);
                if matches!(start.drop_in, DropIn::On(_)) {
                    // After three evaluations its graph is known to be built again when needed.
                    server.evaluate(None);
                }
                Box::new(server)
            }
            Kind::IkCompletion => {
                let mut command = program(ik_llama_cpp("llama-cli"), start);
                command.args(["--simple-io", "--no-warmup", "--temp", "0"]);
                command.args(["--ignore-eos", "-c", "256"]);
                let waits = matches!(start.drop_in, DropIn::On(_));
                match waits {
                    // A swap comes before the text.
                    true => command.args(["-cnv", "--chat-template", "chatml"]),
                    false => command.args(["-n", "6", "-p", PROMPT]),
                };
                Box::new(Program::start(command, &start.drop_in, waits))
            }
            Kind::Completion(build) => {
                let mut command = program(build("llama-completion"), start);
                command.args(["--simple-io", "--no-warmup", "--temp", "0"]);
                command.args(["--ignore-eos", "-c", "256"]);
                let waits = matches!(start.drop_in, DropIn::On(_));
                match waits {
                    // A swap comes before the text.
                    true => command.args(["-cnv", "--chat-template", "chatml"]),
                    false => command.args(["-no-cnv", "-n", "6", "-p", PROMPT]),
                };
                start.add_gpu(&mut command, Gpu::arguments);
                Box::new(Program::start(command, &start.drop_in, waits))
            }
            Kind::Perplexity(build) => {
                let mut command = program(build("llama-perplexity"), start);
                let chunks = match start.drop_in {
                    DropIn::On(_) => "-1",
                    _ => "4",
                };
                command.args(["--no-warmup", "-c", "16", "-b", "16", "--chunks", chunks]);
                let text = start.folder.join("text");
                std::fs::write(&text, TEXT.repeat(100)).expect("free space");
                command.arg("-f").arg(text);
                start.add_gpu(&mut command, Gpu::arguments);
                Box::new(Program::start(command, &start.drop_in, false))
            }
            Kind::Bench(build) => {
                let mut command = program(build("llama-bench"), start);
                let repetitions = match start.drop_in {
                    DropIn::On(_) => "1000000",
                    _ => "2",
                };
                command.args(["--no-warmup", "-p", "8", "-n", "0", "-r", repetitions]);
                start.add_gpu(&mut command, Gpu::arguments_for_bench);
                Box::new(Program::start(command, &start.drop_in, false))
            }
        }
    }
}

impl Start<'_> {
    /// Adds the simulated GPUs, and the arguments for their use.
    fn add_gpu(&self, command: &mut Command, arguments: fn(Gpu) -> Vec<&'static str>) {
        if let Some((gpu, used)) = self.gpu {
            gpu.prepare(command);
            command.args(arguments(used));
        }
    }
}

impl Gpu {
    /// Arguments of llama.cpp's programs.
    fn arguments(self) -> Vec<&'static str> {
        match self {
            Gpu::AllButExperts => vec!["--device", "SIM0", "-cmoe"],
            Gpu::OwnCache => vec!["--device", "SIM0", "-cmoe", "--moe-cache-mib", "150"],
            Gpu::Split(mode) => vec!["--device", "SIM0,SIM1", "-ngl", "99", "--split-mode", mode],
        }
    }

    /// Arguments of llama-bench, which has no cache of its own.
    fn arguments_for_bench(self) -> Vec<&'static str> {
        match self {
            Gpu::Split(mode) => vec!["-dev", "SIM0/SIM1", "-ngl", "99", "-sm", mode],
            Gpu::AllButExperts | Gpu::OwnCache => vec!["-dev", "SIM0", "-ncmoe", "99"],
        }
    }
}

/// A program with its model.
fn program(path: PathBuf, start: &Start<'_>) -> Command {
    let mut command = Command::new(path);
    command.arg("-m").arg(start.model).args(["-t", "1"]);
    command
}
