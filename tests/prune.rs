//! `llama-sidecar prune --leave-out`: the experts that it finds, what it measures, and what stays after a failure; the last
//! also of `margins`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sidecar_core::protocol::LayerMask;
use testkit::fixtures::fixture;
use testkit::host::{DropIn, built, preload_library};
use testkit::mixtures::{EXPERTS, Mixture, data, never_choose, part};
use testkit::server::{Options, Request, Server, llama_cpp};
use testkit::writer::{Gguf, Kv};

/// Experts by layer.
type Experts = BTreeMap<u64, Vec<u64>>;

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/hosts/c/text.txt");

/// What is found.
struct Found {
    experts: Experts,
    /// The measurements.
    steps: Vec<Value>,
    page: String,
}

impl Found {
    /// The divergence of the last step that has this label.
    fn divergence(&self, label: &str) -> f64 {
        let found = self.steps.iter().rfind(|step| step["what"] == label);
        let found = found.unwrap_or_else(|| panic!("no step '{label}': {:?}", self.steps));
        found["kld"]["mean"].as_f64().expect("a number")
    }
}

/// A command that evaluates with one thread.
fn measuring(name: &[&str], model: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(built("release/llama-sidecar"));
    command
        .args(name)
        .arg(model)
        .args(["--ctx", "128", "--threads", "1"])
        .arg("--program")
        .arg(llama_cpp("llama-perplexity"))
        .args(arguments)
        .env("LLAMA_SIDECAR_PRELOAD", preload_library())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// `prune` with these arguments, and files in a folder.
fn prune(model: &Path, arguments: &[&str], folder: &Path) -> Command {
    let [list, page] = ["list.json", "report.html"].map(|name| folder.join(name));
    let [list, page] = [&list, &page].map(|path| path.to_str().expect("a name"));
    let files = ["--save", list, "--report", page];
    let mut command = measuring(&["prune"], model, &[&files, arguments].concat());
    command.env("TMPDIR", folder);
    command
}

/// The experts of a list.
fn list(folder: &Path) -> Experts {
    let list = std::fs::read(folder.join("list.json")).expect("a list");
    let experts: Vec<LayerMask> = serde_json::from_slice(&list).expect("JSON");
    let experts = experts.into_iter().map(|mask| {
        let experts = mask.experts.into_iter().map(u64::from);
        (u64::from(mask.layer), experts.collect())
    });
    experts.collect()
}

/// The names of the files of a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into()).collect();
    names.sort();
    names
}

/// Searches with a text that is also the other text.
fn found(model: &Path, arguments: &[&str]) -> Found {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = ["--text", TEXT, "--check", TEXT, "--chunks", "12", "--json"];
    let output = prune(model, &[arguments, &texts].concat(), folder.path()).output();
    let output = output.expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(names(folder.path()), ["list.json", "report.html"]);
    Found {
        experts: list(folder.path()),
        steps: printed["steps"].as_array().expect("steps").clone(),
        page: std::fs::read_to_string(folder.path().join("report.html")).expect("a page"),
    }
}

/// A mixture whose experts are chosen by their scores alone and weighted by sigmoids of these.
fn by_scores(used: u32) -> Gguf {
    let mut described = Mixture::Grouped.describe(0);
    for (key, value) in [
        ("expert_used_count", Kv::U32(used)),
        ("expert_group_count", Kv::U32(1)),
        ("expert_group_used_count", Kv::U32(1)),
        ("expert_weights_norm", Kv::Bool(false)),
    ] {
        let mut keys = described.kvs.iter_mut();
        let key = keys.find(|(name, _)| name.ends_with(&format!(".{key}")));
        key.expect("a key").1 = value;
    }
    for layer in 0..Mixture::Grouped.layers() {
        data(&mut described, layer, "exp_probs_b.bias").fill(0);
    }
    described
}

/// Changes a router: the function gets the numbers of an expert.
fn change_scores(data: &mut [u8], expert: u64, change: impl FnOnce(&mut [f32])) {
    let row = part(data, expert);
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
    let mut numbers: Vec<f32> = row.chunks_exact(4).map(number).collect();
    change(&mut numbers);
    let bytes: Vec<u8> = numbers.into_iter().flat_map(f32::to_le_bytes).collect();
    row.copy_from_slice(&bytes);
}

#[test]
fn the_search_finds_experts_without_output() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    // Sigmoids of scores are 1 or 0. An expert whose score is always 0 comes between these, and in its place comes one
    // with the weight 0.
    let mut described = by_scores(26);
    let mut without = Experts::new();
    for layer in 0..Mixture::Grouped.layers() {
        let first = u64::from(layer);
        let experts: Vec<u64> = (0..4).map(|at| at * 8 + (first + at) % 8).collect();
        let router = data(&mut described, layer, "ffn_gate_inp.weight");
        for expert in 0..EXPERTS.into() {
            let factor = if experts.contains(&expert) { 0.0 } else { 1e6 };
            change_scores(router, expert, |row| {
                row.iter_mut().for_each(|x| *x *= factor)
            });
        }
        let down = data(&mut described, layer, "ffn_down_exps.weight");
        for expert in &experts {
            part(down, *expert).fill(0);
        }
        without.insert(first, experts);
    }
    described.write(&model).expect("free space");
    let share = ["--leave-out", "12.5%", "--evaluations"];
    let by_saliency = found(&model, &[&share[..], &["8"]].concat());
    assert_eq!(by_saliency.experts, without);
    // Tokens use these experts as often as others. Without them, only the order of sums is another one.
    let by_count = found(&model, &[&share[..], &["1", "--by", "count"]].concat());
    let [saliency, count] = [&by_saliency, &by_count].map(|found| found.divergence("4"));
    assert!(saliency < count / 10.0, "{saliency} {count}");
}

#[test]
fn the_search_finds_duplicates() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    let mut described = by_scores(1);
    let pair = |layer: u32| [u64::from(layer) + 5, u64::from(layer) * 3 + 17];
    for layer in 0..Mixture::Grouped.layers() {
        let [one, two] = pair(layer);
        for role in ["gate", "up", "down"] {
            let matrices = data(&mut described, layer, &format!("ffn_{role}_exps.weight"));
            if role == "down" {
                // They contribute more than others: each scale is twice as large.
                let blocks = part(matrices, one).chunks_exact_mut(18);
                blocks.for_each(|block| block[1] += 4);
            }
            let matrix = part(matrices, one).to_vec();
            part(matrices, two).copy_from_slice(&matrix);
        }
        // Tokens of one find the other one: its scores are about the same.
        let router = data(&mut described, layer, "ffn_gate_inp.weight");
        let mut scores = Vec::new();
        change_scores(router, one, |row| scores = row.to_vec());
        change_scores(router, two, |row| {
            for (at, x) in row.iter_mut().enumerate() {
                *x = scores[at] + scores[(at + 1) % scores.len()] / 4096.0;
            }
        });
    }
    described.write(&model).expect("free space");
    // One evaluation without those that contribute least, and one without duplicates.
    let found = found(&model, &["--leave-out", "3.125%", "--evaluations", "2"]);
    for (layer, experts) in &found.experts {
        let pair = pair(*layer as u32);
        assert!(
            experts.len() == 1 && pair.contains(&experts[0]),
            "layer {layer}: {experts:?}; {:?}",
            found.steps
        );
    }
    for (least, duplicates) in [("1", "1, with 1 exchange"), ("1", "1, with exchanges")] {
        let [least, duplicates] = [least, duplicates].map(|label| found.divergence(label));
        assert!(duplicates < least / 10.0, "{:?}", found.steps);
    }
}

#[test]
fn the_search_finds_experts_that_are_never_chosen() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    let mut described = Mixture::Grouped.describe(0);
    let mut never = Experts::new();
    for layer in 0..Mixture::Grouped.layers() {
        // One of each group of eight.
        let experts: Vec<u64> = (0..4)
            .map(|group| group * 8 + (u64::from(layer) + group) % 8)
            .collect();
        never_choose(&mut described, layer, &experts);
        never.insert(layer.into(), experts);
    }
    described.write(&model).expect("free space");
    let trace = folder.path().join("trace.json");
    let [from, trace] = [&model, &trace].map(|path| path.to_str().expect("a name"));
    let traced = Command::new(built("release/llama-sidecar"))
        .args(["run", "--quiet", "--expert-trace-output", trace, "--"])
        .arg(llama_cpp("llama-perplexity"))
        .args([
            "-m", from, "-c", "128", "--chunks", "12", "-t", "1", "-f", TEXT,
        ])
        .env("LLAMA_SIDECAR_PRELOAD", preload_library())
        .output()
        .expect("the command starts");
    assert!(traced.status.success(), "{traced:?}");
    for by in [["--by", "saliency"], ["--by", "count"], ["--trace", trace]] {
        let arguments = [&["--leave-out", "12.5%", "--evaluations", "4"][..], &by].concat();
        let found = found(&model, &arguments);
        assert_eq!(found.experts, never, "{by:?}");
        // None, also with other rounding, and four of each layer; and the same with the other text.
        let of_rounding = |step: &Value| step["what"] == "none, flash attention off";
        let steps = &found.steps;
        assert_eq!(steps.len(), 6, "{steps:?}");
        assert!(
            of_rounding(&steps[1]) && of_rounding(&steps[4]),
            "{steps:?}"
        );
        for step in steps.iter().filter(|step| !of_rounding(step)) {
            let divergence = step["kld"]["mean"].as_f64().expect("a number");
            assert!(
                divergence.abs() < 1e-6 && step["same_top"]["mean"] == 100.0,
                "{step}"
            );
        }
        assert!(
            found.page.matches("100.00 %").count() >= 4,
            "{}",
            found.page
        );
        assert!(
            found.page.contains("12 chunks of 128 tokens"),
            "{}",
            found.page
        );
    }
}

/// The arguments of a search in the small mixture.
const SEARCH: [&str; 4] = ["--leave-out", "25%", "--text", TEXT];

/// Whether an error is this one, before anything is evaluated.
fn refused_at_once(arguments: &[&str], reason: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let output = prune(&fixture("small-moe.gguf"), arguments, folder.path()).output();
    let output = output.expect("the command starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(
        error.contains(reason) && !error.contains("evaluating"),
        "{error}"
    );
    assert_eq!(names(folder.path()), [""; 0], "{error}");
}

#[test]
fn what_cannot_be_measured_is_refused_at_once() {
    let with = |more: &[&'static str]| [&SEARCH[..], more].concat();
    refused_at_once(
        &with(&["--check", "/nowhere.txt"]),
        "cannot use the text /nowhere.txt",
    );
    refused_at_once(
        &with(&["--chunks", "1"]),
        "1 chunk of 128 tokens evaluate 63 tokens",
    );
    refused_at_once(&with(&["--work", "/nowhere"]), "cannot write to /nowhere");
    let share = |share| ["--leave-out", share, "--text", TEXT];
    for of in ["5%", "90%", "100%"] {
        refused_at_once(
            &share(of),
            "pass --leave-out 12.5% to 75%, since a token uses 2",
        );
    }
    refused_at_once(&["--text", TEXT], "--leave-out");
}

#[test]
fn the_new_model_is_evaluated() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("pruned.gguf");
    let to = [
        "--chunks",
        "4",
        "--evaluations",
        "1",
        "--json",
        "-o",
        model.to_str().expect("a name"),
    ];
    let output = prune(
        &fixture("small-moe.gguf"),
        &[&SEARCH[..], &to].concat(),
        folder.path(),
    )
    .output()
    .expect("the command starts");
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let steps = printed["steps"].as_array().expect("steps");
    let whats: Vec<&str> = steps
        .iter()
        .filter_map(|step| step["what"].as_str())
        .collect();
    assert_eq!(
        whats,
        ["none", "none, flash attention off", "2", "the new model"]
    );
    let divergence = |at: usize| steps[at]["kld"]["mean"].as_f64().expect("a number");
    // A softmax of six experts is rounded in another way than one of eight with two masked.
    assert!(
        divergence(3) > 0.0 && (divergence(3) - divergence(2)).abs() < divergence(1),
        "{steps:?}"
    );
    assert_eq!(
        names(folder.path()),
        ["list.json", "pruned.gguf", "report.html"]
    );
}

#[test]
fn a_failure_loses_no_measurement() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("short.txt");
    std::fs::copy(TEXT, &other).expect("a copy");
    let check = [
        "--check",
        other.to_str().expect("a name"),
        "--chunks",
        "4",
        "--evaluations",
        "1",
    ];
    let mut command = prune(
        &fixture("small-moe.gguf"),
        &[&SEARCH[..], &check].concat(),
        folder.path(),
    );
    // It had enough tokens before the measurements.
    let output = at_line(&mut command, "measuring how much", |_| {
        std::fs::write(&other, "Once upon a time ".repeat(20)).expect("free space");
    });
    let [printed, error] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        !output.status.success() && error.contains("the text is too short"),
        "{error}"
    );
    assert!(printed.lines().count() == 4, "{printed}");
    assert!(
        list(folder.path())
            .values()
            .all(|experts| experts.len() == 2)
    );
    // The log of the program stays.
    let names = names(folder.path());
    let log = names
        .iter()
        .find(|name| name.ends_with(".log"))
        .expect("a log");
    assert!(
        names.len() == 4 && error.contains(log.as_str()),
        "{names:?} {error}"
    );
}

/// Does something when a line of standard error has a text, and waits for the end.
fn at_line(command: &mut Command, text: &str, act: impl FnOnce(&Child)) -> Output {
    use std::io::{BufRead, BufReader, Read};
    let mut child = command.spawn().expect("the command starts");
    let mut errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains(text) {
        line.clear();
        let read = errors.read_line(&mut line).expect("a pipe");
        assert!(read > 0, "no line has '{text}'");
    }
    act(&child);
    let mut output = child.wait_with_output().expect("its end");
    errors.read_to_end(&mut output.stderr).expect("a pipe");
    output
}

fn terminate(child: &Child) {
    // SAFETY: a system call without memory; the child was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
}

fn interrupted(command: &mut Command, line: &str) -> Output {
    let mut since = Instant::now();
    let output = at_line(command, line, |child| {
        since = Instant::now();
        terminate(child);
    });
    assert!(since.elapsed() < Duration::from_secs(60), "it goes on");
    output
}

#[test]
fn a_second_signal_leaves_nothing() {
    let model = fixture("small-moe.gguf");
    let arguments = [&SEARCH[..], &["--chunks", "4"]].concat();
    for line in ["as it is", "measuring how much"] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = prune(&model, &arguments, folder.path());
        at_line(&mut command, line, |child| {
            terminate(child);
            std::thread::sleep(Duration::from_millis(2));
            terminate(child);
        });
        assert_eq!(names(folder.path()), [""; 0], "{line}");
    }
}

#[test]
fn a_model_that_is_replaced_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let temporary = tempfile::tempdir().expect("a folder");
    let [model, other] = ["model.gguf", "other.gguf"].map(|name| folder.path().join(name));
    std::fs::copy(fixture("small-moe.gguf"), &model).expect("free space");
    std::fs::copy(fixture("small-moe-q8_0.gguf"), &other).expect("free space");
    let mut command = prune(
        &model,
        &[&SEARCH[..], &["--chunks", "4"]].concat(),
        temporary.path(),
    );
    let output = at_line(&mut command, "measuring how much", |_| {
        std::fs::rename(&other, &model).expect("a file");
    });
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && error.contains("was replaced or written"),
        "{error}"
    );
}

#[test]
fn a_list_that_cannot_be_written_loses_no_measurement() {
    let folder = tempfile::tempdir().expect("a folder");
    let lost = folder.path().join("lost");
    std::fs::create_dir(&lost).expect("a folder");
    let model = fixture("small-moe.gguf");
    let [list, page] = [lost.join("list.json"), folder.path().join("report.html")];
    let [list, page] = [&list, &page].map(|path| path.to_str().expect("a name"));
    let more = [
        "--chunks",
        "4",
        "--evaluations",
        "1",
        "--save",
        list,
        "--report",
        page,
    ];
    let mut command = measuring(&["prune"], &model, &[&SEARCH[..], &more].concat());
    let output = at_line(&mut command, "measuring how much", |_| {
        std::fs::remove_dir(&lost).expect("a folder");
    });
    let [printed, error] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        !output.status.success() && error.contains("list.json"),
        "{error}"
    );
    assert_eq!(printed.lines().count(), 4, "{printed}");
    assert_eq!(names(folder.path()), ["report.html"]);
}

#[test]
fn a_list_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    let [given, model] = ["given.json", "pruned.gguf"].map(|name| folder.path().join(name));
    let masks: Vec<Value> = (0..4)
        .map(|layer| serde_json::json!({"layer": layer, "experts": [1, 6]}))
        .collect();
    std::fs::write(&given, serde_json::json!(masks).to_string()).expect("free space");
    let measured = |more: &[&str]| {
        let list = given.to_str().expect("a name");
        let first = ["--experts", list, "--chunks", "4"];
        measuring(
            &["prune"],
            &fixture("small-moe.gguf"),
            &[&first, more].concat(),
        )
        .env("LLAMA_ARG_FLASH_ATTN", "off")
        .output()
        .expect("the command starts")
    };
    let to = model.to_str().expect("a name");
    let output = measured(&["--text", TEXT, "--check", TEXT, "--json", "-o", to]);
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(printed["experts"], Value::from(masks));
    let steps = printed["steps"].as_array().expect("steps");
    let whats: Vec<&str> = steps
        .iter()
        .filter_map(|step| step["what"].as_str())
        .collect();
    let of_text = ["none", "none, flash attention on", "2"];
    assert_eq!(whats, [&of_text[..], &of_text, &["the new model"]].concat());
    assert!(
        steps[2]["kld"] == steps[5]["kld"] && steps[0]["kld"] == steps[3]["kld"],
        "{steps:?}"
    );
    for (more, reason) in [
        (
            &["--save", "list.json", "--text", TEXT][..],
            "cannot be used with",
        ),
        (
            &["--evaluations", "4", "--text", TEXT],
            "cannot be used with",
        ),
        (&["--json"], "--text <FILE>"),
        (&[], "--text FILE to measure"),
        (
            &["--text", TEXT, "--report", to, "-o", to],
            "a model is there",
        ),
        (
            &["--text", TEXT, "--report", "/tmp/same", "-o", "/tmp/same"],
            "is named twice",
        ),
        (
            &["--text", TEXT, "--report", TEXT, "--force"],
            "is read, and would be replaced",
        ),
        (
            &["--text", TEXT, "--", "-m", "other.gguf"],
            "names another model",
        ),
    ] {
        let output = measured(more);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && error.contains(reason),
            "{more:?} {error}"
        );
    }
}

#[test]
fn an_interruption_loses_no_measurement_and_leaves_nothing() {
    use std::os::unix::process::ExitStatusExt;
    let model = fixture("small-moe.gguf");
    let arguments = [&SEARCH[..], &["--chunks", "4", "--evaluations", "100"]].concat();
    for (line, lines, files) in [
        ("as it is", 0, &[][..]),
        ("measuring how much", 0, &[]),
        // Two steps and two exchanges.
        ("96 more may follow", 5, &["list.json", "report.html"]),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let output = interrupted(&mut prune(&model, &arguments, folder.path()), line);
        assert_eq!(output.status.signal(), Some(15), "{output:?}");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.lines().count() >= lines, "{printed}");
        if lines > 0 {
            let page = std::fs::read_to_string(folder.path().join("report.html"));
            assert!(page.expect("a page").contains("ended early"));
        }
        assert_eq!(names(folder.path()), files, "{output:?}");
    }
}

#[test]
fn an_interruption_loses_no_margin_and_leaves_nothing() {
    use std::os::unix::process::ExitStatusExt;
    let folder = tempfile::tempdir().expect("a folder");
    let margins = ["0"; 1000].join(",");
    let arguments = [
        "--text",
        TEXT,
        "--chunks",
        "2",
        "--memory",
        "20M",
        "--margins",
        &margins,
    ];
    let mut command = measuring(&["ctl", "margins"], &fixture("small-moe.gguf"), &arguments);
    command.env("TMPDIR", folder.path());
    let output = interrupted(&mut command, "margin 0: divergence");
    assert_eq!(output.status.signal(), Some(15), "{output:?}");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.lines().count() >= 2, "{printed}");
    assert_eq!(names(folder.path()), [""; 0], "{output:?}");
}

/// The layer of the model that drafts is not computed while a text is evaluated.
#[test]
fn a_layer_that_predicts_further_tokens_loses_as_many_experts() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, pruned) = (
        folder.path().join("model.gguf"),
        folder.path().join("pruned.gguf"),
    );
    Mixture::Predicting.write(&model).expect("free space");
    let to = pruned.to_str().expect("a name");
    let found = [
        "--leave-out",
        "25%",
        "--evaluations",
        "1",
        "--chunks",
        "2",
        "--text",
        TEXT,
        "-o",
        to,
    ];
    let output = prune(&model, &found, folder.path())
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let list = list(folder.path());
    assert!(list.keys().copied().eq(1..4), "{list:?}");
    let answer = |arguments: &[&str]| {
        let options = Options {
            arguments: arguments.iter().map(|&word| word.to_owned()).collect(),
            drop_in: DropIn::Absent,
            ..Options::new(1)
        };
        let server = Server::start(&pruned, &options);
        let answer = server.complete(&Request::new("The capital of France is", 12));
        assert!(server.end().0.success());
        answer.text
    };
    assert_eq!(answer(&["--spec-type", "draft-mtp"]), answer(&[]));
}

/// Experts and types are chosen together; an interrupted command continues; a model that is ruined is not kept.
#[test]
fn a_model_is_as_small_as_requested_and_its_cost_is_stated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(fixture("small-moe.gguf"), path("model.gguf")).expect("a copy");
    let out = path("small.gguf");
    let shrink = |size: &str| {
        let output = out.to_str().expect("a name");
        let texts = [
            "--text", TEXT, "--check", TEXT, "--chunks", "4", "--types", "q4_0",
        ];
        let goal = ["--json", "--size", size, "-o", output];
        let mut command = measuring(
            &["shrink"],
            &path("model.gguf"),
            &[&texts[..], &goal].concat(),
        );
        command.env("TMPDIR", folder.path());
        command
    };
    let ended = interrupted(&mut shrink("45M"), "3 of ");
    let printed = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(
        printed.contains("run the same command again to continue"),
        "{printed}"
    );
    assert!(!out.exists());

    let output = shrink("45M").output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{printed}");
    // What was measured is not measured again.
    assert!(!printed.contains(" 1 of "), "{printed}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let models = found["models"].as_array().expect("models");
    let model = |what: &str| models.iter().find(|of| of["what"] == what).expect(what);
    let (before, new) = (model("as it is"), model("the new model"));
    let bytes = out.metadata().expect("a model").len();
    assert!(bytes <= 45 << 20, "{bytes}");
    assert_eq!(new["bytes"], bytes);
    // Experts cost less than bits in this mixture: it was chosen so.
    assert!(
        new["experts"].as_u64() < before["experts"].as_u64(),
        "{new}"
    );
    let kld = |of: &Value| of["text"]["kld"]["mean"].as_f64().expect("a number");
    assert!(kld(new) < kld(model("all as q4_0")), "{models:?}");
    // The same text twice: what masks predict, the new file has, except for rounding.
    let [masked, written] = ["text", "check"].map(|of| new[of]["ppl"]["mean"].as_f64());
    let (masked, written) = (masked.expect("a number"), written.expect("a number"));
    assert!((written / masked - 1.0).abs() < 0.05, "{new}");
    let sentences = found["sentences"].as_array().expect("sentences");
    assert_eq!(sentences.len(), 2, "{sentences:?}");
    let left: Vec<String> = names(folder.path())
        .into_iter()
        .filter(|name| name.contains("llama-sidecar"))
        .collect();
    assert_eq!(left, [""; 0]);

    std::fs::remove_file(&out).expect("a model");
    let too_small = shrink("1M").output().expect("it starts");
    let printed = String::from_utf8_lossy(&too_small.stderr).into_owned();
    assert!(
        printed.contains("no mix of these types is as small as the limit"),
        "{printed}"
    );
}

/// Figures of two models mean nothing, and a second text is tried before the measurements.
#[test]
fn a_model_that_is_replaced_and_a_short_text_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let (model, out) = (path("model.gguf"), path("out.gguf"));
    std::fs::copy(fixture("small-moe.gguf"), &model).expect("a copy");
    std::fs::write(path("short.txt"), "A short text. ".repeat(20)).expect("a file");
    let shrink = |more: &[&str]| {
        let output = out.to_str().expect("a name");
        let goal = [
            "--chunks", "4", "--types", "q4_0", "--size", "45M", "-o", output,
        ];
        measuring(
            &["shrink"],
            &model,
            &[&["--text", TEXT], more, &goal[..]].concat(),
        )
    };
    let short = path("short.txt").display().to_string();
    let refused = shrink(&["--check", &short]).output().expect("it starts");
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(printed.contains("the text is too short"), "{printed}");
    assert!(
        printed.contains(&short) && !printed.contains("KLD"),
        "{printed}"
    );
    std::fs::copy(fixture("small-moe-q8_0.gguf"), path("other.gguf")).expect("a copy");
    let output = at_line(&mut shrink(&[]), "with flash attention off", |_| {
        std::fs::rename(path("other.gguf"), &model).expect("a model");
    });
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !out.exists(), "{printed}");
    assert!(
        printed.contains("was replaced or written during the measurements"),
        "{printed}"
    );
    let text = path("text.txt").display().to_string();
    std::fs::copy(TEXT, &text).expect("a copy");
    let refused = |words: &[&str], reason: &str| {
        let output = measuring(&["shrink"], &model, words)
            .output()
            .expect("it starts");
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(printed.contains(reason), "{printed}");
    };
    refused(
        &["--text", TEXT, "--size", "200M", "-o", "new.gguf"],
        "there is nothing to do",
    );
    let over = ["--text", &text, "--size", "45M", "-o", &text, "--force"];
    refused(&over, "would be replaced");
}
