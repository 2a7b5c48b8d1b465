//! Programs that are watched, and what a person may do with them.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Result, bail};
use sidecar_core::protocol::{Reply, Request};

use crate::control;
use crate::top::sample::Program;

/// Programs that a thread takes samples of.
#[derive(Clone)]
pub struct Programs(Arc<Mutex<Vec<Program>>>);

impl Programs {
    /// Programs without further samples.
    pub fn of(programs: Vec<Program>) -> Programs {
        Programs(Arc::new(Mutex::new(programs)))
    }

    /// Returns the last samples. Keep them for as long only as they are shown.
    pub fn look(&self) -> MutexGuard<'_, Vec<Program>> {
        self.0.lock().expect("no panic")
    }

    /// Starts the thread that takes samples, for ever or so many; it sends when it ends.
    pub fn watch(&self, interval: Duration, samples: Option<u64>) -> Receiver<()> {
        let (ends, ended) = channel();
        let programs = self.clone();
        std::thread::spawn(move || {
            // A program that does not answer does not stop what is shown, which has the lock only to draw.
            let mut asked = programs.look().clone();
            let mut number = 0;
            while samples.is_none_or(|samples| number < samples) {
                for (at, program) in asked.iter_mut().enumerate() {
                    program.update();
                    programs.look()[at] = program.clone();
                }
                number += 1;
                std::thread::sleep(interval);
            }
            let _ = ends.send(());
        });
        ended
    }
}

/// What a person may do with a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Reload,
    Revert,
    Unfreeze,
}

impl Action {
    /// Returns the action of this name.
    pub fn named(name: &str) -> Option<Action> {
        let all = [Action::Reload, Action::Revert, Action::Unfreeze];
        all.into_iter().find(|action| action.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Action::Reload => "reload",
            Action::Revert => "revert",
            Action::Unfreeze => "unfreeze",
        }
    }

    /// Does it in the program at a socket. A switch may have to wait for an evaluation.
    pub fn apply(self, socket: &Path) -> Result<()> {
        let request = match self {
            Action::Reload => Request::Reload,
            Action::Revert => Request::Revert,
            Action::Unfreeze => Request::Unfreeze,
        };
        match control::parsed(&control::ask(socket, &request)?)? {
            Reply { ok: true, .. } => Ok(()),
            Reply { error, .. } => {
                bail!(
                    "{}",
                    error.unwrap_or_else(|| "see llama-sidecar status".into())
                )
            }
        }
    }
}
