//! What was counted, as JSON, CSV and text.

use std::fmt::Write;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::about::{About, AboutFile};
use super::counters::{LayerCounts, Snapshot};

/// Name and version of the JSON format.
///
/// | field | meaning |
/// |---|---|
/// | `schema` | this name |
/// | `version` | of the library that wrote it |
/// | `model` | `name`, `architecture` and `files`: `path`, `size` in bytes, `mtime` in seconds since 1970 |
/// | `experts_used` | experts per token; 0 when not known |
/// | `tokens` | tokens of the layer that routed most |
/// | `activations` | of all layers and experts |
/// | `rejected` | ids that were no experts; 0 if all is well |
/// | `seconds` | since the trace began or was reset |
/// | `layers` | `layer` (number), `tokens`, `counts` (activations by expert) |
pub const SCHEMA: &str = "llama-sidecar/expert-trace/1";

/// The JSON of [`SCHEMA`].
pub fn to_json(about: &About, snapshot: &Snapshot) -> Value {
    let files = about
        .files
        .iter()
        .map(|file| json!({"path": file.path, "size": file.size, "mtime": file.mtime}));
    let layers = snapshot.layers.iter().map(
        |layer| json!({"layer": layer.layer, "tokens": layer.tokens, "counts": layer.experts}),
    );
    json!({
        "schema": SCHEMA,
        "version": env!("CARGO_PKG_VERSION"),
        "model": {
            "name": about.name,
            "architecture": about.architecture,
            "files": files.collect::<Vec<_>>(),
        },
        "experts_used": about.experts_used,
        "tokens": snapshot.tokens(),
        "activations": snapshot.activations(),
        "rejected": snapshot.rejected,
        "seconds": snapshot.time.as_secs_f64(),
        "layers": layers.collect::<Vec<_>>(),
    })
}

/// Reads the JSON of [`SCHEMA`]; an error says what is wrong with it.
pub fn from_json(json: &Value) -> Result<(About, Snapshot), String> {
    let schema = json["schema"].as_str().unwrap_or_default();
    if schema != SCHEMA {
        return Err(format!(
            "expected \"schema\": \"{SCHEMA}\", found {}",
            json["schema"]
        ));
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let number = |value: &Value, what: &str| {
        let found = value.as_u64();
        found.ok_or_else(|| format!("expected a count as {what}, found {value}"))
    };
    let model = &json["model"];
    let files = list(&model["files"])
        .iter()
        .map(|file| AboutFile {
            path: text(&file["path"]),
            size: file["size"].as_u64().unwrap_or(0),
            mtime: file["mtime"].as_i64().unwrap_or(0),
        })
        .collect();
    let mut layers = Vec::new();
    for layer in list(&json["layers"]) {
        let number_of = number(&layer["layer"], "a layer's number")?;
        let counts = list(&layer["counts"]);
        layers.push(LayerCounts {
            layer: u32::try_from(number_of).map_err(|_| format!("layer {number_of}"))?,
            tokens: number(&layer["tokens"], "a layer's tokens")?,
            experts: counts
                .iter()
                .map(|count| number(count, "a layer's counts"))
                .collect::<Result<_, _>>()?,
        });
    }
    layers.sort_by_key(|layer| layer.layer);
    let seconds = json["seconds"].as_f64().unwrap_or(0.0);
    let snapshot = Snapshot {
        layers,
        rejected: number(&json["rejected"], "\"rejected\"")?,
        time: Duration::try_from_secs_f64(seconds).unwrap_or_default(),
    };
    let about = About {
        name: text(&model["name"]),
        architecture: text(&model["architecture"]),
        files,
        experts_used: json["experts_used"].as_u64().unwrap_or(0),
    };
    Ok((about, snapshot))
}

/// A line for each expert, with its share of the activations of its layer.
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

/// Writes a file, as CSV if its name ends so and as JSON otherwise: beside the path and
/// renamed, so that a reader sees all of it or what was there.
pub fn write(path: &Path, about: &About, snapshot: &Snapshot) -> std::io::Result<()> {
    let csv = path.extension().is_some_and(|extension| extension == "csv");
    let text = match csv {
        true => to_csv(snapshot),
        false => format!("{:#}\n", to_json(about, snapshot)),
    };
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        // A pipe or a terminal is written to as it is, if somebody reads.
        let mut options = fs::OpenOptions::new();
        let file = options
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path);
        return std::io::Write::write_all(&mut file?, text.as_bytes());
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".part");
    let written = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// A summary for people: the most used experts, and with `per_layer` those of each
/// layer. Shares are of all activations that are spoken of.
pub fn to_text(about: &About, snapshot: &Snapshot, per_layer: bool) -> String {
    const MOST: usize = 10;
    let mut text = String::new();
    let all = snapshot.activations();
    let _ = writeln!(text, "=== Expert Usage ===");
    let _ = writeln!(
        text,
        "{}: {} tokens, {all} activations in {} layers, {:.1} s",
        if about.name.is_empty() {
            "model"
        } else {
            &about.name
        },
        snapshot.tokens(),
        snapshot.layers.len(),
        snapshot.time.as_secs_f64(),
    );
    if snapshot.rejected > 0 {
        let _ = writeln!(text, "{} ids were no experts", snapshot.rejected);
    }
    let experts = snapshot
        .layers
        .iter()
        .map(|layer| layer.experts.len())
        .max();
    let by_expert = |expert: usize| -> u64 {
        let counts = snapshot
            .layers
            .iter()
            .filter_map(|layer| layer.experts.get(expert));
        counts.sum()
    };
    let total: Vec<u64> = (0..experts.unwrap_or(0)).map(by_expert).collect();
    list(&mut text, "All layers", &total, MOST);
    if per_layer {
        for layer in &snapshot.layers {
            let heading = format!("Layer {} ({} tokens)", layer.layer, layer.tokens);
            list(&mut text, &heading, &layer.experts, MOST);
        }
    }
    text
}

fn list(text: &mut String, heading: &str, counts: &[u64], most: usize) {
    let all = counts.iter().sum::<u64>().max(1) as f64;
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&expert| (std::cmp::Reverse(counts[expert]), expert));
    let unused = counts.iter().filter(|&&count| count == 0).count();
    let _ = writeln!(text, "{heading}: {} experts, {unused} unused", counts.len());
    for &expert in order
        .iter()
        .take(most)
        .filter(|&&expert| counts[expert] > 0)
    {
        let share = counts[expert] as f64 / all * 100.0;
        let count = counts[expert];
        let _ = writeln!(
            text,
            "  Expert {expert:3}: {count:10} activations ({share:.2} %)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Layout, Trace};
    use super::*;

    fn counted() -> Snapshot {
        let trace = Trace::new(Layout::new([(0, 3), (1, 3)]));
        for expert in [0, 0, 2] {
            trace.record(0, expert);
        }
        trace.record(1, 1);
        trace.snapshot()
    }

    #[test]
    fn json_holds_everything() {
        let about = About {
            name: "a \"model\"".into(),
            ..About::default()
        };
        let json = to_json(&about, &counted());
        assert_eq!(json["schema"], SCHEMA);
        let read = from_json(&json).expect("our own");
        assert_eq!((&read.0, &read.1.layers), (&about, &counted().layers));
        assert!(from_json(&json!({"schema": "another"})).is_err());
        assert!(from_json(&json!({"schema": SCHEMA, "layers": [{"layer": -1}]})).is_err());
        assert_eq!(json["model"]["name"], "a \"model\"");
        assert_eq!(json["layers"][0]["counts"], json!([2, 0, 1]));
        assert_eq!(
            (&json["tokens"], &json["activations"]),
            (&json!(3), &json!(4))
        );
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
    fn shares_are_of_all_activations() {
        let text = to_text(&About::default(), &counted(), true);
        assert!(
            text.contains("Expert   0:          2 activations (50.00 %)"),
            "{text}"
        );
        assert!(
            text.contains("Layer 1 (1 tokens): 3 experts, 2 unused"),
            "{text}"
        );
        assert!(
            text.contains("Expert   1:          1 activations (100.00 %)"),
            "{text}"
        );
        let nothing = to_text(&About::default(), &Snapshot::default(), true);
        assert!(nothing.contains("0 activations"), "{nothing}");
    }
}
