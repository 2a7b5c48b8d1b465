//! `llama-sidecar swap`: other tensors into a model's files, and back.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use llama_sidecar::gguf::{Access, GgufFile, Value, open_model};
use llama_sidecar::reload::hash_source;
use regex::Regex;

use crate::rewrite::{self, ORIGINALS_OF, Source, Written};
use crate::{control, server};

/// What to put where.
#[derive(clap::Args)]
pub struct Options {
    /// The model: a GGUF file, or any shard of one.
    model: PathBuf,
    /// Tensors whose whole name matches this regular expression.
    #[arg(long, value_name = "REGEX", required_unless_present = "restore")]
    tensor: Option<Regex>,
    /// A model that has them in another version: any shard of it.
    #[arg(long, value_name = "GGUF", required_unless_present = "restore")]
    from: Option<PathBuf>,
    /// Put the original tensors back: all, or those that --tensor names.
    #[arg(long, conflicts_with = "from")]
    restore: bool,
    /// Say what would be done, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Let the host that listens there take it at once, and wait until it has.
    #[arg(long, value_name = "SOCKET")]
    reload: Option<PathBuf>,
}

/// What becomes of a file.
struct Change<'a> {
    file: &'a GgufFile,
    /// Where each of its tensors comes from.
    tensors: Vec<Source<'a>>,
    /// The positions of those that change.
    changed: Vec<usize>,
    /// The originals that are kept already, if they are of this version of the file.
    known: Option<GgufFile>,
}

/// Swaps, and says what was done.
pub fn run(options: &Options) -> Result<()> {
    let model = open_model(&options.model, Access::Read)?;
    let sources = match &options.from {
        Some(from) => open_model(from, Access::Read)?,
        None => kept_originals(&model)?,
    };
    let wanted = options.tensor.as_ref();
    let changes = plan(&model, &sources, wanted, options.restore)?;
    let mut written: Vec<(Written, Option<Written>)> = Vec::new();
    for change in &changes {
        describe(change);
        if !options.dry_run {
            written.push(write(change, options.restore)?);
        }
    }
    if options.dry_run || changes.is_empty() {
        return Ok(());
    }
    // Everything is there and checked; from here on there are only renames. After each of
    // them, the originals of the file that is in place can be found.
    for ((new, originals), change) in written.into_iter().zip(&changes) {
        let kept = originals_of(change.file.source.path());
        let keeps = originals.is_some();
        originals.map(Written::commit).transpose()?;
        new.commit()?;
        match keeps {
            true => std::fs::rename(beside(&kept), &kept)?,
            false => drop(std::fs::remove_file(&kept)),
        }
    }
    match &options.reload {
        Some(socket) => control::reload(socket, &server::Options::default(), false),
        None => Ok(()),
    }
}

/// Finds what changes, file by file. Nothing is written yet.
fn plan<'a>(
    model: &'a [GgufFile],
    sources: &'a [GgufFile],
    wanted: Option<&Regex>,
    restore: bool,
) -> Result<Vec<Change<'a>>> {
    let mut by_name = HashMap::new();
    for file in sources {
        for info in &file.header.tensors {
            by_name.insert(file.header.name(info), Source { file, info });
        }
    }
    let whole = wanted.map(|regex| Regex::new(&format!("^(?:{regex})$")));
    let whole = whole.transpose()?;
    let (mut matched, mut same, mut changes) = (0, 0, Vec::new());
    for file in model {
        let mut change = Change {
            file,
            tensors: Vec::new(),
            changed: Vec::new(),
            known: load_originals(file),
        };
        for (at, info) in file.header.tensors.iter().enumerate() {
            let old = Source { file, info };
            change.tensors.push(old);
            let name = old.name();
            let text = name.to_string_lossy();
            if !whole.as_ref().is_none_or(|whole| whole.is_match(&text)) {
                continue;
            }
            let Some(new) = by_name.get(name) else {
                // Only what was kept can go back.
                ensure!(
                    restore,
                    "'{text}' is not in {}: expected a version of the same model",
                    sources.first().map_or_else(String::new, |f| f
                        .source
                        .path()
                        .display()
                        .to_string())
                );
                continue;
            };
            matched += 1;
            ensure!(
                new.info.ne == info.ne,
                "'{text}' is {:?} in {} and {:?} in {}: tensors of another shape cannot be swapped",
                info.ne,
                file.source.path().display(),
                new.info.ne,
                new.file.source.path().display()
            );
            if is_same(&old, new)? {
                same += 1;
                continue;
            }
            change.tensors[at] = *new;
            change.changed.push(at);
        }
        if !change.changed.is_empty() {
            changes.push(change);
        }
    }
    if let (0, Some(wanted)) = (matched, wanted) {
        let names = model
            .iter()
            .flat_map(|f| f.header.tensors.iter().map(|t| f.header.name(t)));
        let some: Vec<_> = names.take(3).map(|name| name.to_string_lossy()).collect();
        bail!(
            "no tensor's whole name matches '{wanted}': names look like {} (llama-sidecar inspect lists them)",
            some.join(", ")
        );
    }
    if changes.is_empty() {
        println!("all {same} tensors are the same already; nothing to do");
    }
    Ok(changes)
}

fn is_same(old: &Source<'_>, new: &Source<'_>) -> Result<bool> {
    if !std::ptr::eq(old.info.ty, new.info.ty) {
        return Ok(false);
    }
    let hash = |source: &Source<'_>| {
        let (file, info) = (&source.file.source, source.info);
        let hash = hash_source(file, info.offset, info.nbytes);
        hash.with_context(|| format!("cannot read {}", file.path().display()))
    };
    Ok(hash(old)? == hash(new)?)
}

fn describe(change: &Change<'_>) {
    let nbytes = |source: &Source<'_>| source.info.nbytes;
    let total: u64 = change.tensors.iter().map(nbytes).sum();
    let changed = change.changed.iter().map(|&at| &change.tensors[at]);
    let new: u64 = changed.map(nbytes).sum();
    println!(
        "{}: {} of {} tensors change; {new} bytes of them, {} are copied as they are",
        change.file.source.path().display(),
        change.changed.len(),
        change.tensors.len(),
        total - new
    );
    for &at in &change.changed {
        let old = &change.file.header.tensors[at];
        println!(
            "  {:40} {} -> {}",
            change.tensors[at].name().to_string_lossy(),
            old.ty.name(),
            change.tensors[at].info.ty.name()
        );
    }
}

/// Writes the new file and the originals of what it has no more; none when all is
/// original again.
fn write(change: &Change<'_>, restore: bool) -> Result<(Written, Option<Written>)> {
    let new = rewrite::with_tensors(change.file, &change.tensors)?;
    let file = change.file;
    let known = change.known.as_ref();
    let kept = known.into_iter().flat_map(|known| {
        known
            .header
            .tensors
            .iter()
            .map(move |info| Source { file: known, info })
    });
    let changed = |name: &std::ffi::CStr| {
        change
            .changed
            .iter()
            .any(|&at| change.tensors[at].name() == name)
    };
    let mut originals: Vec<Source<'_>> = kept
        .filter(|source| !restore || !changed(source.name()))
        .collect();
    if !restore {
        for &at in &change.changed {
            let old = Source {
                file,
                info: &file.header.tensors[at],
            };
            if !originals.iter().any(|source| source.name() == old.name()) {
                originals.push(old);
            }
        }
    }
    if originals.is_empty() {
        return Ok((new, None));
    }
    let path = beside(&originals_of(file.source.path()));
    let originals = rewrite::originals(file, &path, &new.identity, &originals)?;
    Ok((new, Some(originals)))
}

/// The file beside a model's that has the tensors it had before any swap.
fn originals_of(path: &Path) -> PathBuf {
    with_suffix(path, ".originals")
}

/// Where it is while the model's file is renamed.
fn beside(path: &Path) -> PathBuf {
    with_suffix(path, ".new")
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The originals of a file, if they are of the version that is there now. An interruption
/// between two renames leaves them under their other name.
fn load_originals(file: &GgufFile) -> Option<GgufFile> {
    let path = originals_of(file.source.path());
    let now = rewrite::identity(file.source.path()).ok()?;
    [beside(&path), path].into_iter().find_map(|path| {
        let found = GgufFile::open(&path, Access::Read).ok()?;
        let of = found
            .value(found.header.key(ORIGINALS_OF.as_bytes())?)
            .ok()?;
        matches!(of, Value::Text(of) if *of == *now.as_bytes()).then_some(found)
    })
}

fn kept_originals(model: &[GgufFile]) -> Result<Vec<GgufFile>> {
    let found: Vec<GgufFile> = model.iter().filter_map(load_originals).collect();
    let stale = |file: &&GgufFile| originals_of(file.source.path()).exists();
    match (found.is_empty(), model.iter().find(stale)) {
        (false, _) => Ok(found),
        (true, Some(file)) => bail!(
            "the originals beside {} are of another version of it, which somebody has replaced since: put tensors back with --tensor and --from",
            file.source.path().display()
        ),
        (true, None) => bail!(
            "{} has no originals beside it: it was not changed by 'llama-sidecar swap', or all is back already",
            model[0].source.path().display()
        ),
    }
}
