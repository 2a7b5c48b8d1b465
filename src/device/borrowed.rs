//! Memory of the program as a buffer.

use super::{Buffer, DeviceError};

/// Memory that belongs to the program, and is only read here.
#[derive(Debug)]
pub struct BorrowedBuffer {
    start: *const u8,
    len: usize,
}

// SAFETY: the memory is only read, as the maker of the buffer guarantees.
unsafe impl Send for BorrowedBuffer {}
// SAFETY: as above.
unsafe impl Sync for BorrowedBuffer {}

impl BorrowedBuffer {
    /// Makes a buffer of `len` bytes at `start`.
    ///
    /// # Safety
    ///
    /// The bytes can be read, and do not change, as long as the buffer lives.
    pub unsafe fn new(start: *const u8, len: usize) -> BorrowedBuffer {
        BorrowedBuffer { start, len }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: as the maker guarantees.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Buffer for BorrowedBuffer {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn address(&self) -> u64 {
        self.start as u64
    }

    fn host(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Failed {
            device: "host".into(),
            action: "write to memory of the program",
            reason: "it is only read".into(),
        })
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let at = offset as usize;
        bytes.copy_from_slice(&self.bytes()[at..at + bytes.len()]);
        Ok(())
    }
}
