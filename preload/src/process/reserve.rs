//! Memory where malloc has none left. Rust ends a process whose allocation fails, and the program might
//! have lived: it may need no more memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are reserved; no page of them is taken before it is needed.
const SIZE: usize = 4 << 20;

/// Allocations have whole units: what threads share is aligned to the cache lines of two, also in libraries.
const UNIT: usize = 128;

#[repr(align(128))]
struct Bytes(UnsafeCell<[u8; SIZE]>);

// SAFETY: each part belongs to the allocation that took it.
unsafe impl Sync for Bytes {}

static BYTES: Bytes = Bytes(UnsafeCell::new([0; SIZE]));
/// The bytes that are taken, and above them the number of allocations. Without any, all bytes are free.
static TAKEN: AtomicU64 = AtomicU64::new(0);
const ONE: u64 = 1 << 32;

/// malloc, and where it fails the reserve.
pub struct Reserved;

fn is_of_reserve(at: *mut u8) -> bool {
    (at as usize).wrapping_sub(BYTES.0.get() as usize) < SIZE
}

/// Returns the bytes that an allocation takes.
fn rounded(size: usize) -> u64 {
    (size as u64).next_multiple_of(UNIT as u64)
}

fn take(layout: Layout) -> *mut u8 {
    if layout.size() > SIZE || layout.align() > UNIT {
        return null_mut();
    }
    let size = rounded(layout.size());
    let fits = |taken: u64| Some(taken + size + ONE).filter(|sum| *sum % ONE <= SIZE as u64);
    match TAKEN.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits) {
        // SAFETY: inside of the reserve.
        Ok(taken) => unsafe { BYTES.0.get().cast::<u8>().add((taken % ONE) as usize) },
        Err(_) => null_mut(),
    }
}

fn give_back(at: *mut u8, layout: Layout) {
    let begin = at as u64 - BYTES.0.get() as u64;
    let freed = |taken: u64| {
        let others = taken - ONE;
        Some(match others % ONE {
            _ if others < ONE => 0,
            // The bytes behind the last of the others.
            end if end == begin + rounded(layout.size()) => others - rounded(layout.size()),
            _ => others,
        })
    };
    let _ = TAKEN.fetch_update(Ordering::SeqCst, Ordering::SeqCst, freed);
}

// SAFETY: memory of malloc, or a part of the reserve that no other allocation has; each goes back to where it
// is from.
unsafe impl GlobalAlloc for Reserved {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let at = unsafe { System.alloc(layout) };
        if at.is_null() { take(layout) } else { at }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        match is_of_reserve(at) {
            true => give_back(at, layout),
            // SAFETY: as the caller promises.
            false => unsafe { System.dealloc(at, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        let mut at = unsafe { System.alloc_zeroed(layout) };
        if at.is_null() {
            at = take(layout);
            if !at.is_null() {
                // SAFETY: as many bytes were taken. They may have been used before.
                unsafe { at.write_bytes(0, layout.size()) };
            }
        }
        at
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_of_reserve(at) {
            // SAFETY: as the caller promises.
            let moved = unsafe { System.realloc(at, layout, size) };
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the caller promises that the size fits; the bytes of both are distinct.
        unsafe {
            let moved = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !moved.is_null() {
                moved.copy_from_nonoverlapping(at, layout.size().min(size));
                self.dealloc(at, layout);
            }
            moved
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_serves_allocations_and_is_free_again() {
        let layout = |size| Layout::from_size_align(size, 8).expect("a layout");
        assert!(take(layout(SIZE + 1)).is_null());
        let top = take(layout(SIZE));
        give_back(top, layout(SIZE));
        let parts: Vec<*mut u8> = std::iter::repeat_with(|| take(layout(1000)))
            .take_while(|at| !at.is_null())
            .collect();
        assert_eq!(parts.len(), SIZE / 1024);
        assert!(parts.is_sorted() && parts.iter().all(|at| is_of_reserve(*at)));
        // SAFETY: parts of the reserve, of these sizes.
        unsafe {
            let moved = Reserved.realloc(parts[0], layout(1000), 4000);
            assert!(!is_of_reserve(moved), "malloc has memory again");
            Reserved.dealloc(moved, layout(4000));
            for at in &parts[1..] {
                Reserved.dealloc(*at, layout(1000));
            }
        }
        assert_eq!(TAKEN.load(Ordering::SeqCst), 0);
        for align in [64, 128] {
            let aligned = Layout::from_size_align(512, align).expect("a layout");
            let at = take(aligned);
            assert!(
                !at.is_null() && (at as usize).is_multiple_of(align),
                "{at:?}"
            );
            give_back(at, aligned);
        }
        let page = Layout::from_size_align(1, 4096).expect("a layout");
        assert!(take(page).is_null());
    }
}
