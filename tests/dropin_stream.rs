//! Expert streaming in real hosts: the results are those of a program without it, experts are
//! read ahead, and whatever goes wrong leaves the program as it would be without streaming.
//!
mod hosts;

use hosts::{
    TOKENS, copied, count, counted_by_host, fresh, same_with_streaming, stream_figures,
    streamed_text, streaming, traced,
};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, replace};

fn predicting() -> DropIn {
    streaming(&[("LLAMA_EXPERT_STREAM_PREDICT", "1")])
}

#[test]
fn node_writes_the_same() {
    same_with_streaming(Program::Node, "moe.gguf");
}

#[test]
fn python_writes_the_same() {
    same_with_streaming(Program::Python, "moe.gguf");
}

#[test]
fn c_writes_the_same_with_one_thread_and_with_two() {
    same_with_streaming(Program::C, "moe.gguf");
    same_with_streaming(Program::CTwoThreads, "moe.gguf");
}

#[test]
fn a_guess_changes_no_result() {
    let model = fixture("moe.gguf");
    let (text, figures) = streamed_text(Program::C, &model, &predicting());
    assert_eq!(text, fresh(Program::C, &model));
    // All layers but the first, for all tokens but the prompt.
    assert!(count(&figures, "guesses") > 0, "{figures}");
    assert!(count(&figures, "hits") > 0, "{figures}");
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
        let streams = stream_figures(&host) != Value::Null;
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
    let before = count(&stream_figures(&host), "checked_bytes");
    replace(&path, &fixture("moe-mixed.gguf"));
    let report = host.control("reload");
    assert_eq!(report["ok"], true, "{report}");
    host.text(TOKENS);
    let after = count(&stream_figures(&host), "checked_bytes") - before;
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
    assert!(count(&stream_figures(&host), "layers") > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn streaming_rests_while_all_experts_are_in_memory() {
    let model = fixture("moe.gguf");
    let auto = DropIn::On(vec![("LLAMA_EXPERT_STREAM", "auto".into())]);
    let mut host = Host::start(Program::C, &model, &auto);
    host.text(40);
    let first = stream_figures(&host);
    assert_eq!(first["resting"], true, "{first}");
    host.text(TOKENS);
    let second = stream_figures(&host);
    assert!(count(&second, "layers") > count(&first, "layers"));
    let checked = count(&second, "checked_bytes") - count(&first, "checked_bytes");
    assert!(checked < count(&first, "checked_bytes") / 10, "{second}");
    assert_eq!(host.end(), Some(0));
}
