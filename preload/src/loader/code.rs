//! Instructions of functions that are replaced while a program runs.
//!
//! No page can be written and executed at any time, and none becomes executable that could be written: a copy of the
//! pages is made in a file in memory, changed there, and mapped over them at once. A system that forbids such mappings
//! keeps the function as it is.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use sidecar_core::descriptors::{self, Kept};

use crate::arch::{self, REACH_MIB};
use crate::loader::loaded::{page_bytes, page_of};

/// Reserves memory that jumps from an object at these addresses reach; whole pages.
pub fn reserve(from: usize, to: usize, bytes: usize) -> Option<usize> {
    const STEP: usize = 1 << 20;
    let above = (1..REACH_MIB).filter_map(|step| page_of(to).checked_add(step * STEP));
    let below = (1..REACH_MIB).filter_map(|step| page_of(from).checked_sub(step * STEP));
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    below.chain(above).find(|at| {
        // SAFETY: takes addresses that nothing uses.
        let found = unsafe { libc::mmap(*at as *mut c_void, bytes, libc::PROT_NONE, flags, -1, 0) };
        if found == libc::MAP_FAILED {
            return false;
        }
        if found as usize != *at {
            // A kernel before 4.17 takes the address for a wish.
            // SAFETY: mapped just now.
            unsafe { libc::munmap(found, bytes) };
        }
        found as usize == *at
    })
}

/// Puts code at an address. No thread may execute what is replaced.
///
/// # Safety
///
/// The pages are code of this program, or reserved for it, and the new code does what the old code did.
pub unsafe fn put(address: usize, code: &[u8]) -> io::Result<()> {
    let first = page_of(address);
    let end = page_of(address + code.len() - 1) + page_bytes();
    let mut pages = vec![0; end - first];
    // SAFETY: pages of the program, which may be read.
    unsafe { (first as *const u8).copy_to(pages.as_mut_ptr(), pages.len()) };
    pages[address - first..][..code.len()].copy_from_slice(code);
    // SAFETY: the pages have what they had, and the new code.
    unsafe { map(first, &pages) }
}

/// Maps new bytes in place of pages.
///
/// # Safety
///
/// The pages are code of this program, or reserved for it.
pub unsafe fn map(address: usize, bytes: &[u8]) -> io::Result<()> {
    let file = descriptors::above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
        // SAFETY: takes a string.
        let opened = unsafe { libc::memfd_create(c"llama-sidecar".as_ptr(), libc::MFD_CLOEXEC) };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: opened just now.
        Ok(unsafe { File::from_raw_fd(opened) })
    })?;
    let file = Kept::new(file)?;
    file.write_all_at(bytes, 0)?;
    let descriptor = file.get()?.as_raw_fd();
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_EXEC,
        libc::MAP_PRIVATE | libc::MAP_FIXED,
    );
    // SAFETY: as the caller ensures.
    let mapped = unsafe {
        let address = address as *mut c_void;
        libc::mmap(address, bytes.len(), access, flags, descriptor, 0)
    };
    match mapped {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => {
            // SAFETY: mapped just now.
            unsafe { arch::code_written(address, bytes.len()) };
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::replaced::returning;

    #[test]
    fn code_is_exchanged_and_never_writable() {
        let page = page_bytes();
        let here = page_bytes as *const () as usize;
        let place = reserve(here, here, page).expect("space");
        let mut bytes = vec![0xcc; page];
        bytes[page - returning(7).len()..].copy_from_slice(&returning(7));
        let address = place + page - returning(7).len();
        // SAFETY: reserved above.
        unsafe { map(place, &bytes) }.expect("mapped");
        // SAFETY: a function without arguments.
        let code: extern "C" fn() -> i32 = unsafe { std::mem::transmute(address) };
        assert_eq!(code(), 7);
        // SAFETY: nothing runs it.
        unsafe { put(address, &returning(9)) }.expect("mapped");
        assert_eq!(code(), 9);
        let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
        let line = maps
            .lines()
            .find(|line| line.starts_with(&format!("{place:x}-")));
        assert!(line.expect("the page").contains(" r-xp "), "{line:?}");
    }
}
