//! Disks that are full, and processes that end in the middle of a write.

use std::os::unix::process::ExitStatusExt;

use super::*;

/// A swap in a shell where files can have a kilobyte.
fn limited(it: &Fixture, before: &str) -> Output {
    let script = format!("ulimit -f 1; {before} exec \"$@\"");
    Command::new("bash")
        .args(["-c", &script, "sh", PROGRAM, "swap", &it.model])
        .args(["--tensor", ".*ffn.*", "--from", &it.other])
        .output()
        .expect("a shell")
}

/// The size limit of files stands for a full disk and for anything else that ends the
/// process in the middle of a write.
#[test]
fn an_interruption_leaves_the_old_file() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    let output = limited(&it, "");
    assert_eq!(output.status.signal(), Some(libc::SIGXFSZ));
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files().len(), 3, "a part was left: {:?}", it.files());
    // What was left goes with the next run.
    succeeds(&[&it.model, "--tensor", ".*ffn.*", "--from", &it.other]);
    assert_eq!(
        it.files(),
        ["model.gguf", "model.gguf.originals", "other.gguf"]
    );
    // An error, in the place of the signal, is one sentence.
    let it = Fixture::new(32);
    let output = limited(&it, "trap '' XFSZ;");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text.contains("cannot write beside") && text.contains("as it was"),
        "{text}"
    );
    assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
}

/// A file system in memory with a model, unmounted when dropped. Another version of the model is
/// on another file system.
struct SmallDisk {
    folder: TempDir,
    _others: TempDir,
    old: Gguf,
    model: String,
    other: String,
}

impl SmallDisk {
    /// Mounts it, where that is permitted, and writes a model of `size` bytes to it.
    fn new(options: &str, size: i64) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().expect("a folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        let output = mount.arg(folder.path()).output();
        if output.is_ok_and(|output| output.status.success()) {
            let others = tempfile::tempdir().expect("a folder");
            let (old, new) = models_of(size);
            let model = folder.path().join("model.gguf");
            let other = others.path().join("o");
            old.write(&model).expect("a model");
            new.write(&other).expect("another");
            return Some(SmallDisk {
                model: model.display().to_string(),
                other: other.display().to_string(),
                folder,
                _others: others,
                old,
            });
        }
        eprintln!("skipped: a full disk needs root, to mount a small tmpfs");
        None
    }

    fn free(&self) -> u64 {
        let name = std::ffi::CString::new(self.folder.path().to_str().expect("text"));
        let name = name.expect("no NUL");
        let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
        // SAFETY: a C string, and a struct that is read only after it was filled.
        unsafe {
            assert_eq!(libc::statvfs(name.as_ptr(), found.as_mut_ptr()), 0);
            let found = found.assume_init();
            found.f_bavail * found.f_frsize
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

/// A model whose file has exactly `size` bytes, and another version of its tensor.
fn models_of(size: i64) -> (Gguf, Gguf) {
    let of = |elements: i64, seed| Gguf::default().tensor("blk.0.weight", &[elements], F32, seed);
    let rest = of(8, 1).bytes().len() as i64 - 32;
    assert_eq!((size - rest) % 32, 0, "{rest}");
    let elements = (size - rest) / 4;
    (of(elements, 1), of(elements, 2))
}

#[test]
fn a_full_disk_is_found_before_anything_is_written() {
    let Some(disk) = SmallDisk::new("size=64k", 30 * 1024) else {
        return;
    };
    // There is space for the new version, and none for the originals.
    assert!(disk.free() > 30 * 1024 && disk.free() < 60 * 1024);
    let arguments: [&str; 5] = [&disk.model, "--tensor", ".*", "--from", &disk.other];
    let free = format!("and {} are free: free some space", disk.free());
    fails(&arguments, &["the new files need", &free]);
    let text = String::from_utf8(swap(&arguments).stderr).expect("text");
    let needed = text.split_once(" bytes in").map(|(before, _)| before);
    let needed = needed.and_then(|before| before.rsplit(' ').next()?.parse().ok());
    assert!(
        needed.is_some_and(|needed: u64| needed > 2 * 30_000),
        "{text}"
    );
    assert_eq!(bytes(&disk.model), disk.old.bytes());
    assert_eq!(files(disk.folder.path()), ["model.gguf"]);
}

#[test]
fn a_disk_that_fills_up_meanwhile_leaves_the_old_file() {
    // Free space is stated in bytes, and used in pages: the sum of both new files fits,
    // their pages do not.
    let Some(disk) = SmallDisk::new("size=128k", 30 * 1024 - 512) else {
        return;
    };
    let arguments: [&str; 5] = [&disk.model, "--tensor", ".*", "--from", &disk.other];
    let needed = succeeds(&[&arguments[..], &["--dry-run"]].concat());
    let needed: u64 = needed
        .lines()
        .find_map(|line| line.split_once(" bytes are needed"))
        .and_then(|(number, _)| number.trim().parse().ok())
        .unwrap_or_else(|| panic!("no need stated: {needed}"));
    let filler = disk.folder.path().join("filler");
    let page = 4096;
    let left = needed.next_multiple_of(page);
    std::fs::write(&filler, vec![1; (disk.free() - left) as usize]).expect("a file");
    assert!(needed <= disk.free(), "{needed} {}", disk.free());
    fails(
        &arguments,
        &[
            "cannot write beside",
            "as it was",
            "No space left on device",
            &format!("{needed} bytes are needed"),
        ],
    );
    assert_eq!(bytes(&disk.model), disk.old.bytes());
    assert_eq!(files(disk.folder.path()), ["filler", "model.gguf"]);
    std::fs::remove_file(&filler).expect("it was there");
}
