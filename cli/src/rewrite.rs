//! New versions of GGUF files: written beside the old one, checked, and put in its place
//! by rename, so that a program that has the old one open keeps it, and an interruption
//! leaves it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use llama_sidecar::gguf::{
    Access, GgufFile, TYPE_AND_OFFSET, TensorInfo, TooLarge, padded, padding, retype, type_fields,
};
use llama_sidecar::reload::{Hash, hash_bytes, hash_source};
use tempfile::NamedTempFile;

use crate::attributes::Attributes;
use crate::originals::{self, Version};
use crate::space::{folder_of, is_no_room};
use crate::target::Target;

/// Bytes that are copied between two looks at the progress.
const STEP: u64 = 64 << 20;

/// A tensor for a new file: the file that it is in, and the hash that its data must have.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    pub file: &'a GgufFile,
    pub info: &'a TensorInfo,
    pub hash: Hash,
}

impl Part<'_> {
    /// Its name.
    pub fn name(&self) -> &CStr {
        self.file.header.name(self.info)
    }

    /// Its type and content.
    pub fn version(&self) -> Version {
        Version::new(self.info, self.hash)
    }
}

/// A new file, before it is written.
pub struct Draft<'a> {
    header: Vec<u8>,
    alignment: u64,
    pub parts: Vec<Part<'a>>,
    /// What follows the data: a range of a file.
    tail: Option<(&'a GgufFile, u64, u64)>,
    /// Bytes of the whole file.
    pub size: u64,
}

impl<'a> Draft<'a> {
    /// A new version of a model's file. Only types and offsets in its header change; what
    /// follows the data stays.
    pub fn of_model(file: &'a GgufFile, parts: Vec<Part<'a>>) -> Result<Draft<'a>> {
        let mut header = header_of(file)?;
        let types = types_in(file, &header)?;
        // The number of dimensions stays: one that is followed by ones only is the same shape.
        let tensors = parts.iter().map(|part| (part.info.ty, part.info.nbytes));
        retype(&mut header, &types, file.header.alignment, tensors)?;
        let (from, len) = tail(file);
        let draft = Draft::new(header, file.header.alignment, parts)?;
        Ok(Draft {
            tail: Some((file, from, len)),
            size: draft.size.checked_add(len).ok_or(TooLarge)?,
            ..draft
        })
    }

    /// A file with this header and these tensors.
    pub fn new(header: Vec<u8>, alignment: u64, parts: Vec<Part<'a>>) -> Result<Draft<'a>> {
        let size = parts.iter().try_fold(header.len() as u64, |size, part| {
            size.checked_add(padded(part.info.nbytes, alignment)?)
        });
        Ok(Draft {
            header,
            alignment,
            parts,
            tail: None,
            size: size.ok_or(TooLarge)?,
        })
    }

    /// Gives the file the size that it had before any swap: some writers leave out the
    /// padding after the last tensor.
    pub fn with_size_of_original(self, size: u64) -> Result<Draft<'a>> {
        let last = self.parts.last().map_or(0, |part| part.info.nbytes);
        let padding = padding(last, self.alignment);
        ensure!(
            size <= self.size && self.size - size <= padding,
            "the originals cannot be put back: the file would have {} bytes, and had {size} before; nothing was changed",
            self.size
        );
        Ok(Draft { size, ..self })
    }

    /// Writes it beside `path`, and checks what was written. It gets owner, mode and
    /// attributes of the model. `needed` is what all new files together need there.
    pub fn write(&self, target: &Target, path: &Path, needed: u64) -> Result<Written> {
        let folder = folder_of(path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let prefix = format!(".{name}.swap-");
        remove_leftovers(folder, &prefix);
        let made = NamedTempFile::with_prefix_in(prefix, folder).map_err(anyhow::Error::from);
        let written = made.and_then(|file| {
            lock(file.as_file());
            // Attributes first: what cannot be kept is known before anything is copied.
            let attributes = Attributes::of(&target.file);
            let attributes = attributes.context("cannot read the attributes of the old file")?;
            attributes.give_to(file.as_file())?;
            self.fill(file.as_file())?;
            file.as_file().sync_all()?;
            self.check(file.path())?;
            Ok(file)
        });
        match written {
            Ok(file) => Ok(Written {
                file,
                path: path.to_owned(),
            }),
            Err(error) => {
                // This may be the cause, and says it better.
                target.look_again()?;
                let mut what = format!(
                    "cannot write beside {}; it is as it was",
                    target.path.display()
                );
                if is_no_room(&error) {
                    what += &format!(
                        "; {needed} bytes are needed in {}: make room there",
                        folder.display()
                    );
                }
                Err(error.context(what))
            }
        }
    }

    fn fill(&self, file: &File) -> Result<()> {
        let bar = ProgressBar::new(self.size);
        bar.set_style(ProgressStyle::with_template(
            "{bytes} of {total_bytes} {wide_bar} {bytes_per_sec}, {eta}",
        )?);
        let mut out = BufWriter::new(file);
        out.write_all(&self.header)?;
        out.flush()?;
        bar.inc(self.header.len() as u64);
        for part in &self.parts {
            let info = part.info;
            copy(part.file, info.offset, info.nbytes, file, &bar)?;
            (&mut { file }).write_all(&self.padding_after(part)?)?;
        }
        if let Some((from, at, len)) = self.tail {
            copy(from, at, len, file, &bar)?;
        }
        file.set_len(self.size)?;
        bar.finish_and_clear();
        Ok(())
    }

    /// The bytes after a tensor: those that its file has there if that aligns its tensors
    /// alike, else zeros.
    fn padding_after(&self, part: &Part<'_>) -> Result<Vec<u8>> {
        let len = padding(part.info.nbytes, self.alignment);
        let mut bytes = vec![0; len as usize];
        let end = part.info.offset + part.info.nbytes;
        let there = part.file.source.id().size.saturating_sub(end).min(len);
        if part.file.header.alignment == self.alignment {
            let source = &part.file.source;
            source.read_at(&mut bytes[..there as usize], end)?;
        }
        Ok(bytes)
    }

    /// Reads a new file as its users will: it has to have the same tensors, byte for byte.
    fn check(&self, path: &Path) -> Result<()> {
        let new = GgufFile::open(path, Access::Read)?;
        new.header.check_data(new.source.id().size)?;
        ensure!(
            new.header.tensors.len() == self.parts.len(),
            "tensors are missing in the new file"
        );
        for (info, part) in new.header.tensors.iter().zip(&self.parts) {
            let same = new.header.name(info) == part.name()
                && std::ptr::eq(info.ty, part.info.ty)
                && info.ne == part.info.ne
                && originals::hash_of(&new, info)? == part.hash;
            ensure!(
                same,
                "'{}' is not in the new file as it was read: {} was changed meanwhile, or the disk fails; try again when its writer is done",
                part.name().to_string_lossy(),
                part.file.source.path().display()
            );
        }
        Ok(())
    }
}

/// A file that is complete, and not in its place yet.
pub struct Written {
    file: NamedTempFile,
    path: PathBuf,
}

impl Written {
    /// Puts it in its place. The file that is returned keeps the path locked.
    pub fn commit(self) -> Result<File> {
        let Written { file, path } = self;
        let kept = file.persist(&path);
        kept.with_context(|| format!("cannot rename over {}; it is as it was", path.display()))
    }
}

/// Makes renames in the folder of a file last.
pub fn sync_folder_of(path: &Path) -> Result<()> {
    let folder = folder_of(path);
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.with_context(|| format!("cannot write the folder {} to disk", folder.display()))
}

/// Reads the header of a file, its padding included.
pub fn header_of(file: &GgufFile) -> io::Result<Vec<u8>> {
    let mut header = vec![0; file.header.data_offset as usize];
    file.source.read_at(&mut header, 0)?;
    Ok(header)
}

/// Hashes what no swap changes in a model's file: its header but for types and offsets of
/// tensors, and what follows the data.
pub fn rest(file: &GgufFile) -> Result<Hash> {
    let mut header = header_of(file)?;
    for at in types_in(file, &header)? {
        header[at..at + TYPE_AND_OFFSET].fill(0);
    }
    let (from, len) = tail(file);
    header.extend(hash_source(&file.source, from, len)?.to_le_bytes());
    header.extend(len.to_le_bytes());
    Ok(hash_bytes(&header))
}

/// Where what follows the data and its padding begins, and how many bytes it has.
fn tail(file: &GgufFile) -> (u64, u64) {
    let last = file.header.tensors.last();
    let end = last.map_or(file.header.data_offset, |last| last.offset + last.nbytes);
    let end = end.next_multiple_of(file.header.alignment);
    (end, file.source.id().size.saturating_sub(end))
}

/// Finds the types of the tensors in the header of a file, which may have changed since it was
/// opened.
fn types_in(file: &GgufFile, header: &[u8]) -> Result<Vec<usize>> {
    type_fields(&file.header, header).with_context(|| {
        format!(
            "the header of {} changed while it was read; nothing was changed: try again when its writer is done",
            file.source.path().display()
        )
    })
}

/// Copies a range of a file to where another one is written.
fn copy(from: &GgufFile, at: u64, len: u64, to: &File, bar: &ProgressBar) -> Result<()> {
    let path = from.source.path();
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut left = len;
    while left > 0 {
        // Between two files the kernel copies by itself, and shares blocks where it can.
        let step = left.min(STEP);
        let copied = io::copy(&mut Read::take(&file, step), &mut { to })?;
        if copied < step {
            bail!("{} was cut while it was read", path.display());
        }
        left -= step;
        bar.inc(step);
    }
    Ok(())
}

/// Marks a file as being written.
fn lock(file: &File) {
    // Where there are no locks, leftovers stay.
    let _ = file.try_lock();
}

/// Removes files that an interrupted run left: those that no process has locked.
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
