//! The drop-in in a stand-in for libllama that does what no real host does on demand:
//! evaluations that stall or are aborted, and graphs that are freed first.

mod small;

use small::{folder, mixture, model, on, result, swap, with_tensor};
use testkit::host::{Host, Program};
use testkit::writer::F16;

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
