//! Hot-swap in llama-server from source, whose layers are on several simulated GPUs: what it answers is what a new
//! server with the same devices answers, and where a device is full the experts of a layer stay together.

mod hosts;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::path::{Path, PathBuf};

use hosts::servers::{PREFIX, end, speculate, with_arguments, with_draft};
use hosts::{copied, on, other_bytes, swap_request, taken};
use serde_json::Value;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, replace, request};
use testkit::mixtures::Mixture;
use testkit::server::{Answer, Options, Request, Server, quantize};
use testkit::sim_ggml::SimGgml;

/// Memory of the host that a simulated GPU can read.
const HOST: &str = "SIM_Host";

/// How a model is on devices.
#[derive(Clone, Copy)]
struct Split {
    devices: usize,
    mode: &'static str,
    arguments: &'static [&'static str],
}

/// Layers are on so many devices.
const fn layers(devices: usize) -> Split {
    Split {
        devices,
        mode: "layer",
        arguments: &[],
    }
}

/// Each matrix is on so many devices, by parts.
const fn tensors(devices: usize) -> Split {
    Split {
        mode: "tensor",
        ..layers(devices)
    }
}

fn options(sim: &SimGgml, split: Split, drop_in: DropIn) -> Options {
    let devices: Vec<String> = (0..split.devices).map(|at| format!("SIM{at}")).collect();
    // Of three devices, the last one has more than the output.
    let parts = ["1", "1,1", "1,1,2"][split.devices - 1];
    let devices = devices.join(",");
    let arguments = ["--device", &devices, "--tensor-split", parts, "-ngl", "99"];
    let arguments = [
        &arguments[..],
        &["--split-mode", split.mode],
        split.arguments,
    ]
    .concat();
    Options {
        arguments: arguments.into_iter().map(str::to_owned).collect(),
        variables: sim.variables().to_vec(),
        drop_in,
        ..Options::new(1)
    }
}

fn simulated(count: usize, settings: &[(&str, &str)]) -> SimGgml {
    let count = count.to_string();
    SimGgml::new(&[&[("SIM_GGML_DEVICES", &*count)], settings].concat())
}

/// A prompt, whose graph is made again, and tokens, whose graph is used again.
fn answer(server: &Server) -> Answer {
    server.complete(&Request {
        cache_prompt: false,
        ..Request::new(PREFIX, 12)
    })
}

/// What a server without the drop-in that is started with a file answers.
fn fresh(split: Split, model: &Path) -> Answer {
    let sim = simulated(split.devices, &[]);
    let server = Server::start(model, &options(&sim, split, DropIn::Absent));
    let answer = answer(&server);
    end(server);
    sim.report().assert_ordered();
    answer
}

/// The same model with all matrices in larger and in smaller types, and with other bytes.
struct Variants {
    folder: tempfile::TempDir,
    original: PathBuf,
    others: [PathBuf; 3],
}

impl Variants {
    /// Other bytes are those of one matrix.
    fn of(name: &str, tensor: &CStr) -> Variants {
        let folder = tempfile::tempdir().expect("a folder");
        let other = other_bytes(folder.path(), name, tensor);
        Variants::with(folder, fixture(name), other)
    }

    fn with(folder: tempfile::TempDir, original: PathBuf, other: PathBuf) -> Variants {
        let quantised = |ty: &str| {
            let path = folder.path().join(ty);
            quantize(&original, &path, ty, &["--pure"]);
            path
        };
        let others = [quantised("Q8_0"), quantised("Q4_0"), other];
        Variants {
            folder,
            original,
            others,
        }
    }

    fn dense() -> Variants {
        Variants::of("small.gguf", c"blk.1.ffn_up.weight")
    }

    fn mixture() -> Variants {
        Variants::of("small-moe.gguf", c"blk.1.ffn_up_exps.weight")
    }

    /// Other bytes are those of all tensors.
    fn written(mixture: Mixture) -> Variants {
        let folder = tempfile::tempdir().expect("a folder");
        let [original, other] = [0, 1].map(|variant| {
            let path = folder.path().join(format!("variant-{variant}"));
            mixture.write_variant(variant, &path).expect("free space");
            path
        });
        Variants::with(folder, original, other)
    }
}

/// The bytes of the model's tensors by buffer type.
fn loaded_bytes(server: &Server) -> BTreeMap<String, u64> {
    let status = server.control("status");
    let of_types = status["models"][0]["loaded_bytes"].as_object();
    let of_types = of_types.expect("buffer types").iter();
    let bytes = of_types.map(|(name, bytes)| (name.clone(), bytes.as_u64().expect("a number")));
    bytes.collect()
}

/// Swaps a model between files while it answers, and tries one that is cut off.
fn swaps_are_fresh_starts(split: Split, variants: &Variants) {
    let count = split.devices;
    let path = variants.folder.path().join("model.gguf");
    replace(&path, &variants.original);
    let original = fresh(split, &variants.original);
    let sim = simulated(count, &[]);
    let server = Server::start(&path, &options(&sim, split, on()));
    assert_eq!(answer(&server), original);
    let loaded = loaded_bytes(&server);
    assert!(
        (0..count).all(|number| loaded
            .keys()
            .any(|name| name.contains(&format!("SIM{number}")))),
        "{loaded:?}"
    );
    // The token embeddings may be on a device and in host memory.
    let file = std::fs::metadata(&path).expect("a model").len();
    assert!(
        (file / 10 * 9..file * 2).contains(&loaded.values().sum()),
        "{loaded:?}"
    );
    let swap = |file: &Path| {
        std::thread::scope(|scope| {
            let text = scope.spawn(|| server.complete(&Request::new(PREFIX, 60)));
            replace(&path, file);
            let report = server.control("reload");
            assert!(!text.join().expect("an answer").text.is_empty());
            report
        })
    };
    for other in &variants.others {
        let expected = fresh(split, other);
        assert_ne!(expected, original, "the variant shows");
        let report = swap(other);
        // One matrix can be on one device.
        let used = if taken(&report).0 > 1 { count } else { 0 };
        for place in (0..used).map(|number| format!("SIM{number}")) {
            assert!(report.to_string().contains(&place), "{place}: {report}");
        }
        assert_eq!(answer(&server), expected, "{}", other.display());
    }
    let cut = variants.folder.path().join("cut.gguf");
    let bytes = std::fs::read(&variants.others[0]).expect("a model");
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).expect("free space");
    let kept = answer(&server);
    let report = swap(&cut);
    assert_eq!(
        report["reports"][0]["files"][0]["cause"], "incomplete",
        "{report}"
    );
    assert_eq!(answer(&server), kept);
    assert_ne!(taken(&swap(&variants.original)).1, 0);
    assert_eq!(answer(&server), original);
    end(server);
    let report = sim.report();
    report.assert_ordered();
    assert!(report.calls("copy_tensor_async") > 0);
    for device in &report.devices {
        assert!(device.memory.peak > 1 << 20, "{:?}", device.memory);
        assert!(device.kernel_ns > 0);
    }
}

#[test]
fn layers_of_a_dense_model() {
    for devices in [2, 3] {
        swaps_are_fresh_starts(layers(devices), &Variants::dense());
    }
}

#[test]
fn layers_of_a_mixture() {
    for devices in [2, 3] {
        swaps_are_fresh_starts(layers(devices), &Variants::mixture());
    }
}

#[test]
fn layers_of_a_mixture_with_experts_in_host_memory() {
    let split = Split {
        arguments: &["--cpu-moe"],
        ..layers(2)
    };
    swaps_are_fresh_starts(split, &Variants::mixture());
}

/// ggml splits each matrix over the devices, by the type that it has.
#[test]
fn parts_of_a_dense_model() {
    for devices in [2, 3] {
        swaps_are_fresh_starts(tensors(devices), &Variants::dense());
    }
}

#[test]
fn parts_of_a_mixture() {
    for devices in [2, 3] {
        swaps_are_fresh_starts(tensors(devices), &Variants::mixture());
    }
}

#[test]
fn experts_with_biases() {
    for split in [layers(2), tensors(3)] {
        swaps_are_fresh_starts(split, &Variants::written(Mixture::GptOss));
    }
}

#[test]
fn experts_with_gate_and_up_in_one_matrix() {
    for split in [layers(3), tensors(2)] {
        swaps_are_fresh_starts(split, &Variants::written(Mixture::MergedGateUp));
    }
}

/// The layers of the target are on two devices, and the draft is on one of them.
#[test]
fn a_target_and_its_draft() {
    let start = |sim: &SimGgml, target: &Path, draft: &Path, drop_in: DropIn| {
        let options = with_draft(options(sim, layers(2), drop_in), draft);
        let draft = ["--spec-draft-device", "SIM1", "--spec-draft-ngl", "99"];
        Server::start(target, &with_arguments(options, &draft))
    };
    let expected = |target: &str, draft: &str| {
        let sim = simulated(2, &[]);
        let server = start(&sim, &fixture(target), &fixture(draft), DropIn::Absent);
        let answer = speculate(&server);
        end(server);
        answer
    };
    let (_folder, target) = copied("small-moe.gguf");
    let (_folder, draft) = copied("small.gguf");
    let sim = simulated(2, &[]);
    let server = start(&sim, &target, &draft, on());
    assert_eq!(speculate(&server), expected("small-moe.gguf", "small.gguf"));
    for (new_target, new_draft) in [
        ("small-moe.gguf", "small-mixed.gguf"),
        ("small-moe-mixed.gguf", "small-mixed.gguf"),
        ("small-moe-mixed.gguf", "small.gguf"),
    ] {
        replace(&target, &fixture(new_target));
        replace(&draft, &fixture(new_draft));
        let report = server.control("reload");
        let changed = |model: usize| {
            let count = |what: &str| report["reports"][model][what].as_u64();
            count("swapped") > Some(0) || count("returned") > Some(0)
        };
        assert!(changed(0) || changed(1), "{report}");
        assert_eq!(
            speculate(&server),
            expected(new_target, new_draft),
            "{report}"
        );
    }
    end(server);
    let report = sim.report();
    report.assert_ordered();
    assert!(report.replays > 0);
}

/// The last layer of the model drafts, in a context of its own.
#[test]
fn a_model_that_drafts_itself() {
    let variants = Variants::written(Mixture::Predicting);
    let path = variants.folder.path().join("model.gguf");
    replace(&path, &variants.original);
    let start = |sim: &SimGgml, model: &Path, drop_in: DropIn| {
        let options = options(sim, layers(2), drop_in);
        Server::start(
            model,
            &with_arguments(options, &["--spec-type", "draft-mtp"]),
        )
    };
    let expected = |model: &Path| {
        let sim = simulated(2, &[]);
        let server = start(&sim, model, DropIn::Absent);
        let answer = speculate(&server);
        end(server);
        assert!(answer["drafted"].as_u64() > Some(0), "{answer}");
        answer
    };
    let sim = simulated(2, &[]);
    let server = start(&sim, &path, on());
    assert_eq!(speculate(&server), expected(&variants.original));
    let mut of_draft = 0;
    for file in variants.others.iter().chain([&variants.original]) {
        replace(&path, file);
        let report = server.control("reload");
        assert_ne!(taken(&report), (0, 0), "{report}");
        of_draft += u64::from(report.to_string().contains("blk.4.nextn.eh_proj"));
        assert_eq!(speculate(&server), expected(file), "{report}");
    }
    // It has one type in the original and in the first variant.
    assert_eq!(of_draft, 3);
    end(server);
    let report = sim.report();
    report.assert_ordered();
    assert!(report.replays > 0);
}

/// Where the experts of each layer are that a reload or a swap has changed.
fn places(reply: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let tensors = reply["reports"][0]["tensors"].as_array().expect("a list");
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for tensor in tensors {
        let text = |name: &str| tensor[name].as_str().expect("a text").to_owned();
        let (name, place) = (text("name"), text("place"));
        if let Some((layer, _)) = name.split_once(".ffn_").filter(|_| name.contains("_exps")) {
            places.entry(layer.to_owned()).or_default().insert(place);
        }
    }
    places
}

/// Sets overlays of tensors and reverts those that match `revert`.
fn swap(server: &Server, revert: Option<&str>, tensor: Option<&str>, from: &Path) -> Value {
    let overlays: Vec<(&str, &Path)> = tensor.map(|tensor| (tensor, from)).into_iter().collect();
    let reply = request(server.socket(), &swap_request(revert, &overlays));
    assert_eq!(reply["ok"], true, "{reply}");
    reply
}

/// Memory of a device that has the mixture, and so many MiB more, of which 64 stay free.
fn memory_for(mib: u64) -> String {
    let sim = simulated(1, &[]);
    let server = Server::start(
        &fixture("small-moe.gguf"),
        &options(&sim, layers(1), DropIn::Absent),
    );
    answer(&server);
    end(server);
    (sim.report().devices[0].memory.peak.div_ceil(1 << 20) + mib).to_string()
}

/// The device has memory for the experts of one layer more.
#[test]
fn experts_of_a_layer_stay_together_where_a_device_is_full() {
    let variants = Variants::mixture();
    let (original, larger) = (&variants.original, &variants.others[0]);
    let expected = [original, larger].map(|file| fresh(layers(1), file));
    let path = variants.folder.path().join("model.gguf");
    replace(&path, original);
    let sim = simulated(1, &[("SIM_GGML_MEMORY_MB", &memory_for(92))]);
    let server = Server::start(&path, &options(&sim, layers(1), on()));
    assert_eq!(answer(&server), expected[0]);
    let only = |place: &str| BTreeSet::from([place.to_owned()]);

    replace(&path, larger);
    let report = server.control("reload");
    let all: Vec<BTreeSet<String>> = places(&report).into_values().collect();
    assert!(all.iter().all(|of| of.len() == 1), "{report}");
    assert!(
        all.contains(&only("SIM0")) && all.contains(&only(HOST)),
        "{report}"
    );
    assert_eq!(answer(&server), expected[1]);
    replace(&path, original);
    let report = server.control("reload");
    assert!(
        places(&report).values().all(|of| *of == only("SIM0")),
        "{report}"
    );
    assert_eq!(answer(&server), expected[0]);

    // One matrix of a layer that has no memory takes the others with it, and all return as soon as
    // there is some.
    let change = |revert: Option<&str>, tensor: Option<&str>| {
        let reply = swap(&server, revert, tensor, larger);
        (places(&reply), answer(&server), reply)
    };
    let (places, both, reply) = change(None, Some(r"blk\.0\.ffn_.*_exps.*"));
    assert_eq!(places["blk.0"], only("SIM0"), "{reply}");
    let (places, _, reply) = change(None, Some(r"blk\.1\.ffn_.*_exps.*"));
    assert_eq!(places["blk.1"], only(HOST), "{reply}");
    let (places, same, reply) = change(Some(r"blk\.1\..*"), None);
    assert_eq!((&places["blk.1"], same), (&only("SIM0"), both), "{reply}");
    let (places, with_down, reply) = change(None, Some(r"blk\.1\.ffn_down_exps.*"));
    assert_eq!(places["blk.1"], only(HOST), "{reply}");
    let tensors = reply["reports"][0]["tensors"].as_array().expect("a list");
    assert_eq!(tensors.len(), 3, "{reply}");
    let (places, _, reply) = change(Some(r"blk\.0\..*"), None);
    assert!(places.values().all(|of| *of == only("SIM0")), "{reply}");
    assert_eq!(places.len(), 2, "{reply}");
    let (_, same, _) = change(None, Some(r"blk\.0\.ffn_.*_exps.*"));
    assert_eq!(same, with_down);
    let (_, same, _) = change(Some(".*"), None);
    assert_eq!(same, expected[0]);
    end(server);
    sim.report().assert_ordered();
}

/// The device has memory for one variant beside the original: another one takes its memory, by way of the host's.
#[test]
fn a_variant_takes_the_memory_of_the_one_before() {
    let variants = Variants::mixture();
    let [larger, smaller, _] = &variants.others;
    let path = variants.folder.path().join("model.gguf");
    replace(&path, &variants.original);
    let bytes = std::fs::metadata(larger).expect("a model").len();
    let memory = memory_for(64 + bytes.div_ceil(1 << 20) + 2);
    let sim = simulated(1, &[("SIM_GGML_MEMORY_MB", &memory)]);
    let server = Server::start(&path, &options(&sim, layers(1), on()));
    answer(&server);
    for file in [larger, smaller, larger] {
        replace(&path, file);
        let report = server.control("reload");
        let places = places(&report);
        let on_device = BTreeSet::from(["SIM0".to_owned()]);
        assert!(places.values().all(|of| *of == on_device), "{report}");
        assert_eq!(answer(&server), fresh(layers(1), file), "{report}");
    }
    end(server);
    let report = sim.report();
    report.assert_ordered();
    assert!(report.first().memory.peak <= memory.parse::<u64>().expect("a number") << 20);
}

/// CUDA compares addresses and shapes before it replays a graph, but no types. Memory that one type had is given to
/// another one of the same size.
#[test]
fn no_graph_is_replayed_that_was_captured_with_another_type() {
    for (split, name) in [(layers(1), "small.gguf"), (tensors(2), "small.gguf")] {
        let folder = tempfile::tempdir().expect("a folder");
        let original = fixture(name);
        let [first, between, last] = ["Q4_0", "Q8_0", "IQ4_NL"].map(|ty| {
            let path = folder.path().join(ty);
            quantize(&original, &path, ty, &["--pure"]);
            path
        });
        let run = |captures: &str| {
            let sim = simulated(split.devices, &[("SIM_GGML_CAPTURE", captures)]);
            let server = Server::start(&original, &options(&sim, split, on()));
            let to = |file| swap(&server, None, Some(r"blk\.1\.ffn_up\.weight"), file);
            to(&first);
            let answer = || server.complete(&Request::new(PREFIX, 12));
            answer();
            to(&between);
            to(&last);
            // Of the prompt, only the last token is evaluated: no other graph comes between.
            let answer = answer();
            end(server);
            let report = sim.report();
            report.assert_ordered();
            (answer, report.replays)
        };
        let (expected, none) = run("0");
        let (found, replays) = run("1");
        assert!(none == 0 && replays > 0, "{none} {replays}");
        assert_eq!(found, expected);
    }
}

/// Each allocation of a reload fails once that may fail: what is answered is what a new server answers.
fn each_allocation_fails_once(split: Split, files: [&Path; 2], may_fail: fn(u64) -> bool) {
    let [original, larger] = files;
    let expected = [original, larger].map(|file| fresh(split, file));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let run = |failing: Option<u64>| {
        let fault = failing.map(|number| format!("alloc_buffer:{number}"));
        let faults = fault.as_deref().map(|fault| ("SIM_GGML_FAIL", fault));
        let sim = simulated(split.devices, &faults.into_iter().collect::<Vec<_>>());
        replace(&path, original);
        let server = Server::start(&path, &options(&sim, split, on()));
        assert_eq!(answer(&server), expected[0]);
        replace(&path, larger);
        let report = server.control("reload");
        assert_ne!(taken(&report), (0, 0), "{failing:?}: {report}");
        assert_eq!(answer(&server), expected[1], "{failing:?}: {report}");
        end(server);
        let report = sim.report();
        report.assert_ordered();
        assert_eq!(report.failed, u64::from(failing.is_some()));
        report.calls("alloc_buffer")
    };
    let loaded = {
        let sim = simulated(split.devices, &[]);
        let server = Server::start(original, &options(&sim, split, on()));
        answer(&server);
        end(server);
        sim.report().calls("alloc_buffer")
    };
    let all = run(None);
    assert!(all > loaded, "{loaded} of {all}");
    for number in (0..all - loaded).filter(|&number| may_fail(number)) {
        run(Some(loaded + 1 + number));
    }
}

#[test]
fn each_allocation_of_a_mixture_fails_once() {
    let variants = Variants::mixture();
    let files = [&*variants.original, &*variants.others[0]];
    each_allocation_fails_once(layers(2), files, |_| true);
}

/// Of each tensor, an allocation is tried on each of both devices before ggml's own, which end the process if they fail.
#[test]
fn each_allocation_that_is_tried_fails_once() {
    let files = ["small.gguf", "small-mixed.gguf"].map(fixture);
    let files = [&*files[0], &*files[1]];
    each_allocation_fails_once(tensors(2), files, |number| number % 4 < 2);
}
