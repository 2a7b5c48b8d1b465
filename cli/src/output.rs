//! Texts and models for files that the user names, and progress.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use sidecar_core::files::{self, Replace, folder_of};
use sidecar_core::gguf::{Pieces, write_data};
use sidecar_core::text;
use tempfile::{NamedTempFile, TempPath};

use crate::interruption;
use crate::space::Need;
use crate::temporary::{Temporary, remove_left};

/// Prints on standard error what a command does now.
pub fn progress(line: &str) {
    eprintln!("llama-sidecar: {line}");
}

/// What the outputs of a command may replace.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Outputs {
    /// Also replace a file that is no earlier output of this kind. A model is never replaced.
    #[arg(long)]
    force: bool,
}

impl Outputs {
    /// Returns them as options of another command.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        self.force.then_some("--force").into_iter()
    }

    fn replace(self) -> Replace {
        match self.force {
            true => Replace::Any,
            false => Replace::Own,
        }
    }

    /// Fails if a file that starts so cannot be written.
    pub fn check(self, path: &Path, start: &str) -> Result<()> {
        let checked = files::check(path, start.as_bytes(), self.replace());
        explain(checked, path)
    }

    /// Writes a text to a file. Removes those that killed commands have left incomplete.
    pub fn write(self, path: &Path, text: &str) -> Result<()> {
        let prefix = files::incomplete_prefix(path);
        remove_left(folder_of(path), &prefix, files::INCOMPLETE, false);
        explain(files::write(path, text.as_bytes(), self.replace()), path)
    }
}

/// Returns a path beside another one, whose name ends with more.
pub fn beside(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// Fails if a file that is read would be replaced, or if two outputs have one path.
pub fn check_distinct<'a>(
    outputs: &[&Path],
    mut inputs: impl Iterator<Item = &'a Path>,
) -> Result<()> {
    let real = |path: &Path| {
        let beside = || Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?));
        let found = path.canonicalize().ok().or_else(beside);
        found.unwrap_or_else(|| path.to_owned())
    };
    let mut paths: Vec<PathBuf> = outputs.iter().map(|path| real(path)).collect();
    paths.sort_unstable();
    if let Some(input) = inputs.find(|path| paths.contains(&real(path))) {
        bail!(
            "{} is read, and would be replaced: name another path for what is written",
            text::path(input)
        );
    }
    if let Some(twice) = paths.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!(
            "{} is named twice: each file needs a path of its own",
            text::path(&twice[0])
        );
    }
    Ok(())
}

/// Adds the path and, where it helps, the option to an error.
fn explain(written: io::Result<()>, path: &Path) -> Result<()> {
    let force = |error: &io::Error| match error.kind() {
        ErrorKind::AlreadyExists => ", or replace it with --force",
        _ => "",
    };
    written.map_err(|error| {
        anyhow!(
            "cannot write {}: {error}{}",
            text::path(path),
            force(&error)
        )
    })
}

/// A file of a new model.
pub struct NewFile<'a> {
    pub path: PathBuf,
    pub header: Vec<u8>,
    pub alignment: u64,
    pub tensors: Vec<Pieces<'a>>,
}

impl NewFile<'_> {
    fn size(&self) -> u64 {
        self.header.len() as u64 + self.tensors.iter().map(Pieces::size).sum::<u64>()
    }

    /// Writes the file into a folder, under its own name, and flushes it to the disk.
    fn write(self, folder: &Path) -> Result<NamedTempFile> {
        let path = folder.join(self.path.file_name().context("the name of a file")?);
        let file = File::create_new(&path)?;
        let file = NamedTempFile::from_parts(file, TempPath::try_from_path(path)?);
        let mut out = BufWriter::new(file.as_file());
        out.write_all(&self.header)?;
        let sources: Vec<_> = self.tensors.iter().map(Pieces::file).collect();
        for data in self.tensors {
            if interruption::signal().is_some() {
                bail!("interrupted by a signal");
            }
            let size = data.size();
            write_data(&mut out, data, size, self.alignment)?;
        }
        out.flush()?;
        drop(out);
        file.as_file().sync_all()?;
        for source in sources {
            source.source.check_unwritten()?;
        }
        Ok(file)
    }
}

/// Fails if the files of a model do not fit on the disk.
pub fn check_space(model: &[NewFile<'_>]) -> Result<()> {
    for need in Need::of(model.iter().map(|file| (&*file.path, file.size())))? {
        need.check()?;
    }
    Ok(())
}

/// Writes the files of a model, and returns their bytes. A model that is there is never written over, another file only
/// as `outputs` states.
///
/// All files are complete, in a folder beside their paths, and `check` was called with the first one before it gets its path.
/// The first shard is the last one that gets it. After an error, no path has a file of the new model.
pub fn write_model(
    model: Vec<NewFile<'_>>,
    outputs: Outputs,
    check: impl FnOnce(&Path) -> Result<()>,
) -> Result<u64> {
    let context = |path: &Path| format!("cannot write {}", text::path(path));
    let bytes = model.iter().map(NewFile::size).sum();
    check_space(&model)?;
    let first = model.first().context("a model has a file")?.path.clone();
    let prefix = files::incomplete_prefix(&first);
    let folder = Temporary::named(folder_of(&first), &prefix, files::INCOMPLETE);
    let folder = folder.with_context(|| context(&first))?;
    let write = |file: NewFile<'_>| {
        let path = file.path.clone();
        let written = file.write(folder.path()).with_context(|| context(&path))?;
        Ok((written, path))
    };
    let written = model.into_iter().map(write).collect::<Result<Vec<_>>>()?;
    check(written[0].0.path())?;
    let mut placed = Vec::new();
    for (file, path) in written.into_iter().rev() {
        if let Err(error) = explain(files::persist(file, &path, outputs.replace()), &path) {
            for path in placed {
                let _ = fs::remove_file(path);
            }
            return Err(error);
        }
        placed.push(path);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_get_their_paths_together() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let shard = |name: &str| NewFile {
            path: path(name),
            header: b"GGUF".to_vec(),
            alignment: 32,
            tensors: Vec::new(),
        };
        let model = || ["1", "2", "3"].map(shard).into();
        fs::write(path("1"), "GGUF of another model").expect("a file");
        let checked = |path: &Path| {
            assert_eq!(fs::read(path)?, b"GGUF");
            Ok(())
        };
        let write =
            |outputs, check: &dyn Fn(&Path) -> Result<()>| write_model(model(), outputs, check);
        let own = Outputs::default();
        let error = write(own, &checked).expect_err("a model is there");
        assert!(
            format!("{error:#}").contains("never written over"),
            "{error:#}"
        );
        let names = || {
            let entries = fs::read_dir(folder.path()).expect("a folder");
            let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
            let mut names: Vec<_> = entries.map(name).collect();
            names.sort();
            names
        };
        assert_eq!(names(), ["1"]);
        fs::remove_file(path("1")).expect("a file");
        fs::write(path("3"), "notes").expect("a file");
        let force = Outputs { force: true };
        assert!(write(force, &|_| bail!("it does not load")).is_err());
        let error = write(own, &checked).expect_err("notes are there");
        assert!(format!("{error:#}").contains("--force"), "{error:#}");
        assert_eq!(names(), ["3"]);
        assert_eq!(fs::read(path("3")).expect("a file"), b"notes");
        assert_eq!(write(force, &checked).expect("free paths"), 3 * 4);
        assert_eq!(names(), ["1", "2", "3"]);
    }
}
