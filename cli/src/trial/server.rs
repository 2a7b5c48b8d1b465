//! Requests to a llama-server that was started for them.

use std::ffi::OsString;
use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::prompts::Request;
use super::speeds::Speeds;
use crate::control::server::{reason, text};

/// The largest answer that is read.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Candidates of each token whose log-probabilities are compared.
const CANDIDATES: u32 = 20;

/// A token of an answer, and the likeliest candidates in its place with their log-probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Token {
    pub id: i64,
    pub candidates: Vec<(i64, f64)>,
}

/// An answer to a prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub content: String,
    pub tokens: Vec<Token>,
}

/// A server.
#[derive(Debug, Clone)]
pub struct Client {
    agent: ureq::Agent,
    url: String,
    key: Option<String>,
}

/// Adds the options of llama-server for a port that is free now, and returns it. The last use of an option
/// counts: the port of the command may be that of a server in use.
pub fn listen_elsewhere(words: &mut Vec<OsString>) -> Result<u16> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let free = port.to_string();
    words.extend(["--host", "127.0.0.1", "--port", &free].map(OsString::from));
    Ok(port)
}

impl Client {
    /// Makes a client for an address, such as `http://127.0.0.1:8080`. `key` is the API key of the server.
    pub fn new(url: String, key: Option<String>, timeout: Duration) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_global(Some(timeout));
        Client {
            agent: config.build().into(),
            url,
            key,
        }
    }

    /// Whether the server has loaded its model.
    pub fn is_ready(&self) -> bool {
        let answer = self.agent.get(format!("{}/health", self.url)).call();
        answer.is_ok_and(|answer| answer.status() == 200)
    }

    /// Sends a request. Returns the text of the answer and its speeds; with `compares`, the text has
    /// the log-probabilities of its likeliest tokens, too, which cost time.
    pub fn complete(&self, request: &Request, compares: bool) -> Result<(String, Speeds)> {
        let candidates = if compares { CANDIDATES } else { 0 };
        let parsed = self.post(&request.prompt, request.tokens, candidates, true)?;
        let timings = &parsed["timings"];
        let number = |name: &str| timings[name].as_f64().unwrap_or(0.0);
        let mut speeds = Speeds::default();
        speeds
            .prompt
            .add(number("prompt_n") as u64, number("prompt_ms") / 1e3);
        speeds
            .answer
            .add(number("predicted_n") as u64, number("predicted_ms") / 1e3);
        ensure!(
            parsed["content"].is_string() && speeds.is_known(),
            "the answers of the server have no \"content\" or no \"timings\": use llama-server"
        );
        let mut seen = parsed["content"].to_string();
        if compares {
            seen += &parsed["completion_probabilities"].to_string();
        }
        Ok((seen, speeds))
    }

    /// Returns the answer to a prompt, without keys and values of earlier ones, with the likeliest token at each place.
    pub fn ask(&self, prompt: &str, tokens: u32) -> Result<Answer> {
        let parsed = self.post(prompt, tokens, CANDIDATES, false)?;
        let candidate = |of: &Value| Some((of["id"].as_i64()?, of["logprob"].as_f64()?));
        let token = |of: &Value| {
            Some(Token {
                id: of["id"].as_i64()?,
                // The logarithm of 0 is null.
                candidates: of["top_logprobs"]
                    .as_array()?
                    .iter()
                    .filter_map(candidate)
                    .collect(),
            })
        };
        let tokens = parsed["completion_probabilities"].as_array();
        let tokens = tokens.and_then(|all| all.iter().map(token).collect());
        let content = parsed["content"].as_str().map(str::to_owned);
        let (content, tokens) = content.zip(tokens).context(
            "the answers of the server have no \"content\", or no \"completion_probabilities\" with \"top_logprobs\": use llama-server",
        )?;
        Ok(Answer { content, tokens })
    }

    /// Sends a prompt, and returns what the server replies.
    fn post(&self, prompt: &str, tokens: u32, candidates: u32, goes_on: bool) -> Result<Value> {
        let body = json!({
            "prompt": prompt,
            "n_predict": tokens,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": goes_on,
            "cache_prompt": false,
            "n_probs": candidates,
        });
        let mut post = self.agent.post(format!("{}/completion", self.url));
        if let Some(key) = &self.key {
            post = post.header("Authorization", format!("Bearer {key}"));
        }
        let answer = post
            .header("Content-Type", "application/json")
            .send(body.to_string())
            .with_context(|| format!("the server at {} does not answer", self.url))?;
        let (status, text) = text(answer, LONGEST_ANSWER)?;
        if status != 200 {
            let key = match status.as_u16() {
                401 => "; pass its API key with --api-key or LLAMA_API_KEY",
                _ => "",
            };
            let reason = reason(status, &text);
            bail!("the server refuses a prompt ({status}): {reason}{key}");
        }
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }
}
