//! llama-server from source, and what it answers with and without the drop-in.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use testkit::host::{DropIn, built};
use testkit::server::{Answer, Options, Request, Server};
use testkit::writer::{F32, Gguf, Kv, Tensor};

/// What all prompts begin with, so that slots have a prefix in common.
pub const PREFIX: &str = "Once upon a time, in a village between two rivers, there lived";
/// How they go on, slot by slot.
pub const ENDS: [&str; 4] = [
    " an old clockmaker who",
    " a girl with a red kite, and",
    " a miller and his seven cats;",
    " two old farmers, until",
];
/// Tokens of an answer.
pub const TOKENS: usize = 12;

/// A server as it is without llama-sidecar.
pub fn without_drop_in(slots: usize) -> Options {
    Options {
        drop_in: DropIn::Absent,
        ..Options::new(slots)
    }
}

/// Adds arguments of the server.
pub fn with_arguments(mut options: Options, arguments: &[&str]) -> Options {
    let arguments = arguments.iter().map(|word| (*word).to_owned());
    options.arguments.extend(arguments);
    options
}

/// Answers of each slot, one after the other, to prompts with a common prefix; the first
/// of each slot finds nothing cached, or another prompt with that prefix.
pub fn answers(server: &Server, slots: usize) -> Vec<Answer> {
    let mut answers = Vec::new();
    for round in 0..2 {
        for slot in 0..slots {
            let end = ENDS[(slot + round) % ENDS.len()];
            let request = Request::new(&format!("{PREFIX}{end}"), TOKENS).at(slot);
            answers.push(server.complete(&request));
        }
    }
    answers
}

/// What a server with these arguments answers without the drop-in.
pub fn stock(model: &Path, slots: usize, arguments: &[&str]) -> Vec<Answer> {
    let options = with_arguments(without_drop_in(slots), arguments);
    let server = Server::start(model, &options);
    let answers = answers(&server, slots);
    end(server);
    answers
}

/// Ends a server, which has to go well, and whose drop-in must not have failed.
pub fn end(server: Server) {
    let (status, log) = server.end();
    assert!(status.success(), "{status}:\n{}", log.join("\n"));
    let errors = log
        .iter()
        .filter(|line| line.contains("llama-sidecar: error"));
    assert_eq!(errors.count(), 0, "{}", log.join("\n"));
}

/// `llama-sidecar ctl reload --server`.
pub fn reload(server: &Server, arguments: &[&str]) -> Output {
    reload_at(server.socket(), server.url(), arguments)
}

/// The same for the server at an address, in a process with this control socket.
pub fn reload_at(socket: &Path, url: &str, arguments: &[&str]) -> Output {
    Command::new(built("release/llama-sidecar"))
        .args(["ctl", "reload"])
        .arg("--socket")
        .arg(socket)
        .args(["--server", url])
        .args(arguments)
        .output()
        .expect("the command starts")
}

/// The same, which has to go well; returns the report.
pub fn reload_and_erase(server: &Server) -> Value {
    let output = reload(server, &["--json"]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The number of layers that were scheduled for a model of a server.
pub fn layers(server: &Server, model: usize) -> Option<u64> {
    server.control("status")["models"][model]["stream"]["layers"].as_u64()
}

/// Writes an adapter (LoRA) for a mixture of experts: a matrix of the attention, and matrices of
/// all experts of two layers.
pub fn write_adapter(path: &Path) {
    const RANK: i64 = 4;
    let mut adapter = Gguf::default()
        .kv("general.type", Kv::Text("adapter".into()))
        .kv("adapter.type", Kv::Text("lora".into()))
        .kv("adapter.lora.alpha", Kv::F32(8.0));
    for (name, [columns, rows, experts]) in [
        ("blk.0.attn_q.weight", [576, 576, 1]),
        ("blk.1.ffn_down_exps.weight", [1536, 576, 8]),
        ("blk.2.ffn_gate_exps.weight", [576, 1536, 8]),
        ("blk.2.ffn_up_exps.weight", [576, 1536, 8]),
    ] {
        for (side, ne) in [
            ("lora_a", [columns, RANK, experts]),
            ("lora_b", [RANK, rows, experts]),
        ] {
            let value = |at: i64| (at % 7) as f32 * 0.02 - 0.05;
            let values = 0..ne.iter().product();
            adapter.tensors.push(Tensor {
                name: format!("{name}.{side}"),
                ne: ne.into(),
                ty: F32,
                data: values.flat_map(|at| value(at).to_le_bytes()).collect(),
            });
        }
    }
    adapter.write(path).expect("free space");
}

/// Options of a server that guesses tokens with a draft model.
pub fn with_draft(options: Options, draft: &Path) -> Options {
    let draft = draft.display().to_string();
    let arguments = ["--spec-type", "draft-simple", "--spec-draft-model", &draft];
    with_arguments(options, &arguments)
}

/// The text of a greedy answer, with the numbers of drafted and accepted tokens.
pub fn speculate(server: &Server) -> Value {
    let body = json!({
        "prompt": PREFIX, "n_predict": TOKENS, "temperature": 0, "ignore_eos": true,
        "cache_prompt": false,
    });
    let answer = server.ask("/completion", &body);
    let timings = &answer["timings"];
    json!({
        "text": answer["content"], "evaluated": timings["prompt_n"],
        "drafted": timings["draft_n"], "accepted": timings["draft_n_accepted"],
    })
}
