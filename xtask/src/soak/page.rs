//! The page of `llama-sidecar top --web` beside the run: a client that requests samples, and clients that only disturb.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::failures::Failures;
use super::vitals::{GROWTH, Vitals};
use crate::run::{Running, command, root};

/// Clients that only disturb.
const CLIENTS: usize = 8;
/// What they send; they send nothing more until the page ends the connection.
const TEXTS: [&[u8]; 4] = [
    b"",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n1",
    b"GET /samples HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer 0\r\n\r\n",
    &[0xff; 4096],
];
/// How long they hold a connection, and the pause between two.
const HELD: Duration = Duration::from_millis(500);
/// The pause between two requests for samples.
const PAUSE: Duration = Duration::from_millis(500);

/// A page of one program. It ends with this value.
pub struct Page {
    program: Running,
    address: String,
    token: String,
}

impl Page {
    /// Starts a page of the program behind a socket.
    pub fn start(cli: &Path, socket: &Path) -> Result<Page> {
        let (program, line) = Running::start(
            command(cli, &root())
                .args(["top", "--web", "127.0.0.1:0", "--allow-control"])
                .args(["--interval", "0.2", "--socket"])
                .arg(socket),
        )?;
        let printed = line.strip_prefix("http://");
        let (address, token) = printed
            .and_then(|printed| printed.split_once("/#"))
            .with_context(|| format!("expected an address with a token, found {line:?}"))?;
        Ok(Page {
            program,
            address: address.to_owned(),
            token: token.to_owned(),
        })
    }

    /// Requests samples until the run is over; returns how many came.
    pub fn watch(&self, over: &AtomicBool, failures: &Failures) -> Result<u64> {
        let (mut samples, mut first) = (0, None);
        while !over.load(Ordering::Relaxed) {
            let authorization = format!("Bearer {}", self.token);
            let asked = ureq::get(format!("http://{}/samples", self.address))
                .header("Authorization", &authorization)
                .call();
            let text = asked.map(|mut answer| answer.body_mut().read_to_string());
            match text {
                Ok(Ok(text)) if text.contains("\"answers\":true") => samples += 1,
                other => failures.add("samples of the page", format!("{other:?}")),
            }
            std::thread::sleep(PAUSE);
            // The first requests give each of its threads its memory.
            if samples == 20 {
                first = Some(Vitals::of(self.program.0.id())?);
            }
        }
        let last = Vitals::of(self.program.0.id())?;
        if let Some(first) = first
            && (last.threads > first.threads + CLIENTS
                || last.descriptors > first.descriptors + CLIENTS
                || last.anonymous > first.anonymous + GROWTH)
        {
            failures.add("the page grows", format!("{first:?} -> {last:?}"));
        }
        Ok(samples)
    }

    /// Disturbs the page until the run is over.
    pub fn disturb(&self, over: &AtomicBool) {
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        if let Ok(mut client) = TcpStream::connect(&self.address) {
                            let _ = client.set_read_timeout(Some(HELD));
                            let _ = client.write_all(TEXTS[number % TEXTS.len()]);
                            let _ = client.read_to_end(&mut Vec::new());
                        }
                        std::thread::sleep(HELD);
                    }
                });
            }
        });
    }
}
