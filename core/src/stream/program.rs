//! Memory that the program has allocated beside the experts of a streamed model, and not touched.
//!
//! The kernel takes a page for the first write into it, and counts it as free until then. Pages of a file are
//! dropped for such a write, but experts in memory of the process are not: where its memory is limited, the
//! kernel would end the program. So an expert takes no memory that was promised to a buffer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::pages::page_size;
use crate::memory::usable;

/// Pages that one call looks at.
const PAGES: usize = 1 << 14;

/// Bytes of buffers that are being allocated.
static BEING_ALLOCATED: AtomicU64 = AtomicU64::new(0);
/// Addresses of buffers without all of their memory, by what the program calls them.
static BUFFERS: Mutex<BTreeMap<usize, Range<usize>>> = Mutex::new(BTreeMap::new());

/// A buffer that the program is allocating.
#[derive(Debug)]
pub struct Allocation(u64);

impl Allocation {
    /// Promises memory to a buffer.
    pub fn of(bytes: u64) -> Allocation {
        BEING_ALLOCATED.fetch_add(bytes, Ordering::SeqCst);
        Allocation(bytes)
    }

    /// The buffer is there.
    pub fn made(self, buffer: usize, address: usize) {
        let bytes = address..address.saturating_add(self.0 as usize);
        BUFFERS.lock().insert(buffer, bytes);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        BEING_ALLOCATED.fetch_sub(self.0, Ordering::SeqCst);
    }
}

/// A buffer ends.
pub fn buffer_freed(buffer: usize) {
    BUFFERS.lock().remove(&buffer);
}

/// Returns the bytes that experts may have in memory of the process, where they have `held` bytes and so many are free,
/// and the model's other tensors and what was promised need others. The second number is what is missing for these.
pub fn fitting(free: u64, held: u64, needed: u64) -> (u64, u64) {
    let usable = held + usable(free);
    (usable.saturating_sub(needed), needed.saturating_sub(usable))
}

/// Returns the bytes of buffers that have no memory yet. A buffer that has all of its memory is not looked at again.
pub fn untouched() -> u64 {
    let mut bytes = BEING_ALLOCATED.load(Ordering::SeqCst);
    BUFFERS.lock().retain(|_, buffer| {
        let untouched = untouched_of(buffer);
        bytes = bytes.saturating_add(untouched);
        untouched > 0
    });
    bytes
}

/// Returns the bytes of a range in memory that the kernel has no page for.
fn untouched_of(bytes: &Range<usize>) -> u64 {
    let page = page_size() as usize;
    let mut here = [0u8; PAGES];
    let starts = (bytes.start / page * page..bytes.end).step_by(PAGES * page);
    let count = starts.map(|start| {
        let len = (bytes.end - start).min(PAGES * page);
        // SAFETY: a byte for each page; addresses that are not mapped are an error.
        match unsafe { libc::mincore(start as *mut libc::c_void, len, here.as_mut_ptr()) } {
            0 => {
                let pages = &here[..len.div_ceil(page)];
                pages.iter().filter(|page| **page & 1 == 0).count() * page
            }
            // Freed by a call that was not seen.
            _ => 0,
        }
    });
    count.sum::<usize>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_promised_no_more() {
        let page = page_size() as usize;
        let pages = 3 * PAGES + 5;
        let mut map = memmap2::MmapMut::map_anon(pages * page).expect("address space");
        let address = map.as_ptr() as usize;
        let bytes = (pages * page) as u64;
        let allocation = Allocation::of(bytes);
        assert_eq!(untouched(), bytes);
        allocation.made(7, address);
        assert_eq!(untouched(), bytes);
        for at in [0, 1, PAGES, pages - 1] {
            map[at * page] = 1;
        }
        assert_eq!(untouched(), bytes - 4 * page_size());
        buffer_freed(7);
        assert_eq!(untouched(), 0);
        // One that has all of its memory: later it is the program's.
        map.fill(1);
        Allocation::of(bytes).made(8, address);
        assert_eq!(untouched(), 0);
        assert!(BUFFERS.lock().is_empty());
        // An allocation that fails.
        drop(Allocation::of(bytes));
        assert_eq!(untouched(), 0);
    }
}
