//! Device memory, and page-locked memory of the host.
//!
//! Device memory is mapped twice: at the address that the host sees it cannot be touched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock};

use libc::{MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED};
use libc::{PROT_NONE, PROT_READ, PROT_WRITE, c_int};

use crate::order::Uses;

/// What memory holds that has no content yet.
pub const POISON: u8 = 0xa5;

/// An allocation on the device.
pub struct Block {
    /// The number of its device.
    pub device: usize,
    /// The address that the host sees.
    pub seen: usize,
    /// The address of the bytes; `None` where nothing is computed.
    real: Option<usize>,
    size: usize,
    /// Its uses.
    pub uses: Mutex<Uses>,
}

impl Block {
    /// Allocates at an address, if that is free.
    fn new(device: usize, size: usize, computes: bool, at: usize) -> Option<Block> {
        if !computes {
            return Some(Block {
                device,
                seen: map(
                    at,
                    size,
                    PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1,
                )?,
                real: None,
                size,
                uses: Mutex::default(),
            });
        }
        // SAFETY: makes a file without a name.
        let file = unsafe { libc::memfd_create(c"sim-ggml".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return None;
        }
        // SAFETY: the file is new, and only this function has its descriptor.
        let fits = unsafe { libc::ftruncate(file, size as libc::off_t) } == 0;
        let seen = fits
            .then(|| map(at, size, PROT_NONE, MAP_SHARED, file))
            .flatten();
        let real = seen.and_then(|_| map(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file));
        // SAFETY: the mappings keep the file.
        unsafe { libc::close(file) };
        let block = Block {
            device,
            seen: seen?,
            real,
            size,
            uses: Mutex::default(),
        };
        // SAFETY: new memory of this size.
        unsafe { (real? as *mut u8).write_bytes(POISON, size) };
        Some(block)
    }

    /// Returns the address of the bytes at an offset.
    pub fn at(&self, offset: usize) -> Option<*mut u8> {
        self.real.map(|real| (real + offset) as *mut u8)
    }

    /// Returns the whole of it, as offsets.
    pub fn whole(&self) -> Range<u64> {
        0..self.size as u64
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        for address in [Some(self.seen), self.real].into_iter().flatten() {
            // SAFETY: mapped by `new`; who uses it has a reference to the block.
            unsafe { libc::munmap(address as *mut _, self.size) };
        }
    }
}

/// Maps memory, at an address if that is free.
fn map(at: usize, size: usize, protection: c_int, flags: c_int, file: c_int) -> Option<usize> {
    // SAFETY: a new mapping; no other one is replaced.
    let address = unsafe { libc::mmap(at as *mut _, size, protection, flags, file, 0) };
    (address != MAP_FAILED).then_some(address as usize)
}

/// All allocations.
#[derive(Default)]
pub struct Memory {
    blocks: RwLock<BTreeMap<usize, Arc<Block>>>,
    /// Page-locked ranges: start and end.
    locked: RwLock<BTreeMap<usize, usize>>,
    /// By device.
    used: Mutex<BTreeMap<usize, Used>>,
    /// Addresses that were freed, by device and size: the next allocation of the size has the last one.
    freed: Mutex<BTreeMap<(usize, usize), Vec<usize>>>,
}

/// Bytes of the memory of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Now.
    pub now: usize,
    /// At most.
    pub peak: usize,
}

impl Memory {
    /// Allocates memory of a device, unless it runs out.
    pub fn alloc(
        &self,
        device: usize,
        size: usize,
        limit: usize,
        computes: bool,
    ) -> Option<Arc<Block>> {
        let size = size.max(1).next_multiple_of(4096);
        {
            let mut used = self.used.lock().expect("no panic");
            let used = used.entry(device).or_default();
            if used.now + size > limit {
                return None;
            }
            used.now += size;
            used.peak = used.peak.max(used.now);
        }
        let freed = self
            .freed
            .lock()
            .expect("no panic")
            .get_mut(&(device, size))
            .and_then(Vec::pop);
        let block = Block::new(device, size, computes, freed.unwrap_or(0));
        let Some(block) = block.map(Arc::new) else {
            self.release(device, size);
            return None;
        };
        let mut blocks = self.blocks.write().expect("no panic");
        blocks.insert(block.seen, block.clone());
        Some(block)
    }

    /// Frees device memory. Work that uses it keeps it until it ends.
    pub fn free(&self, block: &Block) {
        self.blocks.write().expect("no panic").remove(&block.seen);
        let mut freed = self.freed.lock().expect("no panic");
        freed
            .entry((block.device, block.size))
            .or_default()
            .push(block.seen);
        self.release(block.device, block.size);
    }

    fn release(&self, device: usize, size: usize) {
        let mut used = self.used.lock().expect("no panic");
        used.entry(device).or_default().now -= size;
    }

    /// Returns how much of the memory of a device is used.
    pub fn used(&self, device: usize) -> Used {
        let used = self.used.lock().expect("no panic");
        used.get(&device).copied().unwrap_or_default()
    }

    /// Returns the allocation with an address, and the offset of the address.
    pub fn find(&self, address: usize) -> Option<(Arc<Block>, usize)> {
        let blocks = self.blocks.read().expect("no panic");
        let (&seen, block) = blocks.range(..=address).next_back()?;
        (address - seen < block.size).then(|| (block.clone(), address - seen))
    }

    /// Allocates page-locked memory of the host.
    pub fn alloc_locked(&self, size: usize) -> Option<usize> {
        let (protection, flags) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
        let address = map(0, size.max(1), protection, flags, -1)?;
        self.lock(address, size);
        Some(address)
    }

    /// Frees it.
    pub fn free_locked(&self, address: usize, size: usize) {
        self.unlock(address);
        // SAFETY: mapped by `alloc_locked`.
        unsafe { libc::munmap(address as *mut _, size.max(1)) };
    }

    /// Page-locks a range, unless a part of it is page-locked.
    pub fn lock(&self, address: usize, size: usize) -> bool {
        let mut locked = self.locked.write().expect("no panic");
        let before = locked.range(..address + size).next_back();
        if size == 0 || before.is_some_and(|(_, &end)| end > address) {
            return false;
        }
        locked.insert(address, address + size);
        true
    }

    /// Ends the page-locking of the range that starts at an address.
    pub fn unlock(&self, address: usize) {
        self.locked.write().expect("no panic").remove(&address);
    }

    /// Whether all of a range is page-locked.
    pub fn is_locked(&self, address: usize, size: usize) -> bool {
        let locked = self.locked.read().expect("no panic");
        let before = locked.range(..=address).next_back();
        before.is_some_and(|(_, &end)| address + size <= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_runs_out_and_comes_back() {
        let memory = Memory::default();
        let block = memory.alloc(0, 5000, 8192, true).expect("free memory");
        assert!(memory.alloc(0, 1, 8192, true).is_none());
        assert!(memory.alloc(1, 8192, 8192, true).is_some());
        assert_eq!(
            memory.find(block.seen + 8191).map(|found| found.1),
            Some(8191)
        );
        assert!(memory.find(block.seen + 8192).is_none());
        // SAFETY: an allocation of more than one byte.
        assert_eq!(unsafe { block.at(1).expect("bytes").read() }, POISON);
        memory.free(&block);
        assert!(memory.find(block.seen).is_none());
        assert_eq!((memory.used(0).now, memory.used(0).peak), (0, 8192));
    }

    #[test]
    fn page_locked_ranges_do_not_overlap() {
        let memory = Memory::default();
        assert!(memory.lock(100, 50));
        assert!(!memory.lock(149, 1));
        assert!(!memory.lock(90, 20));
        assert!(memory.lock(150, 10));
        assert!(memory.is_locked(110, 40));
        assert!(!memory.is_locked(110, 41));
        memory.unlock(100);
        assert!(!memory.is_locked(110, 1));
    }
}
