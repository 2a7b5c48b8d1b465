//! Counts as JSON, CSV and text.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::experts::MAX_LAYERS;
use crate::files::{self, Replace};
use crate::text;

use super::formats::to_activations;
use super::locality::{Locality, Window};
use super::model_meta::{FileMeta, ModelMeta};
use super::snapshot::{LayerCounts, Snapshot};

/// Name and version of the JSON format.
///
/// | field | meaning |
/// |---|---|
/// | `schema` | this name |
/// | `version` | of the library that wrote it |
/// | `model` | `name`, `architecture` and `files`: `path`, `size` in bytes, `mtime` in seconds since 1970 |
/// | `experts_used` | experts per token; 0 if unknown |
/// | `tokens` | tokens of the layer that routed most |
/// | `activations` | sum over all layers and experts |
/// | `rejected` | ids that are no experts of their layer; 0 in a correct trace |
/// | `seconds` | time since the trace was made or reset |
/// | `layers` | `layer` (number), `tokens`, `counts` (activations by expert), `expert_bytes` (bytes of one expert, if known), `locality` (if recorded) |
/// | `locality` | [`Locality`]: `first`, `lru`, `lfu` (curves), `window`: `tokens`, `first`, `lru`, `best` |
/// | `total_tokens`, `expert_activations`, `per_layer` | the same counts by number, see [`to_activations`] |
pub const SCHEMA: &str = "llama-sidecar/expert-trace/1";

/// The largest sum of all numbers of a trace that is read: JSON has larger ones only rounded.
const MOST_COUNTS: u64 = 1 << 53;
/// The largest expert of a trace that is read.
const MOST_BYTES: u64 = 1 << 40;

/// Returns counts as JSON, in the format [`SCHEMA`].
pub fn to_json(meta: &ModelMeta, snapshot: &Snapshot) -> Value {
    let files = meta
        .files
        .iter()
        .map(|file| json!({"path": file.path, "size": file.size, "mtime": file.mtime}));
    let layers = snapshot.layers.iter().map(|layer| {
        let mut json =
            json!({"layer": layer.layer, "tokens": layer.tokens, "counts": layer.experts});
        if let Some(bytes) = meta.expert_bytes.get(&layer.layer) {
            json["expert_bytes"] = json!(bytes);
        }
        if let Some(locality) = &layer.locality {
            json["locality"] = json!({
                "first": locality.first,
                "lru": locality.lru,
                "lfu": locality.lfu,
                "window": {
                    "tokens": locality.window.tokens,
                    "first": locality.window.first,
                    "lru": locality.window.lru,
                    "best": locality.window.best,
                },
            });
        }
        json
    });
    let mut json = json!({
        "schema": SCHEMA,
        "version": env!("CARGO_PKG_VERSION"),
        "model": {
            "name": meta.name,
            "architecture": meta.architecture,
            "files": files.collect::<Vec<_>>(),
        },
        "experts_used": meta.experts_used,
        "tokens": snapshot.tokens(),
        "activations": snapshot.activations(),
        "rejected": snapshot.rejected,
        "seconds": snapshot.time.as_secs_f64(),
        "layers": layers.collect::<Vec<_>>(),
    });
    if let (Value::Object(json), Value::Object(more)) = (&mut json, to_activations(snapshot)) {
        json.extend(more);
    }
    json
}

/// Reads a file of JSON in the format [`SCHEMA`]. The error has the path, and the kind
/// [`ErrorKind::InvalidData`] where the file could be read.
pub fn read(path: &Path) -> io::Result<(ModelMeta, Snapshot)> {
    let fail = |kind, why| io::Error::new(kind, format!("{}: {why}", text::path(path)));
    let text = files::read_text(path).map_err(|error| fail(error.kind(), error.to_string()))?;
    let json = serde_json::from_str(&text).map_err(|error| error.to_string());
    let read = json.and_then(|json| from_json(&json));
    read.map_err(|why| {
        fail(
            ErrorKind::InvalidData,
            format!("no expert trace in JSON: {why}"),
        )
    })
}

/// Reads JSON in the format [`SCHEMA`]. The error states what was expected and what was found.
pub fn from_json(json: &Value) -> Result<(ModelMeta, Snapshot), String> {
    let schema = json["schema"].as_str().unwrap_or_default();
    if schema != SCHEMA {
        return Err(format!(
            "expected \"schema\": \"{SCHEMA}\", found {}",
            json["schema"]
        ));
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    // Readers add counts in any order.
    let all = Cell::new(0);
    let number = |value: &Value, what: &str| {
        let found = value.as_u64();
        let found = found.ok_or_else(|| format!("expected a count as {what}, found {value}"))?;
        let sum = found.checked_add(all.get());
        let sum = sum.filter(|sum| *sum <= MOST_COUNTS);
        all.set(sum.ok_or_else(|| format!("the counts of {what} exceed {MOST_COUNTS}"))?);
        Ok(found)
    };
    let model = &json["model"];
    let files = list(&model["files"])
        .iter()
        .map(|file| FileMeta {
            path: text(&file["path"]),
            size: file["size"].as_u64().unwrap_or(0),
            mtime: file["mtime"].as_i64().unwrap_or(0),
        })
        .collect();
    let counts = |value: &Value, what: &str| -> Result<Vec<u64>, String> {
        list(value)
            .iter()
            .map(|count| number(count, what))
            .collect()
    };
    let locality = |value: &Value| -> Result<Locality, String> {
        let curve = |value: &Value| counts(value, "a layer's locality");
        let number = |value: &Value| number(value, "a layer's locality");
        let window = &value["window"];
        Ok(Locality {
            first: number(&value["first"])?,
            lru: curve(&value["lru"])?,
            lfu: curve(&value["lfu"])?,
            window: Window {
                tokens: number(&window["tokens"])?,
                first: number(&window["first"])?,
                lru: curve(&window["lru"])?,
                best: curve(&window["best"])?,
            },
        })
    };
    let mut layers = Vec::new();
    let mut expert_bytes = BTreeMap::new();
    for layer in list(&json["layers"]) {
        let number_of = number(&layer["layer"], "a layer's number")?;
        let valid = u32::try_from(number_of)
            .ok()
            .filter(|layer| *layer < MAX_LAYERS);
        let number_of = valid.ok_or_else(|| {
            format!("expected a layer's number below {MAX_LAYERS}, found {number_of}")
        })?;
        if let Some(bytes) = layer["expert_bytes"].as_u64() {
            if bytes > MOST_BYTES {
                return Err(format!("an expert of {bytes} bytes exceeds {MOST_BYTES}"));
            }
            expert_bytes.insert(number_of, bytes);
        }
        layers.push(LayerCounts {
            layer: number_of,
            tokens: number(&layer["tokens"], "a layer's tokens")?,
            experts: counts(&layer["counts"], "a layer's counts")?,
            locality: match &layer["locality"] {
                Value::Null => None,
                recorded => Some(locality(recorded)?),
            },
        });
    }
    layers.sort_by_key(|layer| layer.layer);
    let seconds = json["seconds"].as_f64().unwrap_or(0.0);
    let snapshot = Snapshot {
        layers,
        rejected: number(&json["rejected"], "\"rejected\"")?,
        time: Duration::try_from_secs_f64(seconds).unwrap_or_default(),
    };
    let meta = ModelMeta {
        name: text(&model["name"]),
        architecture: text(&model["architecture"]),
        files,
        experts_used: json["experts_used"].as_u64().unwrap_or(0),
        expert_bytes,
    };
    Ok((meta, snapshot))
}

/// Returns counts as CSV: a line for each expert, with its share of the layer's activations.
pub fn to_csv(snapshot: &Snapshot) -> String {
    let mut text = String::from("layer,expert,count,share\n");
    for layer in &snapshot.layers {
        let all = layer.activations().max(1) as f64;
        for (expert, &count) in layer.experts.iter().enumerate() {
            let share = count as f64 / all;
            let _ = writeln!(text, "{},{expert},{count},{share:.6}", layer.layer);
        }
    }
    text
}

/// Writes counts to a file, as CSV if the name ends in `.csv` and as JSON otherwise; see
/// [`write_text`].
pub fn write(path: &Path, meta: &ModelMeta, snapshot: &Snapshot) -> std::io::Result<()> {
    let csv = path.extension().is_some_and(|extension| extension == "csv");
    let text = match csv {
        true => to_csv(snapshot),
        false => format!("{:#}\n", to_json(meta, snapshot)),
    };
    write_text(path, &text)
}

/// Returns the path for one of several models: with a number from the second one on.
pub fn numbered(path: &Path, number: usize) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{}", number + 1));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Writes a text to a file. Only an earlier output is replaced: see [`files::write`].
pub fn write_text(path: &Path, text: &str) -> std::io::Result<()> {
    files::write(path, text.as_bytes(), Replace::Own)
}

/// Returns a readable summary: the used experts of all layers, the most used first, and with
/// `per_layer` those of each layer; `most` limits each list. Shares are relative to the
/// activations of the list.
pub fn to_text(
    meta: &ModelMeta,
    snapshot: &Snapshot,
    per_layer: bool,
    most: Option<usize>,
) -> String {
    let mut text = String::from("\n=== Expert Usage Statistics ===\n");
    let _ = writeln!(text, "Total tokens processed: {}", snapshot.tokens());
    let _ = writeln!(text, "Expert activation counts:");
    let totals = snapshot.by_expert();
    list(&mut text, &totals, "  ", " activations", most);
    if snapshot.layers.len() > 1 {
        text += "  (sums: experts of one number in several layers are different experts)\n";
    }
    if per_layer {
        let _ = writeln!(text, "\nPer-layer breakdown:");
        for layer in &snapshot.layers {
            let _ = writeln!(text, "  Layer {}:", layer.layer);
            list(&mut text, &layer.experts, "    ", "", most);
        }
    }
    let experts = || snapshot.layers.iter().flat_map(|layer| &layer.experts);
    let name = match meta.name.as_str() {
        "" => "model",
        name => name,
    };
    let name = text::line(name);
    let _ = writeln!(
        text,
        "{name}: {} activations in {} layers, {} of {} experts unused, {:.1} s",
        snapshot.activations(),
        snapshot.layers.len(),
        experts().filter(|&&count| count == 0).count(),
        experts().count(),
        snapshot.time.as_secs_f64(),
    );
    if snapshot.rejected > 0 {
        let _ = writeln!(
            text,
            "{} ids are no experts of their layer",
            snapshot.rejected
        );
    }
    text
}

fn list(text: &mut String, counts: &[u64], indent: &str, unit: &str, most: Option<usize>) {
    let all = counts.iter().sum::<u64>().max(1) as f64;
    let mut used: Vec<usize> = (0..counts.len())
        .filter(|&expert| counts[expert] > 0)
        .collect();
    used.sort_by_key(|&expert| (Reverse(counts[expert]), expert));
    let shown = most.unwrap_or(used.len()).min(used.len());
    for &expert in &used[..shown] {
        let (count, share) = (counts[expert], counts[expert] as f64 / all * 100.0);
        let _ = writeln!(
            text,
            "{indent}Expert {expert:3}: {count:8}{unit} ({share:.2}%)"
        );
    }
    if shown < used.len() {
        let _ = writeln!(text, "{indent}... and {} more", used.len() - shown);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExpertLayout, Ids, Trace};
    use super::*;

    fn counted() -> Snapshot {
        let trace = Trace::new(ExpertLayout::new([(0, 3), (1, 3)]));
        for expert in [0, 0, 2] {
            trace.record(0, expert);
        }
        trace.record(1, 1);
        trace.snapshot()
    }

    #[test]
    fn json_holds_everything() {
        let meta = ModelMeta {
            name: "a \"model\"".into(),
            expert_bytes: BTreeMap::from([(1, 77)]),
            ..ModelMeta::default()
        };
        let json = to_json(&meta, &counted());
        assert_eq!(json["layers"][0].get("locality"), None);
        assert_eq!(json["layers"][0].get("expert_bytes"), None);
        assert_eq!(json["schema"], SCHEMA);
        let read = from_json(&json).expect("our own");
        assert_eq!((&read.0, &read.1.layers), (&meta, &counted().layers));
        assert!(from_json(&json!({"schema": "another"})).is_err());
        assert!(from_json(&json!({"schema": SCHEMA, "layers": [{"layer": -1}]})).is_err());
        assert_eq!(json["model"]["name"], "a \"model\"");
        assert_eq!(json["layers"][0]["counts"], json!([2, 0, 1]));
        assert_eq!(json["total_tokens"], 3);
        assert_eq!(json["expert_activations"], json!({"0": 2, "1": 1, "2": 1}));
        assert_eq!(
            json["per_layer"],
            json!({"0": {"0": 2, "2": 1}, "1": {"1": 1}})
        );
        assert_eq!(
            (&json["tokens"], &json["activations"]),
            (&json!(3), &json!(4))
        );
    }

    #[test]
    fn locality_is_read_as_written() {
        let trace = Trace::with_locality(ExpertLayout::new([(3, 4)]));
        let bytes: Vec<u8> = [0i32, 1, 1, 0, 2, 0]
            .into_iter()
            .flat_map(i32::to_ne_bytes)
            .collect();
        let ids = Ids::packed(&bytes, 2);
        trace.record_batch(0, &ids);
        let counted = trace.snapshot_with_locality();
        let mut json = to_json(&ModelMeta::default(), &counted);
        let read = from_json(&json).expect("our own");
        assert_eq!(read.1.layers, counted.layers);
        json["layers"][0]["locality"]["window"]["best"] = json!([1, "many"]);
        let error = from_json(&json).expect_err("no count");
        assert!(error.contains("a layer's locality"), "{error}");
    }

    #[test]
    fn what_is_no_trace_is_told_from_what_cannot_be_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.json");
        let kind = || {
            let error = read(&path).expect_err("no trace");
            assert!(error.to_string().contains("trace.json: "), "{error}");
            error.kind()
        };
        assert_eq!(kind(), ErrorKind::NotFound);
        for text in ["", "{", "{}"] {
            std::fs::write(&path, text).expect("a file");
            assert_eq!(kind(), ErrorKind::InvalidData, "{text}");
        }
    }

    #[test]
    fn csv_has_a_line_for_each_expert() {
        let csv = to_csv(&counted());
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 7);
        assert_eq!(lines[1], "0,0,2,0.666667");
        assert_eq!(lines[6], "1,2,0,0.000000");
    }

    #[test]
    fn the_summary_lists_the_experts_that_were_used() {
        let summary = |most| to_text(&ModelMeta::default(), &counted(), true, most);
        let expected = "
=== Expert Usage Statistics ===
Total tokens processed: 3
Expert activation counts:
  Expert   0:        2 activations (50.00%)
  Expert   1:        1 activations (25.00%)
  Expert   2:        1 activations (25.00%)
  (sums: experts of one number in several layers are different experts)

Per-layer breakdown:
  Layer 0:
    Expert   0:        2 (66.67%)
    Expert   2:        1 (33.33%)
  Layer 1:
    Expert   1:        1 (100.00%)
model: 4 activations in 2 layers, 3 of 6 experts unused, ";
        let text = summary(None);
        assert!(text.starts_with(expected), "{text}");
        let text = summary(Some(1));
        assert!(
            text.contains("(50.00%)\n  ... and 2 more\n  (sums: "),
            "{text}"
        );
        assert!(text.contains("(66.67%)\n    ... and 1 more\n"), "{text}");
        let nothing = to_text(&ModelMeta::default(), &Snapshot::default(), true, None);
        assert!(nothing.contains("0 activations"), "{nothing}");
    }

    #[test]
    fn a_layer_of_many_experts_is_listed_whole() {
        let trace = Trace::new(ExpertLayout::new([(0, 512)]));
        for expert in 0..512 {
            trace.record(0, expert);
        }
        let text = to_text(&ModelMeta::default(), &trace.snapshot(), false, None);
        assert_eq!(text.matches("  Expert ").count(), 512);
    }
}
