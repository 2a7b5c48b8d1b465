//! Programs whose descriptors are closed, whose outputs cannot be written, or that have little address space:
//! with the drop-in, they end as without it, with the same results.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, control, hash, replace};
use testkit::process::{before_exec, limit, limit_of, memory};

/// What the host writes; its answer has a hash of all logits.
const EVALUATE: &str = "force 4";

/// Variables for all outputs, in a folder.
const OUTPUTS: [(&str, &str); 7] = [
    ("LLAMA_SIDECAR_JOURNAL", "journal"),
    ("LLAMA_SIDECAR_LOG", "debug"),
    ("LLAMA_EXPERT_TRACE_STATS", "1"),
    ("LLAMA_EXPERT_TRACE_OUTPUT", "trace.json"),
    ("LLAMA_EXPERT_TRACE_ROUTES", "expert.routes"),
    ("LLAMA_EXPERT_TRACE_SALIENCY", "saliency.json"),
    ("LLAMA_SIDECAR_LOGITS_HASHES", "hashes"),
];

/// The variables of outputs in files, of a folder.
fn outputs_in(folder: &Path) -> Vec<(&'static str, &'static str)> {
    let path = |name: &str| folder.join(name).to_str().expect("UTF-8").to_owned();
    let files = OUTPUTS[3..].iter();
    files
        .map(|(variable, name)| (*variable, &*path(name).leak()))
        .collect()
}

/// Streaming with less memory than the experts of the model have.
const STREAM: [(&str, &str); 2] = [
    ("LLAMA_EXPERT_STREAM", "on"),
    ("LLAMA_EXPERT_STREAM_MEMORY_MB", "1"),
];

fn host(variables: &[(&'static str, &str)], set: fn() -> bool) -> Host {
    let on = match variables {
        [] => DropIn::Absent,
        _ => DropIn::with(variables),
    };
    Host::start_with(Program::CMapped, &fixture("moe.gguf"), &on, |command| {
        before_exec(command, set);
    })
}

fn of_program(set: fn() -> bool) -> String {
    let mut host = host(&[], set);
    let expected = hash(&host.ask(EVALUATE));
    assert_eq!(host.end(), Some(0));
    expected
}

/// Makes standard error a pipe without a reader.
fn no_reader() -> bool {
    let mut ends = [0; 2];
    // SAFETY: plain system calls.
    unsafe {
        libc::pipe(ends.as_mut_ptr()) == 0
            && libc::dup2(ends[1], libc::STDERR_FILENO) >= 0
            && libc::close(ends[0]) == 0
            && libc::close(ends[1]) == 0
    }
}

fn no_file_size() -> bool {
    limit(libc::RLIMIT_FSIZE, 0)
}

fn no_standard_error() -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::close(libc::STDERR_FILENO) == 0 }
}

fn nothing() -> bool {
    true
}

#[test]
fn outputs_that_cannot_be_written_end_no_program() {
    let expected = of_program(nothing);
    type Obstacle = fn() -> bool;
    let obstacles: [(&str, Obstacle); 4] = [
        ("no reader", no_reader),
        ("a limit of file sizes", no_file_size),
        ("no standard error", no_standard_error),
        ("a full disk", nothing),
    ];
    for (obstacle, set) in obstacles {
        for (variable, value) in OUTPUTS {
            let folder = tempfile::tempdir().expect("a folder");
            let is_file = value != "1" && value != "debug";
            let path = folder.path().join(value);
            if variable == "LLAMA_SIDECAR_JOURNAL" {
                std::fs::write(&path, "").expect("free space");
            }
            let path = match (is_file, obstacle) {
                (false, _) => value,
                (true, "a full disk") => "/dev/full",
                (true, _) => path.to_str().expect("UTF-8"),
            };
            let mut host = host(&[(variable, path)], set);
            let answer = host.ask(EVALUATE);
            assert_eq!(hash(&answer), expected, "{obstacle}: {variable}");
            assert_eq!(host.end(), Some(0), "{obstacle}: {variable}");
            let names = std::fs::read_dir(folder.path()).expect("a folder");
            let names = names.map(|entry| entry.expect("an entry").file_name());
            let incomplete = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".part");
            assert_eq!(
                names.filter(incomplete).count(),
                0,
                "{obstacle}: {variable}"
            );
        }
    }
}

#[test]
fn a_fifo_whose_reader_is_gone_ends_no_program() {
    let expected = of_program(nothing);
    for variable in ["LLAMA_SIDECAR_LOGITS_HASHES", "LLAMA_EXPERT_TRACE_ROUTES"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fifo");
        let name = std::ffi::CString::new(path.to_str().expect("UTF-8")).expect("no zero");
        // SAFETY: a path that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let reader = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path);
        let mut host = host(&[(variable, path.to_str().expect("UTF-8"))], nothing);
        assert_eq!(hash(&host.ask(EVALUATE)), expected, "{variable}");
        drop(reader);
        assert!(host.ask(EVALUATE).contains("hash "), "{variable}");
        assert_eq!(host.end(), Some(0), "{variable}");
    }
}

/// Returns what descriptor 2 of a process is: nothing also where it is the folder that takes the number for the
/// time of an open, or what malloc of the C library reads once, when a second thread allocates.
fn standard_error(host: &Host) -> Option<std::path::PathBuf> {
    let found = std::fs::read_link(format!("/proc/{}/fd/2", host.id())).ok();
    let others = ["/", "/sys/devices/system/cpu/online"];
    found.filter(|path| !others.contains(&path.to_str().expect("UTF-8")))
}

#[test]
fn no_descriptor_has_the_number_of_a_standard_one() {
    let mut without = host(&[], no_standard_error);
    let expected = hash(&without.ask(EVALUATE));
    let error = standard_error(&without);
    for more in [&[][..], &STREAM[..]] {
        let folder = tempfile::tempdir().expect("a folder");
        let variables = [&outputs_in(folder.path()), more].concat();
        let mut host = host(&variables, no_standard_error);
        assert_eq!(hash(&host.ask(EVALUATE)), expected);
        assert_eq!(control(host.socket(), "status")["ok"], true);
        for _ in 0..200 {
            assert_eq!(standard_error(&host), error);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(host.end(), Some(0));
    }
    assert_eq!(without.end(), Some(0));
}

#[test]
fn descriptors_that_the_program_closes_are_used_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("other");
    let results = |variables: &[(&'static str, &str)]| {
        let mut host = host(variables, nothing);
        let first = hash(&host.ask(EVALUATE));
        assert_eq!(host.ask(&format!("close {}", other.display())), "closed");
        let later = [hash(&host.ask(EVALUATE)), hash(&host.ask("prefill 16"))];
        assert_eq!(host.end(), Some(0));
        (first, later)
    };
    let expected = results(&[]);
    assert_eq!(results(&outputs_in(folder.path())), expected);
    assert_eq!(results(&STREAM), expected);
    let written = std::fs::read_to_string(&other).expect("a file");
    assert_eq!(written, "", "the file of the program");
}

fn few_descriptors() -> bool {
    limit(libc::RLIMIT_NOFILE, 300)
}

/// The program has all its files open at a time.
#[test]
fn a_model_of_many_files_is_refused_where_descriptors_are_few() {
    let model = fixture("smollm2-tensor-shards").join("smollm2-00001-of-00272.gguf");
    let answer = |on: &DropIn| {
        let mut host = Host::start_with(Program::CMapped, &model, on, |command| {
            before_exec(command, few_descriptors);
        });
        let answer = hash(&host.ask(EVALUATE));
        if !matches!(on, DropIn::Absent) {
            host.wait_logged("this process may have 300 descriptors", 1);
        }
        assert_eq!(host.end(), Some(0));
        answer
    };
    assert_eq!(answer(&DropIn::with(&[])), answer(&DropIn::Absent));
}

/// The address space of limited programs.
static LIMIT: AtomicU64 = AtomicU64::new(0);

fn address_space() -> bool {
    limit(libc::RLIMIT_AS, LIMIT.load(Ordering::SeqCst))
}

#[test]
fn a_limit_of_address_space_leaves_the_program_what_it_needs() {
    let mut without = host(&[], nothing);
    let expected = hash(&without.ask(EVALUATE));
    let needed = memory(&without.id().to_string(), "VmPeak:");
    assert_eq!(without.end(), Some(0));
    for more in (1..=6).map(|number| number * 100) {
        LIMIT.store(needed + (more << 20), Ordering::SeqCst);
        let mut limited = host(&STREAM, address_space);
        assert_eq!(hash(&limited.ask(EVALUATE)), expected, "{more} MiB more");
        if more == 100 {
            limited.wait_logged("the limit (ulimit -v) leaves 0 MiB", 1);
        }
        assert_eq!(limited.end(), Some(0), "{more} MiB more");
    }
}

#[test]
fn loaded_weights_come_back_without_further_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    replace(&path, &fixture("smollm2.gguf"));
    let on = DropIn::with(&[
        ("LLAMA_SIDECAR_HOTSWAP", "1"),
        ("LLAMA_HOTSWAP_POLL_MS", "10"),
    ]);
    let mut host = Host::start(Program::C, &path, &on);
    let loaded = host.text(8);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    host.wait_logged("reload: 8 swapped", 1);
    assert_ne!(host.text(8), loaded);
    let data = memory(&host.id().to_string(), "VmData:");
    assert!(limit_of(host.id(), libc::RLIMIT_DATA, data + (8 << 20)));
    replace(&path, &fixture("smollm2.gguf"));
    host.wait_logged("reload: 0 swapped, 8 returned", 1);
    assert_eq!(host.text(8), loaded);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    host.wait_logged("this process gets no further 16 MiB", 1);
    assert_eq!(host.text(8), loaded);
    assert_eq!(host.end(), Some(0));
}

/// The data of limited programs.
fn limited_data() -> bool {
    limit(libc::RLIMIT_DATA, LIMIT.load(Ordering::SeqCst))
}

#[test]
fn a_limit_of_data_leaves_the_program_what_it_needs() {
    let model = fixture("small-moe.gguf");
    let start = |on: &DropIn, set: fn() -> bool| {
        Host::start_with(Program::CMapped, &model, on, |command| {
            before_exec(command, set);
        })
    };
    let mut alone = start(&DropIn::Absent, nothing);
    let expected = hash(&alone.ask(EVALUATE));
    let needed = memory(&alone.id().to_string(), "VmData:");
    assert_eq!(alone.end(), Some(0));
    for more in [6, 8, 10, 16, 400] {
        LIMIT.store(needed + (more << 20), Ordering::SeqCst);
        let capabilities = [&[("LLAMA_SIDECAR_HOTSWAP", "1")][..], &STREAM].map(DropIn::with);
        for on in [DropIn::Absent].iter().chain(&capabilities) {
            let mut host = start(on, limited_data);
            assert_eq!(hash(&host.ask(EVALUATE)), expected, "{more} MiB more");
            if more < 400 && !matches!(on, DropIn::Absent) {
                host.wait_logged("the limit (ulimit -d) leaves 0 MiB", 1);
            }
            assert_eq!(host.end(), Some(0), "{more} MiB more");
        }
    }
}
