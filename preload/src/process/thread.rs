//! Threads of the drop-in, and calls of the drop-in into ggml.

use std::cell::Cell;

use sidecar_core::memory::take_for_thread;
use sidecar_core::signals::without_signals;

thread_local! {
    /// Whether this thread runs code of the drop-in: ggml's functions call each other
    /// through the names that are interposed.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While this value lives, interposed calls of this thread go straight to ggml.
pub struct Inside {
    before: bool,
}

impl Inside {
    /// Marks this thread.
    pub fn enter() -> Inside {
        Inside {
            before: INSIDE.replace(true),
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.before);
    }
}

/// Whether this thread runs code of the drop-in.
pub fn is_inside() -> bool {
    INSIDE.get()
}

/// Starts a thread that handles none of the program's signals. Returns whether it started.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    let builder = std::thread::Builder::new().name(name.into());
    let started = take_for_thread().and_then(|taken| {
        without_signals(|| {
            builder.spawn(|| {
                let (_inside, _taken) = (Inside::enter(), taken);
                work();
            })
        })
    });
    if let Err(error) = &started {
        log::error!("cannot start the thread '{name}': {error}");
    }
    started.is_ok()
}
