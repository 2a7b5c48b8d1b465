//! The simulated GPU that a host loads as a ggml backend, and its report.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::host::{Host, built};

/// The simulated GPU for one process.
#[derive(Debug)]
pub struct SimGgml {
    folder: tempfile::TempDir,
    settings: Vec<(String, String)>,
}

/// What the simulated GPU reports at the end of a process. Times are virtual, in nanoseconds.
#[derive(Debug, Clone, Deserialize)]
pub struct Report {
    /// Calls of each function.
    pub calls: BTreeMap<String, u64>,
    /// Calls that failed on demand.
    pub failed: u64,
    /// Calls without effect, on demand.
    pub ignored: u64,
    /// Graphs that were replayed as they had been captured.
    pub replays: u64,
    /// Accesses of device memory.
    pub accesses: u64,
    /// Accesses that nothing orders.
    pub unordered: u64,
    /// Accesses of memory that is not allocated.
    pub unknown_memory: u64,
    /// The first of both.
    pub examples: Vec<String>,
    /// Each device.
    pub devices: Vec<Device>,
    /// Streams, in the order of their start.
    pub streams: Vec<Stream>,
    /// Threads of the host, in the order of their first call.
    pub threads: Vec<Thread>,
    /// Products of routed weights, in the order of the computation.
    pub products: Vec<Product>,
}

/// What one device did.
#[derive(Debug, Clone, Deserialize)]
pub struct Device {
    /// The link.
    pub link: Links,
    /// Time in which a kernel runs.
    pub kernel_ns: u64,
    /// Time in which a kernel runs and a copy to the device, too.
    pub overlap_ns: u64,
    /// Bytes of its memory.
    pub memory: Memory,
}

/// Both directions of the link.
#[derive(Debug, Clone, Deserialize)]
pub struct Links {
    /// From the host.
    pub to_device: Link,
    /// To the host.
    pub from_device: Link,
}

/// One direction of the link.
#[derive(Debug, Clone, Deserialize)]
pub struct Link {
    /// Bytes copied.
    pub bytes: u64,
    /// Time in which it is busy.
    pub busy_ns: u64,
    /// Copies from or to page-locked memory.
    pub copies_locked: u64,
    /// Other copies.
    pub copies_pageable: u64,
}

/// Bytes of device memory.
#[derive(Debug, Clone, Deserialize)]
pub struct Memory {
    /// At the end.
    pub now: u64,
    /// At most.
    pub peak: u64,
}

/// A stream.
#[derive(Debug, Clone, Deserialize)]
pub struct Stream {
    /// Its name in examples.
    pub name: String,
    /// Its time.
    pub time_ns: u64,
    /// Waits for events of other streams.
    pub event_waits: u64,
    /// Pieces of work.
    pub works: u64,
    /// The most events at a time that were recorded and for which no thread had waited.
    pub most_open_events: u64,
    /// Time of its kernels.
    pub kernel_ns: u64,
    /// Time of its copies.
    pub copy_ns: u64,
    /// Time without work.
    pub waited_for_host_ns: u64,
    /// Time before events of other streams.
    pub waited_for_events_ns: u64,
    /// Time before copies of other streams.
    pub waited_for_link_ns: u64,
}

/// A thread of the host.
#[derive(Debug, Clone, Deserialize)]
pub struct Thread {
    /// Its name in examples.
    pub name: String,
    /// Its time.
    pub time_ns: u64,
    /// Time in which it waited for the device.
    pub waited_ns: u64,
}

/// A product of routed weights on the device.
#[derive(Debug, Clone, Deserialize)]
pub struct Product {
    /// The name of the node, which ends with the number of its layer.
    pub name: String,
    /// The stream that computed it.
    pub stream: String,
    /// Its start.
    pub start_ns: u64,
    /// Its end.
    pub end_ns: u64,
    /// Experts that it used.
    pub experts: u64,
}

/// The library, which `GGML_BACKEND_PATH` names.
///
/// Panics with the command that makes it when it is not there.
pub fn library() -> PathBuf {
    built("sim-ggml/libsim_ggml.so")
}

impl SimGgml {
    /// A simulated GPU with these variables; `tests/sim-ggml/src/lib.rs` lists them.
    pub fn new(settings: &[(&str, &str)]) -> SimGgml {
        let folder = tempfile::tempdir().expect("a folder");
        let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();
        let mut all = vec![
            ("GGML_BACKEND_PATH".to_owned(), text(&library())),
            (
                "SIM_GGML_REPORT".to_owned(),
                text(&folder.path().join("report")),
            ),
        ];
        let settings = settings.iter();
        all.extend(settings.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        SimGgml {
            folder,
            settings: all,
        }
    }

    /// The variables of a process that loads it.
    pub fn variables(&self) -> &[(String, String)] {
        &self.settings
    }

    /// Lets a process load it that is about to be started. With `SIM_GGML_CLOCK`, it replaces the
    /// clock of the process.
    pub fn prepare(&self, command: &mut Command) {
        command.envs(self.variables().iter().cloned());
        if self.variables().iter().any(|of| of.0 == "SIM_GGML_CLOCK") {
            let preloaded = command.get_envs().find(|of| of.0 == "LD_PRELOAD");
            let preloaded = preloaded.and_then(|of| of.1).unwrap_or_default();
            let mut all = library().into_os_string();
            all.push(" ");
            all.push(preloaded);
            command.env("LD_PRELOAD", all);
        }
    }

    /// The report of what happened so far in a Python host.
    pub fn report_now(&self, host: &mut Host) -> Report {
        let path = self.folder.path().join("now");
        assert_eq!(host.ask(&format!("report {}", path.display())), "written");
        read(&path)
    }

    /// The report of the process, which has ended. Of a process that crashed, it is the one
    /// after the first finding.
    pub fn report(&self) -> Report {
        read(&self.folder.path().join("report"))
    }

    /// The report of the second simulated GPU that a Python host had.
    pub fn second_report(&self) -> Report {
        read(&self.folder.path().join("report.2"))
    }
}

fn read(path: &Path) -> Report {
    let text = std::fs::read(path).expect("the process loaded the simulated GPU and ended");
    serde_json::from_slice(&text).expect("a report")
}

impl Report {
    /// The first device, of which most tests have no second one.
    pub fn first(&self) -> &Device {
        &self.devices[0]
    }

    /// Calls of a function.
    pub fn calls(&self, name: &str) -> u64 {
        let calls = self.calls.get(name);
        *calls.unwrap_or_else(|| panic!("the simulated GPU has no function {name}"))
    }

    /// Panics when an access was not ordered, or was one of memory that is not allocated.
    pub fn assert_ordered(&self) {
        assert_eq!(
            (self.unordered, self.unknown_memory),
            (0, 0),
            "{:#?}",
            self.examples
        );
    }
}
