//! How the use of experts in traces differs from that in the first.

use std::fmt::Write;

use sidecar_core::text::{self, html};
use sidecar_core::trace::{divergence, overlap};

use crate::report::svg;
use crate::report::traces::TraceReport;
use crate::sizes::{Table, percent};

/// Explains the table of layers.
const LAYERS: &str = "Hot in both: share of the most used quarter of the experts that is the same. Divergence: Jensen-Shannon, 0 for equal use, 1 for use of different experts.";

/// Explains a comparison of traces whose layers differ.
const NOT_COMPARED: &str = "Not compared: the layers have different numbers of experts.";

/// The rows of the table of the largest differences.
const LARGEST: usize = 10;

/// Returns the comparisons for a terminal.
pub fn as_text(traces: &[TraceReport]) -> String {
    let mut text = String::new();
    for (first, other) in pairs(traces) {
        let _ = writeln!(text, "{}\n", text::line(&title(first, other)));
        if first.shape() != other.shape() {
            let _ = writeln!(text, "{NOT_COMPARED}\n");
            continue;
        }
        if let Some(largest) = largest(first, other) {
            let names = text::line(&names(first, other)).into_owned();
            let _ = writeln!(text, "{names}\n\n{}", largest.as_text());
        }
        let _ = writeln!(text, "{}\n{LAYERS}\n", layers(first, other).as_text());
    }
    text
}

/// Returns the maps of all traces side by side, and the comparisons, for a page.
pub fn as_html(traces: &[TraceReport]) -> String {
    let mut body = format!(
        "<section><h1>Use of each expert</h1><p class=note>{}</p><div class=columns>",
        svg::HEAT_MAP
    );
    for traced in traces {
        let map = svg::scrolling(&svg::heat_map(traced, svg::HALF));
        let _ = write!(body, "<div><h2>{}</h2>{map}</div>", html(&traced.title()));
    }
    body.push_str("</div></section>");
    for (first, other) in pairs(traces) {
        let _ = write!(body, "<section><h1>{}</h1>", html(&title(first, other)));
        if first.shape() != other.shape() {
            let _ = write!(body, "<p class=note>{NOT_COMPARED}</p></section>");
            continue;
        }
        let (map, names) = (svg::difference_map(first, other), names(first, other));
        let _ = write!(
            body,
            "<p class=note>{} Blue: a smaller share of the layer's activations in B. Orange: a larger share. 1x is the share of an expert with even use.</p><div class=columns><section>{}",
            html(&names),
            svg::scrolling(&map)
        );
        if let Some(largest) = largest(first, other) {
            let largest = largest.as_html();
            let _ = write!(
                body,
                "<h2>Largest differences</h2><div class=wide>{largest}</div>"
            );
        }
        let layers = layers(first, other).as_html();
        let _ = write!(
            body,
            "</section><section><h2>Differences by layer</h2><p class=note>{LAYERS}</p><div class=wide>{layers}</div></section></div></section>"
        );
    }
    body
}

/// Returns the first trace with each of the others.
fn pairs(traces: &[TraceReport]) -> impl Iterator<Item = (&TraceReport, &TraceReport)> {
    let others = traces.iter().skip(1);
    others.map(|other| (&traces[0], other))
}

fn title(first: &TraceReport, other: &TraceReport) -> String {
    format!("{} against {}", other.label, first.label)
}

fn names(first: &TraceReport, other: &TraceReport) -> String {
    format!("A is {}, B is {}.", first.label, other.label)
}

/// Returns the experts whose shares differ most; `None` if no share differs.
fn largest(first: &TraceReport, other: &TraceReport) -> Option<Table> {
    let layers = first.counts.layers.iter().zip(&other.counts.layers);
    let differing = layers.flat_map(|(a, b)| {
        let shares = svg::shares(a).into_iter().zip(svg::shares(b)).enumerate();
        shares.map(|(expert, (in_a, in_b))| (a.layer, expert, in_a, in_b))
    });
    let mut found: Vec<_> = differing.filter(|(.., a, b)| a != b).collect();
    found.sort_by(|(.., a, b), (.., c, d)| (d - c).abs().total_cmp(&(b - a).abs()));
    let mut table = Table::new(["layer", "expert", "A", "B", "difference in points"]);
    let rows = found.into_iter().take(LARGEST);
    let rows = rows.map(|(layer, expert, a, b)| {
        let shares = [a, b].map(|share| format!("{:.2} %", share * 100.0));
        let difference = format!("{:+.2}", (b - a) * 100.0);
        let numbers = [layer.to_string(), expert.to_string()];
        numbers.into_iter().chain(shares).chain([difference])
    });
    table.rows = rows.map(Iterator::collect).collect();
    (!table.rows.is_empty()).then_some(table)
}

/// Returns overlap and divergence of each layer.
fn layers(first: &TraceReport, other: &TraceReport) -> Table {
    let mut table = Table::new(["layer", "hot in both", "divergence"]);
    let layers = first.counts.layers.iter().zip(&other.counts.layers);
    let figures = layers.map(|(a, b)| {
        let hot = a.experts.len().div_ceil(4);
        (a.layer, overlap(a, b, hot), divergence(a, b))
    });
    let figures: Vec<(u32, f64, f64)> = figures.collect();
    let row = |name: String, overlap: f64, divergence: f64| {
        vec![name, percent(overlap), format!("{divergence:.3}")]
    };
    let rows = figures.iter();
    table.rows = rows
        .map(|&(layer, a, b)| row(layer.to_string(), a, b))
        .collect();
    let mean = |of: fn(&(u32, f64, f64)) -> f64| {
        figures.iter().map(of).sum::<f64>() / figures.len().max(1) as f64
    };
    table
        .rows
        .push(row("mean".into(), mean(|of| of.1), mean(|of| of.2)));
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::traces::{sample, sample_routes};

    /// Shares of A: 2/4, 1/4, 1/4, 0; of B: 1/4, 1/4, 0, 2/4. Even use is 1/4.
    fn known() -> [TraceReport; 2] {
        let routes = |routes: &[[i32; 2]], label: &str| TraceReport {
            label: label.into(),
            ..sample_routes(4, &[(5, 10)], routes)
        };
        [
            routes(&[[0, 1], [0, 2]], "<a>"),
            routes(&[[0, 3], [1, 3]], "b&b"),
        ]
    }

    #[test]
    fn a_cell_shows_the_difference_of_shares() {
        let map = svg::difference_map(&known()[0], &known()[1]);
        for (colour, title) in [
            ("#2f7fd8b0", "0: A 50.00 %, B 25.00 %, -25.00 points (-1.00"),
            (
                "transparent",
                "1: A 25.00 %, B 25.00 %, +0.00 points (+0.00",
            ),
            ("#2f7fd8b0", "2: A 25.00 %, B 0.00 %, -25.00 points (-1.00"),
            ("#d9730d", "3: A 0.00 %, B 50.00 %, +50.00 points (+2.00"),
        ] {
            let cell = format!("fill=\"{colour}\"><title>layer 5, expert {title} x even)</title>");
            assert!(map.contains(&cell), "{cell}: {map}");
        }
    }

    #[test]
    fn maps_are_side_by_side_and_names_are_escaped() {
        let page = as_html(&known());
        assert_eq!(page.matches("<svg").count(), 3);
        let (columns, rest) = page.split_once("</section>").expect("maps");
        assert_eq!(columns.matches("<svg").count(), 2);
        assert!(
            rest.contains("<h1>b&amp;b against &lt;a&gt;</h1>"),
            "{rest}"
        );
        assert!(rest.contains("A is &lt;a&gt;, B is b&amp;b."), "{rest}");
        let row = "<tr><td>5<td>3<td>0.00 %<td>50.00 %<td>+50.00</tr>";
        let head = "<th>difference in points</tr>";
        assert!(page.contains(&format!("{head}{row}")), "{page}");
    }

    #[test]
    fn traces_of_other_layers_are_not_compared() {
        let traces = [sample(8, 3), sample(4, 2)];
        assert!(as_text(&traces).contains(NOT_COMPARED));
        let page = as_html(&traces);
        assert!(page.contains(NOT_COMPARED));
        assert_eq!(page.matches("<svg").count(), 2);
    }
}
