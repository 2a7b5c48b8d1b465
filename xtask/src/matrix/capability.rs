//! What the drop-in does in a host: each capability is a test of a host.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sidecar_core::gguf::{Access, GgufFile};

use serde_json::{Value, json};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, replace, taken};
use testkit::sim_ggml::SimGgml;

use super::running::{Evaluation, Running, TOKENS};
use super::subject::{ARM64, Gpu, Start, Subject};

/// A column of the table.
pub struct Capability {
    /// Its heading.
    pub title: &'static str,
    /// Why a host does not have it, if so.
    pub lacks: fn(&Subject) -> Option<&'static str>,
    /// Panics when a host with the drop-in does not do what it should.
    pub test: fn(&Subject),
}

/// All of them, in the order of the table.
pub const CAPABILITIES: [Capability; 10] = [
    Capability::new("idle", idle),
    Capability::new("hot-swap", swap),
    Capability::new("and back", swap_back),
    Capability::new("damaged file", damaged),
    Capability::new("overlays", overlay),
    Capability::new("expert trace", trace),
    Capability {
        title: "experts from disk",
        lacks: |subject| match subject {
            _ if subject.experts_on_gpu => {
                Some("experts in the memory of a GPU are not read from disk")
            }
            _ if subject.name == ARM64 => {
                Some("the emulator has no system call that counts cached pages")
            }
            _ => None,
        },
        test: stream,
    },
    Capability {
        title: "experts to a GPU",
        lacks: |subject| subject.no_gpu,
        test: post_fetch,
    },
    Capability {
        title: "own expert cache",
        lacks: |subject| match subject.has_own_cache {
            true => None,
            false => Some("the program has no option for llama.cpp's own expert cache"),
        },
        test: own_cache,
    },
    Capability {
        title: "several GPUs",
        lacks: |subject| match subject.split_modes {
            [] => Some("the program has no setting for several simulated GPUs"),
            _ => None,
        },
        test: several_gpus,
    },
];

impl Capability {
    const fn new(title: &'static str, test: fn(&Subject)) -> Capability {
        Capability {
            title,
            lacks: |_| None,
            test,
        }
    }
}

const MODEL: &str = "smollm2.gguf";
const VARIANT: &str = "smollm2-mixed.gguf";
const MIXTURE: &str = "moe.gguf";
/// Layers of the mixture.
const LAYERS: usize = 30;

/// A running host and the folder with its model.
struct Started {
    host: Box<dyn Running>,
    model: PathBuf,
    _folder: tempfile::TempDir,
}

impl Started {
    fn new(subject: &Subject, model: &str, drop_in: DropIn) -> Started {
        Started::with(subject, &fixture(model), drop_in, None)
    }

    /// With the drop-in and simulated GPUs.
    fn on_gpu(subject: &Subject, model: &Path, gpu: &SimGgml, used: Gpu) -> Started {
        Started::with(subject, model, DropIn::with(&[]), Some((gpu, used)))
    }

    fn with(
        subject: &Subject,
        model: &Path,
        drop_in: DropIn,
        gpu: Option<(&SimGgml, Gpu)>,
    ) -> Started {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        replace(&path, model);
        let host = subject.start(&Start {
            folder: folder.path(),
            model: &path,
            drop_in,
            gpu,
        });
        Started {
            host,
            model: path,
            _folder: folder,
        }
    }

    fn on(subject: &Subject, model: &str, variables: &[(&'static str, &str)]) -> Started {
        Started::new(subject, model, DropIn::with(variables))
    }

    /// Replaces the model and lets the drop-in look at it.
    fn reload(&self, by: &Path) -> Value {
        replace(&self.model, by);
        self.host.request(&json!({"cmd": "reload"}))
    }

    /// The result is what a new process computes with a fixture.
    fn computes_as(&mut self, subject: &Subject, fresh: &str) {
        let found = self.host.evaluate(None);
        assert_eq!(found, of_fresh(subject, fresh, &found));
    }
}

/// What a new process with a fixture computes in place of an evaluation.
fn of_fresh(subject: &Subject, fresh: &str, found: &Evaluation) -> Evaluation {
    let mut fresh = Started::on(subject, fresh, &[]);
    fresh.host.evaluate(Some(found.number))
}

fn idle(subject: &Subject) {
    let mut with = Started::new(subject, MODEL, DropIn::Idle);
    let mut without = Started::new(subject, MODEL, DropIn::Absent);
    let found = with.host.evaluate(None);
    assert!(!found.result.is_empty(), "no output");
    assert_eq!(found, without.host.evaluate(None));
}

fn swap(subject: &Subject) {
    let mut host = Started::on(subject, MODEL, &[]);
    let swapped = taken(&host.reload(&fixture(VARIANT)));
    assert!(swapped.0 > 0, "nothing was swapped");
    let found = host.host.evaluate(None);
    assert_ne!(found, of_fresh(subject, MODEL, &found), "the variant shows");
    assert_eq!(found, of_fresh(subject, VARIANT, &found));
}

fn swap_back(subject: &Subject) {
    let mut host = Started::on(subject, MODEL, &[]);
    let swapped = taken(&host.reload(&fixture(VARIANT))).0;
    assert_eq!(taken(&host.reload(&fixture(MODEL))), (0, swapped));
    host.computes_as(subject, MODEL);
}

fn damaged(subject: &Subject) {
    let mut host = Started::on(subject, MODEL, &[]);
    let half = host.model.with_extension("half");
    let bytes = fs::read(fixture(VARIANT)).expect("a fixture");
    fs::write(&half, &bytes[..bytes.len() / 2]).expect("free space");
    let reply = host.reload(&half);
    assert_ne!(reply["ok"], true, "{reply}");
    host.computes_as(subject, MODEL);
}

fn overlay(subject: &Subject) {
    let mut host = Started::on(subject, MODEL, &[]);
    let all = json!({"tensor": ".*", "from": fixture(VARIANT)});
    let reply = host
        .host
        .request(&json!({"cmd": "swap", "overlays": [all]}));
    assert!(taken(&reply).0 > 0, "{reply}");
    host.computes_as(subject, VARIANT);
}

fn trace(subject: &Subject) {
    let mut host = Started::on(subject, MIXTURE, &[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    host.computes_as(subject, MIXTURE);
    let reply = host.host.request(&json!({"cmd": "trace"}));
    let trace = &reply["traces"][0];
    let number = |of: &Value| of.as_u64().expect("a count");
    let used = number(&trace["experts_used"]);
    let layers = trace["layers"].as_array().expect("layers");
    assert_eq!(layers.len(), LAYERS, "{trace}");
    assert_eq!(layers[0]["tokens"], trace["tokens"]);
    for layer in layers {
        let counts = layer["counts"].as_array().expect("counts");
        let sum: u64 = counts.iter().map(number).sum();
        assert_eq!(sum, number(&layer["tokens"]) * used, "{layer}");
        // The last layer has only those of which a result is wanted.
        let least = if layer == &layers[LAYERS - 1] {
            1
        } else {
            TOKENS as u64
        };
        assert!(number(&layer["tokens"]) >= least, "{layer}");
    }
}

fn stream(subject: &Subject) {
    let mut host = Started::on(subject, MIXTURE, &[("LLAMA_EXPERT_STREAM", "on")]);
    host.computes_as(subject, MIXTURE);
    let status = host.host.request(&json!({"cmd": "status"}));
    let figures = &status["models"][0]["stream"];
    assert!(figures["checked_bytes"].as_u64() > Some(0), "{status}");
}

fn post_fetch(subject: &Subject) {
    let decode = [("GGML_OP_OFFLOAD_MIN_BATCH", "1")];
    let gpu = SimGgml::new(&decode);
    let early = DropIn::with(&[("LLAMA_POSTFETCH_MODE", "on")]);
    let used = Gpu::AllButExperts;
    let mut host = Started::with(subject, &fixture(MIXTURE), early, Some((&gpu, used)));
    let found = host.host.evaluate(None);
    let status = host.host.request(&json!({"cmd": "status"}));
    let figures = &status["post_fetch"];
    assert!(figures["early_bytes"].as_u64() > Some(0), "{status}");
    drop(host);
    let gpu = SimGgml::new(&decode);
    let mut without = Started::on_gpu(subject, &fixture(MIXTURE), &gpu, used);
    assert_eq!(found, without.host.evaluate(Some(found.number)));
}

/// A swap of experts to the same type, and back, while llama.cpp keeps experts on the GPU.
fn own_cache(subject: &Subject) {
    let folder = tempfile::tempdir().expect("a folder");
    let (original, variant) = (fixture(MIXTURE), folder.path().join("variant.gguf"));
    fs::copy(&original, &variant).expect("free space");
    exchange_experts(&variant);
    swap_on_gpus(
        subject,
        &[],
        Gpu::OwnCache,
        [&original, &variant],
        |host, _| {
            let status = host.request(&json!({"cmd": "status"}));
            let layers = &status["own_expert_cache"]["layers"];
            assert!(layers.as_u64() > Some(0), "{status}");
        },
    );
}

/// A swap, and a swap with the return, on two GPUs, divided in each way that the program has.
fn several_gpus(subject: &Subject) {
    let files = [MODEL, VARIANT].map(fixture);
    for &mode in subject.split_modes {
        let two = [("SIM_GGML_DEVICES", "2")];
        let files = [&*files[0], &*files[1]];
        swap_on_gpus(subject, &two, Gpu::Split(mode), files, |_, reply| {
            let reply = reply.to_string();
            for device in ["SIM0", "SIM1"] {
                assert!(reply.contains(device), "{mode}: {reply}");
            }
        });
    }
}

/// Swaps a model to a variant, and to the variant and back, in two processes on simulated GPUs; what they compute is
/// what new ones compute. `check` gets each host after its evaluation, and the reply to its last swap.
fn swap_on_gpus(
    subject: &Subject,
    settings: &[(&str, &str)],
    used: Gpu,
    [original, variant]: [&Path; 2],
    check: impl Fn(&dyn Running, &Value),
) {
    let results = [vec![variant], vec![variant, original]].map(|files| {
        let gpu = SimGgml::new(settings);
        let mut host = Started::on_gpu(subject, original, &gpu, used);
        let mut last = Value::Null;
        for &file in &files {
            last = host.reload(file);
            let (swapped, returned) = taken(&last);
            assert_eq!(swapped > 0, file == variant, "{last}");
            assert_eq!(returned > 0, file == original, "{last}");
        }
        let found = host.host.evaluate(None);
        check(&*host.host, &last);
        drop(host);
        let file = files.last().expect("a file");
        let gpu = SimGgml::new(settings);
        let mut fresh = Started::on_gpu(subject, file, &gpu, used);
        assert_eq!(found, fresh.host.evaluate(Some(found.number)), "{last}");
        found.result
    });
    assert_ne!(results[0], results[1], "the variant shows");
}

/// Lets the gate experts of two layers change places.
fn exchange_experts(path: &Path) {
    let gguf = GgufFile::open(path, Access::Read).expect("a model");
    let matrices = [c"blk.3.ffn_gate_exps.weight", c"blk.4.ffn_gate_exps.weight"];
    let places = matrices.map(|name| {
        let at = gguf.header.find(name).expect("a tensor of this name");
        let info = &gguf.header.tensors[at];
        let mut bytes = vec![0; info.nbytes as usize];
        gguf.source.read_at(&mut bytes, info.offset).expect("bytes");
        (info.offset, bytes)
    });
    let file = fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("a copy");
    let [(first, of_first), (second, of_second)] = places;
    file.write_all_at(&of_second, first).expect("free space");
    file.write_all_at(&of_first, second).expect("free space");
}
