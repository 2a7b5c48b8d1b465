//! The drop-in in a stand-in for libllama that does what no real host does on demand:
//! evaluations that stall or are aborted, graphs that are freed first, and models that are loaded at
//! once.

mod small;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use small::{folder, mixture, model, on, result, swap, with_tensor};
use testkit::fixtures::upstream_libraries;
use testkit::host::{Host, Program, built, control};
use testkit::process::{stopped, stopped_often};
use testkit::writer::{F16, Gguf};

/// Evaluates until the host's graph is known to be built again when needed.
fn settle(host: &mut Host, value: f32) {
    for _ in 0..4 {
        assert_eq!(host.ask("decode"), result(value));
    }
}

#[test]
fn a_graph_that_was_begun_before_a_swap_never_computes_with_old_weights() {
    for reserves in [true, false] {
        let (_folder, path) = folder(&model(1.0));
        let mut host = Host::start(Program::Small(reserves), &path, &on(&[]));
        settle(&mut host, 1.0);
        let report = swap(&host, &path, &model(2.0));
        assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
        assert_eq!(host.ask("decode"), result(2.0), "reserves: {reserves}");
        // A decode that stalls for longer than a graph takes to build counts as given up.
        host.tell("decode 4000");
        let report = swap(&host, &path, &model(3.0));
        assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
        assert_eq!(host.line(), "failed -1", "the kept graph mixes old and new");
        for _ in 0..3 {
            assert_eq!(host.ask("decode"), result(3.0));
        }
        assert_eq!(host.end(), Some(0));
    }
}

/// The first evaluation computes with what the profile has, or the profile is not in use and named.
#[test]
fn a_profile_is_set_before_the_first_evaluation_or_not_at_all() {
    let (folder, path) = folder(&model(1.0));
    let other = folder.path().join("other.gguf");
    model(2.0).replace(&other).expect("free space");
    let profile = folder.path().join("profile");
    let overlay = json!({"tensor": ".*", "from": other});
    let content = json!({"llama_sidecar": "profile", "overlays": [overlay]});
    std::fs::write(&profile, content.to_string()).expect("free space");
    let variable = [("LLAMA_SIDECAR_PROFILE", profile.to_str().expect("UTF-8"))];
    for (reserves, value, missing) in [(true, 2.0, 0), (false, 1.0, 1)] {
        let mut host = Host::start(Program::Small(reserves), &path, &on(&variable));
        settle(&mut host, value);
        let status = host.control("status");
        let found = status["no_effect"].as_array().map_or(0, Vec::len);
        assert_eq!(found, missing, "{status}");
        let named = status
            .to_string()
            .contains("without reserving memory first");
        assert_eq!(named, !reserves, "{status}");
        assert_eq!(host.end(), Some(0));
    }
}

/// A decode that was begun before a stop is not given up: the process did not run meanwhile.
#[test]
fn a_stop_of_the_process_does_not_count_as_a_stall() {
    const STOP: Duration = Duration::from_millis(1500);
    let (_folder, path) = folder(&model(1.0));
    let mut host = Host::start(Program::Small(true), &path, &on(&[]));
    settle(&mut host, 1.0);
    model(2.0).replace(&path).expect("free space");
    let (id, socket) = (host.id(), host.socket().to_owned());
    std::thread::scope(|scope| {
        // The stall ends some time after the stop, which is longer than a graph takes to build.
        host.tell(&format!("decode {}", STOP.as_millis() + 200));
        let reload = scope.spawn(|| control(&socket, "reload"));
        while control(&socket, "status")["waiting"].is_null() {
            assert!(!reload.is_finished(), "the decode has not ended");
        }
        stopped(id, || std::thread::sleep(STOP));
        assert_eq!(host.line(), result(1.0));
        let report = reload.join().expect("a report");
        assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
    });
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn tensors_are_swapped_while_the_process_is_stopped_again_and_again() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = Host::start(Program::Small(true), &path, &on(&[]));
    settle(&mut host, 1.0);
    let (id, socket) = (host.id(), host.socket().to_owned());
    let (_, stops) = stopped_often(id, || {
        for value in [2.0, 1.0, 3.0, 2.0, 1.0] {
            model(value).replace(&path).expect("free space");
            std::thread::scope(|scope| {
                let reload = scope.spawn(|| control(&socket, "reload"));
                let results = [1.0, 2.0, 3.0].map(result);
                while !reload.is_finished() {
                    let found = host.ask("decode");
                    assert!(results.contains(&found), "{found}");
                }
                let report = reload.join().expect("a report");
                assert_eq!(report["ok"], true, "{report}");
            });
            assert_eq!(host.ask("decode"), result(value));
        }
    });
    assert!(stops > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_host_that_frees_its_graph_before_its_scheduler_goes_on() {
    let (_folder, path) = folder(&mixture(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    for _ in 0..3 {
        host.ask("decode");
    }
    assert_eq!(host.ask("begin"), "begun");
    assert_eq!(host.ask("free"), "freed");
    let trace = &host.control("trace")["traces"][0];
    let tokens = trace["layers"][0]["tokens"].as_u64();
    assert_eq!(tokens, Some(4), "the last evaluation counts: {trace}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn an_evaluation_that_was_aborted_is_not_counted() {
    let (_folder, path) = folder(&mixture(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    host.ask("decode");
    assert!(host.ask("aborted").starts_with("failed"), "it is aborted");
    host.ask("decode");
    let trace = &host.control("trace")["traces"][0];
    assert_eq!(trace["layers"][0]["tokens"], 2, "{trace}");
    assert_eq!(host.end(), Some(0));
}

/// A callback of the program throws while ggml evaluates, and the program catches the exception.
#[test]
fn an_evaluation_that_an_exception_leaves_blocks_no_swap_and_is_not_counted() {
    let (_folder, path) = folder(&mixture(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    settle(&mut host, 1.0);
    assert_eq!(host.ask("throw"), "thrown");
    let report = swap(&host, &path, &mixture(2.0));
    assert_eq!(report["reports"][0]["swapped"], 2, "{report}");
    assert_eq!(host.ask("decode"), result(2.0));
    let trace = &host.control("trace")["traces"][0];
    assert_eq!(trace["layers"][0]["tokens"], 5, "{trace}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn layers_that_are_evaluated_and_not_counted_are_an_error() {
    let with_router = with_tensor(mixture(1.0), "blk.0.ffn_gate_inp.weight", &[64, 4], 1.0);
    let (_folder, path) = folder(&with_router);
    let metric = |host: &Host| {
        let text = host.control("metrics")["text"].to_string();
        let name = "llama_sidecar_expert_layers_uncounted{trace=\\\"1\\\"} ";
        let at = text.find(name).expect("a figure") + name.len();
        text[at..].chars().next()
    };
    for copies in [false, true] {
        let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
        let mut host = Host::start_with(Program::Small(true), &path, &with, |command| {
            command.envs(copies.then_some(("SMALL_COPIES_EXPERTS", "1")));
        });
        for _ in 0..3 {
            host.ask("decode");
        }
        let model = &host.control("status")["models"][0];
        let tokens = &host.control("trace")["traces"][0]["layers"][0]["tokens"];
        if copies {
            assert_eq!(model["uncounted"]["layers"][0], 0, "{model}");
            assert_eq!(model["uncounted"]["evaluations"], 3, "{model}");
            assert_eq!((tokens.as_u64(), metric(&host)), (Some(0), Some('1')));
        } else {
            assert_eq!(model.get("uncounted"), None, "{model}");
            assert_eq!((tokens.as_u64(), metric(&host)), (Some(3), Some('0')));
        }
        let log = host.keep_log();
        assert_eq!(host.end(), Some(0));
        let lines = log.lock().expect("no panic").clone();
        let names_them = |line: &String| line.contains("no expert of layers 0 was counted");
        assert_eq!(lines.iter().any(names_them), copies, "{lines:?}");
    }
}

/// Products with other ids in the same layer count, too, and a swap reaches them. What has a
/// place for one set of experts in a layer is refused by name.
#[test]
fn a_layer_with_several_ids_counts_each() {
    let (folder, path) = folder(&mixture(1.0));
    let output = |name: &str| folder.path().join(name).display().to_string();
    let (routes, saliency) = (output("routes.csv"), output("saliency.json"));
    let with = on(&[
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_EXPERT_TRACE_ROUTES", &routes),
        ("LLAMA_EXPERT_TRACE_SALIENCY", &saliency),
    ]);
    let mut host = Host::start_with(Program::Small(true), &path, &with, |command| {
        command.env("SMALL_ROUTES_TWICE", "1");
    });
    settle(&mut host, 1.0);
    let report = swap(&host, &path, &mixture(2.0));
    assert_eq!(report["reports"][0]["swapped"], 2, "{report}");
    assert_eq!(host.ask("decode"), result(2.0));
    let layer = host.control("trace")["traces"][0]["layers"][0].clone();
    assert_eq!(layer["counts"], json!([5, 10, 0, 5]), "{layer}");
    let status = host.control("status");
    for option in ["--expert-trace-routes", "--expert-trace-saliency"] {
        let refused = |of: &Value| {
            let sentence = of["sentence"].as_str().unwrap_or_default();
            sentence.starts_with(option)
                && sentence.contains("layer 0 reads several sets of experts")
        };
        let all = status["no_effect"].as_array().expect("a list");
        assert!(all.iter().any(refused), "{option}: {status}");
    }
    assert_eq!(host.end(), Some(0));
    assert!(!Path::new(&routes).exists());
}

#[test]
fn the_last_line_of_the_wrapper_names_layers_that_are_not_counted() {
    let with_router = with_tensor(mixture(1.0), "blk.0.ffn_gate_inp.weight", &[64, 4], 1.0);
    let (_folder, path) = folder(&with_router);
    let mut child = Command::new(built("release/llama-sidecar"))
        .args(["run", "--expert-trace-stats", "--"])
        .arg(built("hosts-c/small_host"))
        .args([upstream_libraries(), path])
        .env("SMALL_COPIES_EXPERTS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("piped");
    std::io::Write::write_all(&mut input, b"decode\ndecode\nend\n").expect("the host lives");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("llama-sidecar: error: "), "{text}");
    assert!(last.contains("no expert of layers 0 was counted"), "{text}");
    assert_eq!(output.status.code(), Some(0), "the status of the program");
}

#[test]
fn a_trace_of_a_model_without_experts_states_it() {
    let (_folder, path) = folder(&model(1.0));
    let with = on(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &with);
    host.ask("decode");
    let log = host.keep_log();
    assert_eq!(host.end(), Some(0));
    let lines = log.lock().expect("no panic").clone();
    let states_it = |line: &String| line.contains("no evaluated model has routed experts");
    assert!(lines.iter().any(states_it), "{lines:?}");
}

#[test]
fn a_type_that_the_kernel_does_not_take_is_refused_by_name() {
    let whole = with_tensor(model(1.0), "norm.weight", &[64], 1.0);
    let (_folder, path) = folder(&whole);
    let in_steps = [("LLAMA_SIDECAR_STAGING_MB", "1")];
    let mut host = Host::start(Program::Small(true), &path, &on(&in_steps));
    settle(&mut host, 1.0);
    let mut half = with_tensor(model(2.0), "norm.weight", &[64], 1.0);
    let one = 0x3c00u16.to_le_bytes();
    half.tensors[1].ty = F16;
    half.tensors[1].data = one.repeat(64);
    let report = swap(&host, &path, &half);
    let reason = report["reports"][0]["files"][0]["reason"].to_string();
    assert!(
        reason.contains("norm.weight") && reason.contains("f16"),
        "{report}"
    );
    assert_eq!(host.ask("decode"), result(1.0));
    // Nothing of such a file is taken, in however many steps it would be.
    assert_eq!(
        report["reports"][0]["files"][0]["cause"], "refused",
        "{report}"
    );
    // The same type with other bytes is taken.
    let twice = with_tensor(model(1.0), "norm.weight", &[64], 2.0);
    let report = swap(&host, &path, &twice);
    assert_eq!(report["reports"][0]["swapped"], 1, "{report}");
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}

/// A graph that reads a weight which is from no file, perhaps a copy of one: a swap would leave it as
/// it is.
#[test]
fn a_weight_that_is_from_no_file_refuses_swaps_by_its_name() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = Host::start(Program::Small(true), &path, &on(&[]));
    settle(&mut host, 1.0);
    assert_eq!(swap(&host, &path, &model(2.0))["reports"][0]["swapped"], 1);
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.ask("derive w.weight.repacked"), "derived");
    assert_eq!(host.ask("decode"), result(2.0));
    for refused in [model(3.0), model(1.0)] {
        let report = swap(&host, &path, &refused);
        let reason = report["reports"][0]["files"][0]["reason"].to_string();
        assert!(reason.contains("w.weight.repacked"), "{report}");
        assert_eq!(host.ask("decode"), result(2.0));
    }
    let status = host.control("status");
    let obstacle = status["models"][0]["obstacle"].as_str();
    assert!(
        obstacle.is_some_and(|text| text.contains("w.weight.repacked")),
        "{status}"
    );
    let no_effect = &status["no_effect"][0];
    assert_eq!(no_effect["requested"], "hot-swap", "{status}");
    assert_eq!(no_effect["so_far"], false, "{status}");
    assert_eq!(host.end(), Some(0));
}

/// A swap changes the weight, and not a view that has memory already.
#[test]
fn a_view_that_the_program_keeps_refuses_swaps_of_its_weight() {
    let (_folder, path) = folder(&model(1.0));
    let drop_in = on(&[("SMALL_KEEPS_VIEW", "1")]);
    let mut host = Host::start(Program::Small(true), &path, &drop_in);
    settle(&mut host, 1.0);
    let report = swap(&host, &path, &model(2.0));
    assert_eq!(report["ok"], false, "{report}");
    let refused = "the program keeps views of it";
    assert!(report.to_string().contains(refused), "{report}");
    settle(&mut host, 1.0);
    assert_eq!(host.end(), Some(0));
}

/// An adapter is from a file of its own.
#[test]
fn an_adapter_refuses_no_swap() {
    let (_folder, path) = folder(&model(1.0));
    let mut host = Host::start(Program::Small(true), &path, &on(&[]));
    settle(&mut host, 1.0);
    assert_eq!(host.ask("derive w.weight.lora_a"), "derived");
    assert_eq!(host.ask("decode"), result(1.0));
    assert_eq!(swap(&host, &path, &model(2.0))["reports"][0]["swapped"], 1);
    assert_eq!(host.ask("decode"), result(2.0));
    assert_eq!(host.end(), Some(0));
}

/// Two models that a host loads beside another one, at once.
struct Two {
    host: Host,
    paths: [PathBuf; 2],
    _folders: [tempfile::TempDir; 3],
}

impl Two {
    /// `how` is the way in which their tensors get memory; see `hosts/c/small_host.c`.
    fn load(how: &str, models: [&Gguf; 2]) -> Two {
        let (first_folder, path) = folder(&model(1.0));
        let mut host = Host::start(Program::Small(true), &path, &on(&[TRACE]));
        settle(&mut host, 1.0);
        let (a_folder, a) = folder(models[0]);
        let (b_folder, b) = folder(models[1]);
        let command = format!("two {how} {} {}", a.display(), b.display());
        assert_eq!(host.ask(&command), "loaded");
        Two {
            host,
            paths: [a, b],
            _folders: [first_folder, a_folder, b_folder],
        }
    }

    /// Evaluates one of them, until its graph is known to be built again when needed.
    fn evaluate(&mut self, number: usize, value: f32) {
        assert_eq!(self.host.ask(&format!("use {number}")), "used");
        settle(&mut self.host, value);
    }

    fn status_of(&self, path: &Path) -> Value {
        let status = self.host.control("status");
        let models = status["models"].as_array().expect("a list");
        let of = models
            .iter()
            .find(|model| model["files"][0].as_str() == path.to_str());
        of.unwrap_or_else(|| panic!("no model of {}: {status}", path.display()))
            .clone()
    }
}

const TRACE: (&str, &str) = ("LLAMA_EXPERT_TRACE_STATS", "1");
const PLACEMENTS: [&str; 3] = ["mapped", "read", "by-opener"];

#[test]
fn models_that_are_loaded_at_once_are_swapped_each_with_its_file() {
    for how in PLACEMENTS {
        let mut two = Two::load(how, [&model(2.0), &model(3.0)]);
        two.evaluate(1, 2.0);
        two.evaluate(2, 3.0);
        let [a, b] = two.paths.clone();
        let report = swap(&two.host, &a, &model(5.0));
        assert_eq!(report["ok"], true, "{how}: {report}");
        two.evaluate(1, 5.0);
        two.evaluate(2, 3.0);
        let report = swap(&two.host, &b, &model(7.0));
        assert_eq!(report["ok"], true, "{how}: {report}");
        two.evaluate(2, 7.0);
        two.evaluate(1, 5.0);
        let report = swap(&two.host, &a, &model(2.0));
        assert_eq!(report["ok"], true, "{how}: {report}");
        two.evaluate(1, 2.0);
        two.evaluate(2, 7.0);
        assert_eq!(two.host.end(), Some(0));
    }
}

#[test]
fn experts_of_models_that_are_loaded_at_once_are_counted_each_for_its_file() {
    for how in PLACEMENTS {
        let mut two = Two::load(how, [&mixture(2.0), &mixture(3.0)]);
        two.evaluate(1, 2.0);
        two.evaluate(2, 3.0);
        two.evaluate(2, 3.0);
        let traces = two.host.control("trace");
        let tokens = |path: &Path| {
            let all = traces["traces"].as_array().expect("a list");
            let of = all
                .iter()
                .find(|trace| trace["model"]["files"][0]["path"].as_str() == path.to_str());
            of.and_then(|trace| trace["layers"][0]["tokens"].as_u64())
        };
        let counted = two.paths.each_ref().map(|path| tokens(path));
        assert_eq!(counted, [Some(4), Some(8)], "{how}: {traces}");
        assert_eq!(two.host.end(), Some(0));
    }
}

#[test]
fn models_with_the_same_bytes_are_told_from_each_other_or_refused_by_name() {
    for how in PLACEMENTS {
        let mut two = Two::load(how, [&model(2.0), &model(2.0)]);
        two.evaluate(1, 2.0);
        two.evaluate(2, 2.0);
        let [a, b] = two.paths.clone();
        let report = swap(&two.host, &a, &model(5.0));
        if how == "read" {
            // No thread, mapping or byte shows which file is whose.
            assert_eq!(report["ok"], false, "{report}");
            let refused =
                "\\\"w.weight\\\" may belong to any of them: load one model after the other";
            assert!(report.to_string().contains(refused), "{report}");
            two.evaluate(1, 2.0);
        } else {
            assert_eq!(report["ok"], true, "{how}: {report}");
            two.evaluate(1, 5.0);
        }
        two.evaluate(2, 2.0);
        for path in [a, b] {
            assert_eq!(two.status_of(&path)["tensors"], 1);
        }
        assert_eq!(two.host.end(), Some(0));
    }
}
