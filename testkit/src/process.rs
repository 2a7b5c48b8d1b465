//! Memory, limits and terminals of a process.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, ExitStatus, Stdio};

/// Resident memory in bytes.
pub fn resident() -> u64 {
    memory("self", "VmRSS:")
}

/// A field of `/proc/PROCESS/status` that is in kB, in bytes.
pub fn memory(process: &str, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.expect("Linux, and a process that lives");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.expect("a number of kB") << 10
}

/// Returns the bytes that a process has read from a disk.
pub fn read_by(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/io")).expect("a process");
    let mut lines = text.lines();
    let bytes = lines.find_map(|line| line.strip_prefix("read_bytes: "));
    bytes.and_then(|of| of.parse().ok()).expect("a number")
}

/// How long a child goes on between two stops.
const BETWEEN_STOPS: std::time::Duration = std::time::Duration::from_millis(5);

/// Stops and continues a child of this process again and again while `work` runs. Returns its result,
/// and how often the child was stopped.
pub fn stopped_often<T>(process: u32, work: impl FnOnce() -> T) -> (T, u64) {
    let working = std::sync::atomic::AtomicBool::new(true);
    let order = std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        let stops = scope.spawn(|| {
            let mut stops = 0;
            while working.load(order) {
                stopped(process, || ());
                stops += 1;
                // Without a pause, the child gets next to no time.
                std::thread::sleep(BETWEEN_STOPS);
            }
            stops
        });
        // A panic of the work ends the other thread, too.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        working.store(false, order);
        let stops = stops.join().expect("no panic");
        match result {
            Ok(result) => (result, stops),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Stops a child of this process while `work` runs.
pub fn stopped<T>(process: u32, work: impl FnOnce() -> T) -> T {
    // SAFETY: signals to a child that was not waited for.
    let signal = |signal| unsafe { libc::kill(process as libc::pid_t, signal) };
    assert_eq!(signal(libc::SIGSTOP), 0);
    let is_stopped = || {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
        let stat = stat.expect("a child that was not waited for");
        let (_, state) = stat.rsplit_once(") ").expect("a state");
        // A process that ended is not stopped any more.
        state.starts_with(['T', 'Z'])
    };
    while !is_stopped() {
        std::thread::yield_now();
    }
    let result = work();
    assert_eq!(signal(libc::SIGCONT), 0);
    result
}

/// Raises the limit of open files as far as it goes: 1,000 shards and the rest of the
/// process are more than the usual one.
pub fn allow_many_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls get a valid struct.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}

/// Limits a resource of this process, and of those that it starts; one system call. Returns whether that was permitted.
pub fn limit(resource: libc::__rlimit_resource_t, most: u64) -> bool {
    limit_of(0, resource, most)
}

/// As [`limit`], of another process.
pub fn limit_of(process: u32, resource: libc::__rlimit_resource_t, most: u64) -> bool {
    let limit = libc::rlimit {
        rlim_cur: most,
        rlim_max: most,
    };
    // SAFETY: a valid struct.
    unsafe {
        libc::prlimit(
            process as libc::pid_t,
            resource,
            &limit,
            std::ptr::null_mut(),
        ) == 0
    }
}

/// Returns the processes that have a variable, `NAME=VALUE`, in their environment.
pub fn with_variable(variable: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("Linux").flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers
        .filter(|process: &u32| {
            let set = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            set.split(|byte| *byte == 0)
                .any(|of| of == variable.as_bytes())
        })
        .collect()
}

/// Runs a function of a child between fork and exec, which may only make system calls. A false one is an error
/// of the start.
pub fn before_exec(
    command: &mut std::process::Command,
    mut set: impl FnMut() -> bool + Send + Sync + 'static,
) {
    // SAFETY: as the caller promises in the documentation: system calls alone.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(command, move || match set() {
            true => Ok(()),
            false => Err(std::io::Error::last_os_error()),
        });
    }
}

/// A new pseudo terminal: the side with the keys, and the side of a program. Programs that are started do not get them.
pub fn terminal() -> (File, OwnedFd) {
    let (mut keys, mut terminal) = (-1, -1);
    let null = std::ptr::null_mut();
    let mut size = libc::winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: fills two descriptors, which are new.
    unsafe {
        let failed = libc::openpty(
            &raw mut keys,
            &raw mut terminal,
            null,
            null.cast(),
            &raw mut size,
        );
        assert_eq!(failed, 0, "a pseudo terminal");
        for side in [keys, terminal] {
            libc::fcntl(side, libc::F_SETFD, libc::FD_CLOEXEC);
        }
        (File::from_raw_fd(keys), OwnedFd::from_raw_fd(terminal))
    }
}

/// Makes a command the leader of a session with this terminal, as a login does.
pub fn lead_session(command: &mut Command, terminal: OwnedFd) {
    before_exec(command, move || {
        // SAFETY: plain system calls.
        unsafe { libc::setsid() >= 0 && libc::ioctl(terminal.as_raw_fd(), libc::TIOCSCTTY, 0) == 0 }
    });
}

/// Runs a test of this program in a process of its own, with some standard error, and returns how that ended; `None` in
/// that process.
pub fn in_own_process(test: &str, errors: Stdio) -> Option<ExitStatus> {
    const OWN: &str = "LLAMA_SIDECAR_TEST_PROCESS";
    if std::env::var_os(OWN).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", test]).env(OWN, "1").stderr(errors);
    Some(command.status().expect("it starts"))
}
