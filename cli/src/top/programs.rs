//! Programs that are watched, and what a person may do with them.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::Result;
use sidecar_core::protocol::Request;

use crate::control;
use crate::top::sample::Program;

/// How long an action may take. A switch waits a minute for an evaluation.
const PATIENCE: Duration = Duration::from_secs(120);

/// Programs that threads take samples of.
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

    /// Starts a thread for each program that takes samples, for ever or so many; what is returned is disconnected when
    /// all have ended.
    pub fn watch(&self, interval: Duration, samples: Option<u64>) -> Receiver<()> {
        let (ends, ended) = channel();
        for (at, mut program) in self.look().clone().into_iter().enumerate() {
            let (programs, ends) = (self.clone(), ends.clone());
            std::thread::spawn(move || {
                let _ends = ends;
                let mut number = 0;
                while samples.is_none_or(|samples| number < samples) {
                    // Without the lock: a program that does not answer delays no other one.
                    program.update();
                    programs.look()[at] = program.clone();
                    number += 1;
                    std::thread::sleep(interval);
                }
            });
        }
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
        control::ask_within(socket, &request, PATIENCE).map(drop)
    }
}
