//! Clients of the control socket: their connections, their lines, and the limits of both.
//!
//! Each client has its own thread, which evaluations never wait for. A line must be complete, and
//! a reply must be read, within [`CLIENT_TIMEOUT`]. When all places are taken, a new client gets
//! the place of the one that has waited longest without a complete line: clients that send
//! nothing, or little, keep no other client out.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use sidecar_core::descriptors::{Kept, above_standard};
use sidecar_core::files;
use sidecar_core::protocol::{self, Reply};

use crate::process::thread;

/// The longest request: a swap may name every tensor of a model.
const MAX_LINE: usize = 1 << 20;
/// Clients at a time.
const MAX_CLIENTS: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: libc::c_int = 128;
/// How long a client may take to send a line, and to take a reply.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The socket of this process, to be removed at the end: path, device and inode.
static SOCKET: Mutex<Option<(PathBuf, (u64, u64))>> = Mutex::new(None);
/// The clients, those that have waited longest first.
static CLIENTS: Mutex<Vec<Place>> = Mutex::new(Vec::new());

/// What a request returns.
pub struct Answer {
    /// The reply.
    pub reply: Value,
    /// Whether the connection is closed after it.
    pub closes: bool,
    /// Runs after the reply is written.
    pub then: Option<fn()>,
}

impl Answer {
    /// Makes the reply to a request that is refused; the connection is closed.
    pub fn refused(text: impl Into<String>) -> Answer {
        Answer {
            reply: json!(Reply::refused(text)),
            closes: true,
            then: None,
        }
    }
}

/// Carries out a request: a line, and its client.
type Serve = fn(&[u8], &UnixStream) -> Answer;

/// Listens at `path`.
pub fn start(path: &Path, serve: Serve) -> io::Result<()> {
    let (listener, identity) = listen(path)?;
    *SOCKET.lock() = Some((path.to_owned(), identity));
    match thread::spawn("llama-sidecar-c", move || accept(&listener, serve)) {
        true => Ok(()),
        false => Err(io::Error::other("its thread cannot start")),
    }
}

/// Removes the socket, unless another process has replaced it.
pub fn stop() {
    if let Some((path, identity)) = SOCKET.try_lock().and_then(|mut socket| socket.take())
        && fs::symlink_metadata(&path).is_ok_and(|found| identity_of(&found) == identity)
    {
        let _ = fs::remove_file(path);
    }
}

fn identity_of(found: &fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Binds a socket that only its owner can use. Replaces a socket at which no process
/// listens.
fn listen(path: &Path) -> io::Result<(Kept<UnixListener>, (u64, u64))> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other("another file is there"));
        }
        files::check_owner(&found)?;
        if is_listened_to(path)? {
            return Err(io::Error::other("another process listens there"));
        }
        fs::remove_file(path)?;
    }
    let (address, size) = address_of(path)?;
    // SAFETY: plain system calls on a descriptor that is owned from the start.
    unsafe {
        let socket = new_socket(libc::SOCK_NONBLOCK)?;
        // Linux gives the path the mode that the descriptor has when it is bound: there
        // is no moment in which others could connect.
        checked(libc::fchmod(socket.as_raw_fd(), 0o600))?;
        checked(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size,
        ))?;
        checked(libc::listen(socket.as_raw_fd(), BACKLOG))?;
        let identity = identity_of(&fs::symlink_metadata(path)?);
        Ok((Kept::new(UnixListener::from(socket))?, identity))
    }
}

/// Whether a process listens at a socket. Does not wait: one with a full backlog is busy,
/// and it listens.
fn is_listened_to(path: &Path) -> io::Result<bool> {
    let (address, size) = address_of(path)?;
    let socket = new_socket(libc::SOCK_NONBLOCK)?;
    // SAFETY: a plain system call with a valid address.
    let connected =
        checked(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) });
    Ok(match connected {
        Ok(()) => true,
        Err(error) => error.raw_os_error() == Some(libc::EAGAIN),
    })
}

fn new_socket(flags: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    // SAFETY: a plain system call; what it returns is owned by nothing else.
    unsafe {
        let socket = above_standard(|| {
            #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
            libc::socket(libc::AF_UNIX, kind, 0)
        });
        checked(socket.min(0))?;
        Ok(OwnedFd::from_raw_fd(socket))
    }
}

/// The error of a system call that returned other than 0.
fn checked(code: libc::c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The address of a socket at a path, and its size.
fn address_of(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: all zeros is a valid address; its family and path are filled in next.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::other("the path is too long for a socket"));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

/// A connected client.
struct Place {
    stream: Arc<Kept<UnixStream>>,
    /// Whether its next line is not complete.
    waits: bool,
}

/// Why a request is not carried out.
const NO_THREAD: &str = "the program has too little memory or too few threads for a request: raise its limits (ulimit -v, ulimit -u)";

/// Frees the place of a client, also after a panic.
struct Connected(Arc<Kept<UnixStream>>);

impl Drop for Connected {
    fn drop(&mut self) {
        let mut clients = CLIENTS.lock();
        clients.retain(|place| !Arc::ptr_eq(&place.stream, &self.0));
    }
}

impl Connected {
    /// Notes that a request begins or ends; false if the client has lost its place.
    fn set_waiting(&self, waits: bool) -> bool {
        let mut clients = CLIENTS.lock();
        let at = clients
            .iter()
            .position(|place| Arc::ptr_eq(&place.stream, &self.0));
        let Some(at) = at else {
            return false;
        };
        let place = clients.remove(at);
        clients.push(Place { waits, ..place });
        true
    }
}

fn accept(listener: &Kept<UnixListener>, serve: Serve) {
    loop {
        let client = match next_client(listener) {
            Ok(client) => client,
            Err(_) if listener.get().is_ok() => {
                // The process probably has no free descriptors.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            Err(error) => {
                log::error!("the control socket is closed: {error}");
                return stop();
            }
        };
        let Some(client) = admit(client) else {
            continue;
        };
        // The place is free again if the thread does not start.
        let stream = client.0.clone();
        let started = thread::spawn("llama-sidecar-c", move || {
            let _ = converse(&client, serve);
        });
        if !started {
            turn_away(&stream, &Reply::refused(NO_THREAD));
        }
    }
}

/// Waits for a client.
fn next_client(listener: &Kept<UnixListener>) -> io::Result<Kept<UnixStream>> {
    let mut poll = libc::pollfd {
        fd: listener.get()?.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element.
    unsafe { libc::poll(&mut poll, 1, -1) };
    // The program may have closed it during the wait.
    let listener = listener.get()?;
    let accepted = above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
        listener.accept()
    });
    Kept::new(accepted?.0)
}

/// Gives a client a place: a free one, or that of the client that has waited longest.
fn admit(client: Kept<UnixStream>) -> Option<Connected> {
    let client = Arc::new(client);
    let mut clients = CLIENTS.lock();
    if clients.len() >= MAX_CLIENTS {
        let Some(at) = clients.iter().position(|place| place.waits) else {
            drop(clients);
            turn_away(&client, &Reply::busy());
            return None;
        };
        turn_away(&clients.remove(at).stream, &Reply::busy());
    }
    clients.push(Place {
        stream: client.clone(),
        waits: true,
    });
    Some(Connected(client))
}

/// Ends a connection whose line was not carried out.
fn turn_away(client: &Kept<UnixStream>, reply: &Reply) {
    let Ok(mut client) = client.get() else {
        return;
    };
    // What does not fit into the buffer of the socket is not worth a wait.
    let _ = client.set_nonblocking(true);
    let _ = client.write_all(protocol::line(reply).as_bytes());
    let _ = client.shutdown(Shutdown::Both);
}

fn converse(client: &Connected, serve: Serve) -> io::Result<()> {
    let stream = &*client.0;
    let mut received = Vec::new();
    while let Some(line) = next_line(stream, &mut received)? {
        if !client.set_waiting(false) {
            break;
        }
        let answer = match line {
            Some(line) => serve(&line, stream.get()?),
            None => Answer::refused("expected a JSON object and the end of a line within 1 MiB"),
        };
        let written = send(stream, protocol::line(&answer.reply).as_bytes());
        if let Some(then) = answer.then {
            then();
        }
        written?;
        if answer.closes || !client.set_waiting(true) {
            break;
        }
    }
    Ok(())
}

/// Reads a line, after what was received before: `None` at the end, and `Some(None)` for a line
/// that is too long or has no end.
fn next_line(
    stream: &Kept<UnixStream>,
    received: &mut Vec<u8>,
) -> io::Result<Option<Option<Vec<u8>>>> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    let (mut searched, mut bytes) = (0, [0; 4096]);
    loop {
        let end = received[searched..].iter().position(|byte| *byte == b'\n');
        if let Some(end) = end {
            let rest = received.split_off(searched + end + 1);
            return Ok(Some(Some(std::mem::replace(received, rest))));
        }
        if received.len() >= MAX_LINE {
            return Ok(Some(None));
        }
        searched = received.len();
        let mut stream = stream.get()?;
        stream.set_read_timeout(Some(until(deadline)?))?;
        match stream.read(&mut bytes) {
            Ok(0) if received.is_empty() => return Ok(None),
            Ok(0) => return Ok(Some(None)),
            Ok(read) => received.extend_from_slice(&bytes[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends a reply.
fn send(stream: &Kept<UnixStream>, mut reply: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    while !reply.is_empty() {
        let mut stream = stream.get()?;
        stream.set_write_timeout(Some(until(deadline)?))?;
        match stream.write(reply) {
            Ok(sent) => reply = &reply[sent..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn until(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

/// Whether a client can take an answer. One that only sends nothing more is connected.
pub fn is_connected(client: &UnixStream) -> bool {
    let mut poll = libc::pollfd {
        fd: client.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one element, whose descriptor is open; does not wait.
    unsafe { libc::poll(&mut poll, 1, 0) };
    poll.revents & (libc::POLLHUP | libc::POLLERR) == 0
}
