//! `llama-sidecar report`: expert traces as a page, an SVG image, text, or in other formats.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use sidecar_core::gguf::{Access, open_model};
use sidecar_core::protocol::{Request, Traces};
use sidecar_core::text::{self, html};
use sidecar_core::trace::{
    LayerStats, coverage, experts_for, ranking, to_activations, to_logical_count, to_ranked_csv,
    to_rankings,
};

use crate::control::{self, Limit, sockets};
use crate::output::Outputs;
use crate::page;
use crate::print::stdout;
use crate::report::cache::{Caches, Policy};
use crate::report::comparison;
use crate::report::pin::Pinned;
use crate::report::svg;
use crate::report::traces::TraceReport;
use crate::sizes::{self, percent};

/// What `llama-sidecar report` shows, and where.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("form").args(["svg", "compare", "memory", "pin", "format"]))]
pub struct ReportOptions {
    /// Traces in JSON, from --expert-trace-output, or routes; without any, what a running program has counted.
    ///
    /// Marks in routes, which are in the compact format, separate workloads. Traces of the same model are summed.
    traces: Vec<PathBuf>,
    /// Path of the control socket of the program. By default that of the only program that 'run' has started without one.
    #[arg(short, long, conflicts_with = "traces")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    limit: Limit,
    /// Write a self-contained HTML page; with --svg, --format and --pin, another file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// Write only the heat map, as SVG.
    #[arg(long, requires = "output")]
    svg: bool,
    /// Show traces side by side, and how their use of experts differs from the first.
    #[arg(long)]
    compare: bool,
    /// Show what a cache of experts of this size would hit, for example 24G.
    #[arg(long, value_name = "SIZE", value_parser = sizes::size)]
    memory: Option<u64>,
    /// Bytes per second of the disk or link that experts come from, for example 7G: gives a bound
    /// of tokens per second.
    #[arg(long, value_name = "SIZE", requires = "memory", value_parser = sizes::size)]
    speed: Option<u64>,
    /// Choose layers for a GPU and experts for mlock that have this share of the bytes, for
    /// example 40%. With -o, write the byte ranges of the experts as CSV.
    #[arg(long, value_name = "SHARE", value_parser = sizes::share)]
    pin: Option<f64>,
    /// Print the counts in a format of other programs.
    #[arg(long)]
    format: Option<Format>,
    /// The model of the traces, if they do not have the sizes of its experts or it was moved.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
}

/// A format of other programs.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Format {
    /// JSON for SGLang: {"logical_count": [[...], ...]}.
    LogicalCount,
    /// A line of JSON for each layer with its experts, the most used first: {"0":[5,2,...]}.
    Rankings,
    /// CSV for all layers, the most used first: layer,expert,count.
    Csv,
    /// JSON with the used experts by number: {"total_tokens":9, "expert_activations":{"5":9},
    /// "per_layer":{"0":{"5":9}}}.
    Activations,
}

/// Reads traces and writes the report.
pub fn run(options: &ReportOptions) -> Result<()> {
    let mut traces = match options.traces.is_empty() {
        true => of_program(options)?,
        false => {
            let traces = options.traces.iter();
            let traces = traces.map(|path| TraceReport::read(path, options.compare));
            traces.collect::<Result<Vec<_>>>()?.concat()
        }
    };
    if let Some(path) = &options.model {
        let files = open_model(path, Access::Read)?;
        for traced in &mut traces {
            traced.set_model(&files)?;
        }
    }
    if options.compare {
        ensure!(
            traces.len() > 1,
            "--compare compares several traces, or the workloads between marks of routes: pass a second trace"
        );
        let text = match options.output {
            None => traces.iter().map(as_text).collect::<String>() + &comparison::as_text(&traces),
            Some(_) => compared(&traces),
        };
        return write(options, &text);
    }
    let traced = TraceReport::sum(traces)?;
    if let Some(share) = options.pin {
        return pin(options, &traced, share);
    }
    let text = match (options.memory, options.format) {
        (Some(memory), _) => for_memory(&traced, memory, options.speed)?,
        (None, Some(Format::LogicalCount)) => {
            to_logical_count(&traced.counts).map_err(anyhow::Error::msg)?
        }
        (None, Some(Format::Rankings)) => to_rankings(&traced.counts),
        (None, Some(Format::Csv)) => to_ranked_csv(&traced.counts),
        (None, Some(Format::Activations)) => format!("{:#}\n", to_activations(&traced.counts)),
        (None, None) if options.svg => svg::image(&traced),
        (None, None) if options.output.is_some() => page(&traced),
        (None, None) => as_text(&traced),
    };
    write(options, &text)
}

/// Returns what a running program has counted, for each of its models.
fn of_program(options: &ReportOptions) -> Result<Vec<TraceReport>> {
    let socket = options.socket.clone();
    let socket = socket.map_or_else(sockets::only, Ok)?;
    let answer = control::ask(&socket, &Request::Trace, options.limit)?;
    control::done(&answer)?;
    let Traces { traces, .. } = control::parsed(&answer)?;
    ensure!(
        !traces.is_empty(),
        "{} has counted no experts: evaluate with a mixture of experts first",
        text::path(&socket)
    );
    let label = |number: usize| match traces.len() {
        1 => text::path(&socket),
        _ => format!("{}, model {}", text::path(&socket), number + 1),
    };
    let traces = traces.iter().enumerate();
    traces
        .map(|(number, trace)| TraceReport::of_json(trace, label(number), &label(number)))
        .collect()
}

/// Writes the report to its file or to standard output.
fn write(options: &ReportOptions, text: &str) -> Result<()> {
    match &options.output {
        Some(path) => options.outputs.write(path, text),
        None => print(text),
    }
}

fn print(text: &str) -> Result<()> {
    use std::io::Write;
    Ok(stdout().write_all(text.as_bytes())?)
}

fn for_memory(traced: &TraceReport, memory: u64, speed: Option<u64>) -> Result<String> {
    let caches = Caches::of(traced).with_context(|| {
        format!(
            "{} has no locality: trace the workload again with this version",
            traced.label
        )
    })?;
    let text = caches.for_memory(memory, speed);
    text.with_context(|| traced.without_bytes())
}

/// Prints what to keep in fast memory, and writes the list of byte ranges.
fn pin(options: &ReportOptions, traced: &TraceReport, share: f64) -> Result<()> {
    let pinned = Pinned::choose(traced, share).with_context(|| traced.without_bytes())?;
    let mut text = pinned.as_text();
    if let Some(path) = &options.output {
        let files = match &options.model {
            Some(model) => open_model(model, Access::Read)?,
            None => traced.open_model()?,
        };
        options.outputs.write(path, &pinned.as_ranges(&files))?;
        let _ = writeln!(text, "  their byte ranges: {}", text::path(path));
    } else {
        let _ = writeln!(text, "  their byte ranges: name a file with -o");
    }
    print(&text)
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
    let mut facts = vec![
        ("tokens", counts.tokens().to_string()),
        ("activations", counts.activations().to_string()),
        ("layers", counts.layers.len().to_string()),
        ("experts that carry 50 %", needed(0.5)),
        ("experts that carry 90 %", needed(0.9)),
        ("experts that carry 99 %", needed(0.99)),
        (
            "never used",
            format!(
                "{} (even use: {:.0} each)",
                figures.iter().map(|of| of.unused).sum::<usize>(),
                counts.activations() as f64 / experts.max(1) as f64
            ),
        ),
        ("evenness (1 = all alike)", format!("{even:.3}")),
        (
            "share of the top experts",
            format!("{:.1} %", mean(&|figures| figures.top_share) * 100.0),
        ),
    ];
    if let Some(caches) = Caches::of(traced) {
        let needed = |rate| match caches.size_for(Policy::Lru, rate) {
            Some(size) => caches.describe(size),
            None => format!("none: {} are first uses", percent(caches.first_uses())),
        };
        facts.extend([
            ("cache (LRU) for 90 % hits", needed(0.9)),
            ("cache (LRU) for 95 % hits", needed(0.95)),
            ("cache (LRU) for 99 % hits", needed(0.99)),
        ]);
    }
    facts
}

/// Returns why experts without a use may be used all the same: some layers saw fewer tokens than
/// others.
fn unseen(traced: &TraceReport) -> Option<String> {
    let layers = &traced.counts.layers;
    let most = layers.iter().map(|layer| layer.tokens).max()?;
    let fewer = layers.iter().filter(|layer| layer.tokens < most);
    let least = fewer.clone().map(|layer| layer.tokens).min()?;
    let numbers: Vec<String> = fewer.clone().map(|layer| layer.layer.to_string()).collect();
    let never = fewer
        .flat_map(|layer| &layer.experts)
        .filter(|count| **count == 0)
        .count();
    let mut text = format!(
        "Layers with fewer tokens than others: {}, {least} of {most} at least. A program computes its last layer only for tokens whose output it needs.",
        numbers.join(", ")
    );
    if never > 0 {
        text += &format!(
            " {never} of the experts that were never used are there: before you prune them, trace a program that needs every output, such as llama-imatrix."
        );
    }
    Some(text)
}

/// Returns figures and a heat map for a terminal.
fn as_text(traced: &TraceReport) -> String {
    const WIDEST: usize = 96;
    const SHADES: [char; 6] = ['.', ':', '+', '*', '#', '@'];
    let mut text = format!("{}\n\n", traced.title());
    for (name, value) in facts(traced) {
        let _ = writeln!(text, "{name:26} {value}");
    }
    if let Some(unseen) = unseen(traced) {
        let _ = writeln!(text, "\n{unseen}");
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
    if let Some(caches) = Caches::of(traced) {
        let _ = writeln!(
            text,
            "hits of a cache\n\n{}\n{}\n",
            caches.table().as_text(),
            caches.note()
        );
    }
    text
}

/// Returns a self-contained page.
fn page(traced: &TraceReport) -> String {
    let map = svg::scrolling(&svg::heat_map(traced, svg::WHOLE));
    let note = svg::HEAT_MAP;
    let map = format!("<h2>Use of each expert</h2><p class=note>{note}</p>{map}");
    page::document("Expert trace", &section(traced, &map))
}

/// Returns a self-contained page of several traces: what differs first, then each of them.
fn compared(traces: &[TraceReport]) -> String {
    let sections = traces.iter().map(|traced| section(traced, ""));
    let sections = sections.collect::<String>();
    let compared = comparison::as_html(traces);
    page::document(
        "Expert trace",
        &format!("{compared}<div class=columns>{sections}</div>"),
    )
}

/// Returns a trace for a page, with a map as markup.
fn section(traced: &TraceReport, map: &str) -> String {
    let mut body = format!("<section><h1>{}</h1><dl>", html(&traced.title()));
    for (name, value) in facts(traced) {
        let _ = write!(body, "<div><dt>{name}</dt><dd>{}</dd></div>", html(&value));
    }
    body.push_str("</dl>");
    if let Some(unseen) = unseen(traced) {
        let _ = write!(body, "<p><strong>{unseen}</strong></p>");
    }
    let files = traced.about.files.iter().map(|file| html(&file.path));
    let _ = write!(
        body,
        "<p class=note>{}</p>{map}<h2>What a cache or a pruning could gain</h2><p class=note>Share of a layer's activations that its most used experts carry; the mean of all layers, and between the least and the most uneven one. The straight line is even use.</p>{}",
        files.collect::<Vec<_>>().join(", "),
        svg::coverage_curve(traced)
    );
    if let Some(caches) = Caches::of(traced) {
        let (note, table) = (caches.note(), caches.table().as_html());
        let _ = write!(
            body,
            "<h2>Hits of a cache</h2><p class=note>{note}</p><div class=wide>{table}</div>"
        );
    }
    body.push_str("<h2>Layers</h2>");
    layers_table(&mut body, traced);
    body.push_str("</section>");
    body
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
        let most = ranking(layer)
            .into_iter()
            .take(4)
            .map(|expert| expert.to_string());
        let most: Vec<String> = most.collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::traces::{sample as traced, sample_routes};

    #[test]
    fn the_page_is_self_contained_and_escapes_names() {
        let page = compared(&[traced(8, 3), traced(4, 2)]);
        assert!(page.contains("a &lt;b&gt;model&lt;/b&gt;"));
        for outside in ["http://", "https://", "src=", "<script", "@import", "url("] {
            let found = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 4);
    }

    #[test]
    fn the_page_shows_hits_and_differences() {
        let routes = |routes| sample_routes(8, &[(0, 10), (1, 10)], routes);
        let page = compared(&[routes(&[[0, 1], [2, 1]]), routes(&[[0, 1], [4, 5]])]);
        assert_eq!(page.matches("<h2>Hits of a cache</h2>").count(), 2);
        let row = "<tr><td>1<td>100.0 %<td>0.406</tr>";
        assert!(page.contains(row));
    }

    #[test]
    fn layers_that_saw_fewer_tokens_are_named() {
        let mut traced = traced(8, 3);
        for layer in &mut traced.counts.layers {
            layer.tokens = 1604;
        }
        assert_eq!(unseen(&traced), None);
        traced.counts.layers[2].tokens = 101;
        for text in [as_text(&traced), page(&traced)] {
            assert!(text.contains("others: 2, 101 of 1604 at least."), "{text}");
            assert!(
                text.contains("2 of the experts that were never used"),
                "{text}"
            );
        }
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
