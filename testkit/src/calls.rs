//! System calls of a running program, counted with ptrace(2).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// `PTRACE_EVENT_STOP` of linux/ptrace.h.
const EVENT_STOP: i32 = 128;
/// What `PTRACE_O_TRACESYSGOOD` adds to the signal of a system call.
const SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;
/// `PTRACE_SYSCALL_INFO_ENTRY`.
const ENTRY: u8 = 1;

/// The system calls of a thread.
#[derive(Debug, Default)]
pub struct ThreadCalls {
    /// Name of the thread.
    pub name: String,
    /// The number of each system call.
    pub counts: BTreeMap<i64, u64>,
    /// The blocked signals, a bit for each, when the thread took its name.
    pub blocked_at_start: Option<u64>,
}

/// Start of `struct ptrace_syscall_info` of linux/ptrace.h, at the entry of a system call.
#[repr(C)]
#[derive(Default)]
struct Info {
    op: u8,
    _arch: [u8; 23],
    number: u64,
    arguments: [u64; 6],
}

/// Counts the system calls of each thread of a process, by the thread's number, until the first
/// thread writes to standard output. `ask` makes the program write; it is called when all threads
/// are traced.
///
/// The process must be a child of the calling thread. Panics when the process ends.
pub fn until_output(process: u32, ask: impl FnOnce()) -> BTreeMap<i32, ThreadCalls> {
    let process = process as i32;
    let mut tracer = Tracer {
        process,
        threads: BTreeMap::new(),
    };
    let mut unseen = tracer.seize();
    let mut ask = Some(ask);
    loop {
        let (thread, status) = wait(-1);
        let (signal, event) = (libc::WSTOPSIG(status), status >> 16);
        if !libc::WIFSTOPPED(status) {
            assert_ne!(thread, process, "the process ended");
            tracer.threads.remove(&thread);
        } else if signal == SYSTEM_CALL {
            if tracer.count(thread) {
                break;
            }
            go_on(thread, libc::PTRACE_SYSCALL, 0);
        } else if event == EVENT_STOP {
            tracer.threads.entry(thread).or_default();
            unseen.remove(&thread);
            let is_stopped = signal != libc::SIGTRAP;
            go_on(
                thread,
                [libc::PTRACE_SYSCALL, libc::PTRACE_LISTEN][usize::from(is_stopped)],
                0,
            );
        } else {
            let passed = if event == 0 { signal } else { 0 };
            go_on(thread, libc::PTRACE_SYSCALL, passed);
        }
        if unseen.is_empty() {
            ask.take().into_iter().for_each(|ask| ask());
        }
    }
    tracer.release();
    tracer.threads
}

struct Tracer {
    process: i32,
    threads: BTreeMap<i32, ThreadCalls>,
}

impl Tracer {
    fn folder(&self, thread: i32) -> PathBuf {
        format!("/proc/{}/task/{thread}", self.process).into()
    }

    /// The threads of the process.
    fn tasks(&self) -> impl Iterator<Item = i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process));
        let names = tasks
            .expect("a process")
            .map(|task| task.expect("a task").file_name());
        names.map(|name| {
            name.to_str()
                .and_then(|name| name.parse().ok())
                .expect("a number")
        })
    }

    /// Begins to trace all threads, and returns them.
    fn seize(&self) -> BTreeSet<i32> {
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
        let mut seized = BTreeSet::new();
        loop {
            let found: Vec<i32> = self.tasks().filter(|of| !seized.contains(of)).collect();
            if found.is_empty() {
                return seized;
            }
            for thread in found {
                // A thread that a traced one started is traced already, and one may have ended.
                if request(libc::PTRACE_SEIZE, thread, options as usize) {
                    assert!(request(libc::PTRACE_INTERRUPT, thread, 0));
                }
                seized.insert(thread);
            }
        }
    }

    /// Counts the system call at which a thread stopped; returns whether it is the last one.
    fn count(&mut self, thread: i32) -> bool {
        let mut info = Info::default();
        // SAFETY: the thread is stopped, and the kernel writes no more than the given bytes.
        let code = unsafe {
            let size = size_of::<Info>();
            libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, &raw mut info)
        };
        assert!(code > 0, "PTRACE_GET_SYSCALL_INFO needs Linux 5.3");
        if info.op != ENTRY {
            return false;
        }
        let (number, [first, ..]) = (info.number as i64, info.arguments);
        let folder = self.folder(thread);
        let calls = self.threads.entry(thread).or_default();
        *calls.counts.entry(number).or_default() += 1;
        if (number, first) == (libc::SYS_prctl, libc::PR_SET_NAME as u64) {
            let status = std::fs::read_to_string(folder.join("status")).unwrap_or_default();
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigBlk:\t"));
            calls.blocked_at_start = mask.and_then(|mask| u64::from_str_radix(mask, 16).ok());
        }
        thread == self.process && (number, first) == (libc::SYS_write, 1)
    }

    /// Lets all threads go on untraced, also those that were started meanwhile. The first one is stopped.
    fn release(&mut self) {
        loop {
            let others: Vec<i32> = self.tasks().filter(|of| self.is_traced(*of)).collect();
            if others.is_empty() {
                break;
            }
            others.into_iter().for_each(|thread| self.detach(thread));
        }
        self.name(self.process);
        request(libc::PTRACE_DETACH, self.process, 0);
    }

    /// Whether a thread is traced, besides the first one.
    fn is_traced(&self, thread: i32) -> bool {
        let status = std::fs::read_to_string(self.folder(thread).join("status"));
        let status = status.unwrap_or_default();
        let mut lines = status.lines();
        let tracer = lines.find_map(|line| line.strip_prefix("TracerPid:\t"));
        thread != self.process && tracer.is_some_and(|tracer| tracer != "0")
    }

    fn detach(&mut self, thread: i32) {
        self.name(thread);
        let mut signal = 0;
        // One that has ended is not interrupted, and is gone after the wait.
        request(libc::PTRACE_INTERRUPT, thread, 0);
        let (_, status) = wait(thread);
        let stop = libc::WSTOPSIG(status);
        if libc::WIFSTOPPED(status) && status >> 16 == 0 && stop != SYSTEM_CALL {
            signal = stop;
        }
        request(libc::PTRACE_DETACH, thread, signal as usize);
    }

    fn name(&mut self, thread: i32) {
        let name = std::fs::read_to_string(self.folder(thread).join("comm")).unwrap_or_default();
        if let Some(calls) = self.threads.get_mut(&thread) {
            calls.name = name.trim_end().to_owned();
        }
    }
}

/// Waits for a traced thread to stop or to end; `-1` is any.
fn wait(thread: i32) -> (i32, i32) {
    let mut status = 0;
    // SAFETY: writes the status.
    let found = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
    assert!(found > 0, "{}", std::io::Error::last_os_error());
    (found, status)
}

/// Makes a request without an address; returns whether it succeeded.
fn request(what: libc::c_uint, thread: i32, data: usize) -> bool {
    // SAFETY: requests that read or write no memory of this process.
    unsafe { libc::ptrace(what, thread, 0usize, data) == 0 }
}

fn go_on(thread: i32, how: libc::c_uint, signal: i32) {
    // A thread that was killed meanwhile cannot go on.
    request(how, thread, signal as usize);
}
