//! The engine against a store whose tensors are used through the mapping of their file.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;
use crate::error::DeviceError;
use crate::gguf::{Access, GgufFile, HeaderWriter, OpenError, TypeInfo};
use crate::parallel::Threads;

/// Two tensors that are mapped from one file, or have bytes of their own after a swap.
struct Mapped {
    files: Vec<TrackedFile>,
    /// Tensors whose bytes were hashed, in order.
    hashed: Mutex<Vec<usize>>,
    /// The bytes of swapped tensors.
    private: Mutex<[Option<Vec<u8>>; 2]>,
    /// The most bytes that can be staged.
    free: u64,
    /// Called when changes are staged.
    on_stage: Box<dyn Fn() + Sync>,
    /// Called when changes are in use.
    on_commit: Box<dyn Fn() + Sync>,
}

/// The effect of a change, and the bytes of the tensor then, if they are not those of the mapping.
type Staged = Vec<(Effect, Option<Vec<u8>>)>;

impl Mapped {
    fn is_private(&self, tensor: usize) -> bool {
        self.private.lock()[tensor].is_some()
    }

    /// Returns each byte of the tensors in use.
    fn bytes(&self) -> [u8; 2] {
        [0, 1].map(|tensor| {
            let mut bytes = vec![0; 256];
            let source = &self.files[0].gguf.source;
            let offset = self.files[0].gguf.header.tensors[tensor].offset;
            source.read_at(&mut bytes, offset).unwrap();
            let bytes = self.private.lock()[tensor].clone().unwrap_or(bytes);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
            bytes[0]
        })
    }
}

impl Store for Mapped {
    type Staged = Staged;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
        if self.is_private(tensor) {
            return known;
        }
        self.hashed.lock().push(tensor);
        let file = &self.files[0];
        let info = &file.gguf.header.tensors[tensor];
        let read = || hash_source(&file.gguf.source, info.offset, info.nbytes).ok();
        let hash = known.or_else(read);
        hash.filter(|_| file.is_trusted())
    }

    fn modified_mapped_offset(&self, tensor: usize, id: &FileId) -> Option<u64> {
        let file = &self.files[0];
        let offset = file.gguf.header.tensors[tensor].offset;
        (!self.is_private(tensor) && file.is_write_in_place(id)).then_some(offset)
    }

    fn can_return(&self, tensor: usize, hash: Hash) -> bool {
        let file = &self.files[0].gguf;
        let info = &file.header.tensors[tensor];
        let original = hash_source(&file.source, info.offset, info.nbytes);
        self.is_private(tensor) && original.is_ok_and(|original| original == hash)
    }

    fn original_defects(&self, _tensor: usize) -> Option<Defects> {
        None
    }

    fn need(&self, _changes: &[Change<'_>]) -> Need {
        Need::default()
    }

    fn threads(&self) -> Threads {
        Threads::BESIDE_THE_PROGRAM
    }

    fn group(&self, tensor: usize) -> usize {
        tensor
    }

    fn stage(
        &self,
        changes: &[Change<'_>],
        _on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Staged>, StageError> {
        (self.on_stage)();
        let mut free = self.free;
        let mut staged = Staged::new();
        for change in changes {
            let mut bytes = None;
            let outcome = match change {
                Change::InPlace(_) => Outcome::InPlace,
                Change::Return(_) => Outcome::Returned,
                Change::Swap(new) => {
                    free = free.checked_sub(new.nbytes).ok_or_else(|| {
                        StageError::OutOfMemory(DeviceError::OutOfMemory {
                            device: "host".into(),
                            requested: new.nbytes,
                            free: self.free,
                        })
                    })?;
                    let read = bytes.insert(vec![0; new.nbytes as usize]);
                    new.source.read_at(read, new.offset).unwrap();
                    Outcome::Swapped
                }
            };
            let effect = Effect {
                tensor: change.tensor(),
                outcome,
                placement: String::new(),
            };
            staged.push((effect, bytes));
        }
        Ok(Some(staged))
    }

    fn commit(&self, staged: Staged) -> Result<Commit> {
        let mut effects = Vec::new();
        for (effect, bytes) in staged {
            self.private.lock()[effect.tensor] = bytes;
            effects.push(effect);
        }
        (self.on_commit)();
        Ok(Commit {
            switched: Switched {
                wait: Duration::ZERO,
                switch: Duration::ZERO,
                generation: 1,
            },
            effects,
        })
    }

    fn trust(&self, file: usize, id: FileId) {
        self.files[file].trust(id);
    }
}

/// Returns a model of these tensors: name, number of elements of type F32, and each byte.
fn model(tensors: &[(&str, u64, u8)]) -> Vec<u8> {
    write_tensors(HeaderWriter::new(32), tensors)
}

fn write_tensors(mut header: HeaderWriter, tensors: &[(&str, u64, u8)]) -> Vec<u8> {
    let ty = TypeInfo::from_name("f32").unwrap();
    for (name, elements, _) in tensors {
        header
            .tensor(name.as_bytes(), &[*elements], ty.id, 4 * elements)
            .unwrap();
    }
    let mut bytes = header.finish();
    for (_, elements, byte) in tensors {
        bytes.extend(vec![*byte; 4 * *elements as usize]);
    }
    bytes
}

/// Returns a model with both tensors; the arguments are each byte.
fn both(first: u8, second: u8) -> Vec<u8> {
    model(&[("first.weight", 64, first), ("second.weight", 64, second)])
}

/// Writes a file and sets its time to the past, so that it is read at once.
fn put(path: &Path, bytes: &[u8], seconds: u64) {
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap();
    file.write_all(bytes).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    file.set_modified(time).unwrap();
}

/// Writes a model of two tensors in place, without cutting the file short, and sets its time.
/// `second` is each byte of the second tensor.
fn write(path: &Path, second: u8, seconds: u64) {
    put(path, &both(1, second), seconds);
}

/// Replaces a file by rename.
fn replace(path: &Path, bytes: &[u8]) {
    let beside = path.with_extension("new");
    put(&beside, bytes, 3);
    std::fs::rename(beside, path).unwrap();
}

/// Writes a file beside the model and opens it as a source of overlays.
fn source(model: &Path, name: &str, bytes: &[u8]) -> OverlaySource {
    let path = model.with_file_name(name);
    replace(&path, bytes);
    OverlaySource::open(&path).unwrap()
}

fn open() -> (TempDir, PathBuf, Mapped, Engine) {
    open_model(&both(1, 2))
}

fn open_model(bytes: &[u8]) -> (TempDir, PathBuf, Mapped, Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    put(&path, bytes, 1);
    let store = Mapped {
        files: vec![TrackedFile::new(
            GgufFile::open(&path, Access::Map).unwrap(),
        )],
        hashed: Mutex::default(),
        private: Mutex::default(),
        free: 4096,
        on_stage: Box::new(|| ()),
        on_commit: Box::new(|| ()),
    };
    let engine = Engine::new(&store.files, [(0, 0), (0, 1)].into_iter(), 0);
    (folder, path, store, engine)
}

/// Hashes all tensors, as many as are read at a time.
fn hash_all(engine: &Engine, store: &Mapped) -> Option<Hash> {
    let mut next = 0;
    while next < 2 {
        if !engine.hash_some(store, &mut next) {
            return None;
        }
    }
    engine.content_hash(true)
}

#[test]
fn a_write_in_place_is_reported_although_the_content_was_hashed_since() {
    for (second, outcome) in [(2, Outcome::Unchanged), (3, Outcome::InPlace)] {
        let (_folder, path, store, engine) = open();
        assert!(hash_all(&engine, &store).is_some());
        write(&path, second, 2);
        assert_eq!(hash_all(&engine, &store), None, "a reload trusts it first");
        let report = engine.reload(&store, Trigger::Command).unwrap();
        let outcomes: Vec<Outcome> = report.tensors.iter().map(|t| t.outcome).collect();
        assert_eq!(outcomes, [Outcome::Unchanged, outcome]);
        assert!(hash_all(&engine, &store).is_some());
    }
}

#[test]
fn hashing_lets_a_revert_run_between_two_tensors() {
    let (_folder, _path, store, engine) = open();
    let mut next = 0;
    assert!(engine.hash_some(&store, &mut next));
    assert_eq!((next, store.hashed.lock().len()), (1, 1));
    assert!(engine.revert(&store).unwrap().tensors.is_empty());
    assert_eq!(engine.content_hash(true), None, "one is not hashed yet");
    assert!(engine.hash_some(&store, &mut next));
    assert_eq!(*store.hashed.lock(), [0, 1]);
    assert!(engine.content_hash(true).is_some());
}

/// The tensors that have an overlay, and its file.
fn overlays(engine: &Engine) -> Vec<(usize, std::path::PathBuf)> {
    let changed = engine.changed().into_iter();
    changed
        .filter_map(|of| Some((of.tensor, of.overlay?.0.path)))
        .collect()
}

#[test]
fn a_weight_and_its_scale_have_overlays_from_one_file() {
    let scaled = |weight, scale| model(&[("a.weight", 64, weight), ("a.scale", 64, scale)]);
    let (_folder, path, store, engine) = open_model(&scaled(1, 2));
    let one = source(&path, "one.gguf", &scaled(8, 9));
    let two = source(&path, "two.gguf", &scaled(5, 6));
    let plain = source(&path, "plain.gguf", &model(&[("a.weight", 64, 8)]));
    let fails = |set: &[(usize, &OverlaySource)], with: &str| {
        let error = engine.overlay(&store, &[], set).unwrap_err().to_string();
        assert!(error.contains(with), "{error}");
        assert_eq!(store.bytes(), [1, 2]);
    };
    fails(&[(0, &one), (1, &two)], "are used together");
    fails(&[(0, &plain)], "is used with 'a.scale' in the model");
    engine.overlay(&store, &[], &[(0, &one)]).unwrap();
    assert_eq!((store.bytes(), overlays(&engine).len()), ([8, 9], 2));
    engine.overlay(&store, &[1], &[]).unwrap();
    assert_eq!((store.bytes(), overlays(&engine).len()), ([1, 2], 0));
}

#[test]
fn what_needs_a_new_start_is_noted_until_the_file_returns() {
    let with = |template: &str| {
        let mut header = HeaderWriter::new(32);
        header.value("tokenizer.chat_template", template);
        write_tensors(header, &[("first.weight", 64, 1), ("second.weight", 64, 2)])
    };
    let (_folder, path, store, engine) = open_model(&with("a"));
    let reload = |bytes: &[u8]| {
        replace(&path, bytes);
        let report = engine.reload(&store, Trigger::Command).unwrap();
        report.files[0].reason().to_owned()
    };
    let words = "needs a new start to be used: tokenizer.chat_template";
    assert_eq!(reload(&with("b")), words);
    assert_eq!(engine.noted_files()[0].reason(), words);
    assert_eq!(reload(&with("a")), "");
    assert!(engine.noted_files().is_empty());
}

#[test]
fn an_overlay_with_other_bytes_than_those_of_its_hash_is_refused_whole() {
    let (_folder, path, store, engine) = open();
    let mut other = source(&path, "other.gguf", &both(8, 9));
    engine.overlay(&store, &[], &[(1, &other)]).unwrap();
    let (origin, hash) = engine.changed()[0].overlay.clone().unwrap();
    assert_eq!(origin.path, path.with_file_name("other.gguf"));
    let hash = hash.expect("it was read");
    other.expect(c"first.weight", hash);
    other.expect(c"second.weight", hash);
    engine.overlay(&store, &[1], &[]).unwrap();
    let refused = engine.overlay(&store, &[], &[(0, &other), (1, &other)]);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains(&format!("expected {hash:032x}")), "{text}");
    assert_eq!(store.bytes(), [1, 2]);
    engine.overlay(&store, &[], &[(1, &other)]).unwrap();
    assert_eq!(store.bytes(), [1, 9]);
}

#[test]
fn an_overlay_stays_above_changes_of_the_file_until_it_is_reverted() {
    let (_folder, path, store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    let report = engine.overlay(&store, &[], &[(1, &other)]).unwrap();
    assert_eq!((report.count(Outcome::Swapped), report.commits), (1, 1));
    assert_eq!(store.bytes(), [1, 9]);
    std::fs::remove_file(path.with_file_name("other.gguf")).unwrap();
    assert_eq!(overlays(&engine), [(1, path.with_file_name("other.gguf"))]);
    replace(&path, &both(3, 4));
    let report = engine.reload(&store, Trigger::Command).unwrap();
    let outcomes: Vec<_> = report
        .tensors
        .iter()
        .map(|t| (t.tensor, t.outcome))
        .collect();
    assert_eq!(outcomes, [(0, Outcome::Swapped)]);
    assert_eq!(store.bytes(), [3, 9]);
    // The bytes of the changed file.
    let report = engine.overlay(&store, &[0, 1], &[]).unwrap();
    assert_eq!(report.count(Outcome::Swapped), 1);
    assert_eq!(store.bytes(), [3, 4]);
    assert!(overlays(&engine).is_empty());
    // The tensor follows its file again.
    replace(&path, &both(1, 2));
    let report = engine.reload(&store, Trigger::Command).unwrap();
    assert_eq!(report.count(Outcome::Returned), 2);
    assert_eq!(store.bytes(), [1, 2]);
}

#[test]
fn original_bytes_return_when_an_overlay_is_reverted() {
    let (_folder, path, store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    engine
        .overlay(&store, &[], &[(0, &other), (1, &other)])
        .unwrap();
    assert_eq!(store.bytes(), [8, 9]);
    // A file that cannot be read does not matter: the version in use is the first one.
    replace(&path, b"no model");
    let report = engine.overlay(&store, &[1], &[]).unwrap();
    assert_eq!(report.count(Outcome::Returned), 1);
    assert_eq!(store.bytes(), [8, 2]);
    // The bytes of a file with the same content return, too.
    replace(&path, &both(1, 2));
    engine.reload(&store, Trigger::Command).unwrap();
    let report = engine.overlay(&store, &[0], &[]).unwrap();
    assert_eq!(report.count(Outcome::Returned), 1);
    assert_eq!(store.bytes(), [1, 2]);
    assert!(!store.is_private(0));
}

#[test]
fn a_revert_drops_all_overlays() {
    let (_folder, path, store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    engine.overlay(&store, &[], &[(1, &other)]).unwrap();
    engine.revert(&store).unwrap();
    assert_eq!(store.bytes(), [1, 2]);
    assert!(overlays(&engine).is_empty());
    replace(&path, &both(3, 4));
    engine.reload(&store, Trigger::Command).unwrap();
    assert_eq!(store.bytes(), [3, 4]);
}

#[test]
fn overlays_are_refused_as_a_whole() {
    let (_folder, path, mut store, engine) = open();
    let good = source(&path, "good.gguf", &both(8, 9));
    let sources = [
        (
            model(&[("first.weight", 64, 7)]),
            "no tensor 'second.weight'",
        ),
        (
            model(&[("second.weight", 32, 7)]),
            "has shape [32, 1, 1, 1]",
        ),
        (
            model(&[("second.weight", 64, 0)]),
            "'second.weight' is damaged",
        ),
        (
            model(&[("second.weight", 64, 0xff)]),
            "'second.weight' is damaged",
        ),
    ];
    for (bytes, expected) in sources {
        let bad = source(&path, "bad.gguf", &bytes);
        let refused = engine.overlay(&store, &[], &[(0, &good), (1, &bad)]);
        let reason = refused.unwrap_err().to_string();
        assert!(
            reason.contains(expected) && reason.contains("bad.gguf"),
            "{reason}"
        );
    }
    store.free = 300;
    let refused = engine.overlay(&store, &[], &[(0, &good), (1, &good)]);
    assert!(matches!(refused, Err(Error::Device(_))), "{refused:?}");
    write(&path, 3, 2);
    let refused = engine.overlay(&store, &[], &[(1, &good)]);
    assert!(
        matches!(refused, Err(Error::WrittenInPlace { .. })),
        "{refused:?}"
    );
    assert!(overlays(&engine).is_empty());
    assert!(!store.is_private(0) && !store.is_private(1));
}

#[test]
fn one_commit_reverts_some_overlays_and_sets_others() {
    let (_folder, path, store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    engine.overlay(&store, &[], &[(0, &other)]).unwrap();
    let report = engine.overlay(&store, &[0, 1], &[(1, &other)]).unwrap();
    assert_eq!(report.commits, 1);
    assert_eq!(report.count(Outcome::Returned), 1);
    assert_eq!(report.count(Outcome::Swapped), 1);
    assert_eq!(store.bytes(), [1, 9]);
    // A tensor that is set is not reverted.
    let report = engine.overlay(&store, &[0, 1], &[(1, &other)]).unwrap();
    assert_eq!((report.commits, report.count(Outcome::Unchanged)), (0, 1));
    assert_eq!(store.bytes(), [1, 9]);
}

#[test]
fn a_source_that_is_written_while_it_is_read_is_refused() {
    let (_folder, path, mut store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    let torn = path.with_file_name("other.gguf");
    store.on_stage = Box::new(move || put(&torn, &both(6, 7), 4));
    let refused = engine.overlay(&store, &[], &[(1, &other)]);
    let changing = matches!(refused, Err(Error::Open(OpenError::Changing { .. })));
    assert!(changing, "{refused:?}");
    assert_eq!(store.bytes(), [1, 2]);
    assert!(overlays(&engine).is_empty());
}

#[test]
fn a_file_that_is_being_written_is_reported_once() {
    let (_folder, path, mut store, engine) = open();
    let complete = both(3, 4);
    let short = complete[..complete.len() - 1].to_vec();
    replace(&path, &complete);
    let next = path.clone();
    store.on_stage = Box::new(move || replace(&next, &short));
    let reload = || {
        let report = engine.reload(&store, Trigger::Command).unwrap();
        let ignored = report.files[0].ignored.clone().expect("not read");
        (ignored.cause, ignored.first)
    };
    assert_eq!(reload(), (Cause::Changing, true));
    assert_eq!(reload(), (Cause::Incomplete, false));
    assert_eq!(store.bytes(), [1, 2]);
}

#[test]
fn a_file_that_is_replaced_after_its_bytes_are_in_use_was_taken() {
    let (_folder, path, mut store, engine) = open();
    replace(&path, &both(3, 4));
    let next = path.clone();
    store.on_commit = Box::new(move || replace(&next, &both(5, 6)));
    let report = engine.reload(&store, Trigger::Command).unwrap();
    assert_eq!(report.count(Outcome::Swapped), 2);
    let events: Vec<_> = report.files.iter().map(FileReport::event).collect();
    assert_eq!(events, [FileEvent::Taken]);
    assert_eq!(store.bytes(), [3, 4]);
    store.on_commit = Box::new(|| ());
    engine.reload(&store, Trigger::Command).unwrap();
    assert_eq!(store.bytes(), [5, 6]);
}

#[test]
fn equal_bytes_are_kept_and_not_staged() {
    let (_folder, path, mut store, engine) = open();
    store.on_stage = Box::new(|| panic!("nothing to stage"));
    let same = source(&path, "same.gguf", &both(1, 2));
    let report = engine.overlay(&store, &[], &[(1, &same)]).unwrap();
    assert_eq!((report.count(Outcome::Unchanged), report.commits), (1, 0));
    assert_eq!(overlays(&engine).len(), 1);
    store.on_stage = Box::new(|| ());
    replace(&path, &both(3, 4));
    engine.reload(&store, Trigger::Command).unwrap();
    assert_eq!(store.bytes(), [3, 2], "the overlay is above the file");
    engine.overlay(&store, &[1], &[]).unwrap();
    assert_eq!(store.bytes(), [3, 4]);
}

#[test]
fn a_write_in_place_ends_an_overlay_whose_bytes_are_mapped() {
    let (_folder, path, store, engine) = open();
    let same = source(&path, "same.gguf", &both(1, 2));
    engine.overlay(&store, &[], &[(1, &same)]).unwrap();
    write(&path, 3, 2);
    let report = engine.reload(&store, Trigger::Command).unwrap();
    // The first tensor was never hashed, so that it counts as written, too.
    assert_eq!(report.count(Outcome::InPlace), 2);
    assert_eq!(store.bytes(), [1, 3]);
    assert!(overlays(&engine).is_empty());
}

#[test]
fn overlays_come_from_all_shards_of_a_source() {
    let (_folder, path, store, engine) = open();
    for (number, tensor) in [("first.weight", 64, 8), ("second.weight", 64, 9)]
        .iter()
        .enumerate()
    {
        let mut header = HeaderWriter::new(32);
        header.value("split.no", &(number as u16));
        header.value("split.count", &2u16);
        header.value("split.tensors.count", &2i32);
        let name = crate::gguf::shard_name("other", number as u64, 2);
        let bytes = write_tensors(header, std::slice::from_ref(tensor));
        replace(&path.with_file_name(name), &bytes);
    }
    let first = path.with_file_name("other-00001-of-00002.gguf");
    let other = OverlaySource::open(&first).unwrap();
    engine
        .overlay(&store, &[], &[(0, &other), (1, &other)])
        .unwrap();
    assert_eq!(store.bytes(), [8, 9]);
}

#[test]
fn a_file_that_changed_since_the_last_reload_is_reloaded_before_an_overlay_is_reverted() {
    let (_folder, path, store, engine) = open();
    let other = source(&path, "other.gguf", &both(8, 9));
    engine.overlay(&store, &[], &[(1, &other)]).unwrap();
    replace(&path, &both(3, 4));
    engine.reload(&store, Trigger::Command).unwrap();
    replace(&path, &both(5, 6));
    let refused = engine.overlay(&store, &[1], &[]).unwrap_err().to_string();
    assert!(refused.contains("reload first"), "{refused}");
    assert_eq!(store.bytes(), [3, 9]);
    engine.reload(&store, Trigger::Command).unwrap();
    engine.overlay(&store, &[1], &[]).unwrap();
    assert_eq!(store.bytes(), [5, 6]);
}
