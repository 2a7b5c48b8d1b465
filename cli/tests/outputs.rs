//! Outputs: a file that is no earlier output of a command stays, at every option that names one.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use sidecar_core::experts::ExpertIndex;
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, Trace, write};
use testkit::mixtures::Mixture;

/// Commands that write a text to OUT, and need no program.
const WRITE: [&str; 6] = [
    "report TRACE -o OUT",
    "report TRACE --svg -o OUT",
    "report TRACE --pin 40% -o OUT",
    "report TRACE --format csv -o OUT",
    "report TRACE --format logical-count -o OUT",
    "report TRACE TRACE --compare -o OUT",
];
/// Commands that end before they measure, as the program is missing, and how their outputs start.
const CHECK: [(&str, &str); 8] = [
    ("compare -o OUT MISSING", "{ \"llama_sidecar_compare\": 1,"),
    ("compare -o OUT.json MISSING", "PAGE: Comparison"),
    (
        "ask 127.0.0.1:1 --prompts TEXT -o OUT",
        "{\n  \"llama_sidecar\": \"answers\",\n",
    ),
    (
        "status -s MISSING --save OUT",
        "{\n  \"llama_sidecar\": \"profile\",\n",
    ),
    (
        "ctl margins MODEL --text TEXT --program MISSING --report OUT",
        "PAGE: Margins",
    ),
    (
        "prune MODEL --leave-out 25% --text TEXT --program MISSING --report OUT",
        "PAGE: Pruning",
    ),
    (
        "prune MODEL --leave-out 25% --text TEXT --program MISSING --save OUT",
        "[{\"schema\":\"llama-sidecar/experts/1\",\"layer\":1,\"experts\":[2]}]\n",
    ),
    (
        "tune MODEL --text TEXT --types q4_0 --program MISSING --bpw 4 -o OUT",
        "",
    ),
];
const NOTES: &str = "notes of the user\n";

struct Fixture(tempfile::TempDir);

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        Mixture::MergedGateUp
            .write(&path("MODEL"))
            .expect("a model");
        let file = GgufFile::open(&path("MODEL"), Access::Read).expect("a model");
        let trace = Trace::with_locality(ExpertLayout::of(&ExpertIndex::of([&file])));
        let layers = trace.layout().layers();
        let list = layers
            .iter()
            .map(|(layer, _)| json!({"layer": layer, "experts": [0]}));
        fs::write(path("LIST"), Value::from_iter(list).to_string()).expect("free space");
        for layer in 0..layers.len() {
            let ids = [0, 1, 2, 1].map(u32::to_ne_bytes).concat();
            trace.record_batch(layer, &Ids::packed(&ids, 2));
        }
        let about = ModelMeta::of([&file]);
        write(&path("TRACE"), &about, &trace.snapshot_with_locality()).expect("free space");
        fs::write(path("TEXT"), "a text ".repeat(10_000)).expect("free space");
        Fixture(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &str, out: &str, more: &[&str]) -> Output {
        let mut words = words.split(' ').map(|word| word.replace("OUT", out));
        let mut command = Command::new(env!("CARGO_BIN_EXE_llama-sidecar"));
        command.args(words.next()).args(more).args(words);
        command.current_dir(self.0.path());
        // No program of this machine is found.
        command
            .env("PATH", self.0.path())
            .env("HOME", self.0.path());
        command.output().expect("it starts")
    }

    /// Runs a command that has to refuse its output, and leave all files as they are.
    fn refuses(&self, words: &str, out: &str, there: &Path) {
        let before = self.files();
        let (content, found) = (fs::read(there), fs::metadata(there).expect("a file"));
        let output = self.run(words, out, &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{words}");
        assert!(
            error.contains("no earlier version of this output") && error.contains("--force"),
            "{words}: {error}"
        );
        let now = fs::metadata(there).expect("a file");
        assert_eq!(fs::read(there).ok(), content.ok(), "{words}");
        let identity = |of: &fs::Metadata| (of.ino(), of.mode(), of.uid(), of.mtime_nsec());
        assert_eq!(identity(&found), identity(&now), "{words}");
        assert_eq!(self.files(), before, "{words}");
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.path()).expect("a folder");
        let mut files: Vec<_> = entries.map(|of| of.expect("an entry").path()).collect();
        files.sort();
        files
    }

    fn clear(&self, names: &[&str]) {
        for name in names {
            let _ = fs::remove_file(self.path(name));
        }
    }
}

fn done(output: &Output, what: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {error}");
}

#[test]
fn what_killed_commands_left_incomplete_goes_with_the_next_one() {
    let fixture = Fixture::new();
    for words in WRITE {
        let [left, other] = [".o.0123456789abcdef.part", ".o.notes.part"].map(|name| {
            fs::write(fixture.path(name), NOTES).expect("free space");
            fixture.path(name)
        });
        done(&fixture.run(words, "o", &["--force"]), words);
        assert!(!left.exists() && other.exists(), "{words}");
    }
}

#[test]
fn texts_replace_earlier_ones_and_no_file_of_others() {
    let fixture = Fixture::new();
    for words in WRITE {
        let (out, link) = (fixture.path("o"), fixture.path("l"));
        fs::write(&out, NOTES).expect("free space");
        fs::set_permissions(&out, fs::Permissions::from_mode(0o600)).expect("a mode");
        symlink("o", &link).expect("a link");
        fixture.refuses(words, "o", &out);
        fixture.refuses(words, "l", &out);
        // An empty file, then the own output, by path and by link.
        fs::write(&out, "").expect("free space");
        for name in ["o", "o", "l"] {
            done(&fixture.run(words, name, &[]), words);
        }
        let written = fs::read(&out).expect("a file");
        assert!(!written.is_empty(), "{words}");
        let found = fs::symlink_metadata(&link).expect("a link");
        assert!(found.is_symlink(), "{words}");
        let mode = fs::metadata(&out).expect("a file").mode() & 0o777;
        assert_eq!(mode, 0o600, "{words}");
        fs::write(&out, NOTES).expect("free space");
        done(&fixture.run(words, "l", &["--force"]), words);
        assert_eq!(fs::read(&out).expect("a file"), written, "{words}");
        // Of another kind, although of this project.
        fixture.refuses(words, "TRACE", &fixture.path("TRACE"));
        let output = fixture.run(words, "/dev/stdout", &[]);
        done(&output, words);
        let has = |text: &[u8]| text.windows(written.len()).any(|part| part == written);
        assert!(has(&output.stdout), "{words}");
        done(&fixture.run(words, "/dev/null", &[]), words);
        let fifo = fixture.path("f");
        let made = Command::new("mkfifo").arg(&fifo).status();
        assert!(made.expect("mkfifo").success());
        let at = fifo.clone();
        let reader = std::thread::spawn(move || fs::read(at).expect("a FIFO"));
        let output = loop {
            // The reader may not have opened it yet.
            let output = fixture.run(words, "f", &[]);
            if output.status.success() || reader.is_finished() {
                break output;
            }
        };
        done(&output, words);
        assert_eq!(reader.join().expect("read"), written, "{words}");
        let all: Vec<_> = ["LIST", "MODEL", "TEXT", "TRACE", "f", "l", "o"]
            .map(|name| fixture.path(name))
            .into();
        assert_eq!(fixture.files(), all, "{words}");
        fixture.clear(&["f", "l", "o"]);
    }
}

#[test]
fn files_of_others_are_refused_before_anything_is_measured() {
    let fixture = Fixture::new();
    for (words, own) in CHECK {
        // The page of a comparison is beside it.
        let there = match own {
            "PAGE: Comparison" => "o.html",
            _ => "o",
        };
        let (path, link) = (fixture.path(there), fixture.path("l"));
        fs::write(&path, NOTES).expect("free space");
        symlink(there, &link).expect("a link");
        fixture.refuses(words, "o", &path);
        if there == "o" {
            fixture.refuses(words, "l", &path);
        }
        let own = match own.strip_prefix("PAGE") {
            Some(title) => format!(
                "<!doctype html><html lang=en><meta charset=utf-8><meta name=generator content=\"llama-sidecar{title}\">"
            ),
            None => own.to_owned(),
        };
        for (content, more) in [(&*own, &[][..]), ("", &[]), (NOTES, &["--force"])] {
            fs::write(&path, content).expect("free space");
            let output = fixture.run(words, "o", more);
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && !error.contains("cannot write"),
                "{words}: {error}"
            );
            assert_eq!(fs::read_to_string(&path).expect("a file"), content);
        }
        fixture.clear(&[there, "l"]);
    }
}

#[test]
fn a_new_model_replaces_no_other_one_even_with_force() {
    let fixture = Fixture::new();
    let words = "prune MODEL --experts LIST -o OUT";
    fs::write(fixture.path("o"), NOTES).expect("free space");
    fixture.refuses(words, "o", &fixture.path("o"));
    done(&fixture.run(words, "o", &["--force"]), words);
    for (name, more) in [("o", &[][..]), ("o", &["--force"]), ("MODEL", &["--force"])] {
        let before = fs::read(fixture.path(name)).expect("a model");
        let output = fixture.run(words, name, more);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains("never written over"),
            "{error}"
        );
        assert_eq!(fs::read(fixture.path(name)).expect("a model"), before);
    }
}

#[test]
fn a_work_folder_with_other_files_is_refused() {
    let fixture = Fixture::new();
    let work = fixture.path("w");
    fs::create_dir(&work).expect("a folder");
    fs::write(work.join("parameters.json"), "{\"mine\": 1}").expect("free space");
    let words = "tune MODEL --text TEXT --types q4_0 --program PROGRAM --work w";
    fs::write(fixture.path("PROGRAM"), "#!/bin/sh\n").expect("free space");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(fixture.path("PROGRAM"), mode).expect("a mode");
    let output = fixture.run(words, "", &[]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert_eq!(
        fs::read(work.join("parameters.json")).expect("a file"),
        b"{\"mine\": 1}"
    );
    assert_eq!(fs::read_dir(&work).expect("a folder").count(), 1);
}
