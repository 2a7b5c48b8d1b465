//! `llama-sidecar swap`, as a user runs it.

#![allow(
    clippy::disallowed_methods,
    reason = "the paths are those of the tests"
)]

mod damaged;
mod disk;
mod folder;
mod originals;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;
use testkit::writer::{F16, F32, Gguf, Kv, Q4_0, Q8_0};

const PROGRAM: &str = env!("CARGO_BIN_EXE_llama-sidecar");

fn swap(arguments: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    let name = (arguments[0] != "undo").then_some("swap");
    command.args(name).args(arguments);
    command.output().expect("it starts")
}

fn said(output: &Output) -> String {
    let bytes = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8(bytes).expect("text")
}

fn succeeds(arguments: &[&str]) -> String {
    let output = swap(arguments);
    assert!(output.status.success(), "{}", said(&output));
    said(&output)
}

/// Expects a failure with one sentence, which contains these texts.
fn fails(arguments: &[&str], with: &[&str]) {
    let output = swap(arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    for part in with {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// A model of four tensors; `ty` and `seed` are those of two of them.
fn model(ty: u32, seed: u64, alignment: u64) -> Gguf {
    let mut file = Gguf {
        alignment,
        ..Gguf::default()
    };
    file = file.kv("llama.text", Kv::Text("a value".into()));
    file.tensor("token_embd.weight", &[64, 9], F16, 1)
        .tensor("blk.0.ffn_down.weight", &[64, 7], ty, seed)
        .tensor("blk.0.attn_norm.weight", &[5], F32, 3)
        .tensor("blk.1.ffn_down.weight", &[32, 3], ty, seed + 1)
}

struct Fixture {
    folder: TempDir,
    model: String,
    other: String,
}

impl Fixture {
    fn new(alignment: u64) -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name).display().to_string();
        let (old, other) = (at("model.gguf"), at("other.gguf"));
        model(Q4_0, 10, alignment)
            .write(old.as_ref())
            .expect("a model");
        model(Q8_0, 20, 32).write(other.as_ref()).expect("another");
        Fixture {
            folder,
            model: old,
            other,
        }
    }

    /// Names of what is in the folder.
    fn files(&self) -> Vec<String> {
        files(self.folder.path())
    }

    /// A path in the folder.
    fn at(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Arguments of a swap of the tensors that match.
    fn tensors<'a>(&'a self, regex: &'a str) -> [&'a str; 5] {
        [&self.model, "--tensor", regex, "--from", &self.other]
    }
}

/// Names of what is in a folder.
fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().into_owned()
    };
    let mut names: Vec<_> = entries.map(name).collect();
    names.sort();
    names
}

fn bytes(path: impl AsRef<Path>) -> Vec<u8> {
    std::fs::read(path).expect("a file")
}

#[test]
fn swap_and_restore_return_every_byte() {
    for alignment in [32, 64] {
        let it = Fixture::new(alignment);
        let before = bytes(&it.model);
        let all = ["--tensor", ".*ffn_down.*", "--from", &it.other];
        let dry = succeeds(&[&[it.model.as_str(), "--dry-run"], all.as_slice()].concat());
        assert!(
            dry.contains("2 of 4 tensors change") && dry.contains("q4_0 -> q8_0"),
            "{dry}"
        );
        assert_eq!(bytes(&it.model), before);
        succeeds(&[&[it.model.as_str()], all.as_slice()].concat());
        assert_eq!(bytes(&it.model), model(Q8_0, 20, alignment).bytes());
        assert_eq!(
            it.files(),
            ["model.gguf", "model.gguf.originals", "other.gguf"]
        );
        let again = succeeds(&[&[it.model.as_str()], all.as_slice()].concat());
        assert!(again.contains("nothing to do"), "{again}");
        succeeds(&["undo", &it.model]);
        assert_eq!(bytes(&it.model), before);
        assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
    }
}

#[test]
fn the_first_originals_are_kept_and_go_back_one_by_one() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    let third = it.folder.path().join("third.gguf").display().to_string();
    model(F16, 30, 32).write(third.as_ref()).expect("a third");
    succeeds(&[
        &it.model,
        "--tensor",
        "blk.0.ffn_down.weight",
        "--from",
        &it.other,
    ]);
    succeeds(&[&it.model, "--tensor", "blk.*ffn.*", "--from", &third]);
    assert_eq!(bytes(&it.model), bytes(&third));
    let one = succeeds(&["undo", &it.model, "--tensor", "blk.1.*"]);
    assert!(one.contains("1 of 4 tensors change"), "{one}");
    succeeds(&["undo", &it.model, "--tensor", ".*"]);
    assert_eq!(bytes(&it.model), before);
    let nothing = succeeds(&["undo", &it.model]);
    assert!(nothing.contains("has no file of originals"), "{nothing}");
}

/// Writes a shard of `count` with one tensor.
fn shard(folder: &Path, number: u16, count: u16, ty: u32) -> PathBuf {
    let path = folder.join(format!("m-{number:05}-of-{count:05}.gguf"));
    let name = format!("blk.{number}.ffn_down.weight");
    let mut file = Gguf::default();
    for (key, value) in [
        ("split.no", Kv::U16(number - 1)),
        ("split.count", Kv::U16(count)),
        ("split.tensors.count", Kv::I32(i32::from(count))),
    ] {
        file = file.kv(key, value);
    }
    file.tensor(&name, &[64, 4], ty, u64::from(number))
        .write(&path)
        .expect("a shard");
    path
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn of_many_shards_only_those_that_change_are_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let others = folder.path().join("others");
    std::fs::create_dir(&others).expect("a folder");
    let shards: Vec<_> = (1..4)
        .map(|number| shard(folder.path(), number, 3, Q4_0))
        .collect();
    let new: Vec<_> = (1..4)
        .map(|number| shard(&others, number, 3, Q8_0))
        .collect();
    let inode = |path: &PathBuf| std::os::unix::fs::MetadataExt::ino(&path.metadata().expect("it"));
    let before: Vec<u64> = shards.iter().map(inode).collect();
    let (first, from) = (
        shards[0].display().to_string(),
        new[2].display().to_string(),
    );
    succeeds(&[&first, "--tensor", "blk.[13].*", "--from", &from]);
    let after: Vec<u64> = shards.iter().map(inode).collect();
    assert!(after[0] != before[0] && after[1] == before[1] && after[2] != before[2]);
    assert_eq!(bytes(&shards[2]), bytes(&new[2]));
    succeeds(&["undo", &first]);
    assert_eq!(bytes(&shards[2]), {
        let again = tempfile::tempdir().expect("a folder");
        bytes(shard(again.path(), 3, 3, Q4_0))
    });
}

#[test]
fn a_file_that_is_named_by_its_hash_changes_only_by_force() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    let (folder, hash) = (it.folder.path(), "0123456789abcdef".repeat(4));
    std::fs::create_dir(folder.join("blobs")).expect("a folder");
    let snapshot = folder.join("model-q4.gguf");
    for name in [hash.clone(), format!("sha256-{hash}")] {
        let blob = folder.join("blobs").join(&name);
        std::fs::copy(&it.model, &blob).expect("free space");
        let _ = std::fs::remove_file(&snapshot);
        std::os::unix::fs::symlink(&blob, &snapshot).expect("a link");
        let link = path(&snapshot);
        let all = [&link, "--tensor", "blk.1.*", "--from", &it.other];
        fails(
            &all,
            &["named by the hash of its content", "--force", &name],
        );
        assert_eq!(bytes(&blob), before);
        succeeds(&[&all[..], &["--force"]].concat());
        assert_ne!(bytes(&blob), before);
        succeeds(&["undo", &link]);
        assert_eq!(bytes(&blob), before);
    }
}

#[test]
fn swap_errors_are_one_sentence_and_change_no_file() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    let path = |name: &str| it.folder.path().join(name).display().to_string();
    let (shape, junk) = (path("shape.gguf"), path("junk.gguf"));
    let other_shape = Gguf::default().tensor("blk.0.ffn_down.weight", &[64, 8], Q8_0, 1);
    other_shape.write(shape.as_ref()).expect("a file");
    std::fs::write(&junk, "no model").expect("a file");
    fails(
        &[
            &it.model,
            "--tensor",
            "blk.0.ffn_down.weight",
            "--from",
            &shape,
        ],
        &["[64, 7, 1, 1]", "[64, 8, 1, 1]", "the model needs"],
    );
    fails(
        &[&it.model, "--tensor", "blk.1.*", "--from", &shape],
        &["has no tensor 'blk.1.ffn_down.weight'"],
    );
    fails(
        &[&it.model, "--tensor", "ffn_down", "--from", &it.other],
        &["whole name matches 'ffn_down'", "token_embd.weight"],
    );
    fails(
        &[&it.model, "--tensor", ".*", "--from", &junk],
        &["not a GGUF file"],
    );
    fails(
        &[&junk, "--tensor", ".*", "--from", &it.model],
        &["not a GGUF file"],
    );
    fails(
        &[&path("none.gguf"), "--tensor", ".*", "--from", &it.model],
        &["none.gguf: cannot open it: No such file or directory (os error 2)"],
    );
    assert_eq!(bytes(&it.model), before);
}

#[test]
fn a_weight_is_swapped_and_restored_with_its_scale_or_not_at_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = "blk.0.ffn_up.weight";
    let write = |file: &str, seed: u64, scale: Option<f32>| {
        let mut gguf = Gguf::default().tensor(name, &[64, 8], Q8_0, seed);
        if let Some(scale) = scale {
            gguf = gguf.tensor("blk.0.ffn_up.scale", &[1], F32, 9);
            gguf.tensors[1].data = scale.to_le_bytes().to_vec();
        }
        let path = folder.path().join(file);
        gguf.write(&path).expect("a file");
        path.display().to_string()
    };
    let model = write("model.gguf", 1, Some(0.5));
    let (plain, scaled) = (
        write("plain.gguf", 2, None),
        write("scaled.gguf", 2, Some(0.25)),
    );
    let (before, after) = (bytes(&model), bytes(&scaled));
    fails(
        &[&model, "--tensor", name, "--from", &plain],
        &["'blk.0.ffn_up.weight' is used with 'blk.0.ffn_up.scale' in the model"],
    );
    fails(
        &[&plain, "--tensor", name, "--from", &model],
        &["and the model has no such tensor"],
    );
    assert_eq!(bytes(&model), before);
    succeeds(&[&model, "--tensor", name, "--from", &scaled]);
    assert_eq!(bytes(&model), after);
    succeeds(&["undo", &model, "--tensor", name]);
    assert_eq!(bytes(&model), before);
}

/// Checks the features that this package enables, if it is built alone: in a build of the
/// whole workspace, other packages enable them, too.
#[test]
fn an_expression_can_ignore_case() {
    let it = Fixture::new(32);
    let dry = succeeds(&[it.tensors("(?i)BLK.*FFN.*").as_slice(), &["--dry-run"]].concat());
    assert!(dry.contains("2 of 4 tensors change"), "{dry}");
}
