//! One GGUF file on disk: opened, identified, mapped or read in place.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::error::{FormatError, ParseError};
use super::header::Header;
use super::value::{KeyValue, Strings, Value};

/// How the bytes of a file are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Map the file; read it at positions where mapping is refused.
    Map,
    /// Never map. In-place writes then cannot reach tensors unasked, and a file
    /// cut short gives an error instead of a bus error, at the price of copies.
    Read,
}

/// What tells one version of a file from another.
///
/// Not the modification time alone: a `rename` over a path can bring an older
/// file, two writes can share a second, and a writer can set the time back. The time of
/// change (ctime) cannot be set, but also changes when a file is renamed, linked, or gets
/// another owner or mode: see [`FileId::unwritten_since`].
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
    /// How many names it has.
    pub links: u64,
}

impl FileId {
    /// Identity of whatever `path` names now.
    pub fn of_path(path: &Path) -> io::Result<FileId> {
        std::fs::metadata(path).map(|found| FileId::of(&found))
    }

    /// Whether both are the same inode, whatever it holds.
    pub fn same_inode(&self, other: &FileId) -> bool {
        (self.dev, self.ino) == (other.dev, other.ino)
    }

    /// Whether both are the same inode, of the same size and modification time.
    pub fn same_stamp(&self, other: &FileId) -> bool {
        let stamp = |id: &FileId| (id.size, id.mtime, id.mtime_ns);
        self.same_inode(other) && stamp(self) == stamp(other)
    }

    /// Whether nothing shows that the file was written since it was `earlier`.
    ///
    /// A time of change that differs alone may come from a writer that set the
    /// modification time back, unless the owner, the mode or the links differ, too: they
    /// explain it.
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
    reason = "the message of each variant says what its fields are"
)]
pub enum OpenError {
    #[error("{path}: cannot {action}: {source}{hint}", path = path.display(), hint = hint(source))]
    Io {
        path: PathBuf,
        action: &'static str,
        source: io::Error,
    },
    #[error("{path}: expected a regular file, found {found}", path = path.display())]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{path}: {error}", path = path.display())]
    Malformed { path: PathBuf, error: FormatError },
    #[error("{path}: {reason}", path = path.display())]
    Shard { path: PathBuf, reason: String },
    #[error("{path}: the file changed while it was read; try again when its writer is done", path = path.display())]
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

/// An open file whose bytes can be reached.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    id: FileId,
    map: Option<Mmap>,
}

impl Source {
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
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(fail("open it"))?;
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
            // the mapping, and hosts that take zero-copy pointers are told to
            // replace files by rename.
            Access::Map => unsafe { Mmap::map(&file) }.ok(),
            Access::Read => None,
        };
        Ok(Source {
            path: path.to_owned(),
            id: FileId::of(&found),
            file,
            map,
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Identity when it was opened.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Whether nothing shows that the open file was written since it was `earlier`. That
    /// it was renamed explains another time of change, too.
    pub fn is_unwritten_since(&self, earlier: &FileId) -> bool {
        let Ok(now) = self.id_now() else {
            return false;
        };
        let renamed = || !FileId::of_path(&self.path).is_ok_and(|at_path| at_path.same_inode(&now));
        now.unwritten_since(earlier) || now.same_stamp(earlier) && renamed()
    }

    /// Whether the open file still has the size and modification time of `earlier`.
    pub fn has_stamp_of(&self, earlier: &FileId) -> bool {
        self.id_now().is_ok_and(|now| now.same_stamp(earlier))
    }

    /// Identity of the open file now: differs from [`Source::id`] when it was
    /// written in place, renamed, linked, or got another owner or mode.
    pub fn id_now(&self) -> io::Result<FileId> {
        self.file.metadata().map(|found| FileId::of(&found))
    }

    /// The mapped bytes, or `None` when the file is not mapped or ends before.
    pub fn mapped(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        self.map.as_ref()?.get(start..end)
    }

    /// Says that reads of this source jump about, so that the kernel reads nothing ahead
    /// (`POSIX_FADV_RANDOM`).
    pub fn advise_random(&self) {
        // SAFETY: advice for a descriptor that is open.
        unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    }

    /// Fills `buffer` from `offset` as [`Source::read_at`] does, and leaves in the page cache
    /// what was there: pages that had to be read are dropped again. A file system that
    /// cannot tell (`RWF_NOWAIT` of preadv2(2)) keeps them.
    ///
    /// Reading ahead is to be off: [`Source::advise_random`].
    pub fn read_once_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let cached = self.read_cached(buffer, offset)?;
        if cached == buffer.len() {
            return Ok(());
        }
        let (rest, at) = (&mut buffer[cached..], offset + cached as u64);
        self.file.read_exact_at(rest, at)?;
        // SAFETY: advice for a descriptor that is open.
        unsafe {
            libc::posix_fadvise(
                self.file.as_raw_fd(),
                at as libc::off_t,
                rest.len() as libc::off_t,
                libc::POSIX_FADV_DONTNEED,
            )
        };
        Ok(())
    }

    /// Reads what the page cache holds from `offset` on; all of it where the file system
    /// does not tell.
    fn read_cached(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let piece = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // SAFETY: one piece, which is valid for writes of its length.
        let read = unsafe {
            libc::preadv2(
                self.file.as_raw_fd(),
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
            // Not supported here, or not allowed: an error of the file itself shows again.
            _ => {
                self.read_at(buffer, offset)?;
                Ok(buffer.len())
            }
        }
    }

    /// Fills `buffer` from `offset`; an error when the file ends before.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// An open file and its header.
#[derive(Debug)]
pub struct GgufFile {
    /// The file.
    pub source: Source,
    /// What its header says.
    pub header: Header,
}

impl GgufFile {
    /// Opens a file and parses its header; of the data only its place is checked.
    pub fn open(path: &Path, access: Access) -> Result<GgufFile, OpenError> {
        let source = Source::open(path, access)?;
        let malformed = |error| OpenError::Malformed {
            path: path.to_owned(),
            error,
        };
        let header = match &source.map {
            Some(map) => match Header::parse(map, source.id.size) {
                Ok(header) => header,
                Err(ParseError::Malformed(error)) => return Err(malformed(error)),
                Err(ParseError::NeedMore(_)) => {
                    return Err(OpenError::Changing {
                        path: path.to_owned(),
                    });
                }
            },
            None => read_header(&source)?,
        };
        header.check_data(source.id.size).map_err(malformed)?;
        Ok(GgufFile { source, header })
    }

    /// Reads a metadata value that is no array.
    pub fn value(&self, key: &KeyValue) -> io::Result<Value> {
        let bytes = self.value_bytes(key)?;
        Value::decode(key.ty, &bytes).ok_or_else(changed)
    }

    /// Reads the elements `from..` of an array, at most `limit` of them.
    pub fn elements(&self, key: &KeyValue, from: u64, limit: u64) -> io::Result<Vec<Value>> {
        let to = key.count.min(from.saturating_add(limit));
        let from = from.min(to);
        let decode = |bytes| Value::decode(key.ty, bytes).ok_or_else(changed);
        match key.ty.fixed_size() {
            Some(size) => {
                let mut bytes = vec![0; ((to - from) * size) as usize];
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

    /// Reads an array of strings.
    pub fn strings(&self, key: &KeyValue) -> io::Result<Strings> {
        Strings::parse(self.value_bytes(key)?, key.count).ok_or_else(changed)
    }

    /// The bytes of a value, copied from the file. They are read and not borrowed
    /// from the mapping, so that a file that was cut short since gives an error.
    fn value_bytes(&self, key: &KeyValue) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; key.len as usize];
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

/// Parses a header through reads of a growing prefix.
fn read_header(source: &Source) -> Result<Header, OpenError> {
    const FIRST_READ: u64 = 256 << 10;
    let path = || source.path.clone();
    let mut prefix = Vec::new();
    let mut want = FIRST_READ;
    loop {
        let have = prefix.len();
        prefix.resize(want.min(source.id.size) as usize, 0);
        source
            .read_at(&mut prefix[have..], have as u64)
            .map_err(|error| match error.kind() {
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
