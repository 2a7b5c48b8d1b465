//! Evaluation contexts of a model. A context begins and ends evaluations, and calls back when
//! cached graphs are stale.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Model;
use super::listeners::{Listener, StaleCallback};
use super::quiesce::Evaluation;
use sidecar_core::error::{Error, Result};
use sidecar_core::reload;

/// An evaluation context of a model. Keeps the model alive.
///
/// # Examples
///
/// Reloads a tensor that another program changed in the file, also to another type:
///
/// ```
/// use std::sync::Arc;
///
/// use llama_sidecar::model::{Context, Model, Options};
/// use sidecar_core::reload::Outcome;
///
/// # use testkit::writer::{F16, F32, Gguf};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # Gguf::default().tensor("output.weight", &[64, 32], F32, 1).write(&path)?;
/// let options = Options { hotswap: true, ..Options::host() };
/// let context = Context::new(Arc::new(Model::open(&path, options)?));
/// context.on_stale(Some(Arc::new(|generation| {
///     println!("generation {generation}: graphs that were built before are stale");
/// })));
///
/// // No tensor changes between `begin` and `end`.
/// assert_eq!(context.begin()?, 0);
/// context.end()?;
///
/// // Another program writes a new file and renames it over the path.
/// # Gguf::default().tensor("output.weight", &[64, 32], F16, 2).replace(&path)?;
/// let report = context.reload()?;
/// assert_eq!(report.count(Outcome::Swapped), 1);
/// assert_eq!(context.model().tensor(0).ty().name(), "f16");
/// assert_eq!(context.begin()?, 1);
/// context.end()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Context {
    model: Arc<Model>,
    evaluation: Mutex<Slot>,
    listener: Arc<Listener>,
}

/// The evaluation of a context.
enum Slot {
    Idle,
    /// A thread waits to begin an evaluation. The thread does not hold the lock of the slot
    /// meanwhile, because the stale-graph callback of the awaited switch may need that lock.
    Beginning,
    Evaluates(Evaluation),
}

impl Context {
    /// Attaches a context to a model.
    pub fn new(model: Arc<Model>) -> Context {
        let listener = Arc::new(Listener::default());
        let mut all = model.listeners.0.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&listener));
        drop(all);
        Context {
            model,
            evaluation: Mutex::new(Slot::Idle),
            listener,
        }
    }

    /// Returns the model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Calls `callback` whenever a reload changed tensors: after the switch, before the next
    /// evaluation can begin, on the thread that reloads. The callback must not begin an
    /// evaluation and must not reload.
    pub fn on_stale(&self, callback: Option<Arc<StaleCallback>>) {
        *self.listener.callback.lock() = callback;
    }

    /// Begins an evaluation and returns the generation of the model. The generation stays the
    /// same until [`Context::end`]. Waits for a running switch, and up to 5 seconds for a switch
    /// that waits for other evaluations.
    pub fn begin(&self) -> Result<u64> {
        let mut slot = self.evaluation.lock();
        if !matches!(*slot, Slot::Idle) {
            return Err(Error::Busy(
                "this context already evaluates: end that evaluation first, or use one context per thread",
            ));
        }
        match self.model.barrier.try_begin()? {
            Some(evaluation) => *slot = Slot::Evaluates(evaluation),
            None => {
                *slot = Slot::Beginning;
                drop(slot);
                let begun = self.model.barrier.begin();
                let mut slot = self.evaluation.lock();
                *slot = Slot::Idle;
                *slot = Slot::Evaluates(begun?);
            }
        }
        Ok(self.model.generation())
    }

    /// Ends the evaluation.
    pub fn end(&self) -> Result<()> {
        let mut slot = self.evaluation.lock();
        match std::mem::replace(&mut *slot, Slot::Idle) {
            Slot::Evaluates(evaluation) => {
                drop(slot);
                self.model.barrier.end(evaluation);
                Ok(())
            }
            other => {
                *slot = other;
                Err(Error::Busy(
                    "this context does not evaluate: begin an evaluation first",
                ))
            }
        }
    }

    /// Reloads changed files; see [`Model::reload`].
    pub fn reload(&self) -> Result<reload::Report> {
        self.model.reload()
    }

    /// Reverts overlays and sets others; see [`Model::overlay`].
    pub fn overlay(
        &self,
        revert: &[usize],
        set: &[(usize, &reload::OverlaySource)],
    ) -> Result<reload::Report> {
        self.model.overlay(revert, set)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let slot = std::mem::replace(self.evaluation.get_mut(), Slot::Idle);
        if let Slot::Evaluates(evaluation) = slot {
            self.model.barrier.end(evaluation);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use tempfile::TempDir;

    use super::super::Options;
    use super::super::quiesce::{EvalBarrier, Limits};
    use super::*;
    use sidecar_core::gguf::{HeaderWriter, TypeInfo};
    use sidecar_core::reload::Outcome;

    /// Puts a model of one tensor of 64 elements there, by rename.
    fn write(ty: &str, path: &Path) {
        let ty = TypeInfo::from_name(ty).unwrap();
        let data = vec![0x11; 64 * ty.bytes as usize];
        let mut header = HeaderWriter::new(32);
        let name = b"output_norm.weight";
        let written = header.tensor(name, &[64], ty.id, data.len() as u64);
        written.unwrap();
        let beside = path.with_extension("new");
        std::fs::write(&beside, [header.finish(), data].concat()).unwrap();
        std::fs::rename(beside, path).unwrap();
    }

    /// A model whose switches wait for `limits`, and its file.
    fn open(limits: Limits) -> (TempDir, PathBuf, Arc<Model>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        write("f32", &path);
        let options = Options {
            hotswap: true,
            ..Options::host()
        };
        let mut model = Model::open(&path, options).unwrap();
        model.barrier = EvalBarrier::with(limits);
        (folder, path, Arc::new(model))
    }

    #[test]
    fn a_reload_that_gives_up_changes_nothing_and_can_be_repeated() {
        let (_folder, path, model) = open(Limits {
            hold: Duration::ZERO,
            timeout: Duration::ZERO,
        });
        let (evaluating, other) = (Context::new(model.clone()), Context::new(model.clone()));
        evaluating.begin().unwrap();
        write("f16", &path);
        std::thread::scope(|scope| {
            let reload = scope.spawn(|| other.reload()).join().unwrap();
            assert!(matches!(reload, Err(Error::Busy(_))), "{reload:?}");
        });
        assert_eq!(model.generation(), 0);
        assert_eq!(model.tensor(0).ty().name(), "f32");
        assert_eq!(other.begin().unwrap(), 0, "evaluations begin again");
        other.end().unwrap();
        evaluating.end().unwrap();
        let report = other.reload().unwrap();
        assert_eq!(report.count(Outcome::Swapped), 1);
        assert_eq!(model.tensor(0).ty().name(), "f16");
    }

    #[test]
    fn a_context_that_waits_to_begin_still_answers() {
        let (_folder, path, model) = open(Limits::default());
        let waits = Arc::new(Context::new(model.clone()));
        let (thread, inside) = (Arc::new(Mutex::new(None)), Arc::downgrade(&waits));
        let begun = thread.clone();
        let reloads = Context::new(model);
        reloads.on_stale(Some(Arc::new(move |_| {
            let context = inside.upgrade().expect("the test holds it");
            let other = context.clone();
            *begun.lock() = Some(std::thread::spawn(move || other.begin()));
            // As soon as the thread waits for this switch, the context is in use.
            let in_use = |error: Error| error.to_string().contains("already evaluates");
            while !context.begin().is_err_and(in_use) {
                std::thread::yield_now();
            }
            assert!(context.end().is_err(), "it has not begun yet");
        })));
        write("f16", &path);
        assert_eq!(reloads.reload().unwrap().count(Outcome::Swapped), 1);
        let begun = thread.lock().take().expect("the callback was called");
        assert_eq!(begun.join().unwrap().unwrap(), 1);
        waits.end().unwrap();
    }
}
