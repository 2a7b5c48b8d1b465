//! Memory of this process that may be gone: reading it through the kernel fails, where a load instruction would end the
//! process.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

use sidecar_core::descriptors::{self, Kept};

/// The memory of this process.
pub struct Memory(Kept);

impl Memory {
    /// Opens it; `None` where the kernel refuses that.
    pub fn open() -> Option<Memory> {
        let opened = descriptors::open(OpenOptions::new().read(true), "/proc/self/mem");
        opened.and_then(Kept::new).ok().map(Memory)
    }

    /// Copies as many words as can be read; returns their number.
    pub fn copy(&self, address: usize, words: &mut [usize]) -> usize {
        let (Ok(file), Ok(offset)) = (self.0.get(), libc::off_t::try_from(address)) else {
            return 0;
        };
        let bytes = size_of_val(words);
        // SAFETY: the kernel writes at most the size of `words`, or fails.
        let read =
            unsafe { libc::pread(file.as_raw_fd(), words.as_mut_ptr().cast(), bytes, offset) };
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

    #[test]
    fn memory_that_is_gone_cannot_be_read() {
        let memory = Memory::open().expect("of this process");
        let words = [7usize, 9];
        let address = words.as_ptr() as usize;
        assert_eq!(memory.word(address + size_of::<usize>()), Some(9));
        let mut copy = [0; 2];
        assert_eq!((memory.copy(address, &mut copy), copy), (2, words));
        assert_eq!(memory.word(8), None);
        assert_eq!(memory.word(usize::MAX), None);
    }
}
