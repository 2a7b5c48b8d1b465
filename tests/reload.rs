//! Hot-swap, against files that change in every way files change.

mod support;

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use llama_sidecar::device::{Device, DeviceError};
use llama_sidecar::error::Error;
use llama_sidecar::gguf::Access;
use llama_sidecar::model::{Context, Model, Options, State};
use llama_sidecar::reload::{FileEvent, Outcome, Report};
use parking_lot::Mutex;
use support::Gpu;
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::writer::{F16, F32, Gguf, Q4_0, Q8_0};

/// A model on disk, the same model open, and the device it is on.
struct Bench {
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

impl Bench {
    fn new(file: Gguf, access: Access) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        file.write(&path).unwrap();
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
        Bench {
            folder,
            path,
            file,
            model,
            gpu,
            generations,
            context,
        }
    }

    /// One bench for each way tensors can be where they are.
    fn all() -> [Bench; 3] {
        let loaded = Bench::new(sample(), Access::Map);
        loaded.model.load_all(|_| true).unwrap();
        [
            Bench::new(sample(), Access::Map),
            Bench::new(sample(), Access::Read),
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
    for bench in Bench::all() {
        let report = bench.reload();
        assert_eq!((report.files_checked, report.files.len()), (1, 0));
        assert!(!report.changed() && report.tensors.is_empty());
        assert!(bench.generations.lock().is_empty());
    }
}

#[test]
fn another_type_is_swapped_and_the_original_returns_without_a_copy() {
    for mut bench in Bench::all() {
        let original = bench.file.clone();
        let placed = bench.model.tensor(1).placed();
        let used = bench.used();

        bench.replace(with(&original, 1, Q8_0, 20));
        let report = bench.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Swapped, Unchanged, Unchanged]
        );
        assert_eq!(report.tensors[1].old_type.name(), "q4_0");
        assert_eq!(report.tensors[1].new_type.name(), "q8_0");
        assert_eq!(bench.model.tensor(1).state, State::Detached);
        assert_eq!(bench.model.tensor(1).generation, 1);
        assert_eq!(bench.used(), used + 64 * 32 / 32 * 34);
        bench.expect(&bench.file);
        assert!(!bench.reload().changed());

        bench.replace(original.clone());
        let report = bench.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Returned, Unchanged, Unchanged]
        );
        assert_eq!(report.bytes_staged, 0);
        assert_eq!(bench.model.tensor(1).state, State::OnOriginal);
        assert_eq!(bench.model.tensor(1).placed(), placed);
        assert_eq!(bench.used(), used, "no private buffer is left");
        bench.expect(&original);
        assert_eq!(*bench.generations.lock(), [1, 2]);
    }
}

#[test]
fn the_same_type_with_other_bytes_is_a_swap_and_no_return() {
    for mut bench in Bench::all() {
        let original = bench.file.clone();
        for (seed, expected) in [(20, Swapped), (21, Swapped), (2, Returned), (20, Swapped)] {
            bench.replace(with(&original, 1, Q4_0, seed));
            let report = bench.reload();
            assert_eq!(report.tensors[1].outcome, expected, "{seed}");
            bench.expect(&bench.file);
        }
    }
}

#[test]
fn only_what_differs_is_swapped() {
    for mut bench in Bench::all() {
        // All offsets behind the first tensor move.
        bench.replace(with(&bench.file, 0, F16, 1));
        assert_eq!(
            outcomes(&bench.reload()),
            [Swapped, Unchanged, Unchanged, Unchanged]
        );
        bench.expect(&bench.file);
        // The same bytes in a new file.
        bench.replace(bench.file.clone());
        let report = bench.reload();
        assert_eq!(outcomes(&report), [Unchanged; 4]);
        assert!(!report.changed());
        assert_eq!(*bench.generations.lock(), [1]);
    }
}

#[test]
fn an_older_file_is_a_change_too() {
    let mut bench = Bench::new(sample(), Access::Map);
    bench.replace(with(&bench.file, 1, Q8_0, 20));
    let hour_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
    let file = std::fs::File::options()
        .write(true)
        .open(&bench.path)
        .unwrap();
    file.set_modified(hour_ago).unwrap();
    assert_eq!(bench.reload().count(Swapped), 1);
    bench.expect(&bench.file);
}

#[test]
fn a_file_of_another_model_is_refused_whole_and_by_name() {
    for mut bench in Bench::all() {
        let original = bench.file.clone();
        let mut other = with(&original, 1, Q8_0, 20);
        other.tensors[2].ne = vec![32, 64];
        other.replace(&bench.path).unwrap();
        let report = bench.reload();
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
        bench.expect(&original);

        let mut fewer = original.clone();
        fewer.tensors.pop();
        fewer.replace(&bench.path).unwrap();
        let report = bench.reload();
        assert!(
            report.tensors[3]
                .reason
                .contains("no tensor 'output_norm.weight'")
        );
        bench.expect(&original);

        // An unknown type, and then a good file again.
        let mut unknown = original.clone();
        unknown.tensors[0].ty = 99_999;
        unknown.replace(&bench.path).unwrap();
        assert!(ignored(&bench.reload()).contains("has type 99999"));
        bench.expect(&original);
        bench.replace(with(&original, 1, Q8_0, 20));
        assert_eq!(bench.reload().count(Swapped), 1);
        bench.expect(&bench.file);
        assert_eq!(*bench.generations.lock(), [1]);
    }
}

#[test]
fn a_short_file_waits_for_its_writer_at_every_length() {
    let mut bench = Bench::new(sample(), Access::Map);
    let original = bench.file.clone();
    let next = with(&original, 1, Q8_0, 20);
    let whole = next.bytes();
    let data_end = whole.len();
    for cut in [0, 3, 20, 100, whole.len() / 2, data_end - 300, data_end - 1] {
        let beside = bench.folder.path().join("cut");
        std::fs::write(&beside, &whole[..cut]).unwrap();
        std::fs::rename(&beside, &bench.path).unwrap();
        let report = bench.reload();
        assert!(
            ignored(&report).contains("waiting for its writer"),
            "{cut}: {}",
            ignored(&report)
        );
        bench.expect(&original);
        assert_eq!(bench.used(), 0);
        // The same file again gives the same answer.
        assert!(ignored(&bench.reload()).contains("waiting for its writer"));
    }
    bench.replace(next);
    assert_eq!(bench.reload().count(Swapped), 1);
    bench.expect(&bench.file);
}

#[test]
fn paths_that_are_no_files_are_ignored() {
    let mut bench = Bench::new(sample(), Access::Map);
    let original = bench.file.clone();
    std::fs::remove_file(&bench.path).unwrap();
    assert!(ignored(&bench.reload()).contains("cannot stat it"));
    bench.expect(&original);
    std::fs::create_dir(&bench.path).unwrap();
    assert!(ignored(&bench.reload()).contains("found a directory"));
    std::fs::remove_dir(&bench.path).unwrap();
    std::os::unix::fs::symlink(&bench.path, &bench.path).unwrap();
    assert!(ignored(&bench.reload()).contains("cannot stat it"));
    std::fs::remove_file(&bench.path).unwrap();
    let fifo = std::ffi::CString::new(bench.path.to_str().unwrap()).unwrap();
    // SAFETY: a valid path, and nothing else.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    assert!(ignored(&bench.reload()).contains("found a special file"));
    std::fs::remove_file(&bench.path).unwrap();
    bench.expect(&original);
    bench.replace(with(&original, 1, Q8_0, 20));
    assert_eq!(bench.reload().count(Swapped), 1);
    bench.expect(&bench.file);
}

#[test]
fn without_memory_every_byte_stays() {
    for mut bench in Bench::all() {
        let original = bench.file.clone();
        let used = bench.used();
        let next = with(&with(&original, 1, Q8_0, 20), 2, Q8_0, 30);
        bench.replace(next.clone());
        for allowed in [0, 1] {
            bench.gpu.allow(allowed);
            let error = bench.context.reload().unwrap_err();
            assert!(
                matches!(error, Error::Device(DeviceError::OutOfMemory { .. })),
                "{error}"
            );
            bench.expect(&original);
            assert_eq!(bench.used(), used);
            assert!(bench.generations.lock().is_empty());
        }
        bench.gpu.allow(u64::MAX);
        assert_eq!(bench.reload().count(Swapped), 2);
        bench.expect(&next);
    }
}

#[test]
fn returning_comes_first_when_memory_is_short() {
    for mut bench in Bench::all() {
        let original = bench.file.clone();
        bench.replace(with(&original, 1, Q8_0, 20));
        bench.reload();
        let next = with(&original, 2, Q8_0, 30);
        bench.replace(next.clone());
        bench.gpu.allow(0);
        let report = bench.reload();
        let failure = report.failure.as_deref().unwrap_or_default();
        assert!(failure.contains("cannot allocate 2176 bytes"), "{failure}");
        assert_eq!(outcomes(&report), [Returned]);
        // What returned is consistent on its own, and is not tried again.
        assert_eq!(bench.model.tensor(1).state, State::OnOriginal);
        bench.expect(&original);
        bench.gpu.allow(u64::MAX);
        let report = bench.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Unchanged, Swapped, Unchanged]
        );
        bench.expect(&next);
    }
}

#[test]
fn a_file_written_in_place_is_noticed() {
    for (loaded, access) in [
        (false, Access::Map),
        (false, Access::Read),
        (true, Access::Map),
    ] {
        let mut bench = Bench::new(sample(), access);
        if loaded {
            bench.model.load_all(|_| true).unwrap();
        }
        let original = bench.file.clone();
        let changed = with(&original, 1, Q4_0, 20);
        std::thread::sleep(Duration::from_millis(20));
        changed.write(&bench.path).unwrap();
        let report = bench.reload();
        assert!(report.changed());
        let expected = if loaded { Swapped } else { InPlace };
        assert_eq!(report.tensors[1].outcome, expected);
        bench.expect(&changed);
        assert_eq!(*bench.generations.lock(), [1]);

        // In another type, in place: what is read out of the file has new bytes.
        let moved = with(&changed, 0, F16, 40);
        moved.write(&bench.path).unwrap();
        let report = bench.reload();
        assert_eq!(report.tensors[0].outcome, Swapped);
        bench.expect(&moved);

        // The bytes that were there at first are gone, unless they were loaded.
        std::thread::sleep(Duration::from_millis(20));
        bench.replace(original.clone());
        let report = bench.reload();
        bench.expect(&original);
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
        let bench = Bench::new(sample(), access);
        if loaded {
            bench.model.load_all(|_| true).unwrap();
        }
        let modified = std::fs::metadata(&bench.path).unwrap().modified().unwrap();
        let mut expected = bench.file.clone();
        for (seed, others_are_known) in [(20, loaded), (21, true)] {
            // As 'cp -p' and 'rsync --inplace --times' do.
            expected = with(&expected, 1, Q4_0, seed);
            until_changed(&bench.path, || {
                expected.write(&bench.path).unwrap();
                let file = std::fs::File::options().write(true).open(&bench.path);
                file.unwrap().set_modified(modified).unwrap();
            });
            let report = bench.reload();
            assert!(report.changed());
            let outcome = if loaded { Swapped } else { InPlace };
            assert_eq!(report.tensors[1].outcome, outcome);
            if others_are_known {
                assert_eq!(report.count(Unchanged), 3);
            }
            bench.expect(&expected);
        }
        assert!(bench.reload().files.is_empty());
    }
}

#[test]
fn other_permissions_and_links_are_no_other_bytes() {
    for bench in Bench::all() {
        let (path, link) = (&bench.path, bench.folder.path().join("link"));
        until_changed(path, || {
            std::fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap();
        });
        assert_eq!(outcomes(&bench.reload()), [Unchanged; 4]);
        until_changed(path, || {
            let _ = std::fs::remove_file(&link);
            std::fs::hard_link(path, &link).unwrap();
        });
        bench.model.load(0).unwrap();
        assert_eq!(outcomes(&bench.reload()), [Unchanged; 4]);
        assert_eq!(bench.model.generation(), 0);
        bench.model.load_all(|_| true).unwrap();
        bench.expect(&bench.file);
    }
}

#[test]
fn a_file_that_was_moved_away_and_back_is_the_original() {
    for bench in Bench::all() {
        let other = with(&bench.file, 1, Q8_0, 20);
        let away = bench.folder.path().join("away");
        until_changed(&bench.path, || {
            std::fs::rename(&bench.path, &away).unwrap();
            std::fs::rename(&away, &bench.path).unwrap();
        });
        std::fs::rename(&bench.path, &away).unwrap();
        other.write(&bench.path).unwrap();
        bench.model.load(0).unwrap();
        assert_eq!(
            outcomes(&bench.reload()),
            [Unchanged, Swapped, Unchanged, Unchanged]
        );
        bench.expect(&other);
        std::fs::rename(&away, &bench.path).unwrap();
        let report = bench.reload();
        assert_eq!(
            outcomes(&report),
            [Unchanged, Returned, Unchanged, Unchanged]
        );
        assert_eq!(bench.model.tensor(1).state, State::OnOriginal);
        bench.expect(&bench.file);
    }
}

#[test]
fn a_file_cut_short_in_place_changes_nothing_that_was_loaded() {
    let bench = Bench::new(sample(), Access::Map);
    bench.model.load_all(|_| true).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let file = std::fs::File::options()
        .write(true)
        .open(&bench.path)
        .unwrap();
    file.set_len(bench.file.bytes().len() as u64 / 2).unwrap();
    assert!(ignored(&bench.reload()).contains("waiting for its writer"));
    bench.expect(&bench.file);
}

#[test]
fn bytes_after_the_end_change_nothing() {
    for bench in Bench::all() {
        std::thread::sleep(Duration::from_millis(20));
        let mut file = std::fs::File::options()
            .append(true)
            .open(&bench.path)
            .unwrap();
        file.write_all(b"trailing bytes that belong to nobody")
            .unwrap();
        let report = bench.reload();
        assert_eq!(report.count(Swapped) + report.count(Refused), 0);
        bench.expect(&bench.file);
        bench.model.load_all(|_| true).unwrap();
        bench.expect(&bench.file);
        assert!(!bench.reload().changed());
    }
}

#[test]
fn a_writer_that_never_stops_is_never_taken_half() {
    let mut bench = Bench::new(sample(), Access::Map);
    let original = bench.file.clone();
    bench.model.load_all(|_| true).unwrap();
    let versions: Vec<Gguf> = (0..2u64)
        .map(|i| {
            let seeds = [i + 100, i + 200, i + 300];
            let once = with(&original, 0, Q8_0, seeds[0]);
            with(&with(&once, 1, Q4_0, seeds[1]), 2, Q4_0, seeds[2])
        })
        .collect();
    let stop = AtomicU64::new(0);
    let taken = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut i = 0;
            while stop.load(Ordering::SeqCst) == 0 {
                // In place: at most moments the file is neither of the two.
                versions[i % 2].write(&bench.path).unwrap();
                if i % 15 == 14 {
                    std::thread::sleep(Duration::from_millis(60));
                }
                i += 1;
            }
        });
        let mut taken = 0;
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while taken < 5 && std::time::Instant::now() < deadline {
            taken += u64::from(bench.reload().changed());
            let tensors: Vec<_> = (0..3).map(|index| bench.bytes(index)).collect();
            let whole =
                |file: &Gguf| (0..3).all(|index| tensors[index] == file.tensors[index].data);
            assert!(
                versions.iter().any(whole) || whole(&original),
                "half of a file was taken"
            );
        }
        stop.store(1, Ordering::SeqCst);
        taken
    });
    assert!(taken >= 5, "a pause of the writer is enough");
    bench.replace(original.clone());
    bench.reload();
    bench.expect(&original);
}

#[test]
fn a_reload_waits_for_evaluations_and_refuses_its_own() {
    let mut bench = Bench::new(sample(), Access::Map);
    bench.replace(with(&bench.file, 1, Q8_0, 20));
    assert_eq!(bench.context.begin().unwrap(), 0);
    assert!(matches!(bench.context.reload(), Err(Error::Busy(_))));
    assert!(matches!(bench.context.begin(), Err(Error::Busy(_))));
    std::thread::scope(|scope| {
        let reload = scope.spawn(|| bench.reload());
        std::thread::sleep(Duration::from_millis(100));
        assert!(!reload.is_finished());
        assert_eq!(
            bench.model.tensor(1).generation,
            0,
            "the evaluation still runs"
        );
        bench.context.end().unwrap();
        let report = reload.join().unwrap();
        assert_eq!(report.count(Swapped), 1);
    });
    assert_eq!(bench.context.begin().unwrap(), 1);
    bench.context.end().unwrap();
    assert!(matches!(bench.context.end(), Err(Error::Busy(_))));
    bench.expect(&bench.file);
}

#[test]
fn every_context_is_told_once_and_may_look_at_the_model() {
    let mut bench = Bench::new(sample(), Access::Map);
    let other = Context::new(bench.model.clone());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (log, model) = (seen.clone(), bench.model.clone());
    let other = Arc::new(other);
    let inside = Arc::downgrade(&other);
    other.on_stale(Some(Arc::new(move |generation| {
        // The switch has happened, and no evaluation can begin before it is over.
        let begun = inside.upgrade().map(|context| context.begin().is_err());
        log.lock()
            .push((generation, model.tensor(1).generation, begun));
    })));
    bench.replace(with(&bench.file, 1, Q8_0, 20));
    bench.reload();
    assert_eq!(*seen.lock(), [(1, 1, Some(true))]);
    assert_eq!(*bench.generations.lock(), [1]);
    drop(other);
    bench.replace(sample());
    bench.reload();
    assert_eq!(seen.lock().len(), 1);
    assert_eq!(*bench.generations.lock(), [1, 2]);
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
    let mut bench = Bench::new(sample(), Access::Map);
    bench.model.load_all(|_| true).unwrap();
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
                let context = Context::new(bench.model.clone());
                while stop.load(Ordering::SeqCst) == 0 {
                    let generation = context.begin().unwrap();
                    let seen = [bench.bytes(1), bench.bytes(2)];
                    let is = |file: &Gguf| (1..3).all(|i| seen[i - 1] == file.tensors[i].data);
                    assert!(versions.iter().any(is) || is(&sample()));
                    assert_eq!(bench.model.generation(), generation);
                    context.end().unwrap();
                    evaluations.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for i in 0..100 {
            versions[i % 2].replace(&bench.path).unwrap();
            swaps += bench.reload().count(Swapped);
        }
        stop.store(1, Ordering::SeqCst);
    });
    assert_eq!(swaps, 200);
    assert!(evaluations.load(Ordering::Relaxed) > 200);
    bench.replace(sample());
    assert_eq!(bench.reload().count(Returned), 2);
}

#[test]
fn many_threads_reload_at_once() {
    let mut bench = Bench::new(sample(), Access::Map);
    bench.replace(with(&bench.file, 1, Q8_0, 20));
    let changed: usize = std::thread::scope(|scope| {
        let reloads: Vec<_> = (0..8).map(|_| scope.spawn(|| bench.reload())).collect();
        let reports = reloads.into_iter().map(|thread| thread.join().unwrap());
        reports.map(|report| usize::from(report.changed())).sum()
    });
    assert_eq!(
        changed, 1,
        "the first took it, the others found nothing to do"
    );
    bench.expect(&bench.file);
}

#[test]
fn real_models_swap_and_return() {
    for (model, variant, swapped) in [
        ("smollm2.gguf", "smollm2-mixed.gguf", 8),
        ("moe.gguf", "moe-mixed.gguf", 4),
    ] {
        let folder = tempfile::tempdir_in(testkit::fixtures::cache()).unwrap();
        let path = folder.path().join("model.gguf");
        // A link is a new name for the file: renaming over it leaves the fixture.
        let place = |name: &str| {
            let beside = folder.path().join("beside");
            std::fs::hard_link(fixture(name), &beside).unwrap();
            std::fs::rename(beside, &path).unwrap();
        };
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
    let bench = Bench::new(sample(), Access::Read);
    bench.model.load_all(|_| true).unwrap();
    let mut zeros = sample();
    zeros
        .tensors
        .iter_mut()
        .for_each(|tensor| tensor.data.fill(0));
    zeros.write(&bench.path).unwrap();
    let report = bench.reload();
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
