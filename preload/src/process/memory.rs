//! Memory of this process that may be gone: reading it through the kernel fails, where a load instruction would end the
//! process.

use std::ffi::c_void;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

use sidecar_core::descriptors::{self, Kept};

/// The memory of this process: a file, or `None` where the process may not open that, as one that has given up its rights
/// (`setuid`).
pub struct Memory(Option<Kept>);

impl Memory {
    /// Opens it; `None` where the kernel refuses that.
    pub fn open() -> Option<Memory> {
        let opened = descriptors::open(OpenOptions::new().read(true), "/proc/self/mem");
        let memory = Memory(opened.and_then(Kept::new).ok());
        let word = 1usize;
        memory.word((&raw const word).addr())?;
        Some(memory)
    }

    /// Copies as many words as can be read; returns their number.
    pub fn copy(&self, address: usize, words: &mut [usize]) -> usize {
        let bytes = size_of_val(words);
        let to: *mut c_void = words.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most the size of `words`, or fails.
        let read = unsafe {
            match &self.0 {
                Some(file) => match (file.get(), libc::off_t::try_from(address)) {
                    (Ok(file), Ok(offset)) => libc::pread(file.as_raw_fd(), to, bytes, offset),
                    _ => 0,
                },
                None => {
                    let part = |start| libc::iovec {
                        iov_base: start,
                        iov_len: bytes,
                    };
                    let (to, from) = (part(to), part(address as *mut c_void));
                    libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0)
                }
            }
        };
        read.max(0) as usize / size_of::<usize>()
    }

    /// Returns a word; `None` if it cannot be read.
    pub fn word(&self, address: usize) -> Option<usize> {
        let mut word = [0];
        (self.copy(address, &mut word) == 1).then_some(word[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads_what_is_there(memory: &Memory) {
        let words = [7usize, 9];
        let address = words.as_ptr() as usize;
        assert_eq!(memory.word(address + size_of::<usize>()), Some(9));
        let mut copy = [0; 2];
        assert_eq!((memory.copy(address, &mut copy), copy), (2, words));
        assert_eq!(memory.word(8), None);
        assert_eq!(memory.word(usize::MAX), None);
    }

    #[test]
    fn memory_that_is_gone_cannot_be_read() {
        reads_what_is_there(&Memory::open().expect("of this process"));
    }

    #[test]
    fn memory_is_read_where_its_file_may_not_be_opened() {
        reads_what_is_there(&Memory(None));
    }
}
