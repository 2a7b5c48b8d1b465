//! Metrics of several programs as one page in OpenMetrics (<https://prometheus.io/docs/specs/om/open_metrics_spec/>):
//! each family once, with the samples of all programs, whose sockets are labels.

use std::fmt::Write;

/// Whether a program answers.
const UP: &str = "llama_sidecar_up";

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
}

impl Families {
    /// Adds what the program at a socket reports, in Prometheus' text format; `None` if it does not answer.
    pub fn add(&mut self, socket: &str, text: Option<&str>) {
        self.up.push((socket.to_owned(), text.is_some()));
        let label = format!("socket=\"{}\"", escaped(socket));
        let mut help = "";
        let mut family = None;
        for line in text.unwrap_or_default().lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ').map_or("", |(_, help)| help);
            } else if let Some((name, kind)) = line
                .strip_prefix("# TYPE ")
                .and_then(|rest| rest.split_once(' '))
            {
                family = Some(self.family(name, kind, help));
            } else if let (Some(at), false) = (family, line.starts_with('#')) {
                let samples = &mut self.families[at].samples;
                if let Some(line) = labelled(line, &label) {
                    let _ = writeln!(samples, "{line}");
                }
            }
        }
    }

    /// Returns the position of a family, which is added if it is new.
    fn family(&mut self, name: &str, kind: &str, help: &str) -> usize {
        let name = name
            .strip_suffix("_total")
            .filter(|_| kind == "counter")
            .unwrap_or(name);
        let known = self.families.iter().position(|family| family.name == name);
        known.unwrap_or_else(|| {
            self.families.push(Family {
                name: name.into(),
                kind: kind.into(),
                help: help.into(),
                samples: String::new(),
            });
            self.families.len() - 1
        })
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
                escaped(socket),
                u8::from(*is_up)
            );
        }
        for Family {
            name,
            kind,
            help,
            samples,
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

/// Adds a label to a sample: `name{a="b"} 1` or `name 1`.
fn labelled(line: &str, label: &str) -> Option<String> {
    match line.split_once('{') {
        Some((name, rest)) => Some(format!("{name}{{{label},{rest}")),
        None => {
            let (name, value) = line.split_once(' ')?;
            Some(format!("{name}{{{label}}} {value}"))
        }
    }
}

fn escaped(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

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
