//! What is measured on this machine: products by the program's own ggml, and reads of the model's file.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use memmap2::Mmap;
use rustix::fs::{Advice, fadvise};
use serde::{Deserialize, Serialize};
use sidecar_core::gguf::FileId;
use sidecar_core::protocol::{Event, Measure, Measured, Work};
use sidecar_core::text;

use super::others::Since;
use super::shape::ExpertAt;
use crate::launch::child;
use crate::launch::executable::Executable;
use crate::launch::journal::{Events, Journal};
use crate::launch::kept::{self, Kept};
use crate::launch::run::{Prepared, RunOptions};
use crate::launch::session::Session;
use crate::output::{Outputs, progress};
use crate::temporary;
use crate::trial::server::listen_elsewhere;
use crate::trial::{self, Kind, Program};

/// The list of measurements.
const KEPT: Kept = Kept { name: "measured" };
/// The share of the processors that other programs may take during a measurement.
const DISTURBED: f64 = 0.15;
/// The longest time of a measurement.
const LONGEST: Duration = Duration::from_secs(900);
/// The longest time until a program opens a model that its command does not name. llama-server without a
/// model waits for requests.
const LONGEST_START: Duration = Duration::from_secs(30);
/// Rows of a matrix of an expert that a thread takes at a time, with a single token
/// (`ggml_compute_forward_mul_mat_id`).
const ROWS: u64 = 64;
/// How long page faults are measured.
const FAULTS: Duration = Duration::from_millis(1000);

/// A measurement, and of what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    machine: String,
    program: PathBuf,
    /// The size of the program and its time, and those of the model.
    stamps: Vec<(u64, i64)>,
    wanted: Measure,
    found: Measured,
}

/// What was measured with the program's ggml.
pub struct Found {
    pub measured: Measured,
    /// The share of the processors that other programs took meanwhile, if that was too much.
    pub disturbed: Option<f64>,
    /// Whether it is of an earlier run, and where it is kept.
    pub is_kept: bool,
    pub path: Option<PathBuf>,
}

/// Returns the times of works with the ggml of a program. Those of an earlier run are used unless `again` is
/// true.
pub fn measure(
    of: &Program,
    model: &Path,
    works: &[Work; 4],
    threads: &[u32],
    again: bool,
) -> Result<Found> {
    let program = Executable::find(&of.words[0])?;
    let wanted = Measure {
        works: works.to_vec(),
        threads: threads.to_vec(),
    };
    let stamps = [&*program.path, model].map(stamp).to_vec();
    let is_same = |of: &Entry| {
        of.machine == kept::machine()
            && of.program == program.path
            && of.stamps == stamps
            && of.wanted == wanted
    };
    let mut entries: Vec<Entry> = KEPT.entries();
    if let Some(known) = entries.iter().find(|of| is_same(of)).filter(|_| !again) {
        return Ok(Found {
            measured: known.found.clone(),
            disturbed: None,
            is_kept: true,
            path: KEPT.path(),
        });
    }
    let late = || format!("the measurement did not end after {} s", LONGEST.as_secs());
    let once = || {
        let since = Since::now();
        let (measured, _) = run(of, &program, &wanted, LONGEST, late)?;
        let share = since.and_then(|since| since.share());
        anyhow::Ok((measured, share.filter(|share| *share > DISTURBED)))
    };
    let (mut measured, mut disturbed) = once()?;
    if disturbed.is_some() {
        progress("other programs used the processors meanwhile: measuring once more");
        let (later, share) = once()?;
        if share < disturbed {
            (measured, disturbed) = (later, share);
        }
    }
    if disturbed.is_some() {
        return Ok(Found {
            measured,
            disturbed,
            is_kept: false,
            path: None,
        });
    }
    entries.retain(|of| !is_same(of));
    entries.push(Entry {
        machine: kept::machine(),
        program: program.path,
        stamps,
        wanted,
        found: measured.clone(),
    });
    Ok(Found {
        measured,
        disturbed: None,
        is_kept: false,
        path: KEPT.write(entries)?,
    })
}

/// Returns what changes when a file is replaced.
fn stamp(path: &Path) -> (u64, i64) {
    FileId::of_path(path).map_or((0, 0), |of| (of.size, of.mtime))
}

/// Returns the model that a program opens: variables, a name of a download or a list may name it.
pub fn model_of(of: &Program) -> Result<PathBuf> {
    progress("starting the program for the path of its model, which the command does not name");
    let nothing = Measure {
        works: Vec::new(),
        threads: Vec::new(),
    };
    let late = || {
        format!(
            "the command names no model, and the program opened none in {} s: pass -m MODEL.gguf",
            LONGEST_START.as_secs()
        )
    };
    let program = Executable::find(&of.words[0])?;
    let (_, events) = run(of, &program, &nothing, LONGEST_START, late)?;
    let path = events.iter().find_map(|event| match event {
        Event::Opened { path } => Some(text::path_of(path)),
        _ => None,
    });
    path.context("the program opened no model: pass -m MODEL.gguf")
}

/// Starts the program with the drop-in, which measures in place of loading the model.
fn run(
    of: &Program,
    program: &Executable,
    wanted: &Measure,
    longest: Duration,
    late: impl FnOnce() -> String,
) -> Result<(Measured, Events)> {
    let folder = tempfile::Builder::new()
        .prefix("llama-sidecar-")
        .tempdir()?;
    let request = folder.path().join("measure.json");
    Outputs::default().write(&request, &serde_json::to_string(wanted)?)?;
    let mut set = OsString::from("LLAMA_SIDECAR_MEASURE=");
    set.push(&request);
    let mut words = of.words.clone();
    if of.kind == Kind::Server {
        listen_elsewhere(&mut words)?;
    }
    let prepared = Prepared::new(&RunOptions::with(&["--set".into(), set], &words)?)?;
    if let Some(obstacle) = prepared.obstacle(program) {
        bail!("{obstacle}");
    }
    let journal = Journal::new()?;
    let mut log = temporary::log()?;
    let mut command = prepared.command(program, Some(&journal));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.try_clone()?);
    let mut session = Session::start(&mut command)
        .with_context(|| format!("cannot run {}", text::path(&program.path)))?;
    let ended = of.wait_until(&mut session, Instant::now() + longest, late, || false)?;
    let status = ended.expect("nothing else is waited for");
    let events = journal.read();
    let found = events.iter().find_map(|event| match event {
        Event::Measured { found, error } => Some((found.clone(), error.clone())),
        _ => None,
    });
    match found {
        Some((found, None)) => Ok((found, events)),
        Some((_, Some(error))) => bail!("the program's ggml cannot be measured: {error}"),
        None => {
            let printed = trial::text_of(&mut log)?;
            let cause = child::cause(&printed).map(str::to_owned);
            let obstacle = events.obstacle(Some(status));
            let why = cause.or(obstacle).unwrap_or_default();
            Err(anyhow!(
                "the program ended before it opened its model ({status}): {why}"
            ))
        }
    }
}

/// Returns the useful bytes per second of experts that are read by page faults, as a program without
/// streaming reads them: of matrices that are not in memory, by threads that share one.
pub fn faults(path: &Path, experts: &[ExpertAt], threads: u32) -> io::Result<f64> {
    let file = File::open(path)?;
    // As llama.cpp opens it: the kernel reads ahead more.
    fadvise(&file, 0, None, Advice::Sequential)?;
    // SAFETY: bytes that change under the mapping change a sum alone; a file that is truncated raises
    // SIGBUS, as in the program itself.
    let mapped = unsafe { Mmap::map(&file)? };
    let sum = |offset: u64, len: u64| -> u64 {
        let bytes = mapped.get(offset as usize..(offset + len) as usize);
        let bytes = bytes.unwrap_or_default();
        bytes
            .iter()
            .step_by(4096)
            .map(|&byte| u64::from(byte))
            .sum()
    };
    // Other experts than those of other measurements, which the kernel may still have.
    let (mut total, mut random) = (0, u64::from(threads));
    let mut busy = Duration::ZERO;
    let threads = u64::from(threads.max(1));
    while busy < FAULTS && !experts.is_empty() {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let at = experts[(random >> 33) as usize % experts.len()];
        fadvise(
            &file,
            at.offset,
            NonZeroU64::new(at.bytes),
            Advice::DontNeed,
        )?;
        // ggml gives each thread a part where there are few (ggml_compute_forward_mul_mat_id).
        let chunks = match at.rows / ROWS {
            few if few < 4 * threads => threads,
            many => many,
        };
        let chunk = at.bytes.div_ceil(chunks);
        let barrier = Barrier::new(threads as usize + 1);
        let (next, ended) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    barrier.wait();
                    let taken = || next.fetch_add(1, Ordering::Relaxed);
                    let mut found = 0;
                    for chunk_at in std::iter::repeat_with(taken).take_while(|&of| of < chunks) {
                        let start = (chunk_at * chunk).min(at.bytes);
                        found += sum(at.offset + start, chunk.min(at.bytes - start));
                    }
                    std::hint::black_box(found);
                    ended.fetch_add(1, Ordering::Relaxed);
                    // As threads of ggml do, which takes cores from whatever else reads the file.
                    while ended.load(Ordering::Relaxed) < threads {
                        std::hint::spin_loop();
                    }
                    barrier.wait();
                });
            }
            barrier.wait();
            let begun = Instant::now();
            barrier.wait();
            busy += begun.elapsed();
        });
        total += at.bytes;
    }
    match busy.is_zero() {
        true => Err(io::Error::other("no experts")),
        false => Ok(total as f64 / busy.as_secs_f64()),
    }
}
