//! Expert streaming on real files: which pages are in the page cache after a layer was scheduled.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use llama_sidecar::model::{Model, Options};
use sidecar_core::experts::{ExpertIndex, Projection};
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::stream::{Matrices, Reader, Settings};
use sidecar_core::trace::{Ids, LayerCounts, Snapshot};
use tempfile::TempDir;
use testkit::skipped;
use testkit::writer::{F32, Gguf, Tensor};

const EXPERTS: u32 = 8;
const PAGE: u64 = 4096;

/// A reader that checks all layers, with one thread.
const ALWAYS: Settings = Settings {
    always: true,
    threads: 1,
    look_ahead_bytes: u64::MAX,
};

/// A model file whose pages are not in memory.
struct Fixture {
    _folder: TempDir,
    path: PathBuf,
    gguf: GgufFile,
}

impl Fixture {
    /// Writes a model; `None` where the page cache of its file system cannot be emptied or read.
    fn new(model: &Gguf) -> Option<Fixture> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.gguf");
        model.write(&path).unwrap();
        // Only clean pages can be dropped.
        File::open(&path).unwrap().sync_all().unwrap();
        let fixture = Fixture {
            gguf: GgufFile::open(&path, Access::Read).unwrap(),
            _folder: folder,
            path,
        };
        let problem = match fixture.cached_pages() {
            Err(error) => format!("cachestat (Linux 6.5) failed: {error}"),
            Ok(_) if fixture.drop_cache() => return Some(fixture),
            Ok(_) => "pages of a file in the target folder stay in memory; \
                set CARGO_TARGET_DIR to a folder on a disk"
                .into(),
        };
        skipped(&problem);
        None
    }

    /// Makes a reader that uses the file while none of its pages is in memory.
    fn reader(&self, change: impl FnOnce(&mut Settings)) -> Reader {
        let mut settings = Settings {
            threads: 2,
            ..ALWAYS
        };
        change(&mut settings);
        let reader = Reader::new(&[&self.gguf], settings, |_| true).unwrap();
        assert!(self.drop_cache());
        reader
    }

    /// Drops all pages of the file from memory; returns whether none is left.
    fn drop_cache(&self) -> bool {
        let file = self.gguf.source.handle();
        let file = file.get().unwrap();
        (0..20).any(|_| {
            // SAFETY: advice for a descriptor that is open.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            let empty = self.cached_pages().unwrap().is_empty();
            if !empty {
                // Pages that are being read cannot be dropped: this waits for them.
                std::fs::read(&self.path).unwrap();
            }
            empty
        })
    }

    /// Maps the file.
    fn map(&self) -> memmap2::Mmap {
        // SAFETY: no program writes the files of these tests.
        unsafe { memmap2::Mmap::map(self.gguf.source.handle().get().unwrap()) }.unwrap()
    }

    /// Returns the pages of the file that are in memory or on their way.
    fn cached_pages(&self) -> std::io::Result<BTreeSet<u64>> {
        let file = self.gguf.source.handle();
        let file = file.get().unwrap();
        let mut found = BTreeSet::new();
        for page in 0..file.metadata()?.len().div_ceil(PAGE) {
            let range = [page * PAGE, PAGE];
            let mut pages = [0u64; 5];
            // SAFETY: `cachestat` reads two numbers and writes five.
            let code = unsafe {
                libc::syscall(451, file.as_raw_fd(), range.as_ptr(), pages.as_mut_ptr(), 0)
            };
            if code != 0 {
                return Err(std::io::Error::last_os_error());
            }
            if pages[0] > 0 {
                found.insert(page);
            }
        }
        Ok(found)
    }

    /// Returns the pages with all matrices of some experts of layers.
    fn pages_of(&self, experts: impl IntoIterator<Item = (u32, u32)>) -> BTreeSet<u64> {
        let index = ExpertIndex::of([&self.gguf]);
        let matrices = experts.into_iter().flat_map(|(layer, expert)| {
            let slices = Projection::ALL.map(|matrix| index.slice(layer, matrix, expert));
            slices.into_iter().flatten()
        });
        let pages = matrices.flat_map(|matrix| {
            matrix.offset / PAGE..(matrix.offset + matrix.nbytes).div_ceil(PAGE)
        });
        pages.collect()
    }
}

/// A model with merged experts, whose borders are inside pages.
fn model(layers: u32) -> Gguf {
    (0..layers).fold(Gguf::default(), |file, layer| {
        ["gate", "up", "down"].iter().fold(file, |file, matrix| {
            let name = format!("blk.{layer}.ffn_{matrix}_exps.weight");
            file.tensor(&name, &[64, 100, EXPERTS.into()], F32, layer.into())
        })
    })
}

/// The file of such a model; `None` where the test cannot run.
fn fixture(layers: u32) -> Option<Fixture> {
    Fixture::new(&model(layers))
}

/// Schedules a layer by its position for tokens with `used` experts each.
fn schedule(reader: &Reader, layer: usize, used: usize, ids: &[i32]) {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let ids = Ids::packed(&bytes, used);
    reader.schedule(layer, Matrices::ALL, &ids);
}

#[test]
fn exactly_the_pages_of_routed_experts_are_read() {
    let Some(fixture) = fixture(3) else { return };
    let reader = fixture.reader(|_| ());
    schedule(&reader, 1, 2, &[0, 5]);
    schedule(&reader, 2, 1, &[7]);
    reader.finish();
    let expected = fixture.pages_of([(1, 0), (1, 5), (2, 7)]);
    assert_eq!(fixture.cached_pages().unwrap(), expected);
    let counts = reader.counts();
    assert_eq!(
        (counts.layers, counts.failed, counts.ahead_bytes),
        (2, 0, 0)
    );
    assert_eq!(
        counts.read_bytes + counts.resident_bytes,
        counts.checked_bytes
    );
    assert!(counts.checked_bytes >= 9 * 64 * 100 * 4);
}

#[test]
fn matrices_that_are_left_out_are_not_read() {
    let Some(fixture) = fixture(1) else { return };
    let reader = fixture.reader(|_| ());
    let mut down = Matrices::default();
    down.insert(Projection::Down);
    let bytes = 3i32.to_ne_bytes();
    let ids = Ids::one(&bytes);
    reader.schedule(0, down, &ids);
    reader.finish();
    let index = ExpertIndex::of([&fixture.gguf]);
    let slice = index.slice(0, Projection::Down, 3).unwrap();
    let pages = slice.offset / PAGE..(slice.offset + slice.nbytes).div_ceil(PAGE);
    assert!(fixture.cached_pages().unwrap().into_iter().eq(pages));
}

/// Where a program computes a graph in parts, each part has matrices of its own.
#[test]
fn parts_of_a_layer_count_once() {
    let Some(fixture) = fixture(2) else { return };
    let reader = fixture.reader(|_| ());
    let ids: Vec<u8> = (0..EXPERTS as i32).flat_map(i32::to_ne_bytes).collect();
    let ids = Ids::packed(&ids, 4);
    for layer in [1, 0, 0, 1] {
        for projection in [Projection::Gate, Projection::Up, Projection::Down] {
            let mut part = Matrices::default();
            part.insert(projection);
            reader.schedule(layer, part, &ids);
            if layer == 0 {
                // The next layer follows as a whole, whatever its last part was.
                reader.finish();
            }
        }
        if layer == 0 {
            let experts = (0..2).flat_map(|layer| (0..EXPERTS).map(move |expert| (layer, expert)));
            assert_eq!(fixture.cached_pages().unwrap(), fixture.pages_of(experts));
        } else {
            reader.finish();
            assert!(fixture.drop_cache());
        }
    }
    assert_eq!(reader.counts().layers, 4);
}

#[test]
fn ids_that_are_no_experts_are_ignored() {
    let Some(fixture) = fixture(2) else { return };
    let reader = fixture.reader(|_| ());
    let ids = [-1, i32::MIN, i32::MAX, EXPERTS as i32, 4096, 2];
    schedule(&reader, 0, ids.len(), &ids);
    schedule(&reader, 2, 1, &[1]);
    schedule(&reader, usize::MAX, 1, &[1]);
    reader.finish();
    assert_eq!(fixture.cached_pages().unwrap(), fixture.pages_of([(0, 2)]));
}

#[test]
fn experts_that_only_some_matrices_have_are_read() {
    let file = Gguf::default()
        .tensor("blk.0.ffn_gate_exps.weight", &[64, 100, 8], F32, 1)
        .tensor("blk.0.ffn_down_exps.weight", &[64, 100, 4], F32, 2)
        .tensor("blk.0.ffn_up.6.weight", &[64, 100], F32, 3)
        .tensor("blk.1.ffn_down_exps.weight", &[64, 100, 5000], F32, 3);
    let Some(fixture) = Fixture::new(&file) else {
        return;
    };
    let reader = fixture.reader(|_| ());
    // The index has no layers beyond its bound of experts.
    assert_eq!((reader.position(0), reader.position(1)), (Some(0), None));
    schedule(&reader, 0, 2, &[3, 6]);
    reader.finish();
    let expected = fixture.pages_of([(0, 3), (0, 6)]);
    assert_eq!(fixture.cached_pages().unwrap(), expected);
}

#[test]
fn a_batch_that_uses_most_experts_reads_the_next_layer() {
    let Some(fixture) = fixture(3) else { return };
    let reader = fixture.reader(|_| ());
    schedule(&reader, 0, 3, &[0, 1, 2, 3, 4, 5]);
    reader.finish();
    let routed = (0..6).map(|expert| (0, expert));
    let next = (0..EXPERTS).map(|expert| (1, expert));
    let expected = fixture.pages_of(routed.chain(next));
    assert_eq!(fixture.cached_pages().unwrap(), expected);
    assert!(reader.counts().ahead_bytes > 0);
    // Fewer experts, or one token, do not read ahead.
    let reader = fixture.reader(|_| ());
    schedule(&reader, 0, 2, &[0, 1, 2, 3]);
    schedule(&reader, 1, 6, &[0, 1, 2, 3, 4, 5]);
    reader.finish();
    assert_eq!(reader.counts().ahead_bytes, 0);
}

/// The most used experts of a trace are read without a layer that is routed, as many as fit.
#[test]
fn the_most_used_experts_of_a_trace_are_read() {
    let Some(fixture) = fixture(2) else { return };
    let counts = |layer, experts: [u64; EXPERTS as usize]| LayerCounts {
        layer,
        tokens: 9,
        experts: experts.to_vec(),
        locality: None,
    };
    let trace = Snapshot {
        layers: vec![
            counts(0, [1, 9, 0, 0, 0, 8, 0, 0]),
            counts(1, [0, 0, 7, 0, 0, 0, 0, 1]),
            counts(5, [9; EXPERTS as usize]),
        ],
        ..Snapshot::default()
    };
    let reader = fixture.reader(|_| {});
    let index = ExpertIndex::of([&fixture.gguf]);
    let slices = |layer, expert| {
        let matrices = Projection::ALL.into_iter();
        matrices.filter_map(move |matrix| index.slice(layer, matrix, expert))
    };
    let expert: u64 = slices(0, 0).map(|slice| slice.nbytes).sum();
    assert_eq!(reader.request_hottest(&trace, 3 * expert + 1), 3);
    reader.finish();
    assert_eq!(
        fixture.cached_pages().unwrap(),
        fixture.pages_of([(0, 1), (0, 5), (1, 2)])
    );
    assert_eq!(reader.counts().read_bytes, 0);
    assert_eq!(reader.request_hottest(&trace, u64::MAX), 5);
}

#[test]
fn matrices_that_were_left_out_are_not_read_ahead() {
    let Some(fixture) = fixture(2) else { return };
    let reader = fixture.reader(|_| ());
    let none = Ids {
        bytes: &[],
        used: 0,
        tokens: 0,
        used_stride: 4,
        token_stride: 4,
    };
    reader.schedule(1, Matrices::default(), &none);
    schedule(&reader, 0, 4, &[0, 1, 2, 3, 4, 5, 6, 7]);
    reader.finish();
    let expected = fixture.pages_of((0..EXPERTS).map(|expert| (0, expert)));
    assert_eq!(fixture.cached_pages().unwrap(), expected);
}

#[test]
fn threads_schedule_at_once() {
    let Some(fixture) = fixture(4) else { return };
    let reader = fixture.reader(|settings| settings.threads = 3);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let reader = &reader;
            scope.spawn(move || {
                for step in 0..400 {
                    // Experts 0 to 3 in one thread, 4 to 6 in the other.
                    let expert = (step / 4 % (4 - thread) + 4 * thread) as i32;
                    schedule(reader, step % 4, 1, &[expert]);
                }
            });
        }
    });
    reader.finish();
    let experts = (0..4).flat_map(|layer| (0..7).map(move |expert| (layer, expert)));
    let expected = fixture.pages_of(experts);
    assert_eq!(fixture.cached_pages().unwrap(), expected);
    assert_eq!(reader.counts().layers, 800);
}

/// Schedules layer 0 until the reader rests.
fn rest(reader: &Reader) {
    let rests = |_| {
        schedule(reader, 0, 1, &[0]);
        reader.finish();
        reader.counts().resting
    };
    assert!((0..1000).any(rests));
}

#[test]
fn a_reader_rests_until_a_page_fault_waits_for_the_disk() {
    let Some(fixture) = fixture(1) else { return };
    let reader = fixture.reader(|settings| settings.always = false);
    rest(&reader);
    assert!(fixture.drop_cache());
    let before = reader.counts().major_faults;
    let map = fixture.map();
    std::hint::black_box(map[map.len() - 1]);
    assert!(reader.counts().major_faults > before);
    reader.finish();
    assert!(!reader.counts().resting);
    schedule(&reader, 0, 1, &[0]);
    reader.finish();
    assert!(
        fixture
            .cached_pages()
            .unwrap()
            .is_superset(&fixture.pages_of([(0, 0)]))
    );
}

#[test]
fn a_page_fault_of_another_file_costs_one_pass() {
    let (Some(fixture), Some(other)) = (Fixture::new(&model(1)), Fixture::new(&model(1))) else {
        return;
    };
    let reader = fixture.reader(|settings| settings.always = false);
    // The kernel may drop pages at any time, except locked ones.
    let locked = fixture.map();
    if let Err(error) = locked.lock() {
        skipped(&format!(
            "locked pages: {error}; raise the limit (ulimit -l)"
        ));
        return;
    }
    // Page faults are counted for the process, with those of tests that run at the same time.
    let before = reader.counts().major_faults;
    rest(&reader);
    let rested = reader.counts();
    for _ in 0..4 {
        assert!(other.drop_cache());
        let map = other.map();
        let faults = reader.counts().major_faults;
        std::hint::black_box(map[map.len() - 1]);
        assert!(reader.counts().major_faults > faults);
        for _ in 0..100 {
            schedule(&reader, 0, 1, &[0]);
            reader.finish();
        }
        let after = reader.counts();
        let pass = fixture.pages_of([(0, 0)]).len() as u64 * PAGE;
        let checked = after.checked_bytes - rested.checked_bytes;
        let samples = (after.layers - rested.layers).div_ceil(256);
        // For each fault, at most the pass after it and a unit of the next one.
        let passes = 2 * (after.major_faults - before) + samples;
        assert!(
            checked >= pass && checked <= passes * pass,
            "{checked} of {pass} bytes, {passes}"
        );
    }
    rest(&reader);
}

#[test]
fn a_reader_rests_until_a_sample_has_missing_pages() {
    let Some(fixture) = fixture(1) else { return };
    let reader = fixture.reader(|settings| settings.always = false);
    rest(&reader);
    let works_again = |_| {
        // Programs that read files without a mapping have no page faults.
        assert!(fixture.drop_cache());
        schedule(&reader, 0, 1, &[0]);
        reader.finish();
        !reader.counts().resting
    };
    assert!((0..300).any(works_again));
}

#[test]
fn a_reader_that_always_checks_does_not_rest() {
    let Some(fixture) = fixture(1) else { return };
    let reader = fixture.reader(|_| ());
    for _ in 0..50 {
        schedule(&reader, 0, 1, &[0]);
        reader.finish();
        assert!(!reader.counts().resting);
    }
}

#[test]
fn a_truncated_file_stops_the_reader() {
    let Some(fixture) = fixture(4) else { return };
    let reader = fixture.reader(|_| ());
    schedule(&reader, 0, 1, &[0]);
    let file = File::options().write(true).open(&fixture.path).unwrap();
    file.set_len(1000).unwrap();
    let all: Vec<i32> = (0..EXPERTS as i32).collect();
    for layer in 0..4 {
        schedule(&reader, layer, all.len(), &all);
        reader.finish();
    }
    assert!(reader.counts().stopped);
    // Further calls do nothing, except samples.
    let checked = reader.counts().checked_bytes;
    schedule(&reader, 0, 1, &[0]);
    reader.finish();
    assert_eq!(reader.counts().checked_bytes, checked);
}

#[test]
fn a_reader_ends_while_an_expert_is_read() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("model.gguf");
    let mut model = Gguf::default();
    model.tensors.push(Tensor {
        name: "blk.0.ffn_down_exps.weight".into(),
        ne: vec![1 << 20, 1 << 18, 2],
        ty: F32,
        data: Vec::new(),
    });
    model.write(&path).unwrap();
    let written = File::options().write(true).open(&path).unwrap();
    let len = written.metadata().unwrap().len() + (2 << 40);
    if let Err(error) = written.set_len(len) {
        return skipped(&format!("a file of {len} bytes: {error}"));
    }
    let gguf = GgufFile::open(&path, Access::Read).unwrap();
    let reader = Reader::new(&[&gguf], ALWAYS, |_| true).unwrap();
    schedule(&reader, 0, 1, &[1]);
    // Takes minutes if the thread reads all of the expert, which has 1 TB.
    drop(reader);
}

#[test]
fn a_reader_with_many_threads_finishes() {
    let Some(fixture) = fixture(2) else { return };
    let reader = fixture.reader(|settings| settings.threads = 1000);
    schedule(&reader, 1, 1, &[4]);
    reader.finish();
    assert_eq!(fixture.cached_pages().unwrap(), fixture.pages_of([(1, 4)]));
}

#[test]
fn a_forked_child_can_use_and_drop_a_reader() {
    let Some(fixture) = fixture(2) else { return };
    let reader = fixture.reader(|_| ());
    schedule(&reader, 0, 1, &[0]);
    let ids = 1i32.to_ne_bytes();
    // SAFETY: the child calls the reader, which takes no lock that another thread has, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the child if a call waits for a thread that the child does not have.
        unsafe { libc::alarm(60) };
        let ids = Ids::packed(&ids, 1);
        reader.schedule(1, Matrices::ALL, &ids);
        reader.finish();
        drop(reader);
        // SAFETY: ends the child without handlers of the parent.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: waits for the child of this test.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    reader.finish();
    assert_eq!(fixture.cached_pages().unwrap(), fixture.pages_of([(0, 0)]));
}

#[test]
fn a_model_without_experts_has_no_reader() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let file = Gguf::default().tensor("blk.0.ffn_down.weight", &[64, 64], F32, 1);
    file.write(&path).unwrap();
    let gguf = GgufFile::open(&path, Access::Read).unwrap();
    let error = Reader::new(&[&gguf], ALWAYS, |_| true).unwrap_err();
    assert!(error.to_string().contains("no routed experts"));
}

#[test]
fn tensors_are_in_place_until_they_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    model(1).write(&path).unwrap();
    let name = CString::new("blk.0.ffn_up_exps.weight").unwrap();
    for access in [Access::Map, Access::Read] {
        let options = Options {
            access,
            ..Options::host()
        };
        let model = Model::open(&path, options).unwrap();
        let index = model.find(&name).unwrap();
        assert_eq!(model.is_in_place(index), access == Access::Map);
        model.load(index).unwrap();
        assert!(!model.is_in_place(index));
    }
}

/// Makes a reader that rests.
fn resting_reader(file: &GgufFile) -> Reader {
    let settings = Settings {
        always: false,
        ..ALWAYS
    };
    Reader::new(&[file], settings, |_| true).unwrap()
}

/// Reads two experts of a layer, of which the kernel does not count pages, and checks that they
/// are read, and that the reader rests when they are in memory. Returns the bytes that were read.
fn read_uncounted(fixture: &Fixture, reader: &Reader) -> u64 {
    assert!(fixture.drop_cache());
    schedule(reader, 1, 2, &[0, 5]);
    reader.finish();
    let read = fixture.cached_pages().unwrap();
    assert!(read.is_superset(&fixture.pages_of([(1, 0), (1, 5)])));
    let counts = reader.counts();
    std::fs::read(&fixture.path).unwrap();
    // Page faults of other tests let the reader look again.
    let rests = |_| {
        schedule(reader, 1, 2, &[0, 5]);
        reader.finish();
        reader.counts().resting
    };
    let has_rested = (0..1000).any(rests);
    let later = reader.counts();
    assert!(has_rested && !later.stopped, "{later:?}");
    assert_eq!(later.read_bytes, counts.read_bytes);
    counts.read_bytes
}

#[test]
fn pages_that_the_user_may_not_count_are_probed() {
    let Some(fixture) = fixture(2) else { return };
    let reader = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            // SAFETY: changes the user of file accesses for this thread and those that it starts;
            // an invalid number only returns the user.
            let user = unsafe {
                libc::setfsuid(65534);
                libc::setfsuid(u32::MAX)
            };
            (user == 65534).then(|| resting_reader(&fixture.gguf))
        });
        made.join().unwrap()
    });
    match reader {
        Some(reader) => assert!(read_uncounted(&fixture, &reader) > 0),
        None => skipped("this process cannot access files as another user"),
    }
}

#[test]
fn experts_in_an_overlay_are_read() {
    let Some(fixture) = fixture(2) else { return };
    let empty = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let overlay = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let lower = fixture.path.parent().unwrap().display().to_string();
    let options = format!("lowerdir={lower}:{}", empty.path().display());
    let mounted = std::process::Command::new("mount")
        .args(["-t", "overlay", "overlay", "-o", &options])
        .arg(overlay.path())
        .output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return skipped("an overlay cannot be mounted");
    }
    let path = overlay.path().join("model.gguf");
    let read = std::panic::catch_unwind(|| {
        let file = GgufFile::open(&path, Access::Read).unwrap();
        read_uncounted(&fixture, &resting_reader(&file));
    });
    let unmounted = std::process::Command::new("umount")
        .arg(overlay.path())
        .status();
    assert!(unmounted.unwrap().success());
    assert!(read.is_ok());
}
