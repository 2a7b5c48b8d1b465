//! New versions of GGUF files: written next to the old file, checked, and renamed over it. A
//! program that has the old file open keeps it, and an interruption leaves it in place.

use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use sidecar_core::files::{self, folder_of};
use sidecar_core::gguf::{
    Access, GgufFile, TYPE_AND_OFFSET, TooLarge, padded, padding, retype, type_fields,
};
use sidecar_core::reload::{Hash, hash_bytes, hash_source};
use sidecar_core::text;
use tempfile::NamedTempFile;

use crate::space::is_out_of_space;
use crate::swap::attributes::Attributes;
use crate::swap::part::{Part, hash_of};
use crate::swap::target::Target;
use crate::temporary;

/// Bytes that are copied between two updates of the progress bar.
const STEP: u64 = 64 << 20;

/// Content of a new file.
pub struct Draft<'a> {
    header: Vec<u8>,
    alignment: u64,
    pub parts: Vec<Part<'a>>,
    /// The range of a file that follows the data.
    tail: Option<(&'a GgufFile, u64, u64)>,
    /// Size of the file.
    pub size: u64,
}

impl<'a> Draft<'a> {
    /// Returns a new version of a model's file. Of the header, only types and offsets change;
    /// the bytes after the data stay.
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

    /// Returns a file with this header and these tensors.
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

    /// Sets the size that the file had before any swap: some writers omit the padding after the
    /// last tensor.
    pub fn with_size_of_original(self, size: u64) -> Result<Draft<'a>> {
        let last = self.parts.last().map_or(0, |part| part.info.nbytes);
        let padding = padding(last, self.alignment);
        ensure!(
            size <= self.size && self.size - size <= padding,
            "cannot restore the originals: the file would have {} bytes instead of {size}; nothing was changed",
            self.size
        );
        Ok(Draft { size, ..self })
    }

    /// Writes the file next to `path`, with owner, mode and attributes of the model, and checks
    /// its content. `needed` is the space that all new files need on the file system.
    pub fn write(&self, target: &Target, path: &Path, needed: u64) -> Result<Written> {
        let made = temporary::file(folder_of(path), &prefix(path)).map_err(anyhow::Error::from);
        let written = made.and_then(|file| {
            // Attributes first, so that a failure comes before the copy.
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
                // A change by another program may be the cause, and has a clearer message.
                target.look_again()?;
                let mut what = format!(
                    "cannot write beside {}; it is as it was",
                    text::path(&target.path)
                );
                if is_out_of_space(&error) {
                    what += &format!(
                        "; {needed} bytes are needed in {}: free some space",
                        text::path(folder_of(path))
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

    /// Returns the padding after a tensor: the bytes of its file if the alignment is the same,
    /// else zeros.
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

    /// Opens and reads the new file, and compares its tensors byte for byte.
    fn check(&self, path: &Path) -> Result<()> {
        let new = GgufFile::open(path, Access::Read)?;
        new.header.check_data(new.source.id().size)?;
        ensure!(
            new.header.tensors.len() == self.parts.len(),
            "the new file lacks tensors"
        );
        for (info, part) in new.header.tensors.iter().zip(&self.parts) {
            let same = new.header.name(info) == part.name()
                && std::ptr::eq(info.ty, part.info.ty)
                && info.ne == part.info.ne
                && hash_of(&new, info)? == part.hash;
            ensure!(
                same,
                "'{}' differs between the new file and {}: another program changed the source, or the disk has an error; try again when that program has ended",
                part.name().to_string_lossy(),
                text::path(part.file.source.path())
            );
        }
        Ok(())
    }
}

/// A complete file under a temporary name.
pub struct Written {
    file: NamedTempFile,
    path: PathBuf,
}

impl Written {
    /// Renames the file to its path. The returned file keeps the path locked.
    pub fn commit(self) -> Result<File> {
        let Written { file, path } = self;
        let kept = file.persist(&path);
        kept.with_context(|| format!("cannot rename over {}; it is as it was", text::path(&path)))
    }
}

/// Writes renames in the folder of a file to disk.
pub fn sync_folder_of(path: &Path) -> Result<()> {
    files::sync_folder_of(path).with_context(|| {
        format!(
            "cannot write the folder {} to disk",
            text::path(folder_of(path))
        )
    })
}

/// Reads the header of a file, including its padding.
pub fn header_of(file: &GgufFile) -> io::Result<Vec<u8>> {
    let mut header = vec![0; file.header.data_offset as usize];
    file.source.read_at(&mut header, 0)?;
    Ok(header)
}

/// Hashes the parts of a model's file that no swap changes: the header without types and offsets
/// of tensors, and the bytes after the data.
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

/// Returns offset and size of the bytes after the data and its padding.
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
            "another program changed the header of {}; nothing was changed: try again when that program has ended",
            text::path(file.source.path())
        )
    })
}

/// Appends a range of a file to another file.
fn copy(from: &GgufFile, at: u64, len: u64, to: &File, bar: &ProgressBar) -> Result<()> {
    let path = from.source.path();
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut left = len;
    while left > 0 {
        // Between two files, the kernel copies the bytes, or shares blocks if it can.
        let step = left.min(STEP);
        let copied = io::copy(&mut Read::take(&file, step), &mut { to })?;
        if copied < step {
            bail!(
                "another program truncated {}: try again when that program has ended",
                text::path(path)
            );
        }
        left -= step;
        bar.inc(step);
    }
    Ok(())
}

/// What the names of temporary files for a path start with.
fn prefix(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!(".{name}.swap-")
}

/// Removes temporary files for a path that killed commands have left.
pub fn remove_left(path: &Path) {
    temporary::remove_left(folder_of(path), &prefix(path), "", false);
}
