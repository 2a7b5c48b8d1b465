//! The program that serves a disk.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};

use memmap2::{Mmap, MmapOptions};

use super::control::{Control, SharedControl};
use super::fuse::{self, Connection, ReadRequest};
use super::{FILE, mount_point};

/// How long before its time the sleep before an answer ends. A virtual machine takes about this
/// long to run a thread again.
const WAKING_NS: u64 = 50_000;

/// A read with the time at which its answer is due.
struct Due {
    request: ReadRequest,
    at_ns: u64,
    fails: bool,
}

/// Serves a file as a disk below a folder until standard input ends. Writes `ready`, or what
/// failed.
pub fn serve(file: &Path, folder: &Path) {
    run_first();
    match mount(file, folder) {
        Ok((connection, bytes, control)) => {
            println!("ready");
            std::thread::scope(|scope| {
                let (queue, due) = channel();
                scope.spawn(|| receive(&connection, &control, queue));
                scope.spawn(|| answer(&connection, &bytes, &control, due));
                let _ = io::stdin().read(&mut [0]);
                fuse::unmount(&mount_point(folder));
                let _ = std::fs::remove_dir_all(folder);
                // Requests that are under way fail.
                std::process::exit(0);
            });
        }
        Err(reason) => println!("{reason}"),
    }
}

/// Runs this process before others: a disk does not wait for a core. Where that is not allowed,
/// answers are late on a busy machine.
fn run_first() {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid struct; 0 is this thread, from which the others inherit it.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority) };
}

fn mount(file: &Path, folder: &Path) -> Result<(Connection, Mmap, SharedControl), String> {
    let failed = |error: io::Error| format!("{}: {error}", file.display());
    let source = File::open(file).map_err(failed)?;
    let modified = source.metadata().map_err(failed)?.mtime() as u64;
    // SAFETY: a fixture, which keeps its bytes.
    let bytes = unsafe { MmapOptions::new().populate().map(&source) }.map_err(failed)?;
    let control = SharedControl::open(folder).map_err(failed)?;
    let disk = mount_point(folder);
    std::fs::create_dir(&disk).map_err(failed)?;
    let connection = Connection::mount(&disk, FILE, modified)?;
    Ok((connection, bytes, control))
}

/// Takes requests and computes when each is done: one after the other moves its bytes, and the
/// latencies overlap.
fn receive(connection: &Connection, control: &Control, queue: Sender<Due>) {
    let mut bus_free_ns = 0;
    let size = || control.size.load(Ordering::SeqCst);
    while let Ok(request) = connection.next_read(size) {
        let under_way = control.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        control.depth.fetch_max(under_way, Ordering::SeqCst);
        let bandwidth = control.bandwidth.load(Ordering::SeqCst).max(1);
        let moving_ns = u64::from(request.len) * 1_000_000_000 / bandwidth;
        bus_free_ns = bus_free_ns.max(now_ns()) + moving_ns;
        let due = Due {
            request,
            at_ns: bus_free_ns + control.latency_ns.load(Ordering::SeqCst),
            fails: fails(control, &request),
        };
        if queue.send(due).is_err() {
            return;
        }
    }
}

/// Whether a request is one of those that fail.
fn fails(control: &Control, request: &ReadRequest) -> bool {
    let end = request.offset + u64::from(request.len);
    request.offset < control.fault_end.load(Ordering::SeqCst)
        && control.fault_begin.load(Ordering::SeqCst) < end
        && control
            .faults
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            })
            .is_ok()
}

/// Answers requests when they are due.
fn answer(connection: &Connection, bytes: &[u8], control: &Control, due: Receiver<Due>) {
    // SAFETY: a setting of this thread, which wakes as early as its timers allow.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    for Due {
        request,
        at_ns,
        fails,
    } in due
    {
        wait_until(at_ns);
        control
            .late_ns
            .fetch_add(now_ns().saturating_sub(at_ns), Ordering::SeqCst);
        control.under_way.fetch_sub(1, Ordering::SeqCst);
        control.requests.fetch_add(1, Ordering::SeqCst);
        let answered = if fails {
            connection.fail_read(request)
        } else {
            let size = control.size.load(Ordering::SeqCst).min(bytes.len() as u64);
            let begin = request.offset.min(size);
            let end = (request.offset + u64::from(request.len)).min(size);
            control.bytes.fetch_add(end - begin, Ordering::SeqCst);
            connection.answer_read(request, &bytes[begin as usize..end as usize])
        };
        if answered.is_err() {
            return;
        }
    }
}

/// Time of the monotonic clock.
fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid struct.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Sleeps until shortly before a time, and spins for the rest.
fn wait_until(at_ns: u64) {
    let wake_ns = at_ns - WAKING_NS;
    let wake = libc::timespec {
        tv_sec: (wake_ns / 1_000_000_000) as i64,
        tv_nsec: (wake_ns % 1_000_000_000) as i64,
    };
    // SAFETY: a valid struct; the rest of an interrupted sleep is spent spinning.
    unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &wake,
            std::ptr::null_mut(),
        )
    };
    while now_ns() < at_ns {
        std::hint::spin_loop();
    }
}
