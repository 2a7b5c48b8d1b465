//! New versions of GGUF files: written beside the old one, checked, and put in its place
//! by rename, so that whoever has the old one open keeps it, and an interruption leaves it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use llama_sidecar::gguf::{Access, FileId, GgufFile, TensorInfo};
use llama_sidecar::reload::hash_source;
use tempfile::NamedTempFile;

/// Bytes that are copied between two looks at the progress.
const STEP: u64 = 64 << 20;

/// A tensor for a new file: its bytes, and the file that they are in.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    pub file: &'a GgufFile,
    pub info: &'a TensorInfo,
}

impl Source<'_> {
    /// Its name.
    pub fn name(&self) -> &CStr {
        self.file.header.name(self.info)
    }
}

/// A file that is complete, and not in its place yet.
pub struct Written {
    file: NamedTempFile,
    path: PathBuf,
    /// What tells it from other versions.
    pub identity: String,
}

impl Written {
    /// Puts it in its place.
    pub fn commit(self) -> Result<()> {
        let Written { file, path, .. } = self;
        let kept = file.persist(&path);
        kept.with_context(|| format!("cannot rename over {}; it is as it was", path.display()))?;
        let folder = File::open(folder_of(&path))?;
        Ok(folder.sync_all()?)
    }
}

/// What tells a version of a file from others.
pub fn identity(path: &Path) -> io::Result<String> {
    let id = FileId::of_path(path)?;
    Ok(format!(
        "{} {} {}.{:09}",
        id.ino, id.size, id.mtime, id.mtime_ns
    ))
}

/// Writes a new version of a model's file, in which each tensor comes from where `tensors`
/// says. Only the types and offsets in its header change.
pub fn with_tensors(file: &GgufFile, tensors: &[Source<'_>]) -> Result<Written> {
    let path = file.source.path();
    let mut header = vec![0; file.header.data_offset as usize];
    file.source.read_at(&mut header, 0)?;
    patch(file, &mut header, tensors)?;
    write(file, path, &header, file.header.alignment, tensors)
}

/// Writes a file of these tensors of a model's file and nothing else, but for the identity
/// of the version that they are the originals of.
pub fn originals(
    file: &GgufFile,
    path: &Path,
    of: &str,
    tensors: &[Source<'_>],
) -> Result<Written> {
    const ALIGNMENT: u64 = 32;
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(1u64.to_le_bytes());
    push_text(&mut header, ORIGINALS_OF.as_bytes());
    header.extend(8u32.to_le_bytes());
    push_text(&mut header, of.as_bytes());
    let mut at = 0u64;
    for source in tensors {
        push_text(&mut header, source.name().to_bytes());
        header.extend(source.info.n_dims.to_le_bytes());
        for extent in &source.info.ne[..source.info.n_dims as usize] {
            header.extend(extent.to_le_bytes());
        }
        header.extend(source.info.ty.id.to_le_bytes());
        header.extend(at.to_le_bytes());
        at += source.info.nbytes.next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    write(file, path, &header, ALIGNMENT, tensors)
}

/// The key in a file of originals that tells whose they are.
pub const ORIGINALS_OF: &str = "llama-sidecar.originals-of";

fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

/// Puts new types and offsets into the tensor infos of a header (GGUF specification:
/// length and text of the name, number of dimensions, dimensions, type, offset).
fn patch(file: &GgufFile, header: &mut [u8], tensors: &[Source<'_>]) -> Result<()> {
    let keys = file.header.keys.iter();
    let mut at = keys.map(|key| key.offset + key.len).max().unwrap_or(24) as usize;
    let mut offset = 0u64;
    for source in tensors {
        let name = source.name().to_bytes();
        let found = header.get(at + 8..at + 8 + name.len());
        ensure!(
            found == Some(name),
            "{}: the header is not laid out as expected at byte {at}; nothing was changed",
            file.source.path().display()
        );
        at += 8 + name.len() + 4 + 8 * source.info.n_dims as usize;
        header[at..at + 4].copy_from_slice(&source.info.ty.id.to_le_bytes());
        header[at + 4..at + 12].copy_from_slice(&offset.to_le_bytes());
        at += 12;
        offset += source.info.nbytes.next_multiple_of(file.header.alignment);
    }
    Ok(())
}

/// Writes a header and tensors beside `path`, and checks what was written. Whoever may
/// read the model may read it.
fn write(
    model: &GgufFile,
    path: &Path,
    header: &[u8],
    alignment: u64,
    tensors: &[Source<'_>],
) -> Result<Written> {
    let data = tensors
        .iter()
        .map(|source| source.info.nbytes.next_multiple_of(alignment));
    let size = header.len() as u64 + data.sum::<u64>();
    let folder = folder_of(path);
    check_room(folder, size)?;
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let prefix = format!(".{name}.swap-");
    remove_leftovers(folder, &prefix);
    let explain = || format!("cannot write beside {}; it is as it was", path.display());
    let file = NamedTempFile::with_prefix_in(prefix, folder).with_context(explain)?;
    lock(file.as_file());
    fill(file.as_file(), header, alignment, tensors, size).with_context(explain)?;
    if let Ok(old) = fs::metadata(model.source.path()) {
        file.as_file()
            .set_permissions(old.permissions())
            .with_context(explain)?;
    }
    file.as_file().sync_all().with_context(explain)?;
    check(file.path(), tensors)?;
    Ok(Written {
        identity: identity(file.path())?,
        path: path.to_owned(),
        file,
    })
}

fn fill(
    file: &File,
    header: &[u8],
    alignment: u64,
    tensors: &[Source<'_>],
    size: u64,
) -> Result<()> {
    let bar = ProgressBar::new(size);
    bar.set_style(ProgressStyle::with_template(
        "{bytes} of {total_bytes} {wide_bar} {bytes_per_sec}, {eta}",
    )?);
    let mut out = BufWriter::new(file);
    out.write_all(header)?;
    out.flush()?;
    bar.inc(header.len() as u64);
    let zeros = vec![0; alignment as usize];
    for source in tensors {
        let mut from = File::open(source.file.source.path())?;
        from.seek(SeekFrom::Start(source.info.offset))?;
        let mut left = source.info.nbytes;
        while left > 0 {
            // Between two files the kernel copies by itself, and shares blocks where it can.
            let step = left.min(STEP);
            let copied = io::copy(&mut io::Read::take(&from, step), &mut { file })?;
            if copied < step {
                bail!(
                    "{} was cut while it was read",
                    source.file.source.path().display()
                );
            }
            left -= step;
            bar.inc(step);
        }
        let padding = source.info.nbytes.next_multiple_of(alignment) - source.info.nbytes;
        (&mut { file }).write_all(&zeros[..padding as usize])?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Reads a new file as its users will: it has to have the same tensors, byte for byte.
fn check(path: &Path, tensors: &[Source<'_>]) -> Result<()> {
    let new = GgufFile::open(path, Access::Read)?;
    new.header.check_data(new.source.id().size)?;
    ensure!(
        new.header.tensors.len() == tensors.len(),
        "tensors are missing in the new file"
    );
    for (info, source) in new.header.tensors.iter().zip(tensors) {
        let same = new.header.name(info) == source.name()
            && std::ptr::eq(info.ty, source.info.ty)
            && info.ne == source.info.ne
            && hash_source(&new.source, info.offset, info.nbytes)?
                == hash_source(&source.file.source, source.info.offset, source.info.nbytes)?;
        ensure!(
            same,
            "'{}' is not in the new file as it was read: the source changed meanwhile, or the disk fails",
            source.name().to_string_lossy()
        );
    }
    Ok(())
}

fn check_room(folder: &Path, size: u64) -> Result<()> {
    let name = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: a C string, and a struct that is read only if it was filled.
    let free = unsafe {
        if libc::statvfs(name.as_ptr(), found.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error()).with_context(|| folder.display().to_string());
        }
        let found = found.assume_init();
        found.f_bavail * found.f_frsize
    };
    ensure!(
        size <= free,
        "the new file needs {size} bytes in {}, and {free} are free: make room there; nothing was changed",
        folder.display()
    );
    Ok(())
}

/// Marks a file as being written.
fn lock(file: &File) {
    // Where there are no locks, leftovers stay.
    let _ = file.try_lock();
}

/// Removes files that an interrupted run left: those that nobody holds a lock on.
fn remove_leftovers(folder: &Path, prefix: &str) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let ours = entry.file_name().to_string_lossy().starts_with(prefix);
        let file = ours.then(|| File::open(entry.path()).ok()).flatten();
        if file.is_some_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}
