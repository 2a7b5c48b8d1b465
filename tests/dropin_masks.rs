//! Masks of experts in llama-server: what a new server computes with the pruned model, and what stays as it was.

mod hosts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hosts::servers::{PREFIX, end};
use hosts::{on, swap_request, taken};
use serde_json::{Value, json};
use sidecar_core::experts::Routing;
use sidecar_core::gguf::{Access, GgufFile, TensorInfo, open_model};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, built};
use testkit::mixtures::{GROUPS, Mixture};
use testkit::server::{Answer, Options, Request, Server};
use testkit::sim_ggml::SimGgml;
use testkit::writer::{Gguf, Kv, write_shards};

/// How a masked server compares with the pruned model.
#[derive(Clone, Copy, PartialEq)]
enum Same {
    /// Bit for bit: scores become weights one by one, or among the chosen experts.
    Bits,
    /// Except for rounding: a softmax adds as many numbers as a layer has experts, in another order, and so does ggml's
    /// product of a router whose number of rows is no multiple of four.
    Rounded,
}

/// Experts by layer.
type Experts = BTreeMap<u64, Vec<u64>>;

/// On the CPU, or on a simulated GPU.
fn options(sim: Option<&SimGgml>, drop_in: DropIn) -> Options {
    let mut options = Options {
        drop_in,
        ..Options::new(1)
    };
    if let Some(sim) = sim {
        options.variables = sim.variables().to_vec();
        let device = ["--device", "SIM0", "-ngl", "99"];
        options.arguments = device.map(str::to_owned).to_vec();
    }
    options
}

fn with_masks() -> DropIn {
    let variables = [
        ("LLAMA_EXPERT_MASKS", "1"),
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_SIDECAR_HOTSWAP", "0"),
    ];
    DropIn::On(
        variables
            .map(|(name, value)| (name, value.to_owned()))
            .to_vec(),
    )
}

fn answer(server: &Server) -> Answer {
    server.complete(&Request {
        cache_prompt: false,
        ..Request::new(PREFIX, 12)
    })
}

fn fresh(sim: Option<&SimGgml>, model: &Path) -> Answer {
    let server = Server::start(model, &options(sim, DropIn::Absent));
    let answer = answer(&server);
    end(server);
    answer
}

/// `llama-sidecar` with a file of experts.
fn with_experts(experts: &Experts, arguments: &[&str]) -> Output {
    let layers = experts.iter();
    let list: Vec<Value> = layers
        .map(|(layer, experts)| json!({"layer": layer, "experts": experts}))
        .collect();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), json!(list).to_string()).expect("free space");
    let path = file.path().to_str().expect("a name");
    let arguments = arguments
        .iter()
        .map(|&word| if word == "FILE" { path } else { word });
    Command::new(built("release/llama-sidecar"))
        .args(arguments)
        .output()
        .expect("the command starts")
}

fn mask(server: &Server, experts: &Experts) {
    let socket = server.socket().to_str().expect("a name");
    let output = with_experts(
        experts,
        &[
            "ctl",
            "mask",
            "--socket",
            socket,
            "--clear",
            "--experts",
            "FILE",
        ],
    );
    assert!(output.status.success(), "{output:?}");
}

/// Writes the model without these experts.
fn prune(model: &Path, experts: &Experts, to: &Path) {
    let (from, to) = (
        model.to_str().expect("a name"),
        to.to_str().expect("a name"),
    );
    let output = with_experts(experts, &["prune", from, "--experts", "FILE", "-o", to]);
    assert!(output.status.success(), "{output:?}");
}

/// How often each expert of each layer was used since the last call.
fn used(server: &Server) -> BTreeMap<u64, Vec<u64>> {
    let trace = server.control("trace");
    server.control("trace-reset");
    let layers = trace["traces"][0]["layers"].as_array().expect("layers");
    let number = |value: &Value| value.as_u64().expect("a number");
    let counts = |layer: &Value| {
        layer["counts"]
            .as_array()
            .expect("counts")
            .iter()
            .map(number)
            .collect()
    };
    layers
        .iter()
        .map(|layer| (number(&layer["layer"]), counts(layer)))
        .collect()
}

/// So many experts of each layer, from the most used one or from the least used one on; the same number in each group.
fn chosen(used: &BTreeMap<u64, Vec<u64>>, count: usize, groups: usize, most: bool) -> Experts {
    let of_group = |counts: &[u64], group: usize| {
        let each = counts.len() / groups;
        let mut all: Vec<usize> = (group * each..(group + 1) * each).collect();
        all.sort_by_key(|expert| counts[*expert]);
        if most {
            all.reverse();
        }
        all.truncate(count / groups);
        all.sort_unstable();
        all
    };
    let of_layer = |counts: &[u64]| {
        let experts = (0..groups).flat_map(|group| of_group(counts, group));
        experts.map(|expert| expert as u64).collect()
    };
    let layers = used.iter();
    layers
        .map(|(layer, counts)| (*layer, of_layer(counts)))
        .collect()
}

/// Masks experts in a server and compares with new servers of pruned models.
fn masks_are_pruned_models(sim: Option<&SimGgml>, model: &Path, cuts: &[usize], same: Same) {
    groups_are_pruned_models(sim, model, 1, cuts, same);
}

/// The same with a model whose experts are in so many groups.
fn groups_are_pruned_models(
    sim: Option<&SimGgml>,
    model: &Path,
    groups: usize,
    cuts: &[usize],
    same: Same,
) {
    let plain = fresh(sim, model);
    let server = Server::start(model, &options(sim, with_masks()));
    used(&server);
    assert_eq!(answer(&server), plain, "masks of zeros change nothing");
    let before = used(&server);
    let folder = tempfile::tempdir().expect("a folder");
    let pruned = folder.path().join("pruned.gguf");
    for &count in cuts {
        for most in [true, false] {
            let experts = chosen(&before, count, groups, most);
            mask(&server, &experts);
            let masked = answer(&server);
            let after = used(&server);
            for (layer, experts) in &experts {
                for expert in experts {
                    assert_eq!(
                        after[layer][*expert as usize], 0,
                        "layer {layer}, expert {expert}"
                    );
                }
            }
            assert!(
                !most || masked != plain,
                "the most used experts are missing"
            );
            prune(model, &experts, &pruned);
            let expected = fresh(sim, &pruned);
            let what = format!("{count} experts, most used: {most}");
            match same {
                Same::Bits => assert_eq!(masked, expected, "{what}"),
                Same::Rounded => {
                    let [one, two] = [&masked, &expected].map(first_logprob);
                    assert!((one - two).abs() < 0.2, "{what}: {one} {two}");
                }
            }
            std::fs::remove_file(&pruned).expect("a file");
        }
    }
    let reverted = server.control("revert");
    assert!(
        reverted["ok"] == true && reverted["unmasked"].as_u64() > Some(0),
        "{reverted}"
    );
    assert!(server.control("status")["frozen"] == false, "no hot-swap");
    assert_eq!(answer(&server), plain);
    end(server);
}

/// The log-probability of the first token.
fn first_logprob(answer: &Answer) -> f64 {
    let first = &answer.probabilities[0]["logprob"];
    first.as_f64().expect("a number")
}

fn written(mixture: Mixture, folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    mixture.write(&path).expect("free space");
    path
}

#[test]
fn a_mixture() {
    masks_are_pruned_models(None, &fixture("small-moe.gguf"), &[1, 3, 6], Same::Rounded);
}

#[test]
fn a_mixture_with_biases() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = written(Mixture::GptOss, folder.path());
    masks_are_pruned_models(None, &model, &[4, 16, 28], Same::Bits);
}

#[test]
fn a_mixture_with_gate_and_up_in_one_matrix() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = written(Mixture::MergedGateUp, folder.path());
    masks_are_pruned_models(None, &model, &[4, 16, 28], Same::Bits);
}

#[test]
fn a_mixture_with_groups_and_a_bias_for_the_choice() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = written(Mixture::Grouped, folder.path());
    let groups = GROUPS as usize;
    groups_are_pruned_models(None, &model, groups, &[4, 16, 20], Same::Bits);
    let sim = SimGgml::new(&[]);
    groups_are_pruned_models(Some(&sim), &model, groups, &[16], Same::Bits);
    sim.report().assert_ordered();
}

#[test]
fn a_mixture_with_a_shared_expert() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = written(Mixture::SharedExpert, folder.path());
    masks_are_pruned_models(None, &model, &[1, 8, 28], Same::Rounded);
}

#[test]
fn mixtures_on_a_simulated_gpu() {
    let folder = tempfile::tempdir().expect("a folder");
    for mixture in [Mixture::GptOss, Mixture::MergedGateUp] {
        let sim = SimGgml::new(&[]);
        let model = written(mixture, folder.path());
        masks_are_pruned_models(Some(&sim), &model, &[4, 28], Same::Bits);
        sim.report().assert_ordered();
    }
}

#[test]
fn a_mask_of_what_a_text_does_not_use_changes_nothing() {
    let model = fixture("small-moe.gguf");
    let server = Server::start(&model, &options(None, with_masks()));
    used(&server);
    let plain = answer(&server);
    let used = used(&server);
    let unused = |counts: &Vec<u64>| {
        let experts = (0..).zip(counts).filter(|(_, count)| **count == 0);
        experts.map(|(expert, _)| expert).collect::<Vec<u64>>()
    };
    let experts: Experts = used
        .iter()
        .map(|(layer, counts)| (*layer, unused(counts)))
        .collect();
    assert!(experts.values().any(|of| !of.is_empty()), "{used:?}");
    mask(&server, &experts);
    assert_eq!(answer(&server), plain);
    let status = server.control("status");
    let masked = status["models"][0]["masks"].as_array().expect("masks");
    assert_eq!(
        masked.len(),
        experts.values().filter(|of| !of.is_empty()).count()
    );
    end(server);
}

#[test]
fn shards_of_a_model_are_pruned_to_shards() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let mixture = Mixture::GptOss;
    let one = written(mixture, folder.path());
    // As GGUF-Tool-Suite has them: the first shard has no tensors.
    let mut first = mixture.describe(0);
    let tensors = std::mem::take(&mut first.tensors);
    let mut files = vec![first];
    files.extend(tensors.chunks(tensors.len().div_ceil(2)).map(|part| Gguf {
        tensors: part.to_vec(),
        ..Gguf::default()
    }));
    let shards = write_shards(folder.path(), files);

    let each = |layer: u64| (layer, vec![layer, layer + 7, 20, 31]);
    let experts: Experts = (0..mixture.layers().into()).map(each).collect();
    let (pruned, first) = (path("pruned-one.gguf"), path("pruned-00001-of-00003.gguf"));
    prune(&one, &experts, &pruned);
    // Any shard names the model, and either name the new one.
    prune(&shards[1], &experts, &first);
    prune(&shards[0], &experts, &path("again.gguf"));
    assert!(!path("again.gguf").exists());
    let of_shards = |name: &str| -> Vec<PathBuf> {
        let shard = |number| path(&format!("{name}-{number:05}-of-00003.gguf"));
        (1..=3).map(shard).collect()
    };
    let contents = |paths: &[PathBuf]| -> Vec<Vec<u8>> {
        let read = |path| std::fs::read(path).expect("a shard");
        paths.iter().map(read).collect()
    };
    let (shards_of_pruned, again) = (of_shards("pruned"), of_shards("again"));
    assert_eq!(contents(&shards_of_pruned), contents(&again));

    let tensors = |path: &Path| -> BTreeMap<String, Vec<u8>> {
        let files = open_model(path, Access::Read).expect("a model");
        let of_file = |file: &GgufFile| -> Vec<(String, Vec<u8>)> {
            let read = |info: &TensorInfo| {
                let name = file.header.name(info).to_string_lossy().into_owned();
                let mut bytes = vec![0; info.nbytes as usize];
                let read = file.source.read_at(&mut bytes, info.offset);
                read.expect("the bytes of a tensor");
                (format!("{name} {} {:?}", info.ty.name(), info.ne), bytes)
            };
            file.header.tensors.iter().map(read).collect()
        };
        files.iter().flat_map(of_file).collect()
    };
    // A shard of the new model has the tensors of the shard that it comes from.
    for (before, after) in shards.iter().zip(&shards_of_pruned) {
        let names = |path: &Path| -> Vec<String> {
            let file = GgufFile::open(path, Access::Read).expect("a shard");
            let infos = file.header.tensors.iter();
            let name = |info| file.header.name(info).to_string_lossy().into_owned();
            infos.map(name).collect()
        };
        assert_eq!(names(before), names(after));
    }
    assert!(
        tensors(&shards_of_pruned[2]) == tensors(&pruned),
        "other tensors than those of the model in one file"
    );
    assert_eq!(fresh(None, &first), fresh(None, &pruned));

    let refused = |to: &str, reason: &str| {
        let (from, to) = (shards[0].to_str().expect("a name"), path(to));
        let to = to.to_str().expect("a name");
        let output = with_experts(&experts, &["prune", from, "--experts", "FILE", "-o", to]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(reason),
            "{error}"
        );
    };
    refused(
        "new-00002-of-00003.gguf",
        "the model has 3 shards: name the first one, which ends in '-00001-of-00003.gguf'",
    );
    // One shard of an earlier model is there.
    for number in [1, 2] {
        std::fs::remove_file(&again[number]).expect("a shard");
    }
    refused("again.gguf", "never written over");
    assert!(!again[1].exists() && !again[2].exists());
}

#[test]
fn masks_that_cannot_be_are_refused() {
    let refused = |server: &Server, experts: &Experts, reason: &str| {
        let socket = server.socket().to_str().expect("a name");
        let output = with_experts(
            experts,
            &["ctl", "mask", "--socket", socket, "--experts", "FILE"],
        );
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(reason),
            "{error}"
        );
    };
    let of = |layer: u64, experts: &[u64]| Experts::from([(layer, experts.to_vec())]);
    let model = fixture("small-moe.gguf");
    let server = Server::start(&model, &options(None, with_masks()));
    let plain = answer(&server);
    refused(
        &server,
        &of(4, &[0]),
        "layer 4 has no router that can be masked: use 0, 1, 2, 3",
    );
    refused(&server, &of(0, &[8]), "layer 0 has no expert 8: use 0 to 7");
    let all = [0, 1, 2, 3, 4, 5, 6];
    refused(
        &server,
        &of(0, &all),
        "layer 0 would have 1 experts to choose from, and a token uses 2",
    );
    assert_eq!(answer(&server), plain);
    end(server);
    // llama.cpp chooses a group by its two best experts.
    let folder = tempfile::tempdir().expect("a folder");
    let grouped = written(Mixture::Grouped, folder.path());
    let server = Server::start(&grouped, &options(None, with_masks()));
    answer(&server);
    let single = [8, 9, 10, 11, 12, 13, 14];
    refused(
        &server,
        &of(0, &single),
        "layer 0 would have one expert in the group of experts 8 to 15",
    );
    mask(&server, &of(0, &single[..6]));
    end(server);
    let server = Server::start(&model, &options(None, on()));
    refused(&server, &of(0, &[1]), "start it with --expert-masks");
    end(server);
    let dense = Server::start(&fixture("small.gguf"), &options(None, with_masks()));
    answer(&dense);
    refused(
        &dense,
        &of(0, &[1]),
        "no router of this program can be masked",
    );
    let status = dense.control("status");
    assert!(
        status.to_string().contains("--expert-masks: no router"),
        "{status}"
    );
    end(dense);

    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().join("pruned.gguf");
    let pruned = |experts: &Experts, reason: &str| {
        let (from, to) = (
            model.to_str().expect("a name"),
            to.to_str().expect("a name"),
        );
        let output = with_experts(experts, &["prune", from, "--experts", "FILE", "-o", to]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(reason),
            "{error}"
        );
    };
    pruned(&of(0, &[1]), "llama.cpp has one number for all layers");
    pruned(&of(9, &[1]), "layer 9 has no experts");
    let each = |experts: &[u64]| {
        (0..4)
            .map(|layer| (layer, experts.to_vec()))
            .collect::<Experts>()
    };
    pruned(&each(&all), "layer 0 would have 1 experts to choose from");
    pruned(&each(&[8]), "layer 0 has no expert 8");
    assert!(!to.exists());
}

/// The C host, with masks and what else these variables set.
fn masking_host(model: &Path, variables: &[(&'static str, &str)]) -> Host {
    let masks = [
        ("LLAMA_EXPERT_MASKS", "1"),
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
    ];
    let drop_in = DropIn::with(&[&masks[..], variables].concat());
    let mut host = Host::start(Program::C, model, &drop_in);
    host.text(2);
    host
}

/// Masks experts of layer 0; returns the reason of a refusal.
fn refusal(host: &Host, experts: &[u32]) -> Option<String> {
    let masks = json!([{"layer": 0, "experts": experts}]);
    let answer = host.request(&json!({"cmd": "mask", "masks": masks}));
    answer["error"].as_str().map(str::to_owned)
}

#[test]
fn a_mask_leaves_as_many_experts_as_the_program_uses() {
    let model = fixture("small-moe.gguf");
    let file = GgufFile::open(&model, Access::Read).expect("a model");
    let key = format!("{}.expert_used_count", Routing::of([&file]).architecture);
    for used in [4, 1] {
        let number = format!("{key}={used}");
        let mut host = masking_host(&model, &[("HOST_OVERRIDE", &number)]);
        // A warm-up routes to all experts, and does not count.
        host.ask("warmup");
        let answer = host.request(&json!({"cmd": "mask"}));
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(error.contains("names no layer"), "{answer}");
        let most = 8 - used;
        let all: Vec<u32> = (0..8).collect();
        let reason = refusal(&host, &all[..most + 1]).expect("too many");
        let expected = format!(
            "would have {} experts to choose from, and a token uses {used}",
            used - 1
        );
        assert!(reason.contains(&expected), "{reason}");
        assert_eq!(refusal(&host, &all[..most]), None);
        host.control("trace-reset");
        host.text(12);
        let counts = &host.control("trace")["traces"][0]["layers"][0]["counts"];
        let counts: Vec<u64> = serde_json::from_value(counts.clone()).expect("counts");
        assert!(counts[..most].iter().all(|count| *count == 0), "{counts:?}");
        assert!(counts[most..].iter().all(|count| *count > 0), "{counts:?}");
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn a_number_of_experts_that_grows_after_a_mask_is_reported() {
    let mut host = masking_host(&fixture("small-moe.gguf"), &[]);
    let all: Vec<u32> = (0..8).collect();
    assert_eq!(refusal(&host, &all[..5]), None);
    let status = |host: &Host| host.control("status")["no_effect"].to_string();
    let sentence = "layer 0 would have 3 experts to choose from, and a token uses 4: leave more";
    assert!(!status(&host).contains("would have"), "{}", status(&host));
    assert_eq!(host.ask("use 4 2 4"), "set");
    host.text(2);
    assert!(status(&host).contains(sentence), "{}", status(&host));
    host.wait_logged(sentence, 1);
    // The largest number counts: another context may have it.
    assert_eq!(host.ask("use 4 4 2"), "set");
    host.text(2);
    assert!(refusal(&host, &all[..5]).is_some_and(|why| why.contains(sentence)));
    assert_eq!(refusal(&host, &all[..4]), None);
    assert!(!status(&host).contains("would have"), "{}", status(&host));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_number_of_experts_for_each_layer_is_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let mut described = Mixture::SharedExpert.describe(0);
    let mut keys = described.kvs.iter_mut();
    let used = keys.find(|(name, _)| name.ends_with(".expert_used_count"));
    used.expect("a key").1 = Kv::I32s(vec![4; 4]);
    described.write(&path).expect("free space");
    let host = masking_host(&path, &[]);
    let all: Vec<u32> = (0..29).collect();
    let reason = refusal(&host, &all).expect("too many");
    assert!(reason.contains("a token uses 4"), "{reason}");
    assert_eq!(refusal(&host, &all[..28]), None);
    assert_eq!(host.end(), Some(0));
    let each = |layer: u64| (layer, vec![1, 2, 3]);
    let pruned = folder.path().join("pruned.gguf");
    prune(&path, &(0..4).map(each).collect(), &pruned);
    let mut host = Host::start(Program::C, &pruned, &DropIn::Absent);
    host.text(2);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn what_ends_with_a_model_is_said_when_it_is_loaded_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    std::fs::copy(fixture("small-moe.gguf"), &model).expect("free space");
    let from = fixture("small-moe-mixed.gguf");
    let mut host = masking_host(&model, &[]);
    assert_eq!(refusal(&host, &[1]), None);
    let swap = swap_request(None, &[(".*ffn_down_exps.weight", &from)]);
    let (swapped, _) = taken(&host.request(&swap));
    assert!(swapped > 0);
    assert_eq!(host.ask("free"), "freed");
    let released = "no model is loaded: the program released it";
    for asleep in [
        refusal(&host, &[1]),
        host.request(&swap)["error"].as_str().map(str::to_owned),
    ] {
        let asleep = asleep.expect("a refusal");
        assert!(asleep.starts_with(released), "{asleep}");
    }
    let status = host.control("status");
    assert!(
        status["no_model"]
            .as_str()
            .is_some_and(|why| why.starts_with(released)),
        "{status}"
    );
    let stated = |host: &Host, part: &str| -> Vec<String> {
        let status = host.control("status");
        let found = status["no_effect"].as_array().into_iter().flatten();
        let sentences = found.filter_map(|found| found["sentence"].as_str());
        let of_part = sentences.filter(|of| of.contains(part));
        of_part.map(str::to_owned).collect()
    };
    let ended = |host: &Host| stated(host, "loaded it again");
    let asleep = |host: &Host| stated(host, "freed the model (asleep, or unloaded)").len();
    assert_eq!((asleep(&host), ended(&host).len()), (2, 0));
    host.ask(&format!("load {}", model.display()));
    host.text(2);
    assert_eq!(asleep(&host), 0);
    let found = ended(&host);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].contains("without the masks of 1 layer(s)"),
        "{found:?}"
    );
    assert!(found[1].contains("without 4 overlay(s)"), "{found:?}");
    assert_eq!(host.logged("loaded it again").len(), 2);
    // Requested again, they are there.
    assert_eq!(refusal(&host, &[1]), None);
    assert_eq!(ended(&host).len(), 1);
    assert_eq!(taken(&host.request(&swap)).0, swapped);
    assert_eq!(ended(&host), [""; 0]);
    assert_eq!(host.end(), Some(0));
}
