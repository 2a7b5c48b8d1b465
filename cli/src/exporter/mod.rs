//! `llama-sidecar ctl metrics --listen`: the metrics of several programs, for Prometheus.
//!
//! | module | contents |
//! |---|---|
//! | [`families`] | metrics of several programs, as one page |

mod families;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sidecar_core::protocol::{Metrics, Request};
use sidecar_core::text;

use crate::control;
use crate::exporter::families::Families;
use crate::http::{self, Answer};

/// The type of a page in OpenMetrics.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How long a program may take to answer; Prometheus waits for ten seconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Serves the metrics of all programs whose sockets match, until the process ends.
pub fn serve(address: SocketAddr, patterns: &[String]) -> Result<()> {
    for pattern in patterns {
        glob::Pattern::new(pattern)
            .with_context(|| format!("--socket {pattern}: this is no pattern"))?;
    }
    let listener = http::listen(address)?;
    eprintln!(
        "metrics of {} at {}/metrics",
        patterns.join(", "),
        listener.local_addr()?
    );
    http::serve(&listener, |request| {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/metrics") => Answer::of(CONTENT_TYPE, page(patterns)),
            ("GET", _) => Answer::refused("404 Not Found", "the only page is /metrics"),
            _ => Answer::refused("405 Method Not Allowed", "only GET is answered"),
        }
    })
}

/// Returns the metrics of the programs whose sockets match now.
fn page(patterns: &[String]) -> String {
    let sockets = sockets(patterns);
    // At once: Prometheus waits for all of them together.
    let texts: Vec<_> = std::thread::scope(|scope| {
        let asked = sockets.iter().map(|socket| {
            let ask = std::thread::Builder::new();
            ask.spawn_scoped(scope, || metrics(socket).ok())
        });
        let asked: Vec<_> = asked.collect();
        let answers = asked.into_iter();
        answers
            .map(|thread| thread.ok()?.join().ok().flatten())
            .collect()
    });
    let mut families = Families::default();
    for (socket, text) in sockets.iter().zip(texts) {
        families.add(&text::path(socket), text.as_deref());
    }
    families.to_text()
}

fn sockets(patterns: &[String]) -> Vec<PathBuf> {
    let found = patterns
        .iter()
        .filter_map(|pattern| glob::glob(pattern).ok());
    let mut sockets: Vec<PathBuf> = found.flatten().filter_map(Result::ok).collect();
    // A path without wildcards is a program that should run.
    let plain = patterns
        .iter()
        .filter(|pattern| !pattern.contains(['*', '?', '[']));
    sockets.extend(plain.map(PathBuf::from));
    sockets.sort();
    sockets.dedup();
    sockets
}

fn metrics(socket: &Path) -> Result<String> {
    let answer = control::ask_within(socket, &Request::Metrics, PATIENCE)?;
    ensure!(answer["ok"] == true, "it refuses");
    Ok(control::parsed::<Metrics>(&answer)?.text)
}

#[cfg(test)]
mod tests {
    use regex::Regex;
    use sidecar_core::protocol::Metric;

    /// The examples for Prometheus and Grafana name metrics that exist.
    #[test]
    fn examples_name_metrics() {
        const ALERTS: &str = include_str!("../../../packaging/examples/prometheus-alerts.yml");
        const DASHBOARD: &str = include_str!("../../../packaging/examples/grafana-dashboard.json");
        let known: Vec<&str> = Metric::all().iter().map(|metric| metric.name).collect();
        let name = Regex::new(r"llama_sidecar_(\w+)").expect("a pattern");
        for (file, least) in [(ALERTS, 5), (DASHBOARD, 10)] {
            let mut names: Vec<&str> = name
                .captures_iter(file)
                .map(|found| found.get(1).expect("a group").as_str())
                .collect();
            names.sort_unstable();
            names.dedup();
            assert!(names.len() >= least, "{names:?}");
            for name in names {
                let family = name.trim_end_matches("_bucket");
                assert!(name == "up" || known.contains(&family), "{name}");
            }
        }
        let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("JSON");
        assert!(
            dashboard["panels"]
                .as_array()
                .is_some_and(|panels| panels.len() >= 10)
        );
    }
}
