//! The drop-in in a llama-server whose layers are on two servers of ggml's RPC backend, in a
//! build that opens its backends as modules: swaps on both servers, an expert trace, and servers
//! that stop or die.

mod hosts;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hosts::servers::{PREFIX, end};
use hosts::{copied, on, taken, traced};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, replace};
use testkit::server::{Answer, Options, RPC_SERVER, Request, Server, llama_cpp_dl, quantize};

/// How long a server may take to start, and to read what it was sent.
const PATIENCE: Duration = Duration::from_secs(300);
/// Tokens of an answer: enough that most of its evaluations keep the graph of the one before.
const TOKENS: usize = 12;

/// A server that lends the CPU through RPC, and logs each buffer. It is killed when dropped.
struct RpcServer {
    child: Child,
    port: u16,
    log: tempfile::NamedTempFile,
}

impl RpcServer {
    fn start() -> RpcServer {
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        RpcServer::start_at(port)
    }

    fn start_at(port: u16) -> RpcServer {
        let log = tempfile::NamedTempFile::new().expect("a file");
        let output = || File::options().append(true).open(log.path()).expect("it");
        let mut command = Command::new(llama_cpp_dl(RPC_SERVER));
        command
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .env("GGML_RPC_DEBUG", "1")
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output());
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // A killed test runs no destructor.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command
            .spawn()
            .expect("run 'cargo xtask hosts --build' first");
        let mut server = RpcServer { child, port, log };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = server.child.try_wait().expect("a child");
            assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}");
            std::thread::yield_now();
        }
        server
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of this process that was not waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    /// Waits until it has not read all that it was sent: it is stopped.
    fn wait_until_it_is_asked(&self) {
        let (port, deadline) = (format!(":{:04X}", self.port), Instant::now() + PATIENCE);
        let is_asked = || {
            let sockets = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
            sockets.lines().any(|line| {
                let mut fields = line.split_whitespace().skip(1);
                let (local, queues) = (fields.next(), fields.nth(2));
                let unread = queues.and_then(|queues| queues.split_once(':'));
                let connected = line.contains(" 01 ");
                connected
                    && local.is_some_and(|local| local.ends_with(&port))
                    && unread.is_some_and(|(_, unread)| unread != "00000000")
            })
        };
        while !is_asked() {
            assert!(Instant::now() < deadline, "nothing is sent to it");
            std::thread::yield_now();
        }
    }

    /// Buffers that it allocated and did not free.
    fn buffers(&self) -> usize {
        let log = std::fs::read_to_string(self.log.path()).expect("text");
        let count = |what: &str| log.lines().filter(|line| line.contains(what)).count();
        count("[alloc_buffer]") - count("[free_buffer]")
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn two_servers() -> Vec<RpcServer> {
    (0..2).map(|_| RpcServer::start()).collect()
}

/// A llama-server with as many of its layers on each RPC server.
fn over(servers: &[RpcServer], drop_in: DropIn) -> Options {
    let places = servers
        .iter()
        .map(|server| format!("127.0.0.1:{}", server.port));
    let rpc = places.collect::<Vec<_>>().join(",");
    let split = vec!["1"; servers.len()].join(",");
    let arguments = ["--rpc", &rpc, "-ngl", "99", "--tensor-split", &split];
    Options {
        build: llama_cpp_dl,
        arguments: arguments.map(str::to_owned).into(),
        // An abort ends at once, without a debugger that writes where it was.
        variables: vec![("GGML_NO_BACKTRACE".into(), "1".into())],
        drop_in,
        ..Options::new(1)
    }
}

fn answer(server: &Server) -> Answer {
    server.complete(&request(TOKENS))
}

fn request(tokens: usize) -> Request {
    Request {
        cache_prompt: false,
        ..Request::new(PREFIX, tokens)
    }
}

/// What a server without the drop-in that is started with a file answers.
fn fresh(servers: &[RpcServer], model: &Path) -> Answer {
    let server = Server::start(model, &over(servers, DropIn::Absent));
    let answer = answer(&server);
    assert!(server.end().0.success());
    answer
}

/// Sends `reload` to a control socket; returns the answer, empty if the process ended instead.
fn reload(socket: PathBuf) -> String {
    let mut stream = UnixStream::connect(socket).expect("the control socket");
    writeln!(stream, "{{\"cmd\": \"reload\"}}").expect("the socket takes it");
    let mut answer = String::new();
    let _ = BufReader::new(stream).read_line(&mut answer);
    answer
}

/// `swapped` is how many tensors each server then has.
fn a_swap_is_a_fresh_start_and_frees_what_it_replaced(servers: &[RpcServer], swapped: &[usize]) {
    let before = fresh(servers, &fixture("smollm2.gguf"));
    let after = fresh(servers, &fixture("smollm2-mixed.gguf"));
    assert_ne!(before, after, "the variant shows");
    let buffers = || servers.iter().map(RpcServer::buffers).collect::<Vec<_>>();

    let (_folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &over(servers, on()));
    assert_eq!(answer(&server), before);
    let loaded = buffers();
    let with_swapped: Vec<usize> = loaded.iter().zip(swapped).map(|(a, b)| a + b).collect();
    for _ in 0..3 {
        replace(&path, &fixture("smollm2-mixed.gguf"));
        let report = server.control("reload");
        assert_eq!(taken(&report), (8, 0));
        for port in servers.iter().map(|server| server.port) {
            assert!(report.to_string().contains(&port.to_string()), "{report}");
        }
        assert_eq!(answer(&server), after);
        assert_eq!(buffers(), with_swapped);
        replace(&path, &fixture("smollm2.gguf"));
        assert_eq!(taken(&server.control("reload")), (0, 8));
        assert_eq!(answer(&server), before);
        assert_eq!(buffers(), loaded);
    }
    end(server);
}

#[test]
fn a_swap_on_two_servers() {
    a_swap_is_a_fresh_start_and_frees_what_it_replaced(&two_servers(), &[4, 4]);
}

#[test]
fn a_swap_on_three_servers() {
    let mut servers = two_servers();
    servers.push(RpcServer::start());
    a_swap_is_a_fresh_start_and_frees_what_it_replaced(&servers, &[3, 3, 2]);
}

/// A llama-server that sleeps has freed its model, and goes on.
#[test]
fn the_last_model_that_is_freed_leaves_no_buffers() {
    let servers = two_servers();
    let (_folder, path) = copied("smollm2.gguf");
    let mut options = over(&servers, on());
    let sleeps = ["--sleep-idle-seconds", "1"].map(str::to_owned);
    options.arguments.extend(sleeps);
    let server = Server::start(&path, &options);
    // A request keeps it from sleeping.
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| server.complete(&request(300)));
        while server.look("/slots")[0]["is_processing"] != true {
            assert!(!busy.is_finished(), "it was busy at no time");
            std::thread::yield_now();
        }
        replace(&path, &fixture("smollm2-mixed.gguf"));
        assert_eq!(taken(&server.control("reload")), (8, 0));
        busy.join().expect("an answer");
    });
    while server.look("/props")["is_sleeping"] != true {
        std::thread::yield_now();
    }
    for of in &servers {
        assert_eq!(of.buffers(), 0);
    }
    end(server);
}

/// A server drops the graph that it keeps for the next evaluation when a buffer is freed.
#[test]
fn swaps_in_the_middle_of_a_text_leave_no_evaluation_without_its_graph() {
    let servers = two_servers();
    let (folder, path) = copied("smollm2.gguf");
    let all = folder.path().join("all.gguf");
    quantize(&path, &all, "Q8_0", &[]);
    let before = fresh(&servers, &path);
    let server = Server::start(&path, &over(&servers, on()));
    std::thread::scope(|scope| {
        let text = scope.spawn(|| server.complete(&request(200)));
        let mut swaps = 0;
        while !text.is_finished() {
            replace(&path, &all);
            assert_eq!(taken(&server.control("reload")), (210, 0));
            replace(&path, &fixture("smollm2.gguf"));
            assert_eq!(taken(&server.control("reload")), (0, 210));
            swaps += 2;
        }
        println!("{swaps} swaps in a text");
        assert!(!text.join().expect("an answer").text.is_empty());
    });
    assert_eq!(answer(&server), before);
    end(server);
}

/// Parts of a prompt are evaluations with the same graph, between which libllama waits for the
/// servers.
#[test]
fn swaps_in_the_middle_of_prompts_fail_no_part_of_them() {
    let servers = two_servers();
    let (_folder, path) = copied("smollm2.gguf");
    let mut options = over(&servers, on());
    options
        .arguments
        .extend(["--ubatch-size", "8"].map(str::to_owned));
    let server = Server::start(&path, &options);
    let prompt = Request {
        cache_prompt: false,
        ..Request::new(&PREFIX.repeat(12), 1)
    };
    let before = server.complete(&prompt);
    std::thread::scope(|scope| {
        let swaps = scope.spawn(|| {
            for _ in 0..4 {
                replace(&path, &fixture("smollm2-mixed.gguf"));
                assert!(taken(&server.control("reload")).0 > 0);
                replace(&path, &fixture("smollm2.gguf"));
                assert!(taken(&server.control("reload")).1 > 0);
            }
        });
        let mut answers = 0;
        while !swaps.is_finished() {
            server.complete(&prompt);
            answers += 1;
        }
        println!("{answers} answers while tensors were swapped");
        swaps.join().expect("eight swaps");
    });
    assert_eq!(server.complete(&prompt), before);
    end(server);
}

#[test]
fn experts_are_counted_over_two_servers_as_on_this_machine() {
    let servers = two_servers();
    let model = fixture("small-moe.gguf");
    let counting = || DropIn::On(vec![("LLAMA_EXPERT_TRACE_STATS", "1".into())]);
    let mut here = over(&servers, counting());
    // RPC servers repack no tensor.
    here.arguments = vec!["--no-repack".into()];
    let counts = |options: &Options| {
        let server = Server::start(&model, options);
        answer(&server);
        let trace = server.control("trace");
        end(server);
        traced(&trace["traces"][0])
    };
    let counted = counts(&over(&servers, counting()));
    assert!(counted.iter().flatten().sum::<u64>() > 0, "{counted:?}");
    assert_eq!(counted, counts(&here));
}

#[test]
fn a_stopped_server_is_waited_for_and_a_killed_one_ends_the_program_in_a_swap() {
    let mut servers = two_servers();
    let before = fresh(&servers, &fixture("smollm2.gguf"));
    let after = fresh(&servers, &fixture("smollm2-mixed.gguf"));
    let (_folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &over(&servers, on()));
    assert_eq!(answer(&server), before);
    let socket = server.socket().to_owned();

    servers[1].signal(libc::SIGSTOP);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let swap = std::thread::spawn({
        let socket = socket.clone();
        move || reload(socket)
    });
    servers[1].wait_until_it_is_asked();
    assert_eq!(server.control("status")["ok"], true, "others are answered");
    assert!(!swap.is_finished());
    servers[1].signal(libc::SIGCONT);
    let report = swap.join().expect("no panic");
    let report = serde_json::from_str(&report).expect("JSON");
    assert_eq!(taken(&report), (8, 0));
    assert_eq!(answer(&server), after);

    replace(&path, &fixture("smollm2.gguf"));
    assert_eq!(taken(&server.control("reload")), (0, 8));
    servers[1].signal(libc::SIGSTOP);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let swap = std::thread::spawn(|| reload(socket));
    servers[1].wait_until_it_is_asked();
    servers[1].signal(libc::SIGKILL);
    assert_eq!(swap.join().expect("no panic"), "", "the program ended");
    assert_aborted(server);

    servers[1] = RpcServer::start_at(servers[1].port);
    replace(&path, &fixture("smollm2.gguf"));
    let server = Server::start(&path, &over(&servers, on()));
    assert_eq!(answer(&server), before);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (8, 0));
    assert_eq!(answer(&server), after);
    end(server);
}

#[test]
fn a_server_killed_in_an_evaluation_ends_the_program_as_without_the_drop_in() {
    let mut servers = two_servers();
    for drop_in in [DropIn::Absent, on()] {
        let (_folder, path) = copied("smollm2.gguf");
        let server = Server::start(&path, &over(&servers, drop_in));
        answer(&server);
        servers[1].signal(libc::SIGSTOP);
        std::thread::scope(|scope| {
            let text = scope.spawn(|| server.try_complete(&request(TOKENS)));
            servers[1].wait_until_it_is_asked();
            servers[1].signal(libc::SIGKILL);
            assert!(text.join().expect("no panic").is_err());
        });
        assert_aborted(server);
        servers[1] = RpcServer::start_at(servers[1].port);
    }
}

/// Checks that a program ends as ggml ends one whose RPC server has died.
fn assert_aborted(server: Server) {
    let (status, log) = server.wait();
    let log = log.join("\n");
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{log}");
    assert!(log.contains("Remote RPC server crashed"), "{log}");
}
