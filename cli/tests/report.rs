//! `llama-sidecar report`: its files as their readers read them, and its answers for memory.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use sidecar_core::experts::ExpertIndex;
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::trace::{ExpertLayout, Ids, ModelMeta, RouteLayout, RouteWriter, Trace, write};
use testkit::mixtures::{EXPERTS, Mixture, USED};

/// A model whose first layer has no experts, and traces of it.
struct Traced {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Traced {
    fn new() -> Traced {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        Mixture::MergedGateUp.write(&model).expect("a model");
        Traced { folder, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a trace of 300 tokens, whose experts differ by seed.
    fn trace(&self, name: &str, seed: u32, change: impl Fn(&mut ModelMeta)) -> PathBuf {
        let file = GgufFile::open(&self.model, Access::Read).expect("a model");
        let mut about = ModelMeta::of([&file]);
        change(&mut about);
        let trace = Trace::with_locality(ExpertLayout::of(&ExpertIndex::of([&file])));
        let mut state = seed;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for layer in 0..trace.layout().layers().len() {
            for _ in 0..300 {
                // Different experts, the first ones more often.
                let first = random(EXPERTS) * random(EXPERTS) / EXPERTS;
                let ids = (0..USED).map(|used| (first + used * used) % EXPERTS);
                let bytes: Vec<u8> = ids.flat_map(u32::to_ne_bytes).collect();
                let used = USED as usize;
                let ids = Ids::packed(&bytes, used);
                trace.record_batch(layer, &ids);
            }
        }
        let path = self.path(name);
        write(&path, &about, &trace.snapshot_with_locality()).expect("free space");
        path
    }

    fn report(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llama-sidecar"));
        command.arg("report").args(arguments);
        command
            .current_dir(self.folder.path())
            .output()
            .expect("it starts")
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.report(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn error(&self, arguments: &[&str]) -> String {
        let output = self.report(arguments);
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("UTF-8")
    }
}

/// Runs a script with the Python of the fixtures, which has numpy, or that of the machine.
fn python(script: &str, folder: &Path) {
    let with_packages = testkit::fixtures::cache().join("venv/bin/python");
    let python = match with_packages.exists() {
        true => with_packages,
        false => "python3".into(),
    };
    let mut command = Command::new(python);
    let output = command.args(["-c", script]).current_dir(folder).output();
    let output = output.expect("python3 starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn formats_are_read_as_their_readers_do() {
    let traced = Traced::new();
    traced.trace("trace.json", 1, |_| {});
    for (format, file) in [
        ("logical-count", "counts.json"),
        ("rankings", "rankings.jsonl"),
        ("csv", "counts.csv"),
    ] {
        traced.text(&["trace.json", "--format", format, "-o", file]);
        let printed = traced.text(&["trace.json", "--format", format]);
        let written = std::fs::read_to_string(traced.path(file)).expect("it is written");
        assert_eq!(printed, written);
    }
    let script = r#"
import csv, json
trace = json.load(open("trace.json"))
layers = {layer["layer"]: layer["counts"] for layer in trace["layers"]}
assert sorted(layers) == [1, 2, 3]

# SGLang, --init-expert-location counts.json: a tensor of [layers, experts], or with a dimension
# of samples before it; row L is layer L of the model.
data = json.loads(open("counts.json").read())
assert "physical_to_logical_map" not in data
rows = data["logical_count"]
assert [len(row) for row in rows] == [32] * 4 and rows[0] == [0] * 32
assert all(rows[layer] == counts for layer, counts in layers.items())
try:
    import numpy
    array = numpy.array(rows)
    assert array.ndim == 2 and array.dtype.kind == "i"
    assert array[None].sum(axis=0).tolist() == rows
    table = numpy.loadtxt("counts.csv", delimiter=",", skiprows=1, dtype=int)
    assert table.shape == (3 * 32, 3) and (numpy.diff(table[:, 2]) <= 0).all()
except ImportError:
    print("numpy is not installed: arrays are not checked")

# vLLM Ascend, expert_list_file: one object of one key a line.
rankings = {}
for line in open("rankings.jsonl", encoding="utf-8"):
    entry = json.loads(line.strip())
    assert isinstance(entry, dict) and len(entry) == 1
    layer, experts = next(iter(entry.items()))
    assert int(layer) not in rankings
    assert isinstance(experts, list) and all(isinstance(expert, int) for expert in experts)
    assert len(set(experts)) == len(experts)
    rankings[int(layer)] = tuple(experts)
assert sorted(rankings) == sorted(layers)
for layer, experts in rankings.items():
    kept = experts[: int(32 * (1 - 0.5))]
    assert all(0 <= expert < 32 for expert in kept)
    least = min(layers[layer][expert] for expert in kept)
    assert least >= max(layers[layer][expert] for expert in experts[len(kept):])

rows = list(csv.DictReader(open("counts.csv")))
assert list(rows[0]) == ["layer", "expert", "count"] and len(rows) == 3 * 32
counts = [int(row["count"]) for row in rows]
assert counts == sorted(counts, reverse=True) and sum(counts) == trace["activations"]
assert all(layers[int(row["layer"])][int(row["expert"])] == int(row["count"]) for row in rows)
"#;
    python(script, traced.folder.path());
}

#[test]
fn pinned_ranges_lie_in_the_experts_of_the_model() {
    let traced = Traced::new();
    traced.trace("trace.json", 1, |_| {});
    let text = traced.text(&["trace.json", "--pin", "40%", "-o", "ranges.csv"]);
    assert!(text.contains("their byte ranges: ranges.csv"), "{text}");
    let inspected = Command::new(env!("CARGO_BIN_EXE_llama-sidecar"))
        .args(["inspect", "--json"])
        .arg(&traced.model)
        .output();
    let inspected = inspected.expect("it starts").stdout;
    std::fs::write(traced.path("model.json"), inspected).expect("free space");
    let script = r#"
import csv, json, re
trace = json.load(open("trace.json"))
counts = {(layer["layer"], expert): count
          for layer in trace["layers"] for expert, count in enumerate(layer["counts"])}
sizes = {layer["layer"]: layer["expert_bytes"] for layer in trace["layers"]}
tensors = [(re.match(r"blk\.(\d+)\.ffn_\w+_exps\.weight", tensor["name"]), tensor)
           for tensor in json.load(open("model.json"))["tensors"]]
tensors = [(int(match[1]), tensor) for match, tensor in tensors if match]
pinned, end = {}, 0
for row in csv.DictReader(open("ranges.csv")):
    offset, size, layer, expert = (int(row[name]) for name in ("offset", "bytes", "layer", "expert"))
    assert row["file"].endswith("model.gguf") and offset >= end
    end = offset + size
    inside = [tensor for of, tensor in tensors if of == layer
              and tensor["offset"] + expert * (tensor["bytes"] // 32) == offset
              and tensor["bytes"] // 32 == size]
    assert len(inside) == 1, row
    pinned[layer, expert] = pinned.get((layer, expert), 0) + size
assert all(size == sizes[layer] for (layer, _), size in pinned.items())
budget = 0.4 * 32 * sum(sizes.values())
assert budget - max(sizes.values()) < sum(pinned.values()) <= budget
least = min(counts[key] / sizes[key[0]] for key in pinned)
most = max(count / sizes[key[0]] for key, count in counts.items() if key not in pinned)
assert least >= most
"#;
    python(script, traced.folder.path());
}

#[test]
fn memory_is_answered_by_hits_bytes_and_a_bound() {
    let traced = Traced::new();
    traced.trace("trace.json", 1, |_| {});
    let text = traced.text(&["trace.json", "--memory", "1G", "--speed", "1MB"]);
    assert!(
        text.contains("1.00 GiB for experts: 32 of 32 a layer"),
        "{text}"
    );
    assert!(text.contains("tokens/s at 976.6 KiB/s"), "{text}");
    let text = traced.text(&["trace.json", "--memory", "1K"]);
    assert!(text.contains("0 of 32 a layer, 0 B"), "{text}");
    let text = traced.text(&["trace.json"]);
    assert!(text.contains("cache (LRU) for 90 % hits"), "{text}");
    assert!(text.contains("4 (12 %)"), "{text}");
}

#[test]
fn a_comparison_has_a_row_for_each_layer() {
    let traced = Traced::new();
    traced.trace("a.json", 1, |_| {});
    traced.trace("b.json", 2, |_| {});
    let text = traced.text(&["a.json", "b.json", "a.json", "--compare"]);
    let (between, same) = text
        .split_once("b.json against a.json")
        .and_then(|(_, rest)| rest.split_once("a.json against a.json"))
        .expect("two comparisons");
    assert_eq!(same.matches("100.0 %       0.000").count(), 4, "{same}");
    assert_eq!(between.matches(" 0.000").count(), 0, "{between}");
}

#[test]
fn errors_have_a_next_step() {
    let traced = Traced::new();
    let moved = |about: &mut ModelMeta| {
        about.expert_bytes.clear();
        about.files[0].path = "moved.gguf".into();
    };
    traced.trace("trace.json", 1, moved);
    for arguments in [["--memory", "1G"], ["--pin", "40%"]] {
        let error = traced.error(&[&["trace.json"], &arguments[..]].concat());
        assert!(
            error.contains("name the model with --model FILE"),
            "{error}"
        );
        traced.text(&[&["trace.json", "--model", "model.gguf"], &arguments[..]].concat());
    }
    let other = traced.path("other.gguf");
    Mixture::GptOss.write(&other).expect("a model");
    let error = traced.error(&["trace.json", "--pin", "40%", "--model", "other.gguf"]);
    assert!(error.contains("name the model that was traced"), "{error}");
    // The path of the trace is used for byte ranges only.
    traced.trace("sized.json", 1, |about| about.files[0].size += 1);
    let error = traced.error(&["sized.json", "--pin", "40%", "-o", "ranges.csv"]);
    assert!(error.contains("is not the file that was traced"), "{error}");
    // A trace of an earlier version.
    let text = std::fs::read(traced.path("sized.json")).expect("it is written");
    let mut json: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    for layer in json["layers"].as_array_mut().expect("layers") {
        let layer = layer.as_object_mut().expect("an object");
        layer.remove("locality");
        layer.remove("expert_bytes");
    }
    std::fs::write(traced.path("early.json"), json.to_string()).expect("free space");
    let text = traced.text(&["early.json"]);
    assert!(
        text.contains("activations") && !text.contains("cache (LRU)"),
        "{text}"
    );
    let error = traced.error(&["early.json", "--memory", "1G"]);
    assert!(error.contains("trace the workload again"), "{error}");
    let error = traced.error(&["early.json", "--memory", "1G", "--pin", "40%"]);
    assert!(error.contains("cannot be used with"), "{error}");
}

/// Marks of routes separate workloads, which are compared or summed.
#[test]
fn routes_are_reported_by_workload() {
    let traced = Traced::new();
    let layout = RouteLayout::new("a model", &[(0, 4), (1, 4)], 1, false).expect("valid");
    let path = traced.path("a.routes");
    let mut routes = RouteWriter::create(&path, layout).expect("free space");
    routes
        .rows(0, &[0, 1, 0, 1, 0, 1], &[])
        .expect("free space");
    routes.mark("second").expect("free space");
    routes.rows(0, &[0, 2, 0, 3], &[]).expect("free space");
    routes.flush().expect("free space");
    let sum = traced.text(&["a.routes", "--format", "csv"]);
    assert!(
        sum.starts_with("layer,expert,count\n0,0,5\n1,1,3\n"),
        "{sum}"
    );
    let compared = traced.text(&["a.routes", "--compare"]);
    assert!(compared.contains("a model (a.routes)"), "{compared}");
    assert!(
        compared.contains("a model (a.routes: second)"),
        "{compared}"
    );
    // Nothing in common in layer 1, and everything in layer 0.
    let row = |start: &str| {
        let rows = compared.lines().rev();
        let mut rows = rows.filter(|line| line.trim_start().starts_with(start));
        rows.next()
            .expect("a row")
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(row("0 ")[1..], ["100.0", "%", "0.000"], "{compared}");
    assert_eq!(row("1 ")[1..], ["0.0", "%", "1.000"], "{compared}");
    std::fs::write(&path, "LLSCnothing").expect("free space");
    let output = traced.report(&["a.routes"]);
    assert!(!output.status.success());
}

/// Writes routes of a token between marks.
fn marked(path: &Path, marks: usize) {
    let layers = [0, 1, 2, 3, 4, 5, 6, 7].map(|layer| (layer, 256));
    let layout = RouteLayout::new("a model", &layers, 1, false).expect("valid");
    let mut routes = RouteWriter::create(path, layout).expect("free space");
    for mark in 0..marks {
        routes.rows(0, &[1; 8], &[]).expect("free space");
        routes.mark(&mark.to_string()).expect("free space");
    }
    routes.flush().expect("free space");
}

/// Each workload has counts of its own.
#[test]
fn marks_need_no_memory() {
    let traced = Traced::new();
    marked(&traced.path("a.routes"), 20_000);
    let script = "ulimit -v 400000; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_llama-sidecar")])
        .args(["report", "a.routes", "--format", "csv"])
        .current_dir(traced.folder.path())
        .output()
        .expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.starts_with("layer,expert,count\n0,1,20000\n"),
        "{text}"
    );

    marked(&traced.path("b.routes"), 65);
    let error = traced.error(&["b.routes", "--compare"]);
    assert!(
        error.contains("more than 64 workloads: leave out --compare"),
        "{error}"
    );
    marked(&traced.path("b.routes"), 64);
    traced.text(&["b.routes", "--compare"]);
}

#[test]
fn a_path_with_a_comma_is_one_field() {
    let traced = Traced::new();
    traced.trace("trace.json", 1, |_| {});
    std::fs::copy(&traced.model, traced.path("a, \"b\".gguf")).expect("free space");
    let model = ["--model", "a, \"b\".gguf", "-o", "ranges.csv"];
    traced.text(&[&["trace.json", "--pin", "40%"], &model[..]].concat());
    let script = r#"
import csv
rows = list(csv.DictReader(open("ranges.csv")))
assert rows and all(row["file"].endswith('a, "b".gguf') and None not in row for row in rows), rows
"#;
    python(script, traced.folder.path());
}

#[test]
fn an_array_of_numpy_is_named() {
    let traced = Traced::new();
    std::fs::write(traced.path("routes.npy"), b"\x93NUMPY").expect("free space");
    let error = traced.error(&["routes.npy"]);
    assert!(error.contains("numpy.load('routes.npy')"), "{error}");
}

/// Cells of a page and lines of the text, for traces whose shares are known.
#[test]
fn a_comparison_has_a_map_of_the_differences() {
    let traced = Traced::new();
    let trace = |name: &str, ids: &[u32], experts: u32| {
        let trace = Trace::new(ExpertLayout::new([(0, experts), (7, experts)]));
        for expert in ids {
            trace.record(0, 0);
            trace.record(1, *expert);
        }
        write(&traced.path(name), &ModelMeta::default(), &trace.snapshot()).expect("free space");
    };
    trace("a.json", &[0, 0, 1, 2], 4);
    trace("<b>.json", &[0, 1, 3, 3], 4);
    trace("other.json", &[0], 3);
    let text = traced.text(&["a.json", "<b>.json", "--compare"]);
    let expected = "<b>.json against a.json\n\nA is a.json, B is <b>.json.\n\n\
         layer  expert        A        B  difference in points\n    \
         7       3   0.00 %  50.00 %                +50.00\n    \
         7       0  50.00 %  25.00 %                -25.00\n    \
         7       2  25.00 %   0.00 %                -25.00\n\n\
         layer  hot in both  divergence\n";
    assert!(text.contains(expected), "{text}");
    traced.text(&[
        "a.json",
        "<b>.json",
        "other.json",
        "--compare",
        "-o",
        "page.html",
    ]);
    let page = std::fs::read_to_string(traced.path("page.html")).expect("it is written");
    assert!(page.contains("&lt;b&gt;.json against a.json") && !page.contains("<b>"));
    assert!(page.contains("other.json against a.json</h1><p class=note>Not compared:"));
    let cells = |end: &str| page.matches(end).count();
    assert_eq!(
        cells("A 100.00 %, B 100.00 %, +0.00 points (+0.00 x even)<"),
        1
    );
    assert_eq!(cells("points ("), 8);
    let cell = "fill=\"#d9730d\"><title>layer 7, expert 3: A 0.00 %, B 50.00 %, +50.00 points (+2.00 x even)<";
    assert!(page.contains(cell), "{page}");
}
