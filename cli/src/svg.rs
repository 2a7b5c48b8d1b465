//! The images of a report, as SVG.

use std::fmt::Write;

use llama_sidecar::trace::coverage;

use crate::trace_report::TraceReport;

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

/// Returns the index in [`COLOURS`] for a share over that of even use.
fn colour(ratio: f64) -> usize {
    if ratio <= 0.0 {
        return 0;
    }
    // The middle of "even" is 1: from 0.71 to 1.41.
    (ratio.log2().round() + 4.0).clamp(1.0, 6.0) as usize
}

/// Draws the use of each expert: layers down, experts across.
pub fn heat_map(traced: &TraceReport) -> String {
    const LEFT: usize = 44;
    const TOP: usize = 20;
    let layers = &traced.counts.layers;
    let experts = layers
        .iter()
        .map(|layer| layer.experts.len())
        .max()
        .unwrap_or(0);
    // Wide cells for few experts; for 512 the image is as wide as a large screen.
    let wide = (900 / experts.max(1)).clamp(4, 40);
    let high = (700 / layers.len().max(1)).clamp(9, 22);
    let width = (LEFT + experts * wide + 10).max(460);
    let height = TOP + layers.len() * high + 54;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" aria-label=\"Use of each expert in each layer\" font-family=\"system-ui,sans-serif\" font-size=\"11\"><g fill=\"#808a99\">"
    );
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
    for (row, layer) in layers.iter().enumerate() {
        if row % (11usize.div_ceil(high)) == 0 {
            let y = TOP + row * high + high / 2 + 4;
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{}</text>",
                LEFT - 6,
                layer.layer
            );
        }
    }
    svg.push_str("</g>");
    let gap = usize::from(wide > 6);
    for (row, layer) in layers.iter().enumerate() {
        let all = layer.activations().max(1) as f64;
        let y = TOP + row * high;
        for (expert, &count) in layer.experts.iter().enumerate() {
            let share = count as f64 / all;
            let ratio = share * layer.experts.len() as f64;
            let _ = write!(
                svg,
                "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>layer {}, expert {expert}: {count} ({:.2} %, {ratio:.2} x even)</title></rect>",
                LEFT + expert * wide,
                wide - gap,
                high - 1,
                COLOURS[colour(ratio)],
                layer.layer,
                share * 100.0,
            );
        }
    }
    let y = TOP + layers.len() * high + 16;
    for (at, (colour, meaning)) in COLOURS.iter().zip(MEANINGS).enumerate() {
        let x = LEFT + at * 56;
        let _ = write!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{colour}\" stroke=\"#808a99\"/><text x=\"{}\" y=\"{}\" fill=\"#808a99\">{}</text>",
            x + 18,
            y + 11,
            escape(meaning)
        );
    }
    svg.push_str("</svg>");
    svg
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
    let (width, height) = (LEFT + SIZE + 16.0, TOP + SIZE + 40.0);
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

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    let escaped = |character: char| match character {
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '&' => "&amp;".into(),
        '"' => "&quot;".into(),
        other => other.to_string(),
    };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_powers_of_two() {
        let found = [0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 40.0].map(colour);
        assert_eq!(found, [0, 1, 2, 3, 4, 5, 6, 6]);
        assert_eq!(COLOURS.len(), MEANINGS.len());
    }
}
