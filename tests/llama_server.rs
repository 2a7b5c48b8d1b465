//! The drop-in in llama-server, which keeps its own record of what is cached: after a swap
//! and `llama-sidecar ctl reload --server`, its log-probabilities are those of a server that is
//! started with the new file.

mod hosts;

use std::path::Path;
use std::process::{Command, Output};

use hosts::servers::{
    ENDS, PREFIX, TOKENS, answers, end, layers, reload, reload_and_erase, stock, with_arguments,
    without_drop_in, write_adapter,
};
use hosts::{copied, streaming, taken};
use serde_json::{Value, json};
use testkit::fixtures::fixture;
use testkit::host::{built, replace};
use testkit::server::{Answer, Options, Request, Server, quantize};
use testkit::skipped;

/// A prompt in two parts; the text after the second depends on the first.
const FRANCE: &str = "The capital of Spain is Madrid, of Italy Rome. The capital of France";
const FRANCE_IS: &str = "The capital of Spain is Madrid, of Italy Rome. The capital of France is";

/// What a server without the drop-in that is started with a fixture answers.
fn fresh(file: &str, slots: usize) -> Vec<Answer> {
    fresh_with(&fixture(file), slots)
}

/// The same with any file.
fn fresh_with(model: &Path, slots: usize) -> Vec<Answer> {
    let answers = stock(model, slots, &[]);
    assert!(
        answers[..slots].iter().all(|answer| answer.cached == 0)
            && answers[slots..].iter().all(|answer| answer.cached > 0),
        "{answers:?}"
    );
    answers
}

/// Text on standard error of a command that failed.
fn failed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn swapped_and_erased_is_fresh(slots: usize) {
    let before = fresh("smollm2.gguf", slots);
    let after = fresh("smollm2-mixed.gguf", slots);
    assert_ne!(before, after, "the variant shows");
    let (_folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &Options::new(slots));
    assert_eq!(answers(&server, slots), before);
    for _ in 0..2 {
        replace(&path, &fixture("smollm2-mixed.gguf"));
        let report = reload_and_erase(&server);
        assert_eq!(taken(&report), (8, 0));
        assert_eq!(report["slots_erased"], slots);
        assert_eq!(answers(&server, slots), after);
        replace(&path, &fixture("smollm2.gguf"));
        let report = reload_and_erase(&server);
        assert_eq!(taken(&report), (0, 8));
        assert_eq!(answers(&server, slots), before);
    }
    end(server);
}

#[test]
fn one_slot_answers_as_a_new_server_after_a_swap() {
    swapped_and_erased_is_fresh(1);
}

#[test]
fn two_slots_answer_as_a_new_server_after_a_swap() {
    swapped_and_erased_is_fresh(2);
}

#[test]
fn four_slots_answer_as_a_new_server_after_a_swap() {
    swapped_and_erased_is_fresh(4);
}

/// `llama-sidecar swap --live`.
fn swap_live(server: &Server, arguments: &[&str]) -> Output {
    Command::new(built("release/llama-sidecar"))
        .args(["swap", "--live", "-s"])
        .arg(server.socket())
        .args(arguments)
        .output()
        .expect("the command starts")
}

#[test]
fn a_server_with_overlays_answers_as_a_new_server() {
    let before = fresh("smollm2.gguf", 1);
    let (folder, path) = copied("smollm2.gguf");
    // A new server has two copies of the matrix that input and output share.
    let twice = folder.path().join("twice.gguf");
    quantize(&path, &twice, "Q4_1", &["--token-embedding-type", "q4_0"]);
    let server = Server::start(&path, &Options::new(1));
    assert_eq!(answers(&server, 1), before);
    for from in [fixture("smollm2-mixed.gguf"), twice] {
        let output = swap_live(
            &server,
            &["--tensor", ".*", "--from", &from.to_string_lossy()],
        );
        assert!(output.status.success(), "{output:?}");
        assert_eq!(reload_and_erase(&server)["slots_erased"], 1);
        assert_eq!(answers(&server, 1), fresh_with(&from, 1));
        let output = Command::new(built("release/llama-sidecar"))
            .args(["undo", "-s"])
            .arg(server.socket())
            .output()
            .expect("the command starts");
        assert!(output.status.success(), "{output:?}");
        assert_eq!(reload_and_erase(&server)["slots_erased"], 1);
        assert_eq!(answers(&server, 1), before);
    }
    end(server);
}

#[test]
fn answers_before_and_after_a_swap_are_compared() {
    let (folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &Options::new(1));
    let prompts = folder.path().join("prompts");
    std::fs::write(&prompts, "The sea is\nOnce upon a time\n").expect("free space");
    let ask = |arguments: &[&str]| {
        let output = Command::new(built("release/llama-sidecar"))
            .args(["ask", "-s"])
            .arg(server.socket())
            .args(["--tokens", "6"])
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .expect("the command starts");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let first = ask(&["--prompts", "prompts", "-o", "before.json"]);
    assert!(first.contains("prompt: Once upon a time\n"), "{first}");
    let is_same = |said: String| said.contains("2 of 2 answers are the same, 2 with the same");
    assert!(is_same(ask(&["--against", "before.json"])));
    let from = fixture("smollm2-mixed.gguf").display().to_string();
    let output = swap_live(&server, &["--tensor", "blk.*", "--from", &from]);
    assert!(output.status.success(), "{output:?}");
    let after = ask(&["--against", "before.json"]);
    assert!(!is_same(after.clone()), "{after}");
    assert!(!after.contains("divergence at least 0.000000"), "{after}");
    let undone = Command::new(built("release/llama-sidecar"))
        .args(["undo", "-s"])
        .arg(server.socket())
        .output();
    assert!(undone.expect("the command starts").status.success());
    assert!(is_same(ask(&["--against", "before.json"])));
    end(server);
}

/// A swap by the watching thread is none that the command did, and a mask is none at all: slots are emptied all the same.
#[test]
fn slots_are_emptied_after_any_swap() {
    let after = fresh("smollm2-mixed.gguf", 1);
    let (_folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &Options::new(1));
    answers(&server, 1);
    assert_eq!(reload_and_erase(&server)["slots_erased"], 1);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (8, 0));
    assert_eq!(reload_and_erase(&server)["slots_erased"], 1);
    assert_eq!(answers(&server, 1), after);
    end(server);
}

#[test]
fn a_busy_slot_is_waited_for() {
    let after = fresh("smollm2-mixed.gguf", 2);
    let (_folder, path) = copied("smollm2.gguf");
    let server = Server::start(&path, &Options::new(2));
    answers(&server, 2);
    let long = Request::new(&format!("{PREFIX}{}", ENDS[0]), 200).at(0);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| server.complete(&long));
        while !is_busy(&server, 0) {
            assert!(!busy.is_finished(), "it was busy at no time");
            std::thread::yield_now();
        }
        replace(&path, &fixture("smollm2-mixed.gguf"));
        assert_eq!(reload_and_erase(&server)["slots_erased"], 2);
        assert!(!busy.join().expect("an answer").text.is_empty());
    });
    assert_eq!(answers(&server, 2), after);
    end(server);
}

fn is_busy(server: &Server, slot: usize) -> bool {
    server.look("/slots")[slot]["is_processing"] == true
}

/// With prompts in memory beside the slots, emptying slots is not enough.
#[test]
fn a_server_that_keeps_prompts_in_memory_is_refused() {
    let (_folder, path) = copied("smollm2.gguf");
    let options = Options {
        prompt_cache: true,
        ..Options::new(1)
    };
    let server = Server::start(&path, &options);
    let mut request = Request::new(PREFIX, TOKENS);
    server.complete(&request);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let error = failed(&reload(&server, &[]));
    assert!(
        error.contains("start the process with --cache-ram 0"),
        "{error}"
    );
    assert_eq!(server.control("status")["generation"], 0, "nothing is done");
    // What it can do instead.
    assert_eq!(taken(&server.control("reload")), (8, 0));
    request.cache_prompt = false;
    let answer = server.complete(&request);
    end(server);
    let server = Server::start(&fixture("smollm2-mixed.gguf"), &without_drop_in(1));
    assert_eq!(server.complete(&request), answer);
}

#[test]
fn a_server_that_cannot_empty_slots_is_refused() {
    let (_folder, path) = copied("smollm2.gguf");
    let options = Options {
        slot_actions: false,
        ..Options::new(1)
    };
    let server = Server::start(&path, &options);
    server.complete(&Request::new(PREFIX, 1));
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let error = failed(&reload(&server, &[]));
    assert!(
        error.contains("start it with --slot-save-path DIR"),
        "{error}"
    );
    assert_eq!(server.control("status")["generation"], 0, "nothing is done");
    end(server);
}

#[test]
fn a_server_with_a_key_is_asked_with_it() {
    let (_folder, path) = copied("smollm2.gguf");
    let options = Options {
        api_key: Some("open sesame"),
        ..Options::new(1)
    };
    let server = Server::start(&path, &options);
    server.complete(&Request::new(PREFIX, 1));
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let error = failed(&reload(&server, &[]));
    assert!(error.contains("pass it with --api-key"), "{error}");
    assert_eq!(server.control("status")["generation"], 0, "nothing is done");
    let output = reload(&server, &["--api-key", "open sesame"]);
    assert!(output.status.success(), "{output:?}");
    let output = reload(&server, &["--server", "http://127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(2), "one server at a time");
    end(server);
}

/// Writes a prompt into the slots of a server, swaps, and lets each go on with it; returns
/// the answers.
fn go_on_after_a_swap(server: &Server, path: &Path, slots: usize) -> Vec<Answer> {
    for slot in 0..slots {
        server.complete(&Request::new(FRANCE, 1).at(slot));
    }
    replace(path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (8, 0));
    let go_on = |slot| server.complete(&Request::new(FRANCE_IS, 4).at(slot));
    (0..slots).map(go_on).collect()
}

/// They go on with what they have cached, which is all of it.
#[test]
fn slots_that_are_not_emptied_keep_their_prompt() {
    for slots in [1, 2, 4] {
        let (_folder, path) = copied("smollm2.gguf");
        let server = Server::start(&path, &Options::new(slots));
        for answer in go_on_after_a_swap(&server, &path, slots) {
            assert!(answer.cached > 10, "{answer:?}");
            assert!(answer.text.starts_with(" Paris"), "{answer:?}");
        }
        end(server);
    }
    let server = Server::start(&fixture("smollm2-mixed.gguf"), &without_drop_in(1));
    let without = server.complete(&Request::new(" is", 4));
    assert!(!without.text.contains("Paris"), "the prompt shows");
}

/// A server that streams experts.
fn streaming_server(file: &str, slots: usize, arguments: &[&str]) -> Server {
    let options = Options {
        drop_in: streaming(&[]),
        ..Options::new(slots)
    };
    Server::start(&fixture(file), &with_arguments(options, arguments))
}

/// Checks that a server that streams experts answers as another one; returns the server.
fn streams_as(expected: &[Answer], file: &str, arguments: &[&str]) -> Server {
    let server = streaming_server(file, 1, arguments);
    assert_eq!(answers(&server, 1), expected);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    server
}

#[test]
fn several_slots_answer_the_same_with_streamed_experts() {
    let folder = tempfile::tempdir().expect("a folder");
    let journal = folder.path().join("journal");
    std::fs::write(&journal, "").expect("a file");
    let journal_path = journal.display().to_string();
    let options = Options {
        drop_in: streaming(&[("LLAMA_SIDECAR_JOURNAL", &journal_path)]),
        ..Options::new(4)
    };
    let server = Server::start(&fixture("moe.gguf"), &options);
    assert_eq!(answers(&server, 4), stock(&fixture("moe.gguf"), 4, &[]));
    std::thread::scope(|scope| {
        for (slot, end) in ENDS.into_iter().enumerate() {
            let (server, prompt) = (&server, format!("{PREFIX}{end}"));
            scope.spawn(move || server.complete(&Request::new(&prompt, TOKENS).at(slot)));
        }
    });
    assert!(layers(&server, 0) > Some(0));
    end(server);
    // SIGTERM ended it, and it exited.
    let events = std::fs::read_to_string(&journal).expect("a file");
    let events = events.lines().map(serde_json::from_str);
    let events: Vec<Value> = events.collect::<Result<_, _>>().expect("JSON");
    let found = |name: &str| {
        let mut found = events.iter().filter(|event| event["event"] == name);
        let first = found
            .next()
            .unwrap_or_else(|| panic!("no {name}: {events:?}"));
        assert_eq!(found.count(), 0, "{name} once");
        first
    };
    assert_eq!(found("stream_start")["obstacle"], Value::Null);
    assert!(found("stream")["figures"]["layers"].as_u64() > Some(0));
}

#[test]
fn experts_outside_a_mapping_are_left_alone() {
    let expected = stock(&fixture("moe.gguf"), 1, &[]);
    for (mode, reason) in [
        ("none", "not in the mapping of the file"),
        ("mmap+mlock", "locked in memory"),
    ] {
        let server = streaming_server("moe.gguf", 1, &["--load-mode", mode]);
        assert_eq!(answers(&server, 1), expected, "{mode}");
        if server.logged("failed to mlock").is_empty() {
            assert_eq!(layers(&server, 0), None, "{mode}");
            assert_eq!(server.logged(reason).len(), 1, "{mode}");
        } else {
            skipped("this process may not lock so much memory");
        }
        end(server);
    }
}

/// Streaming keeps experts in the mapping, where a server without it repacks them.
#[test]
fn repacked_types_answer_as_without_repacking() {
    let plain = stock(&fixture("moe-mixed.gguf"), 1, &["--no-repack"]);
    if std::is_x86_feature_detected!("avx2") {
        assert_ne!(
            stock(&fixture("moe-mixed.gguf"), 1, &[]),
            plain,
            "other kernels"
        );
    } else {
        skipped("without AVX2 the server repacks no type of the fixture");
    }
    end(streams_as(&plain, "moe-mixed.gguf", &[]));
}

#[test]
fn a_draft_model_changes_no_answer_with_streamed_experts() {
    let draft = fixture("smollm2.gguf").display().to_string();
    let arguments = ["--spec-type", "draft-simple", "--spec-draft-model", &draft];
    let server = streams_as(
        &stock(&fixture("moe.gguf"), 1, &arguments),
        "moe.gguf",
        &arguments,
    );
    assert_eq!(layers(&server, 1), None, "the draft model has no experts");
    let body = json!({"prompt": PREFIX, "n_predict": TOKENS, "temperature": 0});
    let answer = server.ask("/completion", &body);
    assert!(answer["timings"]["draft_n"].as_u64() > Some(0), "{answer}");
    end(server);
}

#[test]
fn an_adapter_changes_the_same_with_streamed_experts() {
    let folder = tempfile::tempdir().expect("a folder");
    let adapter = folder.path().join("adapter.gguf");
    write_adapter(&adapter);
    let arguments = ["--lora", &adapter.display().to_string()];
    let expected = stock(&fixture("moe.gguf"), 1, &arguments);
    assert_ne!(
        expected,
        stock(&fixture("moe.gguf"), 1, &[]),
        "the adapter shows"
    );
    end(streams_as(&expected, "moe.gguf", &arguments));
}
