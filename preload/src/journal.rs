//! What happened in this process, for the wrapper that started it: a line of JSON for
//! each event, appended to the file that `LLAMA_SIDECAR_JOURNAL` names.
//!
//! Without the variable, nothing here does anything.

use std::io::Write;

use llama_sidecar::config::Config;
use serde_json::{Value, json};

/// Runs when the library is loaded, in every program of a command: that the loader took
/// it is the first thing that a wrapper wants to know.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = loaded;

extern "C" fn loaded() {
    // SAFETY: reads the environment before any other thread of the program can exist.
    let asked = unsafe { libc::getenv(c"LLAMA_SIDECAR_JOURNAL".as_ptr()) };
    if asked.is_null() {
        return;
    }
    let program = std::env::current_exe().unwrap_or_default();
    note(
        "loaded",
        || json!({"program": program.display().to_string()}),
    );
}

/// Notes an event. `what` is put together only if somebody wants to know.
pub fn note(event: &str, what: impl FnOnce() -> Value) {
    let Some(path) = &Config::get().journal else {
        return;
    };
    let mut line = json!({"event": event, "pid": std::process::id()});
    if let (Some(line), Value::Object(what)) = (line.as_object_mut(), what()) {
        line.extend(what);
    }
    let file = std::fs::OpenOptions::new().append(true).open(path);
    // In one write: other processes of the command append too. A wrapper that is gone
    // does not need to know.
    let _ = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
}
