//! The drop-in in a real host with a GPU backend, on a software device: with all layers
//! there, with half of them, and with none while the device is still in the schedule.
//! A software device is slow, so the models have four layers.

mod hosts;

use std::path::Path;
use std::process::Command;

use hosts::{
    TOKENS, copied, count, counted_by_host, fresh, on, other_bytes, same_with_streaming, seen,
    streamed_text, streaming, swap_and_back, taken, traced,
};
use serde_json::{Value, json};
use sidecar_core::trace::{NOT_ROUTED, RouteReader, RouteRecord};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, replace};
use testkit::mixtures::Mixture;

#[test]
fn all_layers_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(99),
        "small.gguf",
        &fixture("small-mixed.gguf"),
        4,
    );
}

#[test]
fn half_of_the_layers_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(2),
        "small.gguf",
        &fixture("small-mixed.gguf"),
        4,
    );
}

#[test]
fn no_layer_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(0),
        "small.gguf",
        &fixture("small-mixed.gguf"),
        4,
    );
}

#[test]
fn experts_on_the_device() {
    swap_and_back(
        Program::NodeVulkan(99),
        "small-moe.gguf",
        &fixture("small-moe-mixed.gguf"),
        4,
    );
}

/// The first evaluation computes with what the profile has.
#[test]
fn a_profile_on_the_device() {
    let (folder, path) = copied("small.gguf");
    let profile = folder.path().join("profile");
    let overlay = json!({"tensor": ".*", "from": fixture("small-mixed.gguf")});
    let content = json!({"llama_sidecar": "profile", "overlays": [overlay]});
    std::fs::write(&profile, content.to_string()).expect("free space");
    for program in [Program::NodeVulkan(99), Program::NodeVulkan(2)] {
        let variable = ("LLAMA_SIDECAR_PROFILE", profile.display().to_string());
        let mut host = Host::start(program, &path, &DropIn::On(vec![variable]));
        let after = fresh(program, &fixture("small-mixed.gguf"));
        assert_eq!(host.text(TOKENS), after, "{program:?}");
        assert_eq!(host.end(), Some(0));
    }
}

/// Variants change matrices of the first device and of the second. One device shows twice: each has memory and queues of
/// its own.
#[test]
fn layers_on_two_devices() {
    let program = Program::NodeVulkanDevices(2);
    let mixed = fixture("small-moe-mixed.gguf");
    swap_and_back(program, "small-moe.gguf", &mixed, 4);
    let folder = tempfile::tempdir().expect("a folder");
    let last = other_bytes(folder.path(), "small.gguf", c"blk.3.ffn_up.weight");
    swap_and_back(program, "small.gguf", &last, 1);
    let (_folder, path) = copied("small.gguf");
    let mut host = Host::start(program, &path, &on());
    host.text(4);
    for (variant, device) in [
        (&fixture("small-mixed.gguf"), "Vulkan0"),
        (&last, "Vulkan1"),
    ] {
        replace(&path, variant);
        let report = host.control("reload").to_string();
        assert!(report.contains(device), "{report}");
    }
    assert_eq!(host.end(), Some(0));
}

/// Steps of one text with swaps between them; the hash of each.
fn steps_with_swaps(layers: u32, with: DropIn) -> (Vec<String>, u64) {
    let (_folder, path) = copied("small.gguf");
    let mut host = Host::start(Program::NodeVulkan(layers), &path, &with);
    let mut hashes = host.text(4).hashes;
    for name in ["small-mixed.gguf", "small.gguf", "small-one-q8_0.gguf"] {
        replace(&path, &fixture(name));
        assert_eq!(host.control("reload")["ok"], true);
        hashes.extend(host.steps("more", 4).hashes);
    }
    let renewed = host.control("status")["graphs_renewed"].as_u64();
    assert!(host.logged("it fails").is_empty());
    assert_eq!(host.end(), Some(0));
    (hashes, renewed.expect("a number"))
}

/// A graph is kept from token to token and rebuilt after a switch. The logits are those of a
/// host that rebuilds each graph.
#[test]
fn a_kept_graph_is_built_again() {
    for layers in [99, 2] {
        let (kept, renewed) = steps_with_swaps(layers, on());
        let anew = DropIn::On(vec![("LLAMA_GRAPH_REUSE_DISABLE", "1".into())]);
        let (built, _) = steps_with_swaps(layers, anew);
        assert_eq!(kept, built);
        // Once to see that it works, and once for each of three switches.
        assert_eq!(renewed, 4);
    }
}

/// Swaps come while a text is being written.
#[test]
fn swaps_in_the_middle_of_a_text() {
    let (_folder, path) = copied("small.gguf");
    let files = [fixture("small.gguf"), fixture("small-mixed.gguf")];
    let program = Program::NodeVulkan(99);
    let after = fresh(program, &files[1]);
    let mut host = Host::start(program, &path, &on());
    host.text(4);
    for round in 1..=5 {
        host.tell("more 12");
        replace(&path, &files[round % 2]);
        let expected = if round % 2 == 1 { (4, 0) } else { (0, 4) };
        assert_eq!(taken(&host.control("reload")), expected);
        host.line();
    }
    assert_eq!(host.text(TOKENS), after);
    assert!(host.logged("it fails").is_empty());
    assert_eq!(host.end(), Some(0));
}

#[test]
fn experts_are_counted_as_the_host_counts_them() {
    let with = DropIn::On(vec![("LLAMA_EXPERT_TRACE_STATS", "1".into())]);
    let mut host = Host::start(
        Program::PythonCountingVulkan,
        &fixture("small-moe.gguf"),
        &with,
    );
    host.ask("text 4");
    host.ask("more 3");
    let expected = counted_by_host(&mut host);
    assert_eq!(expected.len(), 4);
    assert_eq!(traced(&host.control("trace")["traces"][0]), expected);
    assert_eq!(host.end(), Some(0));
}

/// Operations that a backend fuses stay fused, although their result is read.
#[test]
fn a_trace_leaves_every_bit_of_a_result() {
    let program = Program::NodeVulkan(99);
    let model = fixture("small-moe.gguf");
    let text = |variables: &[(&'static str, &str)]| {
        let variables = variables
            .iter()
            .map(|(name, value)| (*name, (*value).into()));
        let mut host = Host::start(program, &model, &DropIn::On(variables.collect()));
        let text = host.text(TOKENS);
        assert_eq!(host.end(), Some(0));
        text
    };
    assert_eq!(text(&[("LLAMA_EXPERT_TRACE_STATS", "1")]), text(&[]));
}

#[test]
fn routes_and_gate_weights_are_those_that_the_host_saw() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.routes");
    let with = DropIn::On(vec![
        ("LLAMA_EXPERT_TRACE_ROUTES", path.display().to_string()),
        ("LLAMA_EXPERT_TRACE_WEIGHTS", "1".into()),
    ]);
    let program = Program::PythonCountingVulkan;
    let model = fixture("small-moe.gguf");
    let mut host = Host::start_with(program, &model, &with, |command| {
        command.arg("gates");
    });
    host.ask("text 4");
    let (routes, gates) = (seen(&mut host, "routes"), seen(&mut host, "gates"));
    assert_eq!(host.end(), Some(0));
    let mut reader = RouteReader::open(&path).expect("routes");
    let mut found = vec![Vec::new(); 4];
    while let Some(record) = reader.read().expect("a valid file") {
        let RouteRecord::Rows {
            experts, weights, ..
        } = record
        else {
            panic!("{record:?}");
        };
        for (at, place) in experts.chunks(2).zip(weights.chunks(2)).enumerate() {
            if place.0[0] != NOT_ROUTED {
                found[at % 4].push((place.0.to_vec(), place.1.to_vec()));
            }
        }
    }
    for (layer, found) in found.into_iter().enumerate() {
        assert_eq!(found.len(), routes[&layer].len());
        for (token, (experts, weights)) in found.into_iter().enumerate() {
            let experts: Vec<f64> = experts.into_iter().map(f64::from).collect();
            assert_eq!(experts, routes[&layer][token], "{layer} {token}");
            let seen: Vec<f32> = gates[&layer][token].iter().map(|of| *of as f32).collect();
            assert_eq!(weights, seen, "{layer} {token}");
        }
    }
}

#[test]
fn layers_on_a_gpu_and_experts_on_the_cpu() {
    let gpu = Program::PythonVulkanExpertsOnCpu;
    let figures = same_with_streaming(gpu, "small-moe.gguf");
    assert!(count(&figures, "resident_bytes") > 0, "{figures}");
}

#[test]
fn some_layers_on_a_gpu() {
    let model = fixture("small-moe.gguf");
    let program = Program::NodeVulkan(2);
    let (text, figures) = streamed_text(program, &model, &streaming(&[]));
    assert_eq!(text, fresh(program, &model));
    assert!(count(&figures, "layers") >= 2 * TOKENS as u64, "{figures}");
}

/// Answers of a program on a GPU with its experts in host memory, without post-fetch and with it.
/// Each early copy is read back and compared.
fn same_with_post_fetch(smallest_batch: &str, commands: &[&str]) {
    let run = |early: &str| {
        let with = DropIn::On(vec![
            ("LLAMA_POSTFETCH_MODE", early.into()),
            ("LLAMA_POSTFETCH_DEBUG", "1".into()),
        ]);
        let set = |command: &mut Command| {
            command.env("GGML_OP_OFFLOAD_MIN_BATCH", smallest_batch);
        };
        let program = Program::PythonVulkanExpertsOnCpu;
        let mut host = Host::start_with(program, &fixture("small-moe.gguf"), &with, set);
        let answers: Vec<_> = commands.iter().map(|command| host.ask(command)).collect();
        let figures = host.control("status")["post_fetch"].clone();
        assert_eq!(host.end(), Some(0));
        (answers, figures)
    };
    let (expected, without) = run("off");
    assert!(without.is_null(), "{without}");
    let (found, figures) = run("on");
    println!("{figures}");
    assert_eq!(found, expected);
    assert!(figures["obstacle"].is_null(), "{figures}");
    assert!(count(&figures, "early_bytes") > 0, "{figures}");
    assert!(count(&figures, "left_out_bytes") > 0, "{figures}");
    assert_eq!(count(&figures, "mismatches"), 0, "{figures}");
}

/// Batches that llama.cpp itself offloads.
#[test]
fn experts_of_prompts_are_copied_early() {
    same_with_post_fetch("32", &["prompt 40", "prompt 64"]);
}

#[test]
fn experts_of_each_token_are_copied_early() {
    same_with_post_fetch("1", &["prompt 4", "hashes 3"]);
}

/// Experts that stay on the device, in graphs with biases of experts and with gate and up in one
/// matrix. From a batch of 1 on, the program itself has all of these operations there; it adds
/// biases in the kernel of their product.
#[test]
fn experts_that_stay_on_the_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let commands = ["prompt 40", "hashes 4", "prompt 40", "hashes 4", "text 6"];
    for mixture in [Mixture::GptOss, Mixture::MergedGateUp] {
        mixture.write(&path).expect("free space");
        let run = |mib: &str, misses: &str| {
            let with = DropIn::On(vec![
                ("LLAMA_POSTFETCH_CACHE_MB", mib.into()),
                ("LLAMA_POSTFETCH_CACHE_MISSES", misses.into()),
            ]);
            let set = |command: &mut Command| {
                command.env("GGML_OP_OFFLOAD_MIN_BATCH", "1");
            };
            let program = Program::PythonVulkanExpertsOnCpu;
            let mut host = Host::start_with(program, &path, &with, set);
            let answers = commands.map(|command| host.ask(command));
            let figures = host.control("status")["post_fetch"].clone();
            assert_eq!(host.end(), Some(0));
            (answers, figures)
        };
        let (expected, without) = run("0", "fetch");
        assert!(without.is_null(), "{without}");
        let (found, figures) = run("4", "fetch");
        assert_eq!(found, expected, "{mixture:?}");
        assert!(figures["obstacle"].is_null(), "{figures}");
        assert!(count(&figures, "cache_hits") > 0, "{figures}");
        // In slots for some experts, others take their place.
        let slots = count(&figures, "cache_slots") * u64::from(mixture.layers());
        assert!(count(&figures, "cache_misses") > slots, "{figures}");
        // The CPU has other kernels, so that the last bits differ, and the text is the same.
        let (found, figures) = run("4", "cpu");
        assert_eq!(found[4], expected[4], "{mixture:?}");
        assert_eq!(found[0], expected[0], "{mixture:?}");
        assert!(figures["obstacle"].is_null(), "{figures}");
        assert!(count(&figures, "cache_on_cpu") > 0, "{figures}");
    }
}

#[test]
fn masks_are_pruned_models_on_the_device() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    let mixture = Mixture::MergedGateUp;
    mixture.write(&model).expect("free space");
    let program = Program::PythonCountingVulkan;
    let with_masks = DropIn::On(vec![("LLAMA_EXPERT_MASKS", "1".to_owned())]);
    let hashes_of = |host: &mut Host| ["prompt 40", "hashes 4"].map(|command| host.ask(command));
    let hashes = |model: &Path| {
        let mut host = Host::start(program, model, &DropIn::Absent);
        let hashes = hashes_of(&mut host);
        assert_eq!(host.end(), Some(0));
        hashes
    };
    let mut host = Host::start(program, &model, &with_masks);
    let plain = hashes_of(&mut host);
    assert_eq!(plain, hashes(&model), "masks of zeros change nothing");
    // The first layer has no experts.
    let masks: Vec<Value> = (1..=mixture.layers())
        .map(|layer| json!({"layer": layer, "experts": [0, 5, 17 + layer, 31]}))
        .collect();
    let reply = host.request(&json!({"cmd": "mask", "masks": masks}));
    assert_eq!(reply["ok"], true, "{reply}");
    let masked = hashes_of(&mut host);
    let (list, pruned) = (
        folder.path().join("list"),
        folder.path().join("pruned.gguf"),
    );
    std::fs::write(&list, json!(masks).to_string()).expect("free space");
    let written = Command::new(testkit::host::built("release/llama-sidecar"))
        .arg("prune")
        .arg(&model)
        .arg("--experts")
        .arg(&list)
        .arg("-o")
        .arg(&pruned)
        .status();
    assert!(written.expect("it starts").success());
    assert_eq!(masked, hashes(&pruned));
    assert_ne!(masked, plain);
    host.control("revert");
    assert_eq!(hashes_of(&mut host), plain);
    assert_eq!(host.end(), Some(0));
}
