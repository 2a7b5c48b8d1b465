//! The part of the FUSE protocol (`linux/fuse.h`) that a file system with one read-only file needs.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Version of the protocol. The kernel speaks it with servers of this and of later versions.
const VERSION: (u32, u32) = (7, 31);
/// The longest read: 256 pages, the kernel's limit.
const LONGEST_READ: u32 = 1 << 20;
/// How many reads the kernel may have under way that no process waits for, which are those of
/// read-ahead.
const BACKGROUND: u16 = 512;

/// `FUSE_ASYNC_READ`: several reads at a time.
const ASYNC_READ: u32 = 1 << 0;
/// `FUSE_PARALLEL_DIROPS`.
const PARALLEL_LOOKUPS: u32 = 1 << 18;
/// `FUSE_MAX_PAGES`: reads of more than 32 pages.
const MAX_PAGES: u32 = 1 << 22;
/// `FOPEN_KEEP_CACHE`: opening the file again leaves its pages in the page cache.
const KEEP_CACHE: u32 = 1 << 1;

const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Names are cached without a limit, sizes are not.
const NAME_SECONDS: u64 = 1 << 20;

/// `struct fuse_in_header`.
#[repr(C)]
#[derive(Clone, Copy)]
struct InHeader {
    len: u32,
    opcode: u32,
    unique: u64,
    node: u64,
    rest: [u32; 4],
}

/// `struct fuse_out_header`.
#[repr(C)]
struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

/// `struct fuse_init_out`.
#[repr(C)]
#[derive(Default)]
struct InitOut {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion_threshold: u16,
    max_write: u32,
    time_gran: u32,
    max_pages: u16,
    map_alignment: u16,
    unused: [u32; 8],
}

/// `struct fuse_attr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    node: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    owner: [u32; 2],
    device: u32,
    block_size: u32,
    flags: u32,
}

/// `struct fuse_entry_out`.
#[repr(C)]
#[derive(Default)]
struct EntryOut {
    node: u64,
    generation: u64,
    name_seconds: u64,
    attribute_seconds: u64,
    nanoseconds: [u32; 2],
    attributes: Attributes,
}

/// `struct fuse_attr_out`.
#[repr(C)]
#[derive(Default)]
struct AttributesOut {
    seconds: u64,
    nanoseconds: [u32; 2],
    attributes: Attributes,
}

/// `struct fuse_open_out`.
#[repr(C)]
#[derive(Default)]
struct OpenOut {
    handle: u64,
    flags: u32,
    backing: u32,
}

/// A request to read from the file.
#[derive(Debug, Clone, Copy)]
pub struct ReadRequest {
    unique: u64,
    /// Where the bytes begin.
    pub offset: u64,
    /// How many bytes there are.
    pub len: u32,
}

/// The kernel's end of a mounted file system.
#[derive(Debug)]
pub struct Connection {
    device: File,
    /// Name of the file.
    name: &'static str,
    /// When the file was changed, in seconds.
    modified: u64,
}

impl Connection {
    /// Mounts a file system on a folder. The error states what failed.
    pub fn mount(folder: &Path, name: &'static str, modified: u64) -> Result<Connection, String> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|error| format!("/dev/fuse cannot be opened: {error}"))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={LONGEST_READ}",
            device.as_raw_fd()
        );
        let folder = CString::new(folder.as_os_str().as_bytes()).expect("a path has no NUL");
        let options = CString::new(options).expect("no NUL");
        // SAFETY: strings that end with a NUL.
        let mounted = unsafe {
            libc::mount(
                c"slow-disk".as_ptr(),
                folder.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV | libc::MS_RDONLY,
                options.as_ptr().cast(),
            )
        };
        if mounted != 0 {
            let error = io::Error::last_os_error();
            return Err(format!("a FUSE file system cannot be mounted: {error}"));
        }
        Ok(Connection {
            device,
            name,
            modified,
        })
    }

    /// Answers requests until one is a read, which it returns; an error after the end of the
    /// file system. `size` returns the size of the file.
    pub fn next_read(&self, size: impl Fn() -> u64) -> io::Result<ReadRequest> {
        // Longer than any request but a write; the kernel demands this much.
        let mut buffer = [0; 16 << 10];
        loop {
            let len = match (&self.device).read(&mut buffer) {
                Ok(len) => len,
                // The request was interrupted before it was read.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let (header, body) = buffer[..len].split_at(size_of::<InHeader>());
            // SAFETY: a struct of numbers, and as many bytes.
            let header: InHeader = unsafe { header.as_ptr().cast::<InHeader>().read_unaligned() };
            // The opcodes of `enum fuse_opcode`.
            match header.opcode {
                // LOOKUP
                1 if header.node == ROOT
                    && body.strip_suffix(&[0]) == Some(self.name.as_bytes()) =>
                {
                    let entry = EntryOut {
                        node: FILE,
                        name_seconds: NAME_SECONDS,
                        attributes: self.attributes(FILE, size()),
                        ..EntryOut::default()
                    };
                    self.answer(header.unique, bytes_of(&entry))?;
                }
                1 => self.refuse(header.unique, libc::ENOENT)?,
                // FORGET, INTERRUPT and BATCH_FORGET have no answer.
                2 | 36 | 42 => {}
                // GETATTR
                3 => {
                    let attributes = AttributesOut {
                        attributes: self.attributes(header.node, size()),
                        ..AttributesOut::default()
                    };
                    self.answer(header.unique, bytes_of(&attributes))?;
                }
                // OPEN
                14 => {
                    let open = OpenOut {
                        flags: KEEP_CACHE,
                        ..OpenOut::default()
                    };
                    self.answer(header.unique, bytes_of(&open))?;
                }
                // READ
                15 => {
                    return Ok(ReadRequest {
                        unique: header.unique,
                        offset: number(&body[8..]) | number(&body[12..]) << 32,
                        len: number(&body[16..]) as u32,
                    });
                }
                // INIT
                26 => {
                    let init = InitOut {
                        major: VERSION.0,
                        minor: VERSION.1,
                        // As the kernel has it; `read_ahead_kb` changes it.
                        max_readahead: number(&body[8..]) as u32,
                        flags: ASYNC_READ | PARALLEL_LOOKUPS | MAX_PAGES,
                        max_background: BACKGROUND,
                        congestion_threshold: BACKGROUND,
                        max_write: 4096,
                        time_gran: 1,
                        max_pages: (LONGEST_READ / 4096) as u16,
                        ..InitOut::default()
                    };
                    self.answer(header.unique, bytes_of(&init))?;
                }
                _ => self.refuse(header.unique, libc::ENOSYS)?,
            }
        }
    }

    /// Answers a read.
    pub fn answer_read(&self, request: ReadRequest, bytes: &[u8]) -> io::Result<()> {
        self.answer(request.unique, bytes)
    }

    /// Fails a read with an I/O error.
    pub fn fail_read(&self, request: ReadRequest) -> io::Result<()> {
        self.refuse(request.unique, libc::EIO)
    }

    fn attributes(&self, node: u64, size: u64) -> Attributes {
        let (mode, size) = match node {
            ROOT => (libc::S_IFDIR | 0o555, 0),
            _ => (libc::S_IFREG | 0o444, size),
        };
        Attributes {
            node,
            size,
            blocks: size.div_ceil(512),
            times: [self.modified; 3],
            mode,
            links: 1,
            block_size: 4096,
            ..Attributes::default()
        }
    }

    fn answer(&self, unique: u64, bytes: &[u8]) -> io::Result<()> {
        self.send(unique, 0, bytes)
    }

    fn refuse(&self, unique: u64, error: i32) -> io::Result<()> {
        self.send(unique, -error, &[])
    }

    fn send(&self, unique: u64, error: i32, bytes: &[u8]) -> io::Result<()> {
        let header = OutHeader {
            len: (size_of::<OutHeader>() + bytes.len()) as u32,
            error,
            unique,
        };
        let parts = [IoSlice::new(bytes_of(&header)), IoSlice::new(bytes)];
        match (&self.device).write_vectored(&parts) {
            // The process that asked was ended.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result.map(|_| ()),
        }
    }
}

/// Unmounts what is mounted on a folder, also while files on it are open.
pub fn unmount(folder: &Path) {
    let folder = CString::new(folder.as_os_str().as_bytes()).expect("a path has no NUL");
    // SAFETY: a string that ends with a NUL.
    unsafe { libc::umount2(folder.as_ptr(), libc::MNT_DETACH) };
}

/// The 32-bit number at the beginning of some bytes.
fn number(bytes: &[u8]) -> u64 {
    u32::from_ne_bytes(bytes[..4].try_into().expect("four bytes")).into()
}

/// The bytes of one of the structs above.
fn bytes_of<T>(value: &T) -> &[u8] {
    // SAFETY: the structs consist of numbers and have no padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}
