//! What a server answers to each prompt with each model, learnt under load.
//!
//! The same prompt gets answers that differ in their last bits, and after a while in their
//! words, by what else is in the batch. So there is not one right answer but a set, which
//! is learnt from a server whose file never changes, under the same load.

use std::collections::HashMap;

use testkit::server::Answer;

/// By how many nats a log-probability may leave the range in which it was seen.
pub const TOLERANCE: f64 = 0.02;

/// Log-probabilities of the tokens of a text, each with the least and the most that was seen.
type Ranges = Vec<(f64, f64)>;

/// The answers that were seen, prompt by prompt.
#[derive(Debug, Default)]
pub struct Known {
    prompts: HashMap<usize, HashMap<String, Ranges>>,
}

impl Known {
    /// Takes note of an answer; whether it was not known.
    pub fn learn(&mut self, prompt: usize, answer: &Answer) -> bool {
        let new = !self.contains(prompt, answer);
        let values = log_probabilities(answer);
        let texts = self.prompts.entry(prompt).or_default();
        let ranges = texts
            .entry(answer.text.clone())
            .or_insert_with(|| values.iter().map(|&value| (value, value)).collect());
        for (range, value) in ranges.iter_mut().zip(values) {
            *range = (range.0.min(value), range.1.max(value));
        }
        new
    }

    /// Whether an answer was seen, up to [`TOLERANCE`].
    pub fn contains(&self, prompt: usize, answer: &Answer) -> bool {
        self.distance(prompt, answer)
            .is_some_and(|distance| distance <= TOLERANCE)
    }

    /// By how many nats the log-probabilities of an answer leave the ranges that were seen
    /// with its text; `None` for a text that was not seen.
    pub fn distance(&self, prompt: usize, answer: &Answer) -> Option<f64> {
        let ranges = self.prompts.get(&prompt)?.get(&answer.text)?;
        let values = log_probabilities(answer);
        if ranges.len() != values.len() {
            return None;
        }
        let beyond = ranges
            .iter()
            .zip(values)
            .map(|(&(least, most), value)| (least - value).max(value - most).max(0.0));
        Some(beyond.fold(0.0, f64::max))
    }

    /// Whether no answer to a prompt can be one of `other`'s.
    pub fn is_told_from(&self, other: &Known, prompt: usize) -> bool {
        let none = HashMap::new();
        let texts = |known: &Known| known.prompts.get(&prompt).unwrap_or(&none).clone();
        let theirs = texts(other);
        texts(self).iter().all(|(text, ranges)| {
            let Some(others) = theirs.get(text) else {
                return true;
            };
            let apart = |(mine, other): (&(f64, f64), &(f64, f64))| {
                mine.0 - other.1 > 2.0 * TOLERANCE || other.0 - mine.1 > 2.0 * TOLERANCE
            };
            ranges.len() != others.len() || ranges.iter().zip(others).any(apart)
        })
    }

    /// How many texts were seen.
    pub fn texts(&self) -> usize {
        self.prompts.values().map(HashMap::len).sum()
    }
}

fn log_probabilities(answer: &Answer) -> Vec<f64> {
    let tokens = answer.probabilities.as_array();
    let value = |token: &serde_json::Value| token["logprob"].as_f64();
    tokens.into_iter().flatten().filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use testkit::server::Answer;

    use super::Known;

    fn answer(text: &str, values: &[f64]) -> Answer {
        let tokens: Vec<_> = values
            .iter()
            .map(|value| json!({"logprob": value}))
            .collect();
        Answer {
            text: text.into(),
            probabilities: tokens.into(),
            cached: 0,
        }
    }

    #[test]
    fn what_was_seen_is_known_within_the_tolerance() {
        let mut known = Known::default();
        assert!(known.learn(1, &answer("a b", &[-1.0, -2.0])));
        assert!(!known.learn(1, &answer("a b", &[-1.015, -2.0])));
        // The range has grown.
        assert!(known.contains(1, &answer("a b", &[-1.03, -2.0])));
        assert!(!known.contains(1, &answer("a b", &[-1.03, -2.1])));
        assert!(!known.contains(1, &answer("a b", &[-1.0])));
        assert!(!known.contains(1, &answer("a c", &[-1.0, -2.0])));
        assert!(!known.contains(2, &answer("a b", &[-1.0, -2.0])));
    }

    #[test]
    fn models_are_told_apart_by_text_or_by_one_token() {
        let known = |text: &str, value: f64| {
            let mut known = Known::default();
            known.learn(0, &answer(text, &[-1.0, value]));
            known
        };
        let first = known("a b", -2.0);
        assert!(first.is_told_from(&known("a c", -2.0), 0));
        assert!(first.is_told_from(&known("a b", -2.1), 0));
        assert!(!first.is_told_from(&known("a b", -2.03), 0));
    }
}
