//! Memory that the server of a disk shares with the process that mounted the disk.

use std::fs::OpenOptions;
use std::io;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use memmap2::MmapRaw;

/// Settings of the disk, and what it did.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// Time that each request takes besides its bytes.
    pub latency_ns: AtomicU64,
    /// In bytes per second.
    pub bandwidth: AtomicU64,
    /// Size of the file.
    pub size: AtomicU64,
    /// The begin of the range of bytes whose requests fail.
    pub fault_begin: AtomicU64,
    /// Its end.
    pub fault_end: AtomicU64,
    /// How many requests fail.
    pub faults: AtomicU64,
    /// Answered requests.
    pub requests: AtomicU64,
    /// Bytes of the answers.
    pub bytes: AtomicU64,
    /// Requests without an answer.
    pub under_way: AtomicU64,
    /// The most of them at a time.
    pub depth: AtomicU64,
    /// How long before or after their time the answers came, all together.
    pub off_ns: AtomicU64,
}

/// A mapping of [`Control`].
#[derive(Debug)]
pub struct SharedControl(MmapRaw);

impl SharedControl {
    /// Makes it in a folder, with zeros.
    pub fn create(folder: &Path) -> io::Result<SharedControl> {
        let path = folder.join("control");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        file.set_len(size_of::<Control>() as u64)?;
        MmapRaw::map_raw(&file).map(SharedControl)
    }

    /// Opens what another process made.
    pub fn open(folder: &Path) -> io::Result<SharedControl> {
        let path = folder.join("control");
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        MmapRaw::map_raw(&file).map(SharedControl)
    }
}

impl Deref for SharedControl {
    type Target = Control;

    fn deref(&self) -> &Control {
        // SAFETY: the mapping has the size of the struct, which is valid with any bytes, and lives
        // as long as `self`.
        unsafe { &*self.0.as_ptr().cast::<Control>() }
    }
}
