//! `llama-sidecar swap`: replacing tensors in a model's files. `undo` restores them.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use regex::Regex;
use sidecar_core::error::Error;
use sidecar_core::gguf::{
    Access, GgufFile, NamePattern, TensorInfo, group, has_tensor, open_model,
};
use sidecar_core::protocol::{ModelReload, Reloads, Request, Status};
use sidecar_core::reload::{LoadedModel, check_tensor};
use sidecar_core::text;

use crate::control::{self, Control, server};
use crate::interruption;
use crate::launch::executable::Executable;
use crate::launch::hooks;
use crate::space::{self, Need};
use crate::swap::live;
use crate::swap::originals::{self, Content, Originals, Record};
use crate::swap::part::{Part, Version};
use crate::swap::rewrite::{self, Draft, Written};
use crate::swap::target::Target;
use crate::temporary::Temporary;
use crate::tune;
use crate::words::quoted;

/// The forms of the command.
pub const USAGE: &str = "llama-sidecar swap MODEL --tensor REGEX --from GGUF [--as TYPE] [OPTIONS]
       llama-sidecar swap --live [-s SOCKET] --tensor REGEX --from GGUF [--as TYPE]";

/// The model, and the tensors to replace.
#[derive(clap::Args)]
pub struct SwapOptions {
    /// The model: a GGUF file, or any shard of one.
    #[arg(required_unless_present = "live")]
    model: Option<PathBuf>,
    /// Tensors whose whole name matches this regular expression.
    #[arg(long, value_name = "REGEX")]
    tensor: Regex,
    /// The model with the new tensors: any shard of it.
    #[arg(long, value_name = "GGUF")]
    from: PathBuf,
    /// Print the changes, and make none.
    #[arg(long)]
    dry_run: bool,
    /// Also change a file that is named by the hash of its content, as in caches of downloads.
    #[arg(long, conflicts_with = "live")]
    force: bool,
    /// Also reload the files in a running program, and wait for the result.
    #[arg(long)]
    reload: bool,
    /// Swap in a running program, and leave its files as they are.
    #[arg(long, conflicts_with_all = ["model", "dry_run", "reload"])]
    live: bool,
    #[command(flatten)]
    at: Control,
    /// Quantise the tensors of --from to this type first, for example q4_K.
    #[arg(long = "as", value_name = "TYPE")]
    as_type: Option<String>,
    /// An importance matrix of llama-imatrix, for quantising.
    #[arg(long, value_name = "FILE", requires = "as_type")]
    imatrix: Option<PathBuf>,
    /// The libggml-base.so that quantises; by default that of the program at --live or --reload,
    /// else that of llama-quantize.
    #[arg(long, value_name = "LIBRARY", requires = "as_type")]
    ggml: Option<PathBuf>,
}

/// The new tensors.
struct Source {
    tensor: Regex,
    /// The model that has them: that of --from, or a temporary one.
    path: PathBuf,
    _folder: Option<Temporary>,
}

impl SwapOptions {
    /// Returns the new tensors, quantised if the options name a type.
    fn source(&self) -> Result<Source> {
        let (tensor, from) = (&self.tensor, &self.from);
        let Some(ty) = &self.as_type else {
            return Ok(Source {
                tensor: tensor.clone(),
                path: from.clone(),
                _folder: None,
            });
        };
        interruption::end_at_signals()?;
        let (folder, imatrix) = (Temporary::new()?, self.imatrix.as_deref());
        let status = self.status()?;
        let library = self.library(status.as_ref())?;
        let in_use = self.in_use(status.as_ref())?;
        let made = tune::quantize(from, tensor, ty, imatrix, &library, &in_use, folder.path())?;
        let names: Vec<String> = made.names.iter().map(|name| regex::escape(name)).collect();
        Ok(Source {
            tensor: Regex::new(&names.join("|"))?,
            path: made.path,
            _folder: Some(folder),
        })
    }

    /// Returns what the program that listens reports, if the options name one.
    fn status(&self) -> Result<Option<Status>> {
        if !self.live && !self.reload {
            return Ok(None);
        }
        let socket = &self.at.socket()?;
        control::check_connection(socket, &Request::Reload)?;
        let answer = control::ask(socket, &Request::Status, self.at.limit)?;
        Ok(Some(control::parsed(&answer)?))
    }

    /// Returns the files of the model that has the tensors now. Those that only the program can read are left out.
    fn in_use(&self, status: Option<&Status>) -> Result<Vec<GgufFile>> {
        if let Some(model) = &self.model {
            return Ok(open_model(model, Access::Read)?);
        }
        let models = status.iter().flat_map(|status| &status.models);
        let paths = models.flat_map(|model| &model.files);
        let open = |path: &String| GgufFile::open(path.as_ref(), Access::Read).ok();
        Ok(paths.filter_map(open).collect())
    }

    /// Returns the ggml library that quantises.
    fn library(&self, status: Option<&Status>) -> Result<PathBuf> {
        const NEXT: &str = "name a libggml-base.so with --ggml";
        if let Some(library) = &self.ggml {
            return Ok(library.clone());
        }
        if let Some(Status { pid, .. }) = status {
            let mapped = hooks::mapped(*pid);
            ensure!(
                !mapped.is_empty(),
                "cannot read /proc/{pid}/maps, which names the ggml library of the program: run this command as its user and in its container, or {NEXT}"
            );
            return tune::ggml_library(mapped)
                .with_context(|| format!("process {pid} has no libggml-base.so: {NEXT}"));
        }
        let program = Executable::find("llama-quantize".as_ref());
        let program = program.map_err(|_| {
            anyhow!("--as quantises with the ggml library of llama-quantize, which is not in PATH: add its folder to PATH, or {NEXT}")
        })?;
        tune::ggml_library(program.libraries()?).with_context(|| {
            format!(
                "{} has no libggml-base.so: {NEXT}",
                text::path(&program.path)
            )
        })
    }
}

/// The change of a file.
struct Change<'a> {
    target: &'a Target,
    file: &'a GgufFile,
    /// The positions of its tensors that change.
    changed: Vec<usize>,
    /// Its new version.
    new: Draft<'a>,
    /// The new file of originals; none if all tensors are original again.
    originals: Option<Draft<'a>>,
    /// The file of originals now.
    known: Option<&'a Originals>,
}

/// The changes of a swap.
#[derive(Default)]
struct Plan<'a> {
    changes: Vec<Change<'a>>,
    /// Files without changed tensors, with originals that an interrupted restore left.
    restored: Vec<&'a Target>,
    /// Number of matching tensors.
    named: usize,
}

/// The tensors that a swap selects.
struct Wanted<'a> {
    regex: Option<&'a Regex>,
    whole: Option<NamePattern>,
    /// The files of the model.
    files: &'a [GgufFile],
}

impl Wanted<'_> {
    fn new<'a>(regex: Option<&'a Regex>, files: &'a [GgufFile]) -> Result<Wanted<'a>> {
        let whole = regex.map(|regex| NamePattern::parse(regex.as_str()));
        let whole = whole.transpose().map_err(anyhow::Error::msg)?;
        Ok(Wanted {
            regex,
            whole,
            files,
        })
    }

    /// Whether a tensor, or one that it is used with, is wanted.
    fn has(&self, name: &CStr) -> bool {
        let whole = self.whole.as_ref();
        whole.is_none_or(|whole| {
            let others = || group(name, |name| has_tensor(self.files, name));
            whole.matches(name) || others().iter().any(|other| whole.matches(other))
        })
    }

    /// Positions of the tensors of a file.
    fn of(&self, file: &GgufFile) -> Vec<usize> {
        let infos = file.header.tensors.iter().enumerate();
        let wanted = infos.filter(|(_, info)| self.has(file.header.name(info)));
        wanted.map(|(at, _)| at).collect()
    }
}

/// A swap of tensors in files.
struct Job<'a> {
    model: &'a Path,
    /// The tensors; all if there is none.
    tensor: Option<&'a Regex>,
    /// The new tensors, and the model that the user named for them; `None` for the originals.
    source: Option<(&'a Source, &'a Path)>,
    force: bool,
    dry_run: bool,
}

/// Swaps, and reloads the files in a program if one is named.
pub fn run(mut options: SwapOptions) -> Result<()> {
    if options.live || options.reload {
        options.at.socket = Some(options.at.socket()?);
    } else {
        let is_variable = std::env::var_os("LLAMA_SIDECAR_CONTROL").is_some();
        ensure!(
            options.at.socket.is_none() || is_variable,
            "--socket names a running program: also pass --live or --reload"
        );
    }
    ensure!(
        !options.at.json || options.live,
        "--json prints the reply of a running program: also pass --live"
    );
    let options = &options;
    let source = options.source()?;
    let Some(model) = &options.model else {
        return live::set(
            &options.at,
            source.tensor.as_str(),
            &source.path,
            options.as_type.as_ref().map(|as_type| live::Quantised {
                from: &options.from,
                as_type,
                imatrix: options.imatrix.as_deref(),
            }),
        );
    };
    if options.reload && !options.dry_run {
        check_program(&options.at, model).context("nothing was changed")?;
    }
    let job = Job {
        model,
        tensor: Some(&source.tensor),
        source: Some((&source, &options.from)),
        force: options.force,
        dry_run: options.dry_run,
    };
    if !swap(&job)? {
        return Ok(());
    }
    let undo = format!("undo {}", quoted(model.as_os_str()));
    if options.reload {
        control::reload(&options.at, &server::ServerOptions::default()).with_context(|| {
            format!("the file is changed (undo it with: llama-sidecar {undo}), and the program does not use all of it")
        })?;
        control::say_undo(&options.at.socket()?, &undo)?;
        println!("{}", control::CACHED);
        return Ok(());
    }
    println!("done; undo it with: llama-sidecar {undo}");
    Ok(())
}

/// Fails unless a program reloads files, and uses this model. Its path may be another one there.
fn check_program(at: &Control, model: &Path) -> Result<()> {
    let socket = at.socket()?;
    let reloads: Reloads = control::parsed(&control::ask(&socket, &Request::Reload, at.limit)?)?;
    let off = Error::HotSwapOff.to_string();
    for reload in &reloads.reports {
        // Other failures may be those that this swap mends.
        if let ModelReload::Failed { error, .. } = reload
            && *error == off
        {
            bail!("{off}");
        }
    }
    let status: Status = control::parsed(&control::ask(&socket, &Request::Status, at.limit)?)?;
    let models = status.models.iter().flat_map(|model| &model.files);
    let used: Vec<PathBuf> = models.map(|path| text::path_of(path)).collect();
    let files = open_model(model, Access::Read)?;
    let is_used = files.iter().map(|file| file.source.path()).any(|file| {
        let is_same = |path: &PathBuf| {
            let real = file.canonicalize().ok();
            path.file_name() == file.file_name()
                || real.is_some() && real == path.canonicalize().ok()
        };
        used.iter().any(is_same)
    });
    ensure!(
        is_used,
        "the program at {} does not use {}",
        text::path(&socket),
        text::path(model)
    );
    Ok(())
}

/// Puts the original tensors of a model's files back, all or those that match, and returns whether anything changed.
pub fn restore(model: &Path, tensor: Option<&Regex>, dry_run: bool) -> Result<bool> {
    let changed = swap(&Job {
        model,
        tensor,
        source: None,
        force: true,
        dry_run,
    })?;
    if changed {
        println!("done: the original tensors are back");
    }
    Ok(changed)
}

/// Swaps, and returns whether anything changed.
fn swap(job: &Job<'_>) -> Result<bool> {
    let path = job.model;
    let path_of = |file: &GgufFile| file.source.path().to_owned();
    let paths = open_model(path, Access::Read)?;
    let paths: Vec<_> = paths.iter().map(path_of).collect();
    let targets = Target::lock_all(&paths)?;
    if job.source.is_some() && !job.force {
        targets.iter().try_for_each(Target::check_name)?;
    }
    // Opened again, because another swap may have replaced it before the lock.
    let model = open_model(path, Access::Read)?;
    ensure!(
        model.iter().map(path_of).eq(paths),
        "another program changed {}: try again when that program has ended",
        text::path(path)
    );
    let wanted = Wanted::new(job.tensor, &model)?;
    let mut kept = Vec::new();
    for (file, target) in model.iter().zip(&targets) {
        kept.push(match wanted.of(file).is_empty() {
            true => Vec::new(),
            false => Originals::load(&target.path)?,
        });
    }
    let files: Vec<_> = model.iter().zip(&targets).zip(&kept).collect();
    let sources = job
        .source
        .map(|(source, _)| open_model(&source.path, Access::Read));
    let sources = sources.transpose()?;
    let mut plan = Plan::default();
    match &sources {
        Some(sources) => {
            let named = job.source.map_or(path, |(_, named)| named);
            plan_swap(&mut plan, &files, sources, named, &wanted)?;
        }
        None => plan_restore(&mut plan, &files, &wanted)?,
    }
    if let (0, Some(regex)) = (plan.named, wanted.regex) {
        let names = model
            .iter()
            .flat_map(|f| f.header.tensors.iter().map(|t| f.header.name(t)));
        bail!(NamePattern::no_match(regex.as_str(), names));
    }
    if sources.is_none() && kept.iter().all(Vec::is_empty) {
        println!(
            "nothing to undo: {} has no file of originals: no swap changed the model, or all tensors are restored already; commands with -o leave the model that they read as it is",
            text::path(path)
        );
        return Ok(false);
    }
    carry_out(plan, job)
}

/// A file of the model, its lock, and its files of originals.
type Known<'a> = ((&'a GgufFile, &'a Target), &'a Vec<Originals>);

/// Plans the tensors that come from another model. Writes nothing.
fn plan_swap<'a>(
    plan: &mut Plan<'a>,
    files: &[Known<'a>],
    sources: &'a [GgufFile],
    from: &Path,
    wanted: &Wanted<'_>,
) -> Result<()> {
    let model = LoadedModel::of(files.iter().map(|((file, _), _)| *file));
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
            if let Some(misfit) = model.misfit(sources, from, name, &info.ne) {
                bail!(misfit);
            }
            let &(from, new) = by_name.get(name).context("a tensor that fits is there")?;
            let hash = check_tensor(from, new, Some((file, info)))?.hash;
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

/// Plans the tensors to restore. Writes nothing.
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
    // Each kept tensor goes into the new file or into the new originals, so each must be
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
    let differs = |(before, written): &(Part<'a>, &Version)| before.version() != **written;
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

/// Writes all new files, and then renames them.
fn carry_out(plan: Plan<'_>, job: &Job<'_>) -> Result<bool> {
    if plan.changes.is_empty() {
        let what = match job.source {
            None => "the original ones",
            Some(_) => "the same",
        };
        println!(
            "all {} tensors are {what} already: nothing to do",
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
            text::path(&need.folder)
        );
        need.check()?;
    }
    if job.dry_run {
        println!("dry run: nothing was changed");
        return Ok(false);
    }
    let mut written = Vec::new();
    for change in &plan.changes {
        written.push(write(change, &needs)?);
    }
    // All new files are complete and checked; only renames follow. After each rename, the
    // originals that belong to the current file exist.
    for change in &plan.changes {
        change.target.look_again()?;
        for part in &change.new.parts {
            part.file.source.check_unwritten()?;
        }
    }
    let mut locks = Vec::new();
    let files = plan.changes.len();
    for ((new, originals), change) in written.into_iter().zip(&plan.changes) {
        let placed = put_in_place(change, new, originals);
        locks.push(match locks.len() {
            0 => placed?,
            done => placed.with_context(|| {
                format!("{done} of {files} files are swapped: swap again for the rest, or return them with 'llama-sidecar undo'")
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
        text::path(change.file.source.path()),
        change.changed.len(),
        parts.len(),
        total - new
    );
    for &at in &change.changed {
        let old = &change.file.header.tensors[at];
        println!(
            "  {:40} {} -> {}",
            text::line(&parts[at].name().to_string_lossy()),
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
    // This command may write none there.
    rewrite::remove_left(&beside);
    let originals = change.originals.as_ref();
    let originals = originals.map(|originals| originals.write(target, &beside, needed));
    Ok((new, originals.transpose()?))
}

/// Renames the new file over the old one. The matching originals exist at any time.
fn put_in_place(change: &Change<'_>, new: Written, originals: Option<Written>) -> Result<File> {
    let path = &change.target.path;
    let (kept, beside) = (Originals::path_of(path), Originals::beside(path));
    // The originals of the old version get their own name first, if an interruption has left
    // them under the name of the new ones.
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
        // The old version and its originals are still in place.
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
        .with_context(|| format!("cannot rename {} to {}", text::path(from), text::path(to)))?;
    rewrite::sync_folder_of(to)
}

/// Removes the file of originals of a restored file.
fn remove_originals(model: &Path) -> Result<()> {
    for path in [Originals::path_of(model), Originals::beside(model)] {
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", text::path(&path)));
            }
            _ => {}
        }
    }
    Ok(())
}
