//! The results as a page.

use std::fmt::Write;
use std::ops::Range;

use super::groups::role;
use super::model::layer;
use super::results::Results;
use super::tables;
use sidecar_core::text::{self, html};

use crate::page::document;
use crate::report::svg;

/// Returns a self-contained page.
pub fn page(results: &Results<'_>) -> String {
    let plan = results.plan;
    let mut body = format!(
        "<section><h1>{}</h1><p class=note>As it is: {}.</p>",
        html(&text::path(&plan.model.path)),
        html(&tables::sentence(&results.baseline))
    );
    if let Some(cuts) = tables::cuts(results) {
        let _ = write!(
            body,
            "<h2>Fewer experts</h2><div class=wide>{}</div>",
            cuts.as_html()
        );
    }
    if let Some(recipe) = &results.recipe {
        let _ = write!(
            body,
            "<h2>Recipe for {}</h2><p class=note>{}</p><div class=wide>{}</div>{}",
            html(&tables::goal_text(results)),
            html(&tables::verdicts(results, recipe)).replace('\n', "<br>"),
            tables::comparison(results, recipe).as_html(),
            sizes(results)
        );
        let mut rows = String::new();
        for (group, choice) in results.groups.iter().zip(&recipe.mix.choices) {
            let name = choice.map_or("as it is", |at| plan.candidates[at].name.as_str());
            let _ = write!(rows, "<tr><td>{}<td>{}</tr>", html(&group.name), html(name));
        }
        let _ = write!(
            body,
            "<details><summary>Types of the recipe</summary><table><tr><th>group<th>candidate</tr>{rows}</table></details>"
        );
    }
    let all = 0..plan.candidates.len();
    let by_layer =
        (0..results.groups.len()).any(|group| place(results, group).0.parse::<u32>().is_ok());
    let (row, maps): (_, Vec<_>) = match by_layer {
        true => (
            "layer",
            all.map(|candidate| candidate..candidate + 1).collect(),
        ),
        false => ("candidate", vec![all]),
    };
    let _ = write!(
        body,
        "<h2>Sensitivity</h2><p class=note>A row is a {row}, a column a role. The colour is what the change of the group adds to the KL divergence, against the mean of all groups and candidates. Hover over a cell for its numbers.</p>"
    );
    for candidates in maps {
        if by_layer {
            let name = &plan.candidates[candidates.start].name;
            let _ = write!(body, "<h3>{}</h3>", html(name));
        }
        let _ = write!(
            body,
            "<div class=wide tabindex=0 role=region aria-label=\"Sensitivity, scrolls sideways\">{}</div>",
            heat_map(results, candidates, by_layer)
        );
    }
    let _ = write!(
        body,
        "<h2>Divergence against saved bytes</h2><p class=note>Each group with each candidate: what the change saves, and what it adds to the divergence.</p>{}<h2>Measurements</h2><div class=wide>{}</div></section>",
        savings(results),
        tables::measurements(results).as_html()
    );
    document("Tuning", &body)
}

/// Returns row and column of a group: its layer and its role, or all of them.
fn place(results: &Results<'_>, group: usize) -> (String, String) {
    let names = || {
        let tensors = results.groups[group].tensors.iter();
        tensors.map(|at| results.plan.tensors[*at].name)
    };
    let same = |of: &dyn Fn(&str) -> String, many: &str| {
        let mut all: Vec<String> = names().map(of).collect();
        all.dedup();
        match all.len() {
            1 => all.remove(0),
            _ => many.to_owned(),
        }
    };
    let row = same(
        &|name| layer(name).map_or("-".into(), |layer| layer.to_string()),
        "all",
    );
    (row, same(&|name| role(name).to_owned(), "all roles"))
}

/// Draws a cell for each group with each of these candidates; a row is a layer or a candidate.
fn heat_map(results: &Results<'_>, candidates: Range<usize>, by_layer: bool) -> String {
    let mut rows: Vec<String> = Vec::new();
    let mut columns: Vec<String> = Vec::new();
    let mut cells = Vec::new();
    let counts = (results.groups.len() * results.plan.candidates.len()).max(1);
    let all = (0..results.groups.len()).flat_map(|group| {
        (0..results.plan.candidates.len()).map(move |candidate| (group, candidate))
    });
    let mean = all.map(|(group, of)| results.added(group, of)).sum::<f64>() / counts as f64;
    let groups = results.groups.iter().enumerate();
    let pairs =
        candidates.flat_map(|candidate| groups.clone().map(move |group| (candidate, group)));
    for (candidate, (group, of)) in pairs {
        let (layer, column) = place(results, group);
        let name = &results.plan.candidates[candidate].name;
        let row = if by_layer { layer } else { name.clone() };
        let at = |names: &mut Vec<String>, name: String| match names
            .iter()
            .position(|known| *known == name)
        {
            Some(at) => at,
            None => {
                names.push(name);
                names.len() - 1
            }
        };
        let added = results.added(group, candidate);
        let ratio = if mean > 0.0 { added / mean } else { 0.0 };
        let label = format!(
            "{} as {name}: {}",
            of.name,
            tables::sentence(&results.measured[group][candidate])
        );
        cells.push((at(&mut rows, row), at(&mut columns, column), ratio, label));
    }
    svg::cells("Sensitivity of each group", &rows, &columns, &cells)
}

/// Draws size against divergence of the recipe and of uniform types.
fn sizes(results: &Results<'_>) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut points: Vec<(f64, f64, String, bool)> = results
        .uniform
        .iter()
        .map(|of| {
            let name = format!("all as {}", results.plan.candidates[of.candidate].name);
            (mib(of.mix.bytes), of.statistics.kld.mean, name, false)
        })
        .collect();
    if let Ok(now) = results.as_it_is() {
        let kld = results.baseline.kld.mean;
        points.push((mib(now.bytes), kld, "as it is".into(), false));
    }
    points.extend(results.recipe.iter().map(|recipe| {
        (
            mib(recipe.mix.bytes),
            recipe.statistics.kld.mean,
            "recipe".into(),
            true,
        )
    }));
    svg::scatter("size, MiB", "KL divergence", &points)
}

fn savings(results: &Results<'_>) -> String {
    let mut points = Vec::new();
    for (group, of) in results.groups.iter().enumerate() {
        let tensors = of.tensors.iter();
        let now: u64 = tensors
            .map(|at| results.plan.tensors[*at].info.nbytes)
            .sum();
        for (candidate, with) in results.plan.candidates.iter().enumerate() {
            let saved = now as f64 - results.group_bytes(group, candidate) as f64;
            let chosen = results
                .recipe
                .as_ref()
                .is_some_and(|recipe| recipe.mix.choices[group] == Some(candidate));
            let label = format!("{} as {}", of.name, with.name);
            points.push((
                saved / f64::from(1 << 20),
                results.added(group, candidate),
                label,
                chosen,
            ));
        }
    }
    svg::scatter(
        "saved, MiB; filled: in the recipe",
        "added KL divergence",
        &points,
    )
}
