//! What a process holds: memory, descriptors, threads.

use std::fs;

use anyhow::{Context, Result};

/// By how much memory that belongs to no file may grow in a run.
pub const GROWTH: u64 = 16 << 20;

/// What a process held at a moment.
#[derive(Debug, Clone, Copy)]
pub struct Vitals {
    /// Resident memory, in bytes.
    pub resident: u64,
    /// Resident memory that belongs to no file, in bytes.
    pub anonymous: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
}

impl Vitals {
    /// Looks at a process.
    pub fn of(process: u32) -> Result<Vitals> {
        let folder = format!("/proc/{process}");
        let path = format!("{folder}/smaps_rollup");
        let memory = fs::read_to_string(&path).with_context(|| path.clone())?;
        let field = |name: &str| {
            let line = memory.lines().find_map(|line| line.strip_prefix(name));
            let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            kib.map(|kib| kib << 10)
                .with_context(|| format!("expected '{name}' in {path}"))
        };
        let count = |name: &str| -> Result<usize> {
            let path = format!("{folder}/{name}");
            Ok(fs::read_dir(&path).with_context(|| path)?.count())
        };
        Ok(Vitals {
            resident: field("Rss:")?,
            anonymous: field("Anonymous:")?,
            descriptors: count("fd")?,
            threads: count("task")?,
        })
    }
}
