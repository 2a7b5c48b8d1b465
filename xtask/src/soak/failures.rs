//! What goes wrong in a run.

use std::collections::BTreeMap;
use std::sync::Mutex;

use anyhow::{Result, ensure};

/// How many failures of a kind are printed.
const TOLD: usize = 5;

/// What went wrong; empty at the end of a good run.
#[derive(Default)]
pub struct Failures(Mutex<BTreeMap<String, Vec<String>>>);

impl Failures {
    /// Takes note of a failure.
    pub fn add(&self, kind: &str, what: impl Into<String>) {
        let mut all = self.0.lock().expect("no panic");
        all.entry(kind.to_owned()).or_default().push(what.into());
    }

    /// Prints the failures; an error when there are any.
    pub fn tell(&self) -> Result<()> {
        let all = self.0.lock().expect("no panic");
        for (kind, failures) in all.iter() {
            println!("FAILED: {kind}, {} times", failures.len());
            for failure in failures.iter().take(TOLD) {
                println!("    {failure}");
            }
        }
        ensure!(
            all.is_empty(),
            "the soak failed: {}",
            all.keys().cloned().collect::<Vec<_>>().join("; ")
        );
        Ok(())
    }
}
