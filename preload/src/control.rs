//! The control socket: one JSON object a line, and one in answer.
//!
//! | request | answer |
//! |---|---|
//! | `{"cmd":"ping"}` | `{"ok":true}` |
//! | `{"cmd":"status"}` | models, files, tensors that are not as loaded, counters |
//! | `{"cmd":"trace"}` | which experts were used, model by model (`llama_sidecar::trace::SCHEMA`) |
//! | `{"cmd":"trace-reset"}` | counts anew from here on |
//! | `{"cmd":"reload"}` | once everything is switched, what was done |
//!
//! Clients are served by threads of their own, which the host never waits for. One
//! that sends a line that is too long, or no JSON, is told so and dropped.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use llama_sidecar::config::Config;
use llama_sidecar::log::{Level, log};
use llama_sidecar::reload::{FileEvent, FileReport, Outcome, Report};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::registry::{Instance, Model};
use crate::{evaluations, gate, placement, registry, service, tracing};

/// The longest request; ours have less than 100 bytes.
const LONGEST_LINE: u64 = 4096;
/// Clients at a time.
const MOST_CLIENTS: usize = 16;
/// How long a client may take to send a line or to take an answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(10);

/// Path of the socket that is ours, to be removed at the end.
static OURS: Mutex<Option<PathBuf>> = Mutex::new(None);
static CLIENTS: AtomicUsize = AtomicUsize::new(0);

/// Listens at `path`.
pub fn start(path: &Path) {
    match listen(path) {
        Ok(listener) => {
            *OURS.lock() = Some(path.to_owned());
            service::spawn("llama-sidecar-c", move || serve(&listener));
        }
        Err(error) => log(
            Level::Error,
            format_args!(
                "LLAMA_SIDECAR_CONTROL={}: cannot listen there: {error}; there is no control socket",
                path.display()
            ),
        ),
    }
}

/// Removes the socket.
pub fn stop() {
    if let Some(path) = OURS.try_lock().and_then(|mut path| path.take()) {
        let _ = fs::remove_file(path);
    }
}

/// Binds a socket that only its owner can use, over one that nobody listens to.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other("something else is there"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::other("another process listens there"));
        }
        fs::remove_file(path)?;
    }
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
    let failed = |code: libc::c_int| match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: plain system calls on a descriptor that is owned from the start.
    unsafe {
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(socket);
        // Linux gives the path the mode that the descriptor has when it is bound: there
        // is no moment in which others could connect.
        failed(libc::fchmod(socket.as_raw_fd(), 0o600))?;
        let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        failed(libc::bind(
            socket.as_raw_fd(),
            (&raw const address).cast(),
            size,
        ))?;
        failed(libc::listen(
            socket.as_raw_fd(),
            MOST_CLIENTS as libc::c_int,
        ))?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(UnixListener::from(socket))
    }
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
        let started = service::spawn("llama-sidecar-c", move || {
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
        Some("reload") => Ok(reload()),
        Some("trace") => match Config::get().traces() {
            true => Ok(json!({"ok": true, "traces": tracing::as_json()})),
            false => Err("start the host with LLAMA_EXPERT_TRACE_STATS=1".into()),
        },
        Some("trace-reset") => {
            tracing::reset();
            Ok(json!({"ok": true}))
        }
        _ => Err("expected \"cmd\" to be ping, status, reload, trace or trace-reset".into()),
    }
}

fn status() -> Value {
    let pauses = gate::pauses();
    let models = registry::models();
    let models: Vec<Value> = models.iter().map(|model| model_status(model)).collect();
    json!({
        "ok": true,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "evaluations": evaluations::count(),
        "generation": gate::generation(),
        "graphs_renewed": evaluations::renewed(),
        "pauses": pauses.count,
        "longest_pause_us": pauses.longest.as_micros() as u64,
        "models": models,
    })
}

fn model_status(model: &Model) -> Value {
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
    })
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

/// Reloads all models, one after the other.
fn reload() -> Value {
    let mut reports = Vec::new();
    let mut ok = true;
    for model in registry::models() {
        match service::reload(&model) {
            Ok(report) => {
                let taken = |file: &FileReport| file.event == FileEvent::Taken;
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
            "event": match file.event { FileEvent::Taken => "taken", FileEvent::Ignored => "ignored" },
            "reason": file.reason,
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
