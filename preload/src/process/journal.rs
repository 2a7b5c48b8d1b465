//! Events of this process, for the command that started it: a line of JSON for each event,
//! appended to the file that `LLAMA_SIDECAR_JOURNAL` names. Without the variable, there is no
//! journal.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use parking_lot::Mutex;
use sidecar_core::config::Config;
use sidecar_core::descriptors::{self, Kept};
use sidecar_core::files;
use sidecar_core::protocol::{self, Entry, Event};
use sidecar_core::text;

/// Runs when the library is loaded, in every program of a command: the first event shows that
/// the loader accepted the library.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    // SAFETY: reads the environment before any other thread of the program can exist.
    let journal = unsafe { libc::getenv(c"LLAMA_SIDECAR_JOURNAL".as_ptr()) };
    if journal.is_null() {
        return;
    }
    let program = std::env::current_exe().unwrap_or_default();
    note(|| Event::Loaded {
        program: text::path(&program),
    });
}

/// Appends an event. `event` is called only where a journal is written.
pub fn note(event: impl FnOnce() -> Event) {
    write(event, |_| true);
}

/// Appends an event that the journal does not have yet: a program may load a model many times.
pub fn note_once(event: impl FnOnce() -> Event) {
    write(event, is_first);
}

/// Appends the first event about `what`: later ones have other figures.
pub fn note_first(what: &str, event: impl FnOnce() -> Event) {
    write(event, |_| is_first(what));
}

fn is_first(what: &str) -> bool {
    static NOTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    NOTED.lock().insert(what.to_owned())
}

fn write(event: impl FnOnce() -> Event, is_wanted: impl FnOnce(&str) -> bool) {
    let Some(path) = &Config::get().journal else {
        return;
    };
    let entry = Entry {
        pid: std::process::id(),
        event: event(),
    };
    let line = protocol::line(&entry);
    if !is_wanted(&line) {
        return;
    }
    let mut options = OpenOptions::new();
    options
        .read(true)
        .append(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    // In one write, because other processes of the command append too. The command may have
    // ended: a failed write is ignored.
    let _ = descriptors::open(&options, path)
        .and_then(Kept::new)
        .and_then(|file| match files::goes_on(file.get()?, br#"{"pid":"#)? {
            true => file.write_all(line.as_bytes()),
            false => Ok(()),
        });
}
