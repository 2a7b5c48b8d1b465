//! What is requested of a server.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use sidecar_core::{files, text};

/// A text for prompts.
const TEXT: &str = include_str!("prompt.txt");
/// Tokens of the long prompt, at most.
pub const LONGEST: u32 = 512;
/// Words of the short prompt.
const SHORT_WORDS: usize = 24;
/// Tokens of the answer to the long prompt.
const SHORT_ANSWER: u32 = 4;

/// A request for an answer of so many tokens.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: String,
    pub tokens: u32,
}

impl Request {
    /// Returns the first words of the text, again and again, as a request.
    fn of_words(words: usize, tokens: u32) -> Request {
        let all = TEXT.split_whitespace().cycle().take(words);
        Request {
            prompt: all.collect::<Vec<_>>().join(" "),
            tokens,
        }
    }

    fn words(&self) -> usize {
        self.prompt.split(' ').count()
    }

    /// Whether a shorter prompt is worth a request.
    pub fn can_be_shorter(&self) -> bool {
        self.words() > SHORT_WORDS
    }

    /// Returns the request with half of its words.
    pub fn shorter(&self) -> Request {
        Request::of_words(self.words() / 2, self.tokens)
    }
}

/// Returns a prompt of about so many tokens, [`LONGEST`] at most, with a short answer, and a short prompt with an
/// answer of `answer` tokens.
pub fn long_and_short(prompt: u32, answer: u32) -> Vec<Request> {
    // A token is about three quarters of an English word.
    let words = prompt.min(LONGEST) as usize * 3 / 4;
    let words = words.max(1);
    vec![
        Request::of_words(words, SHORT_ANSWER),
        Request::of_words(words.min(SHORT_WORDS), answer),
    ]
}

/// Reads prompts, one in each line.
pub fn read(path: &Path, tokens: u32) -> Result<Vec<Request>> {
    let text =
        files::read_text(path).with_context(|| format!("cannot read {}", text::path(path)))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let requests: Vec<Request> = lines
        .map(|prompt| Request {
            prompt: prompt.into(),
            tokens,
        })
        .collect();
    ensure!(
        !requests.is_empty(),
        "{} has no prompts: write one in each line",
        text::path(path)
    );
    Ok(requests)
}
