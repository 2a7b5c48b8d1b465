//! Memory in place of pages of a mapped file.
//!
//! Bytes of the file are read into a slot of memory, which is then mapped at the address where the program
//! has mapped these bytes. Threads that read there see the same bytes before, during and after the change.
//! When the slot is used again, the file is mapped there first, so that nothing reads the slot any more.
//!
//! The kernel allocates and clears the pages of a slot once. New pages for each read would cost more of the
//! processor than the read.
//!
//! The memory has no descriptor: through one, whatever the program writes to a descriptor of the same number
//! would become weights.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use crate::descriptors::Kept;
use crate::memory::{Taken, take_address_space};

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
    /// Returns its bytes in the file.
    pub fn bytes(&self) -> Range<u64> {
        self.offset..self.offset + self.len as u64
    }

    /// Returns its addresses.
    pub fn addresses(&self) -> Range<usize> {
        self.address..self.address + self.len
    }

    /// Returns the part that is in another span of the same mapping, too.
    pub fn common(&self, other: &Span) -> Span {
        let address = self.address.max(other.address);
        let end = self.addresses().end.min(other.addresses().end);
        Span {
            file: self.file,
            offset: self.offset + (address - self.address) as u64,
            address,
            len: end.saturating_sub(address),
        }
    }
}

/// Opens an open file again, for reads that bypass the page cache (`O_DIRECT` of open(2)).
pub fn open_direct(file: &Kept) -> io::Result<Kept> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    Kept::new(file.open_again(&options)?)
}

/// Memory that is divided into slots by its user.
#[derive(Debug)]
pub struct Slots {
    start: *mut u8,
    len: usize,
    _taken: Taken,
}

// SAFETY: the memory is shared by all threads; its user reads into a slot from one thread at a time.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// Makes address space for so many bytes. Slots that were not used take no memory.
    pub fn new(len: usize) -> io::Result<Slots> {
        let taken = take_address_space(len as u64)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        match start {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            start => Ok(Slots {
                start: start.cast(),
                len,
                _taken: taken,
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
        assert!(
            slot.checked_add(span.len)
                .is_some_and(|end| end <= self.len)
        );
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: as the caller ensures. An old size of 0 maps shared memory a second time.
        unsafe {
            let at = span.address as *mut libc::c_void;
            let from = self.start.add(slot).cast();
            if libc::mremap(from, 0, span.len, flags, at) == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            // A program that has refused this call to itself (seccomp) can write there, and reads the same bytes.
            libc::mprotect(at, span.len, libc::PROT_READ);
            // Page faults do the same before Linux 5.14.
            libc::madvise(at, span.len, libc::MADV_POPULATE_READ);
        }
        Ok(())
    }

    /// Gives the memory of a slot to the kernel.
    pub fn release(&self, slot: usize, len: usize) {
        assert!(slot.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: a part of the mapping, which nothing reads.
        unsafe { libc::madvise(self.start.add(slot).cast(), len, libc::MADV_REMOVE) };
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: a mapping of this value. Slots that are mapped elsewhere stay there.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// What a page fault in the mapping of a file reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Faults {
    /// What the kernel reads ahead: up to the whole window of the disk.
    #[default]
    Window,
    /// Its page alone, so that nothing in use leaves the page cache for what is not.
    Page,
}

impl Faults {
    /// Advises the kernel for a part of the address space. What is not mapped there is left out.
    pub fn advise(self, addresses: &Range<usize>) {
        let advice = match self {
            Faults::Window => libc::MADV_NORMAL,
            Faults::Page => libc::MADV_RANDOM,
        };
        // SAFETY: this advice changes no bytes and no access.
        unsafe {
            libc::madvise(
                addresses.start as *mut libc::c_void,
                addresses.len(),
                advice,
            )
        };
    }
}

/// Maps a file at a span again.
///
/// # Safety
///
/// The span is a part of a mapping of this file, which nothing unmaps during the call. Threads that read
/// there wait while the kernel exchanges the pages.
pub unsafe fn restore(span: &Span, file: &Kept, faults: Faults) -> io::Result<()> {
    if span.len == 0 {
        return Ok(());
    }
    let file = file.get()?;
    // SAFETY: as the caller ensures.
    let mapped = unsafe {
        libc::mmap(
            span.address as *mut libc::c_void,
            span.len,
            libc::PROT_READ,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            span.offset as libc::off_t,
        )
    };
    match mapped {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => {
            if faults != Faults::Window {
                faults.advise(&span.addresses());
            }
            Ok(())
        }
    }
}
