//! Overlays in a host with the drop-in: it writes what a new process writes with a file that has
//! these tensors, and the model's own file stays as it is.

mod hosts;

use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use hosts::{TOKENS, copied, fresh, on, swap_request, taken};
use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, built, replace};
use testkit::server::quantize;
use testkit::writer::{F32, Gguf};

/// Sets overlays of a running host and reverts those that match `revert`.
fn swap(host: &Host, revert: Option<&str>, overlays: &[(&str, &Path)]) -> Value {
    host.request(&swap_request(revert, overlays))
}

/// `llama-sidecar swap --live`.
fn swap_live(host: &Host, arguments: &[&str]) -> Output {
    Command::new(built("release/llama-sidecar"))
        .args(["swap", "--live", "-s"])
        .arg(host.socket())
        .args(arguments)
        .output()
        .expect("the command starts")
}

/// `llama-sidecar undo`.
fn undo(host: &Host, arguments: &[&str]) -> Output {
    Command::new(built("release/llama-sidecar"))
        .args(["undo", "-s"])
        .arg(host.socket())
        .args(arguments)
        .output()
        .expect("the command starts")
}

/// What a command printed.
fn said(output: &Output) -> String {
    let bytes = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The overlays of the first model.
fn overlays(host: &Host) -> Vec<(String, String)> {
    let status = host.control("status");
    let overlays = status["models"][0]["overlays"].as_array().expect("a list");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let pair = |overlay: &Value| (text(&overlay["tensor"]), text(&overlay["from"]));
    overlays.iter().map(pair).collect()
}

/// Inode and time of change of a file.
fn identity(path: &Path) -> (u64, i64, i64) {
    let found = std::fs::metadata(path).expect("a file");
    (found.ino(), found.ctime(), found.ctime_nsec())
}

#[test]
fn a_host_with_overlays_writes_what_a_new_process_writes() {
    for (program, model, variant) in [
        (Program::C, "smollm2.gguf", "smollm2-mixed.gguf"),
        (Program::CTwoThreads, "moe.gguf", "moe-mixed.gguf"),
    ] {
        let (folder, path) = copied(model);
        let (before, after) = (fresh(program, &path), fresh(program, &fixture(variant)));
        let source = folder.path().join("other.gguf");
        replace(&source, &fixture(variant));
        let loaded = identity(&path);
        let mut host = Host::start(program, &path, &on());
        assert_eq!(host.text(TOKENS), before);

        let output = swap_live(
            &host,
            &["--tensor", ".*", "--from", &source.to_string_lossy()],
        );
        assert!(output.status.success(), "{output:?}");
        // The tensors do not need the source.
        std::fs::write(&source, "no model").expect("free space");
        std::fs::remove_file(&source).expect("it is there");
        host.steps("more", 2);
        assert_eq!(host.text(TOKENS), after);
        assert_eq!(
            overlays(&host).len(),
            if model == "moe.gguf" { 302 } else { 272 }
        );

        // Polling and reloads leave overlays alone.
        assert_eq!(taken(&host.control("reload")), (0, 0));
        let dry = said(&undo(&host, &["--dry-run"]));
        assert!(dry.contains("dry run: would return to this: "), "{dry}");
        assert!(!overlays(&host).is_empty());
        let output = undo(&host, &["--tensor", "blk.*"]);
        assert!(output.status.success(), "{output:?}");
        let output = undo(&host, &[]);
        assert!(output.status.success(), "{output:?}");
        let done = "are those of the program's own file\n";
        assert!(said(&output).contains(done), "{output:?}");
        for (arguments, which) in [
            (&[][..], ""),
            (&["--tensor", "blk.*"], " of tensors that match 'blk.*'"),
        ] {
            let output = undo(&host, arguments);
            assert!(output.status.success(), "{output:?}");
            let expected =
                format!("nothing to undo: no swap, mask, margin or freeze{which} is in force");
            assert!(said(&output).contains(&expected), "{output:?}");
        }
        assert_eq!(host.text(TOKENS), before);
        assert_eq!(overlays(&host), []);
        let status = host.control("status");
        assert_eq!(status["models"][0]["changed"], json!([]));
        assert_eq!(status["models"][0]["private_bytes"], 0);
        assert_eq!(identity(&path), loaded, "the model's file was not touched");
        assert_eq!(host.end(), Some(0));
    }
}

/// What the C program writes with `run --profile`, and the hashes of its evaluations.
fn with_profile(model: &Path, profile: &Path, folder: &Path) -> (String, Vec<String>) {
    let hashes = folder.join("hashes");
    let mut child = Command::new(built("release/llama-sidecar"))
        .args(["run", "--profile"])
        .arg(profile)
        .arg("--logits-hashes")
        .arg(&hashes)
        .arg("--")
        .args([built("hosts-c/host"), fixture("upstream"), model.into()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let lines = format!("text {TOKENS}\nend\n");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(lines.as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let hashes = std::fs::read_to_string(hashes).unwrap_or_default();
    let hash = |line: &str| line.rsplit(' ').next().unwrap_or_default().to_owned();
    // The first line names the format.
    (said(&output), hashes.lines().skip(1).map(hash).collect())
}

/// Two threads make the first contexts of a model at the same time: none evaluates before the profile is set, and all is
/// counted.
#[test]
fn contexts_that_are_made_at_the_same_time_have_all_capabilities() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let content = json!({
        "llama_sidecar": "profile",
        "files": [],
        "overlays": [{"tensor": ".*(ffn_down|attn_q).*weight", "from": fixture("small-moe-mixed.gguf")}],
        "masks": [],
    });
    std::fs::write(path("profile"), content.to_string()).expect("free space");
    let with = DropIn::On(vec![
        ("LLAMA_SIDECAR_PROFILE", path("profile")),
        ("LLAMA_EXPERT_TRACE_STATS", "1".into()),
    ]);
    let model = fixture("small-moe.gguf");
    for _ in 0..5 {
        let mut host = Host::start(Program::C, &model, &with);
        let answer = host.ask("both 5");
        let hashes: Vec<&str> = answer.split_whitespace().collect();
        assert_eq!(hashes, [hashes[0]; 10]);
        // Two experts for each of 12 tokens in three layers, and for the last token in the last one, ten times.
        let trace = host.control("trace");
        assert_eq!(trace["traces"][0]["activations"], 10 * 2 * (12 * 3 + 1));
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn a_profile_is_in_use_from_the_first_evaluation_on() {
    let (folder, path) = copied("moe.gguf");
    let source = folder.path().join("other.gguf");
    replace(&source, &fixture("moe-mixed.gguf"));
    let profile = folder.path().join("saved.json");
    let save = |host: &Host| {
        let command = Command::new(built("release/llama-sidecar"))
            .args(["status", "-s"])
            .arg(host.socket())
            .arg("--save")
            .arg(&profile)
            .output();
        said(&command.expect("the command starts"))
    };
    let masks = ("LLAMA_EXPERT_MASKS", "1".to_owned());
    let mut host = Host::start(Program::C, &path, &DropIn::On(vec![masks]));
    let before = host.text(TOKENS);
    let nothing = save(&host);
    assert!(nothing.contains("nothing to save"), "{nothing}");
    let [own, other] = [&path, &source].map(|path| path.to_string_lossy().into_owned());
    for arguments in [
        &["--tensor", r"blk\.0\..*", "--from", &other][..],
        &["--tensor", r"blk\.1\..*", "--from", &own, "--as", "q4_0"],
    ] {
        let output = swap_live(&host, arguments);
        assert!(output.status.success(), "{output:?}");
    }
    let masks = json!([{"layer": 0, "experts": [0, 5]}]);
    let masked = host.request(&json!({"cmd": "mask", "masks": masks}));
    assert_eq!(masked["ok"], true, "{masked}");
    let after = host.text(TOKENS);
    assert_ne!(before.hashes, after.hashes, "they show");
    let saved = save(&host);
    assert!(
        saved.contains("and the masks of 1 layers are in"),
        "{saved}"
    );
    assert_eq!(host.end(), Some(0));

    let (said, hashes) = with_profile(&path, &profile, folder.path());
    assert_eq!(hashes, after.hashes, "{said}");
    assert!(!said.contains("warning"), "{said}");

    // A model without such tensors runs as it is.
    let (said, hashes) = with_profile(&fixture("smollm2.gguf"), &profile, folder.path());
    assert_eq!(hashes.len(), TOKENS, "{said}");
    assert!(
        said.contains("runs without the profile, which was saved for"),
        "{said}"
    );
    // With other bytes in a source, nothing is started.
    replace(&source, &fixture("moe.gguf"));
    std::fs::remove_file(folder.path().join("hashes")).expect("hashes");
    let (said, hashes) = with_profile(&path, &profile, folder.path());
    assert_eq!(hashes, [""; 0], "{said}");
    let named = "other bytes than when the profile was saved";
    assert!(said.contains(named) && !said.contains("ready"), "{said}");
    std::fs::write(&profile, "{}").expect("free space");
    let (said, _) = with_profile(&path, &profile, folder.path());
    assert!(said.contains("is no profile of 'status --save'"), "{said}");
}

/// The tensors are those that the gguf package quantises from the same file.
#[test]
fn tensors_are_quantised_by_the_library_of_the_program() {
    let (_folder, path) = copied("smollm2.gguf");
    let one = fixture("smollm2-one-q8_0.gguf");
    let after = fresh(Program::C, &one);
    let changed = {
        let [old, new] =
            [&path, &one].map(|path| GgufFile::open(path, Access::Read).expect("a model"));
        let infos = new.header.tensors.iter();
        let mut changed = infos.filter(|info| {
            let name = new.header.name(info);
            let before = old.header.find(name).map(|at| old.header.tensors[at].ty);
            !before.is_some_and(|ty| std::ptr::eq(ty, info.ty))
        });
        let name = new.header.name(changed.next().expect("one tensor changed"));
        name.to_string_lossy().replace('.', "\\.")
    };
    let mut host = Host::start(Program::C, &path, &on());
    let before = host.text(TOKENS);
    let from = path.to_string_lossy();
    let quantised = |tensor: &str, ty: &str| {
        let all = ["--tensor", tensor, "--from", &from, "--as", ty];
        let output = swap_live(&host, &all);
        (output.status.success(), said(&output))
    };
    let (succeeded, errors) = quantised(&changed, "q8_0");
    assert!(succeeded, "{errors}");
    for (tensor, ty, expected) in [
        (
            "output_norm.*",
            "q8_0",
            "llama-quantize quantises no tensor that matches 'output_norm.*': 'output_norm.weight' has one dimension",
        ),
        (changed.as_str(), "q9_9", "is no type of ggml"),
    ] {
        let (succeeded, errors) = quantised(tensor, ty);
        assert!(!succeeded && errors.contains(expected), "{errors}");
    }
    assert_eq!(overlays(&host).len(), 1);
    // One line for the tensor, with the file that was named; each switch is a pause.
    let status = Command::new(built("release/llama-sidecar"))
        .args(["status", "--socket"])
        .arg(host.socket())
        .output()
        .expect("the command starts");
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    let name = changed.replace("\\.", ".");
    let lines: Vec<&str> = status.lines().filter(|line| line.contains(&name)).collect();
    let [line] = lines[..] else {
        panic!("{status}")
    };
    assert!(
        line.ends_with(&format!("q4_1 -> q8_0 from {from}")),
        "{line}"
    );
    let found = host.control("status");
    assert!(
        found["pauses"].as_u64() >= found["generation"].as_u64(),
        "{found}"
    );
    assert!(found["longest_pause_us"].as_u64() > Some(0), "{found}");
    assert_eq!(host.text(TOKENS), after);
    assert!(undo(&host, &[]).status.success());
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn one_request_reverts_overlays_and_sets_others() {
    let (_folder, path) = copied("smollm2.gguf");
    let mixed = fixture("smollm2-mixed.gguf");
    let one = fixture("smollm2-one-q8_0.gguf");
    let (after, last) = (fresh(Program::C, &mixed), fresh(Program::C, &one));
    let mut host = Host::start(Program::C, &path, &on());
    host.text(2);
    assert_eq!(taken(&swap(&host, None, &[(".*", &mixed)])), (8, 0));
    assert_eq!(host.text(TOKENS), after);
    // The last overlay that names a tensor counts.
    let generation = host.control("status")["generation"].as_u64();
    let all = [(".*", mixed.as_path()), (".*", one.as_path())];
    let answer = swap(&host, None, &all);
    assert_eq!(answer["ok"], true, "{answer}");
    assert_eq!(host.text(TOKENS), last);
    let switched = host.control("status")["generation"].as_u64();
    assert_eq!(switched, generation.map(|generation| generation + 1));
    let answer = swap(&host, Some(".*"), &[("output_norm.weight", &mixed)]);
    assert_eq!(taken(&answer), (0, 1));
    assert_eq!(overlays(&host).len(), 1);
    assert_eq!(
        host.text(TOKENS),
        fresh(Program::C, &fixture("smollm2.gguf"))
    );
    assert_eq!(host.end(), Some(0));
}

#[test]
fn an_overlay_stays_above_a_changed_file() {
    let (_folder, path) = copied("smollm2.gguf");
    let (first, mixed) = (fixture("smollm2.gguf"), fixture("smollm2-mixed.gguf"));
    let mut host = Host::start(Program::C, &path, &on());
    host.text(2);
    // With the bytes of the first file, which the file does not have later.
    let answer = swap(&host, None, &[("blk\\..*", &first)]);
    assert_eq!(taken(&answer), (0, 0));
    replace(&path, &mixed);
    assert_eq!(taken(&host.control("reload")), (0, 0));
    assert_eq!(host.text(TOKENS), fresh(Program::C, &first));
    assert_eq!(taken(&swap(&host, Some(".*"), &[])), (8, 0));
    assert_eq!(host.text(TOKENS), fresh(Program::C, &mixed));
    // The tensors follow the file again.
    replace(&path, &first);
    assert_eq!(taken(&host.control("reload")), (0, 8));
    // A revert to the originals drops overlays, and a frozen program takes none.
    assert_eq!(taken(&swap(&host, None, &[(".*", &mixed)])), (8, 0));
    assert_eq!(taken(&host.control("revert")), (0, 8));
    assert_eq!(overlays(&host), []);
    let answer = swap(&host, None, &[(".*", &mixed)]);
    assert_eq!(answer["ok"], false);
    assert!(answer.to_string().contains("unfreeze"), "{answer}");
    assert_eq!(host.text(TOKENS), fresh(Program::C, &first));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn bad_requests_change_nothing() {
    let (folder, path) = copied("smollm2.gguf");
    let before = fresh(Program::C, &fixture("smollm2.gguf"));
    let mixed = fixture("smollm2-mixed.gguf");
    let mut host = Host::start(Program::C, &path, &on());
    host.text(2);
    let in_folder = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("free space");
        path
    };
    let bytes = std::fs::read(&mixed).expect("a fixture");
    let short = in_folder("short.gguf", &bytes[..bytes.len() / 2]);
    // Zeros where the tensors are: a download that has stopped.
    let blank = [
        &bytes[..bytes.len() / 2],
        &vec![0; bytes.len() - bytes.len() / 2],
    ]
    .concat();
    let blank = in_folder("blank.gguf", &blank);
    for (tensor, from, reason) in [
        ("no such tensor", mixed.as_path(), "whole name matches"),
        ("blk", &mixed, "whole name matches"),
        ("(", &mixed, "not a regular expression"),
        (".*", Path::new("other.gguf"), "not an absolute path"),
        (".*", &folder.path().join("none.gguf"), "none.gguf"),
        (".*", folder.path(), "expected a regular file"),
        (".*", &short, "short.gguf"),
        (".*", &blank, "is damaged"),
        (".*", &fixture("moe.gguf"), "has no tensor 'blk.0.ffn_"),
        (".*", &fixture("small.gguf"), "small.gguf"),
    ] {
        let good = ("output_norm.weight", mixed.as_path());
        let answer = swap(&host, None, &[good, (tensor, from)]);
        assert_eq!(answer["ok"], false, "{answer}");
        assert!(answer.to_string().contains(reason), "{answer}");
    }
    let sources: Vec<PathBuf> = (0..65)
        .map(|number| {
            let path = folder.path().join(format!("source-{number}"));
            let gguf = Gguf::default().tensor("x", &[32], F32, number);
            gguf.write(&path).expect("free space");
            path
        })
        .collect();
    let all: Vec<_> = sources.iter().map(|path| (".*", path.as_path())).collect();
    let answer = swap(&host, None, &all);
    assert!(
        answer.to_string().contains("more than 64 models"),
        "{answer}"
    );
    let output = swap_live(
        &host,
        &["--tensor", "x", "--from", &mixed.to_string_lossy()],
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(overlays(&host), []);
    assert_eq!(host.text(TOKENS), before);
    let status = host.control("status");
    assert_eq!(status["models"][0]["blocked"], Value::Null, "reloads work");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn an_overlay_is_set_in_every_model_that_has_the_tensor() {
    let dense = fixture("smollm2.gguf");
    let mut host = Host::start(Program::C, &dense, &on());
    host.text(2);
    host.ask(&format!("load {}", fixture("moe.gguf").display()));
    let moe = host.text(TOKENS);
    let counts = |answer: &Value| -> Vec<u64> {
        assert_eq!(answer["ok"], true, "{answer}");
        let reports = answer["reports"].as_array().expect("a list");
        let all = |report: &Value| ["swapped", "returned"].map(|key| report[key].as_u64());
        reports
            .iter()
            .flat_map(all)
            .map(|count| count.expect("a count"))
            .collect()
    };
    // Only one of the models has this tensor.
    let mixed = fixture("smollm2-mixed.gguf");
    let answer = swap(&host, None, &[("blk\\.3\\.ffn_up\\.weight", &mixed)]);
    assert_eq!(counts(&answer)[2..], [0, 0]);
    assert_eq!(host.text(TOKENS), moe);
    // Both have this one, with the same bytes.
    let answer = swap(
        &host,
        None,
        &[("token_embd\\.weight", &fixture("moe.gguf"))],
    );
    assert_eq!(answer["reports"][1]["unchanged"], 1, "{answer}");
    let status = host.control("status");
    let of = |model: usize| status["models"][model]["overlays"].as_array().map(Vec::len);
    assert_eq!((of(0), of(1)), (Some(2), Some(1)));
    assert_eq!(swap(&host, Some(".*"), &[])["ok"], true);
    assert_eq!(host.text(TOKENS), moe);
    assert_eq!(host.end(), Some(0));
}

/// A file that was moved aside and back is used through its mapping again, with a new
/// modification time.
#[test]
fn a_file_that_was_moved_back_is_used_in_its_mapping() {
    let (_folder, path) = copied("smollm2.gguf");
    let mixed = fixture("smollm2-mixed.gguf");
    let after = fresh(Program::CMapped, &mixed);
    let mut host = Host::start(Program::CMapped, &path, &on());
    let before = host.text(TOKENS);
    let aside = path.with_extension("bak");
    let private_bytes = |host: &Host| host.control("status")["models"][0]["private_bytes"].as_u64();
    for seconds in [1, 2] {
        std::fs::rename(&path, &aside).expect("a file");
        replace(&path, &mixed);
        assert_eq!(taken(&host.control("reload")), (8, 0));
        assert_eq!(host.text(TOKENS), after);
        std::fs::rename(&aside, &path).expect("a file");
        let file = std::fs::File::options().append(true).open(&path);
        let modified = UNIX_EPOCH + Duration::from_secs(seconds);
        file.and_then(|file| file.set_modified(modified))
            .expect("our own copy");
        assert_eq!(taken(&host.control("reload")), (0, 8));
        assert_eq!(private_bytes(&host), Some(0));
        assert_eq!(host.text(TOKENS), before);
    }
    // Other bytes are copied.
    let [model, other] =
        [&path, &mixed].map(|path| GgufFile::open(path, Access::Read).expect("a model"));
    let mut tensors = model.header.tensors.iter();
    let differs = |name| other.header.tensors[other.header.find(name).expect("the same names")].ty;
    let changed = tensors.find(|info| !std::ptr::eq(differs(model.header.name(info)), info.ty));
    let changed = changed.expect("eight differ");
    std::fs::rename(&path, &aside).expect("a file");
    replace(&path, &mixed);
    assert_eq!(taken(&host.control("reload")), (8, 0));
    let mut byte = [0];
    let last = changed.offset + changed.nbytes - 1;
    model.source.read_at(&mut byte, last).expect("a byte");
    let file = std::fs::File::options().write(true).open(&aside);
    file.and_then(|file| file.write_all_at(&[!byte[0]], last))
        .expect("our own copy");
    std::fs::rename(&aside, &path).expect("a file");
    assert_eq!(taken(&host.control("reload")), (1, 7));
    assert!(private_bytes(&host) >= Some(changed.nbytes));
    assert_eq!(host.text(TOKENS), fresh(Program::CMapped, &path));
    assert_eq!(host.end(), Some(0));
}

/// Rotates the rows of all up-projections of a copy of a model by one; returns the copy.
fn rotated(model: &Path, copy: &Path) -> PathBuf {
    replace(copy, model);
    let gguf = GgufFile::open(copy, Access::Read).expect("a model");
    let file = std::fs::File::options().write(true).open(copy);
    let file = file.expect("our own copy");
    for info in &gguf.header.tensors {
        if gguf.header.name(info).to_string_lossy().contains("ffn_up") {
            let mut bytes = vec![0; info.nbytes as usize];
            gguf.source.read_at(&mut bytes, info.offset).expect("bytes");
            bytes.rotate_left((info.nbytes / info.ne[1]) as usize);
            file.write_all_at(&bytes, info.offset).expect("space");
        }
    }
    copy.to_owned()
}

#[test]
fn buffers_of_replaced_tensors_are_used_again() {
    let (folder, path) = copied("smollm2.gguf");
    let first = rotated(&path, &folder.path().join("first.gguf"));
    let second = rotated(&first, &folder.path().join("second.gguf"));
    let sources = [first, second].map(|path| (fresh(Program::C, &path), path));
    let before = fresh(Program::C, &fixture("smollm2.gguf"));
    // Enough for the tensors in use and those that are staged, and not for kept buffers.
    for limit in [None, Some("32")] {
        let variables = limit.map(|mib| ("LLAMA_SIDECAR_MEMORY_MB", mib.into()));
        let on = DropIn::On(variables.into_iter().collect());
        let mut host = Host::start(Program::C, &path, &on);
        assert_eq!(host.text(TOKENS), before);
        let bytes = |host: &Host| {
            let status = host.control("status");
            let of = |key: &str| status["models"][0][key].as_u64().expect("bytes");
            (of("private_bytes"), of("kept_bytes"))
        };
        let mut memory = u64::MAX;
        for round in 0..4 {
            let (text, from) = &sources[round % 2];
            let answer = swap(&host, None, &[("blk\\..*\\.ffn_up\\.weight", from)]);
            assert_eq!(taken(&answer), (30, 0));
            let (in_use, kept) = bytes(&host);
            assert_eq!(kept, if round == 0 { 0 } else { in_use });
            assert_eq!(&host.text(TOKENS), text, "round {round}");
            if round > 0 {
                let now = host.private_memory();
                let grown = now.saturating_sub(memory);
                println!(
                    "{limit:?} MiB, round {round}: {} KiB, {} more",
                    now >> 10,
                    grown >> 10
                );
                assert!(limit.is_some() || grown < 8 << 20, "{grown} bytes more");
                memory = now;
            }
        }
        assert_eq!(taken(&swap(&host, Some(".*"), &[])), (0, 30));
        assert_eq!(bytes(&host), (0, 0));
        assert_eq!(host.text(TOKENS), before);
        assert_eq!(host.end(), Some(0));
    }
}

/// llama.cpp loads a matrix that input and output share twice in some types (Q4_0, IQ4_NL), as
/// products have kernels for another order of their rows, and once in others.
#[test]
fn a_shared_matrix_of_llama_quantize_from_source() {
    const SHARED: &str = "token_embd.weight";
    let once = fixture("smollm2.gguf");
    let folder = tempfile::tempdir().expect("a folder");
    let variant = |ty: &str| {
        let path = folder.path().join(ty);
        quantize(&once, &path, "Q4_1", &["--token-embedding-type", ty]);
        path
    };
    let [q4_0, iq4_nl, f16] = ["q4_0", "iq4_nl", "f16"].map(variant);
    let texts = [&q4_0, &iq4_nl, &f16, &once].map(|path| (path, fresh(Program::C, path)));
    let memory = |host: &Host| {
        let status = host.control("status");
        status["models"][0]["private_bytes"].as_u64()
    };
    for (loaded, before) in &texts {
        let path = folder.path().join("model.gguf");
        replace(&path, loaded);
        let mut host = Host::start(Program::C, &path, &on());
        assert_eq!(&host.text(TOKENS), before);
        for (from, text) in &texts {
            if from == loaded {
                continue;
            }
            assert_eq!(taken(&swap(&host, None, &[(SHARED, from)])), (1, 0));
            // In the middle of a text, with a graph that is kept.
            host.steps("more", 2);
            assert_eq!(&host.text(TOKENS), text, "{from:?} in {loaded:?}");
            println!("{from:?} in {loaded:?}: {:?} bytes", memory(&host));
            assert_eq!(taken(&swap(&host, Some(".*"), &[])), (0, 1));
            assert_eq!(&host.text(TOKENS), before, "back to {loaded:?}");
            assert_eq!(memory(&host), Some(0));

            replace(&path, from);
            assert_eq!(taken(&host.control("reload")), (1, 0));
            assert_eq!(&host.text(TOKENS), text, "{from:?} in {loaded:?}");
            replace(&path, loaded);
            assert_eq!(taken(&host.control("reload")), (0, 1));
            assert_eq!(&host.text(TOKENS), before, "back to {loaded:?}");
        }
        assert_eq!(host.end(), Some(0));
    }
}

/// Sends a signal to a process that was not waited for.
fn send(process: u32, signal: libc::c_int) {
    // SAFETY: a system call without memory.
    unsafe { libc::kill(process as libc::pid_t, signal) };
}

/// A row of zeros, quantised, has other bytes than zeros.
#[test]
fn a_source_is_checked_before_it_is_quantised() {
    let (folder, path) = copied("smollm2.gguf");
    let temporary = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("source.gguf");
    let mut host = Host::start(Program::C, &path, &on());
    let before = host.text(TOKENS);
    let command = |more: &[&str]| {
        let mut command = Command::new(built("release/llama-sidecar"));
        command.args(["swap", "--tensor", r"blk\..*ffn_(up|gate)\.weight"]);
        command.arg("--from").arg(&source).args(["--as", "q8_0"]);
        command.args(more).env("TMPDIR", temporary.path());
        command
    };
    let (socket, model) = (host.socket().to_string_lossy(), path.to_string_lossy());
    let library = fixture("upstream").join("libggml-base.so");
    let live = ["--live", "-s", &socket];
    let file = [&model, "--ggml", &library.to_string_lossy()];
    let nothing_is_left = || {
        let mut left = std::fs::read_dir(temporary.path()).expect("a folder");
        assert!(left.next().is_none());
    };
    // Zeros where the tensors are: a download that has stopped.
    let mut bytes = std::fs::read(fixture("smollm2-mixed.gguf")).expect("a fixture");
    let middle = bytes.len() / 2;
    bytes[middle..].fill(0);
    std::fs::write(&source, &bytes).expect("free space");
    for more in [&live[..], &file] {
        let output = command(more).output().expect("the command starts");
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        for part in [
            "is damaged",
            "rows hold only zeros, 0 do",
            "LLAMA_HOTSWAP_CHECK=0",
        ] {
            assert!(text.contains(part), "{text}");
        }
        nothing_is_left();
    }
    // What happens while a tensor is quantised.
    let meanwhile = |more: &[&str], act: &dyn Fn(u32)| {
        std::fs::copy(fixture("smollm2-mixed.gguf"), &source).expect("free space");
        let mut command = command(more);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let is_writing = || {
            let folders = std::fs::read_dir(temporary.path()).expect("a folder");
            let mut folders = folders.filter_map(|folder| folder.ok()?.path().read_dir().ok());
            // Beside the file by which the folder is known.
            folders.any(|files| files.count() > 1)
        };
        while !is_writing() {
            assert!(child.try_wait().expect("a child").is_none(), "it has ended");
        }
        act(child.id());
        let output = child.wait_with_output().expect("it ends");
        nothing_is_left();
        output
    };
    for more in [&live[..], &file] {
        let output = meanwhile(more, &|process| {
            send(process, libc::SIGSTOP);
            let file = std::fs::File::options().write(true).open(&source);
            file.expect("a model")
                .set_modified(UNIX_EPOCH)
                .expect("a time");
            send(process, libc::SIGCONT);
        });
        let text = said(&output);
        assert!(
            !output.status.success() && text.contains("changed while it was read"),
            "{text}"
        );
        let output = meanwhile(more, &|process| send(process, libc::SIGTERM));
        assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{output:?}");
    }
    assert_eq!(overlays(&host), []);
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}
