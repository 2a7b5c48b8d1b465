//! A server for one page. It answers `GET` and `HEAD`, one request a connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;

/// How long a client may take to send its request, and to read each part of the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest head of a request in bytes.
const LONGEST_HEAD: u64 = 8 << 10;
/// Clients that are served at a time; further ones are refused.
const MOST_CLIENTS: usize = 16;

/// Answers requests for a path, until the process ends.
pub fn serve(
    listener: &TcpListener,
    path: &str,
    content_type: &str,
    page: impl Fn() -> String + Sync,
) -> Result<()> {
    let clients = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for client in listener.incoming() {
            // A client that left before it was accepted, or no file descriptors: the next one may be served.
            let Ok(client) = client else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            if clients.fetch_add(1, Ordering::Relaxed) >= MOST_CLIENTS {
                clients.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (clients, page) = (&clients, &page);
            scope.spawn(move || {
                // The client's own failure.
                let _ = answer(&client, path, content_type, page);
                clients.fetch_sub(1, Ordering::Relaxed);
            });
        }
        Ok(())
    })
}

fn answer(
    client: &TcpStream,
    path: &str,
    content_type: &str,
    page: &(impl Fn() -> String + Sync),
) -> std::io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let until = Instant::now() + PATIENCE;
    let (status, body) = match requested(Limited { client, until })? {
        Requested::Get(wanted) if wanted == path => ("200 OK", page()),
        Requested::Get(_) => ("404 Not Found", format!("the only page is {path}\n")),
        Requested::Other => ("405 Method Not Allowed", "only GET is answered\n".into()),
        Requested::Damaged => ("400 Bad Request", "this is no request of HTTP/1\n".into()),
    };
    let content_type = match status {
        "200 OK" => content_type,
        _ => "text/plain; charset=utf-8",
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n",
        body.len()
    );
    let mut client = client;
    client.write_all(head.as_bytes())?;
    client.write_all(body.as_bytes())
}

/// A client that has to send all of its request in time.
struct Limited<'a> {
    client: &'a TcpStream,
    until: Instant,
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if Instant::now() > self.until {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        self.client.read(buffer)
    }
}

/// What a client requests.
#[derive(Debug, PartialEq, Eq)]
enum Requested {
    /// A path, without its query.
    Get(String),
    /// Another method.
    Other,
    /// No request.
    Damaged,
}

/// Reads the head of a request.
fn requested(client: impl Read) -> std::io::Result<Requested> {
    let mut head = BufReader::new(client.take(LONGEST_HEAD));
    let mut first = String::new();
    if head.read_line(&mut first).is_err() {
        return Ok(Requested::Damaged);
    }
    let mut words = first.trim_end().split(' ');
    let (method, target, version) = (words.next(), words.next(), words.next());
    let is_http = version.is_some_and(|version| version.starts_with("HTTP/1."));
    let (Some(method), Some(target), true, None) = (method, target, is_http, words.next()) else {
        return Ok(Requested::Damaged);
    };
    // The rest of the head, so that the client gets the answer and not a reset.
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = head.read_until(b'\n', &mut line)?;
        match line.as_slice() {
            b"\r\n" | b"\n" => break,
            _ if read == 0 => return Ok(Requested::Damaged),
            _ => {}
        }
    }
    Ok(match method {
        "GET" => Requested::Get(target.split('?').next().unwrap_or_default().into()),
        _ => Requested::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_with_limits() {
        let read = |text: &str| requested(text.as_bytes()).expect("no read error");
        let get = |path: &str| Requested::Get(path.into());
        assert_eq!(
            read("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"),
            get("/metrics")
        );
        assert_eq!(read("GET /metrics?a=b HTTP/1.0\n\n"), get("/metrics"));
        assert_eq!(read("POST /metrics HTTP/1.1\r\n\r\n"), Requested::Other);
        for damaged in [
            "",
            "GET\r\n\r\n",
            "GET / HTTP/2\r\n\r\n",
            "GET / a HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a",
            &format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(9000)),
            &format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(2000)),
        ] {
            assert_eq!(read(damaged), Requested::Damaged, "{damaged:.40}");
        }
        let bytes = requested(&b"\xff\xfe / HTTP/1.1\r\n\r\n"[..]).expect("no read error");
        assert_eq!(bytes, Requested::Damaged);
    }
}
