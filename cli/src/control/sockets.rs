//! Sockets of programs that `run` started without a path for one: `PROGRAM-PID.sock` in `$XDG_RUNTIME_DIR/llama-sidecar`,
//! where commands without `--socket` look for them.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sidecar_core::{files, text};

/// The longest path of a socket (unix(7)), without the end of its text.
pub const LONGEST: usize = 107;
/// The digits of a process number (`pid_max` in proc(5)), less the two bytes that stand for it.
const MORE_DIGITS: usize = 5;

/// Returns the message of a command without a socket where no program is found.
pub fn none() -> &'static str {
    match folder() {
        Some(_) => {
            "no program is found: pass the path of its socket (--socket), or start it with 'llama-sidecar run', which makes one in $XDG_RUNTIME_DIR/llama-sidecar where hot-swap, masks, rounds, a trace or streaming is on; it appears after the first evaluation"
        }
        None => {
            "no program is found: XDG_RUNTIME_DIR is not set, so that 'llama-sidecar run' makes no socket by itself: pass a path (--socket) to 'run' and to this command"
        }
    }
}

/// Returns the folder; `None` where the user's session has none.
fn folder() -> Option<PathBuf> {
    let session = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    session.is_absolute().then(|| session.join("llama-sidecar"))
}

/// Returns the path for a program, with `%p` for the number of its process. Makes the folder, and removes sockets that killed
/// programs have left. `None` where there is no such folder of this user, or the path would be too long.
pub fn path_for(program: &Path) -> Option<PathBuf> {
    let folder = folder()?;
    if let Err(error) = DirBuilder::new().mode(0o700).create(&folder)
        && error.kind() != ErrorKind::AlreadyExists
    {
        return None;
    }
    if !is_own(&folder) {
        return None;
    }
    let is_left = |path: &PathBuf| matches!(try_connect(path), Err(Errno::CONNREFUSED));
    for left in sockets().into_iter().filter(is_left) {
        let _ = fs::remove_file(left);
    }
    let name = program.file_name()?.to_string_lossy();
    let is_plain = |of: &char| of.is_ascii_alphanumeric() || "-_".contains(*of);
    let name: String = name.chars().filter(is_plain).take(32).collect();
    let path = folder.join(format!("{name}-%p.sock"));
    (path.as_os_str().len() + MORE_DIGITS <= LONGEST).then_some(path)
}

/// Returns the pattern of all sockets.
pub fn pattern() -> Option<String> {
    Some(text::path(&folder()?.join("*.sock")))
}

/// Returns the sockets at which programs listen.
pub fn running() -> Vec<PathBuf> {
    // One that is stopped, or has many clients, listens, too.
    let listens = |path: &PathBuf| matches!(try_connect(path), Ok(_) | Err(Errno::AGAIN));
    let mut running: Vec<PathBuf> = sockets().into_iter().filter(listens).collect();
    running.sort();
    running
}

/// Returns the socket of the only program that listens.
pub fn only() -> Result<PathBuf> {
    match &running()[..] {
        [one] => Ok(one.clone()),
        [] => bail!("{}", none()),
        several => {
            let names: Vec<String> = several.iter().map(|path| text::path(path)).collect();
            bail!(
                "several programs run: pass one with --socket: {}",
                names.join(", ")
            )
        }
    }
}

/// Whether a path is a folder of this user, and no link.
fn is_own(folder: &Path) -> bool {
    fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && files::check_owner(&found).is_ok())
}

fn sockets() -> Vec<PathBuf> {
    let own = folder().filter(|folder| is_own(folder));
    let entries = own.and_then(|folder| fs::read_dir(folder).ok());
    let entries = entries.into_iter().flatten().flatten();
    let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|of| of.is_socket()));
    sockets.map(|entry| entry.path()).collect()
}

/// Connects without waiting for a place.
fn try_connect(path: &Path) -> Result<OwnedFd, Errno> {
    connect(path, SocketFlags::NONBLOCK, None)
}

/// Connects, and waits for at most so long while other clients wait to be accepted.
pub fn connect(path: &Path, flags: SocketFlags, time: Option<Duration>) -> Result<OwnedFd, Errno> {
    let flags = flags | SocketFlags::CLOEXEC;
    let stream = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // unix(7): the timeout of sending is that of connecting.
    set_socket_timeout(&stream, Timeout::Send, time)?;
    net::connect(&stream, &SocketAddrUnix::new(path)?)?;
    Ok(stream)
}
