//! The drop-in in real hosts: after a swap, a host writes what a new process with the new
//! file writes, with bit-identical logits.

mod hosts;

use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hosts::{
    TOKENS, copied, counted_by_host, exchange_blocks, fresh, on, other_bytes, swap_and_back, taken,
    traced,
};
use serde_json::Value;
use sidecar_core::gguf::{Access, GgufFile};
use testkit::caches::{best_hits, lfu_hits, lru_hits};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, control, hash, preload_library, replace};
use testkit::mixtures::Mixture;

#[test]
fn node_swaps_to_another_quantisation_and_back() {
    swap_and_back(
        Program::Node,
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn node_swaps_one_tensor() {
    swap_and_back(
        Program::Node,
        "smollm2.gguf",
        &fixture("smollm2-one-q8_0.gguf"),
        1,
    );
}

#[test]
fn node_swaps_to_other_bytes_of_the_same_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let variant = other_bytes(folder.path(), "smollm2.gguf", c"blk.3.ffn_up.weight");
    swap_and_back(Program::Node, "smollm2.gguf", &variant, 1);
}

#[test]
fn node_swaps_experts() {
    swap_and_back(Program::Node, "moe.gguf", &fixture("moe-q8_0.gguf"), 3);
    swap_and_back(Program::Node, "moe.gguf", &fixture("moe-mixed.gguf"), 4);
}

#[test]
fn python_swaps() {
    swap_and_back(
        Program::Python,
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn c_with_two_threads_swaps() {
    swap_and_back(
        Program::CTwoThreads,
        "smollm2.gguf",
        &fixture("smollm2-mixed.gguf"),
        8,
    );
}

#[test]
fn a_write_in_place_is_reported_although_the_content_was_hashed_since() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(Program::CMapped, &path, &on());
    host.text(TOKENS);
    let hash = |host: &Host| host.control("hash")["models"][0]["content_hash"].clone();
    let loaded = hash(&host);
    assert!(loaded.is_string(), "{loaded}");
    let gguf = GgufFile::open(&path, Access::Read).expect("a model");
    let tensor = gguf.header.find(c"blk.3.ffn_up.weight");
    exchange_blocks(&path, tensor.expect("a tensor of this name"));
    assert!(hash(&host).is_null(), "a reload looks at the file first");
    let answer = host.control("reload");
    assert_eq!(answer["reports"][0]["in_place"], 1, "{answer}");
    assert!(hash(&host).is_string());
    assert_ne!(hash(&host), loaded);
    assert_eq!(host.end(), Some(0));
}

/// Waits until something holds.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 60 s: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Variables for a host that polls its files and applies changes at once.
fn watched(poll_ms: &str) -> Vec<(&'static str, String)> {
    vec![
        ("LLAMA_HOTSWAP_POLL_MS", poll_ms.into()),
        ("LLAMA_HOTSWAP_QUIET_MS", "0".into()),
    ]
}

#[test]
fn a_changed_file_is_found_by_polling() {
    let (_folder, path) = copied("smollm2.gguf");
    let after = fresh(Program::C, &fixture("smollm2-mixed.gguf"));
    let polled = DropIn::On(watched("20"));
    let mut host = Host::start(Program::C, &path, &polled);
    host.text(2);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    eventually("the swap", || !host.logged("reload: 8 swapped").is_empty());
    assert_eq!(host.text(TOKENS), after);
}

#[test]
fn llama_reload_changed_tensors_returns_whether_a_tensor_changed() {
    let (_folder, path) = copied("smollm2.gguf");
    let after = fresh(Program::C, &fixture("smollm2-mixed.gguf"));
    let mut host = Host::start(Program::C, &path, &on());
    assert_eq!(host.ask("reload"), "unchanged");
    host.text(2);
    assert_eq!(host.ask("reload"), "unchanged");
    replace(&path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(host.ask("reload"), "changed");
    assert_eq!(host.text(TOKENS), after);
    let idle = Host::start(Program::C, &path, &DropIn::Idle).ask("reload");
    assert_eq!(idle, "unchanged");
}

#[test]
fn models_of_many_shards_and_models_beside_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(fixture("smollm2-tensor-shards")).expect("a fixture") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_owned();
        std::fs::copy(&path, folder.path().join(&name)).expect("free space");
        names.push(name);
    }
    names.sort();
    let first = folder.path().join(&names[0]);
    let before = fresh(Program::C, &fixture("smollm2.gguf"));
    let (_folder, other) = copied("moe.gguf");
    let other_before = fresh(Program::C, &other);
    let other_after = fresh(Program::C, &fixture("moe-mixed.gguf"));

    let mut host = Host::start(Program::C, &first, &on());
    assert_eq!(host.text(TOKENS), before);
    // The first model stays.
    host.ask(&format!("load {}", other.display()));
    assert_eq!(host.text(TOKENS), other_before);
    let status = host.control("status");
    assert_eq!(
        status["models"][0]["files"].as_array().map(Vec::len),
        Some(names.len())
    );
    assert_eq!(status["models"][0]["tensors"], 272);
    assert_eq!(status["models"][1]["tensors"], 302);
    replace(&other, &fixture("moe-mixed.gguf"));
    // One shard of the other with its blocks in another order.
    let read =
        |name: &std::ffi::OsString| std::fs::read(folder.path().join(name)).expect("a shard");
    let large = |name: &&std::ffi::OsString| read(name).len() > 400_000;
    let name = names.iter().rev().find(large).expect("a matrix");
    let shard = folder.path().join(name);
    let beside = shard.with_extension("new");
    std::fs::write(&beside, read(name)).expect("free space");
    exchange_blocks(&beside, 0);
    std::fs::rename(beside, &shard).expect("the same folder");
    let report = host.control("reload");
    assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
    assert_eq!(report["reports"][0]["unchanged"], 0, "{report}");
    assert_eq!(report["reports"][1]["swapped"], 4, "{report}");
    assert_eq!(host.text(TOKENS), other_after);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_freed_model_is_not_in_status() {
    for program in [Program::Node, Program::Python, Program::C] {
        let (_folder, path) = copied("smollm2.gguf");
        let mut host = Host::start(program, &path, &on());
        host.text(3);
        replace(&path, &fixture("smollm2-mixed.gguf"));
        assert_eq!(taken(&host.control("reload")), (8, 0));
        assert_eq!(host.ask("free"), "freed");
        let status = host.control("status");
        assert_eq!(status["models"], Value::Array(Vec::new()), "{program:?}");
        assert_eq!(host.control("reload")["ok"], true);
        host.ask(&format!("load {}", fixture("moe.gguf").display()));
        host.text(3);
        assert_eq!(host.control("status")["models"][0]["tensors"], 302);
        assert_eq!(host.end(), Some(0), "{program:?}");
    }
}

#[test]
fn a_model_can_be_freed_while_it_is_read_and_swapped() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(Program::C, &path, &on());
    for (round, request) in ["hash", "reload", "revert", "reload"]
        .into_iter()
        .enumerate()
    {
        host.text(3);
        host.control("unfreeze");
        let variant = ["smollm2-mixed.gguf", "smollm2.gguf"][round % 2];
        replace(&path, &fixture(variant));
        let mut client = UnixStream::connect(host.socket()).expect("it listens");
        writeln!(client, "{{\"cmd\":\"{request}\"}}").expect("it takes requests");
        assert_eq!(host.ask("free"), "freed");
        let mut answer = String::new();
        let mut lines = std::io::BufReader::new(client);
        std::io::BufRead::read_line(&mut lines, &mut answer).expect("an answer");
        assert!(answer.contains("\"ok\":"), "{answer}");
        assert_eq!(host.control("status")["models"], Value::Array(Vec::new()));
        host.ask(&format!("load {}", path.display()));
    }
    host.text(3);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn bad_files_are_logged_once_and_swap_nothing() {
    let (_folder, path) = copied("smollm2.gguf");
    let before = fresh(Program::C, &path);
    let mut host = Host::start(Program::C, &path, &DropIn::On(watched("10")));
    assert_eq!(host.text(TOKENS), before);
    let good = std::fs::read(&path).expect("a model");
    let put = |bytes: &[u8]| {
        let beside = path.with_extension("new");
        std::fs::write(&beside, bytes).expect("free space");
        std::fs::rename(beside, &path).expect("the same folder");
    };
    let mut expected = 0;
    let mut bad = |host: &mut Host, what: &str, change: &dyn Fn()| {
        change();
        expected += 1;
        let ignored = || host.logged("ignored:").len();
        eventually(what, || ignored() >= expected);
        // The files are polled many times while this text is written.
        assert_eq!(host.text(TOKENS), before, "{what}");
        let lines = host.logged("ignored:");
        assert_eq!(lines.len(), expected, "{what}: {lines:#?}");
        // As before, and read to its end: the next bad file is reported again.
        put(&good);
        assert_eq!(host.control("reload")["ok"], true, "{what}");
    };
    for length in [3, 1000, good.len() / 2, good.len() - 1] {
        bad(&mut host, "truncated", &|| put(&good[..length]));
    }
    bad(&mut host, "another model", &|| {
        replace(&path, &fixture("moe.gguf"))
    });
    bad(&mut host, "no model", &|| put(&[7; 5000]));
    bad(&mut host, "gone", &|| {
        std::fs::remove_file(&path).expect("our own copy");
    });
    bad(&mut host, "a folder", &|| {
        let beside = path.with_extension("new");
        std::os::unix::fs::symlink("/", &beside).expect("free space");
        std::fs::rename(beside, &path).expect("the same folder");
    });
    // A slow writer: the file grows in place.
    bad(&mut host, "half-written", &|| {
        let variant = std::fs::read(fixture("smollm2-mixed.gguf")).expect("a fixture");
        put(&variant[..variant.len() / 3]);
        let file = std::fs::OpenOptions::new().write(true).open(&path);
        let file = file.expect("our own copy");
        for part in [4, 5, 6, 7] {
            let end = variant.len() * part / 10;
            file.write_all_at(&variant[..end], 0).expect("free space");
        }
    });
    assert_eq!(host.control("status")["generation"], 0);
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn two_contexts_evaluate_on_two_threads_while_tensors_are_swapped() {
    let (_folder, path) = copied("smollm2.gguf");
    let files = [fixture("smollm2.gguf"), fixture("smollm2-mixed.gguf")];
    let program = Program::Python;
    let written = files.clone().map(|file| fresh(program, &file).ids);
    let mut host = Host::start(program, &path, &on());
    host.ask("both 2");
    for round in 1..=6 {
        host.tell("both 20");
        for swap in [round, round + 1, round] {
            replace(&path, &files[swap % 2]);
            assert_eq!(host.control("reload")["ok"], true);
        }
        host.line();
        let expected = &written[round % 2];
        let both = host.ask(&format!("both {TOKENS}"));
        assert_eq!(both, format!("{expected} | {expected}"));
    }
    assert_eq!(host.control("status")["generation"], 18);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn experts_are_counted_as_the_host_counts_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("trace.json");
    let with = DropIn::On(vec![
        ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
        ("LLAMA_EXPERT_TRACE_OUTPUT", output.display().to_string()),
        ("LLAMA_SIDECAR_LOG", "warn".into()),
    ]);
    let mut host = Host::start(Program::PythonCounting, &fixture("moe.gguf"), &with);
    host.ask("text 10");
    host.ask("more 5");
    let expected = counted_by_host(&mut host);
    assert_eq!(expected.len(), 30);
    let trace = &host.control("trace")["traces"][0];
    assert_eq!(traced(trace), expected);
    // A prompt of 5 tokens, of which the last layer sees only the last, and 14 more.
    let tokens = |layer: usize| trace["layers"][layer]["tokens"].as_u64();
    assert_eq!((tokens(0), tokens(29)), (Some(19), Some(15)));
    assert_eq!(
        (&trace["experts_used"], &trace["rejected"]),
        (&2.into(), &0.into())
    );

    assert_eq!(host.control("trace-reset")["ok"], true);
    host.ask("text 3");
    let both = counted_by_host(&mut host);
    let since = &host.control("trace")["traces"][0];
    for (layer, counts) in traced(since).iter().enumerate() {
        for (expert, count) in counts.iter().enumerate() {
            assert_eq!(expected[layer][expert] + count, both[layer][expert]);
        }
    }
    let since = traced(since);
    let mut log = host.log();
    log.retain(|line| !line.starts_with("[EXPERT-TRACE] "));
    assert_eq!(log, Vec::<String>::new());
    assert_eq!(host.end(), Some(0));
    let written = std::fs::read_to_string(&output).expect("it is written at the end");
    let written: Value = serde_json::from_str(&written).expect("JSON");
    assert_eq!(traced(&written), since);
    assert_eq!(written["model"]["architecture"], "llama");
}

/// Compares the locality of a trace with simulations of all sizes of caches, by the routes that
/// the host saw.
fn same_locality(host: &mut Host) {
    let routes: Value = serde_json::from_str(&host.ask("routes")).expect("JSON");
    let routes = &routes["routes"];
    let trace = &host.control("trace")["traces"][0];
    let layers = trace["layers"].as_array().expect("layers");
    assert_eq!(layers.len(), routes.as_object().expect("an object").len());
    for layer in layers {
        let routes = routes[layer["layer"].to_string()].clone();
        let routes: Vec<Vec<u32>> = serde_json::from_value(routes).expect("ids");
        let locality = &layer["locality"];
        let window = &locality["window"];
        assert_eq!(window["tokens"], routes.len());
        let experts = layer["counts"].as_array().expect("counts").len();
        for size in 0..=experts {
            let hits = |curve: &Value| {
                let curve = curve.as_array().expect("a curve").iter().take(size);
                curve
                    .map(|uses| uses.as_u64().expect("a count"))
                    .sum::<u64>()
            };
            let [lru, lfu] = [lru_hits(&routes, size), lfu_hits(&routes, size)];
            assert_eq!((hits(&locality["lru"]), hits(&locality["lfu"])), (lru, lfu));
            let best = best_hits(&routes, size);
            assert_eq!((hits(&window["lru"]), hits(&window["best"])), (lru, best));
        }
    }
}

#[test]
fn locality_is_that_of_the_routes() {
    let with = DropIn::On(vec![("LLAMA_EXPERT_TRACE_STATS", "1".into())]);
    let mut host = Host::start(Program::PythonCounting, &fixture("moe.gguf"), &with);
    host.ask("text 60");
    same_locality(&mut host);
    host.ask("more 60");
    same_locality(&mut host);
    // Two contexts: the order of their evaluations is not known, and none is lost.
    host.ask("both 20");
    let trace = &host.control("trace")["traces"][0];
    for layer in trace["layers"].as_array().expect("layers") {
        let sum = |counts: &Value| -> u64 {
            let counts = counts.as_array().expect("counts").iter();
            counts.map(|count| count.as_u64().expect("a count")).sum()
        };
        let first = layer["locality"]["first"].as_u64().expect("a count");
        let locality = &layer["locality"];
        for curve in [
            &locality["lru"],
            &locality["lfu"],
            &locality["window"]["best"],
        ] {
            assert_eq!(first + sum(curve), sum(&layer["counts"]));
        }
    }
    assert_eq!(host.end(), Some(0));
    let folder = tempfile::tempdir().expect("a folder");
    for mixture in [
        Mixture::GptOss,
        Mixture::MergedGateUp,
        Mixture::SharedExpert,
    ] {
        let path = folder.path().join("model.gguf");
        mixture.write(&path).expect("a model");
        let mut host = Host::start(Program::PythonCounting, &path, &with);
        host.ask("prompt 50");
        host.ask("hashes 40");
        same_locality(&mut host);
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn expert_traces_are_written_however_the_host_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_models, model) = copied("moe.gguf");
    let path = |name: &str| folder.path().join(name);
    let with = |name: &str| {
        DropIn::On(vec![
            (
                "LLAMA_EXPERT_TRACE_OUTPUT",
                path(name).display().to_string(),
            ),
            ("LLAMA_EXPERT_TRACE_NAMES", "1".into()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ])
    };
    let mut host = Host::start(Program::Node, &model, &with("node.json"));
    host.ask("text 3");
    assert_eq!(host.end(), Some(0));
    // Terminated, with and without children that were forked before.
    let mut host = Host::start(Program::Python, &model, &with("python.json"));
    host.ask("text 3");
    assert_eq!(host.ask("fork"), "7");
    assert!(!path("python.json").exists(), "the child wrote nothing");
    assert_eq!(host.ask("text 1").split(' ').count(), 1);
    eventually("names", || {
        let lines = host.logged("[EXPERT-TRACE] Layer 0, Expert ");
        lines
            .iter()
            .any(|line| line.contains(": blk.0.ffn_gate_exps."))
    });
    assert_eq!(host.end_by(libc::SIGTERM), Some(libc::SIGTERM));
    // A program that handles the signal later, and calls the handler before, goes on.
    let mut host = Host::start(Program::C, &model, &with("chain.json"));
    host.ask("text 1");
    assert_eq!(host.ask("chain"), "handled");
    std::thread::sleep(Duration::from_millis(300));
    host.ask("text 1");
    assert!(!path("chain.json").exists(), "written at the end");
    assert_eq!(host.end(), Some(0));
    assert!(path("chain.json").exists());
    // Every second, while the host goes on.
    let mut every = with("every.json");
    if let DropIn::On(variables) = &mut every {
        variables.push(("LLAMA_EXPERT_TRACE_EVERY_S", "1".into()));
    }
    let mut host = Host::start(Program::C, &model, &every);
    host.ask("text 3");
    eventually("a trace of all tokens while the host runs", || {
        let text = std::fs::read(path("every.json")).unwrap_or_default();
        let trace: Value = serde_json::from_slice(&text).unwrap_or_default();
        trace["layers"][0]["tokens"] == 7
    });
    drop(host);
    // A model that was freed before is not forgotten: a later load of it goes on with its counts.
    // Another one is another file.
    let mut host = Host::start(Program::C, &model, &with("c.csv"));
    host.ask("text 3");
    let (_other, other) = copied("moe.gguf");
    for path in [&other, &model] {
        host.ask("free");
        host.ask(&format!("load {}", path.display()));
        host.ask("text 5");
    }
    assert_eq!(host.end(), Some(0));
    let script = "
import csv, json, sys
for name, tokens in (('node.json', 7), ('python.json', 12), ('every.json', 7)):
    trace = json.load(open(name))
    assert trace['schema'] == 'llama-sidecar/expert-trace/1', trace
    assert trace['layers'][0]['tokens'] == tokens, (name, trace['layers'][0])
    assert sum(sum(layer['counts']) for layer in trace['layers']) == trace['activations']
for name, tokens in (('c.csv', 16), ('c-2.csv', 9)):
    rows = list(csv.DictReader(open(name)))
    assert len(rows) == 30 * 8
    first = [row for row in rows if row['layer'] == '0']
    assert sum(int(row['count']) for row in first) == 2 * tokens, name
    assert abs(sum(float(row['share']) for row in first) - 1) < 1e-5
";
    let checked = Command::new("python3")
        .args(["-c", script])
        .current_dir(folder.path())
        .output();
    let checked = checked.expect("python3 starts");
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
}

#[test]
fn an_expert_trace_that_cannot_be_written_is_logged_at_the_start_and_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("it starts").success());
    // The last is a pipe without a reader.
    let pipe = pipe.to_str().expect("UTF-8");
    for (output, lines_expected) in [
        ("/no/such/folder/trace.json", 2),
        ("/", 2),
        // Only a write shows that it fails.
        ("/dev/full", 1),
        (pipe, 1),
    ] {
        let with = DropIn::On(vec![
            ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
            ("LLAMA_EXPERT_TRACE_OUTPUT", output.into()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ]);
        let mut host = Host::start(Program::C, &fixture("moe.gguf"), &with);
        host.ask("text 2");
        let log = host.keep_log();
        assert_eq!(host.end(), Some(0));
        let lines = || log.lock().expect("no panic").clone();
        eventually("the summary", || {
            lines().iter().any(|line| line.contains("Expert   7"))
        });
        let failed: Vec<String> = lines()
            .into_iter()
            .filter(|line| line.contains("cannot write"))
            .collect();
        assert_eq!(failed.len(), lines_expected, "{failed:?}");
        assert!(
            failed.iter().all(|line| line.contains(output)),
            "{failed:?}"
        );
    }
}

#[test]
fn experts_are_counted_with_kept_graphs_and_without_hot_swap() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut counted = Vec::new();
    for (program, name) in [
        (Program::PythonCounting, "python.csv"),
        (Program::Python, "kept.csv"),
        (Program::C, "c.csv"),
    ] {
        let output = folder.path().join(name);
        let with = DropIn::On(vec![
            ("LLAMA_SIDECAR_HOTSWAP", "0".into()),
            ("LLAMA_EXPERT_TRACE_OUTPUT", output.display().to_string()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ]);
        let mut host = Host::start(program, &fixture("moe.gguf"), &with);
        host.ask("text 12");
        assert_eq!(host.control("reload")["ok"], false, "it is off");
        assert_eq!(host.end(), Some(0));
        counted.push(std::fs::read_to_string(&output).expect("it is written at the end"));
    }
    assert_eq!(counted[0].lines().count(), 1 + 30 * 8);
    assert_eq!(counted[0], counted[1]);
    assert_eq!(counted[0], counted[2]);
}

#[test]
fn a_forked_child_evaluates_and_leaves_the_rest_alone() {
    let (_folder, path) = copied("smollm2.gguf");
    let after = fresh(Program::Python, &fixture("smollm2-mixed.gguf"));
    let polled = DropIn::On(watched("1"));
    let mut host = Host::start(Program::Python, &path, &polled);
    host.text(3);
    for _ in 0..20 {
        assert_eq!(host.ask("fork"), "7");
    }
    assert_eq!(
        host.control("ping")["ok"],
        true,
        "the socket is still there"
    );
    replace(&path, &fixture("smollm2-mixed.gguf"));
    eventually("the swap", || !host.logged("reload: 8 swapped").is_empty());
    assert_eq!(host.text(TOKENS), after);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn forks_in_the_middle_of_reloads() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(Program::Python, &path, &on());
    host.text(3);
    let socket = host.socket().to_owned();
    let forks = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        let reloads = scope.spawn(|| {
            let mut reloads = 0;
            while forks.load(Ordering::SeqCst) || reloads % 2 == 1 {
                let file = ["smollm2-mixed.gguf", "smollm2.gguf"][reloads % 2];
                replace(&path, &fixture(file));
                let report = control(&socket, "reload");
                assert_eq!(report["ok"], true, "{report}");
                reloads += 1;
            }
            reloads
        });
        for _ in 0..20 {
            assert_eq!(host.ask("fork"), "7");
        }
        forks.store(false, Ordering::SeqCst);
        assert!(reloads.join().expect("reports") > 1);
    });
    assert_eq!(
        host.text(TOKENS),
        fresh(Program::Python, &fixture("smollm2.gguf"))
    );
    assert_eq!(host.end(), Some(0));
}

#[test]
fn the_control_socket_survives_bad_clients() {
    let mut host = Host::start(Program::C, &fixture("smollm2.gguf"), &on());
    host.text(1);
    let mode = std::fs::metadata(host.socket())
        .expect("a socket")
        .permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let socket = host.socket().to_owned();
    let answer_to = |bytes: &[u8]| {
        let mut client = UnixStream::connect(&socket).expect("it listens");
        let _ = client.write_all(bytes);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        answer
    };
    let refused = |bytes: &[u8]| {
        let answer = answer_to(bytes);
        let value: Value = serde_json::from_str(&answer).unwrap_or_default();
        assert_eq!(value["ok"], false, "{answer}");
        assert!(value["error"].is_string(), "{answer}");
    };
    refused(b"rubbish\n");
    refused(b"{\"cmd\":\"fly\"}\n");
    refused(b"{\"cmd\":\"ping\"}");
    refused(&[0xff; 100]);
    refused(&vec![b'{'; 4096]);
    assert_eq!(answer_to(b""), "");
    // A gigabyte: the other side hangs up long before.
    let mut client = UnixStream::connect(&socket).expect("it listens");
    let piece = vec![b'x'; 1 << 20];
    let sent = (0..1024)
        .take_while(|_| client.write_all(&piece).is_ok())
        .count();
    assert!(sent < 16, "{sent} MiB were taken");
    // Silent clients do not stop the host, nor other clients for long.
    let silent: Vec<_> = (0..40).map(|_| UnixStream::connect(&socket)).collect();
    host.text(4);
    drop(silent);
    eventually("another client", || {
        answer_to(b"{\"cmd\":\"ping\"}\n").contains("true")
    });
    assert_eq!(host.end(), Some(0));
    assert!(!socket.exists(), "it is removed at the end");
}

#[test]
fn two_hosts_do_not_share_a_socket() {
    let first = Host::start(Program::C, &fixture("smollm2.gguf"), &on());
    let mut first = first;
    first.text(1);
    let taken = first.socket().display().to_string();
    let with = DropIn::On(vec![("LLAMA_SIDECAR_CONTROL", taken)]);
    let mut second = Host::start(Program::C, &fixture("smollm2.gguf"), &with);
    second.text(1);
    eventually("a message", || {
        !second.logged("another process listens there").is_empty()
    });
    assert_eq!(second.end(), Some(0));
    assert_eq!(first.control("ping")["ok"], true);
    assert_eq!(first.end(), Some(0));
}

/// Runs a command with or without the drop-in; returns its output, its errors and its exit
/// code.
fn run_with(drop_in: bool, program: &str, arguments: &[&str]) -> (Vec<u8>, Vec<u8>, Option<i32>) {
    let mut command = Command::new(program);
    command.args(arguments).env("LLAMA_HOTSWAP_ENABLED", "1");
    if drop_in {
        command.env("LD_PRELOAD", preload_library());
    }
    let output = command.output().expect("it starts");
    (output.stdout, output.stderr, output.status.code())
}

#[test]
fn other_programs_behave_the_same_with_the_drop_in() {
    let fake = testkit::host::built("hosts-c/fake_ggml_host");
    let fake = fake.to_str().expect("UTF-8");
    for (program, arguments) in [
        ("ls", &["/"] as &[&str]),
        ("ls", &["/nothing/there"]),
        ("python3", &["-c", "pass"]),
        ("sh", &["-c", "exec echo from a shell; exit 3"]),
        ("sh", &["-c", "exit 3"]),
        (fake, &["19"]),
    ] {
        let without = run_with(false, program, arguments);
        let with = run_with(true, program, arguments);
        if program == fake {
            // It exports functions of these names that are not ggml's, which is logged once.
            assert_eq!((&without.0, without.2), (&with.0, with.2));
            let said = String::from_utf8_lossy(&with.1);
            assert_eq!(said.matches("hot-swap stays off").count(), 1, "{said}");
        } else {
            assert_eq!(without, with, "{program} {arguments:?}");
        }
    }
}

#[test]
fn an_idle_drop_in_logs_nothing() {
    let mut host = Host::start(Program::C, &fixture("smollm2.gguf"), &DropIn::Idle);
    let without = Host::start(Program::C, &fixture("smollm2.gguf"), &DropIn::Absent).ask("text 8");
    assert_eq!(host.ask("text 8"), without);
    assert_eq!(host.log(), Vec::<String>::new());
    assert_eq!(host.end(), Some(0));
}

/// Swaps back and forth while the host writes: every text without a switch in it is that of
/// one of the two files, and memory does not grow.
#[test]
fn many_swaps_while_the_host_writes() {
    let count: u64 = std::env::var("SWAPS").map_or(40, |text| text.parse().expect("a number"));
    let (_folder, path) = copied("smollm2.gguf");
    let names = ["smollm2.gguf", "smollm2-mixed.gguf"];
    let transcripts = names.map(|name| fresh(Program::C, &fixture(name)));
    let mut host = Host::start(Program::C, &path, &on());
    host.text(TOKENS);
    let socket = host.socket().to_owned();
    let written = Arc::new(AtomicU64::new(0));
    let texts = written.clone();
    let swapper = std::thread::spawn(move || {
        for number in 1..=count {
            replace(&path, &fixture(names[(number % 2) as usize]));
            let mut client = UnixStream::connect(&socket).expect("it listens");
            client
                .write_all(b"{\"cmd\":\"reload\"}\n")
                .expect("it takes requests");
            let mut answer = String::new();
            let mut lines = std::io::BufReader::new(client);
            std::io::BufRead::read_line(&mut lines, &mut answer).expect("an answer");
            assert!(answer.contains("\"ok\":true"), "{answer}");
            assert!(
                answer.contains(&format!("\"generation\":{number}")),
                "{answer}"
            );
            // Some texts must contain no switch: of two that end after a swap, the second
            // began after it.
            let before = texts.load(Ordering::SeqCst);
            while number % 4 == 0 && texts.load(Ordering::SeqCst) < before + 2 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    let mut memory = Vec::new();
    let (mut whole, mut crossed) = (0, 0);
    while !swapper.is_finished() {
        let before = host.logged("output generation").len();
        host.text(TOKENS);
        let lines = host.logged("output generation").split_off(before);
        let word = |line: &String, at: usize| line.split(' ').nth(at).expect("a word").to_owned();
        let generations: Vec<String> = lines.iter().map(|line| word(line, 4)).collect();
        let generation: usize = generations[0].parse().expect("a number");
        let expected = &transcripts[generation % 2].hashes;
        for (at, line) in lines.iter().enumerate() {
            if generations[at] != generations[0] {
                crossed += 1;
                break;
            }
            assert_eq!(&word(line, 8), &expected[at], "{line}");
        }
        whole += u64::from(generations.iter().all(|other| *other == generations[0]));
        memory.push(host.private_memory() >> 10);
        written.fetch_add(1, Ordering::SeqCst);
    }
    swapper.join().expect("no panic");
    let quarter = memory.len() / 4;
    let median = |part: &[u64]| {
        let mut part = part.to_vec();
        part.sort_unstable();
        part[part.len() / 2]
    };
    let (early, late) = (
        median(&memory[quarter..2 * quarter]),
        median(&memory[3 * quarter..]),
    );
    let status = host.control("status");
    println!(
        "{count} swaps: {whole} texts whole, {crossed} with a switch inside, memory {early} KiB then {late} KiB, longest pause {} us",
        status["longest_pause_us"]
    );
    assert!(whole > 0, "texts that no switch fell into");
    assert!(late < early + (8 << 10), "{early} KiB grew to {late} KiB");
    assert_eq!(host.end(), Some(0));
}

/// What no call shows is seen before anything is written: the memory of a model is other memory.
#[test]
fn memory_that_the_program_has_not_loaded_is_not_written() {
    let (_folder, path) = copied("small-moe.gguf");
    let mut host = Host::start(Program::CMapped, &path, &on());
    let before = hash(&host.ask("prefill 8"));
    assert_eq!(host.ask("own"), "owned");
    replace(&path, &fixture("small-moe-mixed.gguf"));
    let answer = host.control("reload");
    assert_eq!(answer["ok"], false, "{answer}");
    let lost = "its memory is not that which the program loaded";
    assert!(answer.to_string().contains(lost), "{answer}");
    let status = host.control("status").to_string();
    assert!(status.contains(lost), "{status}");
    host.wait_logged(lost, 1);
    assert_eq!(hash(&host.ask("prefill 8")), before);
    assert_eq!(host.end(), Some(0));
}
