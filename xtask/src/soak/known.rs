//! The answers of a server to each prompt with each model, collected under load.
//!
//! The same prompt can get answers that differ in their last bits, and after a while in
//! their words, by what else is in the batch. So there is not one right answer but a set,
//! which is collected from a server whose file never changes, under the same load. Compared is
//! every bit of the log-probabilities.

use std::collections::{HashMap, HashSet};

use testkit::server::Answer;

/// The answers that were seen, prompt by prompt.
#[derive(Debug, Default)]
pub struct Known(HashMap<usize, HashSet<String>>);

impl Known {
    /// Takes note of an answer; whether it was not known.
    pub fn learn(&mut self, prompt: usize, answer: &Answer) -> bool {
        self.0.entry(prompt).or_default().insert(key(answer))
    }

    /// Whether an answer was seen.
    pub fn contains(&self, prompt: usize, answer: &Answer) -> bool {
        let answers = self.0.get(&prompt);
        answers.is_some_and(|answers| answers.contains(&key(answer)))
    }

    /// Whether no answer to a prompt is one of `other`'s.
    pub fn is_told_from(&self, other: &Known, prompt: usize) -> bool {
        match (self.0.get(&prompt), other.0.get(&prompt)) {
            (Some(mine), Some(others)) => mine.is_disjoint(others),
            _ => false,
        }
    }

    /// How many answers were seen.
    pub fn len(&self) -> usize {
        self.0.values().map(HashSet::len).sum()
    }
}

/// Tokens and log-probabilities, with those of the next best; numbers in JSON have all
/// their digits.
fn key(answer: &Answer) -> String {
    answer.probabilities.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use testkit::server::Answer;

    use super::Known;

    fn answer(log_probability: f64) -> Answer {
        Answer {
            text: " a".into(),
            probabilities: json!([{"token": " a", "logprob": log_probability}]),
            cached: 0,
            evaluated: 1,
        }
    }

    #[test]
    fn the_last_bit_counts() {
        let (mut known, mut other) = (Known::default(), Known::default());
        assert!(known.learn(1, &answer(-1.0)) && !known.learn(1, &answer(-1.0)));
        assert!(known.contains(1, &answer(-1.0)) && !known.contains(2, &answer(-1.0)));
        assert!(!known.contains(1, &answer(-1.0 + f64::EPSILON)));
        assert!(!known.is_told_from(&other, 1), "nothing is known of it");
        other.learn(1, &answer(-1.0 + f64::EPSILON));
        assert!(known.is_told_from(&other, 1));
        other.learn(1, &answer(-1.0));
        assert!(!known.is_told_from(&other, 1));
        assert_eq!((known.len(), other.len()), (1, 2));
    }
}
