//! `llama-sidecar ask`: answers of a running llama-server, before and after a change.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sidecar_core::files;
use sidecar_core::protocol::{Request, Status};
use sidecar_core::text;

use crate::control::{self, Control, server};
use crate::evaluation::statistics::Figure;
use crate::output::Outputs;
use crate::print::stdout;
use crate::trial::prompts;
use crate::trial::server::{Answer, Client, Token};
use crate::words::quoted;

/// What a file of answers starts with, and its kind.
const START: &str = "{\"llama_sidecar\":\"answers\"";
const KIND: &str = "answers";
/// The characters of a prompt or an answer that are shown.
const SHOWN: usize = 60;

/// A server, and what is asked.
#[derive(clap::Args)]
pub struct AskOptions {
    /// Address of a llama-server. By default that of the program with the socket.
    url: Option<String>,
    /// A file with prompts, one in each line. By default those of --against.
    #[arg(long, value_name = "FILE", required_unless_present = "against")]
    prompts: Option<PathBuf>,
    /// Compare with the answers of this file, which -o has written.
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
    /// Tokens of each answer, at most.
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: u32,
    /// Write the answers to a file.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// API key of the server (its --api-key).
    #[arg(
        long,
        value_name = "KEY",
        env = "LLAMA_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    #[command(flatten)]
    at: Control,
}

/// The answers to prompts.
#[derive(Debug, Serialize, Deserialize)]
struct Answers {
    llama_sidecar: String,
    tokens: u32,
    answers: Vec<Asked>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Asked {
    prompt: String,
    #[serde(flatten)]
    answer: Answer,
}

/// How an answer differs from an earlier one.
#[derive(Debug, PartialEq, Serialize)]
struct Difference {
    /// The number of tokens before the first one that differs, or of all.
    same_tokens: usize,
    is_same: bool,
    /// Whether all candidates have the same log-probabilities, too.
    is_exact: bool,
    /// Of each token up to the first one that differs: whether the same token is the likeliest, and the divergence.
    same_top: Vec<bool>,
    divergence: Vec<f64>,
}

/// Asks, and compares if earlier answers are named.
pub fn run(options: &AskOptions) -> Result<()> {
    if let Some(path) = &options.output {
        options.outputs.check(path, START)?;
    }
    let before = options.against.as_deref().map(read).transpose()?;
    let tokens = before.as_ref().map_or(options.tokens, |of| of.tokens);
    let prompts: Vec<String> = match (&options.prompts, &before) {
        (Some(path), _) => {
            let requests = prompts::read(path, tokens)?.into_iter();
            requests.map(|request| request.prompt).collect()
        }
        (None, Some(before)) => before.answers.iter().map(|of| of.prompt.clone()).collect(),
        (None, None) => bail!("no prompts: pass --prompts FILE"),
    };
    let earlier: Vec<Option<&Asked>> = prompts.iter().map(|prompt| find(&before, prompt)).collect();
    if let (Some(path), Some(at)) = (&options.against, earlier.iter().position(Option::is_none)) {
        bail!(
            "{} has no answer to the prompt '{}'",
            text::path(path),
            shown(&prompts[at])
        );
    }
    let url = match &options.url {
        Some(url) => server::address(url)?,
        None => address_of_program(&options.at)?,
    };
    let client = Client::new(url, options.api_key.clone(), options.at.limit.of_answer());
    let mut answers = Vec::new();
    for prompt in prompts {
        let answer = client.ask(&prompt, tokens)?;
        answers.push(Asked { prompt, answer });
    }
    let answers = Answers {
        llama_sidecar: KIND.into(),
        tokens,
        answers,
    };
    if let Some(path) = &options.output {
        let json = serde_json::to_string_pretty(&answers)? + "\n";
        options.outputs.write(path, &json)?;
    }
    let pairs: Vec<(&Asked, Option<&Asked>)> = answers.answers.iter().zip(earlier).collect();
    print(&pairs, options.at.json)?;
    if let Some(path) = options.output.as_ref().filter(|_| !options.at.json) {
        println!(
            "the answers are in {}; compare later ones with: llama-sidecar ask --against {}",
            text::path(path),
            quoted(path.as_os_str())
        );
    }
    Ok(())
}

fn read(path: &Path) -> Result<Answers> {
    let read = files::read_text(path);
    let read = read.with_context(|| format!("cannot read {}", text::path(path)))?;
    let answers = serde_json::from_str::<Answers>(&read).ok();
    answers
        .filter(|answers| answers.llama_sidecar == KIND && !answers.answers.is_empty())
        .with_context(|| {
            format!(
                "{} has no answers: write them with 'ask -o'",
                text::path(path)
            )
        })
}

fn find<'a>(answers: &'a Option<Answers>, prompt: &str) -> Option<&'a Asked> {
    let mut all = answers.iter().flat_map(|of| &of.answers);
    all.find(|of| of.prompt == prompt)
}

/// Returns the address at which the program of a socket listens.
fn address_of_program(at: &Control) -> Result<String> {
    let answer = control::ask(&at.socket()?, &Request::Status, at.limit)?;
    control::done(&answer)?;
    let Status { pid, .. } = control::parsed(&answer)?;
    let ports = ports(pid)?;
    let [port] = ports.iter().collect::<Vec<_>>()[..] else {
        bail!(
            "process {pid} listens at the ports {ports:?} of this machine: pass the address of its server, such as http://127.0.0.1:8080"
        );
    };
    Ok(format!("http://127.0.0.1:{port}"))
}

/// Returns the ports at which a process listens (proc(5), `net/tcp`).
fn ports(pid: u32) -> Result<BTreeSet<u16>> {
    const LISTENS: &str = "0A";
    let folder = format!("/proc/{pid}/fd");
    let open = fs::read_dir(&folder).with_context(|| {
        format!("cannot read {folder}: run this command as the user of the program, or pass the address of its server")
    })?;
    let links = open
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let sockets: BTreeSet<String> = links
        .filter_map(|link| {
            Some(
                link.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .into(),
            )
        })
        .collect();
    let tables = ["tcp", "tcp6"].map(|name| fs::read_to_string(format!("/proc/{pid}/net/{name}")));
    let mut ports = BTreeSet::new();
    for line in tables.iter().flatten().flat_map(|table| table.lines()) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let port = |local: &str| u16::from_str_radix(local.rsplit(':').next()?, 16).ok();
        if let [_, local, _, LISTENS, ..] = fields[..]
            && fields.get(9).is_some_and(|inode| sockets.contains(*inode))
        {
            ports.extend(port(local));
        }
    }
    Ok(ports)
}

/// Compares an answer with an earlier one, as far as both have the same tokens before.
fn difference(before: &Answer, after: &Answer) -> Difference {
    let mut found = Difference {
        same_tokens: 0,
        is_same: before.content == after.content && before.tokens.len() == after.tokens.len(),
        is_exact: before == after,
        same_top: Vec::new(),
        divergence: Vec::new(),
    };
    for (one, other) in before.tokens.iter().zip(&after.tokens) {
        let top = |of: &Token| of.candidates.first().map(|(id, _)| *id);
        found.same_top.push(top(one) == top(other));
        found.divergence.push(divergence(one, other));
        if one.id != other.id {
            found.is_same = false;
            break;
        }
        found.same_tokens += 1;
    }
    found
}

/// Returns the divergence of the candidates of a token, in nats: a lower bound, because those that are not in both lists count
/// as one.
fn divergence(before: &Token, after: &Token) -> f64 {
    let after: HashMap<i64, f64> = after.candidates.iter().copied().collect();
    let both = before.candidates.iter();
    let both = both.filter_map(|(id, p)| Some((*p, *after.get(id)?)));
    let (mut sum, mut rest) = (0.0, (1.0, 1.0));
    for (p, q) in both {
        sum += p.exp() * (p - q);
        rest = (rest.0 - p.exp(), rest.1 - q.exp());
    }
    // Rounded log-probabilities can sum to more than 1.
    if rest.0 > 0.0 && rest.1 > 0.0 {
        sum += rest.0 * (rest.0 / rest.1).ln();
    }
    sum.max(0.0)
}

fn print(pairs: &[(&Asked, Option<&Asked>)], json: bool) -> Result<()> {
    let differences: Vec<Option<Difference>> = pairs
        .iter()
        .map(|(after, before)| Some(difference(&(*before)?.answer, &after.answer)))
        .collect();
    let all = || differences.iter().flatten();
    let divergence: Vec<f64> = all().flat_map(|of| of.divergence.clone()).collect();
    let mean = divergence.iter().sum::<f64>() / divergence.len().max(1) as f64;
    let same = all().filter(|of| of.is_same).count();
    let exact = all().filter(|of| of.is_exact).count();
    let top: Vec<bool> = all().flat_map(|of| of.same_top.clone()).collect();
    let same_top = top.iter().filter(|is_same| **is_same).count();
    if json {
        let pair = |((after, before), difference): (
            &(&Asked, Option<&Asked>),
            &Option<Difference>,
        )| {
            json!({"prompt": after.prompt, "before": before.map(|of| &of.answer.content), "after": after.answer.content, "difference": difference})
        };
        let list: Vec<_> = pairs.iter().zip(&differences).map(pair).collect();
        let answer = json!({"prompts": list, "same": same, "exact": exact, "same_top": same_top, "positions": top.len(), "divergence": mean});
        return Ok(writeln!(stdout(), "{answer:#}")?);
    }
    for ((after, before), difference) in pairs.iter().zip(&differences) {
        println!("prompt: {}", shown(&after.prompt));
        match (before, difference) {
            (Some(_), Some(of)) if of.is_same => {
                println!(
                    "  the same {} tokens: {}",
                    of.same_tokens,
                    shown(&after.answer.content)
                );
            }
            (Some(before), Some(of)) => {
                println!("  token {} differs", of.same_tokens + 1);
                let (before, after) = (&before.answer.content, &after.answer.content);
                let from = differ_near(before, after);
                println!("  before: {}", shown(&from(before)));
                println!("  after:  {}", shown(&from(after)));
            }
            _ => println!("  {}", shown(&after.answer.content)),
        }
    }
    if !top.is_empty() {
        let error = Figure::of(&divergence).map_or(f64::NAN, |figure| figure.error);
        println!(
            "{same} of {} answers are the same, {exact} with the same log-probabilities; up to the first token that differs, the likeliest token is the same at {same_top} of {} places; divergence at least {mean:.6} ± {error:.6}",
            pairs.len(),
            top.len()
        );
    }
    Ok(())
}

/// Returns what shows two texts from a little before their first difference.
fn differ_near(one: &str, other: &str) -> impl Fn(&str) -> String {
    const BEFORE: usize = 24;
    let same = one.chars().zip(other.chars());
    let same = same.take_while(|(one, other)| one == other).count();
    let skipped = same.saturating_sub(BEFORE);
    move |text| {
        let dots = if skipped > 0 { "..." } else { "" };
        dots.chars().chain(text.chars().skip(skipped)).collect()
    }
}

/// Returns the beginning of a text, in one line.
fn shown(of: &str) -> String {
    let line = text::line(of);
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn token(id: i64, candidates: &[(i64, f64)]) -> Token {
        let log = |(id, p): &(i64, f64)| (*id, p.ln());
        Token {
            id,
            candidates: candidates.iter().map(log).collect(),
        }
    }

    fn answer(content: &str, tokens: Vec<Token>) -> Answer {
        Answer {
            content: content.into(),
            tokens,
        }
    }

    #[test]
    fn answers_are_compared_up_to_the_first_token_that_differs() {
        let one = token(1, &[(1, 0.5), (2, 0.25)]);
        let other = token(2, &[(2, 0.5), (1, 0.25)]);
        let before = answer("a b c", vec![one.clone(), one.clone(), one.clone()]);
        assert_eq!(
            difference(&before, &before),
            Difference {
                same_tokens: 3,
                is_same: true,
                is_exact: true,
                same_top: vec![true; 3],
                divergence: vec![0.0; 3],
            }
        );
        let after = answer("a d e", vec![one.clone(), other.clone(), one]);
        let found = difference(&before, &after);
        assert_eq!((found.same_tokens, found.is_same), (1, false));
        assert_eq!(found.same_top, [true, false]);
        // 0.5 ln 2 - 0.25 ln 2
        assert!((found.divergence[1] - 0.25 * 2f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn candidates_of_one_list_alone_count_as_one() {
        let before = token(1, &[(1, 0.5), (2, 0.3)]);
        let after = token(1, &[(1, 0.8), (3, 0.1)]);
        let expected = 0.5 * (0.5f64 / 0.8).ln() + 0.5 * (0.5f64 / 0.2).ln();
        assert!((divergence(&before, &after) - expected).abs() < 1e-12);
        assert_eq!(divergence(&before, &before), 0.0);
        assert_eq!(divergence(&token(1, &[]), &before), 0.0);
    }

    #[test]
    fn texts_are_shown_where_they_differ() {
        let [one, other] = ["one", "other"].map(|end| "a".repeat(40) + end);
        let from = differ_near(&one, &other);
        // They have the first letter of the ends in common, too.
        assert_eq!(from(&one), format!("...{}one", "a".repeat(23)));
        assert_eq!(differ_near("a\n", "ab")("a\n"), "a\n");
    }

    #[test]
    fn the_ports_of_a_process_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        assert!(
            ports(std::process::id())
                .expect("own process")
                .contains(&port)
        );
        drop(listener);
        assert!(
            !ports(std::process::id())
                .expect("own process")
                .contains(&port)
        );
    }
}
