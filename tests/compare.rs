//! `llama-sidecar compare` with real programs.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use testkit::fixtures::{cache, fixture};
use testkit::host::{built, plain_command, preload_library};
use testkit::llama_cpp::llama_cpp;
use testkit::process::with_variable;
use testkit::sim_ggml::SimGgml;

const MODEL: &str = "small-moe.gguf";
/// Options for few and short runs.
const SHORT: [&str; 4] = ["--tokens", "4", "--precision", "99"];

/// A command, and what it left.
struct Compared {
    text: String,
    status: ExitStatus,
    report: Value,
    page: String,
}

impl Compared {
    fn way(&self, at: usize) -> &Value {
        &self.report["ways"][at]
    }

    /// The runs of the program alone.
    fn stock(&self) -> &Vec<Value> {
        self.report["stock"]["runs"].as_array().expect("runs")
    }
}

/// Runs `compare` with options for a program.
fn compare_as(
    cli: &Path,
    set: impl Fn(&mut Command),
    options: &[&str],
    words: &[&str],
) -> Compared {
    let folder = tempfile::tempdir().expect("a folder");
    let temporary = folder.path().join(OsStr::from_bytes(b"no UTF-8: \xE9"));
    std::fs::create_dir(&temporary).expect("a folder");
    let output = folder.path().join("compare.json");
    let mut command = plain_command(cli);
    command.arg("compare").arg("--output").arg(&output);
    command.args(options).arg("--").args(words);
    command.env("XDG_DATA_HOME", folder.path());
    command.env("TMPDIR", &temporary);
    set(&mut command);
    let ended = command.output().expect("it starts");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let texts =
        [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Compared {
        text: texts.concat(),
        status: ended.status,
        report: serde_json::from_str(&read(&output)).unwrap_or_default(),
        page: read(&output.with_extension("html")),
    }
}

fn cli() -> PathBuf {
    built("release/llama-sidecar")
}

fn compare(options: &[&str], words: &[&str]) -> Compared {
    compare_as(&cli(), |_| (), options, words)
}

/// The words of a program of llama.cpp with the model.
fn llama(program: &str, arguments: &str) -> Vec<String> {
    let command = testkit::server::llama(program);
    let path = command.get_program().to_string_lossy().into_owned();
    let words = [path, "-m".into(), fixture(MODEL).display().to_string()];
    words
        .into_iter()
        .chain(arguments.split(' ').map(str::to_owned))
        .collect()
}

fn words(of: &[String]) -> Vec<&str> {
    of.iter().map(String::as_str).collect()
}

const SERVER: &str = "-c 512 -t 2 --no-webui";
const COMPLETION: &str =
    "-c 256 -t 2 -n 4 --temp 0 --seed 1 -no-cnv -p Water-is-wet-and-salt-is-not";

#[track_caller]
fn assert_measured(found: &Compared, speeds: &[&str]) {
    assert!(found.status.success(), "{}", found.text);
    assert!(found.stock().len() >= 3, "{}", found.text);
    let way = found.way(0);
    assert_eq!(way["logits"]["result"], "equal", "{}", found.text);
    assert!(way["logits"]["evaluations"].as_u64() > Some(1), "{way}");
    let runs = way["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), found.stock().len());
    for run in runs.iter().chain(found.stock()) {
        for speed in speeds {
            assert!(run[speed]["tokens"].as_u64() > Some(0), "{speed}: {run}");
            assert!(run[speed]["seconds"].as_f64() > Some(0.0), "{speed}: {run}");
        }
        // The model is mapped.
        assert!(run["memory_bytes"].as_u64() > Some(30 << 20), "{run}");
    }
    let work = &found.report["differences"][0]["work"];
    assert!(work["mean"].as_f64() > Some(0.0), "{work}");
    assert!(found.page.contains("Speeds"), "{}", found.page);
    assert!(!found.report["machine"]["processor"].is_null());
}

#[test]
fn a_server_answers_with_equal_logits() {
    let server = llama("llama-server", SERVER);
    let found = compare(
        &[&["--with", "--expert-trace-stats"], &SHORT[..]].concat(),
        &words(&server),
    );
    assert_measured(&found, &["prompt", "answer"]);
    // 384 words are more than the context.
    assert!(found.report["stopped"].is_null(), "{}", found.text);
}

#[test]
fn a_program_that_ends_by_itself_and_a_benchmark_are_measured() {
    let options = [&["--with", "--expert-trace-stats"], &SHORT[..]].concat();
    let completion = llama("llama-completion", COMPLETION);
    assert_measured(
        &compare(&options, &words(&completion)),
        &["prompt", "answer"],
    );
    let bench = llama("llama-bench", "-t 2 -p 16 -n 4 -r 1");
    assert_measured(&compare(&options, &words(&bench)), &["prompt", "answer"]);
}

#[test]
fn a_program_in_python_is_measured() {
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/packaging/llama_cpp_answers.py"
    );
    let model = fixture(MODEL).display().to_string();
    let python = cache()
        .join("llama-cpp-python/bin/python")
        .display()
        .to_string();
    let found = compare_as(
        &cli(),
        |command| {
            command.env("LLAMA_CPP_LIB_PATH", llama_cpp(""));
        },
        &[&["--with", "--expert-trace-stats"], &SHORT[..]].concat(),
        &[&python, script, &model, "4", "2"],
    );
    assert_measured(&found, &["prompt", "answer"]);
}

#[test]
fn what_has_no_effect_is_not_measured() {
    // Without a GPU, the experts of a model in memory: streaming alone has an effect.
    let server = llama("llama-server", SERVER);
    let found = compare(&SHORT, &words(&server));
    assert!(found.status.success(), "{}", found.text);
    let ways = found.report["ways"].as_array().expect("ways");
    let names: Vec<_> = ways.iter().map(|way| way["flags"][0].as_str()).collect();
    let expected = [
        "--stream-experts",
        "--post-fetch",
        "--expert-cache",
        "--page-lock",
    ];
    assert_eq!(names, expected.map(Some));
    assert!(ways[0]["obstacle"].is_null(), "{}", ways[0]);
    for way in &ways[1..] {
        assert!(
            way["obstacle"].as_str().is_some_and(|why| why.len() > 20),
            "{way}"
        );
        assert!(way["runs"].as_array().is_some_and(Vec::is_empty), "{way}");
    }
}

#[test]
fn a_gpu_with_experts_in_host_memory_is_measured() {
    let sim = SimGgml::new(&[]);
    let completion = llama(
        "llama-completion",
        &format!("{COMPLETION} --device SIM0 -ngl 99 -cmoe"),
    );
    let found = compare_as(
        &cli(),
        |command| sim.prepare(command),
        &[
            &["--with", "--expert-cache --expert-cache-misses=fetch"],
            &SHORT[..],
        ]
        .concat(),
        &words(&completion),
    );
    assert!(found.status.success(), "{}", found.text);
    let way = found.way(0);
    assert!(way["obstacle"].is_null(), "{}", found.text);
    assert!(
        way["runs"][0]["summary"]
            .to_string()
            .contains("were on the device"),
        "{way}"
    );
}

/// A drop-in that changes a weight where experts are streamed: the first one of the last norm.
const WRONG: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((constructor)) static void load_the_other(int argc, char **argv) {
    if (argc > 0 && !getenv("WRONG_DROP_IN")) {
        char both[8192];
        snprintf(both, sizeof both, "%s:%s", getenv("LD_PRELOAD"), RIGHT);
        setenv("LD_PRELOAD", both, 1);
        setenv("WRONG_DROP_IN", "1", 1);
        execv("/proc/self/exe", argv);
    }
}

typedef void *(*binary)(void *, void *, void *);
typedef const char *(*name_of)(const void *);
typedef float *(*data_of)(const void *);

/* Puts a page of memory in place of a page of the file. */
static void change(float *weight) {
    static char copy[4096];
    void *page = (void *) ((size_t) weight & ~(size_t) 4095);
    memcpy(copy, page, sizeof copy);
    mmap(page, sizeof copy, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, copy, sizeof copy);
    *weight += 0.5f;
}

void *ggml_mul(void *context, void *a, void *b) {
    static float *changed;
    name_of name = (name_of) dlsym(RTLD_NEXT, "ggml_get_name");
    data_of data = (data_of) dlsym(RTLD_NEXT, "ggml_get_data");
    int is_wrong = getenv("LLAMA_EXPERT_STREAM") && strcmp(name(b), "output_norm.weight") == 0;
    if (is_wrong && data(b) && data(b) != changed) {
        changed = data(b);
        change(changed);
    }
    return ((binary) dlsym(RTLD_NEXT, "ggml_mul"))(context, a, b);
}
"#;

#[test]
fn a_drop_in_that_changes_a_weight_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("bin")).expect("a folder");
    std::fs::create_dir(path("lib")).expect("a folder");
    std::fs::copy(cli(), path("bin/llama-sidecar")).expect("free space");
    std::fs::write(path("wrong.c"), WRONG).expect("free space");
    let right = format!("-DRIGHT=\"{}\"", preload_library().display());
    let built = Command::new("gcc")
        .args(["-shared", "-fPIC", "-O1", &right, "-o"])
        .arg(path("lib/libllama_sidecar_preload.so"))
        .arg(path("wrong.c"))
        .status();
    assert!(built.expect("gcc").success());
    let options = [
        &[
            "--with",
            "--stream-experts",
            "--with",
            "--expert-trace-stats",
        ],
        &SHORT[..],
    ];
    for program in [
        llama("llama-server", SERVER),
        llama("llama-completion", COMPLETION),
    ] {
        let found = compare_as(
            &path("bin/llama-sidecar"),
            |_| (),
            &options.concat(),
            &words(&program),
        );
        assert!(found.status.success(), "{}", found.text);
        let way = found.way(0);
        assert_eq!(way["logits"]["result"], "different", "{}", found.text);
        assert!(way["runs"].as_array().is_some_and(Vec::is_empty), "{way}");
        assert!(
            found
                .text
                .contains("do not use --stream-experts: it changes results"),
            "{}",
            found.text
        );
        // The other one does not.
        assert_eq!(found.way(1)["logits"]["result"], "equal", "{}", found.text);
    }
}

#[test]
fn the_logits_of_each_process_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let script = |lines: &str| {
        let path = folder.path().join("program.sh");
        std::fs::write(&path, lines).expect("free space");
        ["sh".to_owned(), path.display().to_string()]
    };
    let one = llama("llama-completion", COMPLETION).join(" ");
    let random =
        format!("{one} --temp 3 --seed $(od -An -N2 -tu2 /dev/urandom | tr -d ' ') >/dev/null");
    // The third run is the first one with the option.
    let runs = folder.path().join("runs");
    let differs_once = format!(
        "echo >>{runs}; if [ $(wc -l <{runs}) = 3 ]; then echo other; fi",
        runs = runs.display()
    );
    for (lines, result) in [
        (format!("{one} & {one}; wait"), "equal"),
        (format!("{differs_once}; {one}"), "equal"),
        (format!("{random}; {one}"), "unknown"),
    ] {
        let words = script(&lines);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let options = [&["--with", "--stream-experts"], &SHORT[..]].concat();
        let found = compare(&options, &words);
        let logits = &found.way(0)["logits"];
        assert_eq!(logits["result"], result, "{}", found.text);
    }
}

#[test]
fn a_program_that_cannot_be_compared_is_an_error_with_the_reason() {
    let tell = |options: &[&str], words: &[&str]| {
        let began = Instant::now();
        let found = compare(options, words);
        assert_eq!(found.status.code(), Some(1), "{}", found.text);
        assert!(
            found.report.is_null(),
            "nothing was measured: {}",
            found.report
        );
        assert!(began.elapsed() < Duration::from_secs(60));
        found.text.lines().last().unwrap_or_default().to_owned()
    };
    let crash = tell(
        &[],
        &["sh", "-c", "echo 'cannot open x' >&2; kill -SEGV $$"],
    );
    assert!(
        crash.contains("signal: 11") && crash.contains("cannot open x"),
        "{crash}"
    );
    let hangs = tell(&["--run-time", "1s"], &["sleep", "1000"]);
    assert!(
        hangs.contains("has not ended after 1 s") && hangs.contains("--run-time"),
        "{hangs}"
    );
    let password = tell(&[], &["sh", "-c", "read password < /dev/tty"]);
    assert!(password.contains("/dev/tty"), "{password}");
    let nothing = tell(&[], &["true"]);
    assert!(nothing.contains("opened no model"), "{nothing}");
    let absent = tell(&[], &["/nowhere/llama-server"]);
    assert!(absent.contains("/nowhere/llama-server"), "{absent}");
    let server = llama("llama-server", "--no-such-option");
    let refused = tell(&[], &words(&server));
    assert!(
        refused.contains("before it had loaded its model"),
        "{refused}"
    );
    assert!(refused.contains("no-such-option"), "{refused}");
}

#[test]
fn options_that_cannot_be_used_are_refused_before_the_program_starts() {
    let options = [
        ("--no-such-flag", "--no-such-flag"),
        ("--stream-memory=none", "expected a number"),
        ("--expert-trace-output /nowhere/t", "cannot write /nowhere"),
        ("--stream-trace /nowhere/t.json", "/nowhere/t.json"),
        ("--stream-prefer 0.5", "--accept-changed-results"),
        ("--socket /dev/null", "is no socket"),
        ("-- ls", "expected options of 'run'"),
        ("--page-lock ls", "expected options of 'run'"),
        ("--dry-run", "expected options of 'run'"),
        ("--logits-hashes x", "compare uses itself"),
        ("", "names no option"),
    ];
    for (option, reason) in options {
        let found = compare(&["--with", option], &["/nowhere/program"]);
        assert_eq!(found.status.code(), Some(1), "{}", found.text);
        assert!(found.text.contains(reason), "{option}: {}", found.text);
        assert_eq!(found.text.lines().count(), 1, "{}", found.text);
    }
}

#[test]
fn an_interruption_leaves_a_report_and_no_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("compare.json");
    let mut command = plain_command(cli());
    let mark = format!("COMPARED_BY={}", std::process::id());
    command
        .arg("compare")
        .arg("--output")
        .arg(&output)
        .args([
            "--with",
            "--expert-trace-stats",
            "--precision",
            "0.0001",
            "--time",
            "30m",
            "--",
        ])
        .args(llama("llama-server", SERVER))
        .env("COMPARED_BY", std::process::id().to_string())
        .env("XDG_DATA_HOME", folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let errors = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut lines = errors.lines().map(|line| line.expect("a line"));
    assert!(
        lines.any(|line| line.contains("round 2: ")),
        "no second round"
    );
    // SAFETY: a child that was not waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let rest: Vec<String> = lines.collect();
    let status = child.wait().expect("a child");
    assert_eq!(status.signal(), Some(libc::SIGTERM), "{rest:?}");
    let report: Value =
        serde_json::from_str(&std::fs::read_to_string(&output).expect("a report")).expect("JSON");
    assert_eq!(report["stopped"], "interrupted");
    assert!(
        report["stock"]["runs"]
            .as_array()
            .is_some_and(|runs| !runs.is_empty())
    );
    assert!(
        report["advice"]
            .as_str()
            .is_some_and(|of| of.contains("Not complete: interrupted"))
    );
    let left = with_variable(&mark);
    assert!(left.is_empty(), "{left:?}");
    let mode = std::fs::metadata(&output)
        .expect("a file")
        .permissions()
        .mode();
    assert_eq!(mode & 0o022, 0, "{mode:o}");
}
