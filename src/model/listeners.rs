//! The callbacks of all contexts of a model.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Receives the new generation of the model after a reload changed tensors.
pub type StaleCallback = dyn Fn(u64) + Send + Sync;

/// The callback of a context.
#[derive(Default)]
pub(super) struct Listener {
    pub callback: Mutex<Option<Arc<StaleCallback>>>,
}

/// The callbacks of all contexts of a model.
#[derive(Default)]
pub(super) struct Listeners(pub Mutex<Vec<Weak<Listener>>>);

impl Listeners {
    pub(super) fn notify(&self, generation: u64) {
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
