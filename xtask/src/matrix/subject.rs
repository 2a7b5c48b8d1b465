//! The hosts of the table, and how each is started.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::host::{self, DropIn, Host};
use testkit::ik_llama_cpp::{self, ik_llama_cpp, short_commit};
use testkit::server::{LlamaCpp, Options, Server, llama_cpp, llama_cpp_dl, older_llama_cpp};
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
    kind: Kind,
}

enum Kind {
    /// A program of `hosts/`.
    Host(host::Program),
    Server(Build),
    IkServer,
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
    /// A simulated GPU for all but the experts.
    pub gpu: Option<&'a SimGgml>,
    /// Whether llama.cpp keeps experts on the GPU.
    pub own_cache: bool,
}

/// The arguments with which programs use the simulated GPU and keep experts in host memory.
const GPU: [&str; 3] = ["--device", "SIM0", "-cmoe"];
/// The arguments with which a third of the mixture's experts has a slot in llama.cpp's own cache.
const OWN_CACHE: [&str; 2] = ["--moe-cache-mib", "150"];
/// A text for llama-perplexity.
const TEXT: &str = include_str!("../../../hosts/c/text.txt");

/// The server of a build from before llama.cpp had an expert cache of its own.
pub const OLDER: &str = "llama-server-older";
/// Programs of ik_llama.cpp from source.
pub const IK_LLAMA_CPP: [&str; 3] = ["ik-llama-server", "ik-llama-perplexity", "ik-llama-cli"];
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
            ..Subject::of(name, name, &format!("b{built}"), kind(llama_cpp))
        });
        let version = format!("b{built}, GGML_BACKEND_DL");
        all.push(Subject {
            missing: build::missing_dl(),
            has_own_cache: has_own_cache(name),
            ..Subject::of(name_dl, name, &version, kind(llama_cpp_dl))
        });
    }
    let version = format!("b{}", LlamaCpp::older().build);
    let older = Kind::Server(older_llama_cpp);
    all.push(Subject {
        missing: build::missing_older(),
        ..Subject::of(OLDER, "llama-server", &version, older)
    });
    let ik_kinds = [
        Kind::IkServer,
        Kind::Perplexity(ik_llama_cpp),
        Kind::IkCompletion,
    ];
    for (name, kind) in IK_LLAMA_CPP.into_iter().zip(ik_kinds) {
        let title = match kind {
            Kind::IkServer => "ik_llama.cpp, llama-server",
            Kind::IkCompletion => "ik_llama.cpp, llama-cli",
            _ => "ik_llama.cpp, llama-perplexity",
        };
        all.push(Subject {
            missing: ik_build::missing(),
            no_gpu: Some(IK_NO_GPU),
            ..Subject::of(name, title, short_commit(), kind)
        });
    }
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
                |command| start.add_gpu(command, &[]),
            )),
            Kind::Server(build) => {
                let mut options = Options::new(1);
                options.build = *build;
                options.drop_in = start.drop_in.clone();
                if let Some(gpu) = start.gpu {
                    options.variables = gpu.variables().to_vec();
                    options.arguments = GPU.map(str::to_owned).to_vec();
                }
                if start.own_cache {
                    options.arguments.extend(OWN_CACHE.map(str::to_owned));
                }
                Box::new(Server::start(start.model, &options))
            }
            Kind::IkServer => {
                let mut options = ik_llama_cpp::server(1);
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
                start.add_gpu(&mut command, &GPU);
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
                start.add_gpu(&mut command, &GPU);
                Box::new(Program::start(command, &start.drop_in, false))
            }
            Kind::Bench(build) => {
                let mut command = program(build("llama-bench"), start);
                let repetitions = match start.drop_in {
                    DropIn::On(_) => "1000000",
                    _ => "2",
                };
                command.args(["--no-warmup", "-p", "8", "-n", "0", "-r", repetitions]);
                start.add_gpu(&mut command, &["-dev", "SIM0", "-ncmoe", "99"]);
                Box::new(Program::start(command, &start.drop_in, false))
            }
        }
    }
}

impl Start<'_> {
    /// Adds the simulated GPU, and the arguments with which a program keeps experts in host memory.
    fn add_gpu(&self, command: &mut Command, arguments: &[&str]) {
        if let Some(gpu) = self.gpu {
            gpu.prepare(command);
            command.args(arguments);
        }
        if self.own_cache {
            command.args(OWN_CACHE);
        }
    }
}

/// A program with its model.
fn program(path: PathBuf, start: &Start<'_>) -> Command {
    let mut command = Command::new(path);
    command.arg("-m").arg(start.model).args(["-t", "1"]);
    command
}
