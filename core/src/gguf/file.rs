//! A GGUF file on disk: opening, identity, mapping and reading.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::error::{FormatError, ParseError};
use super::header::Header;
use super::value::{KeyValue, Strings, Value};
use crate::descriptors::{self, Kept};
use crate::memory;
use crate::signals::without_write_signals;
use crate::text;

/// How the bytes of a file are accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Map the file. If mapping fails, read it.
    Map,
    /// Read the file and never map it. In-place writes then do not change tensors in use, and a
    /// truncated file gives an error instead of a bus error. The cost is a copy of the data.
    Read,
}

/// The identity of one version of a file.
///
/// The modification time alone is not enough: a `rename` can install an older file, two writes can
/// happen within a second, and a writer can set the time back. The time of change (ctime) cannot be
/// set, but it also changes when a file is renamed, linked, or gets another owner or mode; see
/// [`FileId::unwritten_since`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// Device that holds the file.
    pub dev: u64,
    /// Inode number on that device.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Modification time, seconds since 1970.
    pub mtime: i64,
    /// Modification time, nanoseconds within the second.
    pub mtime_ns: i64,
    /// Time of change, seconds since 1970.
    pub ctime: i64,
    /// Time of change, nanoseconds within the second.
    pub ctime_ns: i64,
    /// Type and permissions.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of hard links.
    pub links: u64,
}

impl FileId {
    /// Returns the identity of the file that is at `path` now.
    pub fn of_path(path: &Path) -> io::Result<FileId> {
        std::fs::metadata(path).map(|found| FileId::of(&found))
    }

    /// Returns whether both are the same inode, regardless of content.
    pub fn same_inode(&self, other: &FileId) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }

    /// Returns whether both are the same inode with the same size and modification time.
    pub fn same_stamp(&self, other: &FileId) -> bool {
        let stamp = |id: &FileId| (id.size, id.mtime, id.mtime_ns);
        self.same_inode(other) && stamp(self) == stamp(other)
    }

    /// Returns whether the file at a path is this one, by its inode, size and modification time.
    pub fn is_at(&self, path: &Path) -> bool {
        FileId::of_path(path).is_ok_and(|now| now.same_stamp(self))
    }

    /// Returns whether there is no sign that the file was written since it was `earlier`.
    ///
    /// If only the time of change differs, a writer may have set the modification time back. A
    /// different owner, mode or number of links explains the difference otherwise.
    pub fn unwritten_since(&self, earlier: &FileId) -> bool {
        let changed = |id: &FileId| (id.ctime, id.ctime_ns);
        let explains = |id: &FileId| (id.mode, id.uid, id.gid, id.links);
        self.same_stamp(earlier)
            && (changed(self) == changed(earlier) || explains(self) != explains(earlier))
    }

    fn of(found: &Metadata) -> FileId {
        FileId {
            dev: found.dev(),
            ino: found.ino(),
            size: found.size(),
            mtime: found.mtime(),
            mtime_ns: found.mtime_nsec(),
            ctime: found.ctime(),
            ctime_ns: found.ctime_nsec(),
            mode: found.mode(),
            uid: found.uid(),
            gid: found.gid(),
            links: found.nlink(),
        }
    }
}

/// Why a file or a model was not opened.
#[derive(Debug, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the message of each variant describes its fields"
)]
pub enum OpenError {
    #[error("{path}: cannot {action}: {source}{hint}", path = text::path(path), hint = hint(source))]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error("{path}: expected a regular file, found {found}", path = text::path(path))]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{path}: {error}", path = text::path(path))]
    Malformed { path: PathBuf, error: FormatError },
    #[error("{path}: {reason}", path = text::path(path))]
    Shard { path: PathBuf, reason: String },
    #[error("{path}: the file changed while it was read: try again when its writer has finished", path = text::path(path))]
    Changing { path: PathBuf },
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            " (a model needs one open file per shard: raise the limit with 'ulimit -n')"
        }
        _ => "",
    }
}

/// An open file.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: Arc<Kept>,
    id: FileId,
    map: Option<Mmap>,
}

impl Source {
    /// Makes a file in memory with these bytes, which has this path in messages.
    fn in_memory(path: &Path, bytes: &[u8]) -> io::Result<Source> {
        let file = descriptors::above_standard(|| {
            #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
            // SAFETY: a plain call with a C string.
            let new = unsafe { libc::memfd_create(c"llama-sidecar".as_ptr(), libc::MFD_CLOEXEC) };
            match new {
                // SAFETY: a new descriptor is owned by nothing else.
                0.. => Ok(unsafe { File::from_raw_fd(new) }),
                _ => Err(io::Error::last_os_error()),
            }
        })?;
        without_write_signals(|| file.write_all_at(bytes, 0))?;
        Ok(Source {
            path: path.to_owned(),
            id: FileId::of(&file.metadata()?),
            file: Arc::new(Kept::new(file)?),
            map: None,
        })
    }

    /// Opens a regular file.
    pub fn open(path: &Path, access: Access) -> Result<Source, OpenError> {
        let fail = |action| {
            move |source| OpenError::Io {
                path: path.to_owned(),
                action,
                source,
            }
        };
        // Without O_NONBLOCK, opening a FIFO would wait for a writer for ever.
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = descriptors::open(&options, path).map_err(fail("open it"))?;
        let found = file.metadata().map_err(fail("stat it"))?;
        if !found.is_file() {
            return Err(OpenError::NotAFile {
                path: path.to_owned(),
                found: if found.is_dir() {
                    "a directory"
                } else {
                    "a special file"
                },
            });
        }
        let map = match access {
            // SAFETY: the mapping is read-only, but another process can still change
            // or cut the file: the header is therefore checked as hostile input
            // while it is read, tensors are copied through `read_at` and not through
            // the mapping, and the documentation of zero-copy
            // pointers requires programs to replace files by rename.
            Access::Map => unsafe { Mmap::map(&file) }.ok(),
            Access::Read => None,
        };
        Ok(Source {
            path: path.to_owned(),
            id: FileId::of(&found),
            file: Arc::new(Kept::new(file).map_err(fail("keep it open"))?),
            map,
        })
    }

    /// Returns the path that the file was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open file, for advice on its page cache. It stays open as long as it is used.
    pub fn handle(&self) -> Arc<Kept> {
        self.file.clone()
    }

    /// Returns the identity at the time of opening.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Returns whether its path names this file, without a sign that it named another one since the file was opened: a rename
    /// changes the time of change.
    pub fn is_at_its_path(&self) -> bool {
        FileId::of_path(&self.path).is_ok_and(|now| {
            now.same_inode(&self.id) && (!now.same_stamp(&self.id) || now.unwritten_since(&self.id))
        })
    }

    /// Returns whether there is no sign that the open file was written since it was `earlier`. A
    /// rename of the file also explains a different time of change.
    pub fn is_unwritten_since(&self, earlier: &FileId) -> bool {
        let Ok(now) = self.id_now() else {
            return false;
        };
        let renamed = || !FileId::of_path(&self.path).is_ok_and(|at_path| at_path.same_inode(&now));
        now.unwritten_since(earlier) || now.same_stamp(earlier) && renamed()
    }

    /// Returns whether the open file still has the size and the modification time of `earlier`.
    pub fn has_stamp_of(&self, earlier: &FileId) -> bool {
        self.id_now().is_ok_and(|now| now.same_stamp(earlier))
    }

    /// Returns the identity of the open file now. It differs from [`Source::id`] when the file was
    /// modified in place, renamed, linked, or got another owner or mode.
    pub fn id_now(&self) -> io::Result<FileId> {
        self.file.get()?.metadata().map(|found| FileId::of(&found))
    }

    /// Returns mapped bytes, or `None` when the file is not mapped or is too short.
    pub fn mapped(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        self.map.as_ref()?.get(start..end)
    }

    /// Disables read-ahead of the kernel for this file (`POSIX_FADV_RANDOM`).
    pub fn advise_random(&self) {
        if let Ok(file) = self.file.get() {
            // SAFETY: advice for a descriptor that is open.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
        }
    }

    /// Fills `buffer` from `offset` as [`Source::read_at`] does, without adding to the page cache:
    /// pages that were not cached are dropped after the read. On a file system without `RWF_NOWAIT`
    /// (preadv2(2)), they stay in the page cache.
    ///
    /// Call [`Source::advise_random`] first.
    pub fn read_once_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let cached = self.read_cached(buffer, offset)?;
        if cached == buffer.len() {
            return Ok(());
        }
        let (rest, at) = (&mut buffer[cached..], offset + cached as u64);
        let file = self.file.get()?;
        file.read_exact_at(rest, at)?;
        // SAFETY: advice for a descriptor that is open.
        unsafe {
            libc::posix_fadvise(
                file.as_raw_fd(),
                at as libc::off_t,
                rest.len() as libc::off_t,
                libc::POSIX_FADV_DONTNEED,
            )
        };
        Ok(())
    }

    /// Reads the cached bytes from `offset` on and returns their number. Reads the whole range
    /// where the file system does not support `RWF_NOWAIT`.
    fn read_cached(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let piece = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: one piece, which is valid for writes of its length.
        let read = unsafe {
            libc::preadv2(
                self.file.get()?.as_raw_fd(),
                &piece,
                1,
                offset as libc::off_t,
                libc::RWF_NOWAIT,
            )
        };
        if let Ok(read) = usize::try_from(read) {
            return Ok(read);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Ok(0),
            // Not supported or not allowed. An error of the file itself occurs again in `read_at`.
            _ => {
                self.read_at(buffer, offset)?;
                Ok(buffer.len())
            }
        }
    }

    /// Returns whether a part of this range was never written, as far as the file system knows.
    pub fn has_hole(&self, offset: u64, len: u64) -> bool {
        let Ok(file) = self.opened_again() else {
            return false;
        };
        // SAFETY: looks for a position in a descriptor that is open.
        let hole = unsafe { libc::lseek(file.as_raw_fd(), offset as libc::off_t, libc::SEEK_HOLE) };
        u64::try_from(hole).is_ok_and(|hole| hole < offset.saturating_add(len))
    }

    /// Opens the open file again, for a position of its own; without /proc, by its path.
    fn opened_again(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let again = self.file.open_again(&options);
        let again = again.or_else(|_| descriptors::open(&options, &self.path))?;
        match FileId::of(&again.metadata()?).same_inode(&self.id) {
            true => Ok(again),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Fails if the open file was written since it was opened.
    pub fn check_unwritten(&self) -> Result<(), OpenError> {
        match self.is_unwritten_since(&self.id) {
            true => Ok(()),
            false => Err(OpenError::Changing {
                path: self.path.clone(),
            }),
        }
    }

    /// Fills `buffer` from `offset`. Fails when the file is too short.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.get()?.read_exact_at(buffer, offset)
    }
}

/// An open file and its header.
#[derive(Debug)]
pub struct GgufFile {
    /// The file.
    pub source: Source,
    /// The parsed header.
    pub header: Arc<Header>,
}

impl GgufFile {
    /// Opens a file and parses its header. Of the data, only the position is checked.
    pub fn open(path: &Path, access: Access) -> Result<GgufFile, OpenError> {
        let source = Source::open(path, access)?;
        let malformed = |error| OpenError::Malformed {
            path: path.to_owned(),
            error,
        };
        // Read, also where the file is mapped: its writer may cut it short at any moment, and a mapping ends there by SIGBUS.
        let header = read_header(&source)?;
        header.check_data(source.id.size).map_err(malformed)?;
        let header = Arc::new(header);
        Ok(GgufFile { source, header })
    }

    /// Parses a header whose data is elsewhere: what reads data from this file fails. It has `path` in messages.
    pub fn of_header(path: &Path, bytes: &[u8]) -> Result<GgufFile, OpenError> {
        let source = Source::in_memory(path, bytes).map_err(|source| OpenError::Io {
            path: path.to_owned(),
            action: "keep its header in memory",
            source,
        })?;
        let header = read_header(&source)?;
        let header = Arc::new(header);
        Ok(GgufFile { source, header })
    }

    /// Reads a metadata value that is not an array.
    pub fn value(&self, key: &KeyValue) -> io::Result<Value> {
        let bytes = self.value_bytes(key)?;
        Value::decode(key.ty, &bytes).ok_or_else(changed)
    }

    /// Reads at most `limit` elements of an array, starting at `from`.
    pub fn elements(&self, key: &KeyValue, from: u64, limit: u64) -> io::Result<Vec<Value>> {
        let to = key.count.min(from.saturating_add(limit));
        let from = from.min(to);
        let decode = |bytes| Value::decode(key.ty, bytes).ok_or_else(changed);
        match key.ty.fixed_size() {
            Some(size) => {
                let mut bytes = memory::zeroed(((to - from) * size) as usize)?;
                self.source.read_at(&mut bytes, key.offset + from * size)?;
                bytes.chunks_exact(size as usize).map(decode).collect()
            }
            None => {
                let strings = self.strings(key)?;
                let texts = (from..to).map(|at| strings.get(at).ok_or_else(changed));
                texts.map(|text| Ok(Value::Text(text?.to_vec()))).collect()
            }
        }
    }

    /// Returns a value for a message: at most 60 characters, and eight elements of an array.
    pub fn shown(&self, key: &KeyValue) -> String {
        const ELEMENTS: u64 = 8;
        const CHARACTERS: usize = 60;
        let text = match (key.array, key.ty.fixed_size()) {
            (false, Some(_)) => self.value(key).map(|value| value.to_string()),
            (false, None) => {
                let start = KeyValue {
                    len: key.len.min(1 << 10),
                    ..key.clone()
                };
                self.value(&start).map(|value| value.to_string())
            }
            (true, None) => Ok(format!("{} texts", key.count)),
            (true, Some(_)) => self.elements(key, 0, ELEMENTS).map(|first| {
                let texts: Vec<String> = first.iter().map(Value::to_string).collect();
                let more = if key.count > ELEMENTS { ", …" } else { "" };
                format!("[{}{more}]", texts.join(", "))
            }),
        };
        let text = text.unwrap_or_else(|error| error.to_string());
        let mut shown = text.escape_debug();
        let bounded: String = shown.by_ref().take(CHARACTERS).collect();
        match shown.next() {
            Some(_) => bounded + "…",
            None => bounded,
        }
    }

    /// Reads an array of strings.
    pub fn strings(&self, key: &KeyValue) -> io::Result<Strings> {
        Strings::parse(self.value_bytes(key)?, key.count).ok_or_else(changed)
    }

    /// Reads the bytes of a value. They are not borrowed from the mapping, so that a file that was
    /// truncated after opening gives an error.
    fn value_bytes(&self, key: &KeyValue) -> io::Result<Vec<u8>> {
        let mut bytes = memory::zeroed(key.len as usize)?;
        self.source.read_at(&mut bytes, key.offset)?;
        Ok(bytes)
    }
}

fn changed() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the metadata changed since the file was opened",
    )
}

/// Parses a header by reading a growing prefix of the file.
fn read_header(source: &Source) -> Result<Header, OpenError> {
    const FIRST_READ: u64 = 256 << 10;
    let path = || source.path.clone();
    let mut prefix = Vec::new();
    let mut want = FIRST_READ;
    loop {
        let read = || {
            let mut longer = memory::zeroed(want.min(source.id.size) as usize)?;
            let (known, new) = longer.split_at_mut(prefix.len());
            known.copy_from_slice(&prefix);
            source.read_at(new, prefix.len() as u64)?;
            Ok(longer)
        };
        prefix = read().map_err(|error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => OpenError::Changing { path: path() },
            _ => OpenError::Io {
                path: path(),
                action: "read its header",
                source: error,
            },
        })?;
        match Header::parse(&prefix, source.id.size) {
            Ok(header) => return Ok(header),
            Err(ParseError::Malformed(error)) => {
                return Err(OpenError::Malformed {
                    path: path(),
                    error,
                });
            }
            Err(ParseError::NeedMore(needed)) => want = needed.max(want * 2),
        }
    }
}
