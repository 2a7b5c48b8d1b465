//! Slots of a llama-server, emptied through its own API.
//!
//! llama-server keeps its own record of the tokens whose keys and values each slot has
//! cached. Only the server can drop keys, values and record together: the request
//! `POST /slots/N?action=erase` does so, including checkpoints, and waits for a busy slot.
//! Later answers of an erased slot depend only on the weights in use.
//!
//! No request drops the prompts that the server keeps in memory outside its slots
//! (`--cache-ram`), and they return into slots. So a server with such a cache is refused.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use ureq::http::{StatusCode, Uri};

use crate::sizes::time;

/// Size of the largest accepted answer; settings have a few KiB.
const LONGEST_ANSWER: u64 = 16 << 20;
/// The variable with the effect of `--cache-ram`.
const CACHE_RAM: &str = "LLAMA_ARG_CACHE_RAM";

/// The llama-server that runs the model.
#[derive(Default, clap::Args)]
pub struct ServerOptions {
    /// Also empty the slots of the llama-server at this address, so that no answer depends on
    /// keys and values of the old weights. The server must run with --slot-save-path and
    /// --cache-ram 0.
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    /// API key of the server (its --api-key).
    #[arg(
        long,
        value_name = "KEY",
        env = "LLAMA_API_KEY",
        hide_env_values = true,
        requires = "server"
    )]
    api_key: Option<String>,
    /// Longest time to wait for each busy slot.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "10m",
        value_parser = time,
        requires = "server"
    )]
    slot_timeout: Duration,
}

/// A llama-server whose slots can be emptied.
pub struct Server {
    url: String,
    key: Option<String>,
    agent: ureq::Agent,
    slots: u64,
}

impl ServerOptions {
    /// Checks that the server, if one is named, can empty its slots and has no other cache; the
    /// error names the arguments that the server needs. `process` returns the process of the
    /// server. Changes nothing.
    pub fn check(&self, process: impl FnOnce() -> Result<u32>) -> Result<Option<Server>> {
        let Some(url) = &self.server else {
            return Ok(None);
        };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_global(Some(self.slot_timeout));
        let mut server = Server {
            url: address(url)?,
            key: self.api_key.clone(),
            agent: config.build().into(),
            slots: 0,
        };
        server.slots = server.count_slots()?;
        server.ensure_slots_can_be_erased()?;
        ensure_no_prompt_cache(process()?)?;
        Ok(Some(server))
    }
}

/// Returns the address of a server, with its scheme.
pub fn address(text: &str) -> Result<String> {
    let url = text.trim_end_matches('/');
    let url = match url.contains("://") {
        true => url.to_owned(),
        false => format!("http://{url}"),
    };
    // Without a valid port, the request would go to port 80, with the key.
    let parsed: Option<Uri> = url.parse().ok();
    let authority = parsed.as_ref().and_then(Uri::authority);
    ensure!(
        authority.is_some_and(|of| of.as_str().ends_with(of.host()) || of.port_u16().is_some()),
        "{url} is no address of a server: pass one such as http://127.0.0.1:8080"
    );
    Ok(url)
}

impl Server {
    /// Empties all slots, one after the other, and returns their number.
    pub fn erase(&self) -> Result<u64> {
        for slot in 0..self.slots {
            let action = format!("/slots/{slot}?action=erase");
            let (status, answer) = self.post(&action).with_context(|| {
                format!(
                    "slot {slot} of {} was not emptied within --slot-timeout: cancel its request or pass a longer --slot-timeout, then reload again",
                    self.url
                )
            })?;
            ensure!(
                status == StatusCode::OK,
                "slot {slot} of {} was not emptied: {}",
                self.url,
                reason(status, &answer)
            );
        }
        Ok(self.slots)
    }

    fn count_slots(&self) -> Result<u64> {
        let mut request = self.agent.get(format!("{}/props", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let found = request
            .call()
            .map_err(anyhow::Error::from)
            .and_then(|answer| text(answer, LONGEST_ANSWER));
        let (status, answer) =
            found.with_context(|| format!("no llama-server answers at {}", self.url))?;
        if status == StatusCode::UNAUTHORIZED {
            bail!("{} expects its API key: pass it with --api-key", self.url);
        }
        let properties: Value = serde_json::from_str(&answer).unwrap_or_default();
        if properties["role"] == "router" {
            bail!(
                "{} is a router, which starts a llama-server for each model: pass the address of the one with this model; {}/models has its port",
                self.url,
                self.url
            );
        }
        properties["total_slots"].as_u64().with_context(|| {
            format!(
                "{} is not a llama-server with a model: expected \"total_slots\" in /props, found {}",
                self.url,
                reason(status, &answer)
            )
        })
    }

    /// Requests an unknown action: a server that supports actions refuses it as a bad request.
    fn ensure_slots_can_be_erased(&self) -> Result<()> {
        let (status, answer) = self
            .post("/slots/0?action=none")
            .with_context(|| format!("{}/slots does not answer", self.url))?;
        ensure!(
            status == StatusCode::BAD_REQUEST,
            "{} does not support emptying slots ({}): start it with --slot-save-path DIR",
            self.url,
            reason(status, &answer)
        );
        Ok(())
    }

    fn post(&self, path: &str) -> Result<(StatusCode, String)> {
        let mut request = self.agent.post(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        text(request.send_empty()?, LONGEST_ANSWER)
    }
}

/// Returns status and text of an answer of at most so many bytes.
pub fn text(
    mut answer: ureq::http::Response<ureq::Body>,
    longest: u64,
) -> Result<(StatusCode, String)> {
    let status = answer.status();
    let body = answer.body_mut().with_config().limit(longest);
    Ok((status, body.read_to_string()?))
}

/// Returns the message of an answer, or its beginning.
pub fn reason(status: StatusCode, answer: &str) -> String {
    let parsed: Value = serde_json::from_str(answer).unwrap_or_default();
    match parsed["error"]["message"].as_str() {
        Some(message) => message.to_owned(),
        None => format!(
            "{status}, {:?}",
            answer.chars().take(80).collect::<String>()
        ),
    }
}

/// Fails unless a process was started without a prompt cache in memory.
fn ensure_no_prompt_cache(process: u32) -> Result<()> {
    let folder = format!("/proc/{process}");
    let command = std::fs::read(format!("{folder}/cmdline")).with_context(|| {
        format!("cannot read the command line of process {process} to check for --cache-ram 0")
    })?;
    // Variables of another user's process are unreadable; arguments have precedence anyway.
    let variables = std::fs::read(format!("{folder}/environ")).unwrap_or_default();
    match cache_ram(&command, &variables).as_deref() {
        Some("0") => Ok(()),
        found => bail!(
            "process {process} keeps prompts in memory (--cache-ram is {}), with keys and values of the old weights that no request drops: start the process with --cache-ram 0, or reload without --server and send \"cache_prompt\": false with each request",
            found.unwrap_or("its default")
        ),
    }
}

/// Returns the value of `--cache-ram` in a command line and variables, in the format of `/proc`.
fn cache_ram(command: &[u8], variables: &[u8]) -> Option<String> {
    let words: Vec<&OsStr> = command
        .split(|&byte| byte == 0)
        .map(OsStr::from_bytes)
        .collect();
    let pairs = words.windows(2).rev();
    let mut named = pairs.filter(|pair| pair[0] == "--cache-ram" || pair[0] == "-cram");
    if let Some(pair) = named.next() {
        return Some(pair[1].to_string_lossy().into_owned());
    }
    variables.split(|&byte| byte == 0).find_map(|variable| {
        let text = std::str::from_utf8(variable).ok()?;
        let (name, value) = text.split_once('=')?;
        (name == CACHE_RAM).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::cache_ram;

    #[test]
    fn the_last_argument_counts_and_a_variable_where_there_is_none() {
        let found = |command: &str, variables: &str| {
            cache_ram(
                command.replace(' ', "\0").as_bytes(),
                variables.replace(' ', "\0").as_bytes(),
            )
        };
        assert_eq!(found("server -m x", "HOME=/"), None);
        assert_eq!(found("server --cache-ram", ""), None);
        assert_eq!(found("server -cram 0 ", "").as_deref(), Some("0"));
        assert_eq!(
            found("server --cache-ram 0 -cram 64 -m x", "").as_deref(),
            Some("64")
        );
        let variable = "HOME=/ LLAMA_ARG_CACHE_RAM=0 ";
        assert_eq!(found("server -m x ", variable).as_deref(), Some("0"));
        assert_eq!(found("server -cram 1 ", variable).as_deref(), Some("1"));
    }
}
