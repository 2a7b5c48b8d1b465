//! A folder that is shared: several swaps at a time, owners, attributes, links.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use super::*;

const NOBODY: u32 = 65534;

/// A model of `tensors` small tensors.
fn many(tensors: u64, seed: u64) -> Gguf {
    (0..tensors).fold(Gguf::default(), |file, at| {
        let name = format!("blk.{at}.ffn_down.weight");
        file.tensor(&name, &[32, 3], Q8_0, seed + at)
    })
}

/// A folder with `model.gguf` and `other.gguf`.
fn pair(model: &Gguf, other: &Gguf) -> Fixture {
    let it = Fixture::new(32);
    model.write(it.model.as_ref()).expect("a model");
    other.write(it.other.as_ref()).expect("another");
    it
}

fn is_root() -> bool {
    // SAFETY: the call has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("skipped: another owner needs root");
    }
    root
}

#[test]
fn concurrent_swaps_are_all_kept() {
    const SWAPS: u64 = 8;
    let it = pair(&many(SWAPS, 100), &many(SWAPS, 200));
    let before = bytes(&it.model);
    let start = |at: u64| {
        let regex = format!("blk.{at}.*");
        let mut command = Command::new(PROGRAM);
        command.arg("swap").args(it.tensors(&regex));
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    for child in (0..SWAPS).map(start).collect::<Vec<_>>() {
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", said(&output));
    }
    assert_eq!(bytes(&it.model), bytes(&it.other));
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
}

#[test]
fn a_swap_waits_for_another_and_takes_its_result() {
    let (model, other) = (many(2, 100), many(2, 200));
    let it = pair(&model, &other);
    let lock = File::open(&it.model).expect("a model");
    lock.lock().expect("a lock");
    let mut child = Command::new(PROGRAM)
        .arg("swap")
        .args(it.tensors("blk.1.*"))
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    errors.read_line(&mut line).expect("text");
    assert!(
        line.contains("model.gguf") && line.contains("waiting for its end"),
        "{line}"
    );
    // What the other one did meanwhile: a new file at the path.
    let mut half = model.clone();
    half.tensors[0] = other.tensors[0].clone();
    half.replace(it.model.as_ref()).expect("a model");
    drop(lock);
    assert!(child.wait().expect("it ends").success());
    assert_eq!(bytes(&it.model), other.bytes());
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), half.bytes());
}

/// Waits until a change gets another time than the model has: some file systems stamp changes
/// with a clock that ticks every few milliseconds.
fn next_tick(it: &Fixture) {
    let changed = |path: &str| {
        let found = fs::metadata(path).expect("a file");
        (found.ctime(), found.ctime_nsec())
    };
    let scratch = tempfile::NamedTempFile::new_in(it.folder.path()).expect("a file");
    while changed(&path(scratch.path())) <= changed(&it.model) {
        fs::write(scratch.path(), "a change").expect("free space");
    }
}

/// Runs `meanwhile` after a swap of all tensors was planned, and before it is written.
fn interrupted(it: &Fixture, meanwhile: impl FnOnce()) -> Output {
    // The list of tensors is longer than the pipe: it holds the program up.
    let (mut list, out) = std::io::pipe().expect("a pipe");
    // SAFETY: the descriptor is open; the call changes its buffer only.
    let size = unsafe { libc::fcntl(out.as_raw_fd(), libc::F_SETPIPE_SZ, 4096) };
    assert_eq!(size, 4096);
    let child = {
        let mut command = Command::new(PROGRAM);
        command.arg("swap").args(it.tensors(".*"));
        let command = command.stdout(out).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    let mut first = [0; 1];
    list.read_exact(&mut first).expect("a byte");
    next_tick(it);
    meanwhile();
    let mut rest = Vec::new();
    list.read_to_end(&mut rest).expect("text");
    let mut output = child.wait_with_output().expect("it ends");
    output.stdout = rest;
    output
}

#[test]
fn a_model_that_another_program_changes_meanwhile_is_left_alone() {
    const TENSORS: u64 = 200;
    let (model, other) = (many(TENSORS, 1000), many(TENSORS, 5000));
    let replaced = many(TENSORS, 9000);
    type Meanwhile<'a> = &'a dyn Fn(&Fixture);
    let changes: [(Meanwhile<'_>, &Gguf); 3] = [
        (
            &|it| replaced.replace(it.model.as_ref()).expect("a model"),
            &replaced,
        ),
        // In place, with the old time of modification.
        (
            &|it| {
                let times = fs::metadata(&it.model).and_then(|found| found.modified());
                replaced.write(it.model.as_ref()).expect("a model");
                let file = File::options().write(true).open(&it.model);
                let file = file.expect("a model");
                file.set_modified(times.expect("a time")).expect("a time");
            },
            &replaced,
        ),
        // Other permissions.
        (
            &|it| {
                let mode = fs::Permissions::from_mode(0o640);
                fs::set_permissions(&it.model, mode).expect("a mode");
            },
            &model,
        ),
    ];
    for (change, expected) in changes {
        let it = pair(&model, &other);
        let output = interrupted(&it, || change(&it));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("model.gguf") && text.contains("try again"),
            "{text}"
        );
        assert_eq!(bytes(&it.model), expected.bytes());
        assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
    }
}

#[test]
fn owner_group_and_mode_stay() {
    let it = Fixture::new(32);
    if !is_root() {
        return;
    }
    chown(&it.model, Some(NOBODY), Some(NOBODY - 1)).expect("an owner");
    fs::set_permissions(&it.model, fs::Permissions::from_mode(0o640)).expect("a mode");
    let of = |path: &str| {
        let found = fs::metadata(path).expect("a file");
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    succeeds(&it.tensors(".*ffn.*"));
    let expected = (NOBODY, NOBODY - 1, 0o640);
    assert_eq!(of(&it.model), expected);
    assert_eq!(of(&it.at("model.gguf.originals")), expected);
    succeeds(&["undo", &it.model]);
    assert_eq!(of(&it.model), expected);
}

#[test]
fn an_owner_that_cannot_be_kept_stops_the_swap() {
    let it = Fixture::new(32);
    if !is_root() {
        return;
    }
    let before = bytes(&it.model);
    // A user who may write in the folder, and does not own the model.
    chown(it.folder.path(), Some(NOBODY), Some(NOBODY)).expect("an owner");
    let program = it.at("llama-sidecar");
    // Another process copies it: a file that is open for writing, also in a process that
    // another test starts just then, cannot be executed.
    let copied = Command::new("cp").args([PROGRAM, &program]).status();
    assert!(copied.is_ok_and(|status| status.success()));
    let output = Command::new(&program)
        .arg("swap")
        .args(it.tensors(".*ffn.*"))
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "user 0 and group 0",
        "Operation not permitted",
        "it is as it was",
        "as user 0",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(bytes(&it.model), before);
    assert_eq!(fs::metadata(&it.model).expect("it").uid(), 0);
    assert_eq!(it.files(), ["llama-sidecar", "model.gguf", "other.gguf"]);
}

/// A POSIX ACL in the form of its attribute: version 2, then tag, permissions and id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        out.extend(tag.to_le_bytes());
        out.extend(permissions.to_le_bytes());
        out.extend(id.to_le_bytes());
    }
    out
}

/// Sets an attribute, where the file system has such.
fn set(path: &str, name: &str, value: &[u8]) -> bool {
    let set = xattr::set(path, name, value);
    if let Err(error) = &set {
        eprintln!("skipped: the temporary folder takes no attribute {name}: {error}");
    }
    set.is_ok()
}

#[test]
fn access_lists_and_attributes_stay() {
    const NONE: u32 = u32::MAX;
    const ACCESS: &str = "system.posix_acl_access";
    const DEFAULT: &str = "system.posix_acl_default";
    let it = Fixture::new(32);
    // Owner, one more user, group, mask, others.
    let access = acl(&[
        (1, 6, NONE),
        (2, 4, NOBODY),
        (4, 0, NONE),
        (0x10, 4, NONE),
        (0x20, 0, NONE),
    ]);
    let origin = b"https://example.org/model.gguf";
    if !set(&it.model, "user.xdg.origin.url", origin) || !set(&it.model, ACCESS, &access) {
        return;
    }
    let get = |name: &str| xattr::get(&it.model, name).expect("attributes");
    let mode = || fs::metadata(&it.model).expect("a file").mode();
    let before = mode();
    succeeds(&it.tensors(".*ffn.*"));
    assert_eq!(get("user.xdg.origin.url").as_deref(), Some(&origin[..]));
    assert_eq!(get(ACCESS), Some(access.clone()));
    assert_eq!(mode(), before);
    succeeds(&["undo", &it.model]);
    assert_eq!(get(ACCESS), Some(access.clone()));
    // A list that the folder gives to new files is not given to a model that has none.
    xattr::remove(&it.model, ACCESS).expect("it was there");
    fs::set_permissions(&it.model, fs::Permissions::from_mode(0o640)).expect("a mode");
    assert!(set(&path(it.folder.path()), DEFAULT, &access));
    succeeds(&it.tensors(".*ffn.*"));
    assert_eq!(get(ACCESS), None);
    assert_eq!(mode() & 0o7777, 0o640);
}

#[test]
fn a_link_stays_one_and_the_file_behind_it_changes() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    // As in caches of downloads: snapshots/main/model.gguf -> ../../blobs/0123, and a link
    // to the link.
    for folder in ["blobs", "snapshots", "snapshots/main"] {
        fs::create_dir(it.at(folder)).expect("a folder");
    }
    let (blob, link) = (it.at("blobs/0123"), it.at("snapshots/main/m.gguf"));
    fs::rename(&it.model, &blob).expect("a rename");
    symlink("../../blobs/0123", &link).expect("a link");
    symlink("snapshots/main/m.gguf", &it.model).expect("a link");
    succeeds(&it.tensors(".*ffn.*"));
    for link in [&link, &it.model] {
        assert!(fs::symlink_metadata(link).expect("a link").is_symlink());
        assert_eq!(bytes(link), model(Q8_0, 20, 32).bytes());
    }
    assert!(fs::symlink_metadata(&blob).expect("a file").is_file());
    assert_eq!(files(it.at("blobs").as_ref()), ["0123", "0123.originals"]);
    assert_eq!(files(it.at("snapshots/main").as_ref()), ["m.gguf"]);
    assert_eq!(
        it.files(),
        ["blobs", "model.gguf", "other.gguf", "snapshots"]
    );
    // By another name of the same file.
    succeeds(&["undo", &link]);
    assert_eq!(bytes(&it.model), before);
    assert_eq!(files(it.at("blobs").as_ref()), ["0123"]);
}

#[test]
fn links_to_shards_are_followed_one_by_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let [real, links, others] = ["real", "links", "others"].map(|name| {
        let path = folder.path().join(name);
        fs::create_dir(&path).expect("a folder");
        path
    });
    for number in 1..3 {
        shard(&others, number, 2, Q8_0);
        let file = shard(&real, number, 2, Q4_0);
        let blob = real.join(format!("blob{number}"));
        fs::rename(&file, &blob).expect("a rename");
        symlink(&blob, links.join(file.file_name().expect("a name"))).expect("a link");
    }
    let name = "m-00001-of-00002.gguf";
    let (model, from) = (path(&links.join(name)), path(&others.join(name)));
    succeeds(&[&model, "--tensor", ".*", "--from", &from]);
    assert_eq!(bytes(real.join("blob1")), bytes(&from));
    assert_eq!(
        files(&real),
        ["blob1", "blob1.originals", "blob2", "blob2.originals"]
    );
    assert_eq!(files(&links).len(), 2);
    succeeds(&["undo", &model]);
    assert_eq!(files(&real), ["blob1", "blob2"]);
}

#[test]
fn shapes_that_differ_in_trailing_ones_are_the_same() {
    let of = |ne: &[i64], ty, seed| {
        let file = Gguf::default().tensor("blk.0.attn_norm.weight", ne, ty, seed);
        file.tensor("blk.0.ffn_down.weight", &[32, 3], F32, 3)
    };
    for (old, new) in [(&[64][..], &[64, 1][..]), (&[64, 1, 1], &[64])] {
        let it = pair(&of(old, F32, 1), &of(new, Q8_0, 2));
        succeeds(&it.tensors(".*norm.*"));
        assert_eq!(bytes(&it.model), of(old, Q8_0, 2).bytes());
        succeeds(&["undo", &it.model]);
        assert_eq!(bytes(&it.model), of(old, F32, 1).bytes());
    }
}

/// A file that cannot be renamed over until this is dropped.
struct Immutable(PathBuf);

impl Immutable {
    fn new(path: &Path) -> Option<Immutable> {
        let output = Command::new("chattr").arg("+i").arg(path).output();
        if output.is_ok_and(|output| output.status.success()) {
            return Some(Immutable(path.to_owned()));
        }
        eprintln!("skipped: a rename that fails needs root, and chattr on the temporary folder");
        None
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        let _ = Command::new("chattr").arg("-i").arg(&self.0).status();
    }
}

#[test]
fn a_rename_that_fails_leaves_every_file_with_its_originals() {
    let folder = tempfile::tempdir().expect("a folder");
    let others = tempfile::tempdir().expect("a folder");
    let shards: Vec<_> = (1..3).map(|n| shard(folder.path(), n, 2, Q4_0)).collect();
    let from: Vec<_> = (1..3).map(|n| shard(others.path(), n, 2, Q8_0)).collect();
    let before: Vec<_> = shards.iter().map(bytes).collect();
    let arguments = [path(&shards[0]), path(&from[0])];
    let arguments: [&str; 5] = [&arguments[0], "--tensor", ".*", "--from", &arguments[1]];
    let Some(immutable) = Immutable::new(&shards[1]) else {
        return;
    };
    fails(
        &arguments,
        &[
            "1 of 2 files are swapped",
            "cannot rename over",
            "00002-of-00002.gguf; it is as it was",
        ],
    );
    assert_eq!(bytes(&shards[0]), bytes(&from[0]));
    assert_eq!(bytes(&shards[1]), before[1]);
    let names = files(folder.path());
    let originals = "m-00001-of-00002.gguf.originals";
    assert_eq!(
        names,
        ["m-00001-of-00002.gguf", originals, "m-00002-of-00002.gguf"]
    );
    drop(immutable);
    succeeds(&arguments);
    assert_eq!(bytes(&shards[1]), bytes(&from[1]));
    succeeds(&["undo", arguments[0]]);
    assert_eq!(shards.iter().map(bytes).collect::<Vec<_>>(), before);
}
