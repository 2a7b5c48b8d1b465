//! The speeds that programs print.

use std::sync::LazyLock;

use regex::Regex;
use serde::Serialize;
use serde_json::Value;

/// Tokens and the time that they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Speed {
    pub tokens: u64,
    pub seconds: f64,
}

/// Speeds of prompts and of answers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Speeds {
    pub prompt: Speed,
    pub answer: Speed,
}

impl Speed {
    /// Adds tokens that took further time. What is no time is not counted.
    pub fn add(&mut self, tokens: u64, seconds: f64) {
        if tokens > 0 && seconds.is_finite() && seconds > 0.0 {
            self.tokens += tokens;
            self.seconds += seconds;
        }
    }

    /// Returns tokens per second; `None` without tokens.
    pub fn rate(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.seconds)
    }
}

impl Speeds {
    /// Adds those of a further request.
    pub fn add(&mut self, of: &Speeds) {
        self.prompt.add(of.prompt.tokens, of.prompt.seconds);
        self.answer.add(of.answer.tokens, of.answer.seconds);
    }

    /// Returns whether any tokens have a time.
    pub fn is_known(&self) -> bool {
        self.prompt.tokens + self.answer.tokens > 0
    }

    /// Returns the time of all tokens.
    pub fn seconds(&self) -> f64 {
        self.prompt.seconds + self.answer.seconds
    }

    /// Sums the times of all contexts that libllama has printed: one line for prompts and one for
    /// answers each time. llama-completion and llama-cpp-python print them.
    pub fn in_log(log: &str) -> Speeds {
        static LINE: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(r"(prompt )?eval time *= *([0-9.]+) ms */ *([0-9]+) (?:tokens|runs)")
                .expect("the expression is constant")
        });
        let mut speeds = Speeds::default();
        // The expression alone takes ten seconds for a log of 64 MiB.
        let lines = log.lines().filter(|line| line.contains("eval time"));
        for found in lines.filter_map(|line| LINE.captures(line)) {
            let milliseconds = found[2].parse().unwrap_or(f64::NAN);
            let tokens = found[3].parse().unwrap_or(0);
            let speed = match found.get(1) {
                Some(_) => &mut speeds.prompt,
                None => &mut speeds.answer,
            };
            speed.add(tokens, milliseconds / 1e3);
        }
        speeds
    }

    /// Sums the tests of llama-bench, from its output with `-o json`.
    pub fn of_bench(output: &str) -> Speeds {
        let mut speeds = Speeds::default();
        let parsed: Value = serde_json::from_str(output).unwrap_or_default();
        for test in parsed.as_array().into_iter().flatten() {
            let tokens = |name: &str| test[name].as_u64().unwrap_or(0);
            let (prompt, answer) = (tokens("n_prompt"), tokens("n_gen"));
            let samples = test["samples_ns"].as_array().into_iter().flatten();
            for nanoseconds in samples.filter_map(Value::as_f64) {
                // A test with both has one time for both.
                let speed = match answer {
                    0 => &mut speeds.prompt,
                    _ => &mut speeds.answer,
                };
                speed.add(prompt + answer, nanoseconds / 1e9);
            }
        }
        speeds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(prompt: (u64, f64), answer: (u64, f64)) -> Speeds {
        let speed = |(tokens, seconds)| Speed { tokens, seconds };
        Speeds {
            prompt: speed(prompt),
            answer: speed(answer),
        }
    }

    #[test]
    fn the_times_of_all_contexts_are_summed() {
        let log = "\
llama_perf_context_print:        load time =     300.00 ms
llama_perf_context_print: prompt eval time =     250.00 ms /    10 tokens (   25.00 ms per token,    40.00 tokens per second)
llama_perf_context_print:        eval time =    1000.00 ms /    20 runs   (   50.00 ms per token,    20.00 tokens per second)
llama_perf_context_print:       total time =    1300.00 ms /    30 tokens
common_perf_print: prompt eval time = 250.00 ms / 10 tokens
common_perf_print:        eval time =       0.00 ms /     1 runs
";
        assert_eq!(Speeds::in_log(log), speeds((20, 0.5), (20, 1.0)));
        assert!(!Speeds::in_log("no figures").is_known());
    }

    #[test]
    fn each_test_of_llama_bench_counts() {
        let output = r#"[
            {"n_prompt": 512, "n_gen": 0, "samples_ns": [1000000000, 3000000000]},
            {"n_prompt": 0, "n_gen": 128, "samples_ns": [2000000000]}
        ]"#;
        assert_eq!(Speeds::of_bench(output), speeds((1024, 4.0), (128, 2.0)));
        assert!(!Speeds::of_bench("error").is_known());
    }
}
