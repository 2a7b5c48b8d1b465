//! Page locks on the model's mapping.
//!
//! A copy from pageable memory blocks the thread that issues it. Pages of the model's mapping
//! can be locked in place (`cuMemHostRegister`); their bytes then go from the page cache to the
//! device without a buffer. Locked pages stay in memory, so only the down-projections are
//! locked, and only up to half of the available memory.

use std::sync::{Arc, Weak};

use once_cell::sync::Lazy;
use parking_lot::Mutex;

use crate::device::{AsyncDevice, system_memory};
use crate::model::{Model, TensorView};
use sidecar_core::experts::Projection;

/// The page size if the system does not report one: the largest of x86-64 and AArch64.
const PAGE: usize = 64 << 10;

/// Locked pages, which are unlocked on drop.
#[derive(Debug)]
pub(super) struct PageLocks {
    device: Arc<dyn AsyncDevice>,
    model: Arc<Model>,
    /// First address and length of each range, ascending.
    ranges: Vec<(usize, usize)>,
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
        let ranges = page_ranges(host.map(|bytes| (bytes.cast::<u8>() as usize, bytes.len())));
        let bytes: usize = ranges.iter().map(|range| range.1).sum();
        let available = system_memory().1;
        if ranges.is_empty() {
            return Err("the model is not mapped".into());
        }
        if bytes as u64 > available / 2 {
            return Err(format!(
                "its {bytes} bytes are more than half of the {available} bytes of available memory"
            ));
        }
        let mut locks = PageLocks {
            device: device.clone(),
            model: model.clone(),
            ranges: Vec::with_capacity(ranges.len()),
            _views: views,
        };
        for (start, len) in ranges {
            // SAFETY: the views keep the pages mapped until they are unlocked again.
            let locked = unsafe { device.lock_pages(start as *const u8, len) };
            locked.map_err(|error| error.to_string())?;
            locks.ranges.push((start, len));
        }
        let locks = Arc::new(locks);
        all.push(Arc::downgrade(&locks));
        Ok(locks)
    }

    /// Returns whether all of these bytes are locked.
    pub fn cover(&self, start: *const u8, len: u64) -> bool {
        let start = start as usize;
        let after = self.ranges.partition_point(|range| range.0 <= start);
        let Some(&(first, locked)) = after.checked_sub(1).and_then(|at| self.ranges.get(at)) else {
            return false;
        };
        (start - first) as u64 + len <= locked as u64
    }

    /// Returns the locked bytes.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.1 as u64).sum()
    }
}

impl Drop for PageLocks {
    fn drop(&mut self) {
        for &(start, _) in &self.ranges {
            // SAFETY: a scheduler drops its locks when its stream is idle.
            let _ = unsafe { self.device.unlock_pages(start as *const u8) };
        }
    }
}

/// Returns the whole pages around some bytes, each once.
fn page_ranges(bytes: impl Iterator<Item = (usize, usize)>) -> Vec<(usize, usize)> {
    let page = page_size();
    let mut all: Vec<(usize, usize)> = bytes
        .filter(|&(_, len)| len > 0)
        .map(|(start, len)| (start / page * page, (start + len).div_ceil(page) * page))
        .collect();
    all.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for (start, end) in all {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
        .into_iter()
        .map(|(start, end)| (start, end - start))
        .collect()
}

fn page_size() -> usize {
    // SAFETY: takes and returns numbers.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(PAGE).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_locked_once_each() {
        let page = page_size();
        let bytes = [
            (10 * page + 5, page),
            (20 * page, 1),
            (11 * page + 7, 3 * page),
            (3 * page, 0),
            (21 * page, page),
        ];
        let expected = vec![(10 * page, 5 * page), (20 * page, 2 * page)];
        assert_eq!(page_ranges(bytes.into_iter()), expected);
    }
}
