//! Hot-swap, the expert trace and experts from disk in each mode of llama-server.

mod hosts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hosts::servers::{
    ENDS, PREFIX, TOKENS, answers, end, layers, reload_and_erase, reload_at, speculate, stock,
    with_arguments, with_draft, without_drop_in, write_adapter,
};
use hosts::{copied, taken, traced};
use serde_json::{Value, json};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, control, replace};
use testkit::server::{Answer, Options, Request, Server};
use testkit::writer::{F32, Gguf, Kv, Q8_0, Tensor, pattern};

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

#[test]
fn a_target_and_its_draft_are_swapped() {
    let start_with = |target: &Path, draft: &Path, drop_in: DropIn| {
        let options = Options {
            drop_in,
            ..Options::new(1)
        };
        Server::start(
            target,
            &with_draft(with_arguments(options, &[PLAIN]), draft),
        )
    };
    let expected = |target: &str, draft: &str| {
        let server = start_with(&fixture(target), &fixture(draft), DropIn::Absent);
        let answer = speculate(&server);
        end(server);
        answer
    };
    let (_folder, target) = copied("small-moe.gguf");
    let (_folder, draft) = copied("small.gguf");
    let server = start_with(&target, &draft, everything());
    assert_eq!(speculate(&server), expected("small-moe.gguf", "small.gguf"));
    replace(&draft, &fixture("small-mixed.gguf"));
    let report = server.control("reload");
    assert_eq!(report["reports"][0]["swapped"], 0, "{report}");
    assert_eq!(report["reports"][1]["swapped"], 4, "{report}");
    assert_eq!(
        speculate(&server),
        expected("small-moe.gguf", "small-mixed.gguf")
    );
    replace(&target, &fixture("small-moe-mixed.gguf"));
    let report = server.control("reload");
    assert_eq!(report["reports"][0]["swapped"], 4, "{report}");
    assert_eq!(report["reports"][1]["swapped"], 0, "{report}");
    server.control("trace-reset");
    let answer = speculate(&server);
    assert_eq!(answer, expected("small-moe-mixed.gguf", "small-mixed.gguf"));
    let count = |name: &str| answer[name].as_u64().expect("a number");
    // The last token is only sampled, and so is the one after the accepted ones of a draft.
    let steps = TOKENS as u64 - 1 - count("accepted");
    let evaluated = count("evaluated") + count("drafted") + steps;
    traces_tokens(&server.control("trace"), 0, evaluated);
    let status = server.control("status");
    for (model, path) in [&target, &draft].into_iter().enumerate() {
        let listed = &status["models"][model]["files"][0];
        assert_eq!(listed.as_str(), path.to_str(), "{status}");
    }
    assert!(layers(&server, 0) > Some(0), "{status}");
    end(server);
}

#[test]
fn a_prompt_that_is_evaluated_again_has_none_of_the_old_weights() {
    let request = uncached(0);
    let fresh = |file: &str| {
        let options = with_arguments(without_drop_in(1), &[PLAIN]);
        let server = Server::start(&fixture(file), &options);
        let answer = server.complete(&request);
        end(server);
        answer
    };
    let after = fresh("small-moe-mixed.gguf");
    assert_ne!(fresh("small-moe.gguf"), after, "the variant shows");
    let (_folder, path) = copied("small-moe.gguf");
    let options = Options {
        prompt_cache: true,
        drop_in: everything(),
        ..Options::new(1)
    };
    let arguments = [PLAIN, "--cache-reuse", "4"];
    let server = Server::start(&path, &with_arguments(options, &arguments));
    let cached = Request::new(&request.prompt, TOKENS).at(0);
    let first = server.complete(&cached);
    server.ask("/slots/0?action=save", &json!({"filename": "slot"}));
    // The first prompt goes from the slot to memory.
    server.complete(&Request::new(ENDS[1], TOKENS).at(0));
    replace(&path, &fixture("small-moe-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (4, 0));
    server.control("trace-reset");
    // Keys and values of the old weights, which the server has kept.
    let kept = server.complete(&cached);
    assert!(kept.cached > 0, "{kept:?}");
    traces_tokens(&server.control("trace"), 0, tokens(&kept));
    server.ask("/slots/0?action=restore", &json!({"filename": "slot"}));
    let restored = server.complete(&cached);
    assert!(restored.cached > 0, "{restored:?}");
    assert_ne!(
        restored.probabilities, first.probabilities,
        "the swap shows"
    );
    assert_eq!(server.complete(&request), after);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    end(server);
}

/// The part of an answer that does not name the model.
fn embed(server: &Server) -> Value {
    server.ask("/v1/embeddings", &json!({"input": ENDS}))["data"].take()
}

#[test]
fn embeddings_of_a_swapped_model_are_those_of_a_new_server() {
    let arguments = [PLAIN, "--embeddings", "--pooling", "mean"];
    let expected = |file: &str| {
        let options = with_arguments(without_drop_in(1), &arguments);
        let server = Server::start(&fixture(file), &options);
        let embeddings = embed(&server);
        end(server);
        embeddings
    };
    let (before, after) = (expected("small-moe.gguf"), expected("small-moe-mixed.gguf"));
    assert!(before != after, "the variant shows");
    let (_folder, path) = copied("small-moe.gguf");
    let server = start(&path, 1, &arguments);
    assert!(embed(&server) == before);
    server.control("trace-reset");
    replace(&path, &fixture("small-moe-mixed.gguf"));
    assert_eq!(taken(&server.control("reload")), (4, 0));
    let answer = server.ask("/v1/embeddings", &json!({"input": ENDS}));
    assert!(answer["data"] == after);
    let tokens = answer["usage"]["prompt_tokens"].as_u64().expect("a number");
    traces_tokens(&server.control("trace"), 0, tokens);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    end(server);
}

/// Writes a small BERT with a head for reranking. A seed each for a matrix in `q8_0` and for
/// a row that graphs read through a view.
fn write_reranker(path: &Path, matrix: u64, viewed: u64) {
    const WIDTH: i64 = 64;
    const INNER: i64 = 128;
    let letters = ('a'..='z').map(|letter| format!("\u{2581}{letter}"));
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"].map(str::to_owned);
    let tokens: Vec<String> = special.into_iter().chain(letters).collect();
    let vocabulary = tokens.len() as i64;
    let mut file = Gguf {
        kvs: Vec::new(),
        ..Gguf::default()
    }
    .kv("general.architecture", Kv::Text("bert".into()))
    .kv("bert.attention.layer_norm_epsilon", Kv::F32(1e-5))
    .kv("bert.attention.causal", Kv::Bool(false))
    .kv("tokenizer.ggml.model", Kv::Text("bert".into()))
    .kv("tokenizer.ggml.token_type", Kv::I32s(vec![1; tokens.len()]))
    .kv("tokenizer.ggml.tokens", Kv::Texts(tokens));
    for (key, value) in [
        ("bert.block_count", 1),
        ("bert.context_length", 128),
        ("bert.embedding_length", WIDTH as u32),
        ("bert.feed_forward_length", INNER as u32),
        ("bert.attention.head_count", 2),
        ("tokenizer.ggml.token_type_count", 1),
        ("tokenizer.ggml.padding_token_id", 0),
        ("tokenizer.ggml.unknown_token_id", 1),
        ("tokenizer.ggml.bos_token_id", 2),
        ("tokenizer.ggml.eos_token_id", 3),
        ("tokenizer.ggml.seperator_token_id", 3),
    ] {
        file = file.kv(key, Kv::U32(value));
    }
    for (number, (name, ne)) in [
        ("token_embd.weight", vec![WIDTH, vocabulary]),
        ("position_embd.weight", vec![WIDTH, 128]),
        ("token_embd_norm.weight", vec![WIDTH]),
        ("token_embd_norm.bias", vec![WIDTH]),
        ("cls.weight", vec![WIDTH, WIDTH]),
        ("cls.bias", vec![WIDTH]),
        ("cls.output.weight", vec![WIDTH, 1]),
        ("cls.output.bias", vec![1]),
        ("blk.0.attn_q.weight", vec![WIDTH, WIDTH]),
        ("blk.0.attn_k.weight", vec![WIDTH, WIDTH]),
        ("blk.0.attn_v.weight", vec![WIDTH, WIDTH]),
        ("blk.0.attn_output.weight", vec![WIDTH, WIDTH]),
        ("blk.0.attn_output_norm.weight", vec![WIDTH]),
        ("blk.0.attn_output_norm.bias", vec![WIDTH]),
        ("blk.0.ffn_down.weight", vec![INNER, WIDTH]),
        ("blk.0.layer_output_norm.weight", vec![WIDTH]),
        ("blk.0.layer_output_norm.bias", vec![WIDTH]),
    ]
    .into_iter()
    .enumerate()
    {
        file.tensors.push(noise(name, &ne, number as u64));
    }
    file.tensors
        .push(noise("token_types.weight", &[WIDTH, 1], viewed));
    file = file.tensor("blk.0.ffn_up.weight", &[WIDTH, INNER], Q8_0, matrix);
    file.replace(path).expect("free space");
}

/// A tensor of numbers between -0.5 and 0.5.
fn noise(name: &str, ne: &[i64], seed: u64) -> Tensor {
    let elements: i64 = ne.iter().product();
    let bytes = pattern(seed, elements as usize);
    let values = bytes.iter().map(|&byte| (f32::from(byte) - 127.5) / 255.0);
    Tensor {
        name: name.into(),
        ne: ne.to_vec(),
        ty: F32,
        data: values.flat_map(f32::to_le_bytes).collect(),
    }
}

#[test]
fn a_swapped_reranker_scores_as_a_new_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let [path, matrix, both] = ["model", "matrix", "both"].map(|name| folder.path().join(name));
    write_reranker(&path, 1, 11);
    write_reranker(&matrix, 2, 11);
    write_reranker(&both, 2, 12);
    // The graph of the last one fits the first one.
    let body = json!({"query": "a b c", "documents": ["a b", "x y z", "c a"]});
    let rank = |server: &Server| server.ask("/v1/rerank", &body)["results"].take();
    let options = |drop_in| Options {
        context: 128,
        drop_in,
        ..Options::new(1)
    };
    let expected = |model: &Path| {
        let options = with_arguments(options(DropIn::Absent), &["--reranking"]);
        let server = Server::start(model, &options);
        let scores = rank(&server);
        end(server);
        scores
    };
    let (before, after) = (expected(&path), [&matrix, &both].map(|path| expected(path)));
    assert!(
        before != after[0] && after[0] != after[1],
        "the variants show"
    );
    let options = with_arguments(options(everything()), &["--reranking"]);
    let server = Server::start(&path, &options);
    assert_eq!(rank(&server), before);
    // The graph that the server keeps has no view of the matrix.
    replace(&path, &matrix);
    assert_eq!(taken(&server.control("reload")), (1, 0));
    assert_eq!(rank(&server), after[0]);
    // By now it is known that the server can be made to rebuild its graph.
    replace(&path, &both);
    assert_eq!(taken(&server.control("reload")), (1, 0));
    assert_eq!(rank(&server), after[1]);
    end(server);
}

/// Waits until a server has freed its model.
fn sleeps(server: &Server) {
    while server.look("/props")["is_sleeping"] != true {
        std::thread::yield_now();
    }
}

/// Replaces the file by a fixture and reloads, while a request keeps the server from sleeping;
/// returns the report.
fn swap_awake(server: &Server, path: &Path, file: &str) -> Value {
    let next = path.with_extension("next");
    replace(&next, &fixture(file));
    std::thread::scope(|scope| {
        let long = Request::new(PREFIX, 300).at(0);
        let busy = scope.spawn(move || server.complete(&long));
        while server.look("/slots")[0]["is_processing"] != true {
            assert!(!busy.is_finished(), "it was busy at no time");
            std::thread::yield_now();
        }
        std::fs::rename(&next, path).expect("the same folder");
        let report = server.control("reload");
        busy.join().expect("an answer");
        report
    })
}

#[test]
fn a_server_that_slept_is_swapped_again() {
    let fresh = |file: &str| {
        let options = with_arguments(without_drop_in(1), &[PLAIN]);
        let server = Server::start(&fixture(file), &options);
        let answer = server.complete(&uncached(0));
        end(server);
        answer
    };
    let (before, after) = (fresh("small-moe.gguf"), fresh("small-moe-mixed.gguf"));
    let (_folder, path) = copied("small-moe.gguf");
    let server = start(&path, 1, &[PLAIN, "--sleep-idle-seconds", "2"]);
    assert_eq!(server.complete(&uncached(0)), before);
    let swapped = swap_awake(&server, &path, "small-moe-mixed.gguf");
    assert_eq!(taken(&swapped), (4, 0));
    assert_eq!(server.complete(&uncached(0)), after);
    sleeps(&server);
    let status = server.control("status");
    assert_eq!(status["models"], json!([]), "{status}");
    // It wakes with the file as it is, and counts from there on.
    assert_eq!(server.complete(&uncached(0)), after);
    server.control("trace-reset");
    server.complete(&uncached(0));
    traces_tokens(&server.control("trace"), 1, tokens(&after));
    let swapped = swap_awake(&server, &path, "small-moe.gguf");
    assert_eq!(taken(&swapped), (4, 0));
    assert_eq!(server.complete(&uncached(0)), before);
    sleeps(&server);
    replace(&path, &fixture("small-moe-mixed.gguf"));
    assert_eq!(server.complete(&uncached(0)), after);
    let swapped = swap_awake(&server, &path, "small-moe-mixed.gguf");
    assert_eq!(taken(&swapped), (0, 0), "the bytes are the same");
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    end(server);
}

/// What is the same in the answers of all servers with a model.
fn answer_of(server: &Server, model: &str) -> Value {
    answer_to(server, model, json!(PREFIX))
}

/// The same for any prompt.
fn answer_to(server: &Server, model: &str, prompt: Value) -> Value {
    let body = json!({
        "model": model, "prompt": prompt, "n_predict": TOKENS, "temperature": 0,
        "ignore_eos": true, "n_probs": 3, "cache_prompt": false,
    });
    let answer = server.ask("/completion", &body);
    json!([
        answer["content"],
        answer["completion_probabilities"],
        answer["timings"]["prompt_n"]
    ])
}

/// The sockets in a folder, by the name of the model's file.
fn sockets(folder: &Path) -> BTreeMap<String, PathBuf> {
    let files = std::fs::read_dir(folder).expect("a folder");
    let paths = files.map(|file| file.expect("a file").path());
    let sockets = paths.filter(|path| path.extension().is_some_and(|end| end == "socket"));
    let named = sockets.map(|socket| {
        let status = control(&socket, "status");
        let file = Path::new(status["models"][0]["files"][0].as_str().expect("a path"));
        let name = file.file_stem().expect("a name").to_string_lossy();
        (name.into_owned(), socket)
    });
    named.collect()
}

#[test]
fn each_model_of_a_router_is_swapped_in_its_own_process() {
    let fresh = |file: &str| {
        let options = with_arguments(without_drop_in(1), &[PLAIN]);
        let server = Server::start(&fixture(file), &options);
        let answer = answer_of(&server, "");
        end(server);
        answer
    };
    let folder = tempfile::tempdir().expect("a folder");
    let models = folder.path().join("models");
    std::fs::create_dir(&models).expect("a folder");
    let [moe, dense] = ["moe", "dense"].map(|name| models.join(name).with_extension("gguf"));
    replace(&moe, &fixture("small-moe.gguf"));
    replace(&dense, &fixture("small.gguf"));
    let pattern = folder.path().join("%p.socket").display().to_string();
    let mut drop_in = everything();
    let output = |name: &str| folder.path().join(name).display().to_string();
    if let DropIn::On(variables) = &mut drop_in {
        variables.push(("LLAMA_SIDECAR_CONTROL", pattern));
        variables.push(("LLAMA_EXPERT_TRACE_ROUTES", output("%p.routes")));
        variables.push(("LLAMA_EXPERT_TRACE_SALIENCY", output("%p.saliency")));
        variables.push(("LLAMA_POSTFETCH_MODE", "on".into()));
    }
    let options = Options {
        drop_in,
        ..Options::new(1)
    };
    let router = Server::start_router(&models, &with_arguments(options, &[PLAIN]));
    assert_eq!(answer_of(&router, "moe"), fresh("small-moe.gguf"));
    assert_eq!(answer_of(&router, "dense"), fresh("small.gguf"));
    let found = sockets(folder.path());
    assert_eq!(found.len(), 2, "the router has none: {found:?}");

    let before = control(&found["dense"], "status");
    replace(&moe, &fixture("small-moe-mixed.gguf"));
    let output = reload_at(&found["moe"], router.url(), &[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("is a router"), "{error}");
    let arguments = router.model_status("moe")["args"].take();
    let mut arguments = arguments.as_array().expect("a list").iter();
    arguments.find(|word| **word == "--port").expect("a port");
    let port = arguments.next().and_then(Value::as_str).expect("a port");
    let output = reload_at(
        &found["moe"],
        &format!("http://127.0.0.1:{port}"),
        &["--json"],
    );
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (taken(&report), &report["slots_erased"]),
        ((4, 0), &json!(1))
    );
    control(&found["moe"], "trace-reset");
    let after = fresh("small-moe-mixed.gguf");
    assert_eq!(answer_of(&router, "moe"), after);
    let evaluated = after[2].as_u64().expect("a number") + TOKENS as u64 - 1;
    traces_tokens(&control(&found["moe"], "trace"), 0, evaluated);
    let status = control(&found["moe"], "status");
    assert!(
        status["models"][0]["stream"]["layers"].as_u64() > Some(0),
        "{status}"
    );
    let changed = |status: &Value| status["models"][0]["changed"].clone();
    assert_eq!(
        changed(&control(&found["dense"], "status")),
        changed(&before)
    );

    router.ask("/models/unload", &json!({"model": "moe"}));
    while router.model_status("moe")["value"] != "unloaded" {
        std::thread::yield_now();
    }
    assert_eq!(sockets(folder.path()).len(), 1);
    // Another process, with the file as it is.
    assert_eq!(answer_of(&router, "moe"), after);
    let again = sockets(folder.path());
    assert_ne!(again["moe"], found["moe"]);
    assert_eq!(changed(&control(&again["moe"], "status")), json!([]));
    // Lines of the other processes begin with their ports.
    let logged = router.logged("llama-sidecar: ");
    assert!(
        logged.iter().all(|line| line.starts_with('[')),
        "{logged:?}"
    );
    end(router);
    assert_eq!(sockets(folder.path()), BTreeMap::new());
    // Of both processes of the model with experts.
    for ending in ["routes", "saliency"] {
        let files = std::fs::read_dir(folder.path()).expect("a folder");
        let paths = files.map(|file| file.expect("a file").path());
        let written = paths.filter(|path| path.extension() == Some(ending.as_ref()));
        assert_eq!(written.count(), 2, "{ending}");
    }
}

/// Writes a small projector (of Gemma 3) for models of 576 numbers a token. A seed each for a
/// matrix in `q8_0` and for one that graphs read through a view.
fn write_projector(path: &Path, matrix: u64, viewed: u64) {
    const WIDTH: i64 = 64;
    const INNER: i64 = 128;
    const PATCH: i64 = 8;
    const PATCHES: i64 = 64;
    let mut file = Gguf {
        kvs: Vec::new(),
        ..Gguf::default()
    }
    .kv("general.architecture", Kv::Text("clip".into()))
    .kv("clip.has_vision_encoder", Kv::Bool(true))
    .kv("clip.projector_type", Kv::Text("gemma3".into()))
    .kv("clip.use_gelu", Kv::Bool(true))
    .kv("clip.vision.attention.layer_norm_epsilon", Kv::F32(1e-5))
    .kv("clip.vision.image_mean", Kv::F32s(vec![0.5; 3]))
    .kv("clip.vision.image_std", Kv::F32s(vec![0.5; 3]));
    for (key, value) in [
        ("image_size", 64),
        ("patch_size", PATCH),
        ("block_count", 1),
        ("embedding_length", WIDTH),
        ("feed_forward_length", INNER),
        ("attention.head_count", 2),
        ("projection_dim", 576),
    ] {
        file = file.kv(&format!("clip.vision.{key}"), Kv::U32(value as u32));
    }
    for (number, (name, ne)) in [
        ("v.patch_embd.weight", vec![PATCH, PATCH, 3, WIDTH]),
        ("v.patch_embd.bias", vec![WIDTH]),
        ("v.position_embd.weight", vec![WIDTH, PATCHES]),
        ("v.blk.0.ln1.weight", vec![WIDTH]),
        ("v.blk.0.ln1.bias", vec![WIDTH]),
        ("v.blk.0.attn_q.weight", vec![WIDTH, WIDTH]),
        ("v.blk.0.attn_k.weight", vec![WIDTH, WIDTH]),
        ("v.blk.0.attn_v.weight", vec![WIDTH, WIDTH]),
        ("v.blk.0.attn_out.weight", vec![WIDTH, WIDTH]),
        ("v.blk.0.ln2.weight", vec![WIDTH]),
        ("v.blk.0.ln2.bias", vec![WIDTH]),
        ("v.blk.0.ffn_down.weight", vec![INNER, WIDTH]),
        ("v.post_ln.weight", vec![WIDTH]),
        ("v.post_ln.bias", vec![WIDTH]),
        ("mm.soft_emb_norm.weight", vec![WIDTH]),
    ]
    .into_iter()
    .enumerate()
    {
        file.tensors.push(noise(name, &ne, number as u64));
    }
    let projection = noise("mm.input_projection.weight", &[576, WIDTH], viewed);
    file.tensors.push(projection);
    file = file.tensor("v.blk.0.ffn_up.weight", &[WIDTH, INNER], Q8_0, matrix);
    file.replace(path).expect("free space");
}

/// An image of 8 by 8 pixels, in base64.
fn image() -> String {
    let mut image = b"P6 8 8 255\n".to_vec();
    image.extend(pattern(3, 8 * 8 * 3));
    // A multiple of three bytes: what is at the end is not looked at.
    image.resize(image.len().next_multiple_of(3), 0);
    let letters: Vec<u8> = [
        b'A'..=b'Z',
        b'a'..=b'z',
        b'0'..=b'9',
        b'+'..=b'+',
        b'/'..=b'/',
    ]
    .into_iter()
    .flatten()
    .collect();
    let text = image.chunks(3).flat_map(|three| {
        let bits = three
            .iter()
            .fold(0, |bits, &byte| bits << 8 | usize::from(byte));
        [18, 12, 6, 0].map(|shift| char::from(letters[bits >> shift & 63]))
    });
    text.collect()
}

#[test]
fn a_model_and_its_projector_are_swapped() {
    const MARKER: &str = "<image>";
    let folder = tempfile::tempdir().expect("a folder");
    let [projector, matrix, both] =
        ["model", "matrix", "both"].map(|name| folder.path().join(name));
    write_projector(&projector, 1, 11);
    write_projector(&matrix, 2, 11);
    write_projector(&both, 2, 12);
    let start_with = |model: &Path, projector: &Path, drop_in: DropIn| {
        let options = Options {
            variables: vec![("LLAMA_MEDIA_MARKER".into(), MARKER.into())],
            drop_in,
            ..Options::new(1)
        };
        let projector = projector.display().to_string();
        let arguments = [PLAIN, "--mmproj", &projector];
        Server::start(model, &with_arguments(options, &arguments))
    };
    let prompt = json!({
        "prompt_string": format!("{MARKER} {PREFIX}"), "multimodal_data": [image()],
    });
    let answer = |server: &Server| answer_to(server, "", prompt.clone());
    let expected = |model: &str, projector: &Path| {
        let server = start_with(&fixture(model), projector, DropIn::Absent);
        let answer = answer(&server);
        end(server);
        answer
    };
    let before = expected("small-moe.gguf", &projector);
    let with_matrix = expected("small-moe.gguf", &matrix);
    let with_both = expected("small-moe.gguf", &both);
    let after = expected("small-moe-mixed.gguf", &both);
    assert!(before != with_matrix && with_matrix != with_both && with_both != after);
    let (_folder, path) = copied("small-moe.gguf");
    let server = start_with(&path, &projector, everything());
    assert_eq!(answer(&server), before);
    replace(&projector, &matrix);
    let report = server.control("reload");
    assert_eq!(report["reports"][1]["swapped"], 1, "{report}");
    assert_eq!(answer(&server), with_matrix);
    // The graph of the last image has a view of the other matrix: the next image ends the wait.
    replace(&projector, &both);
    let report = std::thread::scope(|scope| {
        let report = scope.spawn(|| server.control("reload"));
        while !report.is_finished() {
            answer(&server);
        }
        report.join().expect("a report")
    });
    assert_eq!(report["reports"][1]["swapped"], 1, "{report}");
    assert_eq!(answer(&server), with_both);
    replace(&path, &fixture("small-moe-mixed.gguf"));
    let report = server.control("reload");
    assert_eq!(report["reports"][0]["swapped"], 4, "{report}");
    server.control("trace-reset");
    assert_eq!(answer(&server), after);
    let evaluated = after[2].as_u64().expect("a number") + TOKENS as u64 - 1;
    traces_tokens(&server.control("trace"), 0, evaluated);
    assert!(layers(&server, 0) > Some(0), "{:?}", server.log());
    end(server);
}
