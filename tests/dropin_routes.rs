//! Routes that the drop-in writes in real hosts: they are those that the host itself saw.

mod hosts;
mod small;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hosts::{TOKENS, copied, seen};
use serde_json::Value;
use sidecar_core::trace::{NOT_ROUTED, RouteReader, RouteRecord};
use testkit::fixtures::{cache, fixture};
use testkit::host::{DropIn, Host, Program, built};
use testkit::process::{before_exec, limit};
use testkit::skipped;

/// Routes to a path, with warnings and errors in the log.
fn routes_to(path: &Path) -> DropIn {
    DropIn::On(vec![
        ("LLAMA_EXPERT_TRACE_ROUTES", path.display().to_string()),
        ("LLAMA_EXPERT_TRACE_WEIGHTS", "1".into()),
        ("LLAMA_SIDECAR_LOG", "warn".into()),
    ])
}

/// Routes in a new folder.
fn folder(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    (folder, path)
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    PathBuf::from(format!("{}{ending}", path.display()))
}

/// A file of numpy, of numbers with `N` bytes: its shape and its numbers.
fn array<const N: usize>(path: &Path, ty: &str) -> (Vec<usize>, Vec<[u8; N]>) {
    let bytes = std::fs::read(path).expect("an array");
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains(&format!("'descr': '{ty}'")), "{header}");
    let (_, shape) = header.split_once("'shape': (").expect("a shape");
    let (shape, _) = shape.split_once(')').expect("a tuple");
    let shape: Vec<usize> = shape
        .split(',')
        .map(|extent| extent.trim().parse().expect("a number"))
        .collect();
    let count: usize = shape.iter().product();
    let numbers = bytes[128..].as_chunks().0[..count].to_vec();
    (shape, numbers)
}

/// An array of routes: its shape and ids.
fn routes(path: &Path) -> (Vec<usize>, Vec<i16>) {
    let (shape, numbers) = array(path, "<i2");
    (shape, numbers.into_iter().map(i16::from_le_bytes).collect())
}

/// Waits until a file of routes has so many bytes.
fn wait_for_bytes(path: &Path, bytes: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::metadata(path).map_or(0, |file| file.len()) < bytes {
        assert!(Instant::now() < deadline, "no {bytes} bytes within 60 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The records of a file, and whether it ends within one.
fn records(path: &Path) -> (Vec<RouteRecord>, bool) {
    let mut reader = RouteReader::open(path).expect("routes");
    let mut records = Vec::new();
    while let Some(record) = reader.read().expect("a valid file") {
        records.push(record);
    }
    (records, reader.is_cut())
}

/// The ids of all rows, by context.
fn by_context(records: &[RouteRecord]) -> BTreeMap<u32, Vec<i16>> {
    let mut contexts = BTreeMap::new();
    for record in records {
        if let RouteRecord::Rows {
            context, experts, ..
        } = record
        {
            let ids: &mut Vec<i16> = contexts.entry(*context).or_default();
            ids.extend(experts);
        }
    }
    contexts
}

/// Writes a text and ends.
fn text_with(path: &Path) {
    let mut host = Host::start(Program::Python, &fixture("moe.gguf"), &routes_to(path));
    host.ask(&format!("text {TOKENS}"));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn routes_and_gate_weights_are_those_that_the_host_saw() {
    let (_folder, path) = folder("routes.npy");
    let model = fixture("moe.gguf");
    let with = routes_to(&path);
    let mut host = Host::start_with(Program::PythonCounting, &model, &with, |command| {
        command.args(["gates", "sequences=2"]);
    });
    host.ask("text 3");
    let marked = Command::new(built("release/llama-sidecar"))
        .args(["ctl", "mark", "two \"sequences\"", "--socket"])
        .arg(host.socket())
        .status();
    assert!(marked.expect("it starts").success());
    assert_eq!(host.ask("several 5"), "evaluated");
    let (experts, gates) = (seen(&mut host, "routes"), seen(&mut host, "gates"));
    assert_eq!(host.end(), Some(0));

    let (shape, ids) = routes(&path);
    // A prompt of 5 tokens and 2 further ones; then two sequences of 5.
    assert_eq!(shape, [17, 30, 2]);
    let (weights_shape, weights) = array(&beside(&path, ".weights.npy"), "<f4");
    assert_eq!(weights_shape, shape);
    let weights: Vec<f32> = weights.into_iter().map(f32::from_le_bytes).collect();
    for layer in 0..30 {
        let at = |token: usize| (token * 30 + layer) * 2;
        let routed: Vec<usize> = (0..17)
            .filter(|token| ids[at(*token)] != NOT_ROUTED)
            .collect();
        // In parts of 4 tokens. The batch is split into 2 + 2, 2 + 2 and 1 + 1 tokens of both
        // sequences, of which token 4 of the first and 3 of the second have an output.
        let expected: Vec<usize> = match layer {
            29 => vec![4, 5, 6, 14, 15],
            _ => (0..17).collect(),
        };
        assert_eq!(routed, expected, "layer {layer}");
        for (row, token) in routed.into_iter().enumerate() {
            for place in 0..2 {
                let id = f64::from(ids[at(token) + place]);
                assert_eq!(id, experts[&layer][row][place], "{layer} {token}");
                let weight = gates[&layer][row][place] as f32;
                assert_eq!(weights[at(token) + place], weight, "{layer} {token}");
            }
        }
        for token in (0..17).filter(|token| ids[at(*token)] == NOT_ROUTED) {
            assert!(weights[at(token)].is_nan());
        }
    }
    let marks = std::fs::read_to_string(beside(&path, ".marks.jsonl")).expect("marks");
    assert_eq!(marks, "{\"token\":7,\"mark\":\"two \\\"sequences\\\"\"}\n");
    numpy_reads(&path, &shape, &ids);
}

/// Reads an array with numpy, if the fixtures have it.
fn numpy_reads(path: &Path, shape: &[usize], ids: &[i16]) {
    let python = cache().join("venv/bin/python3");
    if !python.exists() {
        return skipped("the fixtures have no numpy");
    }
    let script = "import sys, json, numpy; a = numpy.load(sys.argv[1]); \
        print(json.dumps([list(a.shape), a.ravel().tolist()]))";
    let output = Command::new(python).args(["-c", script]).arg(path).output();
    let output = output.expect("it starts").stdout;
    let read: (Vec<usize>, Vec<i16>) = serde_json::from_slice(&output).expect("JSON");
    assert_eq!((&read.0[..], &read.1[..]), (shape, ids));
}

#[test]
fn all_formats_have_the_same_routes() {
    let (folder, array) = folder("routes.npy");
    let (table, binary) = (folder.path().join("a.csv"), folder.path().join("a.routes"));
    for path in [&array, &table, &binary] {
        text_with(path);
    }
    let (shape, ids) = routes(&array);
    assert_eq!(shape, [5 + TOKENS - 1, 30, 2]);
    let (read, is_cut) = records(&binary);
    assert!(!is_cut);
    assert_eq!(
        by_context(&read).into_values().collect::<Vec<_>>(),
        std::slice::from_ref(&ids)
    );
    let text = std::fs::read_to_string(&table).expect("a table");
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("layer,expert,weight"));
    let expected = ids.iter().enumerate().filter(|(_, id)| **id != NOT_ROUTED);
    let expected: Vec<String> = expected
        .map(|(at, id)| format!("{},{id},", at / 2 % 30))
        .collect();
    let lines: Vec<&str> = lines.collect();
    assert_eq!(lines.len(), expected.len());
    for (line, expected) in lines.iter().zip(&expected) {
        assert!(line.starts_with(expected), "{line} is not {expected}");
    }
    let mut workloads = Vec::new();
    let reader = RouteReader::open(&binary).expect("a valid file");
    let read = reader.workloads(|text, counts| {
        workloads.push((text.to_owned(), counts));
        Ok(())
    });
    read.expect("a valid file");
    let [(_, counts)] = workloads.as_slice() else {
        panic!("one workload: {workloads:?}");
    };
    assert_eq!(counts.activations(), expected.len() as u64);
    assert_eq!(counts.rejected, 0);
}

#[test]
fn two_contexts_at_a_time_write_their_own_rows() {
    let (folder, alone) = folder("alone.routes");
    let both = folder.path().join("both.routes");
    text_with(&alone);
    let mut host = Host::start(Program::Python, &fixture("moe.gguf"), &routes_to(&both));
    let texts = host.ask(&format!("both {TOKENS}"));
    let (first, second) = texts.split_once(" | ").expect("two texts");
    assert_eq!(first, second);
    assert_eq!(host.end(), Some(0));
    let alone: Vec<_> = by_context(&records(&alone).0).into_values().collect();
    let both: Vec<_> = by_context(&records(&both).0).into_values().collect();
    assert_eq!(both, [alone[0].clone(), alone[0].clone()]);
}

#[test]
fn a_killed_host_leaves_files_that_can_be_read() {
    for name in ["killed.npy", "killed.routes", "killed.csv"] {
        let (_folder, path) = folder(name);
        let mut host = Host::start(Program::Python, &fixture("moe.gguf"), &routes_to(&path));
        host.tell("text 240");
        wait_for_bytes(&path, 10_000);
        // With SIGKILL.
        drop(host);
        match name {
            "killed.npy" => {
                let (shape, ids) = routes(&path);
                assert!(shape[0] >= 10 && shape[1..] == [30, 2], "{shape:?}");
                numpy_reads(&path, &shape, &ids);
            }
            "killed.routes" => {
                let ids = by_context(&records(&path).0);
                assert!(ids.values().next().expect("rows").len() >= 10 * 60);
            }
            _ => {
                let text = std::fs::read_to_string(&path).expect("a table");
                let lines: Vec<&str> = text.lines().collect();
                assert!(lines.len() > 200, "{}", lines.len());
            }
        }
    }
}

#[test]
fn a_disk_without_space_is_reported_once_and_changes_nothing() {
    let (_folder, path) = folder("full.routes");
    let (mut host, before) = started(&path, |_| {});
    assert_eq!(host.logged("ROUTES"), Vec::<String>::new());
    assert_eq!(host.ask("more 5").split(' ').count(), 5);
    assert_eq!(host.end(), Some(0));

    let (mut host, text) = started(Path::new("/dev/full"), |_| {});
    assert_eq!(text, before);
    host.ask("more 5");
    let log = host.keep_log();
    assert_eq!(host.end(), Some(0));
    let lines = log.lock().expect("no panic").join("\n");
    assert_eq!(
        lines.matches("cannot write /dev/full").count(),
        1,
        "{lines}"
    );

    // Space for some tokens: those are in the file, and its end is whole.
    let most = 4000;
    let (mut host, text) = started(&path, |command| {
        before_exec(command, move || limit(libc::RLIMIT_FSIZE, most));
    });
    assert_eq!(text, before);
    host.ask("more 10");
    let log = host.keep_log();
    assert_eq!(host.end(), Some(0));
    let lines = log.lock().expect("no panic").join("\n");
    assert_eq!(lines.matches("cannot write").count(), 1, "{lines}");
    let (records, is_cut) = records(&path);
    let tokens = by_context(&records)[&0].len() / 60;
    assert!(!is_cut && tokens >= 5, "{tokens} tokens");
    assert!(std::fs::metadata(&path).expect("a file").len() <= most);
}

/// A host that wrote a text of 3 tokens, with routes to a path.
fn started(path: &Path, set: impl FnOnce(&mut Command)) -> (Host, String) {
    let with = routes_to(path);
    let mut host = Host::start_with(Program::Python, &fixture("moe.gguf"), &with, set);
    let text = host.ask("text 3");
    (host, text)
}

#[test]
fn a_warm_up_is_left_out() {
    let (folder, warm) = folder("warm.npy");
    let plain = folder.path().join("plain.npy");
    for (path, command) in [(&plain, None), (&warm, Some("warm"))] {
        let mut host = Host::start(Program::Python, &fixture("moe.gguf"), &routes_to(path));
        if let Some(command) = command {
            assert_eq!(host.ask(command), "warm");
        }
        host.ask("text 3");
        assert_eq!(host.end(), Some(0));
    }
    assert_eq!(routes(&warm), routes(&plain));
}

#[test]
fn an_evaluation_that_was_aborted_is_not_written() {
    let (_models, model) = small::folder(&small::mixture(1.0));
    let (_folder, path) = folder("aborted.routes");
    let mut host = Host::start(Program::Small(true), &model, &routes_to(&path));
    host.ask("decode");
    assert!(host.ask("aborted").starts_with("failed"), "it is aborted");
    host.ask("decode");
    assert_eq!(host.end(), Some(0));
    let ids = by_context(&records(&path).0);
    assert_eq!(ids.into_values().collect::<Vec<_>>(), [[0, 1, 0, 1]]);
}

#[test]
fn each_model_has_its_own_file_for_all_of_its_loads() {
    let (folder, path) = folder("routes.npy");
    let (_other, other) = copied("moe.gguf");
    let model = fixture("moe.gguf");
    let mut host = Host::start(Program::Python, &model, &routes_to(&path));
    host.ask("text 2");
    for next in [&other, &model] {
        assert_eq!(host.ask("free"), "freed");
        host.ask(&format!("load {}", next.display()));
        host.ask("text 4");
    }
    assert_eq!(host.end(), Some(0));
    let second = folder.path().join("routes-2.npy");
    assert_eq!((routes(&path).0[0], routes(&second).0[0]), (6 + 8, 8));
}

#[test]
fn saliency_is_the_mean_norm_of_weighted_outputs() {
    let (_folder, path) = folder("saliency.json");
    let with = DropIn::On(vec![
        ("LLAMA_EXPERT_TRACE_SALIENCY", path.display().to_string()),
        ("LLAMA_SIDECAR_LOG", "warn".into()),
    ]);
    let model = fixture("small-moe.gguf");
    let mut host = Host::start_with(Program::PythonCounting, &model, &with, |command| {
        command.arg("gates");
    });
    host.ask("text 6");
    host.ask("warm");
    let (experts, norms) = (seen(&mut host, "routes"), seen(&mut host, "norms"));
    let mut log = host.log();
    log.retain(|line| !line.starts_with("[EXPERT-TRACE] "));
    assert_eq!(log, Vec::<String>::new());
    assert_eq!(host.end(), Some(0));
    let json = std::fs::read(&path).expect("it is written at the end");
    let json: Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["schema"], "llama-sidecar/expert-saliency/1");
    for layer in 0..4 {
        let mut sums = vec![(0u64, 0f64); 8];
        for (experts, norms) in experts[&layer].iter().zip(&norms[&layer]) {
            // The host saw the warm-up, which used all experts.
            for (expert, norm) in experts.iter().zip(norms).filter(|_| experts.len() == 2) {
                let sum = &mut sums[*expert as usize];
                *sum = (sum.0 + 1, sum.1 + norm);
            }
        }
        let found = &json["layers"][layer];
        assert_eq!(found["layer"], layer);
        for (expert, (count, sum)) in sums.into_iter().enumerate() {
            assert_eq!(found["counts"][expert], count, "{layer} {expert}");
            let mean = sum / count.max(1) as f64;
            let saliency = found["saliency"][expert].as_f64().expect("a number");
            assert!(
                (saliency - mean).abs() <= 1e-5 * mean,
                "{layer} {expert}: {saliency} is not {mean}"
            );
        }
    }
}

#[test]
fn the_wrapper_reports_routes() {
    let (_folder, path) = folder("routes.npy");
    let mut child = Command::new(built("release/llama-sidecar"))
        .args(["run", "--expert-trace-routes"])
        .arg(&path)
        .arg("--")
        .arg(built("hosts-c/host"))
        .args([testkit::fixtures::upstream_libraries(), fixture("moe.gguf")])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("piped");
    std::io::Write::write_all(&mut input, b"text 3\nend\n").expect("the host lives");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    let line = format!(
        "routes of 7 tokens written to {}, 0 tokens dropped",
        path.display()
    );
    assert!(text.contains(&line), "{text}");
    assert_eq!(routes(&path).0, [7, 30, 2]);
}
