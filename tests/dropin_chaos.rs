//! What happens to a program beside the drop-in, while a file is swapped: signals, limits, calls that the
//! kernel denies, files and folders that go, clients that hang. The program answers as without the drop-in,
//! or the swap is refused by name, and it ends as without it.
//!
//! Each event is a row: with one capability in turn in a C program, and some in llama-server. The long form has each
//! event with all capabilities in both, at three moments.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, disturb, hash, load_beside, preload_library, replace};
use testkit::memory_limit::MemoryLimit;
use testkit::process::{before_exec, limit, limit_of, memory};
use testkit::server::{Options, Request, Server};
use testkit::{long_tests, skipped};

const MODEL: &str = "small-moe.gguf";
const OTHER: &str = "small-moe-mixed.gguf";
/// Of so many events one happens to a server, too, unless the form is long.
const OF_SERVER: usize = 12;
/// The answer has a hash of all logits of a batch, which begins a new text.
const ASK: &str = "prefill 8";
/// What a server continues by a token: in one evaluation, which a swap does not divide.
const PROMPT: &str = "The capital of France is";
/// How long a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time in which a program without a request is watched, and the ticks of CPU that it may use.
const AT_REST: (Duration, u64) = (Duration::from_millis(200), 10);

/// The capabilities of a row, beside hot-swap, with their variables.
const CAPABILITIES: [&str; 3] = ["hot-swap", "streaming", "outputs"];

fn variables(capability: &str, folder: &Path) -> Vec<(&'static str, String)> {
    let file = |name: &str| folder.join(name).display().to_string();
    match capability {
        "streaming" => vec![
            ("LLAMA_EXPERT_STREAM", "on".into()),
            ("LLAMA_EXPERT_STREAM_MEMORY_MB", "8".into()),
        ],
        "outputs" => vec![
            ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
            ("LLAMA_EXPERT_TRACE_OUTPUT", file("trace.json")),
            ("LLAMA_EXPERT_TRACE_ROUTES", file("expert.routes")),
            ("LLAMA_SIDECAR_LOGITS_HASHES", file("hashes")),
        ],
        _ => Vec::new(),
    }
}

/// Where a row has its files.
struct Place {
    model: PathBuf,
    library: PathBuf,
    /// A file system of the program alone is mounted here, where an event needs one.
    outputs: PathBuf,
    /// The control group of the program, where an event needs one.
    group: Mutex<Option<MemoryLimit>>,
    _folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::copy(fixture(MODEL), at("model.gguf")).expect("free space");
        fs::copy(preload_library(), at("library.so")).expect("free space");
        fs::create_dir(at("outputs")).expect("a folder");
        Place {
            model: at("model.gguf"),
            library: at("library.so"),
            outputs: at("outputs"),
            group: Mutex::default(),
            _folder: folder,
        }
    }
}

type Set = Box<dyn Fn(&Place, &mut Command) + Send + Sync>;
type Strike = Box<dyn Fn(&Place, &Running) + Send + Sync>;

/// A program that answers.
enum Beside {
    Host(Host),
    Server(Server),
}

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Host,
    Server,
}

impl Beside {
    fn start(
        kind: Kind,
        model: &Path,
        drop_in: DropIn,
        set: impl FnOnce(&mut Command),
    ) -> Result<Beside, String> {
        match kind {
            Kind::Host => {
                Host::start_or_end(Program::CMapped, model, &drop_in, set).map(Beside::Host)
            }
            Kind::Server => {
                let options = Options {
                    // Else some weights are not mapped, and not streamed.
                    arguments: vec!["--no-repack".into()],
                    patience: Duration::from_secs(30),
                    drop_in,
                    ..Options::new(1)
                };
                Server::start_or_end(model, &options, set).map(Beside::Server)
            }
        }
    }

    fn running(&self) -> Running {
        let (process, socket) = match self {
            Beside::Host(host) => (host.id(), host.socket()),
            Beside::Server(server) => (server.id(), server.socket()),
        };
        Running {
            process,
            socket: socket.to_owned(),
        }
    }

    /// What stands for all logits of an answer; `None` if there is none, since the program ended or does not answer.
    fn ask(&mut self) -> Option<String> {
        match self {
            Beside::Host(host) => host.ask_or_end(ASK).map(|answer| hash(&answer)),
            Beside::Server(server) => {
                let mut request = Request::new(PROMPT, 1);
                request.cache_prompt = false;
                let answer = server.try_complete(&request).ok()?;
                Some(format!("{}{}", answer.text, answer.probabilities))
            }
        }
    }

    fn is_alive(&mut self) -> bool {
        match self {
            Beside::Host(host) => host.is_alive(),
            Beside::Server(server) => server.lives(),
        }
    }

    /// Ends it, unless it has ended; how it ended, and its log.
    fn end(self) -> (ExitStatus, Vec<String>) {
        match self {
            Beside::Host(host) => {
                let log = host.keep_log();
                let status = host.status();
                let log = log.lock().expect("no panic").clone();
                (status, log)
            }
            Beside::Server(server) => server.end(),
        }
    }
}

/// What a program is that runs.
struct Running {
    process: u32,
    socket: PathBuf,
}

impl Running {
    fn signal(&self, number: libc::c_int) {
        // SAFETY: a child that was not waited for.
        unsafe { libc::kill(self.process as libc::pid_t, number) };
    }
}

struct Event {
    name: String,
    /// Before the program starts.
    set: Set,
    /// While a file is swapped and the program evaluates.
    strike: Strike,
}

impl Event {
    fn at_start(
        name: impl Into<String>,
        set: impl Fn(&Place, &mut Command) + Send + Sync + 'static,
    ) -> Event {
        Event {
            name: name.into(),
            set: Box::new(set),
            strike: Box::new(|_, _| ()),
        }
    }

    fn later(
        name: impl Into<String>,
        strike: impl Fn(&Place, &Running) + Send + Sync + 'static,
    ) -> Event {
        Event {
            name: name.into(),
            set: Box::new(|_, _| ()),
            strike: Box::new(strike),
        }
    }
}

/// The result of a row.
#[derive(Debug)]
struct Outcome {
    /// What stands for each answer; `None` where there is none.
    answers: Vec<Option<String>>,
    /// Of the last swap before the last answer: how many tensors, or why none.
    swapped: Result<u64, String>,
    is_alive: bool,
    status: ExitStatus,
    /// Ticks of CPU without a request.
    at_rest: u64,
    log: Vec<String>,
}

/// Asks the control socket for a reload.
fn reload(socket: &Path) -> Result<u64, String> {
    let exchange = || {
        let mut client = UnixStream::connect(socket)?;
        client.set_read_timeout(Some(PATIENCE))?;
        client.write_all(b"{\"cmd\":\"reload\"}\n")?;
        let mut line = String::new();
        BufReader::new(client).read_line(&mut line)?;
        std::io::Result::Ok(line)
    };
    let line = exchange().map_err(|error| format!("no answer: {error}"))?;
    let reply: Value = serde_json::from_str(&line).map_err(|error| format!("{error}: {line}"))?;
    let report = &reply["reports"][0];
    match (reply["ok"].as_bool(), report["swapped"].as_u64()) {
        (Some(true), Some(swapped)) => Ok(swapped),
        _ => {
            let why = [
                &reply["error"],
                &report["error"],
                &report["files"][0]["reason"],
            ];
            let text = why.into_iter().find_map(Value::as_str);
            Err(text.map_or_else(|| reply.to_string(), str::to_owned))
        }
    }
}

/// Ticks of CPU that a process has used.
fn ticks(process: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default();
    let fields = fields.split(' ').skip(11).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// Runs a row; `None` for the program alone. The reason for which the program did not start.
fn run(
    event: &Event,
    kind: Kind,
    capability: Option<&str>,
    delay: Duration,
) -> Result<Outcome, String> {
    let place = Place::new();
    let drop_in = match capability {
        None => DropIn::Absent,
        Some(capability) => DropIn::On(variables(capability, &place.outputs)),
    };
    let mut program = Beside::start(kind, &place.model, drop_in, |command| {
        if capability.is_some() {
            command.env("LD_PRELOAD", &place.library);
        }
        (event.set)(&place, command);
    })?;
    let running = program.running();
    let mut answers = vec![program.ask()];
    if capability.is_some() {
        replace(&place.model, &fixture(OTHER));
    }
    let mut swapped = std::thread::scope(|scope| {
        let reload = scope.spawn(|| match capability {
            None => Err("the program alone".into()),
            Some(_) => reload(&running.socket),
        });
        scope.spawn(|| {
            std::thread::sleep(delay);
            (event.strike)(&place, &running);
        });
        answers.extend((0..3).map(|_| program.ask()));
        reload.join().expect("no panic")
    });
    answers.push(program.ask());
    if capability.is_some() && program.is_alive() {
        // What the event left under the name of the model.
        if let Ok(again @ 1..) = reload(&running.socket) {
            swapped = Ok(again);
        }
        answers.push(program.ask());
    }
    // A second SIGTERM ends a server in another way.
    let deadline = Instant::now() + PATIENCE;
    while answers.contains(&None) && program.is_alive() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let before = ticks(running.process);
    std::thread::sleep(AT_REST.0);
    let at_rest = ticks(running.process).saturating_sub(before);
    let is_alive = program.is_alive();
    let (status, log) = program.end();
    Ok(Outcome {
        answers,
        swapped,
        is_alive,
        status,
        at_rest,
        log,
    })
}

/// What a program answers with each file, without an event.
struct Expected {
    model: String,
    other: String,
}

fn expected(kind: Kind) -> &'static Expected {
    static EXPECTED: [OnceLock<Expected>; 2] = [const { OnceLock::new() }; 2];
    let answer = |name: &str| {
        let mut program = Beside::start(kind, &fixture(name), DropIn::Absent, |_| ())
            .unwrap_or_else(|log| panic!("it does not start: {log}"));
        program.ask().expect("an answer")
    };
    EXPECTED[kind as usize].get_or_init(|| Expected {
        model: answer(MODEL),
        other: answer(OTHER),
    })
}

/// What a row shows: a word, or what is wrong.
fn judge(event: &str, kind: Kind, alone: &Outcome, with: &Outcome) -> Result<String, String> {
    let expected = expected(kind);
    let mut answers = with.answers.iter().flatten();
    if answers.any(|answer| *answer != expected.model && *answer != expected.other) {
        return Err(format!("an answer of neither file: {:?}", with.answers));
    }
    // Alone, one of 60 such servers goes on, too: a signal that comes while an evaluation ends is lost.
    let is_lost = |line: &String| line.starts_with("Received second interrupt");
    let is_of_end = ["signal 2", "signal 15"].contains(&event) && with.answers.contains(&None);
    if kind == Kind::Server && is_of_end && with.log.iter().any(is_lost) {
        return Ok("same: llama-server ends at the second signal".into());
    }
    // After the swap, the program needs memory for other types, as a fresh start does, and its ggml frees memory twice
    // where it gets none.
    let is_without_memory = |line: &String| line.ends_with("decode() failed: std::bad_alloc");
    let limits = ["limit: address space as it is", "limit: no data"];
    if kind == Kind::Server && limits.contains(&event) && with.log.iter().any(is_without_memory) {
        return Ok("swapped, and llama-server has no memory for these weights".into());
    }
    if with.status != alone.status {
        return Err(format!(
            "ended by {} in place of {}",
            with.status, alone.status
        ));
    }
    if with.answers.contains(&None) {
        return match alone.answers.contains(&None) && with.is_alive == alone.is_alive {
            true if with.is_alive => Ok("same: no answer".into()),
            true => Ok(format!("same: {}", with.status)),
            false => Err(format!(
                "no answer, where the program alone has: {:?}",
                with.answers
            )),
        };
    }
    if with.at_rest > AT_REST.1 {
        return Err(format!("{} ticks of CPU without a request", with.at_rest));
    }
    let [.., Some(before), Some(last)] = &with.answers[..] else {
        return Err("no answers".into());
    };
    match &with.swapped {
        Ok(1..) if *last == expected.other => Ok("same: swapped".into()),
        Ok(swapped) if *swapped > 0 => Err("swapped, and not read".into()),
        Ok(_) => Err("neither swapped nor refused".into()),
        // The state of a swap without a reply is known from the answers, which agree.
        Err(why) if last == before => {
            let is_named = why.starts_with("no answer") || *last == expected.model;
            match is_named {
                true => Ok(format!(
                    "refused: {}",
                    why.chars().take(100).collect::<String>()
                )),
                false => Err(format!("swapped, and refused: {why}")),
            }
        }
        Err(_) => Err("two answers without a swap between them differ".into()),
    }
}

/// System calls of the drop-in and of programs, which a kernel can deny.
const DENIED: [(&str, libc::c_long); 44] = [
    ("accept4", libc::SYS_accept4),
    ("bind", libc::SYS_bind),
    ("chmod", libc::SYS_fchmod),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("clone3", libc::SYS_clone3),
    ("connect", libc::SYS_connect),
    ("copy_file_range", libc::SYS_copy_file_range),
    ("epoll_create1", libc::SYS_epoll_create1),
    ("eventfd2", libc::SYS_eventfd2),
    ("fadvise64", libc::SYS_fadvise64),
    ("fallocate", libc::SYS_fallocate),
    ("fcntl", libc::SYS_fcntl),
    ("flock", libc::SYS_flock),
    ("ftruncate", libc::SYS_ftruncate),
    ("getcwd", libc::SYS_getcwd),
    ("getdents64", libc::SYS_getdents64),
    ("getrandom", libc::SYS_getrandom),
    ("inotify_init1", libc::SYS_inotify_init1),
    ("io_uring_setup", libc::SYS_io_uring_setup),
    ("listen", libc::SYS_listen),
    ("lstat", libc::SYS_lstat),
    ("madvise", libc::SYS_madvise),
    ("membarrier", libc::SYS_membarrier),
    ("memfd_create", libc::SYS_memfd_create),
    ("mincore", libc::SYS_mincore),
    ("mlock", libc::SYS_mlock),
    ("mremap", libc::SYS_mremap),
    ("poll", libc::SYS_poll),
    ("ppoll", libc::SYS_ppoll),
    ("prctl", libc::SYS_prctl),
    ("preadv2", libc::SYS_preadv2),
    ("prlimit64", libc::SYS_prlimit64),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("readahead", libc::SYS_readahead),
    ("readlink", libc::SYS_readlink),
    ("rename", libc::SYS_rename),
    ("rt_sigtimedwait", libc::SYS_rt_sigtimedwait),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
    ("sigaltstack", libc::SYS_sigaltstack),
    ("socket", libc::SYS_socket),
    ("statx", libc::SYS_statx),
    ("sysinfo", libc::SYS_sysinfo),
    ("unlink", libc::SYS_unlink),
    ("userfaultfd", libc::SYS_userfaultfd),
];

/// Denies a system call to a program and what it starts; of `mprotect`, that which makes memory executable.
fn deny(command: &mut Command, call: libc::c_long, error: libc::c_int) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const SET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let denied = libc::SECCOMP_RET_ERRNO | error as u32;
    let executable = match call {
        // The third argument.
        libc::SYS_mprotect => vec![
            step(LOAD, 0, 0, 32),
            step(SET, 0, 1, libc::PROT_EXEC as u32),
        ],
        _ => Vec::new(),
    };
    let others = executable.len() as u8 + 1;
    let mut filter = vec![step(LOAD, 0, 0, 0), step(EQUAL, 0, others, call as u32)];
    filter.extend(executable);
    filter.push(step(RETURN, 0, 0, denied));
    filter.push(step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    before_exec(command, move || {
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: a valid program, which the kernel copies.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(
                    libc::PR_SET_SECCOMP,
                    libc::SECCOMP_MODE_FILTER,
                    &raw const program,
                ) == 0
        }
    });
}

/// Gives a program mounts of its own, and mounts a small empty file system at a path of it.
fn own_mounts(command: &mut Command, at: Option<&Path>) {
    let text = |path: &str| std::ffi::CString::new(path).expect("no zero");
    let (none, root, kind, size) = (text("none"), text("/"), text("tmpfs"), text("size=8k"));
    let at = at.map(|path| text(path.to_str().expect("UTF-8")));
    before_exec(command, move || {
        let private = libc::MS_REC | libc::MS_PRIVATE;
        // SAFETY: plain system calls with texts that end with a zero.
        unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    none.as_ptr(),
                    root.as_ptr(),
                    std::ptr::null(),
                    private,
                    std::ptr::null(),
                ) == 0
                && at.as_ref().is_none_or(|at| {
                    let size = size.as_ptr().cast();
                    libc::mount(none.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, size) == 0
                })
        }
    });
}

/// Why this user cannot mount, if so.
fn cannot_mount() -> Option<String> {
    let mut command = Command::new("true");
    own_mounts(&mut command, None);
    let error = command.status().err()?;
    Some(format!("no mounts of a program's own: {error}"))
}

fn signals() -> impl Iterator<Item = Event> {
    let stops = [
        libc::SIGKILL,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
    ];
    // Two are of the C library.
    let signals =
        (1..=64).filter(move |number| !stops.contains(number) && ![32, 33].contains(number));
    let some = signals.filter(|number| *number <= 34 || *number == 64 || long_tests());
    some.map(|number| {
        Event::later(format!("signal {number}"), move |_, of| {
            of.signal(number);
        })
    })
}

fn limits() -> impl Iterator<Item = Event> {
    let all = [
        ("address space as it is", libc::RLIMIT_AS, None),
        ("no data", libc::RLIMIT_DATA, Some(0)),
        ("8 descriptors", libc::RLIMIT_NOFILE, Some(8)),
        ("no descriptor", libc::RLIMIT_NOFILE, Some(0)),
        ("no file size", libc::RLIMIT_FSIZE, Some(0)),
        ("no locked memory", libc::RLIMIT_MEMLOCK, Some(0)),
        ("a stack of 128 KiB", libc::RLIMIT_STACK, Some(128 << 10)),
        ("no queued signal", libc::RLIMIT_SIGPENDING, Some(0)),
        ("one process", libc::RLIMIT_NPROC, Some(1)),
    ];
    let later = all.map(|(name, resource, most)| {
        Event::later(format!("limit: {name}"), move |_, of| {
            limit_of(
                of.process,
                resource,
                most.unwrap_or_else(|| memory(&of.process.to_string(), "VmSize:")),
            );
        })
    });
    let at_start = [
        ("24 descriptors", libc::RLIMIT_NOFILE, 24),
        ("no locked memory", libc::RLIMIT_MEMLOCK, 0),
        ("a stack of 256 KiB", libc::RLIMIT_STACK, 256 << 10),
    ];
    let at_start = at_start.map(|(name, resource, most)| {
        Event::at_start(format!("limit at the start: {name}"), move |_, command| {
            before_exec(command, move || limit(resource, most));
        })
    });
    later.into_iter().chain(at_start)
}

fn denials() -> impl Iterator<Item = Event> {
    let errors = [("EPERM", libc::EPERM), ("ENOSYS", libc::ENOSYS)];
    let some = errors.into_iter().take(1 + usize::from(long_tests()));
    some.flat_map(|(name, error)| {
        let calls = DENIED
            .into_iter()
            .chain([("mprotect(PROT_EXEC)", libc::SYS_mprotect)]);
        calls.map(move |(call, number)| {
            Event::at_start(format!("{name} for {call}"), move |_, command| {
                deny(command, number, error);
            })
        })
    })
}

/// The memory of the control group falls to little more than the program uses. Without any more, the kernel ends what touches
/// a further page.
fn falling_memory() -> Vec<Event> {
    if let Err(reason) = MemoryLimit::new(1 << 30) {
        skipped(&reason);
        return Vec::new();
    }
    let event = |more: u64| Event {
        name: format!(
            "limit: {} MiB more memory for the control group",
            more >> 20
        ),
        set: Box::new(|place, command| {
            let group = MemoryLimit::new(8 << 30).expect("a group");
            group.apply(command);
            *place.group.lock().expect("no panic") = Some(group);
        }),
        strike: Box::new(move |place, _| {
            let group = place.group.lock().expect("no panic");
            let group = group.as_ref().expect("set before the start");
            // Fails where no page can be dropped.
            let _ = group.set(group.used() + more);
        }),
    };
    [16 << 20, 64 << 20].map(event).into()
}

/// What is under the name of the model.
fn files() -> impl Iterator<Item = Event> {
    type Put = fn(&Path);
    let all: [(&str, Put); 9] = [
        ("is deleted", |_| ()),
        ("is empty", |path| drop(File::create(path).expect("a file"))),
        ("is a folder", |path| {
            fs::create_dir(path).expect("a folder")
        }),
        ("is a link to itself", |path| {
            std::os::unix::fs::symlink(path, path).expect("a link");
        }),
        ("is a FIFO", |path| {
            let status = Command::new("mkfifo").arg(path).status();
            assert!(status.expect("it starts").success());
        }),
        ("is a hole", |path| {
            let file = File::create(path).expect("a file");
            file.set_len(1 << 40).expect("a hole");
        }),
        ("has a hole", |path| {
            fs::copy(fixture(OTHER), path).expect("free space");
            let status = Command::new("fallocate")
                .args(["--punch-hole", "--offset", "20MiB", "--length", "20MiB"])
                .arg(path)
                .status();
            assert!(status.expect("it starts").success());
        }),
        ("is a text", |path| {
            fs::write(path, "GGUF, not").expect("free space");
        }),
        ("is cut", |path| {
            fs::copy(fixture(OTHER), path).expect("free space");
            let file = File::options().write(true).open(path).expect("a file");
            file.set_len(file.metadata().expect("a file").len() / 2)
                .expect("a file");
        }),
    ];
    all.into_iter().map(|(name, put)| {
        Event::later(format!("the model {name}"), move |place, _| {
            let _ = fs::remove_file(&place.model);
            put(&place.model);
        })
    })
}

fn surroundings() -> Vec<Event> {
    let mut events = vec![
        Event::later("the library is deleted", |place, _| {
            fs::remove_file(&place.library).expect("a file");
        }),
        Event::later("the library is replaced", |place, _| {
            replace(&place.library, &fixture(MODEL));
        }),
        Event::at_start("clocks move", |_, command| {
            load_beside(command, "hosts-c/libmoving_clock.so");
        }),
        Event {
            name: "all descriptors are closed".into(),
            set: Box::new(|_, command| load_beside(command, "hosts-c/libclosing.so")),
            strike: Box::new(|_, of| of.signal(libc::SIGUSR2)),
        },
        Event::later("clients hang", |_, of| {
            let (over, count) = (AtomicBool::new(false), AtomicU64::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| disturb(&of.socket, 8, Duration::ZERO, &over, &count));
                std::thread::sleep(Duration::from_millis(300));
                over.store(true, Ordering::Relaxed);
            });
        }),
        Event::later("the socket is deleted", |_, of| {
            let _ = fs::remove_file(&of.socket);
        }),
        Event::later("stopped and continued", |_, of| {
            for signal in [libc::SIGSTOP, libc::SIGCONT].repeat(5) {
                of.signal(signal);
                std::thread::sleep(Duration::from_millis(20));
            }
        }),
        Event::later("a debugger attaches and leaves", |_, of| {
            let process = of.process as libc::pid_t;
            // SAFETY: a child of this process; a traced one is waited for with `__WALL`, and released by
            // the same thread.
            unsafe {
                if libc::ptrace(libc::PTRACE_SEIZE, process, 0, 0) == 0 {
                    libc::ptrace(libc::PTRACE_INTERRUPT, process, 0, 0);
                    let mut status = 0;
                    libc::waitpid(process, &raw mut status, libc::__WALL);
                    libc::ptrace(libc::PTRACE_DETACH, process, 0, 0);
                }
            }
        }),
    ];
    if let Some(reason) = cannot_mount() {
        skipped(&reason);
        return events;
    }
    events.extend([
        Event::at_start("a full disk", |place, command| {
            own_mounts(command, Some(&place.outputs))
        }),
        Event::at_start("no /proc", |_, command| {
            own_mounts(command, Some("/proc".as_ref()))
        }),
        Event::at_start("no /sys", |_, command| {
            own_mounts(command, Some("/sys".as_ref()))
        }),
        Event::at_start("no /dev/shm", |_, command| {
            own_mounts(command, Some("/dev/shm".as_ref()));
        }),
        Event {
            name: "/proc goes".into(),
            set: Box::new(|_, command| own_mounts(command, None)),
            strike: Box::new(|_, of| {
                let mut command = Command::new("nsenter");
                command.args(["--mount", "--target", &of.process.to_string()]);
                command.args(["mount", "-t", "tmpfs", "none", "/proc"]);
                let status = command.stderr(Stdio::null()).status();
                assert!(status.expect("it starts").success());
            }),
        },
    ]);
    events
}

#[test]
fn an_event_changes_no_answer_and_no_end() {
    let wanted = std::env::var("CHAOS").unwrap_or_default();
    let mut events: Vec<Event> = surroundings();
    events.extend(falling_memory());
    events.extend(signals().chain(limits()).chain(denials()).chain(files()));
    events.retain(|event| event.name.contains(&wanted));
    let [next, rows, wrong] = [const { AtomicUsize::new(0) }; 3];
    let all: Vec<(usize, &Event, Kind)> = events
        .iter()
        .enumerate()
        .flat_map(|(at, event)| [(at, event, Kind::Host), (at, event, Kind::Server)])
        .filter(|(at, _, kind)| *kind == Kind::Host || long_tests() || at % OF_SERVER == 0)
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((at, event, kind)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let alone = run(event, *kind, None, Duration::ZERO);
                    let of_row = |capability: &str, seed: usize| {
                        let delay = Duration::from_millis((at * 37 + seed * 61) as u64 % 120);
                        let with = run(event, *kind, Some(capability), delay);
                        let found = match (&alone, with) {
                            (Err(_), Err(_)) => Ok("same: does not start".into()),
                            (Ok(_), Err(log)) => Err(format!("does not start: {log}")),
                            (Err(_), Ok(_)) => Ok("starts; alone it does not".into()),
                            (Ok(alone), Ok(with)) => judge(&event.name, *kind, alone, &with)
                                .map_err(|wrong| format!("{wrong}\n{}", with.log.join("\n"))),
                        };
                        rows.fetch_add(1, Ordering::Relaxed);
                        let text = found.unwrap_or_else(|text| {
                            wrong.fetch_add(1, Ordering::Relaxed);
                            format!("WRONG: {text}")
                        });
                        println!("{} | {kind:?} | {capability} | {text}", event.name);
                    };
                    match long_tests() {
                        true => {
                            for (capability, seed) in CAPABILITIES
                                .into_iter()
                                .flat_map(|of| (0..3).map(move |at| (of, at)))
                            {
                                of_row(capability, seed);
                            }
                        }
                        false => of_row(CAPABILITIES[at % CAPABILITIES.len()], 0),
                    }
                }
            });
        }
    });
    let (rows, wrong) = (rows.into_inner(), wrong.into_inner());
    println!("{rows} rows, {wrong} wrong");
    assert_eq!(wrong, 0);
}
