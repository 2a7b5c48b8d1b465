//! The nodes of a scheduler's graph at which routed experts are known.
//!
//! Records are kept for the next graph of the same scheduler and are never freed: a node of a graph
//! that was replaced finds a record of another node, and is ignored.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sidecar_core::experts::Projection;

use crate::program::models::{Model, TensorPointer};

/// What routed ids are for.
pub struct Record {
    /// The ids.
    pub ids: TensorPointer,
    /// The node that calls the function. Compared only.
    pub node: usize,
    /// The model.
    pub model: Arc<Model>,
    /// The number of the layer.
    pub layer: u32,
    /// The matrices of the layer, and where each is while it is in the mapping of its file.
    pub matrices: Vec<(Projection, TensorPointer, usize)>,
    /// Whether the ids are the first of a ranking, and its scores are logits.
    pub ranked_by_logits: Option<bool>,
}

/// A record that a node points to, for as long as the process lives.
pub type Place = Mutex<Option<Record>>;

/// The records of one scheduler.
pub struct Watched {
    /// The records; those that the last graph does not use are empty.
    pub places: Mutex<Vec<&'static Place>>,
    is_mixed: AtomicBool,
}

impl Watched {
    /// Returns those of a scheduler without a graph.
    pub const fn none() -> Watched {
        Watched {
            places: Mutex::new(Vec::new()),
            is_mixed: AtomicBool::new(false),
        }
    }

    /// Whether parts of the last graph are evaluated on other devices than the CPU.
    pub fn is_mixed(&self) -> bool {
        self.is_mixed.load(Ordering::Relaxed)
    }

    /// Records whether they are.
    pub fn set_mixed(&self, is_mixed: bool) {
        self.is_mixed.store(is_mixed, Ordering::Relaxed);
    }

    /// Forgets the graph.
    pub fn forget(&self) {
        for place in self.places.lock().iter() {
            *place.lock() = None;
        }
    }
}
