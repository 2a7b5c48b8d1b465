//! The statistics that llama-perplexity prints.

use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::{Deserialize, Serialize};

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub mean: f64,
    pub error: f64,
}

/// What one evaluation shows, against the base logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Kullback-Leibler divergence.
    pub kld: Figure,
    /// Share of the tokens whose most likely candidate is the same, in percent.
    pub same_top: Figure,
    /// Perplexity.
    pub ppl: Figure,
}

impl Figure {
    /// Returns whether the difference of two figures is within two standard errors.
    pub fn is_equal_to(&self, other: &Figure) -> bool {
        // Not `hypot`: its symbol needs glibc 2.35.
        let error = (self.error * self.error + other.error * other.error).sqrt();
        (self.mean - other.mean).abs() <= 2.0 * error
    }
}

impl Statistics {
    /// Returns cells of a table: the divergence with its error, the same top tokens, and the perplexity.
    pub fn cells(&self) -> [String; 3] {
        [
            format!("{:.6} ± {:.6}", self.kld.mean, self.kld.error),
            format!("{:.2} %", self.same_top.mean),
            format!("{:.4}", self.ppl.mean),
        ]
    }

    /// Finds the statistics in the output of one evaluation.
    pub fn parse(output: &str) -> Result<Statistics> {
        static LINES: LazyLock<[Regex; 3]> = LazyLock::new(|| {
            ["Mean +KLD: *", "Same top p: *", r"Mean PPL\(Q\) *: *"].map(|name| {
                let figure = format!(r"{name}(\S+) ± +(\S+)");
                Regex::new(&figure).expect("the expression is constant")
            })
        });
        let find = |regex: &Regex| {
            // The last one: a program may print an earlier evaluation.
            let found = regex.captures_iter(output).last();
            let found = found.context(
                "the output has no statistics of the divergence: use a text of at least one chunk more, and see the log",
            )?;
            let number = |at| {
                let text = found.get(at).map_or("", |found| found.as_str());
                let number: Option<f64> = text.parse().ok().filter(|of: &f64| of.is_finite());
                number.with_context(|| {
                    format!(
                        "'{}' is not a finite number",
                        found.get(0).map_or("", |matched| matched.as_str())
                    )
                })
            };
            Ok::<_, anyhow::Error>(Figure {
                mean: number(1)?,
                error: number(2)?,
            })
        };
        let [kld, same_top, ppl] = &*LINES;
        let found = Statistics {
            kld: find(kld)?,
            same_top: find(same_top)?,
            ppl: find(ppl)?,
        };
        ensure!(
            found.ppl.mean > 0.0,
            "a perplexity of {} is not possible",
            found.ppl.mean
        );
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
====== Perplexity statistics ======
Mean PPL(Q)                   :  95.049230 ±   4.861047
Mean PPL(base)                :  91.638086 ±   4.658010
====== KL divergence statistics ======
Mean    KLD:   0.025389 ±   0.000571
Maximum KLD:   0.500000
Same top p: 90.588 ± 0.647 %
";

    #[test]
    fn the_last_statistics_count() {
        let later = OUTPUT.replace("0.025389", "-0.000000");
        let found = Statistics::parse(&format!("{OUTPUT}{later}")).expect("statistics");
        let figure = |mean, error| Figure { mean, error };
        assert_eq!(found.kld, figure(0.0, 0.000571));
        assert_eq!(found.same_top, figure(90.588, 0.647));
        assert_eq!(found.ppl, figure(95.04923, 4.861047));
    }

    #[test]
    fn missing_and_infinite_figures_are_errors() {
        assert!(Statistics::parse("").is_err());
        assert!(Statistics::parse(&OUTPUT.replace("0.025389", "nan")).is_err());
    }

    #[test]
    fn figures_within_their_errors_are_equal() {
        let figure = |mean| Figure { mean, error: 3.0 };
        assert!(figure(1.0).is_equal_to(&figure(9.0)));
        assert!(!figure(1.0).is_equal_to(&figure(10.0)));
    }
}
