//! Bounds-checked reads of memory of a loaded object, or of its file. Nothing in it is trusted.

use std::ffi::CStr;

use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr, Elf64_Sym};

/// Memory of a loaded object that may be read: a table, and what follows it in its part of the
/// object.
#[derive(Clone, Copy, Default)]
pub struct Memory {
    /// The first address.
    pub(super) start: usize,
    /// How many bytes may be read.
    pub(super) bytes: usize,
}

/// A type of which all bit patterns are valid.
///
/// # Safety
///
/// It consists of integers.
pub unsafe trait Plain: Copy {}
// SAFETY: integers.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for usize {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Sym {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Ehdr {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Phdr {}
// SAFETY: as above.
unsafe impl Plain for Elf64_Shdr {}
// SAFETY: as above.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Entries of a chain or a list that are read at most: damaged ones have no end, and the
/// loader's lock is held meanwhile. Linkers make chains of a few entries.
pub const MOST_STEPS: usize = 1 << 16;

impl Memory {
    /// The memory of bytes of this library.
    pub fn of(bytes: &[u8]) -> Memory {
        Memory {
            start: bytes.as_ptr() as usize,
            bytes: bytes.len(),
        }
    }

    /// Whether nothing may be read.
    pub fn is_empty(self) -> bool {
        self.bytes == 0
    }

    /// Returns at most this many bytes from an offset; `None` if it is behind this memory.
    pub fn part(self, offset: u64, bytes: u64) -> Option<Memory> {
        let offset = usize::try_from(offset).ok()?;
        let left = self.bytes.checked_sub(offset)?;
        Some(Memory {
            start: self.start + offset,
            bytes: left.min(usize::try_from(bytes).unwrap_or(usize::MAX)),
        })
    }

    /// Returns this memory without what follows its first bytes.
    pub fn first(self, bytes: usize) -> Memory {
        let bytes = bytes.min(self.bytes);
        Memory { bytes, ..self }
    }

    /// Returns bytes at an offset; `None` if they are not all in this memory.
    pub fn slice(&self, offset: usize, bytes: usize) -> Option<&[u8]> {
        if self.is_empty() || bytes > self.bytes.checked_sub(offset)? {
            return None;
        }
        // SAFETY: in a part of an object that is loaded and may be read.
        Some(unsafe { std::slice::from_raw_parts((self.start + offset) as *const u8, bytes) })
    }

    /// Returns the value at an offset; `None` if it is not in this memory.
    pub fn read<T: Plain>(&self, offset: usize) -> Option<T> {
        let bytes = self.slice(offset, size_of::<T>())?;
        // SAFETY: as many bytes as the type has, all of whose bit patterns are valid; tables may be
        // aligned for less.
        Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
    }

    /// Returns an entry of a table.
    pub fn entry<T: Plain>(&self, index: usize) -> Option<T> {
        self.read(index.checked_mul(size_of::<T>())?)
    }

    /// Returns the entries of a table.
    pub fn entries<T: Plain>(self) -> impl Iterator<Item = T> {
        (0..).map_while(move |index| self.entry(index))
    }

    /// Returns the string at an offset; empty if it does not end in this memory, or is too long for
    /// a path.
    pub fn text(&self, offset: usize) -> &CStr {
        let left = self.bytes.saturating_sub(offset);
        let bytes = self.slice(offset, left.min(libc::PATH_MAX as usize));
        let text = bytes.and_then(|bytes| CStr::from_bytes_until_nul(bytes).ok());
        text.unwrap_or(c"")
    }

    /// Whether the string at an offset is this one.
    pub fn has_text(&self, offset: usize, text: &CStr) -> bool {
        let text = text.to_bytes_with_nul();
        self.slice(offset, text.len()) == Some(text)
    }

    /// Returns the offsets of the entries of a list: each has, `field` bytes behind its start, the
    /// distance to the next one, which is 0 in the last one.
    pub fn list(self, first: usize, field: usize) -> impl Iterator<Item = usize> {
        let next = move |at: &usize| match self.read::<u32>(at + field)? {
            0 => None,
            distance => Some(at + distance as usize),
        };
        let all = std::iter::successors(Some(first), next).take(MOST_STEPS);
        all.take_while(move |at| *at < self.bytes)
    }
}
