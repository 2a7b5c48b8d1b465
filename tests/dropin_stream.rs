//! Expert streaming in real hosts: the results are those of a program without it, experts are
//! read ahead, and whatever goes wrong leaves the program as it would be without streaming.
//!
//! Two tests need an emulated disk (FUSE) and a memory limit (control groups).

mod hosts;

use std::path::Path;

use hosts::{TOKENS, copied, counted_by_host, fresh, traced};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, Transcript, replace};
use testkit::memory_limit::MemoryLimit;
use testkit::slow_disk::{SlowDisk, Speed};

/// Streaming on, with these further variables.
fn streaming(more: &[(&'static str, &str)]) -> DropIn {
    let mut variables = vec![("LLAMA_EXPERT_STREAM", "on".to_owned())];
    variables.extend(
        more.iter()
            .map(|(name, value)| (*name, (*value).to_owned())),
    );
    DropIn::On(variables)
}

fn predicting() -> DropIn {
    streaming(&[("LLAMA_EXPERT_STREAM_PREDICT", "1")])
}

/// The figures of the first model.
fn figures(host: &Host) -> Value {
    host.control("status")["models"][0]["stream"].clone()
}

fn count(figures: &Value, name: &str) -> u64 {
    let count = figures[name].as_u64();
    count.unwrap_or_else(|| panic!("{name} is missing in {figures}"))
}

/// Writes a text twice, and returns it with the figures.
fn text(program: Program, model: &Path, drop_in: &DropIn) -> (Transcript, Value) {
    let mut host = Host::start(program, model, drop_in);
    let text = host.text(TOKENS);
    assert_eq!(host.text(TOKENS), text);
    let figures = figures(&host);
    assert_eq!(host.end(), Some(0));
    (text, figures)
}

fn same_in(program: Program, model: &str) -> Value {
    let model = fixture(model);
    let (text, figures) = text(program, &model, &streaming(&[]));
    assert_eq!(text, fresh(program, &model));
    // A prompt and then a token at a time: all layers are scheduled in each evaluation.
    assert!(
        count(&figures, "layers") >= 4 * 2 * TOKENS as u64,
        "{figures}"
    );
    assert!(count(&figures, "checked_bytes") > 0, "{figures}");
    figures
}

#[test]
fn node_writes_the_same() {
    same_in(Program::Node, "moe.gguf");
}

#[test]
fn python_writes_the_same() {
    same_in(Program::Python, "moe.gguf");
}

#[test]
fn c_writes_the_same_with_one_thread_and_with_two() {
    same_in(Program::C, "moe.gguf");
    same_in(Program::CTwoThreads, "moe.gguf");
}

#[test]
fn a_guess_changes_no_result() {
    let model = fixture("moe.gguf");
    let (text, figures) = text(Program::C, &model, &predicting());
    assert_eq!(text, fresh(Program::C, &model));
    // All layers but the first, for all tokens but the prompt.
    assert!(count(&figures, "guesses") > 0, "{figures}");
    assert!(count(&figures, "hits") > 0, "{figures}");
}

#[test]
fn layers_on_a_gpu_and_experts_on_the_cpu() {
    let gpu = Program::PythonVulkanExpertsOnCpu;
    let figures = same_in(gpu, "small-moe.gguf");
    assert!(count(&figures, "resident_bytes") > 0, "{figures}");
}

#[test]
fn some_layers_on_a_gpu() {
    let model = fixture("small-moe.gguf");
    let program = Program::NodeVulkan(2);
    let (text, figures) = text(program, &model, &streaming(&[]));
    assert_eq!(text, fresh(program, &model));
    assert!(count(&figures, "layers") >= 2 * TOKENS as u64, "{figures}");
}

#[test]
fn two_contexts_at_a_time() {
    let model = fixture("moe.gguf");
    let mut host = Host::start(Program::Python, &model, &streaming(&[]));
    let text = fresh(Program::Python, &model).ids;
    assert_eq!(
        host.ask(&format!("both {TOKENS}")),
        format!("{text} | {text}")
    );
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_model_can_be_freed_and_another_loaded() {
    let mut host = Host::start(Program::C, &fixture("moe.gguf"), &streaming(&[]));
    host.text(TOKENS);
    for name in ["smollm2.gguf", "moe-q8_0.gguf", "moe.gguf"] {
        assert_eq!(host.ask("free"), "freed");
        let path = fixture(name);
        assert_eq!(host.ask(&format!("load {}", path.display())), "loaded");
        let text = host.text(TOKENS);
        let streams = figures(&host) != Value::Null;
        assert_eq!(streams, name != "smollm2.gguf", "{name}");
        // Other kernels compute with experts that stay in the mapping.
        if name != "moe-q8_0.gguf" {
            assert_eq!(text, fresh(Program::C, &path), "{name}");
        }
    }
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_swapped_matrix_is_no_longer_read() {
    let (_folder, path) = copied("moe.gguf");
    let mut host = Host::start(Program::C, &path, &streaming(&[]));
    host.text(TOKENS);
    let before = count(&figures(&host), "checked_bytes");
    replace(&path, &fixture("moe-mixed.gguf"));
    let report = host.control("reload");
    assert_eq!(report["ok"], true, "{report}");
    let swapped = report["reports"][0]["tensors"].as_array().expect("a list");
    let is_expert = |tensor: &&Value| {
        tensor["name"]
            .as_str()
            .is_some_and(|name| name.contains("_exps"))
    };
    assert!(swapped.iter().any(|tensor| is_expert(&tensor)), "{report}");

    assert_eq!(
        host.text(TOKENS),
        fresh(Program::C, &fixture("moe-mixed.gguf"))
    );
    let after = count(&figures(&host), "checked_bytes") - before;
    assert!(after < before, "{after} bytes, {before} before the swap");

    replace(&path, &fixture("moe.gguf"));
    assert_eq!(host.control("reload")["ok"], true);
    assert_eq!(host.text(TOKENS), fresh(Program::C, &fixture("moe.gguf")));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn experts_are_counted_as_without_streaming() {
    let model = fixture("moe.gguf");
    let with = streaming(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::PythonCounting, &model, &with);
    host.text(TOKENS);
    let counted = counted_by_host(&mut host);
    let trace = host.control("trace");
    assert_eq!(traced(&trace["traces"][0]), counted);
    assert!(count(&figures(&host), "layers") > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn streaming_rests_while_all_experts_are_in_memory() {
    let model = fixture("moe.gguf");
    let auto = DropIn::On(vec![("LLAMA_EXPERT_STREAM", "auto".into())]);
    let mut host = Host::start(Program::C, &model, &auto);
    host.text(40);
    let first = figures(&host);
    assert_eq!(first["resting"], true, "{first}");
    host.text(TOKENS);
    let second = figures(&host);
    assert!(count(&second, "layers") > count(&first, "layers"));
    let checked = count(&second, "checked_bytes") - count(&first, "checked_bytes");
    assert!(checked < count(&first, "checked_bytes") / 10, "{second}");
    assert_eq!(host.end(), Some(0));
}

/// An emulated disk with a fixture, and a memory limit of `mb` more than a host needs; `None`,
/// with the reason in the output, where the machine allows neither.
fn small_memory(model: &str, mb: u64) -> Option<(SlowDisk, MemoryLimit)> {
    let speed = Speed {
        latency: std::time::Duration::from_micros(200),
        bandwidth: 1_000_000_000,
    };
    let made = SlowDisk::mount(&fixture(model), speed);
    let made = made.and_then(|disk| Ok((disk, MemoryLimit::new(mb << 20)?)));
    match made {
        Ok(made) => Some(made),
        Err(reason) => {
            println!("SKIPPED: {reason}");
            None
        }
    }
}

/// A host on an emulated disk, with little memory.
fn limited(disk: &SlowDisk, limit: &MemoryLimit, drop_in: &DropIn) -> Host {
    disk.read_ahead_kb(128).expect("a mounted disk");
    disk.drop_cache().expect("a file");
    Host::start_with(Program::C, &disk.path(), drop_in, |command| {
        limit.apply(command);
    })
}

#[test]
fn experts_are_read_ahead_under_a_memory_limit() {
    let Some((disk, limit)) = small_memory("moe.gguf", 200) else {
        return;
    };
    let model = fixture("moe.gguf");
    for with in [streaming(&[]), predicting()] {
        let mut host = limited(&disk, &limit, &with);
        let text = host.text(TOKENS);
        assert_eq!(text, fresh(Program::C, &model));
        let figures = figures(&host);
        assert!(count(&figures, "read_bytes") > 0, "{figures}");
        assert_eq!(figures["stopped"], false, "{figures}");
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn reads_that_fail_leave_the_program_as_it_is() {
    let Some((disk, limit)) = small_memory("moe.gguf", 200) else {
        return;
    };
    let model = fixture("moe.gguf");
    let mut host = limited(&disk, &limit, &streaming(&[]));
    host.text(2);
    // Every read of an expert that is read ahead fails; the program's own read comes after.
    let size = std::fs::metadata(&model).expect("a fixture").len();
    disk.fail(size / 2..size, 3);
    assert_eq!(host.text(TOKENS), fresh(Program::C, &model));
    assert_eq!(host.end(), Some(0));
}
