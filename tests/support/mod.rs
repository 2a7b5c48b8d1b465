//! A device for tests: host memory with limits that a test sets.
#![allow(dead_code, reason = "each test uses the part that it needs")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use llama_sidecar::device::{Buffer, Device, DeviceError, DeviceKind, HostDevice, Memory};

/// Stands for a GPU.
#[derive(Debug)]
pub struct Gpu {
    inner: Arc<HostDevice>,
    capacity: AtomicU64,
    allocations_left: AtomicU64,
}

impl Gpu {
    pub fn new(name: impl Into<String>) -> Arc<Gpu> {
        Arc::new(Gpu {
            inner: HostDevice::new(name),
            capacity: AtomicU64::new(u64::MAX),
            allocations_left: AtomicU64::new(u64::MAX),
        })
    }

    /// Refuses when more than this many bytes would be in use.
    pub fn hold_at_most(&self, bytes: u64) {
        self.capacity.store(bytes, Ordering::SeqCst);
    }

    /// Refuses after this many more allocations.
    pub fn allow(&self, allocations: u64) {
        self.allocations_left.store(allocations, Ordering::SeqCst);
    }
}

impl Device for Gpu {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn memory(&self) -> Memory {
        self.inner.memory()
    }

    fn allocate(self: Arc<Self>, len: u64) -> Result<Box<dyn Buffer>, DeviceError> {
        let free = self
            .capacity
            .load(Ordering::SeqCst)
            .saturating_sub(self.memory().used);
        let left = self
            .allocations_left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            });
        if len > free || left.is_err() {
            return Err(DeviceError::OutOfMemory {
                device: self.name().into(),
                requested: len,
                free,
            });
        }
        self.inner.clone().allocate(len)
    }
}
