//! `llama-sidecar status`, `reload`, `revert`, `unfreeze`, `metrics`, `trace`,
//! `mark`, `round` and `ping`:
//! requests to the control socket of a running program.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::net::SocketFlags;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sidecar_core::config::{Config, Variable};
use sidecar_core::protocol::{
    self, FileStatus, Hashes, LayerMask, Metrics, ModelReload, ReloadReport, Reloads, Reply,
    Request, Round, Status, TensorState, Traces,
};
use sidecar_core::trace::{from_json, to_text};
use sidecar_core::{summary, text};

use crate::control::mask;
use crate::control::server::ServerOptions;
use crate::control::sockets;
use crate::deadline::Deadline;
use crate::print::stdout;
use crate::sizes::time;
use crate::words::quoted;

/// What a change of weights, masks or a margin leaves.
pub const CACHED: &str = "note: a cached prompt keeps the keys and values of before the change: send \"cache_prompt\": false, or empty the slots of llama-server with 'ctl reload --server URL'";
/// How long a request is repeated while other clients have all connections.
const PATIENCE: Duration = Duration::from_secs(30);
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// The longest reply in bytes. A status names each changed tensor of each model.
const LONGEST_REPLY: u64 = 64 << 20;
/// The longest reply to a sample, of which there are many.
const LONGEST_SAMPLE: u64 = 16 << 20;
/// How long a reply may take that waits neither for an evaluation nor for a disk.
const SHORT: Duration = Duration::from_secs(5);
/// How long a reply may take that waits for an evaluation, or for files that are read.
const LONG: Duration = Duration::from_secs(3600);

/// A control socket of a program, and how its replies are used.
#[derive(clap::Args)]
pub struct Control {
    /// Path of the control socket, from LLAMA_SIDECAR_CONTROL of the program. By default that of the only program that
    /// 'run' has started without one.
    #[arg(short, long, env = "LLAMA_SIDECAR_CONTROL")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub limit: Limit,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Control {
    /// Returns the path of the socket. Fails where it is not known.
    pub fn socket(&self) -> Result<PathBuf> {
        self.socket.clone().map_or_else(sockets::only, Ok)
    }
}

/// How long a reply may take.
#[derive(Clone, Copy, Default, clap::Args)]
pub struct Limit {
    /// The longest time until the answer is complete. By default 5s for 'ping', 'status' and 'metrics', and 1h for others; a
    /// round takes as long as it takes.
    #[arg(long, value_name = "TIME", value_parser = time)]
    timeout: Option<Duration>,
}

impl Limit {
    /// Returns how long an answer may take that waits for evaluations.
    pub fn of_answer(self) -> Duration {
        self.timeout.unwrap_or(LONG)
    }

    /// Returns how long the reply to a request may take; `None` where that is not limited.
    fn of(self, request: &Request) -> Option<Duration> {
        self.timeout.or(match request {
            Request::Ping | Request::Status | Request::Metrics => Some(SHORT),
            Request::Round { .. } | Request::RoundEnd => None,
            _ => Some(self.of_answer()),
        })
    }
}

/// Sends a request and prints the reply, as text or as JSON.
pub fn run(at: &Control, request: &Request) -> Result<()> {
    run_at(&at.socket()?, at, request)
}

/// Sends a request that changes something, prints the reply, and how to undo it.
pub fn change(at: &Control, request: &Request, undo: &str) -> Result<()> {
    let socket = at.socket()?;
    run_at(&socket, at, request)?;
    if at.json {
        return Ok(());
    }
    // What is removed is not known any more.
    if !matches!(request, Request::Mask { masks, clear: true } if masks.is_empty()) {
        say_undo(&socket, undo)?;
    }
    match request {
        Request::Swap { .. } | Request::Mask { .. } | Request::Prefer { .. } => {
            Ok(writeln!(stdout(), "{CACHED}")?)
        }
        _ => Ok(()),
    }
}

fn run_at(socket: &Path, at: &Control, request: &Request) -> Result<()> {
    let answer = ask(socket, request, at.limit)?;
    if at.json {
        writeln!(stdout(), "{answer:#}")?;
        return finish(request, &answer);
    }
    print_reply(socket, request, answer)
}

/// Prints how a change of a program is undone.
pub fn say_undo(socket: &Path, undo: &str) -> Result<()> {
    let socket = quoted(socket.as_os_str());
    Ok(writeln!(
        stdout(),
        "done; undo it with: llama-sidecar {undo} -s {socket}"
    )?)
}

/// Prints a reply as text. Fails if it reports a failure.
pub fn print_reply(socket: &Path, request: &Request, mut answer: Value) -> Result<()> {
    let mut out = stdout();
    if answer["error"].is_null() {
        // Metrics are lines.
        if !matches!(request, Request::Metrics) {
            text::one_line(&mut answer);
        }
        // A refused request has a reply with nothing to print.
        match request {
            Request::Ping => writeln!(out, "llama-sidecar listens at {}", text::path(socket))?,
            Request::Status => print_status(&mut out, &parsed(&answer)?)?,
            Request::Reload | Request::Swap { .. } => print_reloads(&mut out, &parsed(&answer)?)?,
            Request::Revert => {
                let reloads: Reloads = parsed(&answer)?;
                print_reloads(&mut out, &reloads)?;
                if reloads.unmasked > 0 {
                    writeln!(out, "masks of {} layers are removed", reloads.unmasked)?;
                }
                match reloads.reports.is_empty() {
                    // Without hot-swap, there are only masks.
                    true if reloads.unmasked == 0 => writeln!(out, "nothing to revert")?,
                    true => {}
                    false => writeln!(
                        out,
                        "reloads are frozen: run 'llama-sidecar ctl unfreeze' to permit them"
                    )?,
                }
            }
            Request::Unfreeze => writeln!(out, "reloads are permitted")?,
            Request::Metrics => write!(out, "{}", parsed::<Metrics>(&answer)?.text)?,
            Request::Hash => print_hashes(&mut out, &parsed(&answer)?)?,
            Request::Trace => print_traces(&mut out, &parsed(&answer)?)?,
            Request::TraceReset => writeln!(out, "all counts are 0")?,
            Request::Mask { masks, clear } => {
                match (clear, masks.is_empty()) {
                    (true, true) => writeln!(out, "all masks are removed")?,
                    (true, false) => writeln!(out, "masks of other layers are removed")?,
                    (false, _) => {}
                }
                for LayerMask { layer, experts } in masks {
                    let found = match experts.is_empty() {
                        true => "none".into(),
                        false => mask::text(experts),
                    };
                    writeln!(out, "layer {layer}: masked {found}")?;
                }
            }
            Request::Prefer { margin } => writeln!(
                out,
                "experts in memory replace others whose scores are higher by less than {margin}"
            )?,
            Request::Mark { text } => writeln!(out, "marked: {}", text::line(text))?,
            Request::Round { .. } => {
                let Round { round, exit, .. } = parsed(&answer)?;
                writeln!(out, "round {round} has ended with {exit}")?;
            }
            Request::RoundEnd => writeln!(out, "the program ends")?,
        }
    }
    finish(request, &answer)
}

/// Fails if a reply reports a failure, also of a round.
fn finish(request: &Request, answer: &Value) -> Result<()> {
    done(answer)?;
    if let Request::Round { .. } = request {
        let Round { round, exit, .. } = parsed(answer)?;
        ensure!(
            exit == 0,
            "round {round} failed: read what the program printed"
        );
    }
    Ok(())
}

/// Reloads changed files; then empties the slots of a llama-server, if one is named.
///
/// Returns whether tensors were swapped.
pub fn reload(at: &Control, server: &ServerOptions) -> Result<bool> {
    let socket = &*at.socket()?;
    // Before anything changes, because the slots must be erasable afterwards.
    let server = server.check(|| process_at(socket))?;
    let mut answer = ask(socket, &Request::Reload, at.limit)?;
    let mut erased = None;
    if let Some(server) = &server {
        // Also if this reload changed nothing: an earlier one may have, by polling, or a mask.
        let result = server.erase();
        if let Ok(count) = result {
            answer["slots_erased"] = count.into();
        }
        erased = Some(result);
    }
    let mut out = stdout();
    if at.json {
        writeln!(out, "{answer:#}")?;
    } else {
        text::one_line(&mut answer);
        let reloads: Reloads = parsed(&answer)?;
        print_reloads(&mut out, &reloads)?;
        if reloads.reports.is_empty() {
            writeln!(
                out,
                "nothing to reload: no model is loaded, and the next load reads the files as they are"
            )?;
        }
        if let Some(Ok(count)) = erased {
            writeln!(out, "{count} slots of the server emptied")?;
        }
    }
    erased.transpose()?;
    done(&answer)?;
    let reloads: Reloads = parsed(&answer)?;
    let swaps = |reload: &ModelReload| match reload {
        ModelReload::Done(report) => report.swapped > 0,
        ModelReload::Failed { .. } => false,
    };
    Ok(reloads.reports.iter().any(swaps))
}

/// Fails if a reply reports a failure.
pub fn done(answer: &Value) -> Result<()> {
    let reply: Reply = parsed(answer)?;
    if !reply.ok || reply.error.is_some() {
        let reasons = "not everything was used: see the reasons above, or run with --json";
        bail!("{}", reply.error.as_deref().unwrap_or(reasons));
    }
    Ok(())
}

/// Parses a reply.
pub fn parsed<T: DeserializeOwned>(answer: &Value) -> Result<T> {
    T::deserialize(answer).context("the reply comes from another version of llama-sidecar: use the command of the version that runs")
}

/// Fails if a process listens at a socket already, or if something else is there.
pub fn check_unused(socket: &Path) -> Result<()> {
    let title = Variable::title_of("LLAMA_SIDECAR_CONTROL");
    let there = socket.symlink_metadata();
    ensure!(
        !there.is_ok_and(|found| !found.file_type().is_socket()),
        "{title}: {} is there, and is no socket: choose another path",
        text::path(socket)
    );
    ensure!(
        socket.as_os_str().len() <= sockets::LONGEST,
        "{title}: {} has more than {} bytes, the most that unix(7) permits: choose a shorter path",
        text::path(socket),
        sockets::LONGEST
    );
    let Ok(stream) = UnixStream::connect(socket) else {
        return Ok(());
    };
    let process = peer(&stream).unwrap_or(0);
    let name = std::fs::read_to_string(format!("/proc/{process}/comm"));
    let who = name.map_or("another process".into(), |name| {
        format!("process {process} ({})", name.trim_end())
    });
    bail!(
        "{title}: {who} listens at {} already: end that process, or choose another path, for several processes one with %p, which stands for the process id",
        text::path(socket)
    )
}

/// Returns the process that listens at a socket, by its number in this process namespace.
fn process_at(socket: &Path) -> Result<u32> {
    let process = peer(&connect(socket, &Request::Reload, None)?);
    let socket = text::path(socket);
    let process =
        process.with_context(|| format!("cannot find the process that listens at {socket}"))?;
    ensure!(
        process > 0,
        "the process that listens at {socket} is in another process namespace, so its arguments cannot be checked for --cache-ram 0: run this command in its container"
    );
    Ok(process)
}

/// Returns the process at the other end of a connection; 0 if it is in another process namespace.
fn peer(stream: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // rustix has this option, but its process id cannot be 0.
    // SAFETY: the descriptor is open, and the option fills in a struct of this size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    match result {
        0 => Ok(u32::try_from(peer.pid).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a request and returns the reply. While other clients have all connections, tries again.
pub fn ask(socket: &Path, request: &Request, limit: Limit) -> Result<Value> {
    let until = limit.of(request).map(|time| Instant::now() + time);
    let answer = ask_until(socket, request, until, LONGEST_REPLY);
    answer.map_err(|error| match error.downcast::<Late>() {
        Ok(late) => anyhow!(
            "{late}: pass a longer --timeout, or see whether the program is stopped; it may still carry out the request"
        ),
        Err(error) => error,
    })
}

/// Sends a request and returns the reply, if it is complete in this time and short. A refusal is an error.
pub fn ask_within(socket: &Path, request: &Request, time: Duration) -> Result<Value> {
    let until = Instant::now() + time;
    let answer = ask_until(socket, request, Some(until), LONGEST_SAMPLE)?;
    done(&answer)?;
    Ok(answer)
}

/// A reply that was not complete in time.
#[derive(Debug, thiserror::Error)]
#[error("{socket} does not answer in time: {error}", socket = text::path(socket))]
struct Late {
    socket: PathBuf,
    error: io::Error,
}

fn ask_until(
    socket: &Path,
    request: &Request,
    until: Option<Instant>,
    longest: u64,
) -> Result<Value> {
    let patience = Instant::now() + PATIENCE;
    let last = until.map_or(patience, |until| until.min(patience));
    let mut busy = None;
    loop {
        let answer = match (ask_once(socket, request, until, longest), busy) {
            // It has given a reason before.
            (Err(error), Some(busy)) if error.is::<Late>() => return Ok(busy),
            (answer, _) => answer?,
        };
        if answer["busy"] != true || Instant::now() + BUSY_PAUSE >= last {
            return Ok(answer);
        }
        busy = Some(answer);
        std::thread::sleep(BUSY_PAUSE);
    }
}

fn ask_once(
    socket: &Path,
    request: &Request,
    until: Option<Instant>,
    longest: u64,
) -> Result<Value> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    if left.is_some_and(|left| left.is_zero()) {
        // A time of 0 has no limit for the kernel.
        let (socket, error) = (socket.to_owned(), ErrorKind::TimedOut.into());
        bail!(Late { socket, error });
    }
    let mut stream = connect(socket, request, left)?;
    stream.set_write_timeout(left)?;
    // A connection that is turned away is closed: what was sent before has the reason.
    let sent = stream.write_all(protocol::line(request).as_bytes());
    let mut answer = Vec::new();
    let reply = Deadline { stream, until }.take(longest);
    let read = BufReader::new(reply).read_until(b'\n', &mut answer);
    if until.is_some_and(|until| Instant::now() >= until)
        && let Err(error) = read
    {
        // What came until then is no answer.
        let socket = socket.to_owned();
        bail!(Late { socket, error });
    }
    ensure!(
        (answer.len() as u64) < longest,
        "{} answers with {longest} bytes or more, which no control socket of llama-sidecar does",
        text::path(socket)
    );
    let is_cut = !answer.ends_with(b"\n");
    if is_cut && (answer.is_empty() || answer.starts_with(b"{")) {
        let cause = sent.and(read).err().map(|error| format!(" ({error})"));
        bail!(
            "{} was closed without a complete reply{}, as by the end of the process: see the output of the program, and start it again",
            text::path(socket),
            cause.unwrap_or_default()
        );
    }
    serde_json::from_slice(&answer).with_context(|| {
        let start = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
        format!(
            "{} is not a control socket of llama-sidecar: expected JSON, found {start:?}",
            text::path(socket)
        )
    })
}

/// Checks that a program listens. The error names the flags that permit `request`.
pub fn check_connection(socket: &Path, request: &Request) -> Result<()> {
    connect(socket, request, None).map(drop)
}

/// Connects, and waits for at most so long while other clients wait to be accepted.
fn connect(socket: &Path, request: &Request, time: Option<Duration>) -> Result<UnixStream> {
    let refused = |error: io::Error| {
        let next = match error.kind() {
            ErrorKind::PermissionDenied => match owner_of(socket) {
                Some(owner) => {
                    format!("the socket belongs to {owner}: run this command as that user")
                }
                None => "its folder belongs to others: run this command as the user of the program"
                    .into(),
            },
            ErrorKind::WouldBlock => {
                "the program is stopped, or too many clients wait: try again".into()
            }
            _ if socket
                .metadata()
                .is_ok_and(|of| !of.file_type().is_socket()) =>
            {
                "it is no socket: name that of a running program, see 'run --socket'".into()
            }
            ErrorKind::ConnectionRefused => {
                "the program that made this socket has ended without removing it: start it again"
                    .into()
            }
            _ if text::path(socket).contains('*') => {
                "a pattern can be used with 'ctl metrics --listen' alone".into()
            }
            _ => {
                let flags = flags_for(request);
                let (flag, which) = match flags {
                    [one] => (*one, String::new()),
                    [several @ .., last] => {
                        let which = format!(", where FLAG is {} or {last}", several.join(", "));
                        ("FLAG", which)
                    }
                    [] => ("FLAG", String::new()),
                };
                format!(
                    "start the program with 'llama-sidecar run {flag} --socket {} -- COMMAND'{which}; the socket appears after its first evaluation",
                    text::path(socket)
                )
            }
        };
        anyhow!("cannot connect to {}: {error}; {next}", text::path(socket))
    };
    let connected = sockets::connect(socket, SocketFlags::empty(), time);
    connected
        .map(UnixStream::from)
        .map_err(|error| refused(error.into()))
}

/// Returns the user who owns a file, with the name if it is known.
fn owner_of(path: &Path) -> Option<String> {
    let id = std::fs::symlink_metadata(path).ok()?.uid();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id.to_string()).then(|| format!("{name} (user {id})"))
    });
    Some(name.unwrap_or_else(|| format!("user {id}")))
}

/// Returns the flag of `run` with which a program can answer a request.
fn flags_for(request: &Request) -> &'static [&'static str] {
    match request {
        Request::Reload | Request::Unfreeze | Request::Swap { .. } => &["--hotswap"],
        Request::Revert => &["--hotswap", "--expert-masks"],
        Request::Trace | Request::TraceReset => &["--expert-trace-stats"],
        Request::Mask { .. } => &["--expert-masks"],
        Request::Prefer { .. } => &["--stream-prefer MARGIN --accept-changed-results"],
        Request::Mark { .. } => &["--expert-trace-routes PATH"],
        Request::Round { .. } | Request::RoundEnd => &["--rounds"],
        Request::Ping | Request::Status | Request::Metrics | Request::Hash => &[
            "--hotswap",
            "--stream-experts",
            "--post-fetch",
            "--expert-trace-stats",
            "--expert-masks",
        ],
    }
}

fn print_status(out: &mut impl Write, status: &Status) -> Result<()> {
    writeln!(
        out,
        "process {}, {} evaluations, {} switches, longest pause {} us",
        status.pid, status.evaluations, status.generation, status.longest_pause_us
    )?;
    if status.frozen {
        writeln!(
            out,
            "reloads are frozen: run 'llama-sidecar ctl unfreeze' to permit them"
        )?;
    }
    for model in status
        .models
        .iter()
        .filter(|of| status.frozen && of.differs)
    {
        let paths = model.files.join(", ");
        writeln!(
            out,
            "model {}: a file is another one than at the start: {paths}",
            model.model
        )?;
    }
    if let Some(waiting) = &status.waiting {
        writeln!(
            out,
            "a swap has waited for {:.1} s; obstacle: {}",
            waiting.seconds,
            waiting.obstacle.as_deref().unwrap_or("none")
        )?;
    }
    if let Some(figures) = &status.post_fetch {
        writeln!(out, "post-fetch: {}", summary::post_fetch(figures))?;
    }
    for found in &status.no_effect {
        writeln!(out, "{}", summary::no_effect(found))?;
    }
    if let Some(no_model) = &status.no_model {
        writeln!(out, "{no_model}")?;
    }
    for model in &status.models {
        writeln!(
            out,
            "model {}: {} tensors of {} file(s), {} as loaded: {}",
            model.model,
            model.tensors,
            model.files.len(),
            model.on_original,
            model.files.first().map_or("", String::as_str)
        )?;
        if let Some(hotswaps) = &model.hotswaps {
            writeln!(out, "  {hotswaps}")?;
        }
        if let Some(blocked) = &model.blocked {
            writeln!(
                out,
                "  reloads have failed for {:.0} s, {} attempts: {}",
                blocked.seconds, blocked.attempts, blocked.error
            )?;
        }
        print_files(out, &model.noted)?;
        for (buffer, bytes) in &model.loaded_bytes {
            writeln!(out, "  {bytes} bytes were loaded into {buffer}")?;
        }
        writeln!(
            out,
            "  {} bytes in buffers of swapped tensors, content {}",
            model.private_bytes,
            model
                .content_hash
                .as_deref()
                .unwrap_or("not hashed yet (status --hash)")
        )?;
        for LayerMask { layer, experts } in &model.masks {
            let experts = mask::text(experts);
            writeln!(out, "  layer {layer}: masked experts {experts}")?;
        }
        for line in model.stream.iter().flat_map(summary::streaming) {
            writeln!(out, "  {line}")?;
        }
        for tensor in &model.changed {
            let from = tensor.from.as_ref().map(|from| format!(" from {from}"));
            let on_host = tensor.states.contains(&TensorState::FallbackCpu);
            writeln!(
                out,
                "  {:40} {} -> {}{}{}",
                tensor.name,
                tensor.old_type,
                tensor.new_type,
                from.unwrap_or_default(),
                if on_host { ", in host memory" } else { "" }
            )?;
        }
        // Overlays with the bytes that were loaded.
        let changed = |name: &str| model.changed.iter().any(|tensor| tensor.name == name);
        for overlay in model
            .overlays
            .iter()
            .filter(|overlay| !changed(&overlay.tensor))
        {
            writeln!(
                out,
                "  {:40} as loaded, from {}",
                overlay.tensor, overlay.from
            )?;
        }
    }
    Ok(())
}

fn print_hashes(out: &mut impl Write, hashes: &Hashes) -> Result<()> {
    for model in &hashes.models {
        let hash = model.content_hash.as_deref();
        writeln!(
            out,
            "model {}: {}",
            model.model,
            hash.unwrap_or(
                "unknown: its file was written or cannot be read; reload, then try again"
            )
        )?;
    }
    Ok(())
}

fn print_reloads(out: &mut impl Write, reloads: &Reloads) -> Result<()> {
    for report in &reloads.reports {
        match report {
            ModelReload::Failed { model, error } => writeln!(out, "model {model}: {error}")?,
            ModelReload::Done(report) => print_report(out, report)?,
        }
    }
    Ok(())
}

fn print_report(out: &mut impl Write, report: &ReloadReport) -> Result<()> {
    writeln!(
        out,
        "model {}: {} swapped, {} returned, {} unchanged, {} in place, {} refused; {:.1} ms, pause {:.1} us",
        report.model,
        report.swapped,
        report.returned,
        report.unchanged,
        report.in_place,
        report.refused,
        report.ms.total,
        report.ms.switch * 1e3,
    )?;
    if let Some(failure) = &report.failure {
        writeln!(out, "  incomplete: {failure}")?;
    }
    print_files(out, &report.files)?;
    for tensor in &report.tensors {
        writeln!(
            out,
            "  {:8} {:40} {} -> {} {} {}",
            tensor.outcome,
            tensor.name,
            tensor.old_type,
            tensor.new_type,
            tensor.place,
            tensor.reason,
        )?;
    }
    Ok(())
}

fn print_files(out: &mut impl Write, files: &[FileStatus]) -> Result<()> {
    for file in files {
        let colon = if file.reason.is_empty() { "" } else { ": " };
        writeln!(
            out,
            "  {} {}{colon}{}",
            file.event.name(),
            file.path,
            file.reason
        )?;
    }
    Ok(())
}

fn print_traces(out: &mut impl Write, traces: &Traces) -> Result<()> {
    if traces.traces.is_empty() {
        writeln!(
            out,
            "no experts were counted: no model with routed experts has been evaluated"
        )?;
    }
    for trace in &traces.traces {
        let (about, counts) = from_json(trace).map_err(anyhow::Error::msg)?;
        write!(
            out,
            "{}",
            to_text(&about, &counts, true, Config::get().trace_top)
        )?;
    }
    Ok(())
}
