//! Expert streaming with a model that is larger than memory, on an emulated disk (FUSE) and with
//! a memory limit (control groups).

mod hosts;

use std::fs::File;
use std::process::{Command, Stdio};

use serde_json::Value;

use hosts::{TOKENS, count, fresh, stream_figures, streaming};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, built, plain_command, preload_library};
use testkit::llama_cpp::llama_cpp;
use testkit::memory_limit::{MemoryLimit, drop_cache};
use testkit::process::read_by;
use testkit::slow_disk::{SlowDisk, Speed};

/// An emulated disk with a fixture, and a memory limit.
fn small_memory(model: &str, mb: u64) -> (SlowDisk, MemoryLimit) {
    let speed = Speed::new(200, 1000);
    (
        SlowDisk::mount(&fixture(model), speed).expect("FUSE"),
        MemoryLimit::new(mb << 20).expect("a control group"),
    )
}

/// A host on an emulated disk, with little memory.
fn limited(disk: &SlowDisk, limit: &MemoryLimit, drop_in: &DropIn) -> Host {
    disk.read_ahead_kb(128).expect("a mounted disk");
    disk.drop_cache().expect("a file");
    Host::start_with(Program::C, &disk.path(), drop_in, |command| {
        limit.apply(command);
    })
}

#[test]
fn experts_are_read_ahead_under_a_memory_limit() {
    let (disk, limit) = small_memory("moe.gguf", 200);
    let model = fixture("moe.gguf");
    let page_cache = ("LLAMA_EXPERT_STREAM_MEMORY_MB", "0");
    for with in [streaming(&[]), streaming(&[page_cache])] {
        let mut host = limited(&disk, &limit, &with);
        let text = host.text(TOKENS);
        assert_eq!(text, fresh(Program::C, &model));
        let figures = stream_figures(&host);
        assert!(count(&figures, "read_bytes") > 0, "{figures}");
        assert_eq!(figures["stopped"], false, "{figures}");
        assert_eq!(host.end(), Some(0));
    }
}

/// Pages of a file can be dropped for what the program allocates; memory of experts is given back for it.
#[test]
fn a_context_that_is_made_later_has_its_memory() {
    let limit = MemoryLimit::new(250 << 20).expect("a control group");
    let mut texts = Vec::new();
    for with in [DropIn::Absent, streaming(&[])] {
        let model = fixture("moe.gguf");
        let mut host = Host::start_with(Program::C, &model, &with, |command| limit.apply(command));
        let text = format!("text {TOKENS}");
        host.ask(&text);
        // 180 MB of keys and values.
        assert_eq!(
            host.ask_or_end("context 8192").as_deref(),
            Some("made"),
            "{with:?}"
        );
        texts.push(host.ask(&text));
        assert_eq!(host.end(), Some(0));
    }
    assert_eq!(texts[0], texts[1]);
}

/// What `run` without options turns on: a model that does not fit is streamed, and one that fits is loaded and
/// evaluated as without the drop-in.
#[test]
fn only_models_that_do_not_fit_are_streamed_where_needed() {
    let (disk, limit) = small_memory("moe.gguf", 200);
    let model = fixture("moe.gguf");
    let needed = streaming(&[("LLAMA_EXPERT_STREAM", "needed")]);
    let mut host = limited(&disk, &limit, &needed);
    assert_eq!(host.text(TOKENS), fresh(Program::C, &model));
    let figures = stream_figures(&host);
    assert!(count(&figures, "read_bytes") > 0, "{figures}");
    assert_eq!(host.end(), Some(0));

    // Without special buffers for repacked weights, nothing is kept out of them.
    for model in [&model, &fixture("small.gguf")] {
        let mut host = Host::start(Program::C, model, &needed);
        assert_eq!(host.text(TOKENS), fresh(Program::C, model));
        let status = host.control("status");
        assert!(status["models"][0]["stream"].is_null(), "{status}");
        assert!(status["no_effect"].is_null(), "{status}");
        let kept = "expert tensors stay in the mapping";
        assert!(host.logged(kept).is_empty());
        assert!(host.logged("were mapped without reading them").is_empty());
        assert_eq!(host.end(), Some(0));
    }
}

/// The page cache has all of a model that does not fit only because memory is kept for the program.
#[test]
fn a_model_that_nearly_does_not_fit_is_used_in_the_page_cache() {
    let limit = MemoryLimit::new(470 << 20).expect("a control group");
    let model = fixture("moe.gguf");
    let expected = fresh(Program::C, &model);
    for (memory, is_read) in [(None, true), (Some("100"), false)] {
        let memory = memory.map(|mb| ("LLAMA_EXPERT_STREAM_MEMORY_MB", mb));
        let needed = [("LLAMA_EXPERT_STREAM", "needed")]
            .into_iter()
            .chain(memory);
        let needed = streaming(&needed.collect::<Vec<_>>());
        let mut host = Host::start_with(Program::C, &model, &needed, |command| {
            limit.apply(command);
        });
        assert_eq!(host.text(TOKENS), expected);
        let figures = stream_figures(&host);
        let unread = host.logged("MiB were mapped without reading them");
        assert_eq!(unread[0].contains(": 0 MiB"), is_read, "{unread:?}");
        assert_eq!(figures["held_bytes"] == 0, is_read, "{figures}");
        assert_eq!(host.end(), Some(0));
    }
}

/// A page fault at a weight that each token uses would read as much as the kernel reads ahead, in place of other such weights,
/// for good once some of them were dropped.
#[test]
fn page_faults_read_no_weights_around_them() {
    let limit = MemoryLimit::new(220 << 20).expect("a control group");
    // A file that no other program maps: its pages can be dropped.
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    std::fs::copy(fixture("moe.gguf"), &model).expect("a copy");
    let file = File::open(&model).expect("a copy");
    file.sync_all().expect("a file");
    drop_cache(&file).expect("a file");
    let mut host = Host::start_with(Program::C, &model, &streaming(&[]), |command| {
        limit.apply(command);
    });
    let text = format!("text {TOKENS}");
    let expected = host.ask(&text);
    // Another program of the group needs nearly all of the memory for a moment, or is ended for it.
    let mut other = Command::new("python3");
    other.args(["-c", "bytearray(b'x') * (150 << 20)"]);
    limit.apply(&mut other);
    other.status().expect("it starts");
    assert_eq!(host.ask(&text), expected);
    let (before, figures) = (read_by(host.id()), stream_figures(&host));
    for _ in 0..3 {
        assert_eq!(host.ask(&text), expected);
    }
    let read = read_by(host.id()) - before;
    let after = stream_figures(&host);
    let of = |name| count(&after, name) - count(&figures, name);
    let requested = of("read_bytes") + of("ahead_bytes");
    assert!(read < requested * 6 / 5, "{read} of {requested}: {after}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn reads_that_fail_leave_the_program_as_it_is() {
    let (disk, limit) = small_memory("moe.gguf", 200);
    let model = fixture("moe.gguf");
    for memory in ["", "0"] {
        let with = streaming(&[("LLAMA_EXPERT_STREAM_MEMORY_MB", memory)]);
        let mut host = limited(&disk, &limit, &with);
        host.text(2);
        let held = count(&stream_figures(&host), "held_bytes");
        assert_eq!(held > 0, memory.is_empty(), "{held}");
        // Every read of an expert that is read ahead fails; the program's own read comes after.
        let size = std::fs::metadata(&model).expect("a fixture").len();
        disk.fail(size / 2..size, 3);
        assert_eq!(host.text(TOKENS), fresh(Program::C, &model));
        assert_eq!(host.end(), Some(0));
    }
}

/// `compare` finds that streaming is faster, and `run` without options uses it from then on.
#[test]
fn a_comparison_finds_that_streaming_is_faster() {
    let (disk, limit) = small_memory("moe.gguf", 200);
    disk.read_ahead_kb(128).expect("a mounted disk");
    let folder = tempfile::tempdir().expect("a folder");
    let [host, libraries] = [built("hosts-c/host"), fixture("upstream")];
    let words = [&host, &libraries, &disk.path()].map(|path| path.display().to_string());
    // A time of the run, because the program prints no speeds.
    let script = format!("(echo text 24; echo end) | {}", words.join(" "));
    let sidecar = |arguments: &[&str]| {
        let mut command = Command::new(built("release/llama-sidecar"));
        command.args(arguments).args(["--", "sh", "-c", &script]);
        command.env("XDG_DATA_HOME", folder.path());
        limit.apply(&mut command);
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        let text = [output.stdout, output.stderr].concat();
        (String::from_utf8_lossy(&text).into_owned(), output.status)
    };
    let report = folder.path().join("compare.json").display().to_string();
    let options = ["--with", "--stream-experts", "--precision", "30"];
    let (text, status) = sidecar(&[&["compare", "--output", &report], &options[..]].concat());
    println!("{text}");
    assert!(status.success());
    assert!(text.contains("use --stream-experts: the program is faster with it"));
    assert!(text.contains("every logit is equal"));
    let (text, _) = sidecar(&["run", "--dry-run"]);
    assert!(text.contains("LLAMA_EXPERT_STREAM=auto"), "{text}");
}

/// Returns the first and the last figures of a program whose context has so many tokens, and which may have so much memory
/// for experts.
fn figures_with(context: u64, flash: &str, mib: &str) -> [Value; 2] {
    // A group of its own: memory of a program that has just ended may still count.
    let limit = MemoryLimit::new(400 << 20).expect("a control group");
    let journal = tempfile::NamedTempFile::new().expect("a file");
    let mut command = plain_command(llama_cpp("llama-completion"));
    command.arg("--model").arg(fixture("moe.gguf"));
    command.args(["-p", "The capital of France is", "-n", "8", "--temp", "0"]);
    command.args(["-no-cnv", "-t", "2", "-c", &context.to_string()]);
    command.args(["--flash-attn", flash]);
    command.env("LD_PRELOAD", preload_library());
    command.env("LLAMA_EXPERT_STREAM", "auto");
    command.env("LLAMA_EXPERT_STREAM_MEMORY_MB", mib);
    command.env("LLAMA_SIDECAR_JOURNAL", journal.path());
    limit.apply(&mut command);
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let lines = std::fs::read_to_string(journal.path()).expect("a journal");
    let events = lines.lines().map(serde_json::from_str);
    let events: Vec<Value> = events.collect::<Result<_, _>>().expect("JSON");
    ["stream_start", "stream"].map(|name| {
        let event = events.iter().find(|event| event["event"] == name);
        event.expect("an event")["figures"].clone()
    })
}

/// What fits at the first evaluation fits at the end, and a smaller context makes as much space as is predicted.
#[test]
fn what_fits_beside_a_context_is_known_for_a_smaller_one() {
    // Scores of attention need memory where they are not computed in pieces.
    for flash in ["on", "off"] {
        let found = [512, 2048, 8192].map(|tokens| {
            let [first, last] = figures_with(tokens, flash, "auto");
            assert_eq!(first["context_tokens"], tokens, "{first}");
            let count = |figures: &Value, name| count(figures, name) as f64;
            let (fits, all) = (
                count(&first, "fitting_bytes"),
                count(&first, "expert_bytes"),
            );
            let later = count(&last, "fitting_bytes");
            assert!((fits - later).abs() < 0.02 * all, "{first} {last}");
            let held = count(&last, "held_bytes");
            assert!(held < fits + 0.02 * all, "{first} {last}");
            let fewer = count(&first, "freed_bytes") - count(&first, "missing_bytes");
            (fits, fits + fewer, all)
        });
        for pair in found.windows(2) {
            let ((fits, _, all), (_, predicted, _)) = (pair[0], pair[1]);
            assert!((predicted - fits).abs() < 0.01 * all, "{found:?}");
        }
        assert_eq!(found[2].0, 0.0, "{found:?}");
        // What the user allows is no less free memory.
        let [_, last] = figures_with(512, flash, "16");
        assert!(count(&last, "held_bytes") <= 16 << 20, "{last}");
        let (fits, all) = (count(&last, "fitting_bytes") as f64, found[0].2);
        assert!((fits - found[0].0).abs() < 0.02 * all, "{last} {found:?}");
    }
}

#[test]
fn doctor_says_what_share_fits_and_what_the_disk_does() {
    let (disk, limit) = small_memory("moe.gguf", 200);
    disk.read_ahead_kb(128).expect("a mounted disk");
    disk.drop_cache().expect("a file");
    let [host, libraries] = [built("hosts-c/host"), fixture("upstream")];
    let words = [&host, &libraries, &disk.path()].map(|path| path.display().to_string());
    let script = format!("(echo text 2; sleep 60) | {}", words.join(" "));
    let mut command = Command::new(built("release/llama-sidecar"));
    command.args(["doctor", "--", "sh", "-c", &script]);
    limit.apply(&mut command);
    let output = command.stdin(Stdio::null()).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{output:?}");
    for part in [
        "streaming   works in this program\n",
        "memory      the memory limit of the control group leaves ",
        " MB of experts fit into memory (",
        " %) beside a context of ",
        "disk        random reads of 128 KiB: ",
        "bound       the disk limits the program to ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
