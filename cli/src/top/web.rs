//! A page in a browser.
//!
//! Programs and their files are for the person who started the command. A page of another origin, which the same
//! browser shows, may send requests here, too. So:
//!
//! | request | is answered if |
//! |---|---|
//! | all | `Host` is an IP address or `localhost`: no name of another origin can stand for this server |
//! | all with `Origin` | `Origin` is that host |
//! | samples, actions | `Authorization` has the token, which only the printed address has |
//! | actions | the command has `--allow-control` |
//!
//! The token follows `#` in the address, so that browsers send it neither to this server nor to another one.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Result;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use sidecar_core::text;

use crate::http::{self, Answer, Request};
use crate::page::STYLE;
use crate::top::facts::{self, Fact};
use crate::top::programs::{Action, Programs};
use crate::top::sample::Program;

const PAGE: &str = include_str!("page.html");
/// Bytes of the token.
const TOKEN: usize = 16;

/// What the page shows.
#[derive(Serialize)]
struct View {
    /// Whether the page may act.
    control: bool,
    /// Milliseconds between two samples.
    interval: u64,
    programs: Vec<ProgramView>,
}

/// A program on the page.
#[derive(Serialize)]
struct ProgramView {
    socket: String,
    answers: bool,
    facts: Vec<Fact>,
    evaluations_per_second: Option<f64>,
    /// Known where experts are counted.
    tokens_per_second: Option<f64>,
    /// Uses of experts of the first model between the last two samples.
    layers: Vec<LayerView>,
}

/// Uses of the experts of a layer.
#[derive(Serialize)]
struct LayerView {
    layer: u32,
    experts: Vec<u64>,
}

impl From<&Program> for ProgramView {
    fn from(program: &Program) -> ProgramView {
        ProgramView {
            socket: text::path(&program.socket),
            answers: program.now.is_ok(),
            facts: facts::of(program),
            evaluations_per_second: facts::evaluations_per_second(program),
            tokens_per_second: facts::tokens_per_second(program),
            layers: program
                .recent(0)
                .into_iter()
                .map(|counts| LayerView {
                    layer: counts.layer,
                    experts: counts.experts,
                })
                .collect(),
        }
    }
}

/// Serves the page until the process ends, and prints its address.
pub fn show(
    programs: Programs,
    interval: Duration,
    address: SocketAddr,
    allow_control: bool,
) -> Result<()> {
    let listener = http::listen(address)?;
    let site = Site {
        token: random_text()?,
        programs,
        interval,
        allow_control,
        running: Mutex::default(),
    };
    println!("http://{}/#{}", listener.local_addr()?, site.token);
    let _ended = site.programs.watch(interval, None);
    http::serve(&listener, |request| site.answer(request))
}

struct Site {
    token: String,
    programs: Programs,
    interval: Duration,
    allow_control: bool,
    /// The positions of programs with an action that runs.
    running: Mutex<BTreeSet<usize>>,
}

/// An action that runs.
struct Running<'a>(&'a Mutex<BTreeSet<usize>>, usize);

impl Running<'_> {
    /// `None` while one of the same program runs.
    fn of(all: &Mutex<BTreeSet<usize>>, program: usize) -> Option<Running<'_>> {
        let is_new = all.lock().expect("no panic").insert(program);
        is_new.then_some(Running(all, program))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().expect("no panic").remove(&self.1);
    }
}

impl Site {
    fn answer(&self, request: &Request) -> Answer {
        let mut answer = match self.is_own(request) {
            true => self.answer_own(request),
            false => Answer::refused(
                "403 Forbidden",
                "open the address that llama-sidecar printed: a host name or another page is not served",
            ),
        };
        answer.headers += "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n\
            Cross-Origin-Resource-Policy: same-origin\r\nX-Frame-Options: DENY\r\n";
        answer
    }

    /// Whether a request is to this server by its address, and from no page of another one.
    fn is_own(&self, request: &Request) -> bool {
        let Some(host) = request.header("Host") else {
            return false;
        };
        let without_port = host.rsplit_once(':').map_or(host, |(name, _)| name);
        let in_brackets = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let is_address = host.parse::<SocketAddr>().is_ok()
            || in_brackets.unwrap_or(host).parse::<IpAddr>().is_ok()
            || without_port == "localhost";
        let is_same = |origin: &str| origin.strip_prefix("http://") == Some(host);
        is_address && (!request.has("Origin") || request.header("Origin").is_some_and(is_same))
    }

    fn answer_own(&self, request: &Request) -> Answer {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/") => page(),
            ("GET" | "POST", _) if !self.is_permitted(request) => Answer::refused(
                "401 Unauthorized",
                "open the address that llama-sidecar printed, with all that follows the #",
            ),
            ("GET", "/samples") => {
                let view = View {
                    control: self.allow_control,
                    interval: self.interval.as_millis() as u64,
                    programs: self.programs.look().iter().map(From::from).collect(),
                };
                let text = serde_json::to_string(&view).expect("a value of JSON");
                Answer::of("application/json", text)
            }
            ("POST", path) => self.act(path),
            ("GET", _) => Answer::refused("404 Not Found", "there is no such page"),
            _ => Answer::refused("405 Method Not Allowed", "use GET or POST"),
        }
    }

    /// Whether a request has the token.
    fn is_permitted(&self, request: &Request) -> bool {
        let sent = request.header("Authorization").unwrap_or_default();
        let sent = sent.strip_prefix("Bearer ").unwrap_or_default().as_bytes();
        // The time does not depend on where they differ.
        let pairs = sent.iter().zip(self.token.as_bytes());
        sent.len() == self.token.len() && pairs.fold(0, |all, (one, two)| all | (one ^ two)) == 0
    }

    /// Does what a path names: `/programs/NUMBER/ACTION`.
    fn act(&self, path: &str) -> Answer {
        if !self.allow_control {
            return Answer::refused(
                "403 Forbidden",
                "this page only shows: start llama-sidecar top with --allow-control",
            );
        }
        let named = || {
            let (number, action) = path.strip_prefix("/programs/")?.split_once('/')?;
            let number: usize = number.parse().ok()?;
            let socket = self.programs.look().get(number)?.socket.clone();
            Some((number, socket, Action::named(action)?))
        };
        let Some((number, socket, action)) = named() else {
            return Answer::refused("404 Not Found", "there is no such program or action");
        };
        let Some(_running) = Running::of(&self.running, number) else {
            return Answer::refused("409 Conflict", "an action of this program still runs");
        };
        match action.apply(&socket) {
            Ok(()) => Answer::of("text/plain; charset=utf-8", "done\n".into()),
            Err(error) => Answer::refused("409 Conflict", &format!("{error:#}")),
        }
    }
}

/// Returns the page. It has no data, so that it needs no token.
fn page() -> Answer {
    let Ok(nonce) = random_text() else {
        return Answer::refused("500 Internal Server Error", "no random numbers");
    };
    let body = PAGE.replace("{style}", STYLE).replace("{nonce}", &nonce);
    let mut answer = Answer::of("text/html; charset=utf-8", body);
    answer.headers = format!(
        "Content-Security-Policy: default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    );
    answer
}

/// Returns a text that cannot be guessed.
fn random_text() -> Result<String> {
    let mut bytes = [0u8; TOKEN];
    let mut filled = 0;
    while filled < TOKEN {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "Host: 127.0.0.1:9\r\n";

    fn site(allow_control: bool) -> Site {
        Site {
            token: "secret".into(),
            programs: Programs::of(vec![Program::new("/nowhere".into())]),
            interval: Duration::from_secs(1),
            allow_control,
            running: Mutex::default(),
        }
    }

    fn asked(site: &Site, first: &str, headers: &str) -> Answer {
        let text = format!("{first} HTTP/1.1\r\n{headers}\r\n");
        site.answer(
            &http::requested(text.as_bytes())
                .expect("no read error")
                .expect("a request"),
        )
    }

    #[test]
    fn the_page_is_served_by_address_and_to_no_other_page() {
        let site = site(false);
        let status = |headers: &str| asked(&site, "GET /", headers).status;
        for own in [
            OWN,
            "Host: 127.0.0.1\r\n",
            "Host: [::1]:80\r\n",
            "Host: [::1]\r\n",
            "Host: localhost:8080\r\n",
            "Host: localhost\r\nOrigin: http://localhost\r\n",
        ] {
            assert_eq!(status(own), "200 OK", "{own}");
        }
        for other in [
            "",
            "Host: attacker.example\r\n",
            "Host: 127.0.0.1.attacker.example:9\r\n",
            "Host: localhost.attacker.example\r\n",
            "Host: 127.0.0.1:9\r\nHost: localhost\r\n",
            "Host: 127.0.0.1:9\r\nOrigin: null\r\n",
            "Host: 127.0.0.1:9\r\nOrigin: https://127.0.0.1:9\r\n",
            "Host: 127.0.0.1:9\r\nOrigin: http://127.0.0.1:8\r\n",
            "Host: 127.0.0.1:9\r\nOrigin: http://127.0.0.1:9\r\nOrigin: http://a\r\n",
        ] {
            assert_eq!(status(other), "403 Forbidden", "{other}");
        }
    }

    #[test]
    fn samples_and_actions_need_the_token_and_actions_a_permission() {
        let with = |site: &Site, first: &str, token: &str| {
            asked(site, first, &format!("{OWN}Authorization: {token}\r\n")).status
        };
        let (shows, acts) = (site(false), site(true));
        for refused in [
            "",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Bearer sEcret",
            "secret",
        ] {
            for first in ["GET /samples", "POST /programs/0/reload", "GET /other"] {
                assert_eq!(with(&acts, first, refused), "401 Unauthorized", "{refused}");
            }
        }
        let token = "Bearer secret";
        assert_eq!(with(&shows, "GET /samples", token), "200 OK");
        assert_eq!(with(&shows, "GET /other", token), "404 Not Found");
        assert_eq!(
            with(&shows, "DELETE /samples", token),
            "405 Method Not Allowed"
        );
        assert_eq!(
            with(&shows, "POST /programs/0/reload", token),
            "403 Forbidden"
        );
        for path in [
            "/programs/1/reload",
            "/programs/0/eval",
            "/programs/-1/reload",
            "/",
        ] {
            assert_eq!(
                with(&acts, &format!("POST {path}"), token),
                "404 Not Found",
                "{path}"
            );
        }
        // No program listens there.
        assert_eq!(
            with(&acts, "POST /programs/0/revert", token),
            "409 Conflict"
        );
    }

    #[test]
    fn the_page_names_no_other_server_and_its_policy_permits_none() {
        let answer = asked(&site(false), "GET /", OWN);
        assert!(!answer.body.contains("://"), "{}", answer.body);
        assert!(!answer.body.contains("{nonce}") && !answer.body.contains("{style}"));
        assert!(answer.headers.contains("default-src 'none'"));
        let again = asked(&site(false), "GET /", OWN);
        assert_ne!(answer.headers, again.headers);
    }
}
