//! Results as text, JSON, and files of other programs.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use sidecar_core::text;

use super::candidate::Origin;
use super::mix::Mix;
use super::notes;
use super::record::write_atomically;
use super::results::{Goal, Recipe, Results};
use super::sweep::Plan;
use crate::evaluation::statistics::{Figure, Statistics};
use crate::sizes::{Table, size_text};
use crate::words::quoted;

/// The value of GGUF-Tool-Suite for what was not measured.
const UNMEASURED: &str = "404";

/// Returns the results for a terminal. `written` is the model that was written.
pub fn text(results: &Results<'_>, folder: &Path, written: Option<&Path>) -> String {
    let baseline = &results.baseline;
    let mut text = format!(
        "{}\nas it is: {}\n{}\n{}",
        text::path(&results.plan.model.path),
        sentence(baseline),
        rounding(results),
        measurements(results).as_text()
    );
    if let Some(cuts) = cuts(results) {
        let _ = write!(text, "\n{}", cuts.as_text());
    }
    if results.groups.is_empty() {
        return text;
    }
    text += "\n'= X': the divergence is that of the smaller X, within the errors; '= as it is': of no change, or of rounding alone.\n";
    for line in notes::fallbacks(results.plan) {
        let _ = writeln!(text, "{line}");
    }
    if let Some(recipe) = &results.recipe {
        let _ = write!(
            text,
            "\nrecipe for {}: {}, {:.3} bits a weight; expected KLD {:.6}\n\n{}\n{}\n",
            goal_text(results),
            size_text(recipe.mix.bytes as f64),
            recipe.mix.bits_per_weight,
            recipe.expected,
            comparison(results, recipe).as_text(),
            verdicts(results, recipe)
        );
        if let Some(note) = notes::of_unused(results, recipe) {
            let _ = writeln!(text, "\n{note}");
        }
    }
    if let (Some(recipe), None) = (&results.recipe, written) {
        let write = "the same command with -o OUT.gguf";
        let _ = match quantize_command(results, &recipe.mix, &folder.join("recipe.txt")) {
            Some(command) => writeln!(text, "\nto write the model: {command}\nor run {write}"),
            None => writeln!(text, "\nto write the model: run {write}"),
        };
    }
    if let Some(path) = written {
        let _ = writeln!(text, "written: {}", text::path(path));
    }
    let _ = writeln!(text, "page: {}", text::path(&folder.join("report.html")));
    let _ = writeln!(text, "{}", notes::of_folder(folder));
    text
}

/// Returns how much of a divergence rounding explains, as a line; nothing if that is not known.
fn rounding(results: &Results<'_>) -> String {
    let set = results.plan.program.other_flash_attention();
    let line = |of: &Statistics| {
        format!(
            "rounding alone (flash attention {set}): {}; a group with no more than this has no measurable cost\n",
            sentence(of)
        )
    };
    results.rounding.as_ref().map(line).unwrap_or_default()
}

/// Returns the command that writes a mix with llama-quantize; `None` where its file would have
/// other tensors: it quantises all of them, from one model, and reads a list of types only for a
/// quantised file type that it knows.
fn quantize_command(results: &Results<'_>, mix: &Mix<'_>, recipe: &Path) -> Option<String> {
    let plan = results.plan;
    let (_, name) = mix.file_type();
    let of_files = |at: usize| matches!(plan.candidates[at].origin, Origin::Files(_));
    let differs = mix.cut.is_some()
        || plan.model.path != plan.quantizer.source.path
        || mix.choices.iter().flatten().any(|at| of_files(*at))
        || ["F32", "F16", "BF16", "NVFP4"].contains(&name);
    if differs {
        return None;
    }
    let mut words = vec!["llama-quantize".to_owned()];
    if plan.model.is_quantized() {
        words.push("--allow-requantize".into());
    }
    if let Some(matrix) = plan.quantizer.matrix {
        words.extend(["--imatrix".into(), quoted(matrix.path.as_os_str())]);
    }
    words.extend(["--tensor-type-file".into(), quoted(recipe.as_os_str())]);
    words.extend([
        quoted(plan.model.path.as_os_str()),
        "OUT.gguf".into(),
        name.into(),
    ]);
    Some(words.join(" "))
}

/// Returns the name of the cut of a mix.
fn cut_name<'a>(results: &'a Results<'_>, mix: &Mix<'_>) -> Option<&'a str> {
    mix.cut.map(|cut| &*results.plan.cuts[cut].name)
}

/// Returns a row for each cut, if there are any.
pub fn cuts(results: &Results<'_>) -> Option<Table> {
    let mut table = Table::new([
        "without the experts of",
        "experts left",
        "size",
        "KLD",
        "same top %",
        "PPL",
    ]);
    for (at, (cut, statistics)) in results.plan.cuts.iter().zip(&results.cuts).enumerate() {
        let bytes = results.without(Some(at)).map_or(0, |mix| mix.bytes);
        let mut row = vec![
            cut.name.clone(),
            cut.pruned.left.to_string(),
            size_text(bytes as f64),
        ];
        row.extend(cells(statistics));
        table.rows.push(row);
    }
    (!table.rows.is_empty()).then_some(table)
}

/// Returns the limit of the recipe.
pub fn goal_text(results: &Results<'_>) -> String {
    match results.goal {
        Some(Goal::Size(bytes)) => size_text(bytes as f64),
        Some(Goal::BitsPerWeight(bits)) => format!("{bits} bits a weight"),
        None => "no limit".into(),
    }
}

/// Returns statistics in a line.
pub fn sentence(of: &Statistics) -> String {
    format!(
        "KLD {}, same top {}, PPL {}",
        figure(&of.kld, 6),
        figure(&of.same_top, 2),
        figure(&of.ppl, 4)
    )
}

fn figure(of: &Figure, digits: usize) -> String {
    format!("{:.digits$} ± {:.digits$}", of.mean, of.error)
}

fn cells(of: &Statistics) -> [String; 3] {
    [
        figure(&of.kld, 6),
        figure(&of.same_top, 2),
        figure(&of.ppl, 4),
    ]
}

/// Returns a row for each group and candidate.
pub fn measurements(results: &Results<'_>) -> Table {
    let mut table = Table::new([
        "group",
        "candidate",
        "types",
        "size",
        "KLD",
        "same top %",
        "PPL",
        "equal",
    ]);
    for (group, of) in results.groups.iter().enumerate() {
        for (candidate, name) in names(results) {
            let equal = match results.equal_to(group, candidate) {
                None => String::new(),
                Some(Err(())) => "= as it is".into(),
                Some(Ok(other)) => format!("= {}", results.plan.candidates[other].name),
            };
            let mut row = vec![
                of.name.clone(),
                name.to_owned(),
                results.types(group, candidate).join(" "),
                size_text(results.group_bytes(group, candidate) as f64),
            ];
            row.extend(cells(&results.measured[group][candidate]));
            row.push(equal);
            table.rows.push(row);
        }
    }
    table
}

fn names<'a>(results: &'a Results<'_>) -> impl Iterator<Item = (usize, &'a str)> {
    let candidates = results.plan.candidates.iter().enumerate();
    candidates.map(|(at, of)| (at, of.name.as_str()))
}

/// Returns the recipe beside uniform types.
pub fn comparison(results: &Results<'_>, recipe: &Recipe<'_>) -> Table {
    let mut table = Table::new(["", "size", "bits a weight", "KLD", "same top %", "PPL"]);
    let mut add = |name: String, mix: &Mix<'_>, statistics: &Statistics| {
        let mut row = vec![
            name,
            size_text(mix.bytes as f64),
            format!("{:.3}", mix.bits_per_weight),
        ];
        row.extend(cells(statistics));
        table.rows.push(row);
    };
    let name = match cut_name(results, &recipe.mix) {
        Some(cut) => format!("recipe, without the experts of the list '{cut}'"),
        None => "recipe".into(),
    };
    add(name, &recipe.mix, &recipe.statistics);
    for of in &results.uniform {
        let name = &results.plan.candidates[of.candidate].name;
        add(format!("all as {name}"), &of.mix, &of.statistics);
    }
    table
}

/// Returns what the recipe gains against each uniform type that is not smaller.
pub fn verdicts(results: &Results<'_>, recipe: &Recipe<'_>) -> String {
    let mut lines = Vec::new();
    for of in &results.uniform {
        let name = &results.plan.candidates[of.candidate].name;
        let (mine, other) = (recipe.statistics.kld, of.statistics.kld);
        let verdict = match () {
            () if mine.is_equal_to(&other) => "an equal KLD, within the errors".to_owned(),
            () if mine.mean < other.mean => format!(
                "a KLD lower by {:.0} %, beyond the errors",
                (1.0 - mine.mean / other.mean) * 100.0
            ),
            () => "a higher KLD, beyond the errors".to_owned(),
        };
        let size = (recipe.mix.bytes as f64 / of.mix.bytes as f64 - 1.0) * 100.0;
        lines.push(format!(
            "against all as {name}, the recipe has {size:+.1} % size and {verdict}"
        ));
    }
    lines.join("\n")
}

/// Returns the results as JSON.
pub fn json(results: &Results<'_>) -> Value {
    let plan = results.plan;
    let mix = |mix: &Mix<'_>, statistics: &Statistics| {
        json!({
            "bytes": mix.bytes,
            "bits_per_weight": mix.bits_per_weight,
            "statistics": statistics,
        })
    };
    let groups = results.groups.iter().enumerate().map(|(group, of)| {
        let candidates = names(results).map(|(candidate, name)| {
            json!({
                "candidate": name,
                "types": results.types(group, candidate),
                "bytes": results.group_bytes(group, candidate),
                "statistics": results.measured[group][candidate],
            })
        });
        let tensors = of.tensors.iter().map(|at| plan.tensors[*at].name);
        json!({
            "group": of.name,
            "tensors": tensors.collect::<Vec<_>>(),
            "candidates": candidates.collect::<Vec<_>>(),
        })
    });
    let recipe = results.recipe.as_ref().map(|recipe| {
        let mut all = mix(&recipe.mix, &recipe.statistics);
        let choices = results
            .groups
            .iter()
            .zip(&recipe.mix.choices)
            .map(|(group, choice)| {
                let name = choice.map(|at| plan.candidates[at].name.clone());
                (group.name.clone(), json!(name))
            });
        all["expected_kld"] = recipe.expected.into();
        all["choices"] = Value::Object(choices.collect());
        all["cut"] = cut_name(results, &recipe.mix).into();
        all
    });
    let uniform = results.uniform.iter().map(|of| {
        let mut all = mix(&of.mix, &of.statistics);
        all["candidate"] = plan.candidates[of.candidate].name.clone().into();
        all
    });
    let cuts = plan.cuts.iter().zip(&results.cuts).map(|(cut, statistics)| {
        json!({"cut": cut.name, "experts": cut.masks, "statistics": statistics})
    });
    json!({
        "model": plan.model.path,
        "baseline": results.baseline,
        "rounding": results.rounding,
        "cuts": cuts.collect::<Vec<_>>(),
        "groups": groups.collect::<Vec<_>>(),
        "recipe": recipe,
        "uniform": uniform.collect::<Vec<_>>(),
    })
}

/// Returns a list of types: for `llama-quantize --tensor-type-file` a line for each tensor.
pub fn tensor_types(results: &Results<'_>, mix: &Mix<'_>) -> Vec<String> {
    let model = results.plan.model;
    let parts = mix
        .parts
        .iter()
        .filter(|part| model.is_quantizable(&part.tensor));
    // llama-quantize converts the expressions to lower case, but not the names.
    let name = |name: &str| {
        regex::escape(name).replace(
            |of: char| of.is_ascii_uppercase() || text::is_hidden(of),
            ".",
        )
    };
    parts
        .map(|part| format!("^{}$={}", name(part.tensor.name), part.ty.name()))
        .collect()
}

/// Returns a figure of each tensor and candidate, in the format of GGUF-Tool-Suite. A tensor of a
/// group has the part of the group's divergence that its number of weights is.
fn per_tensor(results: &Results<'_>, value: impl Fn(usize, usize, f64) -> f64) -> String {
    let plan = results.plan;
    let tensors = plan.tensors.iter().map(|tensor| text::csv(tensor.name));
    let mut text = format!("QTYPE,{}\n", tensors.collect::<Vec<_>>().join(","));
    for (candidate, name) in names(results) {
        let mut row = vec![UNMEASURED.to_owned(); plan.tensors.len()];
        for (group, of) in results.groups.iter().enumerate() {
            let weights = |at: &usize| super::model::elements(plan.tensors[*at].info) as f64;
            let all: f64 = of.tensors.iter().map(weights).sum();
            for at in &of.tensors {
                row[*at] = format!("{:.6}", value(group, candidate, weights(at) / all));
            }
        }
        let _ = writeln!(text, "{name},{}", row.join(","));
    }
    text
}

/// Returns a line for each tensor of the model, as the candidate has it, in the format of
/// GGUF-Tool-Suite: file, SHA-256 of the file, name, shape, type, elements and bytes. The SHA-256 is
/// empty: it serves downloads.
fn tensor_map(plan: &Plan<'_>, candidate: usize) -> String {
    let outcomes = &plan.outcomes[candidate];
    let of = &plan.candidates[candidate];
    let quantised = plan.quantizer.path(&of.name, &plan.sources, outcomes);
    let file_name = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    };
    let mut text = String::new();
    for tensor in plan.model.tensors() {
        let tuned = plan
            .tensors
            .iter()
            .position(|tunable| tunable.name == tensor.name);
        let (file, ty, bytes) = match (tuned, &of.origin) {
            (None, _) => (
                tensor.file.source.path(),
                tensor.info.ty,
                tensor.info.nbytes,
            ),
            (Some(at), Origin::Type(_)) => {
                (quantised.as_path(), outcomes[at].ty, outcomes[at].bytes)
            }
            (Some(at), Origin::Files(model)) => {
                (model.path.as_path(), outcomes[at].ty, outcomes[at].bytes)
            }
        };
        let extents = &tensor.info.ne[..tensor.info.n_dims as usize];
        let extents: Vec<String> = extents.iter().map(u64::to_string).collect();
        // A tuple of Python.
        let shape = match extents.as_slice() {
            [one] => format!("({one},)"),
            several => format!("({})", several.join(", ")),
        };
        let _ = writeln!(
            text,
            "{}::{}:shape={shape}:dtype={}:elements={}:bytes={bytes}",
            file_name(file),
            text::line(tensor.name),
            ty.name(),
            super::model::elements(tensor.info),
        );
    }
    text
}

/// Writes the results to the work folder.
pub fn write_all(results: &Results<'_>, folder: &Path) -> Result<()> {
    let write = |name: &str, text: &str| write_atomically(&folder.join(name), text.as_bytes());
    write("report.json", &format!("{:#}\n", json(results)))?;
    let kld = per_tensor(results, |group, candidate, part| {
        results.added(group, candidate).max(0.0) * part
    });
    write("kld_results.csv", &kld)?;
    let base = results.baseline.ppl.mean;
    let ppl = per_tensor(results, |group, candidate, part| {
        base + (results.measured[group][candidate].ppl.mean - base) * part
    });
    write("ppl_results.csv", &ppl)?;
    for (candidate, name) in names(results) {
        write(
            &format!("tensors.{name}.map"),
            &tensor_map(results.plan, candidate),
        )?;
    }
    if let Some(recipe) = &results.recipe {
        let lines = tensor_types(results, &recipe.mix);
        write("recipe.txt", &format!("{}\n", lines.join("\n")))?;
        write("recipe-ik.txt", &format!("{}\n", lines.join(",")))?;
    }
    Ok(())
}
