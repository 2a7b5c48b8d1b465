//! Page locks on the model's mapping.
//!
//! A copy from pageable memory blocks the thread that issues it. Pages of the model's mapping
//! can be locked in place (`cuMemHostRegister`); their bytes then go from the page cache to the
//! device without a buffer. Locked pages stay in memory, so only the down-projections are
//! locked, and only up to half of the free memory of the machine or of the control group.

use std::ops::Range;
use std::sync::{Arc, Weak};

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use crate::device::AsyncDevice;
use crate::model::{Model, TensorView};
use sidecar_core::experts::Projection;
use sidecar_core::memory::free_memory;
use sidecar_core::stream::page_size;

/// Locked pages, which are unlocked on drop.
#[derive(Debug)]
pub(super) struct PageLocks {
    device: Arc<dyn AsyncDevice>,
    model: Arc<Model>,
    /// Addresses, ascending.
    ranges: Vec<Range<u64>>,
    /// Keep the locked pages mapped.
    _views: Vec<TensorView>,
}

/// All locks of the process. Schedulers of a model share its locks, because a page cannot be
/// locked twice.
static ALL: Lazy<Mutex<Vec<Weak<PageLocks>>>> = Lazy::new(Mutex::default);

impl PageLocks {
    /// Locks the down-projections of a model. The error is the reason for the log.
    pub fn get(
        device: &Arc<dyn AsyncDevice>,
        model: &Arc<Model>,
    ) -> Result<Arc<PageLocks>, String> {
        let mut all = ALL.lock();
        all.retain(|locks| locks.strong_count() > 0);
        let mut live = all.iter().filter_map(Weak::upgrade);
        if let Some(locks) = live.find(|locks| Arc::ptr_eq(&locks.model, model)) {
            return Ok(locks);
        }
        drop(live);
        let tensors = model.experts().tensors().iter();
        let views: Vec<TensorView> = tensors
            .filter(|tensor| tensor.name.projection == Projection::Down && tensor.experts > 0)
            .map(|tensor| model.tensor(tensor.tensor))
            .collect();
        let host = views.iter().filter_map(|view| model.host_bytes(view));
        let address = |bytes: *const [u8]| bytes.cast::<u8>() as u64;
        let ranges = page_ranges(host.map(|of| address(of)..address(of) + of.len() as u64));
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        if ranges.is_empty() {
            return Err("the model is not mapped".into());
        }
        if let Some((free, limit)) = free_memory().filter(|(free, _)| bytes > free / 2) {
            return Err(format!(
                "its {bytes} bytes are more than half of the {free} bytes that {limit} leaves"
            ));
        }
        let mut locks = PageLocks {
            device: device.clone(),
            model: model.clone(),
            ranges: Vec::with_capacity(ranges.len()),
            _views: views,
        };
        for range in ranges {
            let len = (range.end - range.start) as usize;
            // SAFETY: the views keep the pages mapped until they are unlocked again.
            let locked = unsafe { device.lock_pages(range.start as *const u8, len) };
            locked.map_err(|error| error.to_string())?;
            locks.ranges.push(range);
        }
        let locks = Arc::new(locks);
        all.push(Arc::downgrade(&locks));
        Ok(locks)
    }

    /// Returns whether all of these bytes are locked.
    pub fn cover(&self, start: *const u8, len: u64) -> bool {
        let start = start as u64;
        let is_around = |range: &Range<u64>| range.start <= start && start + len <= range.end;
        self.ranges.iter().any(is_around)
    }

    /// Returns the locked bytes.
    pub fn bytes(&self) -> u64 {
        let bytes = self.ranges.iter().map(|range| range.end - range.start);
        bytes.sum()
    }
}

impl Drop for PageLocks {
    fn drop(&mut self) {
        for range in &self.ranges {
            // SAFETY: a scheduler drops its locks when its stream is idle.
            let _ = unsafe { self.device.unlock_pages(range.start as *const u8) };
        }
    }
}

/// Returns the whole pages around some bytes, each once.
fn page_ranges(bytes: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let page = page_size();
    let whole = |of: Range<u64>| of.start / page * page..of.end.next_multiple_of(page);
    let mut all: Vec<_> = bytes.filter(|of| !of.is_empty()).map(whole).collect();
    all.sort_unstable_by_key(|range| range.start);
    all.dedup_by(|next, last| {
        let joined = next.start <= last.end;
        if joined {
            last.end = last.end.max(next.end);
        }
        joined
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_locked_once_each() {
        let page = page_size();
        let bytes = [
            10 * page + 5..11 * page + 5,
            20 * page..20 * page + 1,
            11 * page + 7..14 * page + 7,
            3 * page..3 * page,
            21 * page..22 * page,
        ];
        let expected = [10 * page..15 * page, 20 * page..22 * page];
        assert_eq!(page_ranges(bytes.into_iter()), expected);
    }
}
