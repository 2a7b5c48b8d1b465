//! Memory in place of pages of a mapped file.
//!
//! Bytes of the file are read into a slot of memory, which is then mapped at the address where the program
//! has mapped these bytes. Threads that read there see the same bytes before, during and after the change.
//! When the slot is used again, the file is mapped there first, so that nothing reads the slot any more.
//!
//! The kernel allocates and clears the pages of a slot once. New pages for each read would cost more of the
//! processor than the read.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Whole pages of a file, and where they are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Address of the first byte.
    pub address: usize,
    /// Bytes.
    pub len: usize,
}

impl Span {
    /// Returns the part that is in another span of the same mapping, too.
    pub fn common(&self, other: &Span) -> Span {
        let address = self.address.max(other.address);
        let end = (self.address + self.len).min(other.address + other.len);
        Span {
            file: self.file,
            offset: self.offset + (address - self.address) as u64,
            address,
            len: end.saturating_sub(address),
        }
    }
}

/// Opens an open file again, for reads that bypass the page cache (`O_DIRECT` of open(2)).
pub fn open_direct(file: &File) -> io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Memory that is divided into slots by its user.
#[derive(Debug)]
pub struct Slots {
    file: File,
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory is shared by all threads; its user reads into a slot from one thread at a time.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Makes address space for so many bytes. Slots that were not used take no memory.
    pub fn new(len: usize) -> io::Result<Slots> {
        // SAFETY: a name that ends with a NUL; a new descriptor, which nothing else owns.
        let file = unsafe {
            match libc::memfd_create(c"llama-sidecar-experts".as_ptr(), libc::MFD_CLOEXEC) {
                -1 => return Err(io::Error::last_os_error()),
                file => File::from_raw_fd(file),
            }
        };
        // A signal would end the program where the size is above the limit of files.
        if len as u64 > file_size_limit() {
            return Err(io::Error::other(
                "the limit of file sizes (ulimit -f) is below the experts' size",
            ));
        }
        file.set_len(len as u64)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        match start {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            start => Ok(Slots {
                file,
                start: start.cast(),
                len,
            }),
        }
    }

    /// Reads bytes of a file from an offset on into a slot, as many as fit or the file has, and returns how
    /// many.
    ///
    /// # Safety
    ///
    /// The slot is used by nothing else, and mapped nowhere else.
    pub unsafe fn read(
        &self,
        slot: usize,
        len: usize,
        from: &File,
        offset: u64,
    ) -> io::Result<usize> {
        assert!(slot.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: a part of the mapping; the caller ensures that nothing else uses it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.start.add(slot), len) };
        let mut done = 0;
        while done < len {
            match from.read_at(&mut bytes[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Maps a slot at a span, whose bytes it has, for reading.
    ///
    /// # Safety
    ///
    /// The span is a part of a mapping of its file, which nothing unmaps during the call. The slot has the
    /// bytes of the span until the file is mapped there again.
    pub unsafe fn place(&self, slot: usize, span: &Span) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
        // SAFETY: as the caller ensures.
        unsafe { map(span, flags, &self.file, slot as u64) }
    }

    /// Gives the memory of a slot to the kernel.
    pub fn release(&self, slot: usize, len: usize) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a descriptor of this value.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, slot as i64, len as i64) };
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: a mapping of this value. Slots that are mapped elsewhere stay there.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// Returns the largest size of a file that this process may make.
fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid struct.
    match unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) } {
        0 => limit.rlim_cur,
        _ => u64::MAX,
    }
}

/// Maps a file at a span again.
///
/// # Safety
///
/// The span is a part of a mapping of this file, which nothing unmaps during the call.
pub unsafe fn restore(span: &Span, file: &File) -> io::Result<()> {
    if span.len == 0 {
        return Ok(());
    }
    // SAFETY: as the caller ensures.
    unsafe { map(span, libc::MAP_SHARED | libc::MAP_FIXED, file, span.offset) }
}

/// Maps bytes of a file at a span. Threads that read there wait while the kernel exchanges the pages.
///
/// # Safety
///
/// Readers at the span see the same bytes as before.
unsafe fn map(span: &Span, flags: libc::c_int, file: &File, offset: u64) -> io::Result<()> {
    // SAFETY: as the caller ensures.
    let mapped = unsafe {
        libc::mmap(
            span.address as *mut libc::c_void,
            span.len,
            libc::PROT_READ,
            flags,
            file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    match mapped {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
