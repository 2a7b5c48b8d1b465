//! The tensors that swaps replaced in a model's file, kept in a file beside it.
//!
//! That file belongs to the model by content: it has a hash of every tensor that the swap
//! wrote, of every tensor that it keeps, and of all else in the model. So a copy of both, or
//! another time of modification, changes nothing, and a model that no swap wrote is
//! noticed.

use std::cell::OnceCell;
use std::ffi::{CStr, OsString};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use llama_sidecar::gguf::{
    Access, GgufFile, HeaderWriter, Key, OpenError, TensorInfo, Value, ValueType,
};
use llama_sidecar::reload::{Hash, hash_bytes, hash_source};

use crate::rewrite::{self, Part};

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
/// The key of the first format, which told files apart by inode, size and time.
const FIRST_FORMAT_KEY: &str = "llama-sidecar.originals-of";

/// Hexadecimal digits of a hash.
const DIGITS: usize = 32;

/// Type and content of a tensor: what tells one version of it from another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version {
    ty: u32,
    hash: Hash,
}

impl Version {
    /// The version of a tensor with this hash.
    pub fn new(info: &TensorInfo, hash: Hash) -> Version {
        let ty = info.ty.id;
        Version { ty, hash }
    }

    fn parse(text: &[u8]) -> Option<Version> {
        let (ty, hash) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Version {
            ty: ty.parse().ok()?,
            hash: hash_from(hash.as_bytes())?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:032x}", self.ty, self.hash)
    }
}

fn hash_from(text: &[u8]) -> Option<Hash> {
    let text = std::str::from_utf8(text).ok()?;
    Hash::from_str_radix(text, 16).ok()
}

/// The content of a model's file. Each tensor is read at most once.
pub struct Content<'a> {
    file: &'a GgufFile,
    hashes: Vec<OnceCell<Hash>>,
}

impl<'a> Content<'a> {
    /// The content of this file.
    pub fn of(file: &'a GgufFile) -> Content<'a> {
        let hashes = file.header.tensors.iter().map(|_| OnceCell::new());
        Content {
            file,
            hashes: hashes.collect(),
        }
    }

    /// A tensor of the file, with its hash.
    pub fn part(&self, at: usize) -> Result<Part<'a>> {
        let (file, info) = (self.file, &self.file.header.tensors[at]);
        let hash = match self.hashes[at].get() {
            Some(hash) => *hash,
            None => hash_of(file, info)?,
        };
        let hash = *self.hashes[at].get_or_init(|| hash);
        Ok(Part { file, info, hash })
    }

    /// All tensors of the file.
    pub fn parts(&self) -> Result<Vec<Part<'a>>> {
        (0..self.hashes.len()).map(|at| self.part(at)).collect()
    }
}

/// Hashes the data of a tensor.
pub fn hash_of(file: &GgufFile, info: &TensorInfo) -> Result<Hash> {
    let hash = hash_source(&file.source, info.offset, info.nbytes);
    hash.with_context(|| format!("cannot read {}", file.source.path().display()))
}

/// The originals of a model's file.
pub struct Originals {
    /// The file that they are in.
    file: GgufFile,
    rest: Hash,
    /// Bytes of the model before the first swap.
    pub size: u64,
    written: Vec<Version>,
    saved: Vec<Hash>,
}

impl Originals {
    /// Where the originals of a model are.
    pub fn path_of(model: &Path) -> PathBuf {
        with_suffix(model, ".originals")
    }

    /// Where they are while the model is renamed. An interruption leaves them there.
    pub fn beside(model: &Path) -> PathBuf {
        with_suffix(&Originals::path_of(model), ".new")
    }

    /// Where these are.
    pub fn path(&self) -> &Path {
        self.file.source.path()
    }

    /// Reads what is there beside a model: nothing, one file, or two after an interruption.
    pub fn load(model: &Path) -> Result<Vec<Originals>> {
        let mut found = Vec::new();
        for path in [Originals::beside(model), Originals::path_of(model)] {
            let file = match GgufFile::open(&path, Access::Read) {
                Err(OpenError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    continue;
                }
                file => file.map_err(anyhow::Error::from),
            };
            let originals = file.and_then(Originals::parse);
            found.push(originals.with_context(|| {
                format!(
                    "{} cannot be used; nothing was changed: put an intact copy of it there, or move it away to swap without it",
                    path.display()
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
            "it was written by an earlier version of llama-sidecar and does not say which content of the model it belongs to; its tensors can be put in with --tensor and --from"
        );
        let format = key(FORMAT_KEY).and_then(Key::as_u64);
        let format = format.context("it is no file of originals")?;
        ensure!(
            format == u64::from(FORMAT),
            "it has format {format}, expected {FORMAT}: use the version of llama-sidecar that wrote it"
        );
        check_header(&file)?;
        let rest = key(REST_KEY).map(|key| hash_at(&file, key)).transpose()?;
        let size = key(SIZE_KEY).and_then(Key::as_u64);
        let versions = |name: &str| key(name).map(|key| versions_at(&file, key)).transpose();
        let (written, saved) = (versions(WRITTEN_KEY)?, versions(SAVED_KEY)?);
        let (Some(rest), Some(size), Some(written), Some(saved)) = (rest, size, written, saved)
        else {
            bail!("it is damaged: a key is missing");
        };
        let types = header.tensors.iter().map(|info| info.ty.id);
        ensure!(
            types.eq(saved.iter().map(|version| version.ty)),
            "it is damaged: types do not belong to its tensors"
        );
        Ok(Originals {
            rest,
            size,
            written,
            saved: saved.into_iter().map(|version| version.hash).collect(),
            file,
        })
    }

    /// Finds those that belong to a model as it is now. Fails when there are some, and none
    /// of them does.
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
            "{} does not fit {}: {reason}; nothing was changed: put the model back that it belongs to, or move it away (its tensors can then be put in with --tensor and --from)",
            originals.path().display(),
            content.file.source.path().display()
        )
    }

    /// Says why these do not belong to a model as it is now. A tensor may be what the last
    /// swap wrote, or, after an interruption, the original.
    fn misfit(&self, content: &Content<'_>) -> Result<Option<String>> {
        let model = &content.file.header;
        let same =
            self.rest == rewrite::rest(content.file)? && self.written.len() == model.tensors.len();
        if !same {
            let what = "the model's metadata, its list of tensors or what follows their data is not what it was at the last swap";
            return Ok(Some(what.into()));
        }
        for saved in self.parts() {
            let of = model.find(saved.name()).map(|at| &model.tensors[at]);
            if of.is_none_or(|of| of.ne != saved.info.ne) {
                let name = saved.name().to_string_lossy();
                return Ok(Some(format!("'{name}' is no tensor of this shape there")));
            }
        }
        for (at, written) in self.written.iter().enumerate() {
            let now = content.part(at)?;
            let original = || self.part(now.name()).map(|saved| saved.version());
            if *written != now.version() && original() != Some(now.version()) {
                return Ok(Some(format!(
                    "'{}' is neither the original tensor nor the one that a swap put there",
                    now.name().to_string_lossy()
                )));
            }
        }
        Ok(None)
    }

    /// The tensors that are kept.
    pub fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let infos = self.file.header.tensors.iter().zip(&self.saved);
        infos.map(|(info, &hash)| Part {
            file: &self.file,
            info,
            hash,
        })
    }

    /// The original of a tensor, if it is kept here.
    pub fn part(&self, name: &CStr) -> Option<Part<'_>> {
        let at = self.file.header.find(name)?;
        Some(Part {
            file: &self.file,
            info: &self.file.header.tensors[at],
            hash: self.saved[at],
        })
    }

    /// Compares a tensor that is kept here with its hash.
    pub fn check(&self, part: &Part<'_>) -> Result<()> {
        ensure!(
            hash_of(part.file, part.info)? == part.hash,
            "{} is damaged: '{}' is not the tensor that was kept; nothing was changed: put an intact copy of it there, or move it away to swap without it",
            self.path().display(),
            part.name().to_string_lossy()
        );
        Ok(())
    }
}

/// What a file of originals says about its model.
pub struct Record {
    /// Hash of what no swap changes.
    pub rest: Hash,
    /// Bytes of the model before the first swap.
    pub size: u64,
    /// Each of its tensors after the swap.
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
        "it is damaged: its header does not have the hash that it states"
    );
    Ok(())
}

fn hash_at(file: &GgufFile, key: &Key) -> Result<Hash> {
    let text = match key.len == DIGITS as u64 && !key.array {
        true => file.value(key)?,
        false => bail!("it is damaged: a hash has not {DIGITS} digits"),
    };
    match text {
        Value::Text(text) => hash_from(&text).context("it is damaged: expected a hash"),
        _ => bail!("it is damaged: a hash is no text"),
    }
}

fn versions_at(file: &GgufFile, key: &Key) -> Result<Vec<Version>> {
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
