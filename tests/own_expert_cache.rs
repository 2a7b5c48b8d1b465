//! The drop-in in llama-server with the expert cache that llama.cpp has of its own: after a swap,
//! experts that the server keeps on a GPU are those of the new file.

mod hosts;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use hosts::servers::{end, reload};
use hosts::simulated::copied_none_itself;
use hosts::{copied, count, exchange_blocks, taken, traced};
use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, built, replace};
use testkit::llama_cpp::llama_cpp;
use testkit::server::{Answer, Options, Request, Server};
use testkit::sim_ggml::SimGgml;

const MODEL: &str = "small-moe.gguf";
/// A third of the experts of the model has slots, so that slots change their experts.
const CACHE: &str = "20";
/// Experts of a token in each layer.
const USED: u64 = 2;
/// Above this number of tokens, llama.cpp copies experts from the cache and from host memory.
const LARGEST_SMALL_BATCH: usize = 32;

/// A server on the simulated GPU with experts in host memory.
struct Placed {
    server: Server,
    sim: SimGgml,
}

impl Placed {
    fn start(model: &Path, cache: Option<&str>, drop_in: DropIn) -> Placed {
        Placed::start_with(Options::new(2), model, cache, drop_in)
    }

    fn start_with(
        mut options: Options,
        model: &Path,
        cache: Option<&str>,
        drop_in: DropIn,
    ) -> Placed {
        let sim = SimGgml::new(&[]);
        options.drop_in = drop_in;
        let gpu = ["--device", "SIM0", "-ngl", "99", "-cmoe"];
        options.arguments.extend(gpu.map(str::to_owned));
        if let Some(mib) = cache {
            options
                .arguments
                .extend(["--moe-cache-mib".into(), mib.into()]);
        }
        options.variables = sim.variables().to_vec();
        let server = Server::start(model, &options);
        Placed { server, sim }
    }

    fn with(model: &Path, cache: Option<&str>, variables: &[(&'static str, &str)]) -> Placed {
        Placed::start(model, cache, DropIn::with(variables))
    }

    /// Answers in both slots to prompts above and below the limit of small batches.
    fn answers(&self) -> Vec<Answer> {
        let long = "one two three four five six seven ".repeat(8);
        let prompts = ["The capital of France is", &long, "Four five", &long[..60]];
        let requests = prompts.iter().enumerate().map(|(at, prompt)| Request {
            cache_prompt: false,
            ..Request::new(prompt, 8).at(at % 2)
        });
        let answers: Vec<_> = requests
            .map(|request| self.server.complete(&request))
            .collect();
        assert!(answers[1].evaluated as usize > LARGEST_SMALL_BATCH);
        assert!((answers[3].evaluated as usize) < LARGEST_SMALL_BATCH);
        answers
    }

    fn own_cache(&self) -> Value {
        self.server.control("status")["own_expert_cache"].clone()
    }

    fn end(self) {
        end(self.server);
        self.sim.report().assert_ordered();
    }
}

/// What a new server without the drop-in answers.
fn fresh(model: &Path, cache: Option<&str>) -> Vec<Answer> {
    let placed = Placed::start(model, cache, DropIn::Absent);
    let answers = placed.answers();
    placed.end();
    answers
}

/// Copies the model and changes bytes of the tensors whose names end with one of these.
fn variant(folder: &Path, name: &str, ends: &[&str]) -> PathBuf {
    let path = folder.join(name);
    std::fs::copy(fixture(MODEL), &path).expect("free space");
    let gguf = GgufFile::open(&path, Access::Read).expect("a model");
    let header = &gguf.header;
    for (at, info) in header.tensors.iter().enumerate() {
        let name = header.name(info).to_str().expect("ASCII");
        if ends.iter().any(|end| name.ends_with(end)) {
            exchange_blocks(&path, at);
        }
    }
    path
}

const EXPERTS: [&str; 3] = [
    "ffn_gate_exps.weight",
    "ffn_up_exps.weight",
    "ffn_down_exps.weight",
];

/// Swaps, returns, overlays, `revert` and a damaged file.
fn answers_as_new_servers(cache: Option<&str>) {
    let (folder, path) = copied(MODEL);
    let before = fresh(&path, cache);
    let all = variant(folder.path(), "all.gguf", &EXPERTS);
    let some = variant(
        folder.path(),
        "some.gguf",
        &["1.ffn_down_exps.weight", "attn_q.weight"],
    );
    let (of_all, of_some) = (fresh(&all, cache), fresh(&some, cache));
    assert!(before != of_all && before != of_some && of_all != of_some);
    let half = folder.path().join("half");
    let bytes = std::fs::read(&all).expect("a file");
    std::fs::write(&half, &bytes[..bytes.len() / 2]).expect("free space");

    let placed = Placed::with(&path, cache, &[]);
    let server = &placed.server;
    assert_eq!(placed.answers(), before);
    for (file, expected) in [(&all, &of_all), (&some, &of_some)] {
        replace(&path, file);
        assert!(taken(&server.control("reload")).0 > 0);
        assert_eq!(&placed.answers(), expected);
        replace(&path, &half);
        assert_ne!(server.control("reload")["ok"], true);
        assert_eq!(
            &placed.answers(),
            expected,
            "a damaged file changes nothing"
        );
        replace(&path, &fixture(MODEL));
        assert!(taken(&server.control("reload")).1 > 0);
        assert_eq!(placed.answers(), before);

        let overlay = json!({"tensor": ".*", "from": file});
        let swap = json!({"cmd": "swap", "overlays": [overlay]});
        assert!(taken(&testkit::host::request(server.socket(), &swap)).0 > 0);
        assert_eq!(&placed.answers(), expected);
        assert!(taken(&server.control("revert")).1 > 0);
        assert_eq!(placed.answers(), before);
        assert_eq!(server.control("unfreeze")["ok"], true);
    }
    let figures = placed.own_cache();
    assert_eq!(figures.is_null(), cache.is_none());
    if cache.is_some() {
        assert!(count(&figures, "written_experts") > 0, "{figures}");
    }
    placed.end();
}

#[test]
fn a_server_answers_as_a_new_one() {
    answers_as_new_servers(Some(CACHE));
}

#[test]
fn a_server_without_a_cache_answers_as_a_new_one() {
    answers_as_new_servers(None);
}

#[test]
fn a_swap_while_requests_run_is_seen_whole() {
    let (folder, path) = copied(MODEL);
    let all = variant(folder.path(), "all.gguf", &EXPERTS);
    let expected = [fresh(&path, Some(CACHE)), fresh(&all, Some(CACHE))];
    let placed = Placed::with(&path, Some(CACHE), &[]);
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while running.load(Ordering::Relaxed) {
                placed.answers();
            }
        });
        for round in 0..6 {
            let file = if round % 2 == 0 {
                &all
            } else {
                &fixture(MODEL)
            };
            replace(&path, file);
            let reply = placed.server.control("reload");
            assert_eq!(reply["ok"], true, "{reply}");
        }
        running.store(false, Ordering::Relaxed);
    });
    assert_eq!(placed.answers(), expected[0]);
    replace(&path, &all);
    assert!(taken(&placed.server.control("reload")).0 > 0);
    assert_eq!(placed.answers(), expected[1]);
    placed.end();
}

/// The names of refused tensors and the next step are in the answer; nothing changes.
#[test]
fn another_type_of_an_expert_matrix_is_refused() {
    let (_folder, path) = copied(MODEL);
    let before = fresh(&path, Some(CACHE));
    let placed = Placed::with(&path, Some(CACHE), &[]);
    assert_eq!(placed.answers(), before);
    replace(&path, &fixture("small-moe-mixed.gguf"));
    let output = reload(&placed.server, &["--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for word in ["_exps.weight", "own expert cache", "--moe-cache-mib"] {
        assert!(text.contains(word), "{word} is missing in {text}");
    }
    assert_ne!(output.status.code(), Some(0));
    assert_eq!(placed.answers(), before);
    let overlay = json!({"tensor": ".*_exps.weight", "from": fixture("small-moe-mixed.gguf")});
    let swap = json!({"cmd": "swap", "overlays": [overlay]});
    let reply = testkit::host::request(placed.server.socket(), &swap);
    assert!(reply.to_string().contains("own expert cache"), "{reply}");
    assert_eq!(placed.answers(), before);
    placed.end();
}

/// The server has slots, and so many sequences that none of the graphs for which it reserves memory reads
/// them.
#[test]
fn another_type_is_refused_before_a_graph_reads_slots() {
    let (_folder, path) = copied(MODEL);
    let mut options = Options::new(LARGEST_SMALL_BATCH + 1);
    options.context = 64;
    options.arguments = vec!["--no-warmup".into()];
    let placed = Placed::start_with(options, &path, Some(CACHE), DropIn::with(&[]));
    let long = "one two three four five six seven ".repeat(8);
    let one_token = Request::new(&long, 1);
    placed.server.complete(&one_token);
    assert!(count(&placed.own_cache(), "layers") > 0);
    replace(&path, &fixture("small-moe-mixed.gguf"));
    let reply = placed.server.control("reload");
    assert!(reply.to_string().contains("own expert cache"), "{reply}");
    placed.end();
}

/// The trace counts experts and never slots.
#[test]
fn a_trace_has_every_activation() {
    let model = fixture(MODEL);
    let mut counts = Vec::new();
    for cache in [None, Some(CACHE)] {
        let placed = Placed::with(&model, cache, &[("LLAMA_EXPERT_TRACE_STATS", "1")]);
        placed.server.control("trace-reset");
        let answers = placed.answers();
        assert_eq!(answers, fresh(&model, cache));
        let trace = placed.server.control("trace")["traces"][0].clone();
        let used = count(&trace, "experts_used");
        let layers = trace["layers"].as_array().expect("layers");
        for layer in layers {
            let sum: u64 = layer["counts"]
                .as_array()
                .expect("counts")
                .iter()
                .map(|of| of.as_u64().expect("a count"))
                .sum();
            assert_eq!(sum, count(layer, "tokens") * used, "{layer}");
        }
        // Each answer evaluates its prompt, and all of its tokens but the last.
        let tokens: u64 = answers.iter().map(|answer| answer.evaluated + 7).sum();
        assert_eq!(count(&layers[0], "tokens"), tokens, "{trace}");
        counts.push(traced(&trace));
        placed.end();
    }
    assert_eq!(counts[0], counts[1]);
}

/// Only one of two expert caches works, and the other one is named.
#[test]
fn one_of_two_caches_works() {
    let model = fixture(MODEL);
    let variables = [
        ("LLAMA_POSTFETCH_MODE", "on"),
        ("LLAMA_POSTFETCH_CACHE_MB", "16"),
    ];
    let placed = Placed::with(&model, Some(CACHE), &variables);
    assert_eq!(placed.answers(), fresh(&model, Some(CACHE)));
    let figures = placed.server.control("status")["post_fetch"].clone();
    let obstacle = figures["obstacle"].as_str().unwrap_or_default();
    assert!(obstacle.contains("own expert cache works"), "{figures}");
    assert_eq!(count(&figures, "cache_bytes"), 0, "{figures}");
    assert!(count(&placed.own_cache(), "layers") > 0);
    placed.end();
}

/// In large batches, the server copies experts that have slots from the device, and early copies have
/// the others.
#[test]
fn early_copies_and_experts_that_have_slots() {
    let model = fixture(MODEL);
    let prompts = ["one two three ", "four five six ", "seven eight nine "];
    let mut answers = Vec::new();
    for mode in ["off", "on"] {
        let placed = Placed::with(&model, Some(CACHE), &[("LLAMA_POSTFETCH_MODE", mode)]);
        let ask = |words: &str| placed.server.complete(&Request::new(&words.repeat(20), 8));
        answers.push(prompts.map(ask));
        if mode == "on" {
            let figures = placed.server.control("status")["post_fetch"].clone();
            assert!(count(&figures, "left_out_bytes") > 0, "{figures}");
            assert_eq!(figures["obstacle"], Value::Null);
            copied_none_itself(&figures);
        }
        placed.end();
    }
    assert_eq!(answers[0], answers[1]);
}

/// Bytes of the experts that a token is routed to.
fn bytes_of_token(model: &Path) -> u64 {
    let gguf = GgufFile::open(model, Access::Read).expect("a model");
    let header = &gguf.header;
    let experts = header.tensors.iter().filter(|info| {
        let name = header.name(info).to_str().expect("ASCII");
        EXPERTS.iter().any(|end| name.ends_with(end))
    });
    experts.map(|info| info.nbytes / info.ne[2] * USED).sum()
}

/// Experts that the server copies for one evaluation are streamed, and those that it copies into slots.
#[test]
fn experts_from_disk() {
    let model = fixture(MODEL);
    let expected = fresh(&model, Some(CACHE));
    let stream = ("LLAMA_EXPERT_STREAM", "on");
    let memory = ("LLAMA_EXPERT_STREAM_MEMORY_MB", "8");
    let placed = Placed::with(&model, Some(CACHE), &[stream, memory]);
    assert_eq!(placed.answers(), expected);
    let status = placed.server.control("status");
    let held = count(&status["models"][0]["stream"], "held_bytes");
    assert!((1..=8 << 20).contains(&held), "{held}");
    placed.end();
    let placed = Placed::with(&model, Some(CACHE), &[stream]);
    assert_eq!(placed.answers(), expected);
    let figures = || placed.server.control("status")["models"][0]["stream"].clone();
    let bytes = || count(&figures(), "checked_bytes");
    let prompt = |words: usize| Request::new(&"one ".repeat(words), 1);
    let before = bytes();
    placed.server.complete(&prompt(2 * LARGEST_SMALL_BATCH));
    let after_prompt = bytes();
    assert!(after_prompt > before);
    let tokens = || count(&figures(), "tokens");
    let of_prompt = tokens();
    let request = Request::new("Four five", 24);
    placed.server.complete(&request);
    // Some experts of these tokens have no slot, and are read; those with one are not.
    let (missed, all) = (bytes() - after_prompt, 24 * bytes_of_token(&model));
    assert!(0 < missed && missed < all, "{missed} of {all}");
    assert!(tokens() - of_prompt >= 24, "{}", figures());
    placed.end();
}

/// `run --expert-cache` leaves out the option of the program, and has its memory.
#[test]
fn run_gives_its_memory_to_the_slots() {
    let completion = |wrapper: &[&str]| {
        let program = llama_cpp("llama-completion").display().to_string();
        let model = fixture(MODEL).display().to_string();
        let options = "--device SIM0 -ngl 99 -cmoe -p 7 -n 12 --temp 0 -no-cnv --no-warmup";
        let sim = SimGgml::new(&[]);
        let wrapper = wrapper.iter().map(|word| (*word).to_owned());
        let mut words = wrapper.chain([program, "-m".into(), model]);
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words).args(options.split(' '));
        command.args(["--moe-cache-mib", CACHE]);
        sim.prepare(&mut command);
        let output = command.output().expect("it ends");
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{log}");
        sim.report().assert_ordered();
        (output.stdout, log)
    };
    let command = built("release/llama-sidecar").display().to_string();
    let (expected, _) = completion(&["nice"]);
    let flags = ["--expert-cache", "--expert-cache-misses=fetch", "--"];
    let (found, log) = completion(&[&[&command, "run"], &flags[..]].concat());
    assert_eq!(found, expected);
    let line = format!("the program runs without its own expert cache of {CACHE} MiB");
    assert!(log.contains(&line), "{log}");
    assert!(log.contains("(3 of each layer, 20 MB)"), "{log}");
    // The size of the flag counts.
    let flags = ["--expert-cache=13", "--expert-cache-misses=fetch", "--"];
    let (found, log) = completion(&[&[&command, "run"], &flags[..]].concat());
    assert_eq!(found, expected);
    assert!(log.contains(&line), "{log}");
    assert!(log.contains("(2 of each layer, 13 MB)"), "{log}");
}

/// The option counts before the variable, so that the variable must not count once the option is left out.
#[test]
fn run_leaves_out_option_and_variable() {
    let mut command = Command::new(built("release/llama-sidecar"));
    command.args(["run", "--expert-cache", "--dry-run", "--", "server"]);
    command.args(["--moe-cache-mib", "0"]);
    let output = command.env("LLAMA_ARG_MOE_CACHE_MIB", "3").output();
    let text = String::from_utf8(output.expect("it ends").stdout).expect("UTF-8");
    assert!(
        text.contains("export LLAMA_ARG_MOE_CACHE_MIB=0\n"),
        "{text}"
    );
    assert!(text.ends_with("\nserver\n"), "{text}");
}
