//! `llama-sidecar report`: expert traces as a page, an SVG image or text.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use llama_sidecar::trace::{LayerStats, coverage, experts_for};

use crate::svg::{self, escape};
use crate::trace_report::TraceReport;

/// Form and destination of the report.
pub struct Output {
    /// A file; without one, text goes to standard output.
    pub path: Option<PathBuf>,
    /// Whether only the heat map is written.
    pub svg: bool,
    /// Whether traces are shown side by side instead of summed.
    pub compare: bool,
}

/// Reads traces and writes the report.
pub fn run(files: &[PathBuf], output: &Output) -> Result<()> {
    let mut traces = files
        .iter()
        .map(|path| TraceReport::read(path))
        .collect::<Result<Vec<_>>>()?;
    if !output.compare {
        traces = vec![TraceReport::sum(traces)?];
    }
    let text = match (&output.path, output.svg) {
        (None, _) => traces.iter().map(as_text).collect(),
        (Some(_), true) => match traces.as_slice() {
            [only] => svg::heat_map(only),
            _ => bail!("--svg draws one heat map: leave out --compare"),
        },
        (Some(_), false) => page(&traces),
    };
    match &output.path {
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        }
        None => {
            use std::io::Write;
            Ok(std::io::stdout().write_all(text.as_bytes())?)
        }
    }
}

/// Returns figures over all layers.
fn facts(traced: &TraceReport) -> Vec<(&'static str, String)> {
    let counts = &traced.counts;
    let experts: usize = counts.layers.iter().map(|layer| layer.experts.len()).sum();
    let used = traced.about.experts_used;
    let figures: Vec<LayerStats> = counts
        .layers
        .iter()
        .map(|l| LayerStats::of(l, used))
        .collect();
    let mean = |of: &dyn Fn(&LayerStats) -> f64| {
        figures.iter().map(of).sum::<f64>() / figures.len().max(1) as f64
    };
    let needed = |share: f64| {
        let count = experts_for(counts, share);
        format!(
            "{count} of {experts} ({:.0} %)",
            count as f64 / experts as f64 * 100.0
        )
    };
    let even = mean(&|figures| figures.evenness);
    vec![
        ("tokens", counts.tokens().to_string()),
        ("activations", counts.activations().to_string()),
        ("layers", counts.layers.len().to_string()),
        ("experts that carry 50 %", needed(0.5)),
        ("experts that carry 90 %", needed(0.9)),
        ("experts that carry 99 %", needed(0.99)),
        (
            "never used",
            figures
                .iter()
                .map(|figures| figures.unused)
                .sum::<usize>()
                .to_string(),
        ),
        ("evenness (1 = all alike)", format!("{even:.3}")),
        (
            "share of the top experts",
            format!("{:.1} %", mean(&|figures| figures.top_share) * 100.0),
        ),
    ]
}

fn title(traced: &TraceReport) -> String {
    match traced.about.name.as_str() {
        "" => traced.label.clone(),
        name => format!("{name} ({})", traced.label),
    }
}

/// Returns figures and a heat map for a terminal.
fn as_text(traced: &TraceReport) -> String {
    const WIDEST: usize = 96;
    const SHADES: [char; 6] = ['.', ':', '+', '*', '#', '@'];
    let mut text = format!("{}\n\n", title(traced));
    for (name, value) in facts(traced) {
        let _ = writeln!(text, "{name:26} {value}");
    }
    let _ = writeln!(
        text,
        "\nlayers down, experts across; ' ' never, '.' less than a quarter of even use, ':' a half, '+' even, '*' twice, '#' four times, '@' more"
    );
    for layer in &traced.counts.layers {
        let all = layer.activations().max(1) as f64;
        let per_cell = layer.experts.len().div_ceil(WIDEST).max(1);
        let even = per_cell as f64 / layer.experts.len() as f64;
        let cells = layer.experts.chunks(per_cell).map(|experts| {
            let share = experts.iter().sum::<u64>() as f64 / all;
            match share / even {
                0.0 => ' ',
                ratio => {
                    let step = ratio.log2().ceil() + 2.0;
                    SHADES[step.clamp(0.0, 5.0) as usize]
                }
            }
        });
        let _ = writeln!(text, "{:4} |{}|", layer.layer, cells.collect::<String>());
    }
    text.push('\n');
    text
}

/// Returns a self-contained page.
fn page(traces: &[TraceReport]) -> String {
    let mut body = String::new();
    for traced in traces {
        let _ = write!(body, "<section><h1>{}</h1>", escape(&title(traced)));
        body.push_str("<dl>");
        for (name, value) in facts(traced) {
            let _ = write!(
                body,
                "<div><dt>{name}</dt><dd>{}</dd></div>",
                escape(&value)
            );
        }
        body.push_str("</dl>");
        let files = traced.about.files.iter().map(|file| escape(&file.path));
        let _ = write!(
            body,
            "<p class=note>{}</p>",
            files.collect::<Vec<_>>().join(", ")
        );
        body.push_str(
            "<h2>Use of each expert</h2><p class=note>A row is a layer, a column an expert. The colour is its share of the layer's activations against even use: hover for numbers.</p>",
        );
        let _ = write!(body, "<div class=wide>{}</div>", svg::heat_map(traced));
        body.push_str(
            "<h2>What a cache or a pruning could gain</h2><p class=note>Share of a layer's activations that its most used experts carry; the mean of all layers, and between the least and the most uneven one. The straight line is even use.</p>",
        );
        body.push_str(&svg::coverage_curve(traced));
        body.push_str("<h2>Layers</h2>");
        layers_table(&mut body, traced);
        body.push_str("</section>");
    }
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width, initial-scale=1\"><title>Expert trace</title><style>{STYLE}</style><main>{body}</main></html>\n"
    )
}

fn layers_table(body: &mut String, traced: &TraceReport) {
    let used = traced.about.experts_used;
    let _ = write!(
        body,
        "<div class=wide><table><tr><th>layer<th>tokens<th>evenness<th>share of top {used}<th>for 90 %<th>never used<th>most used</tr>"
    );
    for layer in &traced.counts.layers {
        let figures = LayerStats::of(layer, used);
        let covered = coverage(&layer.experts);
        let needed = covered.iter().take_while(|&&sum| sum < 0.9 - 1e-12).count() + 1;
        let mut order: Vec<usize> = (0..layer.experts.len()).collect();
        order.sort_by_key(|&expert| std::cmp::Reverse(layer.experts[expert]));
        let most: Vec<String> = order.iter().take(4).map(usize::to_string).collect();
        let _ = write!(
            body,
            "<tr><td>{}<td>{}<td>{:.3}<td>{:.1} %<td>{needed} of {}<td>{}<td>{}</tr>",
            layer.layer,
            layer.tokens,
            figures.evenness,
            figures.top_share * 100.0,
            layer.experts.len(),
            figures.unused,
            most.join(", "),
        );
    }
    body.push_str("</table></div>");
}

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2026;--soft:#667;--paper:#fff;--line:#d8dbe2}\
@media(prefers-color-scheme:dark){:root{--ink:#e8eaf0;--soft:#9aa3b2;--paper:#14171c;--line:#333a45}}\
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}\
main{max-width:76rem;margin:0 auto;padding:1.5rem}\
section+section{margin-top:4rem;border-top:1px solid var(--line)}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}\
.note{color:var(--soft);overflow-wrap:anywhere}.wide{overflow-x:auto}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(11rem,1fr));gap:.8rem;margin:0}\
dl div{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}\
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}\
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--soft);font-weight:500}svg{max-width:100%;height:auto}.wide svg{max-width:none}";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace_report::sample as traced;

    #[test]
    fn the_page_is_self_contained_and_escapes_names() {
        let page = page(&[traced(8, 3), traced(4, 2)]);
        assert!(page.contains("a &lt;b&gt;model&lt;/b&gt;"));
        for outside in ["http://", "https://", "src=", "<script", "@import", "url("] {
            let found = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 4);
    }

    #[test]
    fn a_terminal_shows_a_row_for_each_layer() {
        let text = as_text(&traced(512, 3));
        let rows: Vec<&str> = text.lines().filter(|line| line.contains('|')).collect();
        assert_eq!(rows.len(), 3);
        assert!(rows[0].len() <= 100, "{}", rows[0].len());
        let text = as_text(&traced(5, 1));
        // Counts 0, 1, 2, 3, 4 of 10: even use is 2.
        assert!(text.contains("   0 | :+**|"), "{text}");
    }
}
