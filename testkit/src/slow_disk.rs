//! An emulated disk: a file system with one read-only file, whose reads take the time that a disk
//! of a chosen latency and bandwidth would take.
//!
//! The program `tests/slow-disk` serves it through FUSE. It is a process of its own: a process that
//! reads a page of a file that it serves itself waits forever.

mod control;

use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::host::built;
pub use control::{Control, SharedControl};

/// Name of the file on the disk.
pub const FILE: &str = "model.gguf";

/// What is between a read and its answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Time that each request takes besides its bytes; requests overlap in it.
    pub latency: Duration,
    /// Bytes per second of all requests together.
    pub bandwidth: u64,
}

impl Speed {
    /// Returns a speed of so many microseconds and megabytes per second.
    pub const fn new(latency_us: u64, mb_per_second: u64) -> Speed {
        Speed {
            latency: Duration::from_micros(latency_us),
            bandwidth: mb_per_second * 1_000_000,
        }
    }
}

/// What a disk did since it was mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Answered requests.
    pub requests: u64,
    /// Bytes of the answers.
    pub bytes: u64,
    /// The most requests that were under way at a time since [`SlowDisk::reset_depth`].
    pub depth: u64,
    /// How long before or after their time the answers came, all together.
    pub off: Duration,
}

/// A mounted disk; dropping it unmounts it.
#[derive(Debug)]
pub struct SlowDisk {
    server: Child,
    control: SharedControl,
    folder: tempfile::TempDir,
}

impl SlowDisk {
    /// Mounts a disk that holds a copy of a file, at a speed. The error states why that is not
    /// possible on this machine.
    pub fn mount(file: &Path, speed: Speed) -> Result<SlowDisk, String> {
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        let folder = tempfile::tempdir().map_err(|error| failed("no temporary folder", error))?;
        let size = std::fs::metadata(file)
            .map_err(|error| failed(&file.display().to_string(), error))?
            .len();
        let control = SharedControl::create(folder.path())
            .map_err(|error| failed("no shared memory", error))?;
        control.size.store(size, Ordering::SeqCst);
        let mut server = Command::new(built("release/slow-disk"))
            .arg(file)
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // An interrupt from the keyboard must not end it before it has unmounted.
            .process_group(0)
            .spawn()
            .map_err(|error| failed("slow-disk does not start", error))?;
        let mut answer = String::new();
        let read = BufReader::new(server.stdout.take().expect("piped")).read_line(&mut answer);
        let disk = SlowDisk {
            server,
            control,
            folder,
        };
        disk.set_speed(speed);
        match read {
            Ok(_) if answer == "ready\n" => Ok(disk),
            Ok(_) => Err(answer.trim().to_owned()),
            Err(error) => Err(failed("slow-disk does not answer", error)),
        }
    }

    /// The file on the disk.
    pub fn path(&self) -> PathBuf {
        mount_point(self.folder.path()).join(FILE)
    }

    /// Changes the speed of further requests.
    pub fn set_speed(&self, speed: Speed) {
        let latency = speed.latency.as_nanos() as u64;
        self.control.latency_ns.store(latency, Ordering::SeqCst);
        self.control
            .bandwidth
            .store(speed.bandwidth, Ordering::SeqCst);
    }

    /// What the disk did so far.
    pub fn counts(&self) -> Counts {
        let Control {
            requests,
            bytes,
            depth,
            off_ns,
            ..
        } = &*self.control;
        Counts {
            requests: requests.load(Ordering::SeqCst),
            bytes: bytes.load(Ordering::SeqCst),
            depth: depth.load(Ordering::SeqCst),
            off: Duration::from_nanos(off_ns.load(Ordering::SeqCst)),
        }
    }

    /// Counts the largest number of requests at a time from now on.
    pub fn reset_depth(&self) {
        self.control.depth.store(0, Ordering::SeqCst);
    }

    /// Makes the next requests that touch a range of bytes fail with an I/O error.
    pub fn fail(&self, range: std::ops::Range<u64>, requests: u64) {
        self.control.faults.store(0, Ordering::SeqCst);
        self.control
            .fault_begin
            .store(range.start, Ordering::SeqCst);
        self.control.fault_end.store(range.end, Ordering::SeqCst);
        self.control.faults.store(requests, Ordering::SeqCst);
    }

    /// Cuts the file to a size, or gives its bytes back.
    pub fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.control.size.store(size, Ordering::SeqCst);
        // The kernel reads the size, and drops the pages after it.
        let seen = std::fs::metadata(self.path())?.len();
        assert_eq!(seen, size, "the size is not cached");
        Ok(())
    }

    /// Sets the read-ahead of the kernel on this disk.
    pub fn read_ahead_kb(&self, kb: u64) -> std::io::Result<()> {
        let device = std::fs::metadata(self.path())?.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        std::fs::write(setting, kb.to_string())
    }

    /// Drops the file from the page cache, except for pages that a process has mapped.
    pub fn drop_cache(&self) -> std::io::Result<()> {
        crate::memory_limit::drop_cache(&File::open(self.path())?)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // The end of its input ends the program, as when this process is killed.
        drop(self.server.stdin.take());
        let _ = self.server.wait();
        unmount(&mount_point(self.folder.path()));
    }
}

/// Where a disk is mounted below its folder.
pub fn mount_point(folder: &Path) -> PathBuf {
    folder.join("disk")
}

/// Unmounts what is mounted on a folder, also while files on it are open.
pub fn unmount(folder: &Path) {
    let folder = CString::new(folder.as_os_str().as_bytes()).expect("a path has no NUL");
    // SAFETY: a string that ends with a NUL.
    unsafe { libc::umount2(folder.as_ptr(), libc::MNT_DETACH) };
}
