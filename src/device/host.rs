//! Host memory as a device: the default without a GPU, and a substitute for GPUs in tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::MmapMut;

use super::{ALIGNMENT, Buffer, Device, DeviceError, DeviceKind, Memory};

/// Minimum size of a buffer with a mapping of its own. Such a buffer is returned to the system when
/// it is freed, and can use huge pages.
const MAP_FROM: u64 = 1 << 20;
/// Minimum size of an allocation that is compared with the available memory of the machine.
const CHECK_FROM: u64 = 64 << 20;

/// A device in host memory.
///
/// ```
/// use llama_sidecar::device::{ALIGNMENT, Device, HostDevice};
///
/// let device = HostDevice::with_capacity("host0", 1 << 20);
/// let mut buffer = device.clone().allocate(1000)?;
/// assert_eq!(buffer.address() % ALIGNMENT, 0);
/// buffer.write(0, b"weights")?;
/// assert_eq!(&buffer.host().unwrap()[..7], b"weights");
/// assert_eq!(device.memory().used, 1000);
/// assert!(device.clone().allocate(1 << 20).is_err(), "more than its capacity");
///
/// drop(buffer);
/// assert_eq!(device.memory().used, 0);
/// # Ok::<(), llama_sidecar::device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct HostDevice {
    name: String,
    /// Maximum number of bytes in live buffers.
    capacity: u64,
    used: AtomicU64,
    peak: AtomicU64,
    allocations: AtomicU64,
}

impl HostDevice {
    /// Creates a device without a memory limit.
    pub fn new(name: impl Into<String>) -> Arc<HostDevice> {
        HostDevice::with_capacity(name, u64::MAX)
    }

    /// Creates a device with a memory limit of `capacity` bytes.
    pub fn with_capacity(name: impl Into<String>, capacity: u64) -> Arc<HostDevice> {
        Arc::new(HostDevice {
            name: name.into(),
            capacity,
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
        })
    }

    /// Reserves `len` bytes. Returns `false` when they exceed the capacity.
    fn reserve(&self, len: u64) -> bool {
        let fits = |used: u64| used.checked_add(len).filter(|&sum| sum <= self.capacity);
        let taken = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        if let Ok(before) = taken {
            self.peak.fetch_max(before + len, Ordering::Relaxed);
        }
        taken.is_ok()
    }

    fn release(&self, len: u64) {
        self.used.fetch_sub(len, Ordering::Relaxed);
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    fn memory(&self) -> Memory {
        let used = self.used.load(Ordering::Relaxed);
        let (total, available) = system_memory();
        Memory {
            total: total.min(self.capacity),
            free: available.min(self.capacity.saturating_sub(used)),
            used,
            peak: self.peak.load(Ordering::Relaxed),
            allocations: self.allocations.load(Ordering::Relaxed),
        }
    }

    fn allocate(self: Arc<Self>, len: u64) -> Result<Box<dyn Buffer>, DeviceError> {
        let refused = |device: &HostDevice| DeviceError::OutOfMemory {
            device: device.name.clone(),
            requested: len,
            free: device.memory().free,
        };
        // The kernel overcommits memory and kills the process when the pages are used, so
        // requests that exceed the available memory are refused here.
        let too_large = len >= CHECK_FROM && len > self.memory().free;
        if too_large || !self.reserve(len) {
            return Err(refused(&self));
        }
        let Some(bytes) = Bytes::allocate(len) else {
            self.release(len);
            return Err(refused(&self));
        };
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(HostBuffer {
            bytes,
            device: self,
        }))
    }
}

/// Returns the total and the available bytes of the machine, or `u64::MAX` where `/proc/meminfo`
/// does not have them.
fn system_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib << 10)
    };
    (
        field("MemTotal:").unwrap_or(u64::MAX),
        field("MemAvailable:").unwrap_or(u64::MAX),
    )
}

#[derive(Debug)]
struct HostBuffer {
    bytes: Bytes,
    device: Arc<HostDevice>,
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.device.release(self.len());
    }
}

/// Aligned memory without unsafe code: a mapping, or a vector that is large enough to start at an
/// aligned byte.
#[derive(Debug)]
enum Bytes {
    Mapped(MmapMut),
    Heap {
        memory: Vec<u8>,
        start: usize,
        len: usize,
    },
}

impl Bytes {
    fn allocate(len: u64) -> Option<Bytes> {
        let len = usize::try_from(len).ok()?;
        if len as u64 >= MAP_FROM {
            let map = MmapMut::map_anon(len).ok()?;
            // Only a hint: without huge pages the first touch is slower.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Some(Bytes::Mapped(map));
        }
        let memory = vec![0u8; len + ALIGNMENT as usize];
        let start = memory.as_ptr().align_offset(ALIGNMENT as usize);
        Some(Bytes::Heap { memory, start, len })
    }

    fn get(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Heap { memory, start, len } => &memory[*start..*start + *len],
        }
    }

    fn get_mut(&mut self) -> &mut [u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Heap { memory, start, len } => &mut memory[*start..*start + *len],
        }
    }
}

impl Buffer for HostBuffer {
    fn len(&self) -> u64 {
        self.bytes.get().len() as u64
    }

    fn address(&self) -> u64 {
        self.bytes.get().as_ptr() as u64
    }

    fn host(&self) -> Option<&[u8]> {
        Some(self.bytes.get())
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        Some(self.bytes.get_mut())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let at = offset as usize;
        self.bytes.get_mut()[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = offset as usize;
        bytes.copy_from_slice(&self.bytes.get()[at..at + bytes.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_counted() {
        let device = HostDevice::with_capacity("test", 4 << 20);
        for len in [0, 1, 255, 1 << 20, (2 << 20) + 1] {
            let buffer = device.clone().allocate(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.address() % ALIGNMENT, 0);
            assert_eq!(device.memory().used, len);
        }
        let memory = device.memory();
        assert_eq!(
            (memory.used, memory.peak, memory.allocations),
            (0, (2 << 20) + 1, 5)
        );
    }

    #[test]
    fn a_full_device_refuses_and_recovers() {
        let device = HostDevice::with_capacity("small", 1000);
        let held = device.clone().allocate(600).unwrap();
        assert_eq!(
            device.clone().allocate(401).unwrap_err(),
            DeviceError::OutOfMemory {
                device: "small".into(),
                requested: 401,
                free: 400
            }
        );
        drop(held);
        assert!(device.allocate(1000).is_ok());
    }
}
