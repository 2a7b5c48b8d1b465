//! Metrics of several programs as one page in OpenMetrics (<https://prometheus.io/docs/specs/om/open_metrics_spec/>):
//! each family once, with the samples of all programs, whose sockets are labels.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::LazyLock;

use regex::Regex;
use sidecar_core::text;

/// Whether a program answers.
const UP: &str = "llama_sidecar_up";

/// A sample: its name, its labels and its value. A program may answer anything, and a page with one line that is none
/// is refused as a whole.
static SAMPLE: LazyLock<Regex> = LazyLock::new(|| {
    let label = r#"[a-z_]+="(?:[^"\\]|\\["\\n])*""#;
    let sample = format!(r#"^(llama_sidecar_[a-z0-9_]+)(?:\{{({label}(?:,{label})*)\}})? (\S+)$"#);
    Regex::new(&sample).expect("a pattern")
});
static LABEL: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r#"([a-z_]+)="(?:[^"\\]|\\["\\n])*""#).expect("a pattern"));

/// Families in the order in which they were found.
#[derive(Default)]
pub struct Families {
    families: Vec<Family>,
    /// Each socket, and whether a program answered there.
    up: Vec<(String, bool)>,
}

/// A metric, and what programs report.
struct Family {
    /// Without the ending of counters.
    name: String,
    kind: String,
    help: String,
    samples: String,
    /// Names and labels of the samples.
    known: HashSet<String>,
}

impl Families {
    /// Adds what the program at a socket reports, in Prometheus' text format; `None` if it does not answer.
    pub fn add(&mut self, socket: &str, text: Option<&str>) {
        self.up.push((socket.to_owned(), text.is_some()));
        let label = format!("socket=\"{}\"", text::label(socket));
        let mut help = "";
        let mut family = None;
        let lines = text.unwrap_or_default().lines();
        for line in lines.filter(|line| !line.contains(text::is_hidden)) {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ').map_or("", |(_, help)| help);
            } else if let Some((name, kind)) = line
                .strip_prefix("# TYPE ")
                .and_then(|rest| rest.split_once(' '))
            {
                family = self.family(name, kind, help);
            } else if let (Some(at), false) = (family, line.starts_with('#')) {
                self.families[at].add(line, &label);
            }
        }
    }

    /// Returns the position of a family, which is added if it is new.
    fn family(&mut self, name: &str, kind: &str, help: &str) -> Option<usize> {
        let is_known = ["counter", "gauge", "histogram"].contains(&kind);
        if !is_known || !name.starts_with("llama_sidecar_") || name == UP || name.contains(' ') {
            return None;
        }
        let name = name
            .strip_suffix("_total")
            .filter(|_| kind == "counter")
            .unwrap_or(name);
        let known = self.families.iter().position(|family| family.name == name);
        Some(known.unwrap_or_else(|| {
            self.families.push(Family {
                name: name.into(),
                kind: kind.into(),
                help: help.into(),
                samples: String::new(),
                known: HashSet::new(),
            });
            self.families.len() - 1
        }))
    }

    /// Returns the page.
    pub fn to_text(&self) -> String {
        let mut page = String::new();
        let _ = writeln!(
            page,
            "# TYPE {UP} gauge\n# HELP {UP} Whether a program answers at a socket."
        );
        for (socket, is_up) in &self.up {
            let _ = writeln!(
                page,
                "{UP}{{socket=\"{}\"}} {}",
                text::label(socket),
                u8::from(*is_up)
            );
        }
        for Family {
            name,
            kind,
            help,
            samples,
            ..
        } in &self.families
        {
            let _ = write!(
                page,
                "# TYPE {name} {kind}\n# HELP {name} {help}\n{samples}"
            );
        }
        page + "# EOF\n"
    }
}

impl Family {
    /// Adds a sample with a further label, if it is one of this family.
    fn add(&mut self, line: &str, label: &str) {
        let Some(found) = SAMPLE.captures(line) else {
            return;
        };
        let (name, value) = (&found[1], &found[3]);
        let labels = found.get(2).map_or("", |labels| labels.as_str());
        let names: Vec<&str> = LABEL
            .captures_iter(labels)
            .map(|found| found.extract::<1>().1[0])
            .collect();
        let are_different = names.iter().collect::<HashSet<_>>().len() == names.len();
        let ending = name.strip_prefix(&*self.name);
        let is_own = match (self.kind.as_str(), ending) {
            ("counter", Some("_total")) | ("gauge", Some("")) => true,
            ("histogram", Some("_bucket")) => names.contains(&"le"),
            ("histogram", Some("_sum" | "_count")) => true,
            _ => false,
        };
        if !is_own || !are_different || names.contains(&"socket") || value.parse::<f64>().is_err() {
            return;
        }
        let more = if labels.is_empty() { "" } else { "," };
        let sample = format!("{name}{{{label}{more}{labels}}}");
        if self.known.insert(sample.clone()) {
            let _ = writeln!(self.samples, "{sample} {value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_samples_are_left_out() {
        let text = "garbage\n# TYPE llama_sidecar_up gauge\nllama_sidecar_up 1\n# TYPE x gauge\nx 1\n\
                    # TYPE llama_sidecar_a gauge\nllama_sidecar_a{socket=\"b\"} 1\nllama_sidecar_a x\n\
                    llama_sidecar_a{b=\"1\",b=\"2\"} 1\nllama_sidecar_a_total 1\nllama_sidecar_a 1 # {a=\"b\"} 1\n\
                    llama_sidecar_a{b=\"}\\\"\"} 2\nllama_sidecar_a{b=\"}\\\"\"} 3\n\
                    # TYPE llama_sidecar_c counter\nllama_sidecar_c 1\nllama_sidecar_c_total 4\n\
                    # TYPE llama_sidecar_d unknown\nllama_sidecar_d 1\n";
        let mut families = Families::default();
        families.add("s", Some(text));
        let page = families.to_text();
        let samples: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                "llama_sidecar_up{socket=\"s\"} 1",
                "llama_sidecar_a{socket=\"s\",b=\"}\\\"\"} 2",
                "llama_sidecar_c_total{socket=\"s\"} 4",
            ]
        );
    }

    #[test]
    fn a_family_has_the_samples_of_all_programs() {
        let text = "# HELP llama_sidecar_a_total Number of a.\n# TYPE llama_sidecar_a_total counter\n\
                    llama_sidecar_a_total 1\n# HELP llama_sidecar_b b\n# TYPE llama_sidecar_b gauge\n\
                    llama_sidecar_b{model=\"1\"} 2.5\n";
        let mut families = Families::default();
        families.add("/run/1.sock", Some(text));
        families.add("/run/\"2\".sock", Some(text));
        families.add("/run/3.sock", None);
        assert_eq!(
            families.to_text(),
            "# TYPE llama_sidecar_up gauge\n# HELP llama_sidecar_up Whether a program answers at a socket.\n\
             llama_sidecar_up{socket=\"/run/1.sock\"} 1\nllama_sidecar_up{socket=\"/run/\\\"2\\\".sock\"} 1\n\
             llama_sidecar_up{socket=\"/run/3.sock\"} 0\n\
             # TYPE llama_sidecar_a counter\n# HELP llama_sidecar_a Number of a.\n\
             llama_sidecar_a_total{socket=\"/run/1.sock\"} 1\n\
             llama_sidecar_a_total{socket=\"/run/\\\"2\\\".sock\"} 1\n\
             # TYPE llama_sidecar_b gauge\n# HELP llama_sidecar_b b\n\
             llama_sidecar_b{socket=\"/run/1.sock\",model=\"1\"} 2.5\n\
             llama_sidecar_b{socket=\"/run/\\\"2\\\".sock\",model=\"1\"} 2.5\n# EOF\n"
        );
    }
}
