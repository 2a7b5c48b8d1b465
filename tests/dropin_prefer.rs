//! Experts in memory that are preferred (`--stream-prefer`): nothing changes without a margin, less is read with one, and
//! nothing happens without the word that accepts changed results.

mod hosts;

use std::path::Path;
use std::process::{Command, Output};

use hosts::servers::{PREFIX, end};
use hosts::{IN_MEMORY, count, fresh, streamed_text, streaming};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Program, built, preload_library};
use testkit::mixtures::Mixture;
use testkit::server::{Answer, Options, Request, Server, llama_cpp};

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hosts/c/text.txt");
/// A third of the experts of the fixture, in MiB.
const MEMORY: &str = "16";

/// A server that keeps as many experts in memory as fit into these MiB.
fn start(model: &Path, memory: &str, variables: &[(&'static str, &str)]) -> Server {
    let streams = [
        ("LLAMA_EXPERT_STREAM_MEMORY_MB", memory),
        ("LLAMA_EXPERT_STREAM", "on"),
    ];
    let variables = streams.iter().chain(variables);
    let drop_in = DropIn::On(
        variables
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
    );
    Server::start(
        model,
        &Options {
            drop_in,
            ..Options::new(1)
        },
    )
}

fn preferring(margin: &str) -> [(&'static str, &str); 2] {
    [
        ("LLAMA_EXPERT_STREAM_PREFER", margin),
        ("LLAMA_EXPERT_STREAM_ACCEPT_CHANGES", "1"),
    ]
}

/// An answer token by token, after a prompt.
fn answer(server: &Server) -> Answer {
    server.complete(&Request {
        cache_prompt: false,
        ..Request::new(PREFIX, 24)
    })
}

fn figure(server: &Server, name: &str) -> f64 {
    let status = server.control("status");
    let figure = status["models"][0]["stream"][name].as_f64();
    figure.unwrap_or_else(|| panic!("{name}: {status}"))
}

/// Bytes of experts that were not in memory since the last call.
fn missing(server: &Server, before: &mut f64) -> f64 {
    let now = figure(server, "checked_bytes") - figure(server, "resident_bytes");
    now - std::mem::replace(before, now)
}

fn command(arguments: &[&str]) -> Output {
    Command::new(built("release/llama-sidecar"))
        .args(arguments)
        .env("LLAMA_SIDECAR_PRELOAD", preload_library())
        .output()
        .expect("the command starts")
}

fn prefer(server: &Server, margin: &str) -> Output {
    let socket = server.socket().to_str().expect("a name");
    command(&["ctl", "prefer", "--socket", socket, "--margin", margin])
}

/// A margin of 0 changes no bit; a margin of 1 takes what is in memory, and reads less.
fn margins_of(model: &Path, memory: &str) {
    let streamed = start(model, memory, &[]);
    let expected = answer(&streamed);
    assert!(answer(&streamed) == expected, "streamed again");
    end(streamed);
    let server = start(model, memory, &preferring("0"));
    let mut before = 0.0;
    assert!(answer(&server) == expected, "without a margin");
    missing(&server, &mut before);
    assert!(answer(&server) == expected, "with experts in memory");
    let without = missing(&server, &mut before);
    assert!(figure(&server, "chosen") > 0.0);
    assert_eq!(figure(&server, "replaced"), 0.0);
    let set = prefer(&server, "1");
    assert!(set.status.success(), "{set:?}");
    assert_eq!(figure(&server, "margin"), 1.0);
    assert!(answer(&server) != expected, "with a margin");
    let with = missing(&server, &mut before);
    assert!(with < 0.7 * without, "{with} of {without} bytes");
    assert!(figure(&server, "replaced") > 0.0);
    let set = prefer(&server, "0");
    assert!(set.status.success(), "{set:?}");
    assert!(answer(&server) == expected, "without a margin");
    end(server);
}

/// The same with a mixture of testkit.
fn margins_of_mixture(mixture: Mixture) {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    mixture.write(&model).expect("free space");
    margins_of(&model, "3");
}

#[test]
fn probabilities_of_a_softmax() {
    margins_of(&fixture("small-moe.gguf"), MEMORY);
}

#[test]
fn logits() {
    margins_of_mixture(Mixture::GptOss);
}

#[test]
fn gate_and_up_in_one_matrix() {
    margins_of_mixture(Mixture::MergedGateUp);
}

#[test]
fn groups_and_a_bias_for_the_choice() {
    margins_of_mixture(Mixture::Grouped);
}

#[test]
fn without_a_margin_other_programs_write_the_same() {
    let model = fixture("moe.gguf");
    let drop_in = streaming(&[&[IN_MEMORY][..], &preferring("0")].concat());
    for program in [Program::Node, Program::Python, Program::CTwoThreads] {
        let (text, figures) = streamed_text(program, &model, &drop_in);
        assert_eq!(text, fresh(program, &model));
        assert!(count(&figures, "chosen") > 0, "{figures}");
        assert_eq!(count(&figures, "replaced"), 0, "{figures}");
    }
}

#[test]
fn the_trace_has_the_experts_that_were_used() {
    let model = fixture("small-moe.gguf");
    let trace = [("LLAMA_EXPERT_TRACE_STATS", "1")];
    let server = start(&model, MEMORY, &[&preferring("1")[..], &trace].concat());
    answer(&server);
    server.control("trace-reset");
    let replaced = figure(&server, "replaced");
    answer(&server);
    assert!(figure(&server, "replaced") > replaced);
    let counts = |server: &Server| {
        let trace = server.control("trace");
        let layers = trace["traces"][0]["layers"]
            .as_array()
            .expect("layers")
            .clone();
        layers
            .into_iter()
            .map(|layer| layer["counts"].clone())
            .collect::<Vec<Value>>()
    };
    let preferred = counts(&server);
    let set = prefer(&server, "0");
    assert!(set.status.success(), "{set:?}");
    server.control("trace-reset");
    answer(&server);
    let plain = counts(&server);
    assert_ne!(preferred, plain);
    end(server);
}

#[test]
fn without_the_word_nothing_happens() {
    let model = fixture("small-moe.gguf");
    let streamed = start(&model, MEMORY, &[]);
    let expected = answer(&streamed);
    end(streamed);
    let server = start(&model, MEMORY, &preferring("1")[..1]);
    assert!(answer(&server) == expected, "without a margin");
    assert_eq!(figure(&server, "chosen"), 0.0);
    let said = server.logged("--stream-prefer");
    assert!(said[0].contains("--accept-changed-results"), "{said:?}");
    let refused = prefer(&server, "0.5");
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && error.contains("--accept-changed-results"),
        "{error}"
    );
    end(server);
    let run = command(&["run", "--stream-prefer", "0.5", "--", "/bin/true"]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(
        !run.status.success()
            && error.contains("/bin/true was not started: --stream-prefer changes results"),
        "{error}"
    );
    for margin in ["2", "nan", "much"] {
        let run = command(&[
            "run",
            "--stream-prefer",
            margin,
            "--accept-changed-results",
            "--",
            "/bin/true",
        ]);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(
            !run.status.success() && error.contains("from 0 to 1"),
            "{error}"
        );
    }
}

#[test]
fn a_model_that_fits_is_named() {
    let variables = preferring("0.5").map(|(name, value)| (name, value.to_owned()));
    let server = Server::start(
        &fixture("small-moe.gguf"),
        &Options {
            drop_in: DropIn::On(variables.to_vec()),
            ..Options::new(1)
        },
    );
    answer(&server);
    let status = server.control("status").to_string();
    assert!(
        status.contains("experts in memory are not preferred"),
        "{status}"
    );
    let refused = prefer(&server, "0.1");
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && error.contains("--stream-memory"),
        "{error}"
    );
    end(server);
}

#[test]
fn what_margins_cannot_measure_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "Once upon a time").expect("free space");
    let short = short.to_str().expect("a name");
    let memory = ["--memory", "100M"];
    for (model, text, more, reason) in [
        ("small.gguf", TEXT, &[][..], "has no experts"),
        ("small-moe.gguf", short, &[], "the text is too short"),
        ("small-moe.gguf", TEXT, &[], "pass a smaller --memory"),
        (
            "small-moe.gguf",
            TEXT,
            &memory,
            "fit into 100 MiB: pass a smaller --memory",
        ),
    ] {
        let (model, program) = (fixture(model), llama_cpp("llama-perplexity"));
        let [model, program] = [&model, &program].map(|path| path.to_str().expect("a name"));
        let arguments = [
            "ctl",
            "margins",
            model,
            "--text",
            text,
            "--ctx",
            "128",
            "--chunks",
            "3",
            "--program",
            program,
        ];
        let output = command(&[&arguments[..], more].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(reason),
            "{error}"
        );
    }
}

#[test]
fn margins_are_measured() {
    let model = fixture("small-moe.gguf");
    let [model, program] = [&model, &llama_cpp("llama-perplexity")]
        .map(|path| path.to_str().expect("a name").to_owned());
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("margins.html");
    let page = page.to_str().expect("a name");
    let arguments = [
        "ctl",
        "margins",
        &model,
        "--text",
        TEXT,
        "--margins",
        "0,1",
        "--memory",
        "16M",
        "--ctx",
        "128",
        "--chunks",
        "3",
        "--threads",
        "1",
        "--json",
        "--report",
        page,
        "--program",
        &program,
    ];
    let output = command(&arguments);
    assert!(output.status.success(), "{output:?}");
    let measured: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let of = |at: usize, pointer: &str| {
        measured["margins"][at]
            .pointer(pointer)
            .and_then(Value::as_f64)
            .expect("a figure")
    };
    assert_eq!(
        (of(0, "/replaced"), of(0, "/margin"), of(1, "/margin")),
        (0.0, 0.0, 1.0)
    );
    // llama-perplexity rounds the base logits.
    assert!(of(0, "/kld/mean").abs() < 1e-4 && of(0, "/same_top/mean") == 100.0);
    assert!(of(1, "/kld/mean") > 10.0 * of(0, "/kld/mean").abs() && of(1, "/replaced") > 0.05);
    assert!(of(1, "/read_bytes") < of(0, "/read_bytes"));
    let rounding = &measured["rounding"];
    assert!(rounding["flash_attention"] == "off", "{rounding}");
    assert!(rounding["kld"]["mean"].as_f64() > Some(0.0), "{rounding}");
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("tokens/s"), "{page}");
}
