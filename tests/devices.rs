//! Tensors cut over devices, layers that move together, devices that are full.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use llama_sidecar::device::{Device, HostDevice};
use llama_sidecar::model::{Axis, Context, Layout, Model, Options, Placement, State};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sidecar_core::config;
use sidecar_core::reload::{Outcome, Report};
use support::Gpu;
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::host::link;
use testkit::writer::{F16, F32, Gguf, Q4_0, Q4_K, Q8_0};

/// A model on disk, the same model open, and the devices it is on.
struct Fixture {
    folder: TempDir,
    path: PathBuf,
    devices: Vec<Arc<Gpu>>,
    model: Arc<Model>,
    /// Stamps files with times of the past, each a second later: nothing has to
    /// settle before it is read.
    clock: SystemTime,
}

impl Fixture {
    fn new(file: &Gguf, placement: Placement, devices: usize, staging_bytes: u64) -> Fixture {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("model.gguf");
        file.write(&path).unwrap();
        let clock = SystemTime::now() - Duration::from_secs(1 << 20);
        stamp(&path, clock);
        let devices: Vec<Arc<Gpu>> = (0..devices)
            .map(|i| {
                Gpu::new(if i == 0 {
                    "host".into()
                } else {
                    format!("gpu{i}")
                })
            })
            .collect();
        let options = Options {
            hotswap: true,
            devices: devices
                .iter()
                .map(|gpu| gpu.clone() as Arc<dyn Device>)
                .collect(),
            placement,
            staging_bytes,
            ..Options::host()
        };
        Fixture {
            model: Arc::new(Model::open(&path, options).unwrap()),
            folder,
            path,
            devices,
            clock,
        }
    }

    fn replace_bytes(&mut self, bytes: &[u8]) {
        self.clock += Duration::from_secs(1);
        let beside = self.folder.path().join("beside");
        std::fs::write(&beside, bytes).unwrap();
        stamp(&beside, self.clock);
        std::fs::rename(beside, &self.path).unwrap();
    }

    fn replace(&mut self, file: &Gguf) {
        self.replace_bytes(&file.bytes());
    }

    fn room(&self, device: usize, bytes: u64) {
        self.devices[device].hold_at_most(bytes);
    }

    fn used(&self) -> Vec<u64> {
        self.devices.iter().map(|gpu| gpu.memory().used).collect()
    }

    fn bytes(&self, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.model.tensor(index).nbytes() as usize];
        self.model.read(index, 0, &mut bytes).unwrap();
        bytes
    }

    fn is(&self, index: usize, file: &Gguf) -> bool {
        let tensor = &file.tensors[index];
        self.model.tensor(index).ty().id == tensor.ty && self.bytes(index) == tensor.data
    }

    fn expect(&self, file: &Gguf) {
        for (index, tensor) in file.tensors.iter().enumerate() {
            assert!(self.is(index, file), "{}", tensor.name);
        }
    }

    /// Layouts as devices and units: what one compares by eye.
    fn parts(&self, index: usize) -> Vec<(usize, u64, u64)> {
        let parts = self.model.tensor(index).parts();
        parts
            .into_iter()
            .map(|p| (p.device, p.units.0, p.units.1))
            .collect()
    }
}

fn stamp(path: &Path, time: SystemTime) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(time).unwrap();
}

fn split(proportions: &str) -> Placement {
    Placement {
        device: 1,
        split: config::split(proportions).unwrap(),
        ..Placement::default()
    }
}

/// A layer of merged experts, a layer of single ones, and what else a model has. The
/// hidden layers have 512 units.
fn sample() -> Gguf {
    Gguf::default()
        .tensor("blk.0.ffn_gate_exps.weight", &[32, 512, 2], Q4_0, 1)
        .tensor("blk.0.ffn_up_exps.weight", &[32, 512, 2], Q4_0, 2)
        .tensor("blk.0.ffn_down_exps.weight", &[512, 32, 2], Q4_0, 3)
        .tensor("blk.1.ffn_gate_up_exps.weight", &[32, 1024, 2], Q8_0, 4)
        .tensor("blk.1.ffn_down.0.weight", &[512, 32], Q4_0, 5)
        .tensor("blk.1.ffn_down.1.weight", &[512, 32], Q4_0, 6)
        .tensor("blk.0.attn_q.weight", &[64, 96], Q4_0, 7)
        .tensor("blk.0.attn_norm.weight", &[64], F32, 8)
}

/// Tensors of each layer that must be laid out alike.
const LAYERS: [&[usize]; 2] = [&[0, 1, 2], &[3, 4, 5]];
const GATE: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;

fn with(file: &Gguf, index: usize, ty: u32, seed: u64) -> Gguf {
    let mut changed = file.clone();
    let old = &file.tensors[index];
    let made = Gguf::default().tensor(&old.name, &old.ne, ty, seed);
    changed.tensors[index] = made.tensors[0].clone();
    changed
}

fn outcome(report: &Report, index: usize) -> Option<Outcome> {
    let found = report.tensors.iter().find(|tensor| tensor.tensor == index);
    found.map(|tensor| tensor.outcome)
}

#[test]
fn every_kind_of_tensor_is_cut_and_put_together_again() {
    for proportions in ["1,1,1", "3,1,1", "0,1,2", "5,3,2"] {
        let it = Fixture::new(&sample(), split(proportions), 4, 0);
        it.expect(&sample());
        it.model.load(GATE).unwrap();
        let report = it.model.load_all(|_| true).unwrap();
        assert!(report.allocations <= 9);
        it.expect(&sample());
        assert_eq!(it.parts(7), [(1, 0, 1)], "a vector is not cut");
        assert_eq!(it.used()[0], 0);
        // All of a tensor is there once.
        for (index, tensor) in sample().tensors.iter().enumerate() {
            let parts = it.model.tensor(index).parts();
            let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
            assert_eq!(bytes, tensor.data.len() as u64);
        }
    }
}

#[test]
fn placement_follows_its_rules() {
    let placement = Placement {
        cpu_moe: true,
        overrides: config::overrides("attn_q=2 ; gate_up=1").unwrap(),
        ..split("1,1")
    };
    let it = Fixture::new(&sample(), placement, 3, 0);
    it.model.load_all(|_| true).unwrap();
    let whole = |index| match it.model.planned_layout(index) {
        Layout::Whole(device) => device,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        [0, 1, 2, 3, 4, 5, 6, 7].map(whole),
        [0, 0, 0, 1, 0, 0, 2, 1]
    );
    it.expect(&sample());
    let missing = Placement {
        overrides: config::overrides("x=9").unwrap(),
        ..Placement::default()
    };
    let options = Options {
        placement: missing,
        ..Options::host()
    };
    assert!(
        Model::open(&it.path, options)
            .unwrap_err()
            .to_string()
            .contains("device 9")
    );
}

#[test]
fn siblings_follow_when_the_block_size_changes_and_return_without_a_copy() {
    let mut it = Fixture::new(&sample(), split("3,1,1"), 4, 0);
    it.model.load_all(|_| true).unwrap();
    let used = it.used();
    let by_32 = [(1, 0, 320), (2, 320, 416), (3, 416, 512)];
    let addresses: Vec<_> = (0..8).map(|i| it.model.tensor(i).parts()).collect();
    assert!([GATE, UP, DOWN].iter().all(|&i| it.parts(i) == by_32));

    // Another type with the same blocks: the others stay.
    let q8 = with(&sample(), DOWN, Q8_0, 30);
    it.replace(&q8);
    let report = it.model.reload().unwrap();
    assert_eq!(outcome(&report, DOWN), Some(Outcome::Swapped));
    assert_eq!(
        report.tensors[DOWN].placement,
        "gpu1 columns 0..320, gpu2 columns 320..416, gpu3 columns 416..512"
    );
    assert_eq!(outcome(&report, UP), Some(Outcome::Unchanged));
    it.expect(&q8);

    // Blocks of 256: all shares are rounded again, and gate and up follow.
    let q4_k = with(&sample(), DOWN, Q4_K, 31);
    it.replace(&q4_k);
    let report = it.model.reload().unwrap();
    assert_eq!(outcome(&report, DOWN), Some(Outcome::Swapped));
    assert_eq!(outcome(&report, GATE), Some(Outcome::Moved));
    assert_eq!(outcome(&report, UP), Some(Outcome::Moved));
    assert_eq!(report.commits, 1);
    let by_256 = [(1, 0, 256), (2, 256, 512)];
    assert!([GATE, UP, DOWN].iter().all(|&i| it.parts(i) == by_256));
    assert!(
        [GATE, UP, DOWN]
            .iter()
            .all(|&i| it.model.tensor(i).state == State::Detached)
    );
    it.expect(&q4_k);
    assert_eq!(
        it.parts(4),
        [(1, 0, 320), (2, 320, 416), (3, 416, 512)],
        "another layer stays"
    );

    it.replace(&sample());
    let report = it.model.reload().unwrap();
    assert!(
        [GATE, UP, DOWN]
            .iter()
            .all(|&i| outcome(&report, i) == Some(Outcome::Returned))
    );
    assert_eq!(report.bytes_staged, 0);
    assert_eq!(it.used(), used);
    let back: Vec<_> = (0..8).map(|i| it.model.tensor(i).parts()).collect();
    assert_eq!(back, addresses, "the very same buffers");
    it.expect(&sample());
}

#[test]
fn a_layer_that_does_not_fit_falls_back_whole_and_comes_back() {
    let mut it = Fixture::new(&sample(), split("1,1"), 3, 0);
    it.model.load_all(|_| true).unwrap();
    let used = it.used();
    it.room(2, used[2]);
    let big = with(&sample(), DOWN, F32, 40);
    it.replace(&big);
    let report = it.model.reload().unwrap();
    assert_eq!(report.tensors[DOWN].placement, "host");
    assert_eq!(outcome(&report, GATE), Some(Outcome::Moved));
    for &index in LAYERS[0] {
        assert_eq!(it.model.tensor(index).state, State::FallbackCpu);
        assert_eq!(it.parts(index).first().map(|p| p.0), Some(0));
    }
    assert!(
        LAYERS[1]
            .iter()
            .all(|&i| it.model.tensor(i).state == State::OnOriginal)
    );
    it.expect(&big);
    assert_eq!(
        it.used()[1..],
        used[1..],
        "nothing private is on the devices"
    );

    // Nothing has changed, and no memory is free yet.
    assert!(!it.model.reload().unwrap().changed());
    // Memory is free again: the layer goes back, though no file changed.
    it.room(2, u64::MAX);
    let report = it.model.reload().unwrap();
    assert_eq!(outcome(&report, DOWN), Some(Outcome::Moved));
    assert_eq!(it.used()[0], 0);
    assert_eq!(it.model.tensor(DOWN).state, State::Detached);
    assert_eq!(it.model.tensor(GATE).state, State::OnOriginal);
    it.expect(&big);

    // The host is full, too: nothing changes at all.
    let bigger = with(&big, GATE, F32, 41);
    it.replace(&bigger);
    let before = it.used();
    it.room(1, 0);
    it.room(0, 0);
    assert!(it.model.reload().is_err());
    it.expect(&big);
    assert_eq!(it.used(), before);

    // A layer in host memory returns to its original without needing memory.
    it.room(0, u64::MAX);
    it.model.reload().unwrap();
    assert_eq!(it.model.tensor(DOWN).state, State::FallbackCpu);
    it.expect(&bigger);
    it.replace(&sample());
    it.model.reload().unwrap();
    assert!(
        LAYERS[0]
            .iter()
            .all(|&i| it.model.tensor(i).state == State::OnOriginal)
    );
    assert_eq!(it.used(), used);
    it.expect(&sample());
}

#[test]
fn a_reload_of_more_than_may_be_staged_goes_in_whole_layers() {
    let mut it = Fixture::new(&sample(), split("1,1"), 3, 1000);
    it.model.load_all(|_| true).unwrap();
    let mut next = sample();
    for (index, ty) in [(GATE, Q8_0), (DOWN, Q4_K), (4, Q4_K), (5, Q8_0), (6, Q8_0)] {
        next = with(&next, index, ty, 50 + index as u64);
    }
    let context = Context::new(it.model.clone());
    let (model, seen) = (
        it.model.clone(),
        Arc::new(parking_lot::Mutex::new(Vec::new())),
    );
    let log = seen.clone();
    context.on_stale(Some(Arc::new(move |_| {
        log.lock()
            .push([GATE, DOWN, 4, 5, 6].map(|i| model.tensor(i).generation));
    })));
    it.replace(&next);
    let report = context.reload().unwrap();
    assert_eq!(report.commits, 3);
    it.expect(&next);
    let seen = seen.lock();
    assert_eq!(seen.len(), 3);
    for generations in seen.iter() {
        assert_eq!(generations[0], generations[1], "a layer was cut");
        assert_eq!(generations[2], generations[3], "a layer was cut");
    }
}

#[test]
fn a_real_mixture_of_experts_on_three_devices() {
    let folder = tempfile::tempdir_in(testkit::fixtures::cache()).unwrap();
    let path = folder.path().join("model.gguf");
    let place = |name: &str| link(&path, &fixture(name));
    place("moe.gguf");
    let options = Options {
        hotswap: true,
        devices: (0..4)
            .map(|i| HostDevice::new(format!("d{i}")) as Arc<dyn Device>)
            .collect(),
        placement: split("3,1,1"),
        ..Options::host()
    };
    let model = Model::open(&path, options).unwrap();
    assert!(model.load_all(|_| true).unwrap().allocations <= 9);
    let down = model.find(c"blk.1.ffn_down_exps.weight").unwrap();
    let bounds = |index: usize| match model.planned_layout(index) {
        Layout::Split { axis, bounds } => (axis, bounds),
        other => panic!("{other:?}"),
    };
    assert_eq!(bounds(down), (Axis::Columns, vec![0, 928, 1216, 1536]));
    let same_as = |name: &str| {
        let fresh = Model::open(&fixture(name), Options::host()).unwrap();
        for index in 0..model.tensor_count() {
            let there = fresh.find(model.name(index)).unwrap();
            let mut bytes = [0, 1].map(|_| vec![0; model.tensor(index).nbytes() as usize]);
            model.read(index, 0, &mut bytes[0]).unwrap();
            fresh.read(there, 0, &mut bytes[1]).unwrap();
            assert!(bytes[0] == bytes[1], "{:?}", model.name(index));
        }
    };
    same_as("moe.gguf");
    place("moe-mixed.gguf");
    let report = model.reload().unwrap();
    assert_eq!(
        (report.count(Outcome::Swapped), report.count(Outcome::Moved)),
        (4, 0)
    );
    assert_eq!(bounds(down), (Axis::Columns, vec![0, 1024, 1280, 1536]));
    same_as("moe-mixed.gguf");
    place("moe.gguf");
    assert_eq!(model.reload().unwrap().count(Outcome::Returned), 4);
    same_as("moe.gguf");
}

// The property test: random histories against an oracle that holds the expected type and
// bytes of each tensor.

#[derive(Debug, Clone)]
enum Step {
    /// A new file in which some tensors differ.
    Edit(Vec<(usize, usize, u64)>),
    /// The file from the beginning.
    Original,
    /// The first part of the current file.
    Truncate(u8),
    /// The current file with one shape changed.
    OtherModel(usize),
    Vanish,
    Touch,
    Load(usize),
    LoadAll,
    /// How much more than now a device may hold.
    Room(usize, u64),
    /// An evaluation, during which a reload is refused.
    Evaluate,
}

fn types(index: usize) -> &'static [u32] {
    match index {
        DOWN | 4 | 5 => &[Q4_0, Q8_0, Q4_K, F16],
        _ => &[Q4_0, Q8_0, F16, F32],
    }
}

fn step() -> impl Strategy<Value = Step> {
    let edit = proptest::collection::vec((0..8usize, 0..4usize, 0..3u64), 1..4);
    prop_oneof![
        6 => edit.prop_map(Step::Edit),
        2 => Just(Step::Original),
        1 => any::<u8>().prop_map(Step::Truncate),
        1 => (0..8usize).prop_map(Step::OtherModel),
        1 => Just(Step::Vanish),
        1 => Just(Step::Touch),
        2 => (0..8usize).prop_map(Step::Load),
        1 => Just(Step::LoadAll),
        3 => (0..4usize, prop_oneof![Just(0), 0..60_000u64, Just(u64::MAX)])
            .prop_map(|(device, bytes)| Step::Room(device, bytes)),
        1 => Just(Step::Evaluate),
    ]
}

fn placement() -> impl Strategy<Value = (Placement, usize)> {
    let proportions = proptest::collection::vec(0..4u32, 1..4);
    (proportions, any::<bool>(), 0..6u8).prop_map(|(proportions, cut, rule)| {
        let devices = proportions.len() + 1;
        let mut placement = Placement {
            device: 1,
            cpu_moe: rule == 0,
            ..Placement::default()
        };
        if cut && proportions.iter().any(|&n| n > 0) {
            placement.split = proportions.into_iter().map(f64::from).collect();
        }
        if rule == 1 {
            placement.overrides = config::overrides("down=1").unwrap();
        }
        (placement, devices)
    })
}

/// The oracle and the model that it checks.
struct History {
    it: Fixture,
    /// What is on disk.
    file: Gguf,
    /// What the model must hold.
    live: Gguf,
    /// Whether a reload would take `file`.
    takeable: bool,
    /// Bytes that loading, not swapping, put on each device.
    loaded: Vec<u64>,
}

impl History {
    fn apply(&mut self, step: &Step) {
        match step {
            Step::Edit(edits) => {
                for &(index, ty, seed) in edits {
                    self.file = with(&self.file, index, types(index)[ty], 1000 + seed);
                }
                self.put(self.file.clone().bytes(), true);
            }
            Step::Original => {
                self.file = sample();
                self.put(self.file.bytes(), true);
            }
            Step::Truncate(at) => {
                let bytes = self.file.bytes();
                self.put(
                    bytes[..bytes.len() * usize::from(*at) / 256].to_vec(),
                    false,
                );
            }
            Step::OtherModel(index) => {
                let mut other = self.file.clone();
                other.tensors[*index].ne[0] *= 2;
                let old = &other.tensors[*index];
                let made = Gguf::default().tensor(&old.name, &old.ne, F32, 1);
                other.tensors[*index] = made.tensors[0].clone();
                self.put(other.bytes(), false);
            }
            Step::Vanish => {
                let _ = std::fs::remove_file(&self.it.path);
                self.takeable = false;
            }
            Step::Touch => {
                if self.takeable {
                    self.put(self.file.bytes(), true);
                }
            }
            Step::Load(index) => {
                let before = self.it.used();
                let _ = self.it.model.load(*index);
                self.count_loaded(&before);
                return;
            }
            Step::LoadAll => {
                let before = self.it.used();
                let _ = self.it.model.load_all(|_| true);
                self.count_loaded(&before);
                return;
            }
            Step::Room(device, more) => {
                if let Some(used) = self.it.used().get(*device) {
                    self.it.room(*device, used.saturating_add(*more));
                }
            }
            Step::Evaluate => {
                let context = Context::new(self.it.model.clone());
                let generation = context.begin().unwrap();
                assert!(context.reload().is_err());
                self.check();
                assert_eq!(self.it.model.generation(), generation);
                context.end().unwrap();
            }
        }
        self.reload();
    }

    fn put(&mut self, bytes: Vec<u8>, takeable: bool) {
        self.it.replace_bytes(&bytes);
        self.takeable = takeable;
    }

    fn count_loaded(&mut self, before: &[u64]) {
        for (loaded, (after, before)) in self
            .loaded
            .iter_mut()
            .zip(self.it.used().into_iter().zip(before))
        {
            *loaded += after - before;
        }
    }

    fn reload(&mut self) {
        let result = self.it.model.reload();
        if !self.takeable {
            assert!(result.unwrap().tensors.iter().all(|t| {
                matches!(
                    t.outcome,
                    Outcome::Refused | Outcome::Moved | Outcome::Returned
                )
            }));
            return;
        }
        match result {
            Ok(report) if report.failure.is_none() => self.live = self.file.clone(),
            // In steps, and stopped: each layer is old or new.
            Ok(_) => {
                let singles = [[6].as_slice(), &[7]];
                for group in LAYERS.iter().chain(&singles) {
                    let together = group.iter().all(|&i| self.it.is(i, &self.file));
                    if together {
                        for &i in *group {
                            self.live.tensors[i] = self.file.tensors[i].clone();
                        }
                    }
                }
            }
            Err(_) => {}
        }
    }

    fn check(&self) {
        let model = &self.it.model;
        self.it.expect(&self.live);
        for layer in LAYERS {
            let displaced = layer
                .iter()
                .filter(|&&i| model.tensor(i).state == State::FallbackCpu);
            let displaced = displaced.count();
            assert!(
                displaced == 0 || displaced == layer.len(),
                "half a layer fell back"
            );
            let mut bounds = layer
                .iter()
                .filter_map(|&i| match model.tensor(i).layout() {
                    Some(Layout::Split { bounds, .. }) => Some(bounds.clone()),
                    Some(Layout::Whole(device)) => {
                        assert!(displaced == 0 || *device == 0, "fell back to a device");
                        None
                    }
                    None => None,
                });
            let first = bounds.next();
            assert!(
                bounds.all(|other| Some(other) == first),
                "siblings are cut differently"
            );
        }
        let mut private = vec![0; self.loaded.len()];
        for index in 0..model.tensor_count() {
            let view = model.tensor(index);
            let parts = view.parts();
            let total: u64 = parts.iter().map(|part| part.bytes).sum();
            assert!(parts.is_empty() || total == view.nbytes());
            if view.file_offset().is_none() {
                parts
                    .iter()
                    .for_each(|part| private[part.device] += part.bytes);
            }
        }
        let expected: Vec<u64> = private
            .iter()
            .zip(&self.loaded)
            .map(|(private, loaded)| private + loaded)
            .collect();
        assert_eq!(
            self.it.used(),
            expected,
            "memory is not what the states imply"
        );
    }
}

/// Histories from a fixed seed, so that a run can be repeated: 1,000, or 10,000 in the long
/// form. PROPTEST_CASES and PROPTEST_RNG_SEED set others.
fn histories() -> ProptestConfig {
    let set = |name| std::env::var_os(name).is_some();
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if !set("PROPTEST_CASES") {
        config.cases = if testkit::long_tests() { 10_000 } else { 1_000 };
    }
    if !set("PROPTEST_RNG_SEED") {
        config.rng_seed = RngSeed::Fixed(2026);
    }
    config
}

proptest! {
    #![proptest_config(histories())]

    #[test]
    fn random_histories_agree_with_the_oracle(
        (placement, devices) in placement(),
        staging_bytes in prop_oneof![Just(0), Just(20_000u64)],
        steps in proptest::collection::vec(step(), 1..9),
    ) {
        let it = Fixture::new(&sample(), placement, devices, staging_bytes);
        let mut history = History {
            loaded: vec![0; devices],
            file: sample(),
            live: sample(),
            takeable: true,
            it,
        };
        for step in &steps {
            history.apply(step);
            history.check();
        }
        let Fixture { model, devices, .. } = history.it;
        drop(model);
        prop_assert!(devices.iter().all(|gpu| gpu.memory().used == 0), "a leak");
    }
}
