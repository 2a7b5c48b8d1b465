//! What this process was started with and has changed for itself: programs that it starts get it as it was.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Signals that this process handles, or that Rust's runtime changes: it ignores SIGPIPE, and gives children its default. If
/// SIGCHLD is ignored, the kernel keeps no exit status for this process.
const SIGNALS: [libc::c_int; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGCHLD,
];
/// Those that were ignored, a bit each.
static IGNORED: AtomicU64 = AtomicU64::new(0);
/// The limit of open files.
static OPEN_FILES: OnceLock<Rlimit> = OnceLock::new();

/// Runs before `main` and before Rust's runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    let ignored = SIGNALS.into_iter().filter(|signal| ignores(*signal));
    let mask = ignored.fold(0, |mask, signal| mask | 1 << signal);
    IGNORED.store(mask, Ordering::SeqCst);
    // SAFETY: no other thread runs yet.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

fn ignores(signal: libc::c_int) -> bool {
    let mut found = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call fills what it points to, or fails.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), found.as_mut_ptr()) == 0
            && found.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Whether a signal of [`SIGNALS`] was ignored when this process started.
pub fn is_ignored(signal: libc::c_int) -> bool {
    IGNORED.load(Ordering::SeqCst) >> signal & 1 == 1
}

/// Raises the limit of open files of this process: a model of more than 1,000 shards needs more than the usual limit.
pub fn raise_open_files() {
    let limit = *OPEN_FILES.get_or_init(|| getrlimit(Resource::Nofile));
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // A failure shows when a file cannot be opened.
    let _ = setrlimit(Resource::Nofile, raised);
}

/// Restores it in what a command starts.
pub fn restore_in(command: &mut Command) {
    // SAFETY: the function makes system calls only.
    unsafe { command.pre_exec(restore) };
}

fn restore() -> io::Result<()> {
    for signal in SIGNALS.into_iter().filter(|signal| is_ignored(*signal)) {
        // SAFETY: a system call that may be made between fork and exec.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    if let Some(limit) = OPEN_FILES.get() {
        let _ = setrlimit(Resource::Nofile, *limit);
    }
    Ok(())
}
