//! `llama-sidecar tune`: quantised bytes and figures are those of llama-quantize and of new
//! processes of llama-perplexity, and an interrupted command continues.

mod models;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile};
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::host::built;
use testkit::mixtures::{EXPERTS, GROUPS, Mixture, never_choose};
use testkit::server::{self, llama, llama_cpp};
use testkit::writer::{F32, Tensor};

/// Text with more tokens than the chunks.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/hot-swap.md");
/// How the text is evaluated.
const EVALUATION: [&str; 6] = ["--ctx", "64", "--chunks", "4", "--threads", "2"];

fn done(command: &mut Command) -> Output {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// Quantises a whole model; every matrix has the type.
fn quantize(from: &Path, to: &Path, file_type: &str, arguments: &[&str]) {
    let arguments = [&["--pure"], arguments].concat();
    server::quantize(from, to, file_type, &arguments);
}

/// Makes an importance matrix.
fn imatrix(model: &Path, to: &Path, format: &str) {
    done(
        llama("llama-imatrix")
            .arg("--model")
            .arg(model)
            .args(["--file", TEXT, "--ctx-size", "64", "--chunks", "2"])
            .args(["--output-format", format, "--output-file"])
            .arg(to),
    );
}

/// `llama-sidecar tune MODEL`.
fn tune(model: &Path, work: &Path) -> Command {
    let mut command = Command::new(built("release/llama-sidecar"));
    command.arg("tune").arg(model);
    command.arg("--program").arg(llama_cpp("llama-perplexity"));
    command.arg("--work").arg(work);
    command
}

/// The same with a text and a few chunks.
fn measure(model: &Path, work: &Path, arguments: &[&str]) -> Command {
    let mut command = tune(model, work);
    command
        .args(["--text", TEXT])
        .args(EVALUATION)
        .args(arguments);
    command
}

/// The types and bytes of the tensors of a file.
fn tensors(path: &Path) -> BTreeMap<String, (&'static str, Vec<u8>)> {
    let file = GgufFile::open(path, Access::Read).expect("a model");
    let of = |info: &sidecar_core::gguf::TensorInfo| {
        let mut bytes = vec![0; info.nbytes as usize];
        file.source.read_at(&mut bytes, info.offset).expect("data");
        let name = file.header.name(info).to_string_lossy().into_owned();
        (name, (info.ty.name(), bytes))
    };
    file.header.tensors.iter().map(of).collect()
}

/// Compares the tensors that `tune` quantises with those of llama-quantize.
fn same_bytes(folder: &Path, model: &Path, matrix: Option<&Path>, types: &[(&str, &str)]) {
    let mut command = tune(model, &folder.join("work"));
    let names: Vec<&str> = types.iter().map(|(name, _)| *name).collect();
    command.args(["--prepare", "--types", &names.join(",")]);
    let matrix = matrix.map(|path| path.to_str().expect("text"));
    command.args(matrix.iter().flat_map(|path| ["--imatrix", path]));
    let output = done(&mut command);
    let files = String::from_utf8(output.stdout).expect("text");
    for ((name, file_type), mine) in types.iter().zip(files.lines()) {
        let expected = folder.join("expected.gguf");
        let matrix: Vec<&str> = matrix.iter().flat_map(|path| ["--imatrix", path]).collect();
        quantize(model, &expected, file_type, &matrix);
        let (mine, expected) = (tensors(Path::new(mine)), tensors(&expected));
        assert!(mine.len() >= 28, "{} tensors", mine.len());
        for (tensor, (ty, bytes)) in &mine {
            let (expected_ty, expected) = &expected[tensor];
            let what = format!("{} {name}, {tensor}", model.display());
            assert_eq!(ty, expected_ty, "{what}");
            assert!(bytes == expected, "{what}: other bytes");
        }
    }
}

const K_TYPES: [(&str, &str); 6] = [
    ("q8_0", "Q8_0"),
    ("q6_K", "Q6_K"),
    ("q5_K", "Q5_K_S"),
    ("q4_K", "Q4_K_S"),
    ("q3_K", "Q3_K_S"),
    ("iq4_xs", "IQ4_XS"),
];

#[test]
fn quantised_bytes_are_those_of_llama_quantize() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let source = |name: &str| {
        quantize(&fixture("small.gguf"), &path(name), name, &[]);
        path(name)
    };
    let of = |model: &Path, matrix: Option<&Path>, types: &[(&str, &str)]| {
        same_bytes(folder.path(), model, matrix, types)
    };
    let f16 = source("F16");
    imatrix(&f16, &path("new"), "gguf");
    imatrix(&f16, &path("old"), "dat");
    of(&f16, Some(&path("new")), &K_TYPES);
    let more = [("q4_0", "Q4_0"), ("iq3_s", "IQ3_S"), ("f16", "F16")];
    let all = [&K_TYPES[..], &more[..]].concat();
    of(&source("F32"), None, &all);
    of(&source("BF16"), Some(&path("old")), &K_TYPES[3..5]);
    of(&source("Q8_0"), None, &K_TYPES[1..4]);
}

#[test]
fn quantised_experts_are_those_of_llama_quantize() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, matrix) = (folder.path().join("model"), folder.path().join("matrix"));
    quantize(&fixture("small-moe.gguf"), &model, "F16", &[]);
    imatrix(&model, &matrix, "gguf");
    same_bytes(folder.path(), &model, Some(&matrix), &K_TYPES[3..5]);
}

#[test]
fn a_type_that_needs_a_matrix_is_refused_without_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = tune(&fixture("small.gguf"), folder.path())
        .args([
            "--prepare",
            "--types",
            "iq2_xs",
            "--only",
            r"blk\.0\.ffn_down\.weight",
        ])
        .output()
        .expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("pass one with --imatrix"),
        "{text}"
    );
}

/// A small model in F16.
struct Small {
    folder: TempDir,
    model: PathBuf,
}

impl Small {
    fn new() -> Small {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        quantize(&fixture("small.gguf"), &model, "F16", &[]);
        Small { folder, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Returns what a new process prints about a model: KLD, same top tokens, PPL.
fn fresh(model: &Path, base: &Path) -> [[f64; 2]; 3] {
    let output = done(
        llama("llama-perplexity")
            .arg("--model")
            .arg(model)
            .args(["--ctx-size", "64", "--threads", "2", "--kl-divergence"])
            .arg("--kl-divergence-base")
            .arg(base),
    );
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ["Mean    KLD:", "Same top p:", "Mean PPL(Q) "].map(|name| {
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .expect(name);
        let figures = line
            .split_once(':')
            .expect("figures")
            .1
            .trim_end_matches(" %");
        let (mean, error) = figures.split_once('±').expect("an error");
        [mean, error].map(|number| number.trim().parse().expect("a number"))
    })
}

/// Returns the same figures of a measurement.
fn figures(statistics: &Value) -> [[f64; 2]; 3] {
    ["kld", "same_top", "ppl"].map(|name| {
        ["mean", "error"].map(|part| statistics[name][part].as_f64().expect("a number"))
    })
}

#[test]
fn a_recipe_is_measured_as_a_new_process_measures_its_file() {
    let small = Small::new();
    let (work, written, expected) = (
        small.path("work"),
        small.path("o.gguf"),
        small.path("e.gguf"),
    );
    let text = |path: &Path| path.to_str().expect("text").to_owned();
    let arguments = [
        "--types",
        "q5_K,q3_K",
        "--bpw",
        "4.8",
        "--json",
        "-o",
        &text(&written),
    ];
    let output = done(&mut measure(&small.model, &work, &arguments));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let choices: Vec<&Value> = report["recipe"]["choices"]
        .as_object()
        .expect("choices")
        .values()
        .collect();
    assert!(
        choices.contains(&&Value::from("q3_K")) && choices.contains(&&Value::from("q5_K")),
        "{choices:?}"
    );

    quantize(
        &small.model,
        &expected,
        "Q5_1",
        &["--tensor-type-file", &text(&work.join("recipe.txt"))],
    );
    let recipe = &report["recipe"];
    // The output matrix, too: a new process keeps two copies of it in Q4_0.
    assert_eq!(recipe["choices"]["token_embd"], "q3_K");
    assert_eq!(tensors(&written)["token_embd.weight"].0, "q4_0");
    assert_eq!(
        fs::metadata(&written).expect("a file").len(),
        recipe["bytes"]
    );
    assert_eq!(
        tensors(&written).keys().len(),
        tensors(&expected).keys().len()
    );
    for (name, (ty, bytes)) in tensors(&written) {
        let expected = &tensors(&expected)[&name];
        assert_eq!(ty, expected.0, "{name}");
        assert!(bytes == expected.1, "{name}");
    }
    let base = work.join("base.logits");
    assert_eq!(figures(&recipe["statistics"]), fresh(&expected, &base));
    assert_eq!(figures(&report["baseline"]), fresh(&small.model, &base));
    let map = fs::read_to_string(work.join("tensors.q5_K.map")).expect("a map");
    assert_eq!(map.lines().count(), tensors(&small.model).len());
    for line in map.lines() {
        let parts: Vec<&str> = line.split(':').collect();
        let [_, "", name, shape, ty, elements, bytes] = parts[..] else {
            panic!("{line}");
        };
        let number = |text: &str, key: &str| -> u64 {
            let value = text.strip_prefix(key).expect("the key");
            value.parse().expect("a number")
        };
        let shape = shape
            .strip_prefix("shape=(")
            .and_then(|of| of.strip_suffix(')'));
        let extents = shape.expect("a tuple").split(',').map(str::trim);
        let extents = extents.filter(|of| !of.is_empty());
        let product: u64 = extents
            .map(|of| of.parse::<u64>().expect("an extent"))
            .product();
        assert_eq!(number(elements, "elements="), product, "{line}");
        // The types with which the whole model is measured: q5_K, or what fits instead.
        let ty = ty.strip_prefix("dtype=").expect("a type");
        let ty = sidecar_core::gguf::TypeInfo::from_name(ty).expect("a type");
        assert_eq!(
            number(bytes, "bytes="),
            product / ty.block * ty.bytes,
            "{name}"
        );
    }
    let page = fs::read_to_string(work.join("report.html")).expect("a page");
    assert!(page.contains("<svg") && page.contains("against all as q3_K"));

    // All is known: nothing is measured again, and the output is the same. A model is never
    // written over.
    let known = fs::read(work.join("measurements.jsonl")).expect("measurements");
    let over = measure(&small.model, &work, &arguments).output();
    let over = String::from_utf8(over.expect("it starts").stderr).expect("text");
    assert!(
        over.contains("a model is there, which is never written over"),
        "{over}"
    );
    fs::rename(small.path("o.gguf"), small.path("first.gguf")).expect("a file");
    let again = done(&mut measure(&small.model, &work, &arguments));
    assert_eq!(output.stdout, again.stdout);
    assert_eq!(
        fs::read(work.join("measurements.jsonl")).expect("measurements"),
        known
    );

    let refused = measure(
        &small.model,
        &work,
        &["--types", "q5_K", "--", "--no-warmup"],
    )
    .output();
    let refused = String::from_utf8(refused.expect("it starts").stderr).expect("text");
    assert!(
        refused.contains("another list of arguments after --"),
        "{refused}"
    );
}

#[test]
fn a_killed_sweep_continues_to_the_same_results() {
    let small = Small::new();
    let arguments = [
        "--types",
        "q4_K,q3_K",
        "--only",
        r"blk\..\.(ffn_.*|attn_v\.weight)",
        "--bpw",
        "11",
        "--json",
    ];
    let expected = done(&mut measure(&small.model, &small.path("whole"), &arguments)).stdout;
    let work = small.path("killed");
    let known = || {
        let text = fs::read_to_string(work.join("measurements.jsonl")).unwrap_or_default();
        text.lines().count()
    };
    // The first moment is during the base logits, each other one after a measurement.
    for moment in 0..10 {
        let mut child = measure(&small.model, &work, &arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let wanted = if moment == 0 { "base logits" } else { ": KLD " };
        let found = lines
            .map_while(Result::ok)
            .find(|line| line.contains(wanted));
        child.kill().expect("it is not reaped");
        child.wait().expect("it ends");
        // A late signal may come after a further measurement.
        assert!(found.is_some() || moment > 5, "moment {moment}: it ended");
        assert!(known() >= moment, "measurements after moment {moment}");
    }
    let output = done(&mut measure(&small.model, &work, &arguments));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&expected)
    );
}

/// The tensor of a swap of the file is the one that llama-quantize writes.
#[test]
fn a_swap_of_the_file_quantises_as_llama_quantize_does() {
    let small = Small::new();
    let name = "blk.1.ffn_down.weight";
    let model = small.path("swapped.gguf");
    fs::copy(&small.model, &model).expect("free space");
    let folder = llama_cpp("llama-quantize");
    let folder = folder.parent().expect("a folder").to_owned();
    let swap = |arguments: &[&str]| {
        let mut command = Command::new(built("release/llama-sidecar"));
        command.env("PATH", &folder).arg("swap").arg(&model);
        command.args(["--tensor", r"blk\.1\.ffn_down\.weight", "--from"]);
        let output = command.arg(&small.model).args(arguments).output();
        let output = output.expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let before = fs::read(&model).expect("a model");
    let (succeeded, text) = swap(&["--as", "nonsense", "--dry-run"]);
    assert!(!succeeded && text.contains("is no type of ggml"), "{text}");
    let (succeeded, text) = swap(&["--as", "q8_0", "--dry-run"]);
    assert!(succeeded && text.contains("f16 -> q8_0"), "{text}");
    assert!(text.contains("dry run: nothing was changed"), "{text}");
    let (succeeded, text) = swap(&["--as", "q8_0", "--ggml", "/no/library"]);
    assert!(
        !succeeded && text.contains("cannot open /no/library"),
        "{text}"
    );
    assert!(fs::read(&model).expect("a model") == before);

    let (succeeded, text) = swap(&["--as", "q8_0"]);
    assert!(succeeded, "{text}");
    assert!(
        text.contains("done; undo it with: llama-sidecar undo "),
        "{text}"
    );
    let expected = small.path("expected.gguf");
    quantize(&small.model, &expected, "Q8_0", &[]);
    let (old, found, expected) = (tensors(&small.model), tensors(&model), tensors(&expected));
    for (tensor, found) in &found {
        let wanted = if tensor == name { &expected } else { &old };
        assert!(*found == wanted[tensor], "{tensor}");
    }
}

/// What can be known before the base logits are made is reported before.
#[test]
fn a_goal_a_group_and_a_text_are_checked_first() {
    let small = Small::new();
    let work = small.path("work");
    let refused = |text: &str, arguments: &[&str]| {
        let mut command = tune(&small.model, &work);
        command.args(["--text", text]).args(EVALUATION);
        let output = command.args(arguments).output().expect("it starts");
        assert!(!output.status.success(), "{output:?}");
        assert!(!work.exists(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = refused("/nowhere/text", &["--types", "q8_0"]);
    assert!(text.contains("cannot use the text /nowhere"), "{text}");
    let fifo = small.path("fifo");
    done(Command::new("mkfifo").arg(&fifo));
    let text = refused(fifo.to_str().expect("a name"), &["--types", "q8_0"]);
    assert!(text.contains("it is not a regular file"), "{text}");
    let text = refused(TEXT, &["--types", "q8_0", "--bpw", "0.5"]);
    assert!(text.contains("no mix of these types is as small"), "{text}");
    let text = refused(TEXT, &["--types", "q8_0", "--group", "attn_q"]);
    assert!(
        text.contains("an expression matches whole names: try '.*attn_q.*'"),
        "{text}"
    );
}

/// Notes beside the figures; the goal is larger than any mix.
#[test]
fn results_state_what_a_user_must_know() {
    let small = Small::new();
    let source = small.path("q4.gguf");
    quantize(&small.model, &source, "Q4_K_S", &[]);
    let written = small.path("written.gguf");
    let arguments = [
        "--types",
        "q2_K,q3_K",
        "--only",
        r"blk\.0\.ffn_.*",
        "--size",
        "1G",
        "-o",
    ];
    let mut command = measure(&source, &small.path("work"), &arguments);
    let output = done(command.arg(&written));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("is quantised already (Q"), "{errors}");
    assert!(errors.contains("4 chunks of 64 tokens are few"), "{errors}");
    assert!(errors.contains("of quantised tensors"), "{errors}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("add a larger type to --types, such as "),
        "{text}"
    );
    assert!(
        text.contains("written: ") && !text.contains("to write the model"),
        "{text}"
    );
    assert!(text.contains("work folder: "), "{text}");
    // The tensors have rows that do not fit q2_K.
    assert!(
        text.contains("as with llama-quantize: their rows"),
        "{text}"
    );
}

#[test]
fn a_failed_command_states_what_it_leaves() {
    let small = Small::new();
    let work = small.path("work");
    let wrong = ["--types", "q8_0", "--", "--no-such-option"];
    let output = measure(&small.model, &work, &wrong).output();
    let output = output.expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && work.exists(), "{text}");
    let expected = "has what was measured: a further command for this model continues there";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn an_interruption_states_how_to_continue() {
    let small = Small::new();
    let mut command = measure(&small.model, &small.path("work"), &["--types", "q4_K,q3_K"]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe"))
        .lines()
        .map_while(Result::ok);
    lines
        .find(|line| line.contains(": KLD "))
        .expect("a measurement");
    // SAFETY: a system call, to a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let found = lines.find(|line| line.contains("run the same command again to continue"));
    assert!(found.is_some(), "no such line");
    assert_eq!(child.wait().expect("it ends").signal(), Some(libc::SIGTERM));
}

/// A mixture whose routers never choose a quarter of the experts, and lists of these and of others.
fn with_spare_experts(folder: &Path) -> (PathBuf, [PathBuf; 2]) {
    let mut described = Mixture::Grouped.describe(0);
    let mut lists = [Vec::new(), Vec::new()];
    for layer in 0..Mixture::Grouped.layers() {
        let each = u64::from(EXPERTS / GROUPS);
        let groups = (0..GROUPS.into()).flat_map(|group| [group * each, group * each + 1]);
        let spare: Vec<u64> = groups.collect();
        never_choose(&mut described, layer, &spare);
        let used: Vec<u64> = spare.iter().map(|expert| expert + 2).collect();
        for (list, experts) in lists.iter_mut().zip([spare, used]) {
            list.push(json!({"layer": layer, "experts": experts}));
        }
    }
    let model = folder.join("model.gguf");
    described.write(&model).expect("free space");
    let paths = ["spare.json", "used.json"].map(|name| folder.join(name));
    for (path, list) in paths.iter().zip(lists) {
        fs::write(path, json!(list).to_string()).expect("free space");
    }
    (model, paths)
}

#[test]
fn experts_and_types_are_chosen_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, [spare, used]) = with_spare_experts(folder.path());
    let text = |path: &Path| path.to_str().expect("text").to_owned();
    let work = folder.path().join("work");
    let now = fs::metadata(&model).expect("a model").len();
    let chosen = |size: u64, to: &str| {
        let (size, to) = (size.to_string(), folder.path().join(to));
        let arguments = [
            "--types",
            "q4_0",
            "--experts",
            &text(&used),
            "--experts",
            &text(&spare),
            "--size",
            &size,
            "--json",
            "-o",
            &text(&to),
        ];
        let output = done(&mut measure(&model, &work, &arguments));
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let recipe = &report["recipe"];
        assert_eq!(recipe["cut"], "spare");
        assert_eq!(recipe["bytes"], fs::metadata(&to).expect("a model").len());
        // As many experts as ggml multiplies in the same order: the figures are those of a new process.
        let base = work.join("base.logits");
        assert_eq!(figures(&recipe["statistics"]), fresh(&to, &base), "{size}");
        report
    };
    let pruned = folder.path().join("pruned.gguf");
    done(
        Command::new(built("release/llama-sidecar"))
            .arg("prune")
            .arg(&model)
            .arg("--experts")
            .arg(&spare)
            .arg("-o")
            .arg(&pruned),
    );
    // What is never chosen costs nothing, so that no tensor needs fewer bits.
    let fewer = fs::metadata(&pruned).expect("a model").len() + 4096;
    assert!(fewer < now * 95 / 100);
    let report = chosen(fewer, "fewer.gguf");
    assert!(tensors(&folder.path().join("fewer.gguf")) == tensors(&pruned));
    let kld = |of: &Value| of["statistics"]["kld"]["mean"].as_f64().expect("a number");
    assert_eq!(kld(&report["recipe"]), report["baseline"]["kld"]["mean"]);
    let rounding = report["rounding"]["kld"]["mean"].as_f64();
    assert!(rounding > Some(0.0), "{report}");
    let [of_used, of_spare] = [0, 1].map(|at| kld(&report["cuts"][at]));
    assert!(of_used > of_spare + 1e-4, "{of_used} {of_spare}");
    // With a smaller size, some do, beside it.
    let report = chosen(fewer * 95 / 100, "smaller.gguf");
    assert!(kld(&report["recipe"]) > of_spare);
    assert!(tensors(&folder.path().join("smaller.gguf")) != tensors(&pruned));
    let page = fs::read_to_string(work.join("report.html")).expect("a page");
    assert!(
        page.contains("Fewer experts")
            && page.contains("without the experts of the list &#39;spare&#39;")
    );
    for (list, reason) in [
        (
            r#"[{"layer": 0, "experts": [1]}]"#,
            "layer 0 keeps different numbers of experts in its 4 groups",
        ),
        (
            r#"[{"layer": 77, "experts": [1]}]"#,
            "layer 77 has no experts",
        ),
        ("7", "expected [{"),
    ] {
        let bad = folder.path().join("bad.json");
        fs::write(&bad, list).expect("free space");
        let refused = measure(
            &model,
            &work,
            &["--types", "q4_0", "--experts", &text(&bad)],
        )
        .output();
        let refused = String::from_utf8(refused.expect("it starts").stderr).expect("text");
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn layers_that_predict_further_tokens_stay_as_they_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, work) = (folder.path().join("model.gguf"), folder.path().join("work"));
    Mixture::Predicting.write(&model).expect("free space");
    let output = done(&mut measure(
        &model,
        &work,
        &["--types", "q4_0", "--by", "layer"],
    ));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("layers from 4 on predict further tokens"),
        "{error}"
    );
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.contains("blk.3") && !printed.contains("blk.4"),
        "{printed}"
    );
    let only = ["--types", "q4_0", "--only", r"blk\.4\..*"];
    let output = measure(&model, &work, &only).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("name other tensors"),
        "{error}"
    );
}

/// Multiplies numbers in F16 by 4.
fn times_4(data: &mut [u8]) {
    for number in data.chunks_exact_mut(2) {
        // Two more in the exponent; subnormal numbers and zero stay as they are.
        if number[1] & 0x7c != 0 {
            number[1] += 2 << 2;
        }
    }
}

/// As converters write NVFP4: the weight without its scale, and the scale beside it.
#[test]
fn a_model_with_scales_is_tuned_with_a_reference_that_has_none() {
    let small = Small::new();
    let (scaled, nvfp4, work) = (
        small.path("n.gguf"),
        small.path("nv.gguf"),
        small.path("work"),
    );
    let mut gguf = models::read(&small.model);
    let mut scales = Vec::new();
    for of in &mut gguf.tensors {
        if of.name.contains("ffn_up.weight") || of.name.contains("ffn_down.weight") {
            times_4(&mut of.data);
            scales.push(Tensor {
                name: of.name.replace(".weight", ".scale"),
                ne: vec![1],
                ty: F32,
                data: 0.25f32.to_le_bytes().to_vec(),
            });
        }
    }
    gguf.tensors.extend(scales);
    gguf.write(&scaled).expect("free space");
    fs::copy(&scaled, &nvfp4).expect("free space");
    const WEIGHTS: &str = r"blk\.\d+\.ffn_(up|down)\.weight";
    let swap = |model: &Path, from: &Path, ty: &str| {
        let folder = llama_cpp("llama-quantize");
        let mut command = Command::new(built("release/llama-sidecar"));
        command.env("PATH", folder.parent().expect("a folder"));
        command.arg("swap").arg(model).args(["--tensor", WEIGHTS]);
        done(command.arg("--from").arg(from).args(["--as", ty]));
    };
    swap(&nvfp4, &scaled, "nvfp4");
    assert_eq!(tensors(&nvfp4)["blk.0.ffn_up.weight"].0, "nvfp4");
    let written = small.path("o.gguf");
    let text = |path: &Path| path.to_str().expect("text").to_owned();
    let arguments = [
        "--reference",
        &text(&small.model),
        "--types",
        "q8_0",
        "--only",
        WEIGHTS,
        "--size",
        "1G",
        "--json",
        "-o",
        &text(&written),
    ];
    let output = done(&mut measure(&nvfp4, &work, &arguments));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let base = work.join("base.logits");
    assert_eq!(figures(&report["baseline"]), fresh(&nvfp4, &base));
    // All as q8_0, in a model that has no scales, and in the one that is written.
    let expected = small.path("e.gguf");
    fs::copy(&small.model, &expected).expect("free space");
    swap(&expected, &small.model, "q8_0");
    let found = figures(&report["recipe"]["statistics"]);
    assert!(found[0][0] < figures(&report["baseline"])[0][0], "{report}");
    assert_eq!(found, fresh(&expected, &base));
    assert_eq!(found, fresh(&written, &base));
}
