//! Programs that run llama.cpp without a reference to llama-sidecar, driven by a test.
//!
//! They are in `hosts/` and take commands on standard input; `hosts/node/host.mjs` lists
//! them.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::fixtures::{cache, fixture, upstream_libraries};
use crate::llama_cpp::llama_cpp;
use crate::process::memory;

/// How long a host may take to answer: loading a model on a busy machine, or
/// compiling shaders for the first time.
const PATIENCE: Duration = Duration::from_secs(300);

/// How long a client holds a connection that is not closed.
const HELD: Duration = Duration::from_millis(500);

/// How long the last lines of the log may take to arrive.
const LOG_DELAY: Duration = Duration::from_secs(60);

/// llama.cpp with Vulkan, among the packages of node-llama-cpp.
const VULKAN_LIBRARIES: &str =
    "node/node_modules/@node-llama-cpp/linux-x64-vulkan/bins/linux-x64-vulkan";

/// The addon among the packages of llama.node.
const LLAMA_NODE: &str = "node_modules/@fugood/node-llama-linux-x64/index.node";

/// Keeps the weights of a program out of the CPU's special buffer types. Which types of weights
/// those take depends on the processor; the weights are not mapped then, and cannot be read back.
const PLAIN_BUFFERS: (&str, &str) = ("HOST_PLAIN_BUFFERS", "1");

/// What runs programs for AArch64, with the C library of Debian's cross compiler.
const ARM64_EMULATOR: [&str; 3] = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"];
/// The C program and the drop-in for AArch64, which `cargo xtask arm64` builds.
const ARM64_HOST: &str = "hosts-c-arm64/host";
const ARM64_DROP_IN: &str = "aarch64-unknown-linux-gnu/dropin/libllama_sidecar_preload.so";

/// Which program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// node-llama-cpp on the CPU.
    Node,
    /// node-llama-cpp with the Vulkan library, on a software device, with this many
    /// layers there.
    NodeVulkan(u32),
    /// The same with all layers on this many devices, which are one: each has memory and queues of its own.
    NodeVulkanDevices(usize),
    /// Python with ctypes.
    Python,
    /// The same, counting experts itself.
    PythonCounting,
    /// The same with the Vulkan library and all layers on a software device.
    PythonCountingVulkan,
    /// The same without counting, and with routed experts in host memory.
    PythonVulkanExpertsOnCpu,
    /// The same on the CPU, or on a simulated GPU that a test adds, which computes with the
    /// kernels of plain buffers: all weights are mapped, on each processor.
    PythonExpertsOnCpu,
    /// The same on llama.cpp from source, which has a cache of experts of its own, and whose
    /// scheduler calls back before it copies weights.
    PythonExpertsOnCpuFromSource,
    /// Python with llama-cpp-python, on llama.cpp from source.
    LlamaCppPython,
    /// C, linked with libllama, with one thread.
    C,
    /// The same, with all weights mapped, on each processor.
    CMapped,
    /// The same as `C`, with two threads.
    CTwoThreads,
    /// The same as `C`, built with ThreadSanitizer.
    CThreadSanitizer,
    /// The same as `C`, for AArch64 under emulation, with the drop-in for AArch64.
    CArm64,
    /// ik_llama.cpp in Python, with options that `hosts/python/ik_llama.py` lists.
    IkLlama(&'static [&'static str]),
    /// llama.node: llama.cpp in one object, whose calls the compiler has bound.
    LlamaNode,
    /// xllamacpp: llama.cpp in one object, whose calls go through the loader.
    Xllamacpp,
    /// C, linked with the newest libllama from source, for models of any architecture;
    /// `hosts/architectures/host.c` lists its commands. It starts without a model.
    Architectures,
    /// A stand-in for libllama that keeps its graph; `hosts/c/small_host.c` lists its commands.
    /// Whether it reserves memory before its first evaluation.
    Small(bool),
}

/// How the drop-in is used.
#[derive(Debug, Clone)]
pub enum DropIn {
    /// Not at all.
    Absent,
    /// Loaded, with nothing enabled.
    Idle,
    /// Hot-swap on, with these further variables; at debug level unless they set another.
    On(Vec<(&'static str, String)>),
}

/// A running host.
pub struct Host {
    child: Child,
    input: Option<ChildStdin>,
    output: Receiver<String>,
    log: Arc<Mutex<Vec<String>>>,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Program {
    fn command(self, model: &Path) -> Command {
        let hosts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../hosts");
        let mut command;
        match self {
            Program::Node | Program::NodeVulkan(_) | Program::NodeVulkanDevices(_) => {
                // Modules are found from where the program is.
                let program = fixture("node").join("host.mjs");
                command = Command::new("node");
                command.arg(program).arg(model);
                if let Program::NodeVulkan(layers) = self {
                    command.arg(layers.to_string());
                    on_software_device(&mut command);
                }
                if let Program::NodeVulkanDevices(count) = self {
                    command.arg("99");
                    on_software_device(&mut command);
                    command.env("GGML_VK_VISIBLE_DEVICES", vec!["0"; count].join(","));
                }
            }
            Program::Python
            | Program::PythonCounting
            | Program::PythonCountingVulkan
            | Program::PythonVulkanExpertsOnCpu
            | Program::PythonExpertsOnCpu
            | Program::PythonExpertsOnCpuFromSource => {
                let on_device = matches!(
                    self,
                    Program::PythonCountingVulkan | Program::PythonVulkanExpertsOnCpu
                );
                let libraries = match self {
                    _ if on_device => fixture(VULKAN_LIBRARIES),
                    Program::PythonExpertsOnCpuFromSource => llama_cpp(""),
                    _ => upstream_libraries(),
                };
                let on_cpu = matches!(
                    self,
                    Program::PythonExpertsOnCpu | Program::PythonExpertsOnCpuFromSource
                );
                command = Command::new("python3");
                command
                    .arg(hosts.join("python/host.py"))
                    .arg(libraries)
                    .arg(model);
                command.args(match self {
                    Program::Python => None,
                    Program::PythonVulkanExpertsOnCpu => Some("experts-on-cpu"),
                    _ if on_cpu => Some("experts-on-cpu"),
                    _ => Some("count"),
                });
                if on_device {
                    on_software_device(&mut command);
                }
                if on_cpu {
                    command.env(PLAIN_BUFFERS.0, PLAIN_BUFFERS.1);
                }
            }
            Program::LlamaCppPython => {
                command = Command::new(cache().join("llama-cpp-python/bin/python"));
                command
                    .arg(hosts.join("python/llama_cpp_python.py"))
                    .arg(model)
                    .env("LLAMA_CPP_LIB_PATH", llama_cpp(""));
            }
            Program::IkLlama(options) => {
                command = Command::new(ik_llama_file("bin/python"));
                command.arg(hosts.join("python/ik_llama.py")).arg(model);
                command.args(options);
            }
            Program::LlamaNode => {
                command = Command::new("sh");
                command
                    .args(["-c", "exec node \"$0\" \"$@\" 3>&1 1>&2"])
                    .arg(hosts.join("node/llama_node.js"))
                    .arg(cache().join("llama-node").join(LLAMA_NODE))
                    .arg(model);
            }
            Program::Xllamacpp => {
                command = Command::new(cache().join("xllamacpp/bin/python"));
                command
                    .arg(hosts.join("python/xllamacpp_host.py"))
                    .arg(model);
            }
            Program::C | Program::CMapped | Program::CTwoThreads | Program::CThreadSanitizer => {
                let folder = match self {
                    Program::CThreadSanitizer => "hosts-c-tsan",
                    _ => "hosts-c",
                };
                command = Command::new(built(&format!("{folder}/host")));
                command.arg(upstream_libraries()).arg(model);
                if self == Program::CTwoThreads {
                    command.env("HOST_THREADS", "2");
                }
                if self == Program::CMapped {
                    command.env(PLAIN_BUFFERS.0, PLAIN_BUFFERS.1);
                }
            }
            Program::CArm64 => {
                let [emulator, arguments @ ..] = ARM64_EMULATOR;
                command = Command::new(emulator);
                command
                    .args(arguments)
                    .arg(built(ARM64_HOST))
                    .arg(fixture("upstream-arm64"))
                    .arg(model);
            }
            Program::Architectures => {
                command = Command::new(built("hosts-architectures/host"));
            }
            Program::Small(reserves) => {
                command = Command::new(built("hosts-c/small_host"));
                command.arg(upstream_libraries()).arg(model);
                if !reserves {
                    command.arg("no-reserve");
                }
            }
        }
        command
    }
}

/// Lets a host find the Vulkan loader and device of the fixtures.
fn on_software_device(command: &mut Command) {
    command.envs(software_device());
}

/// Returns the variables with which a program finds the Vulkan loader and device of the fixtures.
pub fn software_device() -> [(String, String); 4] {
    let vulkan = fixture("vulkan");
    let path = |name: &str| vulkan.join(name).display().to_string();
    [
        ("VK_DRIVER_FILES", path("driver.json")),
        ("LD_LIBRARY_PATH", path("lib")),
        ("GGML_VK_VISIBLE_DEVICES", "0".to_owned()),
        ("MESA_SHADER_CACHE_DIR", path("shaders")),
    ]
    .map(|(name, value)| (name.to_owned(), value))
}

/// A file of ik_llama.cpp with its Python bindings.
///
/// Panics with the command that makes it when it is not there.
pub fn ik_llama_file(path: &str) -> PathBuf {
    let path = cache().join("ik-llama").join(path);
    assert!(
        path.exists(),
        "{} is missing: run 'cargo xtask hosts' first",
        path.display()
    );
    path
}

/// The drop-in library, in its release build.
///
/// Panics with the command that makes it when it is not there.
pub fn preload_library() -> PathBuf {
    built("dropin/libllama_sidecar_preload.so")
}

/// A file that `cargo xtask hosts --build` made in the target folder.
pub fn built(path: &str) -> PathBuf {
    found(path)
        .unwrap_or_else(|| panic!("{path} is missing: run 'cargo xtask hosts --build' first"))
}

fn found(path: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().expect("the path of this program");
    let mut found = test.ancestors().map(|folder| folder.join(path));
    found.find(|path| path.exists())
}

/// Returns why programs for AArch64 cannot be run here, if so.
pub fn missing_arm64() -> Option<&'static str> {
    [ARM64_HOST, ARM64_DROP_IN]
        .iter()
        .any(|path| found(path).is_none())
        .then_some("'cargo xtask arm64' builds and tests it")
}

/// Loads a library of the tests before that of the drop-in.
pub fn load_beside(command: &mut Command, library: &str) {
    let mut all = built(library).into_os_string();
    if let Some((_, Some(preloaded))) = command.get_envs().find(|(name, _)| *name == "LD_PRELOAD") {
        all.push(":");
        all.push(preloaded);
    }
    command.env("LD_PRELOAD", all);
}

/// A program that is about to be started, without variables of llama-sidecar and without input.
pub fn plain_command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    without_settings(&mut command);
    command.stdin(Stdio::null());
    command
}

/// Removes the variables of llama-sidecar from the environment of a program that is about to be started:
/// settings of the tests are not for it.
pub fn without_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LLAMA_") {
            command.env_remove(name);
        }
    }
}

impl DropIn {
    /// Hot-swap on, with these variables.
    pub fn with(variables: &[(&'static str, &str)]) -> DropIn {
        let owned = |&(name, value): &(&'static str, &str)| (name, value.to_owned());
        DropIn::On(variables.iter().map(owned).collect())
    }

    /// Sets the variables of a program that is about to be started.
    pub fn prepare(&self, command: &mut Command, socket: &Path) {
        self.prepare_with(command, socket, preload_library);
    }

    fn prepare_with(&self, command: &mut Command, socket: &Path, library: fn() -> PathBuf) {
        without_settings(command);
        if !matches!(self, DropIn::Absent) {
            command.env("LD_PRELOAD", library());
        }
        if let DropIn::On(variables) = self {
            command
                .env("LLAMA_SIDECAR_HOTSWAP", "1")
                .env("LLAMA_HOTSWAP_POLL_MS", "0")
                .env("LLAMA_SIDECAR_CONTROL", socket)
                .env("LLAMA_SIDECAR_LOG", "debug")
                .envs(variables.iter().map(|(name, value)| (name, value)));
        }
    }
}

/// The numbers of swapped and returned tensors of the only model, in the report of a reload.
pub fn taken(reply: &Value) -> (u64, u64) {
    assert_eq!(reply["ok"], true, "{reply}");
    let count = |name: &str| reply["reports"][0][name].as_u64().expect("a count");
    (count("swapped"), count("returned"))
}

/// Returns the hash of all logits in an answer of the C program.
pub fn hash(answer: &str) -> String {
    let hash = answer.split_once("hash ");
    hash.unwrap_or_else(|| panic!("{answer}")).1.to_owned()
}

/// Sends a command to a control socket and returns the answer.
pub fn control(socket: &Path, command: &str) -> Value {
    request(socket, &serde_json::json!({"cmd": command}))
}

/// Sends a request to a control socket and returns the answer. Tries again while other clients
/// have all connections.
pub fn request(socket: &Path, request: &Value) -> Value {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut stream = UnixStream::connect(socket).expect("the control socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        // A connection that is turned away is closed, with an answer.
        let _ = writeln!(stream, "{request}");
        let mut answer = String::new();
        BufReader::new(stream)
            .read_line(&mut answer)
            .expect("an answer");
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        if answer["busy"] != true || Instant::now() > deadline {
            return answer;
        }
    }
}

/// Disturbs a control socket until the end: this many clients send nothing, half a line or junk, hold
/// their connections as long as they may, and come back after a pause. Counts connections.
pub fn disturb(
    socket: &Path,
    clients: usize,
    pause: Duration,
    over: &AtomicBool,
    connections: &AtomicU64,
) {
    std::thread::scope(|scope| {
        for number in 0..clients {
            scope.spawn(move || {
                let text = [&b""[..], b"{\"cmd\":", b"rubbish\n", &[0xff; 4096]][number % 4];
                while !over.load(Ordering::Relaxed) {
                    std::thread::sleep(pause);
                    let Ok(mut client) = UnixStream::connect(socket) else {
                        continue;
                    };
                    connections.fetch_add(1, Ordering::Relaxed);
                    let _ = client.write_all(text);
                    // Until the other side ends it.
                    let _ = client.set_read_timeout(Some(HELD));
                    let _ = client.read_to_end(&mut Vec::new());
                }
            });
        }
    });
}

impl Host {
    /// Starts a host and waits until it has loaded its model.
    pub fn start(program: Program, model: &Path, drop_in: &DropIn) -> Host {
        Host::start_with(program, model, drop_in, |_| {})
    }

    /// The same with further settings of the process.
    pub fn start_with(
        program: Program,
        model: &Path,
        drop_in: &DropIn,
        set: impl FnOnce(&mut Command),
    ) -> Host {
        let started = Host::start_or_end(program, model, drop_in, set);
        started.unwrap_or_else(|log| panic!("the host is not ready:\n{log}"))
    }

    /// The same; the log of a host that ends before it has loaded its model.
    pub fn start_or_end(
        program: Program,
        model: &Path,
        drop_in: &DropIn,
        set: impl FnOnce(&mut Command),
    ) -> Result<Host, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("socket");
        let mut command = program.command(model);
        let library = match program {
            Program::CArm64 => || built(ARM64_DROP_IN),
            _ => preload_library,
        };
        drop_in.prepare_with(&mut command, &socket, library);
        set(&mut command);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the host starts");
        let (send, output) = channel();
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(child.stderr.take().expect("piped"));
        let kept = log.clone();
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                kept.lock().expect("no panic").push(line);
            }
        });
        let host = Host {
            input: child.stdin.take(),
            child,
            output,
            log,
            socket,
            _folder: folder,
        };
        match host.output.recv_timeout(PATIENCE) {
            Ok(ready) if ready == "ready" => Ok(host),
            _ => Err(host.log().join("\n")),
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command without waiting for the answer.
    pub fn tell(&mut self, command: &str) {
        let input = self.input.as_mut().expect("not ended");
        // In one write, which the host reads at once.
        let line = format!("{command}\n");
        input.write_all(line.as_bytes()).expect("the host lives");
    }

    /// The next line of its output.
    pub fn line(&mut self) -> String {
        self.output.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            let _ = self.child.kill();
            panic!(
                "the host does not answer; its log:\n{}",
                self.log().join("\n")
            )
        })
    }

    /// Sends a command and returns the answer.
    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.line()
    }

    /// The same; `None` when the process ends instead of answering.
    pub fn ask_or_end(&mut self, command: &str) -> Option<String> {
        let input = self.input.as_mut().expect("not ended");
        // Without a reader, there is no answer either.
        let _ = writeln!(input, "{command}");
        match self.output.recv_timeout(PATIENCE) {
            Err(RecvTimeoutError::Timeout) => panic!("the host does not answer '{command}'"),
            answer => answer.ok(),
        }
    }

    /// Whether it has not ended.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Everything it wrote to standard error.
    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("no panic").clone()
    }

    /// The log, to be read also after the host has ended.
    pub fn keep_log(&self) -> Arc<Mutex<Vec<String>>> {
        self.log.clone()
    }

    /// Lines of the log that contain a text.
    pub fn logged(&self, text: &str) -> Vec<String> {
        let mut lines = self.log();
        lines.retain(|line| line.contains(text));
        lines
    }

    /// Waits until so many lines of the log contain a text: a thread reads the log. Returns them.
    pub fn wait_logged(&self, text: &str, count: usize) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let lines = self.logged(text);
            if lines.len() >= count {
                return lines;
            }
            assert!(
                Instant::now() < deadline,
                "{count} lines with '{text}' are not in the log:\n{}",
                self.log().join("\n")
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Writes a text of so many tokens, and the hashes of the logits of each step.
    pub fn text(&mut self, tokens: usize) -> Transcript {
        self.steps("text", tokens)
    }

    /// The same for another command that writes tokens.
    pub fn steps(&mut self, command: &str, tokens: usize) -> Transcript {
        let before = self.hashes().len();
        let ids = self.ask(&format!("{command} {tokens}"));
        // The log comes through another pipe.
        let deadline = Instant::now() + LOG_DELAY;
        let mut hashes = self.hashes();
        while hashes.len() < before + tokens && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            hashes = self.hashes();
        }
        Transcript {
            ids,
            hashes: hashes.split_off(before),
        }
    }

    fn hashes(&self) -> Vec<String> {
        let lines = self.logged("output generation");
        let hash = |line: &String| line.rsplit(' ').next().unwrap_or_default().to_owned();
        lines.iter().map(hash).collect()
    }

    /// Path of its control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a command to the control socket and returns the answer.
    pub fn control(&self, command: &str) -> Value {
        control(&self.socket, command)
    }

    /// Sends a request to the control socket and returns the answer.
    pub fn request(&self, sent: &Value) -> Value {
        request(&self.socket, sent)
    }

    /// Resident memory in bytes that is not shared with files.
    pub fn private_memory(&self) -> u64 {
        memory(&self.id().to_string(), "RssAnon:")
    }

    /// Sends it a signal, waits until it is gone, and returns the signal that ended it.
    pub fn end_by(mut self, signal: libc::c_int) -> Option<libc::c_int> {
        // SAFETY: a child of this process that was not waited for.
        unsafe { libc::kill(self.id() as libc::pid_t, signal) };
        self.child.wait().expect("a child").signal()
    }

    /// Ends it and returns its exit code.
    pub fn end(self) -> Option<i32> {
        self.status().code()
    }

    /// Ends it, unless it has ended, and returns how it ended.
    pub fn status(mut self) -> ExitStatus {
        let input = self.input.take();
        let _ = writeln!(input.expect("not ended"), "end");
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the host does not end; its log:\n{}", self.log().join("\n"))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a host wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transcript {
    /// The tokens, one after the other.
    pub ids: String,
    /// A hash of the raw logits of each step; empty without the drop-in.
    pub hashes: Vec<String>,
}

/// Replaces a file by a copy of another, as the tools do: copies it beside, then renames.
pub fn replace(path: &Path, by: &Path) {
    let beside = path.with_extension("new");
    std::fs::copy(by, &beside).expect("free space");
    std::fs::rename(beside, path).expect("the same folder");
}

/// Replaces a file by another name of a file: no byte is copied, and the replaced one stays as it is
/// under its other names.
pub fn link(path: &Path, to: &Path) {
    let beside = path.with_extension("new");
    // A rename between two names of the same file does nothing.
    let _ = std::fs::remove_file(&beside);
    std::fs::hard_link(to, &beside).expect("the same file system");
    std::fs::rename(beside, path).expect("the same folder");
}
