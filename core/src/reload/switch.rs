//! Switches a model to changed files, and back to its original bytes.

use std::time::Instant;

use super::commit::{Commits, Failure, FileBytes, Follows, Planned, PlannedBytes};
use super::compare;
use super::detect::ChangedFile;
use super::registry::{OriginalBytes, Registry};
use super::report::{Cause, FileReport, Report};
use super::store::Store;
use crate::error::{Error, Result};
use crate::text;

impl Registry {
    /// Switches the model to the changed files. A file that cannot be used is left out, and the
    /// other files are tried again.
    pub fn apply<S: Store>(
        &mut self,
        store: &S,
        mut changed: Vec<ChangedFile>,
        report: &mut Report,
    ) -> Result<()> {
        loop {
            let comparing = Instant::now();
            compare::prepare(self, store, &mut changed, report);
            let planned = self.plan_files(store, &changed);
            report.times.compare += comparing.elapsed();
            if changed.is_empty() {
                return Ok(());
            }
            let (tensor, cause, reason) = match self.switch(store, &planned, Commits::Steps, report)
            {
                Ok(()) => {
                    self.accept(store, &changed, report);
                    return Ok(());
                }
                Err(Failure::Whole(error)) => return Err(error),
                Err(Failure::Tensor {
                    tensor,
                    cause,
                    reason,
                }) => (tensor, cause, reason),
                Err(Failure::Changing { tensor, .. }) => {
                    let reason = "it changed while it was read; the next reload tries again";
                    (tensor, Cause::Changing, reason.to_owned())
                }
            };
            // The other files can still be used without the file that failed.
            let failed = self.tensors[tensor].file;
            let Some(at) = changed.iter().position(|file| file.file == failed) else {
                return Err(Error::Invalid(reason));
            };
            let id = changed.swap_remove(at).gguf.source.id();
            let lasting = cause == Cause::Refused;
            if !lasting {
                self.files[failed].note_failure(id, None);
            }
            self.ignore(failed, lasting.then_some(id), cause, reason, report);
        }
    }

    /// Decides what happens to every tensor that follows a changed file.
    fn plan_files<'a, S: Store>(&self, store: &S, changed: &'a [ChangedFile]) -> Vec<Planned<'a>> {
        let mut planned = Vec::new();
        for file in changed {
            let id = file.gguf.source.id();
            for (tensor, info, content) in self.files[file.file].contents_of(id) {
                let info = &file.gguf.header.tensors[info];
                let modified = store.modified_mapped_offset(tensor, &id);
                let (action, leaves) =
                    compare::action(self, store, tensor, info, content.hash, modified);
                planned.push(Planned {
                    tensor,
                    bytes: PlannedBytes::OfFile(FileBytes {
                        file: &file.gguf,
                        info,
                        content,
                        action,
                        leaves,
                        follows: Follows::NewVersion,
                    }),
                });
            }
        }
        planned
    }

    /// Returns every tensor to its original bytes.
    pub fn revert<S: Store>(&mut self, store: &S, report: &mut Report) -> Result<()> {
        let mut planned = Vec::new();
        for (tensor, known) in self.tensors.iter().enumerate() {
            match known.original_bytes {
                OriginalBytes::InUse if !known.written_in_place => {}
                OriginalBytes::Left(hash)
                    if !known.written_in_place && store.can_return(tensor, hash) =>
                {
                    let bytes = PlannedBytes::Original(hash);
                    planned.push(Planned { tensor, bytes });
                }
                _ => {
                    let reason = "its original bytes are gone, because the file was written in place: put the original file back and reload";
                    report.add(known.refused(tensor, reason.into()));
                }
            }
        }
        self.switch(store, &planned, Commits::One, report)?;
        for file in &mut self.files {
            file.id = file.first_id;
            file.mixed = false;
            file.needs_start = None;
            file.forget_attempts();
        }
        for tensor in &mut self.tensors {
            tensor.overlay = None;
        }
        Ok(())
    }

    /// Records that the tensors of these files are now in use.
    fn accept<S: Store>(&mut self, store: &S, changed: &[ChangedFile], report: &mut Report) {
        for file in changed {
            let id = file.gguf.source.id();
            store.trust(file.file, id);
            // A file of another model was refused before.
            let needs_start = self
                .loaded
                .compare(file.file, &file.gguf)
                .unwrap_or_default();
            let watched = &mut self.files[file.file];
            if let Some(keys) = needs_start
                .as_ref()
                .filter(|_| needs_start != watched.needs_start)
            {
                log::warn!("{}: {keys}", text::path(&watched.path));
            }
            watched.needs_start = needs_start.clone();
            watched.id = id;
            watched.mixed = false;
            watched.forget_attempts();
            report.news = true;
            report.files.push(FileReport {
                file: file.file,
                path: watched.path.clone(),
                ignored: None,
                needs_start,
            });
        }
    }
}
