//! The drop-in with everything on and nothing to do: all experts are in memory, and no file
//! changes. The thread that evaluates makes the system calls of a program without the drop-in, and
//! the threads of the drop-in sleep.

mod hosts;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use hosts::count;
use serde_json::Value;
use sidecar_core::experts::{ExpertIndex, Projection};
use sidecar_core::gguf::{Access, GgufFile};
use testkit::calls::{ThreadCalls, until_output};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program};

/// Tokens of an answer.
const TOKENS: u64 = 100;
/// How long answers are counted, at least: a thread that wakes more often than once a second is
/// found.
const LONG_ENOUGH: Duration = Duration::from_secs(4);
/// System calls that wait: each is a wake-up.
const WAITS: [i64; 9] = [
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_wait,
    libc::SYS_accept4,
    libc::SYS_read,
    libc::SYS_restart_syscall,
];

/// All capabilities that a program without a GPU can have, with outputs in this folder.
fn everything(folder: &tempfile::TempDir) -> DropIn {
    let path = |name: &str| folder.path().join(name).display().to_string();
    DropIn::On(vec![
        ("LLAMA_HOTSWAP_POLL_MS", "1000".into()),
        ("LLAMA_EXPERT_STREAM", "auto".into()),
        ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
        ("LLAMA_EXPERT_TRACE_OUTPUT", path("trace.json")),
        ("LLAMA_EXPERT_TRACE_ROUTES", path("a.routes")),
        ("LLAMA_EXPERT_TRACE_WEIGHTS", "1".into()),
        ("LLAMA_EXPERT_TRACE_SALIENCY", path("saliency.json")),
        ("LLAMA_POSTFETCH_MODE", "on".into()),
        ("LLAMA_SIDECAR_LOG", "warn".into()),
    ])
}

/// Lets the host evaluate tokens, one at a time, and counts its system calls.
fn counted(host: &mut Host) -> BTreeMap<i32, ThreadCalls> {
    assert!(host.ask("prefill 8").starts_with("median_ms"));
    let id = host.id();
    let calls = until_output(id, || host.tell(&format!("force {TOKENS}")));
    assert!(host.line().starts_with("median_ms"));
    calls
}

/// The system calls of the thread that evaluates.
fn evaluating(host: &Host, calls: &BTreeMap<i32, ThreadCalls>) -> BTreeMap<i64, u64> {
    calls[&(host.id() as i32)].counts.clone()
}

fn stream(host: &Host) -> Value {
    host.control("status")["models"][0]["stream"].clone()
}

/// Whether the reader checked no more between two figures than samples of layers, of this size at
/// most.
fn rested(before: &Value, after: &Value, largest: u64) -> bool {
    let more = |name: &str| count(after, name) - count(before, name);
    let samples = more("layers") / 256 + 1;
    after["resting"] == true && more("checked_bytes") <= samples * largest
}

/// Returns the bytes of the pages that two experts of the largest layer are in.
fn largest_layer(model: &Path) -> u64 {
    let file = GgufFile::open(model, Access::Read).expect("a model");
    let index = ExpertIndex::of([&file]);
    let bytes = |layer: u32| -> u64 {
        let matrices = Projection::ALL.map(|matrix| index.slice(layer, matrix, 0));
        let pages = |nbytes: u64| nbytes + 2 * 4096;
        let matrices = matrices.into_iter().flatten();
        matrices.map(|slice| 2 * pages(slice.nbytes)).sum()
    };
    let layers = index.layers().map(|(layer, _)| bytes(layer));
    layers.max().expect("layers with experts")
}

#[test]
fn nothing_to_do_is_nothing_done() {
    let model = fixture("moe.gguf");
    let set = |command: &mut std::process::Command| {
        command.env("HOST_CONTEXT", "512");
    };
    let mut plain = Host::start_with(Program::C, &model, &DropIn::Absent, set);
    counted(&mut plain);
    let calls = counted(&mut plain);
    let expected = evaluating(&plain, &calls);
    assert_eq!(plain.end(), Some(0));

    let largest = largest_layer(&model);
    let folder = tempfile::tempdir().expect("a folder");
    let mut host = Host::start_with(Program::C, &model, &everything(&folder), set);
    // The system may drop pages of files; the reader looks again then, and what it does is not
    // counted here.
    for _ in 0..50 {
        counted(&mut host);
        let before = stream(&host);
        if before["resting"] == false {
            continue;
        }
        host.control("metrics");
        let began = Instant::now();
        let mut answers = Vec::new();
        while began.elapsed() < LONG_ENOUGH {
            answers.push(counted(&mut host));
        }
        let seconds = began.elapsed().as_secs();
        let after = stream(&host);
        if !rested(&before, &after, largest) {
            continue;
        }
        assert!(count(&after, "layers") > count(&before, "layers"));
        for calls in &answers {
            assert_eq!(
                evaluating(&host, calls),
                expected,
                "of the thread that evaluates"
            );
        }
        let mut threads: BTreeMap<i32, (String, u64)> = BTreeMap::new();
        let others = answers
            .iter()
            .flatten()
            .filter(|of| *of.0 != host.id() as i32);
        for (thread, calls) in others {
            let waits: u64 = WAITS.iter().filter_map(|of| calls.counts.get(of)).sum();
            let of = threads.entry(*thread).or_default();
            *of = (calls.name.clone(), of.1 + waits);
        }
        println!("{seconds} s, {} answers: {threads:?}", answers.len());
        assert!(threads.len() >= 4, "{threads:?}");
        for (name, waits) in threads.values() {
            // To begin to trace a thread that waits makes it wait again.
            let own = waits.saturating_sub(answers.len() as u64);
            assert!(own <= seconds + 2, "{name}: {waits} waits in {seconds} s");
        }
        assert_eq!(host.end(), Some(0));
        return;
    }
    panic!("the experts do not stay in memory: {}", stream(&host));
}

#[test]
fn threads_handle_no_signal_from_their_start_on() {
    /// Signals that can be blocked, and that the C library does not use for itself.
    const BLOCKED: u64 = 0x7fff_ffff & !(1 << (libc::SIGKILL - 1)) & !(1 << (libc::SIGSTOP - 1));
    const ATTEMPTS: usize = 50;
    let folder = tempfile::tempdir().expect("a folder");
    let model = fixture("moe.gguf");
    let mut host = Host::start(Program::C, &model, &everything(&folder));
    let id = host.id();
    // A model has readers of its own. They may begin after the program's answer: then once more.
    let readers_began = (0..ATTEMPTS).any(|_| {
        assert_eq!(host.ask("free"), "freed");
        let calls = until_output(id, || host.tell(&format!("load {}", model.display())));
        assert_eq!(host.line(), "loaded");
        let masks = calls
            .values()
            .filter_map(|of| Some((&of.name, of.blocked_at_start?)));
        masks.fold(false, |seen, (name, mask)| {
            assert_eq!(mask & BLOCKED, BLOCKED, "{name}");
            seen | (name == "llama-sidecar-s")
        })
    });
    assert!(readers_began, "no reader in {ATTEMPTS} loads");
    assert_eq!(host.end(), Some(0));
}
