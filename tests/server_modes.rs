//! Hot-swap, the expert trace and experts from disk in each mode of llama-server.

mod hosts;

use std::path::Path;

use hosts::servers::{
    ENDS, PREFIX, TOKENS, answers, end, layers, reload_and_erase, stock, with_arguments,
    without_drop_in, write_adapter,
};
use hosts::{copied, taken, traced};
use serde_json::{Value, json};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, replace};
use testkit::server::{Answer, Options, Request, Server};

/// Experts of a token in a layer of the fixtures.
const USED: u64 = 2;
/// Streaming keeps experts in the mapping, where a server without it repacks them.
const PLAIN: &str = "--no-repack";

/// Hot-swap, trace and streaming.
fn everything() -> DropIn {
    DropIn::On(vec![
        ("LLAMA_EXPERT_STREAM", "on".into()),
        ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
    ])
}

/// A server in which everything is on, with these arguments.
fn start(model: &Path, slots: usize, arguments: &[&str]) -> Server {
    let options = Options {
        drop_in: everything(),
        ..Options::new(slots)
    };
    Server::start(model, &with_arguments(options, arguments))
}

/// The prompt of a slot, of which nothing is taken from the cache.
fn uncached(slot: usize) -> Request {
    Request {
        cache_prompt: false,
        ..Request::new(&format!("{PREFIX}{}", ENDS[slot]), TOKENS).at(slot)
    }
}

/// Checks that a trace has each expert of all evaluated tokens once. In the last layer only
/// tokens that are sampled have experts.
fn traces_tokens(trace: &Value, model: usize, tokens: u64) {
    let counts = traced(&trace["traces"][model]);
    assert_eq!(counts.len(), 4, "{trace}");
    for layer in &counts[..3] {
        assert_eq!(layer.iter().sum::<u64>(), USED * tokens, "{counts:?}");
    }
}

/// The number of tokens that were evaluated for an answer: the last one is only sampled.
fn tokens(answer: &Answer) -> u64 {
    answer.evaluated + TOKENS as u64 - 1
}

#[test]
fn all_slots_answer_while_tensors_are_swapped() {
    let after = stock(&fixture("small-moe-mixed.gguf"), 4, &[PLAIN]);
    let (_folder, path) = copied("small-moe.gguf");
    let server = start(&path, 4, &[PLAIN]);
    let rounds = 3;
    server.complete(&uncached(0));
    server.control("trace-reset");
    let evaluated: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|slot| {
                let server = &server;
                scope.spawn(move || {
                    let request = uncached(slot);
                    let answers = (0..rounds).map(|_| tokens(&server.complete(&request)));
                    answers.sum::<u64>()
                })
            })
            .collect();
        for (file, expected) in [
            ("small-moe-mixed.gguf", (4, 0)),
            ("small-moe.gguf", (0, 4)),
            ("small-moe-mixed.gguf", (4, 0)),
        ] {
            replace(&path, &fixture(file));
            assert_eq!(taken(&server.control("reload")), expected);
        }
        clients
            .into_iter()
            .map(|client| client.join().expect("answers"))
            .sum()
    });
    traces_tokens(&server.control("trace"), 0, evaluated);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    assert_eq!(reload_and_erase(&server)["slots_erased"], 4);
    assert_eq!(answers(&server, 4), after);
    end(server);
}

#[test]
fn a_model_with_an_adapter_is_swapped_and_the_adapter_is_no_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let adapter = folder.path().join("adapter.gguf");
    write_adapter(&adapter);
    let arguments = [PLAIN, "--lora", &adapter.display().to_string()];
    let scale = |server: &Server, scale: f64| {
        server.ask("/lora-adapters", &json!([{"id": 0, "scale": scale}]));
    };
    let expected = |file: &str| {
        let options = with_arguments(without_drop_in(1), &arguments);
        let server = Server::start(&fixture(file), &options);
        let with_adapter = server.complete(&uncached(0));
        scale(&server, 0.0);
        let without = server.complete(&uncached(0));
        assert_ne!(with_adapter, without, "the adapter shows");
        end(server);
        [with_adapter, without]
    };
    let (before, after) = (expected("small-moe.gguf"), expected("small-moe-mixed.gguf"));
    let (_folder, path) = copied("small-moe.gguf");
    let server = start(&path, 1, &arguments);
    let answer = || server.complete(&uncached(0));
    assert_eq!(answer(), before[0]);
    // Tensors of experts, with those of the adapter.
    replace(&path, &fixture("small-moe-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (4, 0));
    server.control("trace-reset");
    assert_eq!(answer(), after[0]);
    traces_tokens(&server.control("trace"), 0, tokens(&after[0]));
    scale(&server, 0.0);
    assert_eq!(answer(), after[1]);
    scale(&server, 1.0);
    assert_eq!(answer(), after[0]);
    replace(&path, &fixture("small-moe.gguf"));
    assert_eq!(taken(&server.control("reload")), (0, 4));
    assert_eq!(answer(), before[0]);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    let status = server.control("status");
    assert_eq!(
        status["models"].as_array().map(Vec::len),
        Some(1),
        "{status}"
    );
    end(server);
}
