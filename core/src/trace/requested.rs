//! What the variables of the trace request: lines on standard error, and a file at the end.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use super::export::to_text;
use super::model_meta::ModelMeta;
use super::snapshot::Snapshot;
use crate::config::{Config, Variable};
use crate::logger::print;
use crate::text;

/// Returns the lines for the start of a trace: what is on; none where no variable turns it on.
pub fn enabled(config: &Config) -> String {
    if !config.traces() {
        return String::new();
    }
    let mut text = String::from("[EXPERT-TRACE] Tracer enabled\n");
    let switches = [
        ("Statistics", config.trace_summary),
        ("Name logging", config.trace_names),
        ("Per-layer", config.trace_per_layer),
    ];
    for (name, _) in switches.iter().filter(|(_, is_on)| *is_on) {
        let _ = writeln!(text, "[EXPERT-TRACE]   {name}: ON");
    }
    let files = [
        ("Output file", &config.trace_output),
        ("Routes", &config.trace_routes),
        ("Saliency", &config.trace_saliency),
    ];
    for (name, path) in files {
        if let Some(path) = path {
            let _ = writeln!(text, "[EXPERT-TRACE]   {name}: {}", text::path(&path.now()));
        }
    }
    text
}

/// Prints the summary of a model at the end of its trace, where the variables request it.
pub fn print_summary(config: &Config, meta: &ModelMeta, snapshot: &Snapshot) {
    if config.trace_summary {
        let (per_layer, most) = (config.trace_per_layer, config.trace_top);
        print(&to_text(meta, snapshot, per_layer, most));
    }
}

/// Logs why the output file could not be written.
pub fn log_unwritten(path: &Path, error: &io::Error) {
    log::error!(
        "{}: cannot write {}: {error}; the counts are lost except for the summary of {}",
        Variable::title_of("LLAMA_EXPERT_TRACE_OUTPUT"),
        text::path(path),
        Variable::title_of("LLAMA_EXPERT_TRACE_STATS")
    );
}

/// Prints that the output file has all counts.
pub fn print_exported(path: &Path) {
    let path = text::path(path);
    print(&format!("[EXPERT-TRACE] Statistics exported to {path}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(variables: &[(&str, &str)]) -> String {
        enabled(&Config::parse(|name| {
            let found = variables.iter().find(|(key, _)| *key == name)?;
            Some(found.1.into())
        }))
    }

    #[test]
    fn the_first_lines_state_what_is_on() {
        let stats = ("LLAMA_EXPERT_TRACE_STATS", "1");
        let output = ("LLAMA_EXPERT_TRACE_OUTPUT", "stats.json");
        let expected = "\
[EXPERT-TRACE] Tracer enabled
[EXPERT-TRACE]   Statistics: ON
[EXPERT-TRACE]   Output file: stats.json
";
        assert_eq!(lines(&[stats, output]), expected);
        let names = ("LLAMA_EXPERT_TRACE_NAMES", "1");
        let expected = "\
[EXPERT-TRACE] Tracer enabled
[EXPERT-TRACE]   Name logging: ON
";
        assert_eq!(lines(&[names]), expected);
        let per_layer = ("LLAMA_EXPERT_TRACE_PER_LAYER", "1");
        let expected = "\
[EXPERT-TRACE] Tracer enabled
[EXPERT-TRACE]   Statistics: ON
[EXPERT-TRACE]   Per-layer: ON
";
        assert_eq!(lines(&[stats, per_layer]), expected);
        assert_eq!(lines(&[]), "");
    }
}
