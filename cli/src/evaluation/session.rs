//! Evaluations of one model and of what is made from it.

use std::ffi::OsStr;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use sidecar_core::gguf::GgufFile;
use sidecar_core::text;

use super::base::{self, Base};
use super::program::{Program, Running};
use super::statistics::Statistics;
use crate::interruption;
use crate::launch::child::without_secrets;
use crate::output::progress;
use crate::temporary::Temporary;

/// Fails if one of the files of a model is another one than that which was opened: figures of two models mean nothing.
pub fn check_files(files: &[GgufFile]) -> Result<()> {
    for file in files {
        let path = file.source.path();
        ensure!(
            file.source.id().is_at(path),
            "{} was replaced or written during the measurements: put it back, or start again in another folder",
            text::path(path)
        );
    }
    Ok(())
}

/// A model, a text, and a folder with base logits that goes at the end. The log of the program stays after a failure.
pub struct Session<'a> {
    pub program: Program,
    model: &'a Path,
    files: &'a [GgufFile],
    chunks: Option<u32>,
    folder: Temporary,
    log: PathBuf,
    has_ended: bool,
    base: Option<Base>,
}

impl<'a> Session<'a> {
    /// Prepares evaluations of these texts, for a caller that ends at signals; the folder is in `work`, or where temporary
    /// files are. Fails before anything is evaluated if something is missing, or if a later text is too short.
    pub fn new(
        program: Program,
        (model, files): (&'a Path, &'a [GgufFile]),
        texts: &[&Path],
        chunks: Option<u32>,
        work: Option<&Path>,
    ) -> Result<Session<'a>> {
        program.check(texts)?;
        // The first one is evaluated before all else.
        for text in texts.iter().skip(1) {
            program.try_text(model, text)?;
        }
        let parent = work.map_or_else(std::env::temp_dir, Path::to_owned);
        let explain = || format!("cannot write to {}", text::path(&parent));
        let folder = Temporary::new_in(&parent).with_context(explain)?;
        if let Some(chunks) = chunks {
            let vocabulary = base::vocabulary(files);
            base::check(folder.path(), program.context, chunks, vocabulary)?;
        }
        let mut names = tempfile::Builder::new();
        names.prefix("llama-sidecar-").suffix(".log");
        let make = || Ok(names.tempfile_in(&parent)?.keep()?.1);
        let log = interruption::make_temporary(make, PathBuf::as_path).with_context(explain)?;
        Ok(Session {
            program,
            model,
            files,
            chunks,
            folder,
            log,
            has_ended: false,
            base: None,
        })
    }

    fn base_path(&self) -> PathBuf {
        self.folder.path().join("base.logits")
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Evaluates a text with the model as it is: what follows is compared with this.
    pub fn use_text(&mut self, text: &Path) -> Result<()> {
        progress(&format!(
            "evaluating {} with the model as it is",
            text::path(text)
        ));
        check_files(self.files)?;
        let base = self.base_path();
        let base = self
            .program
            .write_base(self.model, text, self.chunks, &base, &self.log)?;
        if let Some(note) = base.note() {
            progress(&note);
        }
        self.base = Some(base);
        Ok(())
    }

    /// Starts the program with these variables. Its first evaluation begins.
    pub fn start(&self, variables: &[(&str, impl AsRef<OsStr>)]) -> Result<Running> {
        check_files(self.files)?;
        self.program
            .start(self.model, &self.base_path(), &self.log, variables, &[])
    }

    /// Evaluates another model once.
    pub fn evaluate(&self, model: &Path) -> Result<Statistics> {
        let base = self.base_path();
        self.program.evaluate(model, &base, &self.log, &[])
    }

    /// Evaluates the model with results that differ by rounding alone: [`Program::evaluate_rounding`].
    pub fn evaluate_rounding(&self) -> Result<Option<(&'static str, Statistics)>> {
        let base = self.base_path();
        self.program.evaluate_rounding(self.model, &base, &self.log)
    }

    /// Returns what a reader of the figures must know.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let words: Vec<_> = std::env::args_os().collect();
        vec![
            ("command", without_secrets(&words)),
            (
                "evaluated",
                self.base.map_or_else(String::new, |base| base.to_string()),
            ),
            ("version", env!("CARGO_PKG_VERSION").into()),
        ]
    }

    /// Ends after evaluations and after the output of their results: returns the first error, and prints the other one.
    pub fn end(mut self, evaluated: Result<()>, shown: Result<()>) -> Result<()> {
        self.has_ended = evaluated.is_ok();
        drop(self);
        if let (Err(_), Err(error)) = (&evaluated, &shown) {
            progress(&format!("{error:#}"));
        }
        evaluated.and(shown)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if self.has_ended || interruption::signal().is_some() {
            // It only takes space.
            let _ = std::fs::remove_file(&self.log);
        }
    }
}
