//! What evaluates a model: marks when it does, and is told when cached graphs no
//! longer fit.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::Model;
use super::gate::Evaluation;
use crate::error::{Error, Result};
use crate::reload;

/// Called when a reload changed tensors, with the model's new generation.
pub type StaleCallback = dyn Fn(u64) + Send + Sync;

/// Attached to a model, which it keeps alive.
pub struct Context {
    model: Arc<Model>,
    evaluation: Mutex<Option<Evaluation>>,
    listener: Arc<Listener>,
}

/// The part of a context that a reload talks to.
#[derive(Default)]
struct Listener {
    callback: Mutex<Option<Arc<StaleCallback>>>,
}

/// Everybody who is told of a switch.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Vec<Weak<Listener>>>);

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
            evaluation: Mutex::new(None),
            listener,
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Calls `callback` whenever a reload changed tensors: after the switch and
    /// before the next evaluation can begin, on the thread that reloads. It must
    /// not begin an evaluation or reload.
    pub fn on_stale(&self, callback: Option<Arc<StaleCallback>>) {
        *self.listener.callback.lock() = callback;
    }

    /// Begins an evaluation and returns the model's generation, which stays the
    /// same until [`Context::end`]. Waits for a switch that is under way.
    pub fn begin(&self) -> Result<u64> {
        let mut slot = self.evaluation.lock();
        if slot.is_some() {
            return Err(Error::Busy(
                "this context already evaluates: end that evaluation first, or use one context a thread",
            ));
        }
        *slot = Some(self.model.gate.begin()?);
        Ok(self.model.generation())
    }

    /// Ends the evaluation.
    pub fn end(&self) -> Result<()> {
        let evaluation = self.evaluation.lock().take();
        let evaluation = evaluation.ok_or(Error::Busy("this context does not evaluate"))?;
        self.model.gate.end(evaluation);
        Ok(())
    }

    /// Reloads what changed on disk; see [`Model::reload`].
    pub fn reload(&self) -> Result<reload::Report> {
        self.model.reload()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(evaluation) = self.evaluation.get_mut().take() {
            self.model.gate.end(evaluation);
        }
    }
}

impl Listeners {
    pub(super) fn tell(&self, generation: u64) {
        // Called without the lock: a callback may create or free contexts.
        let all: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        for listener in all {
            let callback = listener.callback.lock().clone();
            if let Some(callback) = callback {
                callback(generation);
            }
        }
    }
}

impl std::fmt::Debug for Listeners {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Listeners")
            .field(&self.0.lock().len())
            .finish()
    }
}
