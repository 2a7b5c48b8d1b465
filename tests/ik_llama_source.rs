//! The drop-in in programs of ik_llama.cpp from source, whose loader gives tensors memory on several
//! threads, and which have a hot-swap of their own; on the CPU and with Vulkan on a software device.

mod hosts;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hosts::servers::{ENDS, PREFIX, TOKENS, end, with_arguments};
use hosts::{copied, other_bytes, taken};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, replace};
use testkit::ik_llama_cpp::{ik_llama_cpp, server, server_vulkan};
use testkit::mixtures::{Mixture, USED};
use testkit::server::{Answer, Options, Request, Server};

/// How long a program may take for one step, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const SLOTS: usize = 3;
const MAPPED: &[&str] = &["--no-warmup"];
const READ: &[&str] = &["--no-warmup", "--no-mmap"];
/// The option for layers on a GPU, for which a build with Vulkan is started.
const LAYERS_ON_GPU: &str = "-ngl";
/// The variable that turns on the program's own hot-swap, and the drop-in's.
const BOTH: (&str, &str) = ("LLAMA_HOTSWAP_ENABLED", "1");
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hosts/c/text.txt");

fn request(slot: usize) -> Request {
    Request {
        cache_prompt: false,
        ..Request::new(&format!("{PREFIX}{}", ENDS[slot]), TOKENS).at(slot)
    }
}

/// What each slot answers to a prompt of its own.
fn answers(server: &Server) -> Vec<Answer> {
    (0..SLOTS)
        .map(|slot| server.complete(&request(slot)))
        .collect()
}

fn start(model: &Path, arguments: &[&str], drop_in: DropIn) -> Server {
    let options = match arguments.contains(&LAYERS_ON_GPU) {
        true => server_vulkan(SLOTS),
        false => server(SLOTS),
    };
    let options = Options { drop_in, ..options };
    Server::start(model, &with_arguments(options, arguments))
}

/// What a server without the drop-in answers.
fn fresh(model: &Path, arguments: &[&str]) -> Vec<Answer> {
    let server = start(model, arguments, DropIn::Absent);
    let answers = answers(&server);
    end(server);
    answers
}

/// Writes the first half of a file.
fn half(of: &Path, to: &Path) {
    let bytes = std::fs::read(of).expect("a model");
    std::fs::write(to, &bytes[..bytes.len() / 2]).expect("free space");
}

/// A server with a model takes variants, ignores a damaged file, and takes the model back.
fn swaps(original: &Path, variants: &[&Path], arguments: &[&str]) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    replace(&path, original);
    let before = fresh(original, arguments);
    let server = start(&path, arguments, DropIn::with(&[]));
    assert_eq!(answers(&server), before, "{arguments:?}");
    for &variant in variants {
        let after = fresh(variant, arguments);
        assert_ne!(after, before, "the variant shows");
        replace(&path, variant);
        let (swapped, _) = taken(&server.control("reload"));
        assert!(swapped > 0, "{arguments:?}");
        assert_eq!(answers(&server), after, "{arguments:?}");
        let damaged = folder.path().join("half.gguf");
        half(variant, &damaged);
        replace(&path, &damaged);
        let report = server.control("reload");
        assert_eq!(report["ok"], false, "{report}");
        assert_eq!(answers(&server), after, "{arguments:?}");
        replace(&path, original);
        assert_eq!(taken(&server.control("reload")), (0, swapped));
        assert_eq!(answers(&server), before, "{arguments:?}");
    }
    end(server);
}

#[test]
fn slots_answer_as_those_of_a_new_server_after_each_swap() {
    let folder = tempfile::tempdir().expect("a folder");
    let same_type = other_bytes(folder.path(), "smollm2.gguf", c"blk.3.ffn_up.weight");
    let variants = [fixture("smollm2-mixed.gguf"), same_type];
    let variants = variants.each_ref().map(|path| path.as_path());
    for arguments in [MAPPED, READ] {
        swaps(&fixture("smollm2.gguf"), &variants, arguments);
    }
}

#[test]
fn experts_are_swapped_with_and_without_fused_matrices() {
    let variants = [fixture("moe-q8_0.gguf"), fixture("moe-mixed.gguf")];
    let variants = variants.each_ref().map(|path| path.as_path());
    for arguments in [MAPPED, &["--no-warmup", "-no-fmoe"]] {
        swaps(&fixture("moe.gguf"), &variants, arguments);
    }
}

#[test]
fn layers_are_swapped_on_vulkan() {
    for layers in ["99", "2"] {
        let arguments = ["--no-warmup", LAYERS_ON_GPU, layers];
        swaps(
            &fixture("small.gguf"),
            &[&fixture("small-mixed.gguf")],
            &arguments,
        );
    }
}

#[test]
fn a_swap_is_done_while_requests_run() {
    let (_folder, path) = copied("smollm2.gguf");
    let server = start(&path, MAPPED, DropIn::with(&[]));
    answers(&server);
    let evaluations = || server.control("status")["evaluations"].as_u64();
    std::thread::scope(|scope| {
        let long = |slot| Request {
            tokens: 150,
            ..request(slot)
        };
        let server = &server;
        let busy = [0, 1].map(|slot| scope.spawn(move || server.complete(&long(slot))));
        let begun = evaluations();
        while evaluations() == begun {
            assert!(busy.iter().any(|of| !of.is_finished()), "busy at no time");
            std::thread::yield_now();
        }
        replace(&path, &fixture("smollm2-mixed.gguf"));
        assert_eq!(taken(&server.control("reload")), (8, 0));
        for of in busy {
            assert!(!of.join().expect("an answer").text.is_empty());
        }
    });
    assert_eq!(
        answers(&server),
        fresh(&fixture("smollm2-mixed.gguf"), MAPPED)
    );
    end(server);
}

/// The activations of each layer, and the tokens of the first.
fn traced(server: &Server) -> (Vec<u64>, u64) {
    let trace = &server.control("trace")["traces"][0];
    let number = |of: &Value| of.as_u64().expect("a count");
    let layers = trace["layers"].as_array().expect("layers");
    let sum = |layer: &Value| {
        let counts = layer["counts"].as_array().expect("counts");
        counts.iter().map(number).sum()
    };
    (
        layers.iter().map(sum).collect(),
        number(&layers[0]["tokens"]),
    )
}

#[test]
fn all_activations_are_counted() {
    let expected = fresh(&fixture("moe.gguf"), MAPPED);
    // The last token of an answer is not evaluated.
    let evaluated: u64 = expected.iter().map(|of| of.evaluated).sum();
    let tokens = evaluated + (SLOTS * (TOKENS - 1)) as u64;
    let mut counted = Vec::new();
    for arguments in [MAPPED, READ, &["--no-warmup", "-no-fmoe"]] {
        let server = start(
            &fixture("moe.gguf"),
            arguments,
            DropIn::with(&[("LLAMA_EXPERT_TRACE_STATS", "1")]),
        );
        // It evaluates two tokens at the start.
        assert_eq!(server.control("trace-reset")["ok"], true);
        answers(&server);
        let (activations, first) = traced(&server);
        assert_eq!(first, tokens, "{arguments:?}");
        let (last, others) = activations.split_last().expect("layers");
        assert!(
            others.iter().all(|count| *count == 2 * tokens),
            "{activations:?}"
        );
        // In the last layer only the tokens of which a result is wanted are evaluated.
        assert!(*last >= 2 * (SLOTS * TOKENS) as u64, "{activations:?}");
        counted.push(activations);
        end(server);
    }
    assert!(counted.iter().all(|of| *of == counted[0]), "{counted:?}");
}

#[test]
fn weights_that_are_merged_or_repacked_at_load_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let latent = folder.path().join("latent.gguf");
    Mixture::Latent.write(&latent).expect("free space");
    for (option, model, weight) in [
        ("-rtr", fixture("smollm2-one-q8_0.gguf"), "blk."),
        ("-mqkv", fixture("smollm2.gguf"), "blk.0.attn_qkv.weight"),
        ("-mqkv", latent.clone(), "attn_qk_a_mqa.weight"),
        ("-muge", latent, "ffn_gate_up_exps.weight"),
    ] {
        let path = folder.path().join("model.gguf");
        replace(&path, &model);
        let server = start(&path, &["--no-warmup", option], DropIn::with(&[]));
        let before = answers(&server);
        let said = server.logged("hot-swap stays off: the program merged or repacked");
        assert_eq!(said.len(), 1, "{option}: {:?}", server.log());
        assert!(said[0].contains(weight), "{said:?}");
        // The same tensors with other bytes.
        let other = folder.path().join("other.gguf");
        std::fs::copy(&path, &other).expect("free space");
        let header = sidecar_core::gguf::GgufFile::open(&other, sidecar_core::gguf::Access::Read);
        let header = header.expect("a model").header;
        let tensor = header.find(c"token_embd.weight").expect("embeddings");
        hosts::exchange_blocks(&other, tensor);
        replace(&path, &other);
        let report = server.control("reload");
        assert_eq!(report["ok"], false, "{option}: {report}");
        assert!(report.to_string().contains("-rtr"), "{report}");
        assert_eq!(answers(&server), before, "{option}");
        end(server);
    }
}

#[test]
fn a_model_with_latent_attention_is_swapped_but_for_what_others_are_computed_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let [model, variant, experts, path] =
        ["a", "b", "c", "model"].map(|name| folder.path().join(format!("{name}.gguf")));
    Mixture::Latent.write(&model).expect("free space");
    Mixture::Latent
        .write_variant(1, &variant)
        .expect("free space");
    // Only matrices of experts differ.
    let mut gguf = Mixture::Latent.describe(0);
    let other = Mixture::Latent.describe(1);
    for (tensor, other) in gguf.tensors.iter_mut().zip(other.tensors) {
        if tensor.name.contains("_exps") {
            tensor.data = other.data;
        }
    }
    gguf.write(&experts).expect("free space");
    for arguments in [&["--no-warmup", "-mla", "3"], &["--no-warmup", "-mla", "1"]] {
        swaps(&model, &[&experts], arguments);
        replace(&path, &model);
        let server = start(
            &path,
            arguments,
            DropIn::with(&[("LLAMA_EXPERT_TRACE_STATS", "1")]),
        );
        let before = answers(&server);
        let (activations, tokens) = traced(&server);
        assert_eq!(activations.len(), Mixture::Latent.layers() as usize);
        assert_eq!(activations[0], tokens * u64::from(USED));
        replace(&path, &variant);
        let report = server.control("reload");
        assert_eq!(report["ok"], false, "{report}");
        assert!(report.to_string().contains("attn_kv_b.weight"), "{report}");
        assert_eq!(answers(&server), before);
        end(server);
    }
}

/// llama-perplexity, whose hot-swap of its own takes commands from a file.
struct Perplexity {
    child: Child,
    folder: tempfile::TempDir,
}

impl Perplexity {
    fn start(model: &Path, drop_in: &DropIn) -> Perplexity {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| std::fs::File::create(folder.path().join(name)).expect("a file");
        let mut command = Command::new(ik_llama_cpp("llama-perplexity"));
        command.arg("-m").arg(model).args(["-f", TEXT]);
        // It writes a log there.
        command.current_dir(folder.path());
        command.args([
            "-t",
            "1",
            "-c",
            "64",
            "-b",
            "64",
            "--chunks",
            "3",
            "--no-warmup",
        ]);
        drop_in.prepare(&mut command, &folder.path().join("socket"));
        if !matches!(drop_in, DropIn::Absent) {
            command.env(BOTH.0, BOTH.1);
            for (name, file) in [("CONTROL", "control"), ("STATUS", "status")] {
                let name = format!("LLAMA_HOTSWAP_{name}_FILE");
                command.env(name, folder.path().join(file));
            }
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(file("output"))
            .stderr(file("log"))
            .spawn()
            .expect("it starts");
        Perplexity { child, folder }
    }

    fn text(&self, name: &str) -> String {
        let bytes = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn wait_for(&mut self, status: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.text("status").starts_with(status) {
            let ended = self.child.try_wait().expect("a child");
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "not {status} but {} ({ended:?}): {}",
                self.text("status"),
                self.text("log")
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn send(&self, command: &str) {
        let beside = self.folder.path().join("beside");
        std::fs::write(&beside, command).expect("free space");
        std::fs::rename(beside, self.folder.path().join("control")).expect("the same folder");
    }

    /// The estimates of all rounds.
    fn estimates(&self) -> Vec<String> {
        let text = self.text("output") + &self.text("log");
        let lines = text.lines().filter_map(|line| {
            let at = line.find("Final estimate:")?;
            Some(line[at..].to_owned())
        });
        lines.collect()
    }

    fn end(&mut self) -> Vec<String> {
        let status = self.child.wait().expect("a child");
        assert!(status.success(), "{status}: {}", self.text("log"));
        self.estimates()
    }
}

impl Drop for Perplexity {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn rounds_of_its_perplexity_reload_with_the_drop_in() {
    let [model, mixed] = ["smollm2.gguf", "smollm2-mixed.gguf"].map(|name| {
        let estimates = Perplexity::start(&fixture(name), &DropIn::Absent).end();
        assert_eq!(estimates.len(), 1, "{estimates:?}");
        estimates[0].clone()
    });
    assert_ne!(model, mixed, "the variant shows");
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Perplexity::start(&path, &DropIn::with(&[]));
    host.wait_for("done 1");
    replace(&path, &fixture("smollm2-mixed.gguf"));
    host.send("reload 1\n");
    host.wait_for("done 2");
    replace(&path, &fixture("smollm2.gguf"));
    host.send("reload 2\n");
    host.wait_for("done 3");
    host.send("exit 3\n");
    assert_eq!(host.end(), [model.clone(), mixed, model]);
    let said = host.text("log");
    assert_eq!(said.matches("and the drop-in's works").count(), 1, "{said}");
}

#[test]
fn one_sentence_states_which_of_two_hot_swaps_works() {
    let (_folder, path) = copied("smollm2.gguf");
    let said = "and the drop-in's works: the program's calls of llama_reload_changed_tensors";
    let both = start(&path, MAPPED, DropIn::with(&[BOTH]));
    answers(&both);
    assert_eq!(both.logged(said).len(), 1, "{:?}", both.log());
    let status = both.control("status");
    let sentence = status["models"][0]["hotswaps"].as_str();
    assert!(sentence.is_some_and(|of| of.contains(said)), "{status}");
    // The server calls the function before it answers.
    replace(&path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(both.look("/health")["status"], "ok");
    let after = fresh(&fixture("smollm2-mixed.gguf"), MAPPED);
    assert_eq!(answers(&both), after);
    end(both);
    // As the wrapper sets it: the program's own stays off.
    let alone = start(&path, MAPPED, DropIn::with(&[]));
    answers(&alone);
    assert!(alone.logged(said).is_empty(), "{:?}", alone.log());
    let status = alone.control("status");
    assert!(status["models"][0]["hotswaps"].is_null(), "{status}");
    end(alone);
}

/// What the program's own hot-swap does without the drop-in; docs/programs.md has it as a table.
#[test]
fn its_own_hot_swap_as_a_peer() {
    type Found = Vec<Result<Answer, String>>;
    let folder = tempfile::tempdir().expect("a folder");
    let [model, mixed] = ["smollm2.gguf", "smollm2-mixed.gguf"].map(fixture);
    let same_type = other_bytes(folder.path(), "smollm2.gguf", c"blk.3.ffn_up.weight");
    let damaged = folder.path().join("half.gguf");
    half(&mixed, &damaged);
    let path = folder.path().join("model.gguf");
    let try_answers = |server: &Server| -> Found {
        let answers = (0..SLOTS).map(|slot| server.try_complete(&request(slot)));
        answers.collect()
    };
    let new = |model: &Path, arguments: &[&str]| -> Found {
        fresh(model, arguments).into_iter().map(Ok).collect()
    };
    // Answers after each of these files took the place of the model, one after the other.
    let own = |arguments: &[&str], files: &[&Path]| -> Vec<Found> {
        replace(&path, &model);
        let options = Options {
            drop_in: DropIn::Absent,
            variables: vec![(BOTH.0.into(), BOTH.1.into())],
            ..server(SLOTS)
        };
        let server = Server::start(&path, &with_arguments(options, arguments));
        assert_eq!(try_answers(&server), new(&model, arguments));
        let after = files.iter().map(|file| {
            replace(&path, file);
            // The server reloads before it answers.
            assert_eq!(server.look("/health")["status"], "ok");
            try_answers(&server)
        });
        after.collect()
    };
    // In a mapping: other bytes of the same type are not used, and what was swapped to another type
    // does not return.
    let [before, after] = [&model, &mixed].map(|file| new(file, MAPPED));
    assert_eq!(own(MAPPED, &[&same_type]), [before]);
    assert_eq!(own(MAPPED, &[&mixed, &model]), [after.clone(), after]);
    // In memory: both are used.
    let [before, after] = [&model, &mixed].map(|file| new(file, READ));
    let both = own(READ, &[&same_type, &mixed, &model]);
    assert_eq!(both, [new(&same_type, READ), after, before]);
    // After half a file, results are not a number.
    for arguments in [MAPPED, READ] {
        let after = own(arguments, &[&damaged]).swap_remove(0);
        assert!(after.iter().all(Result::is_err), "{after:?}");
    }
}
