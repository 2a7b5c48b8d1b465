//! The statistics that llama-perplexity prints.

use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde::{Deserialize, Serialize};

/// A difference of so many standard errors counts.
const ERRORS: f64 = 2.0;

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
    /// Returns the mean of values and its standard error; `None` of less than two.
    pub fn of(values: &[f64]) -> Option<Figure> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares = values.iter().map(|value| (value - mean) * (value - mean));
        let variance = squares.sum::<f64>() / (count - 1.0);
        let error = (variance / count).sqrt();
        (values.len() > 1).then_some(Figure { mean, error })
    }

    /// Returns whether a divergence is no more than that of rounding, as far as the errors show.
    pub fn is_within(&self, rounding: &Figure) -> bool {
        self.mean <= rounding.mean || self.is_equal_to(rounding)
    }

    /// Returns whether the difference of two figures is within two standard errors.
    pub fn is_equal_to(&self, other: &Figure) -> bool {
        // Not `hypot`: its symbol needs glibc 2.35.
        let error = (self.error * self.error + other.error * other.error).sqrt();
        (self.mean - other.mean).abs() <= ERRORS * error
    }
}

/// Returns the divergence of each chunk from the lines of an evaluation: a line has the mean of its chunk and of all
/// before it, with five digits after the point.
pub fn of_chunks(output: &str) -> Vec<f64> {
    let mut sum = 0.0;
    let mut chunks = Vec::new();
    for line in output.lines() {
        // The number of the chunk, then means and errors: of the perplexity, its logarithm, and the divergence.
        let mut means = line
            .split('±')
            .map(|part| part.split_whitespace().next_back());
        let number = line
            .split_whitespace()
            .next()
            .and_then(|of| of.parse().ok());
        let mean = means.nth(2).flatten().and_then(|of| of.parse::<f64>().ok());
        let count = chunks.len() + 1;
        if let Some(mean) = mean.filter(|_| number == Some(count)) {
            let total = mean * count as f64;
            chunks.push(total - sum);
            sum = total;
        }
    }
    chunks
}

/// Returns whether the mean of the differences between chunks is smaller than zero by more than two of its standard errors.
///
/// Both evaluations are of the same text. What the text does to both is not in the differences, so that these have smaller
/// errors than the divergences.
pub fn is_smaller(chunks: &[f64], than: &[f64]) -> bool {
    let pairs = chunks.iter().zip(than);
    let differences: Vec<f64> = pairs.map(|(one, other)| one - other).collect();
    let difference = Figure::of(&differences).filter(|_| chunks.len() == than.len());
    difference.is_some_and(|of| of.mean < -ERRORS * of.error)
}

impl Statistics {
    /// Returns cells of a table: the divergence with its error, the same top tokens, and the perplexity.
    pub fn cells(&self) -> [String; 3] {
        [
            // Rounding makes it a little smaller than zero.
            format!("{:.6} ± {:.6}", self.kld.mean.max(0.0), self.kld.error),
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
            let found = found.context("the output has no statistics of the divergence")?;
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
    fn chunks_are_compared_in_pairs() {
        let lines = "\
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p
   1      31.9381 ±   14.7254       0.00900 ±    0.02531       0.01899 ±    0.00234     3.520 ±  0.544 %    88.889 ±  3.991 %
   2      26.1648 ±    8.4881       0.01792 ±    0.01655       0.01569 ±    0.00157     3.295 ±  0.376 %    90.476 ±  2.626 %
   3      24.2935 ±    6.1426       0.01185 ±    0.01252       0.01409 ±    0.00127     3.070 ±  0.302 %    91.534 ±  2.030 %
";
        let chunks = of_chunks(&format!("load: 1 ± 2 ± 3 ± 4\n{lines}{OUTPUT}"));
        let expected = [0.01899, 0.01239, 0.01089];
        assert!(chunks.len() == 3, "{chunks:?}");
        let close = |(one, other): (&f64, &f64)| (one - other).abs() < 1e-9;
        assert!(chunks.iter().zip(&expected).all(close), "{chunks:?}");
        // The chunks differ more from each other than each one from its pair.
        let less: Vec<f64> = chunks.iter().map(|of| of - 0.001).collect();
        assert!(is_smaller(&less, &chunks) && !is_smaller(&chunks, &less));
        assert!(!is_smaller(&chunks, &chunks));
        assert!(
            !is_smaller(&[0.0, 0.02, 0.02], &chunks),
            "within the errors"
        );
        assert!(
            !is_smaller(&less[..1], &chunks[..1]),
            "one chunk has no error"
        );
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
