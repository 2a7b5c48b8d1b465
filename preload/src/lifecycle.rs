//! The capabilities of the drop-in, and its start and end in this process.
//!
//! Threads start when the first model is complete. In a forked child the drop-in is off, and
//! it calls nothing of ggml once the process exits.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use sidecar_core::config::Config;
use sidecar_core::experts::{ExpertIndex, Routing};
use sidecar_core::files;
use sidecar_core::logger;
use sidecar_core::protocol::{Event, NoEffect};
use sidecar_core::signals::Blocked;
use sidecar_core::text;

use crate::control::{self, clients};
use crate::hotswap::reloader::{self, HotSwap};
use crate::logits::Logits;
use crate::masking::ExpertMasks;
use crate::postfetch::PostFetch;
use crate::postfetch::page_lock::PageLock;
use crate::process::{journal, signals};
use crate::profile::AtLoad;
use crate::program::capability::{Capability, begin, set_begin};
use crate::program::models::Model;
use crate::program::{barrier, sched};
use crate::rounds::Rounds;
use crate::rounds::files::RoundFiles;
use crate::streaming::Streaming;
use crate::trace::counts::ExpertTrace;
use crate::trace::routes::Routes;
use crate::trace::saliency::Saliency;

/// The capabilities, in the order in which events are reported to them.
static CAPABILITIES: [&dyn Capability; 12] = [
    &Rounds,
    &Logits,
    &ExpertMasks,
    &ExpertTrace,
    &Routes,
    &Saliency,
    &Streaming,
    &PageLock,
    &PostFetch,
    &HotSwap,
    &AtLoad,
    &RoundFiles,
];

/// Whether the drop-in is disabled.
static OFF: AtomicBool = AtomicBool::new(false);
/// Whether this process is a forked child of the one in which the drop-in was started.
static FORKED: AtomicBool = AtomicBool::new(false);
/// How long the exit of the process waits for a reload to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// What an internal error ends.
const DISABLED: &str = "a defect of llama-sidecar: hot-swap, expert trace, expert streaming and post-fetch are off in this process from here on, and the program goes on without them; report it with the message above";

/// Whether any capability is enabled and the drop-in works in this process.
pub fn is_on() -> bool {
    !OFF.load(Ordering::Relaxed) && CAPABILITIES.iter().any(|of| of.is_enabled())
}

/// Logs once, before the first model is loaded, which settings were rejected or have no effect, and
/// which outputs cannot be written. `run` does that itself, and sets the journal.
pub fn report_settings() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        files::begin();
        let config = Config::get();
        if config.journal.is_some() {
            return;
        }
        if !config.rejected.is_empty() {
            // It logs them.
            logger::init();
        }
        for sentence in config.unwritable() {
            logger::init();
            log::error!("{sentence}");
        }
        for sentence in &config.without_effect {
            logger::init();
            log::warn!("{sentence}");
        }
    });
}

/// Whether any capability is to be informed of routed experts.
pub fn uses_routing() -> bool {
    CAPABILITIES.iter().any(|of| of.uses_routing())
}

/// Whether any capability is to be informed of weights that a scheduler copies to a device.
pub fn uses_copies() -> bool {
    CAPABILITIES.iter().any(|of| of.uses_copies())
}

/// Reports an event to all capabilities.
pub fn report(event: impl Fn(&dyn Capability)) {
    for capability in CAPABILITIES {
        event(capability);
    }
}

/// Reports a model that is complete; starts what runs beside the program with the first one.
pub fn model_complete(model: &Arc<Model>) {
    report(|to| to.model_complete(model));
    static STARTED: Once = Once::new();
    STARTED.call_once(start);
    journal::note_once(|| {
        let files = || model.files.iter().map(|file| &file.gguf);
        let predicting = Routing::of(files()).predicting;
        let layers = ExpertIndex::of(files());
        let layers = layers
            .layers()
            .filter(|(layer, _)| !predicting.contains(layer));
        Event::Model {
            path: text::path(model.files[0].gguf.source.path()),
            files: model.files.len(),
            tensors: model.tensors.len(),
            expert_layers: layers.count(),
            predicting: (!predicting.is_empty()).then_some(predicting.start),
            experts_used: model.experts_used().into_iter().collect(),
        }
    });
}

fn start() {
    // SAFETY: both only register functions that stay loaded with this library, which the
    // loader never unloads.
    unsafe {
        libc::atexit(at_exit);
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_in_parent),
            Some(after_fork_in_child),
        );
    }
    set_begin(begin_shared);
    for capability in CAPABILITIES.iter().filter(|of| of.is_enabled()) {
        capability.start();
        if !capability.begins_later() {
            begin();
        }
    }
    if Config::get().control.is_some() {
        begin();
    }
}

/// Starts the threads that all capabilities share.
fn begin_shared() {
    signals::finish_on_signals(finish);
    let config = Config::get();
    if let Some(path) = config.control.as_ref().or(config.stream_socket.as_ref()) {
        control::start(&path.now(), config.control.is_some(), no_effect);
    }
}

/// Disables the drop-in after an internal error: every capability is off.
pub fn disable() {
    barrier::shut();
    if !OFF.swap(true, Ordering::SeqCst) {
        report(|to| to.disabled());
        log::error!("{DISABLED}");
    }
}

/// Runs before the program's libraries are torn down: from here on nothing calls into them.
extern "C" fn at_exit() {
    OFF.store(true, Ordering::SeqCst);
    if FORKED.load(Ordering::SeqCst) {
        // The socket and the trace are the parent's.
        return;
    }
    barrier::shut();
    finish();
    reloader::wait_for_end(EXIT_TIMEOUT);
}

/// Writes what capabilities keep, removes the socket, and notes the end in the journal.
fn finish() {
    report(|to| to.finish());
    for found in no_effect() {
        // What is final was logged when it was found.
        if found.so_far {
            log::warn!("{}", found.sentence);
        }
        journal::note(|| Event::NoEffect { found });
    }
    clients::stop();
    journal::note(|| Event::End {
        evaluations: sched::count(),
        switches: barrier::generation(),
        longest_pause_us: barrier::pauses().longest_us(),
    });
}

/// Returns what was requested and had no effect so far.
fn no_effect() -> Vec<NoEffect> {
    let enabled = CAPABILITIES.iter().filter(|of| of.is_enabled());
    let of_socket = control::no_effect().into_iter();
    enabled
        .flat_map(|of| of.no_effect())
        .chain(of_socket)
        .collect()
}

thread_local! {
    /// From before a fork until after it, so that no handler forks meanwhile.
    static FORKING: Cell<Option<Blocked>> = const { Cell::new(None) };
}

extern "C" fn before_fork() {
    if !FORKED.load(Ordering::SeqCst) {
        let blocked = Blocked::all();
        barrier::hold_for_fork();
        report(|to| to.before_fork());
        // Fails on a thread that is ending, as below.
        let _ = FORKING.try_with(|of| of.set(Some(blocked)));
    }
}

extern "C" fn after_fork_in_parent() {
    if !FORKED.load(Ordering::SeqCst) {
        report(|to| to.after_fork());
    }
    barrier::release_after_fork();
    let _ = FORKING.try_with(Cell::take);
}

/// Turns the drop-in off: its threads do not exist in a forked child, and locks may be held
/// for ever.
extern "C" fn after_fork_in_child() {
    FORKED.store(true, Ordering::SeqCst);
    OFF.store(true, Ordering::SeqCst);
    let _ = FORKING.try_with(Cell::take);
}
