//! The control socket: one JSON object a line, and one in answer.
//!
//! [`llama_sidecar::protocol`] has the messages.
//!
//! Each client has its own thread, which evaluations never wait for. A client that sends a
//! line that is too long or not JSON gets an error, and its connection is closed.

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
use llama_sidecar::protocol::{
    Blocked, FileEvent, FileStatus, Hashes, Metrics, Milliseconds, ModelHash, ModelReload,
    ModelStatus, Overlay, ReloadReport, Reloads, Reply, Request, Round, Status, TensorChange,
    TensorState, TensorStatus, Traces, Waiting,
};
use llama_sidecar::reload::{Outcome, Report, Trigger};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::models::{Instance, Model};
use crate::overlays::Overlays;
use crate::{
    barrier, expert_trace, metrics, models, own_cache, placement, postfetch, reloader, rounds,
    routes, sched, streaming, thread,
};

/// The longest request: a swap may name every tensor of a model.
const MAX_LINE: u64 = 1 << 20;
/// Clients at a time.
const MAX_CLIENTS: usize = 16;
/// How long a client may take to send a line or to take an answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);

/// The socket of this process, to be removed at the end: path, device and inode.
static SOCKET: Mutex<Option<(PathBuf, (u64, u64))>> = Mutex::new(None);
static CLIENTS: AtomicUsize = AtomicUsize::new(0);

/// Listens at `path`.
pub fn start(path: &Path) {
    match listen(path) {
        Ok((listener, identity)) => {
            *SOCKET.lock() = Some((path.to_owned(), identity));
            if thread::spawn("llama-sidecar-c", move || serve(&listener)) {
                rounds::drive();
            }
        }
        Err(error) => log::error!(
            "--socket (LLAMA_SIDECAR_CONTROL): cannot create the control socket {}: {error}; choose another path, for several processes one with %p, which stands for the process id",
            path.display()
        ),
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
fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::other("another file is there"));
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
        checked(libc::listen(socket.as_raw_fd(), MAX_CLIENTS as libc::c_int))?;
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
            // The process probably has no free descriptors.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if CLIENTS.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
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
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut lines = BufReader::new(client);
    loop {
        let mut line = Vec::new();
        lines.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Ok(());
        }
        let refusal = match line.last() {
            Some(b'\n') => None,
            _ => Some("expected a JSON object and the end of a line within 1 MiB"),
        };
        let request = match refusal {
            Some(text) => Err(text.to_owned()),
            None => request(&line),
        };
        let ends = request == Ok(Request::RoundEnd);
        let answer = request.and_then(|request| answer(request, client));
        let ends = ends && answer.is_ok();
        let (answer, go_on) = match answer {
            Ok(answer) => (answer, true),
            Err(text) => (json!(Reply::refused(text)), false),
        };
        let mut client = client;
        let written = client.write_all(format!("{answer}\n").as_bytes());
        if ends {
            // Not before the reply is written: the process ends next.
            rounds::end();
        }
        written?;
        if !go_on {
            return Ok(());
        }
    }
}

fn request(line: &[u8]) -> Result<Request, String> {
    serde_json::from_slice(line).map_err(|error| {
        format!(
            "not a request: {error}; send a JSON object such as {{\"cmd\":\"status\"}} on one line"
        )
    })
}

fn answer(request: Request, client: &UnixStream) -> Result<Value, String> {
    Ok(match request {
        Request::Ping => json!(Reply::done()),
        Request::Status => json!(status()),
        Request::Reload => json!(with_each_model(|model| {
            reloader::reload(model, Trigger::Command)
        })),
        Request::Revert => {
            reloader::freeze();
            json!(with_each_model(reloader::revert))
        }
        Request::Unfreeze => {
            reloader::unfreeze();
            json!(Reply::done())
        }
        Request::Swap { revert, overlays } => match Overlays::find(revert.as_deref(), &overlays) {
            Ok(overlays) => json!(with_each_model(|model| {
                let (revert, set) = overlays.of(model);
                reloader::swap(model, revert, &set)
            })),
            Err(reason) => json!(Reply::refused(reason)),
        },
        Request::Hash => json!(hashes()),
        Request::Metrics => json!(Metrics {
            ok: true,
            text: metrics::text(),
        }),
        Request::Trace if !Config::get().traces() => {
            return Err(
                "experts are not counted: start the program with --expert-trace-stats (LLAMA_EXPERT_TRACE_STATS=1)".into(),
            );
        }
        Request::Trace => json!(Traces {
            ok: true,
            traces: expert_trace::as_json(),
        }),
        Request::TraceReset => {
            expert_trace::reset();
            json!(Reply::done())
        }
        Request::Mark { text } => {
            routes::mark(&text)?;
            json!(Reply::done())
        }
        Request::Round { start } => json!(round(start, client)?),
        Request::RoundEnd => {
            rounds::exist()?;
            json!(Reply::done())
        }
    })
}

/// Waits for the end of a round, which it starts if `start` is true, as long as the client is
/// connected.
fn round(start: bool, client: &UnixStream) -> Result<Round, String> {
    let ended = match start {
        true => rounds::evaluate(|| is_connected(client)),
        false => rounds::wait(|| is_connected(client)),
    }?;
    Ok(Round {
        ok: true,
        error: None,
        round: ended.round,
        exit: ended.exit,
        state: ended.phase.name().into(),
    })
}

/// Whether a client can take an answer. One that only sends nothing more is connected.
fn is_connected(client: &UnixStream) -> bool {
    let mut poll = libc::pollfd {
        fd: client.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one element, whose descriptor is open; does not wait.
    unsafe { libc::poll(&mut poll, 1, 0) };
    poll.revents & (libc::POLLHUP | libc::POLLERR) == 0
}

fn status() -> Status {
    let pauses = barrier::pauses();
    Status {
        ok: true,
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        evaluations: sched::count(),
        generation: barrier::generation(),
        graphs_renewed: sched::rebuilt(),
        pauses: pauses.count,
        longest_pause_us: pauses.longest_us(),
        frozen: reloader::is_frozen(),
        waiting: barrier::pending().map(|(obstacle, since)| Waiting {
            obstacle: obstacle.map(|obstacle| obstacle.name().into()),
            seconds: since.as_secs_f64(),
        }),
        post_fetch: postfetch::is_used().then(postfetch::figures),
        own_expert_cache: own_cache::figures(),
        failures: reloader::counts()
            .failures
            .filter(|(_, count)| *count > 0)
            .map(|(cause, count)| (cause.name().into(), count))
            .collect(),
        models: models::models().iter().map(model_status).collect(),
    }
}

fn model_status(model: &Arc<Model>) -> ModelStatus {
    let paths = model
        .files
        .iter()
        .map(|file| file.gguf.source.path().display().to_string());
    let known = model.engine.changed();
    let path = |from: &PathBuf| from.display().to_string();
    let mut changed = Vec::new();
    for (index, tensor) in model.tensors.iter().enumerate() {
        let instances = tensor.instances.iter().filter(|of| !of.is_copy());
        let states: Vec<_> = instances.map(|of| state(model, of)).collect();
        if states.iter().all(|&state| state == TensorState::OnOriginal) {
            continue;
        }
        let of = known.iter().find(|of| of.tensor == index);
        changed.push(TensorStatus {
            name: model.name(index).to_string_lossy().into_owned(),
            states,
            old_type: of.map_or("", |of| of.original_type.name()).into(),
            new_type: of.map_or("", |of| of.ty.name()).into(),
            from: of.and_then(|of| of.overlay.as_ref()).map(path),
        });
    }
    let instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
    let overlays = known.iter().filter_map(|of| {
        Some(Overlay {
            tensor: model.name(of.tensor).to_string_lossy().into_owned(),
            from: path(of.overlay.as_ref()?),
            named: None,
        })
    });
    ModelStatus {
        model: model.number,
        files: paths.collect(),
        tensors: model.tensors.len(),
        instances: instances.filter(|of| !of.is_copy()).count(),
        on_original: model.tensors.len() - changed.len(),
        changed,
        overlays: overlays.collect(),
        private_bytes: model.private_bytes(),
        kept_bytes: model.pool.bytes(),
        blocked: reloader::blocked(model).map(|blocked| Blocked {
            cause: blocked.cause.name().into(),
            error: blocked.error,
            seconds: blocked.since.elapsed().as_secs_f64(),
            attempts: blocked.attempts,
        }),
        content_hash: model
            .engine
            .content_hash(false)
            .map(|hash| format!("{hash:032x}")),
        stream: streaming::figures(model),
        obstacle: Config::get().hotswap.then(|| model.obstacle()).flatten(),
        uncounted: expert_trace::uncounted(model),
        hotswaps: model.own_hotswap.map(|own| own.sentence().into()),
    }
}

/// Returns a content hash of each model. Reads a model that was never swapped as a whole.
fn hashes() -> Hashes {
    let models = models::models().into_iter().map(|model| {
        let hash = reloader::read_content_hash(&model);
        ModelHash {
            model: model.number,
            content_hash: hash.map(|hash| format!("{hash:032x}")),
        }
    });
    Hashes {
        ok: true,
        models: models.collect(),
    }
}

/// Returns the state of one instance.
fn state(model: &Model, instance: &Instance) -> TensorState {
    let private = instance.private.lock();
    let Some(buffer) = private.as_ref() else {
        return TensorState::OnOriginal;
    };
    match buffer.is_host() && placement::device_buffer_type(model, instance).is_some() {
        true => TensorState::FallbackCpu,
        false => TensorState::Detached,
    }
}

/// Reloads, reverts or swaps all models, one after the other.
fn with_each_model(work: impl Fn(&Arc<Model>) -> Result<Report, Error>) -> Reloads {
    let mut reports = Vec::new();
    let mut ok = true;
    for model in models::models() {
        reports.push(match work(&model) {
            Ok(report) => {
                let all_used = report.files.iter().all(|file| file.ignored.is_none());
                ok &= report.failure.is_none() && all_used;
                ModelReload::Done(reload_report(&model, &report))
            }
            Err(error) => {
                ok = false;
                ModelReload::Failed {
                    model: model.number,
                    error: error.to_string(),
                }
            }
        });
    }
    Reloads { ok, reports }
}

fn reload_report(model: &Model, report: &Report) -> ReloadReport {
    let count = |outcome| report.count(outcome);
    let files = report.files.iter().map(|file| FileStatus {
        path: file.path.display().to_string(),
        event: match file.ignored {
            None => FileEvent::Taken,
            Some(_) => FileEvent::Ignored,
        },
        cause: file
            .ignored
            .as_ref()
            .map(|ignored| ignored.cause.name().into()),
        reason: file.reason().into(),
    });
    let changed = report
        .tensors
        .iter()
        .filter(|tensor| tensor.outcome != Outcome::Unchanged);
    let tensors = changed.map(|tensor| TensorChange {
        name: tensor.name.to_string_lossy().into_owned(),
        outcome: format!("{:?}", tensor.outcome).to_lowercase(),
        old_type: tensor.old_type.name().into(),
        new_type: tensor.new_type.name().into(),
        bytes: tensor.nbytes,
        place: tensor.placement.clone(),
        reason: tensor.reason.clone(),
    });
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    ReloadReport {
        model: model.number,
        swapped: count(Outcome::Swapped),
        returned: count(Outcome::Returned),
        unchanged: count(Outcome::Unchanged),
        in_place: count(Outcome::InPlace),
        refused: count(Outcome::Refused),
        generation: report.generation,
        failure: report.failure.clone(),
        ms: Milliseconds {
            detect: ms(report.times.detect),
            compare: ms(report.times.compare),
            stage: ms(report.times.stage),
            wait: ms(report.times.wait),
            switch: ms(report.times.switch),
            total: ms(report.times.total),
        },
        files: files.collect(),
        tensors: tensors.collect(),
    }
}
