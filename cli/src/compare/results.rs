//! What the runs of a comparison show.

use serde::Serialize;

use crate::evaluation::statistics::Figure;
use crate::trial::Run;

/// 97.5 % quantiles of Student's t distribution, by degrees of freedom from 1 on.
const QUANTILES: [f64; 20] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
];
/// The error from which on nothing is known about a difference.
const LARGE_ERROR: f64 = 0.1;
/// Runs of each way before a difference is known.
pub const LEAST_ROUNDS: usize = 3;

/// How many times as fast one is as another, with the half-width of a confidence interval of 95 %.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ratio {
    pub mean: f64,
    pub error: f64,
}

impl Ratio {
    /// Returns the ratio of pairs that were measured one after the other; `None` of less than two.
    pub fn of(pairs: &[(f64, f64)]) -> Option<Ratio> {
        let logs: Vec<f64> = pairs.iter().map(|(of, to)| (of / to).ln()).collect();
        let (mean, error) = mean_and_error(&logs)?;
        Some(Ratio {
            mean: mean.exp(),
            error: mean.exp() * error,
        })
    }

    /// Whether it is certainly above 1, or certainly below.
    pub fn differs(&self) -> bool {
        (self.mean - 1.0).abs() > self.error
    }

    /// Whether its error is small: against the difference, or below `precision`.
    pub fn is_known(&self, precision: f64) -> bool {
        self.error <= precision.max((self.mean - 1.0).abs() / 4.0)
    }

    /// Returns it as text.
    pub fn text(&self) -> String {
        format!("{:.2}x ±{:.2}", self.mean, self.error)
    }
}

/// Returns the mean and the half-width of its confidence interval of 95 %; `None` of less than two.
pub fn mean_and_error(values: &[f64]) -> Option<(f64, f64)> {
    let Figure { mean, error } = Figure::of(values)?;
    let freedom = values.len() - 2;
    let quantile = QUANTILES[freedom.min(QUANTILES.len() - 1)];
    Some((mean, quantile * error))
}

/// Whether the logits of a way are those of the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Logits {
    /// All are, bit for bit.
    Equal { evaluations: usize },
    /// All are those of the program with an option that turns other kernels off.
    EqualWith { evaluations: usize, option: String },
    /// They differ.
    Different { what: String },
    /// The program does not compute the same twice, so that nothing is known.
    Unknown { why: String },
}

/// What a run of the program computed.
pub struct Computed {
    /// A line for each evaluation.
    pub hashes: Vec<String>,
    /// What its output shows of that; `None` where two runs have different outputs.
    pub output: Option<String>,
}

impl Logits {
    /// Compares what a way computed with what the program computed.
    pub fn compare(way: &Computed, stock: &Computed) -> Logits {
        let evaluations = stock.hashes.len();
        let pairs = way.hashes.iter().zip(&stock.hashes);
        let first = pairs.enumerate().find(|(_, (of, to))| of != to);
        let what = match first {
            Some((at, _)) => format!("evaluation {} of {evaluations}", at + 1),
            None if way.hashes.len() != evaluations => {
                format!("{} evaluations in place of {evaluations}", way.hashes.len())
            }
            None => match (&way.output, &stock.output) {
                (Some(of), Some(to)) if of != to => "the output".into(),
                _ => return Logits::Equal { evaluations },
            },
        };
        Logits::Different { what }
    }

    /// Whether results do not change.
    pub fn is_equal(&self) -> bool {
        matches!(self, Logits::Equal { .. } | Logits::EqualWith { .. })
    }

    /// Returns it as text.
    pub fn text(&self) -> String {
        match self {
            Logits::Equal { evaluations } => format!("equal ({evaluations})"),
            Logits::EqualWith {
                evaluations,
                option,
            } => format!("equal ({evaluations}) to {option}"),
            Logits::Different { what } => format!("DIFFERENT: {what}"),
            Logits::Unknown { why } => format!("unknown: {why}"),
        }
    }
}

/// A way to run the program, and what it did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Way {
    /// The options of `run`; none for the program alone.
    pub flags: Vec<String>,
    /// Why it has no effect, if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
    /// Its logits against those of the program alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<Logits>,
    /// Its runs; the program alone had a run before or after each.
    pub runs: Vec<Run>,
}

/// How a way compares with the program alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Tokens per second of prompts.
    pub prompt: Option<Ratio>,
    /// Tokens per second of answers.
    pub answer: Option<Ratio>,
    /// The time of the same work: of all tokens, or of the run where that is not known.
    pub work: Option<Ratio>,
}

/// What follows from the runs of a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Use,
    Leave,
    /// No difference is known.
    Unclear,
    /// It changes results.
    Never,
    NoEffect,
}

impl Way {
    pub fn new(flags: Vec<String>) -> Way {
        Way {
            flags,
            obstacle: None,
            logits: None,
            runs: Vec::new(),
        }
    }

    /// Returns the name of the way.
    pub fn name(&self) -> String {
        match self.flags.is_empty() {
            true => "the program alone".into(),
            false => self.flags.join(" "),
        }
    }

    /// Whether it is worth measuring.
    pub fn is_measured(&self) -> bool {
        let differs = matches!(self.logits, Some(Logits::Different { .. }));
        self.obstacle.is_none() && !differs
    }

    /// Compares it with the program alone: the runs of the same round with each other.
    pub fn difference(&self, stock: &Way) -> Difference {
        let ratio = |of: &dyn Fn(&Run) -> Option<f64>| {
            let rounds = self.runs.iter().zip(&stock.runs);
            let pairs = rounds.map(|(way, stock)| of(way).zip(of(stock)));
            Ratio::of(&pairs.collect::<Option<Vec<_>>>()?)
        };
        Difference {
            prompt: ratio(&|run| run.speeds.prompt.rate()),
            answer: ratio(&|run| run.speeds.answer.rate()),
            work: ratio(&|run| Some(1.0 / run.work_seconds())),
        }
    }

    pub fn verdict(&self, stock: &Way) -> Verdict {
        match (&self.obstacle, &self.logits) {
            (Some(_), _) => return Verdict::NoEffect,
            (_, Some(Logits::Different { .. })) => return Verdict::Never,
            _ => {}
        }
        match self.difference(stock).work {
            Some(work) if self.runs.len() >= LEAST_ROUNDS && work.differs() => {
                match work.mean > 1.0 {
                    true => Verdict::Use,
                    false => Verdict::Leave,
                }
            }
            _ => Verdict::Unclear,
        }
    }

    /// Whether its runs are too few, or too different, to know anything.
    pub fn may_differ(&self, stock: &Way) -> bool {
        let work = self.difference(stock).work;
        self.verdict(stock) == Verdict::Unclear
            && !self.runs.is_empty()
            && work.is_none_or(|work| work.error > LARGE_ERROR)
    }

    /// Returns the verdict in a sentence.
    pub fn sentence(&self, stock: &Way) -> String {
        let name = self.name();
        let Difference {
            prompt,
            answer,
            work,
        } = self.difference(stock);
        let rounds = self.runs.len();
        let parts = [("prompts", prompt), ("answers", answer)];
        let parts = parts.iter().filter_map(|(what, ratio)| {
            let ratio = ratio.as_ref()?;
            Some(format!("{what} {}", ratio.text()))
        });
        let speeds = parts.collect::<Vec<_>>().join(", ");
        let work = work.map_or("not known".into(), |work| work.text());
        let figures = match speeds.is_empty() {
            true => work,
            false => format!("{work}: {speeds}"),
        };
        let logits = match &self.logits {
            Some(Logits::Unknown { why }) => {
                format!("; whether logits are equal is not known: {why}")
            }
            Some(Logits::EqualWith { option, .. }) => {
                format!("; logits are those of the program with {option}")
            }
            Some(_) => "; every logit is equal".into(),
            None => "; logits were not compared".into(),
        };
        match self.verdict(stock) {
            Verdict::Use => {
                format!("use {name}: the program is faster with it ({figures}){logits}")
            }
            Verdict::Leave => format!("leave {name}: the program is slower with it ({figures})"),
            Verdict::Unclear if rounds == 0 => format!("leave {name}: it was not measured"),
            Verdict::Unclear if self.may_differ(stock) => format!(
                "{name} may be faster or slower, {rounds} rounds do not show it: pass a longer --time ({figures}){logits}"
            ),
            Verdict::Unclear => {
                format!("leave {name}: {rounds} rounds show no difference ({figures}){logits}")
            }
            Verdict::Never => format!(
                "do not use {name}: it changes results ({}); report this with the file of the comparison",
                self.logits.as_ref().map(Logits::text).unwrap_or_default()
            ),
            Verdict::NoEffect => format!(
                "leave {name}: it has no effect here: {}",
                self.obstacle.as_deref().unwrap_or_default()
            ),
        }
    }
}

/// Whether more rounds would show no more: each difference has a small error.
pub fn is_known(ways: &[Way], stock: &Way, precision: f64) -> bool {
    stock.runs.len() >= LEAST_ROUNDS
        && ways.iter().filter(|way| way.is_measured()).all(|way| {
            let Difference {
                prompt,
                answer,
                work,
            } = way.difference(stock);
            let known = [prompt, answer, work].into_iter().flatten();
            known.clone().count() > 0 && known.into_iter().all(|of| of.is_known(precision))
        })
}

/// Returns the way with which the program is fastest, if one is to be used.
pub fn best<'a>(ways: &'a [Way], stock: &Way) -> Option<&'a Way> {
    let speed = |way: &Way| way.difference(stock).work.map_or(1.0, |work| work.mean);
    let useful = ways.iter().filter(|way| {
        way.verdict(stock) == Verdict::Use && way.logits.as_ref().is_some_and(Logits::is_equal)
    });
    useful.max_by(|one, other| speed(one).total_cmp(&speed(other)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::speeds::{Speed, Speeds};

    fn run(prompt_rate: f64, answer_rate: f64) -> Run {
        let speed = |rate: f64| Speed {
            tokens: 100,
            seconds: 100.0 / rate,
        };
        Run {
            speeds: Speeds {
                prompt: speed(prompt_rate),
                answer: speed(answer_rate),
            },
            ..Run::default()
        }
    }

    fn way(flags: &[&str], logits: Option<Logits>, runs: &[(f64, f64)]) -> Way {
        Way {
            logits,
            runs: runs
                .iter()
                .map(|(prompt, answer)| run(*prompt, *answer))
                .collect(),
            ..Way::new(flags.iter().map(|flag| (*flag).to_owned()).collect())
        }
    }

    const EQUAL: Option<Logits> = Some(Logits::Equal { evaluations: 7 });

    #[test]
    fn a_ratio_has_the_error_of_students_distribution() {
        // Logarithms 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), quantile 4.303.
        let pairs = [0.1f64, 0.2, 0.3].map(|log| (log.exp(), 1.0));
        let ratio = Ratio::of(&pairs).expect("three pairs");
        assert!((ratio.mean - 0.2f64.exp()).abs() < 1e-12);
        let expected = 0.2f64.exp() * 4.303 * 0.1 / 3f64.sqrt();
        assert!((ratio.error - expected).abs() < 1e-9, "{ratio:?}");
        assert_eq!(Ratio::of(&pairs[..1]), None);
    }

    #[test]
    fn what_is_faster_with_equal_logits_is_to_be_used() {
        let stock = way(&[], None, &[(100.0, 10.0), (101.0, 10.1), (99.0, 9.9)]);
        let faster = [(200.0, 20.0), (203.0, 20.2), (198.0, 19.8)];
        let good = way(&["--stream-experts"], EQUAL, &faster);
        let Ratio { mean, error } = good.difference(&stock).work.expect("a ratio");
        assert!((mean - 2.0).abs() < 0.01 && error < 0.03, "{mean} {error}");
        assert_eq!(good.verdict(&stock), Verdict::Use);
        let sentence = good.sentence(&stock);
        assert!(
            sentence.starts_with("use --stream-experts: the program is faster"),
            "{sentence}"
        );
        assert!(sentence.contains("2.00x") && sentence.ends_with("every logit is equal"));

        let changed = Some(Logits::Different {
            what: "evaluation 3 of 7".into(),
        });
        let wrong = way(&["--post-fetch"], changed, &[(400.0, 40.0); 3]);
        assert_eq!(wrong.verdict(&stock), Verdict::Never);
        assert!(wrong.sentence(&stock).contains("evaluation 3 of 7"));
        assert!(!wrong.is_measured());

        let slower = way(
            &["--page-lock"],
            EQUAL,
            &[(50.0, 5.0), (50.0, 5.1), (50.0, 5.2)],
        );
        assert_eq!(slower.verdict(&stock), Verdict::Leave);
        let same = way(
            &["--hotswap"],
            EQUAL,
            &[(99.0, 10.2), (102.0, 9.9), (100.0, 10.0)],
        );
        assert_eq!(same.verdict(&stock), Verdict::Unclear);
        let few = way(&["--hotswap"], EQUAL, &faster[..2]);
        assert_eq!(few.verdict(&stock), Verdict::Unclear);
        let none = way(&["--hotswap"], None, &[]);
        assert_eq!(
            none.sentence(&stock),
            "leave --hotswap: it was not measured"
        );
        let not_compared = way(&["--hotswap"], None, &faster);
        let sentence = not_compared.sentence(&stock);
        assert!(sentence.ends_with("logits were not compared"), "{sentence}");

        let ways = [wrong, slower, same, good];
        assert_eq!(best(&ways, &stock), Some(&ways[3]));
        assert_eq!(best(&ways[..3], &stock), None);
        assert!(is_known(&ways[3..], &stock, 0.03));
        let short = way(&[], None, &[(100.0, 10.0), (101.0, 10.1)]);
        assert!(!is_known(&[few], &short, 0.03));
    }

    #[test]
    fn the_first_evaluation_that_differs_is_named() {
        let computed = |hashes: &[&str], output: &str| Computed {
            hashes: hashes.iter().map(|hash| (*hash).to_owned()).collect(),
            output: Some(output.into()),
        };
        let stock = computed(&["a", "b", "c"], "text");
        let what = |way: &Computed| match Logits::compare(way, &stock) {
            Logits::Different { what } => what,
            other => panic!("{other:?}"),
        };
        let same = computed(&["a", "b", "c"], "text");
        assert_eq!(
            Logits::compare(&same, &stock),
            Logits::Equal { evaluations: 3 }
        );
        assert_eq!(
            what(&computed(&["a", "x", "c"], "text")),
            "evaluation 2 of 3"
        );
        assert_eq!(
            what(&computed(&["a", "b"], "text")),
            "2 evaluations in place of 3"
        );
        assert_eq!(what(&computed(&["a", "b", "c"], "other")), "the output");
    }
}
