//! Sockets of programs that `run` started without a path for one: `PROGRAM-PID.sock` in `$XDG_RUNTIME_DIR/llama-sidecar`,
//! where commands without `--socket` look for them.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sidecar_core::{files, text};

/// The longest path of a socket (unix(7)), without the end of its text.
pub const LONGEST: usize = 107;
/// The digits of a process number (`pid_max` in proc(5)), less the two bytes that stand for it.
const MORE_DIGITS: usize = 5;

/// The message of a command without a socket where no program is found.
pub const NONE: &str = "no program is found: pass the path of its socket (--socket), or start it with 'llama-sidecar run', which makes one in $XDG_RUNTIME_DIR/llama-sidecar where hot-swap, masks, rounds or a trace is on; it appears after the first evaluation";

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
    let is_left = |path: &PathBuf| matches!(connect(path), Err(Errno::CONNREFUSED));
    for left in sockets().into_iter().filter(is_left) {
        let _ = fs::remove_file(left);
    }
    let plain = |&byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    let name = program.file_name()?.as_bytes();
    let name: Vec<u8> = name.iter().copied().filter(plain).take(32).collect();
    let path = folder.join(OsStr::from_bytes(&[&name, &b"-%p.sock"[..]].concat()));
    (path.as_os_str().len() + MORE_DIGITS <= LONGEST).then_some(path)
}

/// Returns the pattern of all sockets.
pub fn pattern() -> Option<String> {
    Some(text::path(&folder()?.join("*.sock")))
}

/// Returns the sockets at which programs listen.
pub fn running() -> Vec<PathBuf> {
    // One that is stopped, or has many clients, listens, too.
    let listens = |path: &PathBuf| matches!(connect(path), Ok(()) | Err(Errno::AGAIN));
    let mut running: Vec<PathBuf> = sockets().into_iter().filter(listens).collect();
    running.sort();
    running
}

/// Returns the socket of the only program that listens.
pub fn only() -> Result<PathBuf> {
    let mut running = running();
    match running.pop() {
        Some(one) if running.is_empty() => Ok(one),
        Some(last) => {
            running.push(last);
            let names: Vec<String> = running.iter().map(|path| text::path(path)).collect();
            bail!(
                "several programs run: pass one with --socket: {}",
                names.join(", ")
            )
        }
        None => bail!("{NONE}"),
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

/// Connects, without waiting for a place.
fn connect(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&stream, &SocketAddrUnix::new(path)?)
}
