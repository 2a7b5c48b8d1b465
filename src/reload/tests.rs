//! The engine against a store whose tensors are used through the mapping of their file.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;
use crate::gguf::{Access, GgufFile, HeaderWriter, TypeInfo};

/// Tensors that are never staged: a write in place is the only change.
struct Mapped {
    files: Vec<TrackedFile>,
    /// Tensors whose bytes were hashed, in order.
    hashed: Mutex<Vec<usize>>,
}

impl Store for Mapped {
    type Staged = Vec<Effect>;

    fn live_hash(&self, tensor: usize, known: Option<Hash>) -> Option<Hash> {
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
        file.is_write_in_place(id).then_some(offset)
    }

    fn can_return(&self, _tensor: usize, _hash: Hash) -> bool {
        false
    }

    fn original_defects(&self, _tensor: usize) -> Option<Defects> {
        None
    }

    fn need(&self, _changes: &[Change<'_>]) -> Need {
        Need::default()
    }

    fn readers(&self) -> Readers {
        Readers::BESIDE_THE_HOST
    }

    fn group(&self, tensor: usize) -> usize {
        tensor
    }

    fn stage(
        &self,
        changes: &[Change<'_>],
        _on_out_of_memory: OnOutOfMemory,
    ) -> Result<Option<Vec<Effect>>, StageError> {
        let effect = |change: &Change<'_>| match change {
            Change::InPlace(tensor) => Effect {
                tensor: *tensor,
                outcome: Outcome::InPlace,
                placement: String::new(),
            },
            other => panic!("{other:?}"),
        };
        Ok(Some(changes.iter().map(effect).collect()))
    }

    fn commit(&self, effects: Vec<Effect>) -> Result<Commit> {
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

/// Writes a model of two tensors in place, without cutting the file short, and sets its time.
/// `second` is each byte of the second tensor.
fn write(path: &Path, second: u8, seconds: u64) {
    let ty = TypeInfo::from_name("f32").unwrap();
    let mut header = HeaderWriter::new(32);
    for name in ["first.weight", "second.weight"] {
        header.tensor(name.as_bytes(), &[64], ty.id, 256).unwrap();
    }
    let bytes = [header.finish(), vec![1; 256], vec![second; 256]].concat();
    let mut file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap();
    file.write_all(&bytes).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    file.set_modified(time).unwrap();
}

fn open() -> (TempDir, PathBuf, Mapped, Engine) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write(&path, 2, 1);
    let store = Mapped {
        files: vec![TrackedFile::new(
            GgufFile::open(&path, Access::Map).unwrap(),
        )],
        hashed: Mutex::default(),
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
