//! Hot-swap, against files that change in every way files change.

mod support;

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use llama_sidecar::device::{Device, DeviceError};
use llama_sidecar::model::{Context, Model, Options, State};
use parking_lot::Mutex;
use sidecar_core::error::Error;
use sidecar_core::gguf::Access;
use sidecar_core::reload::{FileEvent, Outcome, OverlaySource, Report};
use support::Gpu;
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::host::link;
use testkit::writer::{F16, F32, Gguf, Q4_0, Q8_0};

/// A model on disk, the same model open, and the device it is on.
struct Fixture {
    folder: TempDir,
    path: PathBuf,
    file: Gguf,
    model: Arc<Model>,
    gpu: Arc<Gpu>,
    generations: Arc<Mutex<Vec<u64>>>,
    context: Context,
}

fn sample() -> Gguf {
    Gguf::default()
        .tensor("token_embd.weight", &[64, 100], Q8_0, 1)
        .tensor("blk.0.ffn_up.weight", &[64, 32], Q4_0, 2)
        .tensor("blk.0.ffn_down.weight", &[64, 32], Q4_0, 3)
        .tensor("output_norm.weight", &[64], F32, 4)
}

impl Fixture {
    fn new(file: Gguf, access: Access) -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        file.write(&path).unwrap();
        // Each later write has another time.
        let past = SystemTime::now() - Duration::from_secs(3600);
        let opened = std::fs::File::options().append(true).open(&path);
        opened.unwrap().set_modified(past).unwrap();
        let gpu = Gpu::new("gpu");
        let options = Options {
            access,
            hotswap: true,
            devices: vec![gpu.clone()],
            ..Options::host()
        };
        let model = Arc::new(Model::open(&path, options).unwrap());
        let context = Context::new(model.clone());
        let generations = Arc::new(Mutex::new(Vec::new()));
        let seen = generations.clone();
        context.on_stale(Some(Arc::new(move |generation| {
            seen.lock().push(generation)
        })));
        Fixture {
            folder,
            path,
            file,
            model,
            gpu,
            generations,
            context,
        }
    }

    /// One fixture for each way tensors can be where they are.
    fn all() -> [Fixture; 3] {
        let loaded = Fixture::new(sample(), Access::Map);
        loaded.model.load_all(|_| true).unwrap();
        [
            Fixture::new(sample(), Access::Map),
            Fixture::new(sample(), Access::Read),
            loaded,
        ]
    }

    fn reload(&self) -> Report {
        self.context.reload().unwrap()
    }

    fn replace(&mut self, file: Gguf) {
        file.replace(&self.path).unwrap();
        self.file = file;
    }

    fn bytes(&self, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.model.tensor(index).nbytes() as usize];
        self.model.read(index, 0, &mut bytes).unwrap();
        bytes
    }

    fn used(&self) -> u64 {
        self.gpu.memory().used
    }

    /// The model is what a fresh load of `file` would be.
    fn expect(&self, file: &Gguf) {
        for (index, tensor) in file.tensors.iter().enumerate() {
            let view = self.model.tensor(index);
            assert_eq!(view.ty().id, tensor.ty, "{}", tensor.name);
            assert_eq!(view.nbytes(), tensor.data.len() as u64, "{}", tensor.name);
            assert!(self.bytes(index) == tensor.data, "{}", tensor.name);
        }
    }
}

/// `file` with tensor `index` in another type, or with other bytes.
fn with(file: &Gguf, index: usize, ty: u32, seed: u64) -> Gguf {
    let mut changed = file.clone();
    let old = changed.tensors[index].clone();
    let made = Gguf::default().tensor(&old.name, &old.ne, ty, seed);
    changed.tensors[index] = made.tensors[0].clone();
    changed
}

fn outcomes(report: &Report) -> Vec<Outcome> {
    report.tensors.iter().map(|tensor| tensor.outcome).collect()
}

fn ignored(report: &Report) -> &str {
    assert_eq!(report.files.len(), 1);
    assert_eq!(report.files[0].event(), FileEvent::Ignored);
    assert!(!report.changed());
    report.files[0].reason()
}

use Outcome::{InPlace, Refused, Returned, Swapped, Unchanged};

#[test]
fn nothing_changed_costs_one_stat_a_file() {
    for it in Fixture::all() {
        let report = it.reload();
        assert_eq!((report.files_checked, report.files.len()), (1, 0));
        assert!(!report.changed() && report.tensors.is_empty());
        assert!(it.generations.lock().is_empty());
    }
}

#[test]
fn another_type_is_swapped_and_the_original_returns_without_a_copy() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        let placed = it.model.tensor(1).placed();
        let used = it.used();

        it.replace(with(&original, 1, Q8_0, 20));
        let report = it.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Swapped, Unchanged, Unchanged]
        );
        assert_eq!(report.tensors[1].old_type.name(), "q4_0");
        assert_eq!(report.tensors[1].new_type.name(), "q8_0");
        assert_eq!(it.model.tensor(1).state, State::Detached);
        assert_eq!(it.model.tensor(1).generation, 1);
        assert_eq!(it.used(), used + 64 * 32 / 32 * 34);
        it.expect(&it.file);
        assert!(!it.reload().changed());

        it.replace(original.clone());
        let report = it.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Returned, Unchanged, Unchanged]
        );
        assert_eq!(report.bytes_staged, 0);
        assert_eq!(it.model.tensor(1).state, State::OnOriginal);
        assert_eq!(it.model.tensor(1).placed(), placed);
        assert_eq!(it.used(), used, "no private buffer is left");
        it.expect(&original);
        assert_eq!(*it.generations.lock(), [1, 2]);
    }
}

#[test]
fn the_same_type_with_other_bytes_is_a_swap_and_no_return() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        for (seed, expected) in [(20, Swapped), (21, Swapped), (2, Returned), (20, Swapped)] {
            it.replace(with(&original, 1, Q4_0, seed));
            let report = it.reload();
            assert_eq!(report.tensors[1].outcome, expected, "{seed}");
            it.expect(&it.file);
        }
    }
}

#[test]
fn only_what_differs_is_swapped() {
    for mut it in Fixture::all() {
        // All offsets behind the first tensor move.
        it.replace(with(&it.file, 0, F16, 1));
        assert_eq!(
            outcomes(&it.reload()),
            [Swapped, Unchanged, Unchanged, Unchanged]
        );
        it.expect(&it.file);
        // The same bytes in a new file.
        it.replace(it.file.clone());
        let report = it.reload();
        assert_eq!(outcomes(&report), [Unchanged; 4]);
        assert!(!report.changed());
        assert_eq!(*it.generations.lock(), [1]);
    }
}

#[test]
fn an_older_file_is_a_change_too() {
    let mut it = Fixture::new(sample(), Access::Map);
    it.replace(with(&it.file, 1, Q8_0, 20));
    let past = SystemTime::now() - Duration::from_secs(7200);
    let file = std::fs::File::options().write(true).open(&it.path).unwrap();
    file.set_modified(past).unwrap();
    assert_eq!(it.reload().count(Swapped), 1);
    it.expect(&it.file);
}

#[test]
fn a_file_of_another_model_is_refused_whole_and_by_name() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        let mut other = with(&original, 1, Q8_0, 20);
        other.tensors[2].ne = vec![32, 64];
        other.replace(&it.path).unwrap();
        let report = it.reload();
        assert!(
            ignored(&report).contains("another model"),
            "{}",
            ignored(&report)
        );
        assert_eq!(outcomes(&report), [Refused; 4]);
        assert!(
            report.tensors[2]
                .reason
                .contains("has shape [32, 64, 1, 1]")
        );
        it.expect(&original);

        let mut fewer = original.clone();
        fewer.tensors.pop();
        fewer.replace(&it.path).unwrap();
        let report = it.reload();
        assert!(
            report.tensors[3]
                .reason
                .contains("no tensor 'output_norm.weight'")
        );
        it.expect(&original);

        // An unknown type, and then a good file again.
        let mut unknown = original.clone();
        unknown.tensors[0].ty = 99_999;
        unknown.replace(&it.path).unwrap();
        assert!(ignored(&it.reload()).contains("has type 99999"));
        it.expect(&original);
        it.replace(with(&original, 1, Q8_0, 20));
        assert_eq!(it.reload().count(Swapped), 1);
        it.expect(&it.file);
        assert_eq!(*it.generations.lock(), [1]);
    }
}

#[test]
fn a_short_file_waits_for_its_writer_at_every_length() {
    let mut it = Fixture::new(sample(), Access::Map);
    let original = it.file.clone();
    let next = with(&original, 1, Q8_0, 20);
    let whole = next.bytes();
    let data_end = whole.len();
    for cut in [0, 3, 20, 100, whole.len() / 2, data_end - 300, data_end - 1] {
        let beside = it.folder.path().join("cut");
        std::fs::write(&beside, &whole[..cut]).unwrap();
        std::fs::rename(&beside, &it.path).unwrap();
        let report = it.reload();
        assert!(
            ignored(&report).contains("waiting for its writer"),
            "{cut}: {}",
            ignored(&report)
        );
        it.expect(&original);
        assert_eq!(it.used(), 0);
        // The same file again gives the same answer.
        assert!(ignored(&it.reload()).contains("waiting for its writer"));
    }
    it.replace(next);
    assert_eq!(it.reload().count(Swapped), 1);
    it.expect(&it.file);
}

#[test]
fn a_reload_ignores_directories_and_special_files() {
    let mut it = Fixture::new(sample(), Access::Map);
    let original = it.file.clone();
    std::fs::remove_file(&it.path).unwrap();
    assert!(ignored(&it.reload()).contains("cannot stat it"));
    it.expect(&original);
    std::fs::create_dir(&it.path).unwrap();
    assert!(ignored(&it.reload()).contains("found a directory"));
    std::fs::remove_dir(&it.path).unwrap();
    std::os::unix::fs::symlink(&it.path, &it.path).unwrap();
    assert!(ignored(&it.reload()).contains("cannot stat it"));
    std::fs::remove_file(&it.path).unwrap();
    let fifo = std::ffi::CString::new(it.path.to_str().unwrap()).unwrap();
    // SAFETY: only a valid path is passed.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    assert!(ignored(&it.reload()).contains("found a special file"));
    std::fs::remove_file(&it.path).unwrap();
    it.expect(&original);
    it.replace(with(&original, 1, Q8_0, 20));
    assert_eq!(it.reload().count(Swapped), 1);
    it.expect(&it.file);
}

#[test]
fn a_reload_without_memory_changes_nothing() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        let used = it.used();
        let next = with(&with(&original, 1, Q8_0, 20), 2, Q8_0, 30);
        it.replace(next.clone());
        for allowed in [0, 1] {
            it.gpu.allow(allowed);
            let error = it.context.reload().unwrap_err();
            assert!(
                matches!(error, Error::Device(DeviceError::OutOfMemory { .. })),
                "{error}"
            );
            it.expect(&original);
            assert_eq!(it.used(), used);
            assert!(it.generations.lock().is_empty());
        }
        it.gpu.allow(u64::MAX);
        assert_eq!(it.reload().count(Swapped), 2);
        it.expect(&next);
    }
}

#[test]
fn returning_comes_first_when_memory_is_short() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        it.replace(with(&original, 1, Q8_0, 20));
        it.reload();
        let next = with(&original, 2, Q8_0, 30);
        it.replace(next.clone());
        it.gpu.allow(0);
        let report = it.reload();
        let failure = report.failure.as_deref().unwrap_or_default();
        assert!(failure.contains("cannot allocate 2176 bytes"), "{failure}");
        assert_eq!(outcomes(&report), [Returned]);
        // What returned is consistent on its own, and is not tried again.
        assert_eq!(it.model.tensor(1).state, State::OnOriginal);
        it.expect(&original);
        it.gpu.allow(u64::MAX);
        let report = it.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Unchanged, Swapped, Unchanged]
        );
        it.expect(&next);
    }
}

#[test]
fn a_file_written_in_place_is_noticed() {
    for (loaded, access) in [
        (false, Access::Map),
        (false, Access::Read),
        (true, Access::Map),
    ] {
        let mut it = Fixture::new(sample(), access);
        if loaded {
            it.model.load_all(|_| true).unwrap();
        }
        let original = it.file.clone();
        let changed = with(&original, 1, Q4_0, 20);
        changed.write(&it.path).unwrap();
        let report = it.reload();
        assert!(report.changed());
        let expected = if loaded { Swapped } else { InPlace };
        assert_eq!(report.tensors[1].outcome, expected);
        it.expect(&changed);
        assert_eq!(*it.generations.lock(), [1]);

        // In another type, in place: what is read out of the file has new bytes.
        let moved = with(&changed, 0, F16, 40);
        moved.write(&it.path).unwrap();
        let report = it.reload();
        assert_eq!(report.tensors[0].outcome, Swapped);
        it.expect(&moved);

        // The bytes that were there at first are gone, unless they were loaded.
        it.replace(original.clone());
        let report = it.reload();
        it.expect(&original);
        let back = if loaded { Returned } else { Swapped };
        assert_eq!(report.tensors[0].outcome, back);
    }
}

/// Does something to a file until its time of change is another one.
fn until_changed(path: &Path, act: impl Fn()) {
    let stamp = || {
        let found = std::fs::metadata(path).unwrap();
        (found.ctime(), found.ctime_nsec())
    };
    let before = stamp();
    act();
    while stamp() == before {
        act();
    }
}

#[test]
fn a_file_written_in_place_that_keeps_its_times_is_noticed() {
    for (loaded, access) in [
        (false, Access::Map),
        (false, Access::Read),
        (true, Access::Map),
    ] {
        let it = Fixture::new(sample(), access);
        if loaded {
            it.model.load_all(|_| true).unwrap();
        }
        let modified = std::fs::metadata(&it.path).unwrap().modified().unwrap();
        let mut expected = it.file.clone();
        for (seed, others_are_known) in [(20, loaded), (21, true)] {
            // As 'cp -p' and 'rsync --inplace --times' do.
            expected = with(&expected, 1, Q4_0, seed);
            until_changed(&it.path, || {
                expected.write(&it.path).unwrap();
                let file = std::fs::File::options().write(true).open(&it.path);
                file.unwrap().set_modified(modified).unwrap();
            });
            let report = it.reload();
            assert!(report.changed());
            let outcome = if loaded { Swapped } else { InPlace };
            assert_eq!(report.tensors[1].outcome, outcome);
            if others_are_known {
                assert_eq!(report.count(Unchanged), 3);
            }
            it.expect(&expected);
        }
        assert!(it.reload().files.is_empty());
    }
}

#[test]
fn other_permissions_and_links_are_no_other_bytes() {
    for it in Fixture::all() {
        let (path, link) = (&it.path, it.folder.path().join("link"));
        until_changed(path, || {
            std::fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap();
        });
        assert_eq!(outcomes(&it.reload()), [Unchanged; 4]);
        until_changed(path, || {
            let _ = std::fs::remove_file(&link);
            std::fs::hard_link(path, &link).unwrap();
        });
        it.model.load(0).unwrap();
        assert_eq!(outcomes(&it.reload()), [Unchanged; 4]);
        assert_eq!(it.model.generation(), 0);
        it.model.load_all(|_| true).unwrap();
        it.expect(&it.file);
    }
}

#[test]
fn a_file_that_was_moved_away_and_back_is_the_original() {
    for it in Fixture::all() {
        let other = with(&it.file, 1, Q8_0, 20);
        let away = it.folder.path().join("away");
        until_changed(&it.path, || {
            std::fs::rename(&it.path, &away).unwrap();
            std::fs::rename(&away, &it.path).unwrap();
        });
        std::fs::rename(&it.path, &away).unwrap();
        other.write(&it.path).unwrap();
        it.model.load(0).unwrap();
        assert_eq!(
            outcomes(&it.reload()),
            [Unchanged, Swapped, Unchanged, Unchanged]
        );
        it.expect(&other);
        std::fs::rename(&away, &it.path).unwrap();
        let report = it.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Returned, Unchanged, Unchanged]
        );
        assert_eq!(it.model.tensor(1).state, State::OnOriginal);
        it.expect(&it.file);
    }
}

#[test]
fn a_file_cut_short_in_place_changes_nothing_that_was_loaded() {
    let it = Fixture::new(sample(), Access::Map);
    it.model.load_all(|_| true).unwrap();
    let file = std::fs::File::options().write(true).open(&it.path).unwrap();
    file.set_len(it.file.bytes().len() as u64 / 2).unwrap();
    assert!(ignored(&it.reload()).contains("waiting for its writer"));
    it.expect(&it.file);
}

#[test]
fn bytes_after_the_end_change_nothing() {
    for it in Fixture::all() {
        let mut file = std::fs::File::options()
            .append(true)
            .open(&it.path)
            .unwrap();
        file.write_all(b"trailing bytes of no tensor").unwrap();
        let report = it.reload();
        assert_eq!(report.count(Swapped) + report.count(Refused), 0);
        it.expect(&it.file);
        it.model.load_all(|_| true).unwrap();
        it.expect(&it.file);
        assert!(!it.reload().changed());
    }
}

#[test]
fn a_writer_that_never_stops_is_never_taken_half() {
    let mut it = Fixture::new(sample(), Access::Map);
    let original = it.file.clone();
    it.model.load_all(|_| true).unwrap();
    let versions: Vec<Gguf> = (0..2u64)
        .map(|i| {
            let seeds = [i + 100, i + 200, i + 300];
            let once = with(&original, 0, Q8_0, seeds[0]);
            with(&with(&once, 1, Q4_0, seeds[1]), 2, Q4_0, seeds[2])
        })
        .collect();
    const PAUSES: usize = 20;
    let (reloads, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let taken = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for i in 0..15 * PAUSES {
                // In place: most of the time the file is neither of the two.
                versions[i % 2].write(&it.path).unwrap();
                // A pause in which a whole reload begins and ends.
                let before = reloads.load(Ordering::SeqCst);
                while i % 15 == 14 && reloads.load(Ordering::SeqCst) < before + 2 {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    std::thread::yield_now();
                }
            }
        });
        let mut taken = 0;
        while taken < 5 && !writer.is_finished() {
            taken += u64::from(it.reload().changed());
            reloads.fetch_add(1, Ordering::SeqCst);
            let tensors: Vec<_> = (0..3).map(|index| it.bytes(index)).collect();
            let whole =
                |file: &Gguf| (0..3).all(|index| tensors[index] == file.tensors[index].data);
            assert!(
                versions.iter().any(whole) || whole(&original),
                "half of a file was taken"
            );
        }
        stop.store(true, Ordering::SeqCst);
        taken
    });
    assert!(taken >= 5, "a pause of the writer is enough");
    it.replace(original.clone());
    it.reload();
    it.expect(&original);
}

#[test]
fn a_reload_waits_for_evaluations_and_refuses_its_own() {
    let mut it = Fixture::new(sample(), Access::Map);
    it.replace(with(&it.file, 1, Q8_0, 20));
    assert_eq!(it.context.begin().unwrap(), 0);
    assert!(matches!(it.context.reload(), Err(Error::Busy(_))));
    assert!(matches!(it.context.begin(), Err(Error::Busy(_))));
    std::thread::scope(|scope| {
        let reload = scope.spawn(|| it.reload());
        std::thread::sleep(Duration::from_millis(100));
        assert!(!reload.is_finished());
        assert_eq!(
            it.model.tensor(1).generation,
            0,
            "the evaluation still runs"
        );
        it.context.end().unwrap();
        let report = reload.join().unwrap();
        assert_eq!(report.count(Swapped), 1);
    });
    assert_eq!(it.context.begin().unwrap(), 1);
    it.context.end().unwrap();
    assert!(matches!(it.context.end(), Err(Error::Busy(_))));
    it.expect(&it.file);
}

#[test]
fn on_stale_is_called_once_a_context_and_may_read_the_model() {
    let mut it = Fixture::new(sample(), Access::Map);
    let other = Context::new(it.model.clone());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, model) = (seen.clone(), it.model.clone());
    let other = Arc::new(other);
    let inside = Arc::downgrade(&other);
    other.on_stale(Some(Arc::new(move |generation| {
        // The switch has happened, and no evaluation can begin before it is over.
        let begun = inside.upgrade().map(|context| context.begin().is_err());
        log.lock()
            .push((generation, model.tensor(1).generation, begun));
    })));
    it.replace(with(&it.file, 1, Q8_0, 20));
    it.reload();
    assert_eq!(*seen.lock(), [(1, 1, Some(true))]);
    assert_eq!(*it.generations.lock(), [1]);
    drop(other);
    it.replace(sample());
    it.reload();
    assert_eq!(seen.lock().len(), 1);
    assert_eq!(*it.generations.lock(), [1, 2]);
}

#[test]
fn without_hotswap_nothing_is_registered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    sample().write(&path).unwrap();
    let model = Model::open(&path, Options::host()).unwrap();
    assert!(matches!(model.reload(), Err(Error::HotSwapOff)));
}

#[test]
fn eight_threads_never_see_a_mix() {
    let mut it = Fixture::new(sample(), Access::Map);
    it.model.load_all(|_| true).unwrap();
    let versions: Vec<Gguf> = (0..2u64)
        .map(|i| {
            let once = with(&sample(), 1, [Q4_0, Q8_0][i as usize], 50 + i);
            with(&once, 2, [F16, Q4_0][i as usize], 60 + i)
        })
        .collect();
    let (stop, evaluations) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut swaps = 0;
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let context = Context::new(it.model.clone());
                while stop.load(Ordering::SeqCst) == 0 {
                    let generation = context.begin().unwrap();
                    let seen = [it.bytes(1), it.bytes(2)];
                    let is = |file: &Gguf| (1..3).all(|i| seen[i - 1] == file.tensors[i].data);
                    assert!(versions.iter().any(is) || is(&sample()));
                    assert_eq!(it.model.generation(), generation);
                    context.end().unwrap();
                    evaluations.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for i in 0..100 {
            versions[i % 2].replace(&it.path).unwrap();
            swaps += it.reload().count(Swapped);
        }
        stop.store(1, Ordering::SeqCst);
    });
    assert_eq!(swaps, 200);
    assert!(evaluations.load(Ordering::Relaxed) > 200);
    it.replace(sample());
    assert_eq!(it.reload().count(Returned), 2);
}

#[test]
fn many_threads_reload_at_once() {
    let mut it = Fixture::new(sample(), Access::Map);
    it.replace(with(&it.file, 1, Q8_0, 20));
    let changed: usize = std::thread::scope(|scope| {
        let reloads: Vec<_> = (0..8).map(|_| scope.spawn(|| it.reload())).collect();
        let reports = reloads.into_iter().map(|thread| thread.join().unwrap());
        reports.map(|report| usize::from(report.changed())).sum()
    });
    assert_eq!(
        changed, 1,
        "the first took it, the others found nothing to do"
    );
    it.expect(&it.file);
}

#[test]
fn real_models_swap_and_return() {
    for (model, variant, swapped) in [
        ("smollm2.gguf", "smollm2-mixed.gguf", 8),
        ("moe.gguf", "moe-mixed.gguf", 4),
    ] {
        let folder = tempfile::tempdir_in(testkit::fixtures::cache()).unwrap();
        let path = folder.path().join("model.gguf");
        let place = |name: &str| link(&path, &fixture(name));
        place(model);
        let options = Options {
            hotswap: true,
            ..Options::host()
        };
        let open = Model::open(&path, options).unwrap();
        place(variant);
        let report = open.reload().unwrap();
        assert_eq!(report.count(Swapped), swapped);
        assert_eq!(report.count(Unchanged), open.tensor_count() - swapped);
        let fresh = Model::open(&fixture(variant), Options::host()).unwrap();
        for index in 0..open.tensor_count() {
            let there = fresh.find(open.name(index)).unwrap();
            let (ours, theirs) = (open.tensor(index), fresh.tensor(there));
            assert_eq!((ours.ty(), ours.nb()), (theirs.ty(), theirs.nb()));
            let mut bytes = [
                vec![0; ours.nbytes() as usize],
                vec![0; ours.nbytes() as usize],
            ];
            open.read(index, 0, &mut bytes[0]).unwrap();
            fresh.read(there, 0, &mut bytes[1]).unwrap();
            assert!(bytes[0] == bytes[1], "{:?}", open.name(index));
        }
        place(model);
        let report = open.reload().unwrap();
        assert_eq!(report.count(Returned), swapped);
        assert_eq!(report.count(Unchanged), open.tensor_count() - swapped);
        assert_eq!(open.devices()[0].memory().used, 0);
    }
}

#[test]
fn zeros_written_in_place_of_copied_tensors_are_refused() {
    let it = Fixture::new(sample(), Access::Read);
    it.model.load_all(|_| true).unwrap();
    let mut zeros = sample();
    zeros
        .tensors
        .iter_mut()
        .for_each(|tensor| tensor.data.fill(0));
    zeros.write(&it.path).unwrap();
    let report = it.reload();
    assert!(ignored(&report).contains("is damaged"), "{report:?}");
    assert!(!report.changed());
}

#[test]
fn a_file_of_which_a_part_was_taken_is_never_taken_for_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["a", "b"].map(|name| folder.path().join(name));
    let path = folder.path().join("model.gguf");
    sample().write(&names[0]).unwrap();
    let mut other = sample();
    other.tensors.iter_mut().for_each(|tensor| {
        tensor.data =
            testkit::writer::weights(9, tensor.ty, tensor.ne.iter().product::<i64>() as u64);
    });
    other.write(&names[1]).unwrap();
    // A link that points elsewhere leaves both files as they are, their times included.
    let point_to = |name: &Path| {
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(name, &link).unwrap();
        std::fs::rename(link, &path).unwrap();
    };
    point_to(&names[0]);
    let gpu = Gpu::new("gpu");
    let options = Options {
        hotswap: true,
        devices: vec![gpu.clone()],
        staging_bytes: 1,
        ..Options::host()
    };
    let model = Model::open(&path, options).unwrap();
    model.load_all(|_| true).unwrap();
    point_to(&names[1]);
    gpu.allow(1);
    let report = model.reload().unwrap();
    assert_eq!((report.commits, report.failure.is_some()), (1, true));
    gpu.allow(u64::MAX);
    point_to(&names[0]);
    let report = model.reload().unwrap();
    assert_eq!(report.count(Outcome::Returned), 1, "{report:?}");
}

#[test]
fn an_overlay_is_above_the_file_until_it_is_reverted() {
    for mut it in Fixture::all() {
        let original = it.file.clone();
        let placed = it.model.tensor(1).placed();
        let used = it.used();
        let other = it.folder.path().join("other.gguf");
        let overlaid = with(&original, 1, Q8_0, 20);
        overlaid.write(&other).unwrap();
        let source = OverlaySource::open(&other).unwrap();
        std::fs::write(&other, "rewritten").unwrap();
        let torn = it.context.overlay(&[], &[(1, &source)]);
        assert!(matches!(torn, Err(Error::Read { .. })), "{torn:?}");
        overlaid.write(&other).unwrap();
        let source = OverlaySource::open(&other).unwrap();
        let report = it
            .context
            .overlay(&[], &[(1, &source), (2, &source)])
            .unwrap();
        assert_eq!(outcomes(&report), [Swapped, Unchanged]);
        std::fs::remove_file(&other).unwrap();
        it.expect(&overlaid);

        // The file changes below the overlay.
        it.replace(with(&with(&original, 0, F16, 30), 1, F16, 31));
        assert_eq!(outcomes(&it.reload()), [Swapped, Unchanged]);
        it.expect(&with(&overlaid, 0, F16, 30));
        let report = it.context.overlay(&[0, 1, 2], &[]).unwrap();
        assert_eq!(outcomes(&report), [Swapped, Unchanged]);
        it.expect(&it.file);

        it.replace(original.clone());
        assert_eq!(
            outcomes(&it.reload()),
            [Returned, Returned, Unchanged, Unchanged]
        );
        assert_eq!(it.model.tensor(1).placed(), placed);
        assert_eq!(it.used(), used, "no private buffer is left");
        assert_eq!(*it.generations.lock(), [1, 2, 3, 4]);

        overlaid.write(&other).unwrap();
        let source = OverlaySource::open(&other).unwrap();
        it.gpu.hold_at_most(used);
        let full = it.context.overlay(&[], &[(1, &source)]);
        assert!(matches!(full, Err(Error::Device(_))), "{full:?}");
        it.expect(&original);
    }
}
