//! The control socket: one JSON object a line, and one in answer.
//!
//! | request | answer |
//! |---|---|
//! | `{"cmd":"ping"}` | `{"ok":true}` |
//! | `{"cmd":"status"}` | models, files, tensors that are not as loaded, counters |
//! | `{"cmd":"trace"}` | which experts were used, model by model (`llama_sidecar::trace::SCHEMA`) |
//! | `{"cmd":"trace-reset"}` | counts anew from here on |
//! | `{"cmd":"reload"}` | once everything is switched, what was done |
//! | `{"cmd":"revert"}` | once all tensors are on their originals, what was done; no more reloads |
//! | `{"cmd":"unfreeze"}` | reloads work again |
//! | `{"cmd":"hash"}` | a content hash of each model, after reading what was not hashed yet |
//! | `{"cmd":"metrics"}` | figures in the text format of Prometheus |
//!
//! Clients are served by threads of their own, which the host never waits for. One
//! that sends a line that is too long, or no JSON, is told so and dropped.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::error::Error;
use llama_sidecar::reload::{FileEvent, FileReport, Outcome, Report, Trigger};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::barrier::Obstacle;
use crate::models::{Instance, Model};
use crate::{barrier, expert_trace, metrics, models, placement, reloader, sched, thread};

/// The longest request; ours have less than 100 bytes.
const LONGEST_LINE: u64 = 4096;
/// Clients at a time.
const MOST_CLIENTS: usize = 16;
/// How long a client may take to send a line or to take an answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(10);

/// The socket that is ours, to be removed at the end: its path, and its device and inode.
static OURS: Mutex<Option<(PathBuf, (u64, u64))>> = Mutex::new(None);
static CLIENTS: AtomicUsize = AtomicUsize::new(0);

/// Listens at `path`.
pub fn start(path: &Path) {
    match listen(path) {
        Ok((listener, identity)) => {
            *OURS.lock() = Some((path.to_owned(), identity));
            thread::spawn("llama-sidecar-c", move || serve(&listener));
        }
        Err(error) => log::error!(
            "LLAMA_SIDECAR_CONTROL={}: cannot listen there: {error}; there is no control socket",
            path.display()
        ),
    }
}

/// Removes the socket, unless another process has put its own there.
pub fn stop() {
    if let Some((path, identity)) = OURS.try_lock().and_then(|mut ours| ours.take())
        && fs::symlink_metadata(&path).is_ok_and(|found| identity_of(&found) == identity)
    {
        let _ = fs::remove_file(path);
    }
}

fn identity_of(found: &fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Binds a socket that only its owner can use, over one at which no process listens.
fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other("something else is there"));
        }
        if is_listened_to(path)? {
            return Err(io::Error::other("another process listens there"));
        }
        fs::remove_file(path)?;
    }
    let (address, size) = address_of(path)?;
    // SAFETY: plain system calls on a descriptor that is owned from the start.
    unsafe {
        let socket = new_socket(0)?;
        // Linux gives the path the mode that the descriptor has when it is bound: there
        // is no moment in which others could connect.
        checked(libc::fchmod(socket.as_raw_fd(), 0o600))?;
        checked(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size,
        ))?;
        checked(libc::listen(
            socket.as_raw_fd(),
            MOST_CLIENTS as libc::c_int,
        ))?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        let identity = identity_of(&fs::symlink_metadata(path)?);
        Ok((UnixListener::from(socket), identity))
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
        let socket = libc::socket(libc::AF_UNIX, kind, 0);
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

fn serve(listener: &UnixListener) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // Out of descriptors, most likely.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if CLIENTS.fetch_add(1, Ordering::Relaxed) >= MOST_CLIENTS {
            CLIENTS.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let started = thread::spawn("llama-sidecar-c", move || {
            let _ = converse(&client);
            CLIENTS.fetch_sub(1, Ordering::Relaxed);
        });
        if !started {
            CLIENTS.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn converse(client: &UnixStream) -> io::Result<()> {
    client.set_read_timeout(Some(CLIENT_PATIENCE))?;
    client.set_write_timeout(Some(CLIENT_PATIENCE))?;
    let mut lines = BufReader::new(client);
    loop {
        let mut line = Vec::new();
        lines
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let refusal = match line.last() {
            Some(b'\n') => None,
            _ => Some("expected a JSON object and the end of a line within 4096 bytes"),
        };
        let answer = match refusal {
            Some(text) => Err(text.to_owned()),
            None => answer(&line),
        };
        let (answer, go_on) = match answer {
            Ok(answer) => (answer, true),
            Err(text) => (json!({"ok": false, "error": text}), false),
        };
        let mut client = client;
        client.write_all(format!("{answer}\n").as_bytes())?;
        if !go_on {
            return Ok(());
        }
    }
}

fn answer(line: &[u8]) -> Result<Value, String> {
    let request: Value =
        serde_json::from_slice(line).map_err(|error| format!("expected JSON: {error}"))?;
    match request.get("cmd").and_then(Value::as_str) {
        Some("ping") => Ok(json!({"ok": true})),
        Some("status") => Ok(status()),
        Some("reload") => Ok(with_each_model(|model| {
            reloader::reload(model, Trigger::Command)
        })),
        Some("revert") => {
            reloader::freeze();
            Ok(with_each_model(reloader::revert))
        }
        Some("unfreeze") => {
            reloader::unfreeze();
            Ok(json!({"ok": true}))
        }
        Some("hash") => Ok(hashes()),
        Some("metrics") => Ok(json!({"ok": true, "text": metrics::text()})),
        Some("trace") => match Config::get().traces() {
            true => Ok(json!({"ok": true, "traces": expert_trace::as_json()})),
            false => Err("start the host with LLAMA_EXPERT_TRACE_STATS=1".into()),
        },
        Some("trace-reset") => {
            expert_trace::reset();
            Ok(json!({"ok": true}))
        }
        _ => Err("expected \"cmd\" to be ping, status, reload, revert, unfreeze, hash, metrics, trace or trace-reset".into()),
    }
}

fn status() -> Value {
    let pauses = barrier::pauses();
    let models = models::models();
    let models: Vec<Value> = models.iter().map(model_status).collect();
    json!({
        "ok": true,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "evaluations": sched::count(),
        "generation": barrier::generation(),
        "graphs_renewed": sched::rebuilt(),
        "pauses": pauses.count,
        "longest_pause_us": pauses.longest.as_micros() as u64,
        "frozen": reloader::is_frozen(),
        "waiting": barrier::pending().map(|(obstacle, since)| json!({
            "obstacle": obstacle.map(Obstacle::name),
            "seconds": since.as_secs_f64(),
        })),
        "failures": reloader::counts()
            .failures
            .filter(|(_, count)| *count > 0)
            .map(|(cause, count)| (cause.name().to_owned(), json!(count)))
            .collect::<serde_json::Map<_, _>>(),
        "models": models,
    })
}

fn model_status(model: &Arc<Model>) -> Value {
    let paths = model
        .files
        .iter()
        .map(|file| file.gguf.source.path().display().to_string());
    let mut changed = Vec::new();
    for (index, tensor) in model.tensors.iter().enumerate() {
        let states: Vec<&str> = tensor.instances.iter().map(|i| state(model, i)).collect();
        if states.iter().all(|&state| state == "ON_ORIGINAL") {
            continue;
        }
        changed.push(json!({
            "name": model.name(index).to_string_lossy(),
            "states": states,
        }));
    }
    json!({
        "model": model.number,
        "files": paths.collect::<Vec<_>>(),
        "tensors": model.tensors.len(),
        "instances": model.tensors.iter().map(|t| t.instances.len()).sum::<usize>(),
        "on_original": model.tensors.len() - changed.len(),
        "changed": changed,
        "private_bytes": model.private_bytes(),
        "blocked": reloader::blocked(model).map(|blocked| json!({
            "cause": blocked.cause.name(),
            "error": blocked.error,
            "seconds": blocked.since.elapsed().as_secs_f64(),
            "attempts": blocked.attempts,
        })),
        "content_hash": model.engine.content_hash(false).map(|hash| format!("{hash:032x}")),
    })
}

/// A content hash of each model. Reads a model that was never swapped as a whole.
fn hashes() -> Value {
    let hashes = models::models().into_iter().map(|model| {
        let hash = reloader::read_content_hash(&model);
        json!({
            "model": model.number,
            "content_hash": hash.map(|hash| format!("{hash:032x}")),
        })
    });
    json!({"ok": true, "models": hashes.collect::<Vec<_>>()})
}

/// The state of one instance, by the names of the flowchart.
fn state(model: &Model, instance: &Instance) -> &'static str {
    let private = instance.private.lock();
    let Some(buffer) = private.as_ref() else {
        return "ON_ORIGINAL";
    };
    match buffer.is_host() && placement::own_device(model, instance).is_some() {
        true => "FALLBACK_CPU",
        false => "DETACHED",
    }
}

/// Reloads or reverts all models, one after the other.
fn with_each_model(work: impl Fn(&Arc<Model>) -> Result<Report, Error>) -> Value {
    let mut reports = Vec::new();
    let mut ok = true;
    for model in models::models() {
        match work(&model) {
            Ok(report) => {
                let taken = |file: &FileReport| file.event() == FileEvent::Taken;
                ok &= report.failure.is_none() && report.files.iter().all(taken);
                reports.push(report_as_json(&model, &report));
            }
            Err(error) => {
                ok = false;
                reports.push(json!({"model": model.number, "error": error.to_string()}));
            }
        }
    }
    json!({"ok": ok, "reports": reports})
}

fn report_as_json(model: &Model, report: &Report) -> Value {
    let count = |outcome| report.count(outcome);
    let files = report.files.iter().map(|file| {
        json!({
            "path": file.path.display().to_string(),
            "event": match file.event() { FileEvent::Taken => "taken", FileEvent::Ignored => "ignored" },
            "cause": file.ignored.as_ref().map(|ignored| ignored.cause.name()),
            "reason": file.reason(),
        })
    });
    let tensors = report
        .tensors
        .iter()
        .filter(|tensor| tensor.outcome != Outcome::Unchanged)
        .map(|tensor| {
            json!({
                "name": tensor.name.to_string_lossy(),
                "outcome": format!("{:?}", tensor.outcome).to_lowercase(),
                "old_type": tensor.old_type.name(),
                "new_type": tensor.new_type.name(),
                "bytes": tensor.nbytes,
                "place": tensor.placement,
                "reason": tensor.reason,
            })
        });
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({
        "model": model.number,
        "swapped": count(Outcome::Swapped),
        "returned": count(Outcome::Returned),
        "unchanged": count(Outcome::Unchanged),
        "in_place": count(Outcome::InPlace),
        "refused": count(Outcome::Refused),
        "generation": report.generation,
        "failure": report.failure,
        "ms": {
            "detect": ms(report.times.detect),
            "compare": ms(report.times.compare),
            "stage": ms(report.times.stage),
            "wait": ms(report.times.wait),
            "switch": ms(report.times.switch),
            "total": ms(report.times.total),
        },
        "files": files.collect::<Vec<_>>(),
        "tensors": tensors.collect::<Vec<_>>(),
    })
}
