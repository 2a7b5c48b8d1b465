//! The drop-in and files that are not to be used, or not yet: downloads that stalled,
//! copies of what is in use, more than memory holds; reverting; and what is left at each end of a
//! program, and after many loads of a model.

mod small;

use std::fs::FileTimes;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use sidecar_core::trace::{RouteReader, RouteRecord};
use small::{folder, model, on, result, swap};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, control, disturb, replace};
use testkit::mixtures::{Mixture, USED};
use testkit::writer::Gguf;

/// A host that has evaluated often enough to be swapped at any time.
fn settled(path: &Path, variables: &[(&'static str, &str)]) -> Host {
    let mut host = Host::start(Program::Small(true), path, &on(variables));
    for _ in 0..4 {
        assert_eq!(host.ask("decode"), result(1.0));
    }
    host
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 60 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn report(answer: &Value) -> &Value {
    &answer["reports"][0]
}

/// The value of a figure of `metrics`.
fn figure(host: &Host, name: &str) -> f64 {
    let answer = host.control("metrics");
    let text = answer["text"].as_str().expect("a page").to_owned();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("{name} is missing in\n{text}"));
    line.trim().parse().expect("a number")
}

/// A file whose writer reserved the space and wrote the header only.
fn preallocated(gguf: &Gguf) -> Gguf {
    let mut gguf = gguf.clone();
    gguf.tensors
        .iter_mut()
        .for_each(|tensor| tensor.data.fill(0));
    gguf
}

/// The program opens its model by the number of a descriptor, which is of another file afterwards.
#[test]
fn a_model_that_is_opened_by_a_descriptor_is_watched_by_its_path() {
    let (_folder, path) = folder(&model(1.0));
    let (_other_folder, other) = folder(&model(2.0));
    let drop_in = on(&[("SMALL_DESCRIPTOR_OF", other.to_str().expect("UTF-8"))]);
    let mut host = Host::start(Program::Small(true), &path, &drop_in);
    for _ in 0..4 {
        assert_eq!(host.ask("decode"), result(1.0));
    }
    let reports = host.control("reload")["reports"].clone();
    assert_eq!(reports[0]["swapped"], 0, "{reports}");
    assert_eq!(host.ask("decode"), result(1.0));
    let reports = swap(&host, &path, &model(3.0))["reports"].clone();
    assert_eq!(reports[0]["swapped"], 1, "{reports}");
    assert_eq!(host.ask("decode"), result(3.0));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_file_of_zeros_is_refused_by_name() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[]);
    let answer = swap(&host, &path, &preallocated(&model(2.0)));
    assert_eq!(answer["ok"], false);
    let file = &report(&answer)["files"][0];
    assert_eq!(file["cause"], "damaged", "{answer}");
    let reason = file["reason"].as_str().expect("a sentence");
    assert!(
        reason.contains("'w.weight'") && reason.contains("8 of its rows hold only zeros"),
        "{reason}"
    );
    let mut broken = model(2.0);
    broken.tensors[0].data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let answer = swap(&host, &path, &broken);
    let reason = report(&answer)["files"][0]["reason"].to_string();
    assert!(reason.contains("infinite or not a number"), "{answer}");
    assert_eq!(
        figure(&host, "llama_sidecar_failures_total{cause=\"damaged\"}"),
        2.0
    );
    assert_eq!(host.ask("decode"), result(1.0));
    // Once it is whole, it is taken.
    assert_eq!(report(&swap(&host, &path, &model(2.0)))["swapped"], 1);
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));

    // For experiments with tensors of zeros.
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[("LLAMA_HOTSWAP_CHECK", "0")]);
    let answer = swap(&host, &path, &preallocated(&model(2.0)));
    assert_eq!(report(&answer)["swapped"], 1, "{answer}");
    assert_eq!(host.ask("decode"), "0");
}

#[test]
fn a_file_is_used_once_it_has_been_quiet() {
    let (_folder, path) = folder(&model(1.0));
    let watched = |quiet: &'static str| {
        let variables = [
            ("LLAMA_HOTSWAP_POLL_MS", "5"),
            ("LLAMA_HOTSWAP_QUIET_MS", quiet),
        ];
        settled(&path, &variables)
    };
    let mut host = watched("200");
    model(2.0).replace(&path).expect("free space");
    eventually("the swap", || {
        figure(&host, "llama_sidecar_switches_total") == 1.0
    });
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));

    // A change found by polling waits for the quiet time; a command does not.
    model(1.0).replace(&path).expect("free space");
    let host = watched("3600000");
    model(2.0).replace(&path).expect("free space");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(figure(&host, "llama_sidecar_switches_total"), 0.0);
    assert_eq!(report(&host.control("reload"))["swapped"], 1);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn equal_bytes_are_no_swap() {
    let touched = |path: &Path| {
        let file = std::fs::File::options()
            .write(true)
            .open(path)
            .expect("our own copy");
        let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        file.set_times(times).expect("our own copy");
    };
    let (_folder, path) = folder(&model(1.0));
    let host = settled(&path, &[]);
    touched(&path);
    let answer = swap(&host, &path, &model(1.0));
    assert_eq!(report(&answer)["swapped"], 0, "{answer}");
    assert_eq!(report(&answer)["unchanged"], 1, "{answer}");
    assert_eq!(host.end(), Some(0));

    // Tensors that are used out of the mapped file.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    replace(&path, &fixture("moe.gguf"));
    let mut host = Host::start(Program::CMapped, &path, &on(&[]));
    host.ask("text 2");
    touched(&path);
    replace(&path, &fixture("moe.gguf"));
    let answer = host.control("reload");
    assert_eq!(report(&answer)["swapped"], 0, "{answer}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn more_than_the_limit_is_refused_and_not_tried_all_the_time() {
    let (_folder, path) = folder(&model(1.0));
    let variables = [
        ("LLAMA_SIDECAR_MEMORY_MB", "0"),
        ("LLAMA_HOTSWAP_POLL_MS", "5"),
        ("LLAMA_HOTSWAP_QUIET_MS", "0"),
    ];
    let mut host = settled(&path, &variables);
    model(2.0).replace(&path).expect("free space");
    let refused = "llama_sidecar_failures_total{cause=\"memory\"}";
    eventually("a refusal", || figure(&host, refused) >= 1.0);
    let status = host.control("status");
    let error = status["models"][0]["blocked"]["error"]
        .as_str()
        .expect("a sentence");
    assert!(error.contains("LLAMA_SIDECAR_MEMORY_MB=0"), "{status}");
    // 5 ms at a time it would have been tried some 200 times; it is after 0, 1, 2, 4 s.
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs(1));
    let most = 2.0 + began.elapsed().as_secs_f64().log2().ceil();
    let tried = figure(&host, refused);
    assert!(tried <= most, "{tried} attempts");
    assert_eq!(host.logged("LLAMA_SIDECAR_MEMORY_MB=0").len(), 1);
    assert_eq!(host.ask("decode"), result(1.0));
    assert_eq!(host.end(), Some(0));

    let host = settled_after_reset(&path, &[("LLAMA_SIDECAR_MEMORY_MB", "1")]);
    assert_eq!(report(&swap(&host, &path, &model(2.0)))["swapped"], 1);
    assert!(
        figure(
            &host,
            "llama_sidecar_private_bytes{model=\"1\",buffer=\"CPU\"}"
        ) >= 2048.0
    );
}

fn settled_after_reset(path: &Path, variables: &[(&'static str, &str)]) -> Host {
    model(1.0).replace(path).expect("free space");
    settled(path, variables)
}

#[test]
fn a_file_that_stays_ignored_is_named_once() {
    let (_folder, path) = folder(&model(1.0));
    let variables = [
        ("LLAMA_HOTSWAP_POLL_MS", "2"),
        ("LLAMA_HOTSWAP_QUIET_MS", "0"),
        ("LLAMA_SIDECAR_LOG", "info"),
    ];
    let host = settled(&path, &variables);
    let bytes = model(2.0).bytes();
    let beside = path.with_extension("new");
    std::fs::write(&beside, &bytes[..bytes.len() - 100]).expect("free space");
    std::fs::rename(beside, &path).expect("the same folder");
    eventually("a warning", || !host.logged("ignored:").is_empty());
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(host.logged("ignored:").len(), 1);
    assert!(host.logged("reload: 0 swapped").len() <= 1);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_graph_in_the_way_is_not_tried_against_while_the_host_rests() {
    let (_folder, path) = folder(&model(1.0));
    let variables = [
        ("LLAMA_HOTSWAP_POLL_MS", "20"),
        ("LLAMA_HOTSWAP_QUIET_MS", "0"),
    ];
    let mut host = Host::start(Program::Small(true), &path, &on(&variables));
    // One graph: it is not known yet whether the host can be made to build another.
    assert_eq!(host.ask("decode"), result(1.0));
    model(2.0).replace(&path).expect("free space");
    let busy = "llama_sidecar_failures_total{cause=\"busy\"}";
    eventually("the obstacle", || figure(&host, busy) == 1.0);
    let status = host.control("status");
    assert_eq!(status["models"][0]["blocked"]["cause"], "busy", "{status}");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(
        figure(&host, busy),
        1.0,
        "nothing moved: nothing is read or staged"
    );
    // The next evaluations bring the swap about.
    host.ask("decode");
    eventually("the swap", || {
        figure(
            &host,
            "llama_sidecar_waiting_seconds{obstacle=\"kept_graph\"}",
        ) > 0.0
            || figure(&host, "llama_sidecar_switches_total") == 1.0
    });
    host.ask("decode");
    eventually("the swap", || {
        figure(&host, "llama_sidecar_switches_total") == 1.0
    });
    assert_eq!(host.ask("decode"), result(2.0));
    assert!(host.control("status")["models"][0]["blocked"].is_null());
    assert_eq!(host.end(), Some(0));
}

#[test]
fn revert_returns_everything_and_freezes() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[]);
    let loaded = host.control("hash")["models"][0]["content_hash"].clone();
    assert!(loaded.is_string());
    assert_eq!(report(&swap(&host, &path, &model(2.0)))["swapped"], 1);
    assert_eq!(host.ask("decode"), result(2.0));
    let status = host.control("status");
    assert_ne!(status["models"][0]["content_hash"], loaded);

    let answer = host.control("revert");
    assert_eq!(report(&answer)["returned"], 1, "{answer}");
    assert_eq!(host.ask("decode"), result(1.0));
    let status = host.control("status");
    assert_eq!(
        (&status["frozen"], &status["models"][0]["private_bytes"]),
        (&true.into(), &0.into())
    );
    assert_eq!(status["models"][0]["content_hash"], loaded);
    let answer = host.control("reload");
    assert!(answer.to_string().contains("unfreeze"), "{answer}");
    assert_eq!(figure(&host, "llama_sidecar_frozen"), 1.0);

    assert_eq!(host.control("unfreeze")["ok"], true);
    assert_eq!(report(&host.control("reload"))["swapped"], 1);
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn metrics_have_the_text_format_of_prometheus() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[]);
    swap(&host, &path, &model(2.0));
    host.ask("decode");
    let answer = host.control("metrics");
    let text = answer["text"].as_str().expect("a page");
    let mut typed = std::collections::HashMap::new();
    for line in text.lines() {
        if let Some(line) = line.strip_prefix("# TYPE ") {
            let (name, kind) = line.split_once(' ').expect("a name and a type");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(
                typed.insert(name.to_owned(), kind.to_owned()).is_none(),
                "{line}"
            );
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            value.parse::<f64>().expect("a number");
            let name = series.split('{').next().expect("a name");
            let base = ["_bucket", "_sum", "_count"];
            let base = base.iter().find_map(|end| name.strip_suffix(end));
            let known = |name: &str| typed.contains_key(name);
            assert!(known(name) || base.is_some_and(known), "{line} has no type");
        }
    }
    assert_eq!(typed["llama_sidecar_pause_seconds"], "histogram");
    for (name, value) in [
        ("llama_sidecar_switches_total", 1.0),
        ("llama_sidecar_tensors_swapped_total", 1.0),
        ("llama_sidecar_evaluations_total", 5.0),
        ("llama_sidecar_staged_bytes_total", 2048.0),
    ] {
        assert_eq!(figure(&host, name), value, "{name}");
    }
    assert_eq!(host.end(), Some(0));
}

#[test]
fn files_that_are_opened_for_their_metadata_are_closed_again() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[]);
    let more: i64 = host
        .ask(&format!("inspect {}", path.display()))
        .parse()
        .expect("a number");
    assert!(
        more <= 1,
        "{more} descriptors more after 100 files were opened and closed"
    );
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_file_that_is_replaced_while_it_is_loaded_is_not_swapped() {
    let (folder, path) = folder(&model(1.0));
    let other = folder.path().join("other.gguf");
    model(2.0).write(&other).expect("free space");
    let new = other.display().to_string();
    let mut host = Host::start(
        Program::Small(true),
        &path,
        &on(&[("SMALL_REPLACED_BY", &new)]),
    );
    assert_eq!(
        host.ask("decode"),
        result(2.0),
        "it has read the header of one file, and the other one"
    );
    // A new process would have this one.
    model(1.0).replace(&path).expect("free space");
    for command in ["reload", "revert"] {
        let answer = host.control(command).to_string();
        assert!(
            answer.contains("was replaced while the program loaded it"),
            "{answer}"
        );
    }
    let answer = host.control("status")["models"][0].clone();
    assert!(answer["content_hash"].is_null(), "{answer}");
    assert!(
        answer["obstacle"].to_string().contains("was replaced"),
        "{answer}"
    );
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_worker_has_paths_of_its_own() {
    let (folder, path) = folder(&model(1.0));
    let pattern = folder.path().join("%p.socket").display().to_string();
    let variables = [
        ("LLAMA_SIDECAR_CONTROL", &pattern[..]),
        ("HOST_WORKER", "1"),
    ];
    let mut host = Host::start(Program::Small(true), &path, &on(&variables));
    assert_eq!(host.ask("decode"), result(1.0));
    let children = format!("/proc/{0}/task/{0}/children", host.id());
    let children = std::fs::read_to_string(children).expect("its worker");
    let socket = folder.path().join(format!("{}.socket", children.trim()));
    assert_eq!(control(&socket, "ping")["ok"], true);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_socket_of_another_process_is_left_alone() {
    let (folder, path) = folder(&model(1.0));
    // A listener that accepts nothing, and whose backlog is full.
    let socket = folder.path().join("busy");
    let listener = UnixListener::bind(&socket).expect("a socket");
    // SAFETY: a plain system call on a live descriptor.
    unsafe { libc::listen(std::os::fd::AsRawFd::as_raw_fd(&listener), 0) };
    let _first = UnixStream::connect(&socket).expect("the backlog takes one");
    let at = socket.to_str().expect("UTF-8");
    let mut host = Host::start(
        Program::Small(true),
        &path,
        &on(&[("LLAMA_SIDECAR_CONTROL", at)]),
    );
    assert_eq!(host.ask("decode"), result(1.0));
    assert_eq!(host.logged("another process listens there").len(), 1);
    assert_eq!(host.end(), Some(0));
    assert!(socket.exists());

    // A path that another process took over while the host ran.
    let socket = folder.path().join("taken");
    let at = socket.to_str().expect("UTF-8");
    let host = settled(&path, &[("LLAMA_SIDECAR_CONTROL", at)]);
    std::fs::remove_file(&socket).expect("the host's socket");
    let _other = UnixListener::bind(&socket).expect("the path is free");
    assert_eq!(host.end(), Some(0));
    assert!(socket.exists(), "the other process's socket is still there");
}

/// Clients that send nothing, half a line or junk, and come back at once, keep no other client
/// out.
#[test]
fn hostile_clients_keep_no_swap_out() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = settled(&path, &[]);
    let socket = host.socket().to_owned();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Also after a panic.
        let _end = Ends(&ends);
        scope.spawn(|| disturb(&socket, 64, Duration::ZERO, &ends, &AtomicU64::new(0)));
        for round in 0..20 {
            let value = [2.0, 1.0][round % 2];
            let answer = swap(&host, &path, &model(value));
            let report = report(&answer);
            let changed = ["swapped", "returned"].map(|name| report[name].as_u64());
            assert_eq!(changed.iter().flatten().sum::<u64>(), 1, "{answer}");
            assert_eq!(host.ask("decode"), result(value));
        }
    });
    assert_eq!(host.end(), Some(0));
}

/// Sets a flag when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
/// The variables of all capabilities that write a file or have work at the end, each with its file in a
/// folder.
const CAPABILITIES: [(&str, &str); 6] = [
    ("LLAMA_SIDECAR_CONTROL", "socket"),
    ("LLAMA_EXPERT_TRACE_OUTPUT", "trace.json"),
    ("LLAMA_EXPERT_TRACE_ROUTES", "expert.routes"),
    ("LLAMA_EXPERT_TRACE_SALIENCY", "saliency.json"),
    ("LLAMA_EXPERT_STREAM", "on"),
    ("LLAMA_POSTFETCH_ENABLE", "1"),
];

/// A program with a mixture of experts, and a folder for the files of its capabilities.
struct Ending {
    folder: tempfile::TempDir,
    host: Host,
}

impl Ending {
    fn start(capabilities: &[(&str, &str)], more: &[(&str, &str)]) -> Ending {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        std::fs::write(path.join("journal"), "").expect("free space");
        Mixture::SharedExpert
            .write(&path.join("model.gguf"))
            .expect("free space");
        let model = path.join("model.gguf");
        let host = Host::start_with(Program::C, &model, &DropIn::Idle, |command| {
            command.envs(more.iter().copied());
            command.env("LLAMA_SIDECAR_JOURNAL", path.join("journal"));
            for (name, value) in capabilities {
                match value.len() > 2 {
                    true => command.env(name, path.join(value)),
                    false => command.env(name, value),
                };
            }
            // SAFETY: a system call between fork and exec.
            unsafe {
                command.pre_exec(|| {
                    // A shell that runs the tests in the background ignores it.
                    libc::signal(libc::SIGINT, libc::SIG_DFL);
                    Ok(())
                });
            }
        });
        Ending { folder, host }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            let name = entry.expect("an entry").file_name();
            name.into_string().expect("UTF-8")
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }
}

#[test]
fn every_end_of_a_program_is_an_end_of_each_capability() {
    let hotswap = ("LLAMA_SIDECAR_HOTSWAP", "1");
    for (name, value) in [hotswap].into_iter().chain(CAPABILITIES) {
        for signal in [None, Some(libc::SIGTERM), Some(libc::SIGINT)] {
            let more = match name {
                // A socket needs a capability.
                "LLAMA_SIDECAR_CONTROL" => &[hotswap][..],
                _ => &[],
            };
            let mut ending = Ending::start(&[(name, value)], more);
            assert_eq!(ending.host.ask("cycle 1"), "cycled");
            let folder = ending.folder.path();
            if value == "socket" {
                eventually("a socket", || folder.join(value).exists());
            }
            match signal {
                None => assert_eq!(ending.host.end(), Some(0)),
                Some(signal) => assert_eq!(ending.host.end_by(signal), Some(signal)),
            }
            let mut expected = vec!["journal", "model.gguf"];
            expected.extend(Some(value).filter(|file| file.contains('.')));
            expected.sort_unstable();
            assert_eq!(Ending::names(folder), expected, "{name} {signal:?}");
            let journal = std::fs::read_to_string(folder.join("journal")).expect("a journal");
            let last = journal.lines().last().unwrap_or_default();
            assert!(
                last.contains("\"event\":\"end\""),
                "{name} {signal:?}: {journal}"
            );
            let streamed = journal.contains("\"event\":\"stream\"");
            assert_eq!(streamed, name == "LLAMA_EXPERT_STREAM", "{journal}");
        }
    }
}

/// A model is loaded, evaluated and freed again and again, with everything on.
#[test]
fn many_loads_of_a_model_leave_nothing() {
    const FIRST: u64 = 500;
    const MORE: u64 = 500;
    let more = [
        ("LLAMA_SIDECAR_HOTSWAP", "1"),
        ("LLAMA_HOTSWAP_POLL_MS", "100"),
        ("LLAMA_EXPERT_TRACE_EVERY_S", "1"),
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
    ];
    let mut ending = Ending::start(&CAPABILITIES, &more);
    let folder = ending.folder.path().to_owned();
    let socket = folder.join("socket");
    // Descriptors, threads, files, lines of the journal, and the lengths of answers.
    let measure = |host: &Host| -> Vec<usize> {
        let entries = |path: &Path| std::fs::read_dir(path).expect("a folder").count();
        let process = PathBuf::from(format!("/proc/{}", host.id()));
        let journal = std::fs::read_to_string(folder.join("journal")).expect("a journal");
        let answers = ["metrics", "trace", "status"].map(|command| {
            let answer = control(&socket, command).to_string();
            // Numbers have more digits.
            answer.replace(|c: char| c.is_ascii_digit(), "").len()
        });
        let folders = [&process.join("fd"), &process.join("task"), &folder];
        let mut all = folders.map(|path| entries(path)).to_vec();
        all.push(journal.lines().count());
        all.extend(answers);
        all
    };
    ending.host.ask(&format!("cycle {FIRST}"));
    eventually("a trace", || folder.join("trace.json").exists());
    let (before, memory) = (measure(&ending.host), ending.host.private_memory());
    ending.host.ask(&format!("cycle {}", MORE / 2));
    let half = ending.host.private_memory();
    ending.host.ask(&format!("cycle {}", MORE / 2));
    // Threads of the last model may still end.
    eventually("no more than before", || {
        let now = measure(&ending.host);
        println!("{before:?}, later {now:?}");
        now.iter().zip(&before).all(|(now, before)| now <= before)
    });
    // A leak grows with each half of the loads. malloc's memory for threads grows once, when more of
    // them than before run at a time (mallopt(3), M_ARENA_MAX).
    let halves = [
        half.saturating_sub(memory) >> 10,
        ending.host.private_memory().saturating_sub(half) >> 10,
    ];
    println!("{halves:?} KiB more after each half of {MORE} loads");
    assert!(
        halves.iter().min() < Some(&(4 << 10)),
        "{halves:?} KiB more after each half of {MORE} loads"
    );
    let trace = &control(&socket, "trace")["traces"][0];
    assert_eq!(
        trace["layers"][0]["tokens"],
        FIRST + MORE,
        "all loads count"
    );
    assert_eq!(ending.host.end(), Some(0));
    let file = std::fs::read(folder.join("trace.json")).expect("a trace");
    let file: Value = serde_json::from_slice(&file).expect("JSON");
    assert_eq!(file["layers"], trace["layers"]);
    let journal = std::fs::read_to_string(folder.join("journal")).expect("a journal");
    for (event, count) in [("trace", 1), ("routes", 1), ("stream", 1), ("end", 1)] {
        let found = journal.matches(&format!("\"event\":\"{event}\"")).count();
        assert_eq!(found, count, "{event}: {journal}");
    }
    let mut routes = RouteReader::open(&folder.join("expert.routes")).expect("routes");
    let mut routed = 0;
    while let Some(record) = routes.read().expect("a valid file") {
        if let RouteRecord::Rows { experts, .. } = record {
            routed += experts.len() as u64;
        }
    }
    let each = u64::from(Mixture::SharedExpert.layers() * USED);
    assert_eq!(routed, (FIRST + MORE) * each);
}
