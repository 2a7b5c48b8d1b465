//! Post-fetch in unmodified hosts with a simulated GPU, and models whose graphs differ: biases of
//! experts, gate and up in one matrix, experts that all tokens use.

mod hosts;

use std::path::PathBuf;

use hosts::simulated::{
    DECODE, Setup, cached, cached_beside_cpu, offloaded, on, same_as_without, same_in_llama_server,
};
use hosts::{count, taken};
use serde_json::Value;
use testkit::host::replace;
use testkit::mixtures::{EXPERTS, Mixture, USED};
use testkit::sim_ggml::SimGgml;

/// Prompts, graphs that are used again, and decoding.
const COMMANDS: [&str; 6] = [
    "prompt 40",
    "prompt 64",
    "hashes 6",
    "prompt 64",
    "prompt 40",
    "hashes 6",
];

/// A model in a folder, which is removed with it, and how the host loads it.
struct Model {
    _folder: tempfile::TempDir,
    path: PathBuf,
    mixture: Mixture,
    option: Option<&'static str>,
}

impl Model {
    fn new(mixture: Mixture) -> Model {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        mixture.write(&path).expect("free space");
        Model {
            _folder: folder,
            path,
            mixture,
            option: None,
        }
    }

    fn option(mut self, option: &'static str) -> Model {
        self.option = Some(option);
        self
    }

    fn setup(&self, setup: Setup) -> Setup {
        let setup = setup.model(&self.path);
        match self.option {
            Some(option) => setup.option(option),
            None => setup,
        }
    }
}

/// Early copies do not change the logits.
fn early(model: &Model) {
    let mixture = model.mixture;
    let prompts = same_as_without(&model.setup(on()), &COMMANDS);
    assert_ne!(prompts.answers[0], prompts.answers[1], "{mixture:?}");
    assert!(count(&prompts.figures, "layers_ahead") > 0, "{mixture:?}");
    let decoding = same_as_without(&model.setup(on()).device(DECODE.0, DECODE.1), &COMMANDS);
    // All layers, for each prompt and token but the first prompt.
    let layers = count(&decoding.figures, "layers") + count(&decoding.figures, "layers_ahead");
    assert!(
        layers >= u64::from(mixture.layers()) * (COMMANDS.len() as u64 + 10 - 1),
        "{mixture:?}: {}",
        decoding.figures
    );
    for early in ["down", "all"] {
        let setup = model.setup(Setup::default().with("LLAMA_POSTFETCH_MODE", early));
        let without = setup.clone().with("LLAMA_POSTFETCH_SCRATCHPAD_MB", "1");
        let without = without.run(&COMMANDS);
        assert_eq!(
            count(&without.figures, "early_bytes"),
            0,
            "{}",
            without.figures
        );
        let with = setup.run(&COMMANDS);
        assert_eq!(with.answers, without.answers, "{mixture:?}, {early}");
        assert!(count(&with.figures, "early_bytes") > 0, "{}", with.figures);
        assert_eq!(with.figures["obstacle"], Value::Null);
    }
}

/// Experts that stay on the device do not change the logits.
fn slots(model: &Model) {
    let mixture = model.mixture;
    let expected = model.setup(offloaded()).run(&COMMANDS).answers;
    let mut misses = Vec::new();
    for mib in ["4", "auto"] {
        let checked = cached(mib).with("LLAMA_POSTFETCH_DEBUG", "1");
        let run = model.setup(checked).run(&COMMANDS);
        let figures = &run.figures;
        assert_eq!(run.answers, expected, "{mixture:?}, {mib} MiB");
        assert_eq!(figures["obstacle"], Value::Null);
        assert_eq!(count(figures, "mismatches"), 0);
        let slots = count(figures, "cache_slots");
        match mib {
            "auto" => assert_eq!(slots, u64::from(EXPERTS)),
            _ => assert!((USED.into()..EXPERTS.into()).contains(&slots), "{figures}"),
        }
        // Two texts of six tokens; the first prompt shows how the program copies.
        let layers = u64::from(mixture.layers());
        let found = count(figures, "cache_hits") + count(figures, "cache_misses");
        assert!(found >= 2 * 6 * layers * u64::from(USED), "{figures}");
        misses.push(count(figures, "cache_misses"));
    }
    assert!(misses[0] > misses[1], "{misses:?}");
    let run = model.setup(cached_beside_cpu("4")).run(&COMMANDS);
    let figures = &run.figures;
    assert_eq!(run.answers, expected, "{mixture:?}");
    let computes = model.option != Some(BIASES_ON_DEVICE);
    assert_eq!(count(figures, "cache_on_cpu") > 0, computes, "{figures}");
    let obstacle = figures["obstacle"].as_str();
    let said = obstacle.is_some_and(|of| of.contains("biases of its experts are not in host"));
    assert_eq!(said, !computes, "{obstacle:?}");
}

#[test]
fn biases_of_experts_and_early_copies() {
    early(&Model::new(Mixture::GptOss));
}

#[test]
fn biases_of_experts_and_slots() {
    slots(&Model::new(Mixture::GptOss));
}

/// What stays on the device, biases too, is dropped at a swap.
#[test]
fn swaps_of_biases_of_experts() {
    let commands = ["prompt 40", "hashes 6"];
    let folder = tempfile::tempdir().expect("a folder");
    let files = [0, 1].map(|variant| {
        let path = folder.path().join(format!("{variant}.gguf"));
        let written = Mixture::GptOss.write_variant(variant, &path);
        written.expect("free space");
        path
    });
    let expected = files
        .clone()
        .map(|file| offloaded().model(&file).run(&commands).answers);
    assert_ne!(expected[0], expected[1]);
    for setup in [
        cached("auto"),
        Setup::default().with("LLAMA_POSTFETCH_MODE", "all"),
    ] {
        let path = folder.path().join("model.gguf");
        replace(&path, &files[0]);
        let sim = SimGgml::new(&[]);
        let mut host = setup.start(&sim, &path);
        for round in 0..5 {
            for _ in 0..2 {
                let answers = commands.map(|command| host.ask(command));
                assert_eq!(answers[..], expected[round % 2], "round {round}");
            }
            replace(&path, &files[(round + 1) % 2]);
            assert_ne!(taken(&host.control("reload")), (0, 0));
        }
        let figures = &host.control("status")["post_fetch"];
        assert!(count(figures, "early_bytes") > 0, "{figures}");
        assert_eq!(host.end(), Some(0));
        sim.report().assert_ordered();
    }
}

/// An addition then follows its product in the same part of the graph, with the ids of experts.
const BIASES_ON_DEVICE: &str = r"on-cpu=_exps\.weight";

#[test]
fn biases_on_the_device_and_early_copies() {
    early(&Model::new(Mixture::GptOss).option(BIASES_ON_DEVICE));
}

#[test]
fn biases_on_the_device_and_slots() {
    slots(&Model::new(Mixture::GptOss).option(BIASES_ON_DEVICE));
}

#[test]
fn gate_and_up_in_one_matrix_and_early_copies() {
    early(&Model::new(Mixture::MergedGateUp));
}

#[test]
fn gate_and_up_in_one_matrix_and_slots() {
    slots(&Model::new(Mixture::MergedGateUp));
}

#[test]
fn shared_experts_and_early_copies() {
    early(&Model::new(Mixture::SharedExpert));
}

#[test]
fn shared_experts_and_slots() {
    slots(&Model::new(Mixture::SharedExpert));
}

#[test]
fn biases_of_experts_in_llama_server_from_source() {
    same_in_llama_server(&Model::new(Mixture::GptOss).path, &[], &[]);
}
