//! The file of originals: the tensors that swaps replaced in a model's file.
//!
//! The file belongs to the model by content. It has a hash of each tensor that the swap wrote,
//! of each tensor that it keeps, and of the rest of the model. So both files can be copied or
//! get another time of modification, and a model that no swap wrote is detected.

use std::cell::OnceCell;
use std::ffi::{CStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sidecar_core::files;
use sidecar_core::gguf::{Access, GgufFile, HeaderWriter, KeyValue, OpenError, Value, ValueType};
use sidecar_core::reload::{Hash, hash_bytes};
use sidecar_core::text;

use crate::swap::part::{Part, Version, hash_from, hash_of};
use crate::swap::rewrite;

/// The format of the file. The first one had no such key.
const FORMAT: u32 = 2;
const FORMAT_KEY: &str = "llama-sidecar.originals.format";
/// Hash of what no swap changes in the model: see [`rewrite::rest`].
const REST_KEY: &str = "llama-sidecar.originals.rest";
/// Bytes of the model before the first swap.
const SIZE_KEY: &str = "llama-sidecar.originals.size";
/// [`Version`] of each tensor of the model after the swap, in the order of the model.
const WRITTEN_KEY: &str = "llama-sidecar.originals.written";
/// [`Version`] of each tensor of this file, in its order.
const SAVED_KEY: &str = "llama-sidecar.originals.saved";
/// Hash of the header, with zeros in the place of this value.
const CHECK_KEY: &str = "llama-sidecar.originals.check";
/// The key of the first format, which identified files by inode, size and time.
const FIRST_FORMAT_KEY: &str = "llama-sidecar.originals-of";

/// Hexadecimal digits of a hash.
const DIGITS: usize = 32;

/// The content of a model's file. Each tensor is read at most once.
pub struct Content<'a> {
    file: &'a GgufFile,
    hashes: Vec<OnceCell<Hash>>,
}

impl<'a> Content<'a> {
    /// Returns the content of a file.
    pub fn of(file: &'a GgufFile) -> Content<'a> {
        let hashes = file.header.tensors.iter().map(|_| OnceCell::new());
        Content {
            file,
            hashes: hashes.collect(),
        }
    }

    /// Returns a tensor of the file, with its hash.
    pub fn part(&self, at: usize) -> Result<Part<'a>> {
        let (file, info) = (self.file, &self.file.header.tensors[at]);
        let hash = match self.hashes[at].get() {
            Some(hash) => *hash,
            None => hash_of(file, info)?,
        };
        let hash = *self.hashes[at].get_or_init(|| hash);
        Ok(Part { file, info, hash })
    }

    /// Returns all tensors of the file.
    pub fn parts(&self) -> Result<Vec<Part<'a>>> {
        (0..self.hashes.len()).map(|at| self.part(at)).collect()
    }
}

/// The originals of a model's file.
pub struct Originals {
    /// The file with the originals.
    file: GgufFile,
    rest: Hash,
    /// Bytes of the model before the first swap.
    pub size: u64,
    written: Vec<Version>,
    saved: Vec<Hash>,
}

impl Originals {
    /// Returns the path of the originals of a model.
    pub fn path_of(model: &Path) -> PathBuf {
        with_suffix(model, ".originals")
    }

    /// Returns the path of new originals until the model is renamed. An interruption leaves them
    /// there.
    pub fn beside(model: &Path) -> PathBuf {
        with_suffix(&Originals::path_of(model), ".new")
    }

    /// Returns the path of these originals.
    pub fn path(&self) -> &Path {
        self.file.source.path()
    }

    /// Reads the originals of a model: none, one file, or two after an interruption.
    pub fn load(model: &Path) -> Result<Vec<Originals>> {
        let mut found = Vec::new();
        for path in [Originals::beside(model), Originals::path_of(model)] {
            // Where a link leads is not there at times, and it is neither renamed nor removed.
            let is_link = fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink());
            let file = match GgufFile::open(&path, Access::Read) {
                _ if is_link => Err(anyhow!(
                    "it is a link, and the originals are beside the model"
                )),
                Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    continue;
                }
                file => file.map_err(anyhow::Error::from),
            };
            let file = file.and_then(|file| {
                let (found, of) = (
                    file.source.handle().get()?.metadata()?,
                    fs::metadata(model)?,
                );
                // Tensors are restored from it.
                if found.uid() != of.uid() {
                    files::check_owner(&found)?;
                }
                Ok(file)
            });
            let originals = file.and_then(Originals::parse);
            found.push(originals.with_context(|| {
                format!(
                    "cannot use {}; nothing was changed: replace it with an intact copy, or move it away to swap without it",
                    text::path(&path)
                )
            })?);
        }
        Ok(found)
    }

    fn parse(file: GgufFile) -> Result<Originals> {
        let header = &file.header;
        let key = |name: &str| header.key(name.as_bytes());
        ensure!(
            key(FIRST_FORMAT_KEY).is_none(),
            "an earlier version of llama-sidecar wrote it without the hashes of the model: pass it to --from, with --tensor, to restore its tensors"
        );
        let format = key(FORMAT_KEY).and_then(KeyValue::as_u64);
        let format = format.context("it is not a file of originals")?;
        ensure!(
            format == u64::from(FORMAT),
            "it has format {format}, expected {FORMAT}: use the version of llama-sidecar that wrote it"
        );
        check_header(&file)?;
        let rest = key(REST_KEY).map(|key| hash_at(&file, key)).transpose()?;
        let size = key(SIZE_KEY).and_then(KeyValue::as_u64);
        let versions = |name: &str| key(name).map(|key| versions_at(&file, key)).transpose();
        let (written, saved) = (versions(WRITTEN_KEY)?, versions(SAVED_KEY)?);
        let (Some(rest), Some(size), Some(written), Some(saved)) = (rest, size, written, saved)
        else {
            bail!("it is damaged: a key is missing");
        };
        let types = header.tensors.iter().map(|info| info.ty.id);
        ensure!(
            types.eq(saved.iter().map(|version| version.ty)),
            "it is damaged: the recorded types are not those of its tensors"
        );
        Ok(Originals {
            rest,
            size,
            written,
            saved: saved.into_iter().map(|version| version.hash).collect(),
            file,
        })
    }

    /// Returns the originals that belong to the current content of a model. Fails if there are
    /// originals, and none of them fits.
    pub fn that_fit<'a>(
        found: &'a [Originals],
        content: &Content<'_>,
    ) -> Result<Option<&'a Originals>> {
        let mut misfit = None;
        for originals in found {
            match originals.misfit(content)? {
                None => return Ok(Some(originals)),
                Some(reason) => misfit = Some((originals, reason)),
            }
        }
        let Some((originals, reason)) = misfit else {
            return Ok(None);
        };
        bail!(
            "{} does not fit {}: {reason}; nothing was changed: restore the model that the originals belong to, or move the originals away (--tensor and --from can then restore single tensors)",
            text::path(originals.path()),
            text::path(content.file.source.path())
        )
    }

    /// Returns why these originals do not belong to the current content of a model. Each tensor
    /// must be the one that the last swap wrote or, after an interruption, the original.
    fn misfit(&self, content: &Content<'_>) -> Result<Option<String>> {
        let model = &content.file.header;
        let same =
            self.rest == rewrite::rest(content.file)? && self.written.len() == model.tensors.len();
        if !same {
            let what = "the metadata, the list of tensors or the bytes after the tensors have changed since the last swap";
            return Ok(Some(what.into()));
        }
        for saved in self.parts() {
            let of = model.find(saved.name()).map(|at| &model.tensors[at]);
            if of.is_none_or(|of| of.ne != saved.info.ne) {
                let name = saved.name().to_string_lossy();
                return Ok(Some(format!(
                    "the model has no tensor '{name}' of this shape"
                )));
            }
        }
        for (at, written) in self.written.iter().enumerate() {
            let now = content.part(at)?;
            let original = || self.part(now.name()).map(|saved| saved.version());
            if *written != now.version() && original() != Some(now.version()) {
                return Ok(Some(format!(
                    "'{}' is neither the original tensor nor the tensor that the last swap wrote",
                    now.name().to_string_lossy()
                )));
            }
        }
        Ok(None)
    }

    /// Returns the kept tensors.
    pub fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let infos = self.file.header.tensors.iter().zip(&self.saved);
        infos.map(|(info, &hash)| Part {
            file: &self.file,
            info,
            hash,
        })
    }

    /// Returns the original of a tensor, if this file keeps it.
    pub fn part(&self, name: &CStr) -> Option<Part<'_>> {
        let at = self.file.header.find(name)?;
        Some(Part {
            file: &self.file,
            info: &self.file.header.tensors[at],
            hash: self.saved[at],
        })
    }

    /// Compares a kept tensor with its hash.
    pub fn check(&self, part: &Part<'_>) -> Result<()> {
        ensure!(
            hash_of(part.file, part.info)? == part.hash,
            "{} is damaged: the hash of '{}' does not match; nothing was changed: replace it with an intact copy, or move it away to swap without it",
            text::path(self.path()),
            part.name().to_string_lossy()
        );
        Ok(())
    }
}

/// The record of a model in its file of originals.
pub struct Record {
    /// Hash of the parts that no swap changes.
    pub rest: Hash,
    /// Bytes of the model before the first swap.
    pub size: u64,
    /// Version of each tensor after the swap.
    pub written: Vec<Version>,
}

/// Builds the header of a file of originals. It has the model's alignment, so that bytes between
/// tensors can be kept, too.
pub fn header(record: &Record, alignment: u64, saved: &[Part<'_>]) -> Result<Vec<u8>> {
    let unchecked = header_with(record, alignment, saved, 0)?;
    header_with(record, alignment, saved, hash_bytes(&unchecked))
}

/// Builds the header with this hash of itself.
fn header_with(
    record: &Record,
    alignment: u64,
    saved: &[Part<'_>],
    check: Hash,
) -> Result<Vec<u8>> {
    let texts = |versions: &[Version]| versions.iter().map(Version::to_string).collect::<Vec<_>>();
    let versions: Vec<_> = saved.iter().map(Part::version).collect();
    let mut writer = HeaderWriter::new(alignment.try_into()?);
    writer.value(FORMAT_KEY, &FORMAT);
    writer.value(REST_KEY, &format!("{:032x}", record.rest));
    writer.value(SIZE_KEY, &record.size);
    writer.array(WRITTEN_KEY, &texts(&record.written));
    writer.array(SAVED_KEY, &texts(&versions));
    writer.value(CHECK_KEY, &format!("{check:032x}"));
    for part in saved {
        let info = part.info;
        let ne = &info.ne[..info.n_dims as usize];
        writer.tensor(part.name().to_bytes(), ne, info.ty.id, info.nbytes)?;
    }
    Ok(writer.finish())
}

/// Compares the header with the hash in it.
fn check_header(file: &GgufFile) -> Result<()> {
    let key = file.header.key(CHECK_KEY.as_bytes());
    let key = key.context("it is damaged: it has no hash of its header")?;
    let expected = hash_at(file, key)?;
    let mut header = rewrite::header_of(file)?;
    header[key.offset as usize..][..DIGITS].fill(b'0');
    ensure!(
        hash_bytes(&header) == expected,
        "it is damaged: the hash of its header does not match"
    );
    Ok(())
}

fn hash_at(file: &GgufFile, key: &KeyValue) -> Result<Hash> {
    let text = match key.len == DIGITS as u64 && !key.array {
        true => file.value(key)?,
        false => bail!("it is damaged: expected a hash of {DIGITS} digits"),
    };
    match text {
        Value::Text(text) => hash_from(&text).context("it is damaged: expected a hash"),
        _ => bail!("it is damaged: expected a hash as text"),
    }
}

fn versions_at(file: &GgufFile, key: &KeyValue) -> Result<Vec<Version>> {
    /// Length, type, space and hash, at most.
    const LONGEST: u64 = 8 + 10 + 1 + DIGITS as u64;
    let fits = key.array && key.ty == ValueType::String;
    ensure!(
        fits && key.len <= key.count.saturating_mul(LONGEST),
        "it is damaged: expected a list of types and hashes"
    );
    let strings = file.strings(key)?;
    let versions = (0..key.count).map(|at| strings.get(at).and_then(Version::parse));
    versions
        .collect::<Option<_>>()
        .context("it is damaged: expected types and hashes")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
