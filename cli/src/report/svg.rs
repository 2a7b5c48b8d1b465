//! The images of a report, as SVG.

use std::fmt::Write;

use sidecar_core::text::html;
use sidecar_core::trace::{LayerCounts, coverage};

use crate::report::traces::TraceReport;

/// Colours for a share against even use: never, less than a quarter, a quarter, a half, even,
/// twice, four times and more. The colour map viridis, whose lightness grows with the share, so
/// that colours differ without their hue; what is never used has none.
const COLOURS: [&str; 7] = [
    "transparent",
    "#46085c",
    "#3b528b",
    "#25848e",
    "#35b779",
    "#a8db34",
    "#fde725",
];
const MEANINGS: [&str; 7] = ["never", "< 1/4", "1/4", "1/2", "even", "2x", "4x"];

/// Colours and meanings of a difference, in shares of even use. Blue and orange also differ for colour-blind readers, and more
/// of a colour is a larger difference on a light and on a dark page.
const DIFFERENCES: [(&str, &str); 9] = [
    ("#2f7fd8", "-2x"),
    ("#2f7fd8b0", "-1x"),
    ("#2f7fd870", "-1/2"),
    ("#2f7fd840", "-1/4"),
    ("transparent", "same"),
    ("#d9730d40", "+1/4"),
    ("#d9730d70", "+1/2"),
    ("#d9730db0", "+1x"),
    ("#d9730d", "+2x"),
];

/// The width of the cells of a map that is alone in its row.
pub const WHOLE: usize = 900;
/// The width of the cells of a map that has another one beside it.
pub const HALF: usize = 500;

/// Returns the share of each expert in the activations of its layer.
pub fn shares(layer: &LayerCounts) -> Vec<f64> {
    let all = layer.activations().max(1) as f64;
    let counts = layer.experts.iter();
    counts.map(|count| *count as f64 / all).collect()
}

/// Returns the index in [`DIFFERENCES`] for a difference of shares over that of even use.
fn difference(ratio: f64) -> usize {
    // "1/4" is from 0.18 to 0.35. A logarithm of 0 is below all.
    let step = (ratio.abs().log2().round() + 3.0).clamp(0.0, 4.0);
    (4.0 + step.copysign(ratio)) as usize
}

/// Returns the index in [`COLOURS`] for a share over that of even use.
fn colour(ratio: f64) -> usize {
    if ratio <= 0.0 {
        return 0;
    }
    // The middle of "even" is 1: from 0.71 to 1.41.
    (ratio.log2().round() + 4.0).clamp(1.0, 6.0) as usize
}

/// Explains a heat map.
pub const HEAT_MAP: &str = "A row is a layer, a column an expert. The colour is its share of the layer's activations against even use; what is never used has none. Hover over a cell for its numbers; the table of layers has the most used experts.";

/// Returns the markup of a map for a page, which scrolls sideways where the window is narrower.
pub fn scrolling(map: &str) -> String {
    format!(
        "<div class=wide tabindex=0 role=region aria-label=\"Map of experts, scrolls sideways\">{map}</div>"
    )
}

/// Returns the heat map as a file, which is known by its start.
pub fn image(traced: &TraceReport) -> String {
    heat_map(traced, WHOLE).replacen("<svg", "<svg data-generator=\"llama-sidecar\"", 1)
}

/// Draws the use of each expert in a map, whose cells are so wide together if they can.
pub fn heat_map(traced: &TraceReport, across: usize) -> String {
    let layers = &traced.counts.layers;
    let shares: Vec<Vec<f64>> = layers.iter().map(shares).collect();
    let label = "Use of each expert in each layer";
    let legend = COLOURS.into_iter().zip(MEANINGS);
    let cell = |row: usize, expert: usize| {
        let (count, share) = (layers[row].experts[expert], shares[row][expert]);
        let ratio = share * shares[row].len() as f64;
        let title = format!("{count} ({:.2} %, {ratio:.2} x even)", share * 100.0);
        (COLOURS[colour(ratio)], title)
    };
    map(label, &traced.shape(), across, legend.collect(), cell)
}

/// Draws by how much the share of each expert differs from that in the first trace, whose layers are alike.
pub fn difference_map(first: &TraceReport, other: &TraceReport) -> String {
    let shares = |of: &TraceReport| of.counts.layers.iter().map(shares).collect::<Vec<_>>();
    let (first, label) = (shares(first), "Difference of the share of each expert");
    let (others, shape) = (shares(other), other.shape());
    let cell = |row: usize, expert: usize| {
        let (a, b) = (first[row][expert], others[row][expert]);
        let even = (b - a) * shape[row].1 as f64;
        let title = format!(
            "A {:.2} %, B {:.2} %, {:+.2} points ({even:+.2} x even)",
            a * 100.0,
            b * 100.0,
            (b - a) * 100.0
        );
        (DIFFERENCES[difference(even)].0, title)
    };
    map(label, &shape, HALF, DIFFERENCES.into(), cell)
}

/// Draws a cell for each layer and expert, layers down, experts across: its colour, and a title after the names of both.
fn map(
    label: &str,
    shape: &[(u32, usize)],
    across: usize,
    legend: Vec<(&str, &str)>,
    cell: impl Fn(usize, usize) -> (&'static str, String),
) -> String {
    const LEFT: usize = 44;
    const TOP: usize = 20;
    const ENTRY: usize = 56;
    let experts = shape.iter().map(|layer| layer.1).max().unwrap_or(0);
    // Wide cells for few experts; for 512 the image is as wide as a large screen.
    let wide = (across / experts.max(1)).clamp(across / 225, 110);
    let high = (700 / shape.len().max(1)).clamp(9, 22);
    let width = LEFT + (experts * wide + 10).max(legend.len() * ENTRY);
    let height = TOP + shape.len() * high + 54;
    let mut svg = start(label, width as f64, height as f64);
    svg.push_str("<g fill=\"#808a99\">");
    let step = |count: usize, least: usize| {
        [1, 2, 4, 8, 16, 32, 64, 128]
            .into_iter()
            .find(|step| step * least >= 40 || *step * 16 > count)
            .unwrap_or(128)
    };
    for expert in (0..experts).step_by(step(experts, wide)) {
        let x = LEFT + expert * wide + wide / 2;
        let _ = write!(
            svg,
            "<text x=\"{x}\" y=\"14\" text-anchor=\"middle\">{expert}</text>"
        );
    }
    for (row, (layer, _)) in shape.iter().enumerate() {
        if row % (11usize.div_ceil(high)) == 0 {
            let y = TOP + row * high + high / 2 + 4;
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{layer}</text>",
                LEFT - 6,
            );
        }
    }
    svg.push_str("</g>");
    let gap = usize::from(wide > 6);
    for (row, &(layer, experts)) in shape.iter().enumerate() {
        let y = TOP + row * high;
        for expert in 0..experts {
            let (colour, title) = cell(row, expert);
            let _ = write!(
                svg,
                "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{colour}\"><title>layer {layer}, expert {expert}: {title}</title></rect>",
                LEFT + expert * wide,
                wide - gap,
                high - 1,
            );
        }
    }
    let y = TOP + shape.len() * high + 16;
    for (at, (colour, meaning)) in legend.into_iter().enumerate() {
        legend_entry(&mut svg, (LEFT + at * ENTRY, y), colour, meaning);
    }
    svg.push_str("</svg>");
    svg
}

/// Draws cells with a colour each: row, column, ratio to the mean, and a text for the pointer.
pub fn cells(
    label: &str,
    rows: &[String],
    columns: &[String],
    cells: &[(usize, usize, f64, String)],
) -> String {
    const TOP: usize = 96;
    const WIDE: usize = 44;
    const HIGH: usize = 18;
    let longest = rows
        .iter()
        .map(|row| row.chars().count())
        .max()
        .unwrap_or(0);
    let left = 16 + longest * 7;
    let width = (left + columns.len() * WIDE + 96).max(left + 420);
    let height = TOP + rows.len() * HIGH + 40;
    let mut svg = start(label, width as f64, height as f64);
    for (at, column) in columns.iter().enumerate() {
        let x = left + at * WIDE + WIDE / 2;
        let y = TOP - 8;
        let _ = write!(
            svg,
            "<text x=\"{x}\" y=\"{y}\" transform=\"rotate(-40 {x} {y})\" fill=\"#808a99\">{}</text>",
            html(column)
        );
    }
    for (at, row) in rows.iter().enumerate() {
        let _ = write!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#808a99\">{}</text>",
            left - 6,
            TOP + at * HIGH + 13,
            html(row)
        );
    }
    for (row, column, ratio, text) in cells {
        let _ = write!(
            svg,
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" stroke=\"#808a99\" stroke-opacity=\".4\"><title>{}</title></rect>",
            left + column * WIDE,
            TOP + row * HIGH,
            WIDE - 2,
            HIGH - 2,
            COLOURS[colour(*ratio)],
            html(text)
        );
    }
    for (at, (colour, meaning)) in COLOURS
        .iter()
        .zip(["none", "< 1/4", "1/4", "1/2", "mean", "2x", "4x"])
        .enumerate()
    {
        let (x, y) = (left + at * 58, height - 24);
        legend_entry(&mut svg, (x, y), colour, meaning);
    }
    svg.push_str("</svg>");
    svg
}

/// Draws a colour and its meaning.
fn legend_entry(svg: &mut String, (x, y): (usize, usize), colour: &str, meaning: &str) {
    let _ = write!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{colour}\" stroke=\"#808a99\"/><text x=\"{}\" y=\"{}\" fill=\"#808a99\">{}</text>",
        x + 18,
        y + 11,
        html(meaning)
    );
}

/// Draws points with a name each: x, y, the name, and whether it is filled. The scale of y is
/// logarithmic; points at 0 are on the axis.
pub fn scatter(across: &str, up: &str, points: &[(f64, f64, String, bool)]) -> String {
    const WIDE: f64 = 620.0;
    const HIGH: f64 = 300.0;
    const LEFT: f64 = 76.0;
    const TOP: f64 = 12.0;
    let above = points.iter().map(|point| point.1).filter(|y| *y > 0.0);
    let lowest = above.clone().fold(1.0, f64::min).log10().floor();
    let highest = above
        .fold(f64::MIN_POSITIVE, f64::max)
        .log10()
        .ceil()
        .max(lowest + 1.0);
    let from = points
        .iter()
        .map(|point| point.0)
        .fold(f64::INFINITY, f64::min)
        .min(1e18);
    let to = points
        .iter()
        .map(|point| point.0)
        .fold(f64::NEG_INFINITY, f64::max)
        .max(from);
    let margin = ((to - from) * 0.05).max(0.5);
    let (from, to) = (from - margin, to + margin);
    let x = |value: f64| LEFT + (value - from) / (to - from) * WIDE;
    let y = |value: f64| {
        let power = if value > 0.0 { value.log10() } else { lowest };
        TOP + (highest - power) / (highest - lowest) * HIGH
    };
    let mut svg = start(up, LEFT + WIDE + 90.0, TOP + HIGH + 44.0);
    let (right, bottom) = (LEFT + WIDE, TOP + HIGH);
    for power in lowest as i32..=highest as i32 {
        let value = 10f64.powi(power);
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {0:.1}H{right}\" stroke=\"#808a99\" stroke-opacity=\".3\"/><text x=\"{1}\" y=\"{2:.1}\" fill=\"#808a99\" text-anchor=\"end\">{value}</text>",
            y(value),
            LEFT - 6.0,
            y(value) + 4.0
        );
    }
    for step in 0..=4 {
        let value = from + (to - from) * f64::from(step) / 4.0;
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" fill=\"#808a99\" text-anchor=\"middle\">{value:.1}</text>",
            x(value),
            bottom + 16.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{}\" y=\"{}\" fill=\"#808a99\" text-anchor=\"middle\">{}</text><text x=\"{}\" y=\"{}\" fill=\"#808a99\">{}</text>",
        LEFT + WIDE / 2.0,
        bottom + 36.0,
        html(across),
        LEFT + 4.0,
        TOP + 10.0,
        html(up)
    );
    for (at_x, at_y, name, is_filled) in points {
        let fill = if *is_filled { "#3573b1" } else { "none" };
        let _ = write!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{fill}\" stroke=\"#3573b1\" stroke-width=\"1.5\"><title>{}: {at_x:.2}, {at_y:.6}</title></circle>",
            x(*at_x),
            y(*at_y),
            html(name)
        );
        if points.len() <= 12 {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"#808a99\">{}</text>",
                x(*at_x) + 8.0,
                y(*at_y) + 4.0,
                html(name)
            );
        }
    }
    svg.push_str("</svg>");
    svg
}

/// Returns the begin of an image.
fn start(label: &str, width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"{}\" font-family=\"system-ui,sans-serif\" font-size=\"11\">",
        html(label)
    )
}

/// Draws the share of the activations against the share of the experts, the most used first.
pub fn coverage_curve(traced: &TraceReport) -> String {
    const SIZE: f64 = 320.0;
    const LEFT: f64 = 44.0;
    const TOP: f64 = 12.0;
    const STEPS: usize = 64;
    let curves: Vec<Vec<f64>> = traced
        .counts
        .layers
        .iter()
        .filter(|layer| layer.activations() > 0)
        .map(|layer| coverage(&layer.experts))
        .collect();
    // The share that the most used part of the experts carries, between whole experts.
    let at = |curve: &Vec<f64>, part: f64| {
        let place = part * curve.len() as f64;
        let below = place.floor() as usize;
        let value = |count: usize| match count {
            0 => 0.0,
            _ => curve[(count - 1).min(curve.len() - 1)],
        };
        value(below) + (value(below + 1) - value(below)) * (place - below as f64)
    };
    let point = |part: f64, share: f64| {
        format!(
            "{:.1},{:.1}",
            LEFT + part * SIZE,
            TOP + (1.0 - share) * SIZE
        )
    };
    let parts = || (0..=STEPS).map(|step| step as f64 / STEPS as f64);
    let line = |of: &dyn Fn(f64) -> f64| -> Vec<String> {
        parts().map(|part| point(part, of(part))).collect()
    };
    let mean = line(&|part| {
        curves.iter().map(|curve| at(curve, part)).sum::<f64>() / curves.len().max(1) as f64
    });
    let highest = line(&|part| curves.iter().map(|c| at(c, part)).fold(0.0, f64::max));
    let mut lowest = line(&|part| curves.iter().map(|c| at(c, part)).fold(1.0, f64::min));
    lowest.reverse();
    let (width, height) = (LEFT + SIZE + 22.0, TOP + SIZE + 40.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"Coverage\" font-family=\"system-ui,sans-serif\" font-size=\"11\">"
    );
    for percent in [0, 25, 50, 75, 100] {
        let part = f64::from(percent) / 100.0;
        let (x, y) = (LEFT + part * SIZE, TOP + (1.0 - part) * SIZE);
        let (right, bottom) = (LEFT + SIZE, TOP + SIZE);
        let _ = write!(
            svg,
            "<path d=\"M{LEFT} {y}H{right}M{x} {TOP}V{bottom}\" stroke=\"#808a99\" stroke-opacity=\".3\"/><text x=\"{}\" y=\"{}\" fill=\"#808a99\" text-anchor=\"end\">{percent} %</text><text x=\"{x}\" y=\"{}\" fill=\"#808a99\" text-anchor=\"middle\">{percent} %</text>",
            LEFT - 6.0,
            y + 4.0,
            bottom + 16.0
        );
    }
    let _ = write!(
        svg,
        "<polygon points=\"{} {}\" fill=\"#3573b1\" fill-opacity=\".25\"/><polyline points=\"{} {}\" fill=\"none\" stroke=\"#808a99\" stroke-dasharray=\"4 4\"/><polyline points=\"{}\" fill=\"none\" stroke=\"#3573b1\" stroke-width=\"2.5\"/><text x=\"{}\" y=\"{}\" fill=\"#808a99\" text-anchor=\"middle\">share of the experts</text></svg>",
        highest.join(" "),
        lowest.join(" "),
        point(0.0, 0.0),
        point(1.0, 1.0),
        mean.join(" "),
        LEFT + SIZE / 2.0,
        TOP + SIZE + 34.0
    );
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_powers_of_two() {
        let found = [0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 40.0].map(colour);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 6]);
        assert_eq!(COLOURS.len(), MEANINGS.len());
        let found = [-9.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5, 2.0, 9.0].map(difference);
        assert_eq!(found, [0, 1, 3, 4, 4, 4, 5, 6, 8, 8]);
    }
}
