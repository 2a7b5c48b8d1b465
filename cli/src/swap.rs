//! `llama-sidecar swap`: other tensors into a model's files, and back.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use llama_sidecar::gguf::{Access, GgufFile, TensorInfo, open_model};
use regex::Regex;

use crate::originals::{self, Content, Originals, Record};
use crate::rewrite::{self, Draft, Part, Written};
use crate::space::{self, Need};
use crate::target::Target;
use crate::{control, server};

/// What to put where.
#[derive(clap::Args)]
pub struct SwapOptions {
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
    target: &'a Target,
    file: &'a GgufFile,
    /// The positions of its tensors that change.
    changed: Vec<usize>,
    /// Its new version.
    new: Draft<'a>,
    /// The originals of what it then has no more; none when all is original again.
    originals: Option<Draft<'a>>,
    /// The originals that it has now.
    known: Option<&'a Originals>,
}

/// What a swap does.
#[derive(Default)]
struct Plan<'a> {
    changes: Vec<Change<'a>>,
    /// Files that are the original ones already, with originals that an interrupted restore
    /// has left.
    restored: Vec<&'a Target>,
    /// Tensors that were named.
    named: usize,
}

/// Which tensors a swap is about.
struct Wanted<'a> {
    regex: Option<&'a Regex>,
    whole: Option<Regex>,
}

impl Wanted<'_> {
    fn new(regex: Option<&Regex>) -> Result<Wanted<'_>> {
        let whole = regex.map(|regex| Regex::new(&format!("^(?:{regex})$")));
        let whole = whole.transpose()?;
        Ok(Wanted { regex, whole })
    }

    fn has(&self, name: &CStr) -> bool {
        let whole = self.whole.as_ref();
        whole.is_none_or(|whole| whole.is_match(&name.to_string_lossy()))
    }

    /// Positions of the tensors of a file.
    fn of(&self, file: &GgufFile) -> Vec<usize> {
        let infos = file.header.tensors.iter().enumerate();
        let wanted = infos.filter(|(_, info)| self.has(file.header.name(info)));
        wanted.map(|(at, _)| at).collect()
    }
}

/// Swaps, and says what was done.
pub fn run(options: &SwapOptions) -> Result<()> {
    let changed = swap(options)?;
    match &options.reload {
        Some(socket) if changed => {
            control::reload(socket, &server::ServerOptions::default(), false)
        }
        _ => Ok(()),
    }
}

/// Says whether anything was changed.
fn swap(options: &SwapOptions) -> Result<bool> {
    let path_of = |file: &GgufFile| file.source.path().to_owned();
    let paths = open_model(&options.model, Access::Read)?;
    let paths: Vec<_> = paths.iter().map(path_of).collect();
    let targets = Target::lock_all(&paths)?;
    // Opened again: it may have been another one before it was locked.
    let model = open_model(&options.model, Access::Read)?;
    ensure!(
        model.iter().map(path_of).eq(paths),
        "{} was changed by another program: try again when that program has ended",
        options.model.display()
    );
    let wanted = Wanted::new(options.tensor.as_ref())?;
    let mut kept = Vec::new();
    for (file, target) in model.iter().zip(&targets) {
        kept.push(match wanted.of(file).is_empty() {
            true => Vec::new(),
            false => Originals::load(&target.path)?,
        });
    }
    let files: Vec<_> = model.iter().zip(&targets).zip(&kept).collect();
    let sources = match &options.from {
        Some(from) => Some(open_model(from, Access::Read)?),
        None => None,
    };
    let mut plan = Plan::default();
    match &sources {
        Some(sources) => plan_swap(&mut plan, &files, sources, &wanted)?,
        None => plan_restore(&mut plan, &files, &wanted)?,
    }
    if let (0, Some(regex)) = (plan.named, wanted.regex) {
        let names = model
            .iter()
            .flat_map(|f| f.header.tensors.iter().map(|t| f.header.name(t)));
        let some: Vec<_> = names.take(3).map(|name| name.to_string_lossy()).collect();
        bail!(
            "no tensor's whole name matches '{regex}': names look like {} (llama-sidecar inspect lists them)",
            some.join(", ")
        );
    }
    if sources.is_none() && kept.iter().all(Vec::is_empty) {
        bail!(
            "{} has no originals beside it: it was not changed by 'llama-sidecar swap', or all is back already",
            options.model.display()
        );
    }
    carry_out(plan, options)
}

/// A file of the model, its lock, and the originals that were found beside it.
type Known<'a> = ((&'a GgufFile, &'a Target), &'a Vec<Originals>);

/// Finds what comes from another model. Nothing is written yet.
fn plan_swap<'a>(
    plan: &mut Plan<'a>,
    files: &[Known<'a>],
    sources: &'a [GgufFile],
    wanted: &Wanted<'_>,
) -> Result<()> {
    let mut by_name: HashMap<&CStr, (&'a GgufFile, &'a TensorInfo)> = HashMap::new();
    for file in sources {
        for info in &file.header.tensors {
            by_name.insert(file.header.name(info), (file, info));
        }
    }
    for &((file, target), kept) in files {
        let content = Content::of(file);
        let mut changed = Vec::new();
        for at in wanted.of(file) {
            plan.named += 1;
            let info = &file.header.tensors[at];
            let name = file.header.name(info);
            let text = name.to_string_lossy();
            let Some(&(from, new)) = by_name.get(name) else {
                let first = sources.first().map(|file| file.source.path());
                bail!(
                    "'{text}' is not in {}: expected a version of the same model",
                    first.unwrap_or(Path::new("the other model")).display()
                );
            };
            ensure!(
                new.ne == info.ne,
                "'{text}' is {:?} in {} and {:?} in {}: tensors of another shape cannot be swapped",
                info.ne,
                file.source.path().display(),
                new.ne,
                from.source.path().display()
            );
            let hash = originals::hash_of(from, new)?;
            let new = Part {
                file: from,
                info: new,
                hash,
            };
            if !std::ptr::eq(info.ty, new.info.ty) || content.part(at)?.hash != hash {
                changed.push((at, new));
            }
        }
        if !changed.is_empty() {
            let known = Originals::that_fit(kept, &content)?;
            plan.changes
                .push(change(file, target, &content, known, changed)?);
        }
    }
    Ok(())
}

/// Finds what goes back. Nothing is written yet.
fn plan_restore<'a>(plan: &mut Plan<'a>, files: &[Known<'a>], wanted: &Wanted<'_>) -> Result<()> {
    for &((file, target), kept) in files {
        plan.named += wanted.of(file).len();
        let content = Content::of(file);
        let Some(known) = Originals::that_fit(kept, &content)? else {
            continue;
        };
        let mut changed = Vec::new();
        let mut left = false;
        for (at, now) in content.parts()?.into_iter().enumerate() {
            match known.part(now.name()) {
                Some(saved) if saved.version() != now.version() => {
                    if wanted.has(now.name()) {
                        changed.push((at, saved));
                    } else {
                        left = true;
                    }
                }
                _ => {}
            }
        }
        if !changed.is_empty() {
            let change = change(file, target, &content, Some(known), changed)?;
            plan.changes.push(change);
        } else if !left {
            plan.restored.push(target);
        }
    }
    Ok(())
}

/// Drafts the new version of a file and its originals.
fn change<'a>(
    file: &'a GgufFile,
    target: &'a Target,
    content: &Content<'a>,
    known: Option<&'a Originals>,
    replaced: Vec<(usize, Part<'a>)>,
) -> Result<Change<'a>> {
    let mut parts = content.parts()?;
    let changed: Vec<usize> = replaced.iter().map(|&(at, _)| at).collect();
    // What is kept goes in as it is, or into the new originals: in both cases it has to be
    // intact.
    for part in known.iter().flat_map(|known| known.parts()) {
        known.map_or(Ok(()), |known| known.check(&part))?;
    }
    let original = |now: Part<'a>| {
        known
            .and_then(|known| known.part(now.name()))
            .unwrap_or(now)
    };
    let before: Vec<_> = parts.iter().map(|&now| original(now)).collect();
    for (at, new) in replaced {
        parts[at] = new;
    }
    let written: Vec<_> = parts.iter().map(Part::version).collect();
    let differs =
        |(before, written): &(Part<'a>, &originals::Version)| before.version() != **written;
    let saved = before.into_iter().zip(&written).filter(differs);
    let saved: Vec<_> = saved.map(|(before, _)| before).collect();
    let size = known.map_or(file.source.id().size, |known| known.size);
    let mut new = Draft::of_model(file, parts)?;
    let mut originals = None;
    if saved.is_empty() {
        new = new.with_size_of_original(size)?;
    } else {
        let record = Record {
            rest: rewrite::rest(file)?,
            size,
            written,
        };
        let alignment = file.header.alignment;
        let header = originals::header(&record, alignment, &saved)?;
        originals = Some(Draft::new(header, alignment, saved)?);
    }
    Ok(Change {
        target,
        file,
        changed,
        new,
        originals,
        known,
    })
}

/// Writes everything, and then puts it in its place.
fn carry_out(plan: Plan<'_>, options: &SwapOptions) -> Result<bool> {
    if plan.changes.is_empty() {
        let what = match options.restore {
            true => "the original ones",
            false => "the same",
        };
        println!(
            "all {} tensors are {what} already; nothing to do",
            plan.named
        );
    }
    for change in &plan.changes {
        describe(change);
    }
    let sizes = plan.changes.iter().flat_map(|change| {
        let originals = change.originals.as_ref();
        let originals = originals.map(|originals| (change.target.path.as_path(), originals.size));
        [
            Some((change.target.path.as_path(), change.new.size)),
            originals,
        ]
    });
    let needs = Need::of(sizes.flatten())?;
    for need in &needs {
        println!(
            "{} bytes are needed in {}",
            need.bytes,
            need.folder.display()
        );
        need.check()?;
    }
    if options.dry_run {
        return Ok(false);
    }
    let mut written = Vec::new();
    for change in &plan.changes {
        written.push(write(change, &needs)?);
    }
    // Everything is there and checked; from here on there are only renames. After each of
    // them, the originals of the file that is in place can be found.
    for change in &plan.changes {
        change.target.look_again()?;
    }
    let mut locks = Vec::new();
    let files = plan.changes.len();
    for ((new, originals), change) in written.into_iter().zip(&plan.changes) {
        let placed = put_in_place(change, new, originals);
        locks.push(match locks.len() {
            0 => placed?,
            done => placed.with_context(|| {
                format!("{done} of {files} files are swapped: swap again for the rest, or put them back with --restore")
            })?,
        });
    }
    for target in plan.restored {
        target.look_again()?;
        remove_originals(&target.path)?;
    }
    Ok(!plan.changes.is_empty())
}

fn describe(change: &Change<'_>) {
    let nbytes = |part: &Part<'_>| part.info.nbytes;
    let parts = &change.new.parts;
    let total: u64 = parts.iter().map(nbytes).sum();
    let new: u64 = change.changed.iter().map(|&at| nbytes(&parts[at])).sum();
    println!(
        "{}: {} of {} tensors change; {new} bytes of them, {} are copied as they are",
        change.file.source.path().display(),
        change.changed.len(),
        parts.len(),
        total - new
    );
    for &at in &change.changed {
        let old = &change.file.header.tensors[at];
        println!(
            "  {:40} {} -> {}",
            parts[at].name().to_string_lossy(),
            old.ty.name(),
            parts[at].info.ty.name()
        );
    }
}

/// Writes the new file and its originals.
fn write(change: &Change<'_>, needs: &[Need]) -> Result<(Written, Option<Written>)> {
    let target = change.target;
    let needed = space::needed_at(needs, &target.path)?;
    let new = change.new.write(target, &target.path, needed)?;
    let beside = Originals::beside(&target.path);
    let originals = change.originals.as_ref();
    let originals = originals.map(|originals| originals.write(target, &beside, needed));
    Ok((new, originals.transpose()?))
}

/// Renames the new file over the old one, with the originals beside it at any time.
fn put_in_place(change: &Change<'_>, new: Written, originals: Option<Written>) -> Result<File> {
    let path = &change.target.path;
    let (kept, beside) = (Originals::path_of(path), Originals::beside(path));
    // Those of the old version get their own name first, if an interruption has left them
    // under that of the new ones.
    if change.known.is_some_and(|known| known.path() == beside) {
        rename(&beside, &kept)?;
    }
    let has_originals = originals.is_some();
    if let Some(originals) = originals {
        originals.commit()?;
        rewrite::sync_folder_of(path)?;
    }
    let placed = change.target.look_again().and_then(|()| new.commit());
    let lock = placed.inspect_err(|_| {
        // The old version is there, and so are its originals.
        let _ = fs::remove_file(&beside);
    })?;
    rewrite::sync_folder_of(path)?;
    match has_originals {
        true => rename(&beside, &kept)?,
        false => remove_originals(path)?,
    }
    Ok(lock)
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to)
        .with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))?;
    rewrite::sync_folder_of(to)
}

/// Removes the originals of a file that is the original one again.
fn remove_originals(model: &Path) -> Result<()> {
    for path in [Originals::path_of(model), Originals::beside(model)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    Ok(())
}
