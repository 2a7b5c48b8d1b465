//! What the variables of the expert trace request, in unmodified llama.cpp programs: the lines on
//! standard error, and the layers that are not counted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use testkit::host::{built, preload_library};
use testkit::mixtures::{EXPERTS, Mixture, USED};
use testkit::server::llama;

/// Layers with experts of the model.
const LAYERS: u32 = 4;
const START: &str = "[EXPERT-TRACE] Tracer enabled";
const WARM_UP: &str = "Evaluations not counted, warm-ups: 1";

/// A folder with a mixture of experts.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("moe.gguf");
    Mixture::SharedExpert.write(&path).expect("free space");
    (folder, path)
}

/// Arguments of a program that writes eight tokens.
fn arguments(command: &mut Command, model: &Path, more: &[&str]) {
    command.arg("-m").arg(model).args(["-p", "Hello world"]);
    command.args(["-n", "8", "-c", "256", "-t", "1", "-tb", "1"]);
    command.args(["-no-cnv", "--ignore-eos", "--temp", "0"]);
    command.args(more);
}

/// Runs llama-completion with the drop-in, and returns the lines of its standard error.
fn completion(model: &Path, variables: &[(&str, &str)], more: &[&str]) -> Vec<String> {
    let mut command = llama("llama-completion");
    arguments(&mut command, model, more);
    command.env("LD_PRELOAD", preload_library());
    command.envs(variables.iter().copied());
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text.lines().map(str::to_owned).collect()
}

/// The lines that begin with these words.
fn beginning<'a>(lines: &'a [String], words: &str) -> Vec<&'a str> {
    let lines = lines.iter().map(String::as_str);
    lines.filter(|line| line.starts_with(words)).collect()
}

/// The lines of the trace, without their common first word.
fn trace_lines(lines: &[String]) -> Vec<&str> {
    let lines = lines.iter();
    lines
        .filter_map(|line| line.strip_prefix("[EXPERT-TRACE] "))
        .collect()
}

/// Experts and their counts in a list of the summary, whose lines begin with this indentation.
fn counts(lines: &[String], indent: &str) -> Vec<(u32, u64)> {
    let begin = format!("{indent}Expert ");
    let expert = |line: &String| {
        let (expert, rest) = line.strip_prefix(&begin)?.split_once(':')?;
        let count = rest.split_whitespace().next()?;
        Some((expert.trim().parse().ok()?, count.parse().ok()?))
    };
    lines.iter().filter_map(expert).collect()
}

fn json(path: &Path) -> Value {
    let text = std::fs::read(path).expect("it is written");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn statistics_and_an_output_print_the_counts_of_all_experts() {
    let (folder, model) = folder();
    let output = folder.path().join("stats.json");
    let output_text = output.to_str().expect("UTF-8");
    let variables = [
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_EXPERT_TRACE_OUTPUT", output_text),
    ];
    let lines = completion(&model, &variables, &[]);
    let exported = format!("Statistics exported to {output_text}");
    let file = format!("  Output file: {output_text}");
    let expected = [
        "Tracer enabled",
        "  Statistics: ON",
        &file,
        WARM_UP,
        &exported,
    ];
    assert_eq!(trace_lines(&lines), expected, "{lines:?}");
    let at = |text: &str| lines.iter().position(|line| line == text);
    let head = at("=== Expert Usage Statistics ===").expect("a summary");
    let trace = json(&output);
    let tokens = format!("Total tokens processed: {}", trace["tokens"]);
    assert_eq!(lines[head + 1], tokens);
    assert_eq!(lines[head + 2], "Expert activation counts:");
    assert!(at(START) < Some(head) && head < lines.len() - 1);

    // All experts that were used, the most used first.
    let listed = counts(&lines, "  ");
    let mut summed = BTreeMap::new();
    for layer in trace["layers"].as_array().expect("layers") {
        for (expert, count) in layer["counts"]
            .as_array()
            .expect("counts")
            .iter()
            .enumerate()
        {
            *summed.entry(expert as u32).or_insert(0) += count.as_u64().expect("a count");
        }
    }
    summed.retain(|_, count| *count > 0);
    assert!(summed.len() > 10, "more than a short list: {summed:?}");
    assert_eq!(listed.iter().copied().collect::<BTreeMap<_, _>>(), summed);
    assert!(listed.is_sorted_by_key(|(expert, count)| (u64::MAX - count, *expert)));
    let shares = beginning(&lines, "  Expert ");
    let share = |line: &&str| line.split(['(', '%']).nth(1)?.parse::<f64>().ok();
    let sum: f64 = shares.iter().filter_map(share).sum();
    assert!((sum - 100.0).abs() < 0.5, "{sum}");

    // The same counts with names of fields that scripts may expect.
    let report = Command::new(built("release/llama-sidecar"))
        .args(["report", output_text, "--format", "activations"])
        .output()
        .expect("it starts");
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert_eq!(report["total_tokens"], trace["tokens"]);
    let used: BTreeMap<u32, u64> =
        serde_json::from_value(report["expert_activations"].clone()).expect("counts");
    assert_eq!(used, summed);
    for layer in trace["layers"].as_array().expect("layers") {
        let found = &report["per_layer"][layer["layer"].to_string()];
        let used: BTreeMap<usize, u64> = serde_json::from_value(found.clone()).expect("counts");
        let all = layer["counts"].as_array().expect("counts").iter();
        let counted = all
            .map(|count| count.as_u64().expect("a count"))
            .enumerate();
        let counted: BTreeMap<usize, u64> = counted.filter(|(_, count)| *count > 0).collect();
        assert_eq!(used, counted);
    }
}

#[test]
fn the_length_of_the_summary_is_a_variable() {
    let (_folder, model) = folder();
    let variables = [
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_EXPERT_TRACE_TOP", "3"),
    ];
    let lines = completion(&model, &variables, &[]);
    assert_eq!(counts(&lines, "  ").len(), 3, "{lines:?}");
    assert_eq!(beginning(&lines, "  ... and ").len(), 1);
}

#[test]
fn names_alone_list_gate_down_and_up_of_each_expert() {
    let (_folder, model) = folder();
    let lines = completion(&model, &[("LLAMA_EXPERT_TRACE_NAMES", "1")], &[]);
    let mut trace = trace_lines(&lines);
    assert_eq!(
        trace[..2],
        ["Tracer enabled", "  Name logging: ON"],
        "{lines:?}"
    );
    assert_eq!(trace.pop(), Some(WARM_UP));
    assert!(trace.len() > 2, "{lines:?}");
    let mut listed = BTreeSet::new();
    for three in trace[2..].chunks(3) {
        let head = three[0].split(':').next().expect("a head");
        let number = |word: &str| -> u32 {
            let (_, rest) = head.split_once(word).expect(word);
            let end = rest.find(|c: char| !c.is_ascii_digit());
            rest[..end.unwrap_or(rest.len())].parse().expect("a number")
        };
        let (layer, expert) = (number("Layer "), number("Expert "));
        assert!(layer < LAYERS && expert < EXPERTS);
        let name = |role| format!("{head}: blk.{layer}.ffn_{role}_exps.{expert}.weight");
        assert_eq!(three, ["gate", "down", "up"].map(name));
        listed.insert((layer, expert));
    }
    // The names are those of the experts that are counted, and no summary was requested.
    assert!(beginning(&lines, "===").is_empty());
    let variables = [
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_EXPERT_TRACE_PER_LAYER", "1"),
    ];
    let lines = completion(&model, &variables, &[]);
    let start = lines.iter().position(|line| line == "Per-layer breakdown:");
    let mut counted = BTreeSet::new();
    let mut layer = 0;
    for line in &lines[start.expect("layers")..] {
        if let Some(number) = line.strip_prefix("  Layer ") {
            layer = number.trim_end_matches(':').parse().expect("a number");
        }
        let one = counts(std::slice::from_ref(line), "    ");
        counted.extend(one.iter().map(|(expert, _)| (layer, *expert)));
    }
    assert_eq!(listed, counted);
}

#[test]
fn layers_alone_print_a_summary() {
    let (_folder, model) = folder();
    let lines = completion(&model, &[("LLAMA_EXPERT_TRACE_PER_LAYER", "1")], &[]);
    let start = ["Tracer enabled", "  Statistics: ON", "  Per-layer: ON"];
    let trace = trace_lines(&lines);
    assert_eq!(trace, [&start[..], &[WARM_UP]].concat(), "{lines:?}");
    assert_eq!(beginning(&lines, "  Layer ").len() as u32, LAYERS);
}

/// The warm-up is an evaluation like others, of the first and the last token of a text.
#[test]
fn a_warm_up_is_not_counted_and_mentioned_once() {
    let (folder, model) = folder();
    let counted = |name: &str, more: &[&str]| {
        let path = |extension: &str| folder.path().join(name).with_extension(extension);
        let [trace, routes, saliency] = ["json", "csv", "saliency"].map(path);
        let variables = [
            ("LLAMA_EXPERT_TRACE_OUTPUT", trace.to_str().expect("UTF-8")),
            ("LLAMA_EXPERT_TRACE_ROUTES", routes.to_str().expect("UTF-8")),
            (
                "LLAMA_EXPERT_TRACE_SALIENCY",
                saliency.to_str().expect("UTF-8"),
            ),
        ];
        let lines = completion(&model, &variables, more);
        let said = lines.iter().filter(|line| line.contains("not counted"));
        let routes = std::fs::read_to_string(&routes).expect("routes");
        let (trace, saliency) = (json(&trace), json(&saliency));
        (
            said.count(),
            trace["layers"].clone(),
            routes,
            saliency["layers"].clone(),
        )
    };
    let (said, layers, routes, saliency) = counted("with", &[]);
    let (never, expected, expected_routes, expected_saliency) =
        counted("without", &["--no-warmup"]);
    assert_eq!((said, never), (1, 0));
    assert_eq!(layers, expected);
    assert_eq!(routes, expected_routes);
    assert_eq!(saliency, expected_saliency);
}

#[test]
fn more_experts_than_the_metadata_states_are_counted() {
    let (folder, model) = folder();
    let trace = folder.path().join("trace.json");
    let routes = folder.path().join("routes.csv");
    let variables = [
        ("LLAMA_EXPERT_TRACE_OUTPUT", trace.to_str().expect("UTF-8")),
        ("LLAMA_EXPERT_TRACE_ROUTES", routes.to_str().expect("UTF-8")),
    ];
    let used = USED + 2;
    let option = format!("qwen2moe.expert_used_count=int:{used}");
    completion(&model, &variables, &["--override-kv", &option]);
    let trace = json(&trace);
    assert_eq!(trace["experts_used"], used);
    let first = &trace["layers"][0];
    let counts = first["counts"].as_array().expect("counts").iter();
    let sum: u64 = counts.map(|count| count.as_u64().expect("a count")).sum();
    let tokens = first["tokens"].as_u64().expect("tokens");
    assert!(tokens > 8, "{first}");
    assert_eq!(sum, tokens * u64::from(used));
    let routes = std::fs::read_to_string(&routes).expect("routes");
    let of_layer = routes.lines().filter(|line| line.starts_with("0,"));
    assert_eq!(of_layer.count() as u64, sum);
}

/// Runs llama-completion with all experts in the wrapper, and returns its last line.
fn last_line_with_all_experts(model: &Path) -> (String, Option<i32>) {
    let mut plain = llama("llama-completion");
    let option = format!("qwen2moe.expert_used_count=int:{EXPERTS}");
    arguments(&mut plain, model, &["--override-kv", &option]);
    let mut command = Command::new(built("release/llama-sidecar"));
    command.args(["run", "--expert-trace-stats", "--"]);
    command.arg(plain.get_program()).args(plain.get_args());
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = text.lines().last().unwrap_or_default().to_owned();
    (last, output.status.code())
}

#[test]
fn evaluations_that_are_all_left_out_are_an_error_at_the_end() {
    let (_folder, model) = folder();
    let (last, status) = last_line_with_all_experts(&model);
    assert_eq!(status, Some(0), "the status of the program: {last}");
    let begin = format!("llama-sidecar: error: {}: ", model.display());
    assert!(last.starts_with(&begin), "{last}");
    assert!(
        last.contains("no expert of layers 0-3 was counted"),
        "{last}"
    );
}

#[test]
fn post_fetch_is_on_where_its_switch_is_set() {
    let (_folder, model) = folder();
    let wrapped = |value: Option<&str>| {
        let mut plain = llama("llama-completion");
        arguments(&mut plain, &model, &[]);
        let mut command = Command::new(built("release/llama-sidecar"));
        command.args(["run", "--"]);
        command.arg(plain.get_program()).args(plain.get_args());
        if let Some(value) = value {
            command.env("LLAMA_POSTFETCH_ENABLE", value);
        }
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = wrapped(Some("1"));
    let error = "llama-sidecar: error: post-fetch: no experts of ";
    assert!(text.contains(error), "{text}");
    for value in [None, Some("0")] {
        let text = wrapped(value);
        assert!(!text.contains("post-fetch"), "{text}");
        // What is on by default.
        assert!(text.contains("nothing is to be streamed"), "{text}");
    }
}

/// Files of others at the paths of all outputs: they stay as they are, the outputs have numbered
/// names that the log states, and a second run replaces these.
#[test]
fn outputs_leave_files_of_others_where_they_are() {
    let (folder, model) = folder();
    let outputs = [
        ("LLAMA_EXPERT_TRACE_OUTPUT", "trace.json"),
        ("LLAMA_EXPERT_TRACE_ROUTES", "routes.npy"),
        ("LLAMA_EXPERT_TRACE_SALIENCY", "saliency.json"),
        ("LLAMA_SIDECAR_LOGITS_HASHES", "hashes"),
        ("LLAMA_SIDECAR_JOURNAL", "journal"),
    ];
    let path = |name: &str| folder.path().join(name);
    let texts = outputs.map(|(_, name)| path(name).display().to_string());
    for (at, (_, name)) in outputs.iter().enumerate() {
        // Every other one is a link to a file of the user.
        let file = path(&format!("{name}.of-the-user"));
        std::fs::write(&file, "notes").expect("free space");
        match at % 2 {
            0 => std::os::unix::fs::symlink(&file, path(name)).expect("a link"),
            _ => std::fs::rename(&file, path(name)).expect("a file"),
        }
    }
    let names = || {
        let entries = std::fs::read_dir(folder.path()).expect("a folder");
        let entries = entries.map(|of| of.expect("an entry").file_name());
        entries.collect::<BTreeSet<_>>()
    };
    let run = |with_journal: bool| {
        let outputs = outputs.iter().zip(&texts);
        let outputs = outputs.filter(|((name, _), _)| with_journal || !name.ends_with("JOURNAL"));
        let variables: Vec<_> = outputs.map(|((name, _), text)| (*name, &**text)).collect();
        completion(&model, &variables, &[])
    };
    let lines = run(false).join("\n");
    for (_, name) in &outputs[..4] {
        let stated = format!("cannot write {}: a file is there", path(name).display());
        assert!(lines.contains(&stated), "{name} at the start: {lines}");
    }
    let mut expected = names();
    for (of, start) in [
        (
            "trace.~1~.json",
            "{\n  \"schema\": \"llama-sidecar/expert-trace",
        ),
        (
            "saliency.~1~.json",
            "{\n  \"schema\": \"llama-sidecar/expert-saliency",
        ),
        ("hashes.~1~", "# rows and hash"),
        ("routes.~1~.npy", ""),
        ("routes.~1~.npy.marks.jsonl", ""),
    ] {
        assert!(expected.contains(std::ffi::OsStr::new(of)), "{of}: {lines}");
        let text = std::fs::read(path(of)).expect("a file");
        assert!(text.starts_with(start.as_bytes()), "{of}");
    }
    run(true);
    assert_eq!(names(), std::mem::take(&mut expected));
    for (_, name) in &outputs {
        assert_eq!(
            std::fs::read(path(name)).expect("a file"),
            b"notes",
            "{name}"
        );
    }
}
