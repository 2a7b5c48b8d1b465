//! Requests to a llama-server that was started for them.

use std::ffi::OsString;
use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::prompts::Request;
use super::speeds::Speeds;
use crate::control::server::{reason, text};

/// The largest answer that is read.
const LONGEST_ANSWER: u64 = 64 << 20;
/// Candidates of each token whose log-probabilities are compared.
const CANDIDATES: u32 = 20;

/// A server on this machine.
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
    /// Makes a client for a port of this machine. `key` is the API key of the server.
    pub fn new(port: u16, key: Option<String>, timeout: Duration) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_global(Some(timeout));
        Client {
            agent: config.build().into(),
            url: format!("http://127.0.0.1:{port}"),
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
        let body = json!({
            "prompt": request.prompt,
            "n_predict": request.tokens,
            "temperature": 0,
            "seed": 1,
            "ignore_eos": true,
            "cache_prompt": false,
            "n_probs": if compares { CANDIDATES } else { 0 },
        });
        let mut post = self.agent.post(format!("{}/completion", self.url));
        if let Some(key) = &self.key {
            post = post.header("Authorization", format!("Bearer {key}"));
        }
        let answer = post
            .header("Content-Type", "application/json")
            .send(body.to_string())
            .context("the server does not answer")?;
        let (status, text) = text(answer, LONGEST_ANSWER)?;
        if status != 200 {
            let reason = reason(status, &text);
            bail!("the server refuses a prompt ({status}): {reason}");
        }
        let parsed: Value = serde_json::from_str(&text).unwrap_or_default();
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
}
