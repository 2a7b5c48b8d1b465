//! A server for a few small pages: one request a connection, whose body is not read.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sidecar_core::text;

use crate::deadline::Deadline;

/// How long a client may take to send its request.
const HEAD_PATIENCE: Duration = Duration::from_secs(2);
/// How long it may take to read each part of the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest head of a request in bytes.
const LONGEST_HEAD: usize = 8 << 10;
/// The most headers of a request.
const MOST_HEADERS: usize = 64;
/// Clients that are served at a time. A further one takes the place of the oldest that is slow to send or to read; without
/// one, it is refused.
const MOST_CLIENTS: usize = 16;

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// The path, without its query.
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    /// Whether the request has a header.
    pub fn has(&self, name: &str) -> bool {
        let mut names = self.headers.iter();
        names.any(|(of, _)| of.eq_ignore_ascii_case(name))
    }

    /// Returns the value of a header; `None` if the request has none or several of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self
            .headers
            .iter()
            .filter(|(of, _)| of.eq_ignore_ascii_case(name));
        let (_, value) = found.next()?;
        found.next().is_none().then_some(value)
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: &'static str,
    pub content_type: &'static str,
    /// Further headers, each with its line end.
    pub headers: String,
    pub body: String,
}

impl Answer {
    /// An answer with content.
    pub fn of(content_type: &'static str, body: String) -> Answer {
        Answer {
            status: "200 OK",
            content_type,
            headers: String::new(),
            body,
        }
    }

    /// A refusal, with its reason as text.
    pub fn refused(status: &'static str, reason: &str) -> Answer {
        Answer {
            status,
            content_type: "text/plain; charset=utf-8",
            headers: String::new(),
            body: format!("{}\n", text::lines(reason)),
        }
    }
}

/// Listens at an address.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).with_context(|| {
        format!("cannot listen at {address}: use a free port and an address of this machine")
    })
}

/// Answers requests, until the process ends.
pub fn serve(listener: &TcpListener, answer: impl Fn(&Request) -> Answer + Sync) -> Result<()> {
    let clients = Clients::default();
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            // A client that left before it was accepted, or no file descriptors: the next one may be served.
            let Ok(stream) = stream else {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let Some(place) = clients.admit(stream) else {
                continue;
            };
            let answer = &answer;
            // Without a thread, the client is refused.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || {
                // The client's own failure.
                let _ = place.client.serve(answer);
            });
        }
        Ok(())
    })
}

/// The clients that are served, the oldest first.
#[derive(Default)]
struct Clients(Mutex<Vec<Arc<Client>>>);

struct Client {
    stream: TcpStream,
    /// Whether its answer is being made: it is not slow.
    is_answered: AtomicBool,
}

/// A client that is served.
struct Place<'a> {
    client: Arc<Client>,
    all: &'a Clients,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self, stream: TcpStream) -> Option<Place<'_>> {
        let mut all = self.lock();
        if all.len() >= MOST_CLIENTS {
            let is_slow = |of: &Arc<Client>| !of.is_answered.load(Ordering::SeqCst);
            let slow = all.iter().position(is_slow)?;
            // Its thread ends with an error of the stream.
            let _ = all.remove(slow).stream.shutdown(Shutdown::Both);
        }
        let client = Arc::new(Client {
            stream,
            is_answered: AtomicBool::new(false),
        });
        all.push(client.clone());
        Some(Place { client, all: self })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.all.lock().retain(|of| !Arc::ptr_eq(of, &self.client));
    }
}

impl Client {
    fn serve(&self, answer: &(impl Fn(&Request) -> Answer + Sync)) -> std::io::Result<()> {
        let mut stream = &self.stream;
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = requested(Deadline {
            stream,
            until: Some(Instant::now() + HEAD_PATIENCE),
        })?;
        self.is_answered.store(true, Ordering::SeqCst);
        let answer = match request {
            Some(request) => answer(&request),
            None => Answer::refused("400 Bad Request", "this is no request of HTTP/1"),
        };
        self.is_answered.store(false, Ordering::SeqCst);
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\
             X-Content-Type-Options: nosniff\r\n{}\r\n",
            answer.status,
            answer.content_type,
            answer.body.len(),
            answer.headers
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(answer.body.as_bytes())
    }
}

/// Reads the head of a request; `None` if there is none.
pub fn requested(mut client: impl Read) -> std::io::Result<Option<Request>> {
    let mut head = vec![0; LONGEST_HEAD];
    let mut len = 0;
    loop {
        let read = client.read(&mut head[len..])?;
        len += read;
        let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(&head[..len]) {
            Ok(httparse::Status::Complete(_)) => return Ok(request_of(&parsed)),
            Ok(httparse::Status::Partial) if read > 0 => {}
            _ => return Ok(None),
        }
    }
}

fn request_of(parsed: &httparse::Request<'_, '_>) -> Option<Request> {
    let path = parsed.path?.split('?').next()?;
    let headers = parsed.headers.iter().map(|header| {
        let value = std::str::from_utf8(header.value).ok()?;
        Some((header.name.to_owned(), value.to_owned()))
    });
    Some(Request {
        method: parsed.method?.to_owned(),
        path: path.to_owned(),
        headers: headers.collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Request> {
        requested(text.as_bytes()).expect("no read error")
    }

    #[test]
    fn requests_are_read_with_limits() {
        let path = |text: &str| read(text).expect("a request").path;
        assert_eq!(path("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"), "/metrics");
        assert_eq!(path("GET /metrics?a=b HTTP/1.0\n\n"), "/metrics");
        assert_eq!(read("POST / HTTP/1.1\r\n\r\n").expect("one").method, "POST");
        for damaged in [
            "",
            "GET\r\n\r\n",
            "GET / HTTP/2\r\n\r\n",
            "GET / a HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a",
            "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
            &format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(9000)),
            &format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(65)),
            &format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(2000)),
        ] {
            assert_eq!(read(damaged), None, "{damaged:.40}");
        }
        let bytes = requested(&b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n"[..]);
        assert_eq!(bytes.expect("no read error"), None);
    }

    #[test]
    fn slow_clients_keep_no_place() {
        let listener = listen("127.0.0.1:0".parse().expect("an address")).expect("a port");
        let address = listener.local_addr().expect("an address");
        // It serves to the end of this process.
        std::thread::spawn(move || serve(&listener, |_| Answer::of("text/plain", "here".into())));
        let slow = || {
            let mut client = TcpStream::connect(address).expect("a server");
            client.write_all(b"G").expect("sent");
            client
        };
        let _slow: Vec<TcpStream> = (0..3 * MOST_CLIENTS).map(|_| slow()).collect();
        for _ in 0..10 {
            let _one_more = slow();
            let mut client = TcpStream::connect(address).expect("a server");
            client.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
            let mut answer = String::new();
            client.read_to_string(&mut answer).expect("an answer");
            assert!(answer.ends_with("here"), "{answer}");
        }
    }

    #[test]
    fn a_header_counts_if_there_is_one() {
        let request = read("GET / HTTP/1.1\r\nhost: a:1\r\nOrigin: b\r\nORIGIN: c\r\n\r\n");
        let request = request.expect("a request");
        assert_eq!(request.header("Host"), Some("a:1"));
        assert_eq!(request.header("Origin"), None);
        assert_eq!(request.header("Authorization"), None);
    }
}
