//! Serves a file as an emulated disk: `slow-disk FILE FOLDER`. [`testkit::slow_disk::SlowDisk`]
//! starts it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr,
    ReplyData, ReplyEntry, ReplyOpen, Request, SessionACL,
};
use memmap2::{Mmap, MmapOptions};
use testkit::slow_disk::{FILE, SharedControl, mount_point, unmount};

/// Part of the latency by which an answer may be early: the requests of that time are answered
/// after one sleep.
const EARLY_PART: u64 = 10;
/// The longest time to wake up that a sleep is shortened by.
const MAX_WAKING_NS: u64 = 100_000;
/// How many reads the kernel may have under way that no process waits for, which are those of
/// read-ahead.
const BACKGROUND: u16 = 512;
/// The number of the file.
const NODE: INodeNo = INodeNo(2);
/// Names are cached without a limit, sizes are not.
const NAME_TTL: Duration = Duration::from_secs(1 << 20);

/// A file system with one read-only file.
struct Disk {
    control: Arc<SharedControl>,
    modified: SystemTime,
    /// When the last request has moved its bytes.
    bus_free_ns: AtomicU64,
    queue: Sender<Due>,
}

/// A read with the time at which its answer is due.
struct Due {
    reply: ReplyData,
    offset: u64,
    len: u32,
    at_ns: u64,
    fails: bool,
}

fn main() {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [file, folder] = &arguments[..] else {
        eprintln!("usage: slow-disk FILE FOLDER");
        std::process::exit(2);
    };
    run_first();
    match mount(file, folder) {
        Ok(_session) => {
            println!("ready");
            let _ = io::stdin().read(&mut [0]);
            unmount(&mount_point(folder));
            let _ = std::fs::remove_dir_all(folder);
            // Requests that are under way fail.
            std::process::exit(0);
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

/// Mounts a file as a disk below a folder, and answers its requests in threads.
fn mount(file: &Path, folder: &Path) -> Result<BackgroundSession, String> {
    // SAFETY: returns a number.
    if unsafe { libc::geteuid() } != 0 {
        return Err("a FUSE file system whose read-ahead can be set needs root".into());
    }
    let failed = |error: io::Error| format!("{}: {error}", file.display());
    let source = File::open(file).map_err(failed)?;
    let modified = source.metadata().and_then(|of| of.modified());
    // SAFETY: a fixture, which keeps its bytes.
    let bytes = unsafe { MmapOptions::new().populate().map(&source) }.map_err(failed)?;
    let control = Arc::new(SharedControl::open(folder).map_err(failed)?);
    let place = mount_point(folder);
    std::fs::create_dir(&place).map_err(failed)?;
    let (queue, due) = channel();
    let disk = Disk {
        control: Arc::clone(&control),
        modified: modified.map_err(failed)?,
        bus_free_ns: AtomicU64::new(0),
        queue,
    };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::RO, MountOption::FSName("slow-disk".into())];
    config.acl = SessionACL::All;
    let session = fuser::spawn_mount(disk, &place, &config)
        .map_err(|error| format!("a FUSE file system cannot be mounted: {error}"))?;
    std::thread::spawn(move || answer(&bytes, &control, due));
    Ok(session)
}

impl Disk {
    fn attributes(&self, node: INodeNo) -> FileAttr {
        let (kind, perm, size) = match node {
            NODE => {
                let size = self.control.size.load(Ordering::SeqCst);
                (FileType::RegularFile, 0o444, size)
            }
            _ => (FileType::Directory, 0o555, 0),
        };
        FileAttr {
            ino: node,
            size,
            blocks: size.div_ceil(512),
            atime: self.modified,
            mtime: self.modified,
            ctime: self.modified,
            crtime: self.modified,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// Whether a request for this range is one of those that fail.
    fn fails(&self, offset: u64, len: u32) -> bool {
        let one_less = |left: u64| left.checked_sub(1);
        let (order, control) = (Ordering::SeqCst, &self.control);
        offset < control.fault_end.load(order)
            && control.fault_begin.load(order) < offset + u64::from(len)
            && control.faults.fetch_update(order, order, one_less).is_ok()
    }
}

impl Filesystem for Disk {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Several reads at a time, of more than 32 pages.
        let wanted = InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_MAX_PAGES
            | InitFlags::FUSE_PARALLEL_DIROPS;
        let missing = |flags| io::Error::other(format!("the kernel has no {flags:?}"));
        config.add_capabilities(wanted).map_err(missing)?;
        let at_least = |number| io::Error::other(format!("at least {number}"));
        config.set_max_background(BACKGROUND).map_err(at_least)?;
        let set = config.set_congestion_threshold(BACKGROUND);
        set.map_err(at_least).map(|_| ())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent != INodeNo::ROOT || name != FILE {
            return reply.error(Errno::ENOENT);
        }
        let attributes = self.attributes(NODE);
        reply.entry_with_ttls(&Duration::ZERO, &NAME_TTL, &attributes, Generation(0));
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &self.attributes(node));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // Its pages stay in the page cache when it is opened again.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE);
    }

    /// Computes when a request is done: one after the other moves its bytes, and the latencies
    /// overlap. One thread calls this.
    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let control = &self.control;
        let under_way = control.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        control.depth.fetch_max(under_way, Ordering::SeqCst);
        let bandwidth = control.bandwidth.load(Ordering::SeqCst).max(1);
        let begin_ns = self.bus_free_ns.load(Ordering::SeqCst).max(now_ns());
        let moved_ns = begin_ns + u64::from(len) * 1_000_000_000 / bandwidth;
        self.bus_free_ns.store(moved_ns, Ordering::SeqCst);
        let due = Due {
            reply,
            offset,
            len,
            at_ns: moved_ns + control.latency_ns.load(Ordering::SeqCst),
            fails: self.fails(offset, len),
        };
        self.queue.send(due).expect("the thread that answers runs");
    }
}

/// Answers requests when they are due, without spinning: on two cores, the time of the disk would be
/// missing elsewhere.
fn answer(bytes: &Mmap, control: &SharedControl, due: Receiver<Due>) {
    // SAFETY: a setting of this thread, which wakes as early as its timers allow.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    let mut waking_ns = 0;
    for due in due {
        let early_ns = control.latency_ns.load(Ordering::SeqCst) / EARLY_PART;
        let now = wait_until(due.at_ns, early_ns, &mut waking_ns);
        control
            .off_ns
            .fetch_add(now.abs_diff(due.at_ns), Ordering::SeqCst);
        control.under_way.fetch_sub(1, Ordering::SeqCst);
        control.requests.fetch_add(1, Ordering::SeqCst);
        if due.fails {
            due.reply.error(Errno::EIO);
            continue;
        }
        let size = control.size.load(Ordering::SeqCst).min(bytes.len() as u64);
        let begin = due.offset.min(size);
        let end = (due.offset + u64::from(due.len)).min(size);
        control.bytes.fetch_add(end - begin, Ordering::SeqCst);
        due.reply.data(&bytes[begin as usize..end as usize]);
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

/// Sleeps until about a time, if that is more than `early_ns` away, and returns the time then.
/// `waking_ns` is the time that waking up took in the last sleeps, by which this one is shorter.
fn wait_until(at_ns: u64, early_ns: u64, waking_ns: &mut u64) -> u64 {
    let now = now_ns();
    let until_ns = at_ns - *waking_ns;
    if at_ns <= now + early_ns || until_ns <= now {
        return now;
    }
    let until = libc::timespec {
        tv_sec: (until_ns / 1_000_000_000) as i64,
        tv_nsec: (until_ns % 1_000_000_000) as i64,
    };
    // SAFETY: a valid struct; an interrupted sleep is short.
    unsafe {
        libc::clock_nanosleep(
            libc::CLOCK_MONOTONIC,
            libc::TIMER_ABSTIME,
            &until,
            std::ptr::null_mut(),
        )
    };
    let woken = now_ns();
    let took = woken.saturating_sub(until_ns).min(MAX_WAKING_NS);
    *waking_ns = (*waking_ns * 7 + took) / 8;
    woken
}
