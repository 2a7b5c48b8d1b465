//! The page cache of a file: which pages it has, and reading pages ahead.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `cachestat(2)`, since Linux 6.5; libc has no name for it on all targets.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The bytes of the read-ahead window of most disks (`VM_READAHEAD_PAGES`).
pub const WINDOW: u64 = 128 << 10;

/// Returns the size of a page.
pub fn page_size() -> u64 {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// Returns the range of whole pages around a range of bytes.
pub fn around(bytes: &Range<u64>, page: u64) -> Range<u64> {
    bytes.start / page * page..bytes.end.next_multiple_of(page)
}

/// How the cached pages of a file are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// `cachestat(2)` counts them, including those that are being read.
    Counted,
    /// A byte of each [`WINDOW`] is read without waiting (`RWF_NOWAIT` of preadv2(2)). The kernel
    /// counts pages only for users who may write to the file, and since Linux 6.5.
    Probed,
    /// Not at all: overlays count no pages and wait for each read.
    Unknown,
}

impl Residency {
    /// Returns what the kernel supports for a file. Reads the first byte of the file.
    pub fn of(file: &File) -> Residency {
        let mut byte = [0];
        if file.read_at(&mut byte, 0).is_err() {
            return Residency::Unknown;
        }
        if count(file, &(0..page_size())).is_ok_and(|cached| cached > 0) {
            return Residency::Counted;
        }
        match probe(file, 0) {
            Ok(true) => Residency::Probed,
            Ok(false) | Err(_) => Residency::Unknown,
        }
    }

    /// Returns how many pages of a range are in the page cache, or `None` if that is unknown.
    pub fn cached(self, file: &File, bytes: &Range<u64>, page: u64) -> Option<u64> {
        match self {
            Residency::Counted => {
                let pages = (bytes.end - bytes.start).div_ceil(page);
                match count(file, bytes).ok()? {
                    counted if counted >= pages => Some(counted),
                    // Under load, the kernel misses a page that is there at times.
                    counted => Some(counted.max(count(file, bytes).ok()?)),
                }
            }
            Residency::Probed => {
                let pieces = bytes.clone().step_by(WINDOW as usize);
                let cached = pieces.map(|start| {
                    let pages = (bytes.end.min(start + WINDOW) - start) / page;
                    probe(file, start).map(|cached| if cached { pages } else { 0 })
                });
                cached.sum::<io::Result<u64>>().ok()
            }
            Residency::Unknown => None,
        }
    }
}

/// Whether a byte is in the page cache.
fn probe(file: &File, offset: u64) -> io::Result<bool> {
    let mut byte = 0u8;
    let piece = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    let offset = offset as libc::off_t;
    // SAFETY: one piece, which is valid for a write of one byte.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &piece, 1, offset, libc::RWF_NOWAIT) };
    if read >= 0 {
        return Ok(read == 1);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN) => Ok(false),
        _ => Err(error),
    }
}

/// Returns how many pages of a range are in the page cache or being read into it.
fn count(file: &File, bytes: &Range<u64>) -> io::Result<u64> {
    let range = CachestatRange {
        offset: bytes.start,
        len: bytes.end - bytes.start,
    };
    let mut found = Cachestat::default();
    // SAFETY: both structs have the layout that the kernel expects, and live during the call.
    let code = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            &raw const range,
            &raw mut found,
            0,
        )
    };
    match code {
        0 => Ok(found.cached),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets the kernel begin to read a range into the page cache in pieces, as long as `goes_on`, and
/// does not wait for the bytes. Returns the number of pieces that the kernel refused.
///
/// Of a piece, the kernel reads at most one read-ahead window of the device, or the largest request
/// of the device if that is larger (`force_page_cache_ra` in mm/readahead.c), and ignores the rest.
pub fn read_ahead(file: &File, bytes: &Range<u64>, piece: u64, goes_on: impl Fn() -> bool) -> u64 {
    let starts = bytes.clone().step_by(piece as usize);
    let refused = starts.take_while(|_| goes_on()).filter(|start| {
        let len = piece.min(bytes.end - start);
        // SAFETY: advice for a descriptor that is open.
        let code = unsafe {
            libc::posix_fadvise(
                file.as_raw_fd(),
                *start as libc::off_t,
                len as libc::off_t,
                libc::POSIX_FADV_WILLNEED,
            )
        };
        code != 0
    });
    refused.count() as u64
}

/// Returns the number of page faults of this process that waited for a disk.
pub fn major_faults() -> u64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: fills the struct, of which all zeros is a valid value, too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    u64::try_from(usage.ru_majflt).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole() {
        assert_eq!(around(&(0..1), 4096), 0..4096);
        assert_eq!(around(&(4095..4097), 4096), 0..8192);
        assert_eq!(around(&(8192..12288), 4096), 8192..12288);
    }

    #[test]
    fn pages_that_were_just_written_are_cached() {
        let bytes = 0..3 * page_size();
        let file = tempfile::tempfile().expect("a file");
        let data = vec![1; bytes.end as usize];
        file.write_all_at(&data, 0).expect("free space");
        assert_ne!(Residency::of(&file), Residency::Unknown);
        for found in [Residency::of(&file), Residency::Probed] {
            assert_eq!(
                found.cached(&file, &bytes, page_size()),
                Some(3),
                "{found:?}"
            );
        }
        assert_eq!(Residency::Unknown.cached(&file, &bytes, page_size()), None);
        assert_eq!(read_ahead(&file, &bytes, 1 << 20, || true), 0);
        let pipe = File::from(std::os::fd::OwnedFd::from(
            std::io::pipe().expect("a pipe").0,
        ));
        assert_eq!(read_ahead(&pipe, &(0..5), 2, || true), 3);
        assert_eq!(read_ahead(&pipe, &(0..5), 2, || false), 0);
    }
}
