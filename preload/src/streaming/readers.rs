//! Expert streaming: experts of a model that is larger than memory are read from disk as soon
//! as their layer is routed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sidecar_core::config::{Config, ExpertStream};
use sidecar_core::experts::ExpertName;
use sidecar_core::memory::free_memory;
use sidecar_core::protocol::{Event, NoEffect, StreamFigures};
use sidecar_core::signals;
use sidecar_core::stream::program::{self, Allocation};
use sidecar_core::stream::{Mapped, Matrices, Other, Reader, Settings, Span};
use sidecar_core::text;
use sidecar_core::trace::{self, Ids};

use crate::ggml::Ggml;
use crate::process::journal;
use crate::process::maps::Maps;
use crate::program::barrier::ModelSet;
use crate::program::capability::{Capability, Effect, begin};
use crate::program::graph::Context;
use crate::program::models::{Instance, Model};
use crate::program::routing::{self, Ranked, Routed};
use crate::program::sched::{Allocated, Scheduler};
use crate::program::weight_copies::{self, WeightCopy};
use crate::streaming::load;

/// Whether layers of models that are freed were scheduled, and why no layer of others is.
static EFFECT: Effect = Effect::of(NoEffect::STREAMING);

/// Whether experts in memory were preferred in a layer.
static PREFERENCE: Effect = Effect::of(NoEffect::PREFERENCE);
/// Why none is.
const NOT_PREFERRED: &str = "experts in memory are not preferred: no layer was computed on the CPU whose scores llama.cpp sorts there, and whose experts are kept in memory of the process, or all experts fit into it; limit that memory with --stream-memory, or see docs/streaming.md";

/// Expert streaming, as a capability.
pub struct Streaming;

/// Why an evaluation scheduled no layer.
const NOT_UNDERSTOOD: &str = "its graph was not understood, so its experts are read as without streaming: set LLAMA_SIDECAR_LOG=warn to see the operation, and report it with the version of llama.cpp";

/// The reader of a model.
struct Stream {
    /// The number of the model.
    model: u64,
    /// The set of the model.
    set: ModelSet,
    path: String,
    reader: Reader,
    /// Where expert matrices are mapped, ascending.
    mapped: Vec<MappedMatrix>,
    /// The position of the layer of which a scheduler copied a matrix last.
    copied: AtomicUsize,
    /// Bytes of the experts, and of the model's other mapped tensors.
    bytes: (u64, u64),
    /// The largest context that a graph of the model has, until the first evaluation has ended.
    context: Mutex<Context>,
    /// What is known since the first evaluation has ended.
    started: OnceLock<Started>,
}

/// What is known of a model's memory once an evaluation has ended.
struct Started {
    context: Context,
    /// Bytes of experts that fit then, and that are missing where none fits.
    fitting: (u64, u64),
}

/// Where a matrix of the experts of a layer is mapped.
struct MappedMatrix {
    bytes: Range<usize>,
    /// The position of its layer.
    layer: usize,
    matrix: Matrices,
}

/// Why a model is not streamed with `needed`.
const FITS: &str =
    "it fits into the free memory, or has no routed experts: nothing is to be streamed";

/// How long a fork and the end of the process wait for a lock.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread holds [`STREAMS`] during a fork.
    static HOLDS: Cell<bool> = const { Cell::new(false) };
}

/// The readers of models that the program has.
static STREAMS: RwLock<Vec<Stream>> = RwLock::new(Vec::new());
/// The figures of models that the program has freed, by path, with the number of the last one.
static FREED: Mutex<BTreeMap<String, (u64, StreamFigures)>> = Mutex::new(BTreeMap::new());

impl Capability for Streaming {
    fn is_enabled(&self) -> bool {
        Config::get().expert_stream.streams()
    }

    fn begins_later(&self) -> bool {
        Config::get().expert_stream == ExpertStream::Needed
    }

    fn uses_routing(&self) -> bool {
        self.is_enabled() && load::has_any()
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if self.is_enabled() {
            start(model);
        }
    }

    fn model_freed(&self, model: &Model) {
        let stream = {
            let mut streams = STREAMS.write();
            let at = streams
                .iter()
                .position(|stream| stream.model == model.number);
            at.map(|at| streams.remove(at))
        };
        if let Some(stream) = stream {
            if stream.reader.layers() > 0 {
                EFFECT.note();
            }
            stream.add_to(&mut FREED.lock());
        }
    }

    fn routed(&self, routed: &Routed<'_>) {
        let streams = STREAMS.read();
        if let Some(stream) = of_model(&streams, routed.model)
            && let Some(layer) = stream.reader.position(routed.layer)
        {
            let reader = &stream.reader;
            reader.schedule(layer, routed.mapped, &routed.ids);
            reader.wait(layer, routed.mapped);
        }
    }

    fn uses_copies(&self) -> bool {
        self.uses_routing()
    }

    unsafe fn weight_copied(&self, of: &WeightCopy) {
        // SAFETY: as the caller ensures; only the list of readers is locked.
        copied(of.from(), false, || unsafe { of.read_ids() });
    }

    unsafe fn bytes_copied(&self, ggml: &Ggml, from: usize) {
        // SAFETY: as the caller ensures; the bytes are those of experts.
        copied(from, false, || unsafe {
            weight_copies::requested_ids(ggml)
        });
    }

    fn experts_missed(&self, from: usize, ids: &Ids<'_>) {
        copied(from, true, || Some(*ids));
    }

    fn evaluation_begun(&self, _scheduler: &Scheduler) {
        for stream in STREAMS.read().iter() {
            stream.copied.store(usize::MAX, Ordering::Relaxed);
        }
    }

    fn evaluation_ended(&self, scheduler: &Scheduler) {
        for stream in STREAMS.read().iter() {
            if stream.started.get().is_none() && scheduler.reads(stream.set) {
                stream.note_start();
            }
        }
    }

    fn graph_allocated(&self, scheduler: &Scheduler, graph: &Allocated, _keeps: bool) {
        for stream in STREAMS.read().iter() {
            if stream.started.get().is_none() && scheduler.reads(stream.set) {
                // SAFETY: the graph is live, and of the scheduler's copy.
                let found = unsafe { Context::of(scheduler.ggml(), graph.graph) };
                let mut context = stream.context.lock();
                if found.freed > context.freed {
                    *context = found;
                }
            }
        }
    }

    fn disabled(&self) {
        end_readers();
    }

    fn before_fork(&self) {
        // The same readers are there after the fork.
        if let Some(streams) = signals::lock_around_fork(LONGEST_WAIT, || STREAMS.try_read()) {
            streams
                .iter()
                .for_each(|stream| stream.reader.before_fork());
            std::mem::forget(streams);
            HOLDS.set(true);
        }
    }

    fn after_fork(&self) {
        if HOLDS.replace(false) {
            // SAFETY: this thread locked it before the fork, and forgot the guard. Nothing changes it meanwhile.
            let streams = unsafe { &*STREAMS.data_ptr() };
            streams.iter().for_each(|stream| stream.reader.after_fork());
            // SAFETY: as above.
            unsafe { STREAMS.force_unlock_read() };
        }
    }

    fn finish(&self) {
        end_readers();
        // The process ends: a thread that holds the lock may never release it.
        let (Some(streams), Some(freed)) = (STREAMS.try_read(), FREED.try_lock()) else {
            return;
        };
        let mut by_path = freed.clone();
        for stream in streams.iter() {
            stream.add_to(&mut by_path);
        }
        for (model, figures) in by_path.into_values() {
            journal::note(|| Event::Stream { model, figures });
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        let Some(streams) = STREAMS.try_read() else {
            return Vec::new();
        };
        let is_idle = |stream: &Stream| stream.reader.layers() == 0;
        let mut missing = match streams.iter().any(|stream| !is_idle(stream)) || !load::has_any() {
            true => EFFECT.obstacles(),
            false => EFFECT.missing(|| match streams.first() {
                Some(stream) => format!(
                    "nothing was streamed: {}: no layer with routed experts in host memory was computed; let the program generate a token, with experts on the CPU",
                    stream.path
                ),
                None => "nothing was streamed: no evaluated model has routed experts".into(),
            }),
        };
        if Config::get().preference().is_some() {
            missing.extend(PREFERENCE.missing(|| NOT_PREFERRED.into()));
        }
        missing
    }
}

/// Ends all readers: no model is reported as freed from here on.
fn end_readers() {
    if let Some(streams) = STREAMS.try_read_for(LONGEST_WAIT) {
        streams.iter().for_each(|stream| stream.reader.end());
    }
}

/// Gives memory of experts back for a buffer that the program is about to allocate; `None` if no model is streamed.
pub fn make_room(bytes: u64) -> Option<Allocation> {
    // Not while a model is loaded or freed, by whom it may be called.
    let streams = STREAMS.try_read()?;
    let allocation = (!streams.is_empty()).then(|| Allocation::of(bytes));
    for stream in streams.iter() {
        stream.reader.look_at_memory();
    }
    allocation
}

/// Returns the reader of a model.
fn of_model<'a>(streams: &'a [Stream], model: &Model) -> Option<&'a Stream> {
    streams.iter().find(|stream| stream.model == model.number)
}

/// Reads the experts of a model again, whose file was written in place.
pub fn read_again(model: &Model) {
    let streams = STREAMS.read();
    if let Some(stream) = of_model(&streams, model) {
        stream.reader.read_again();
    }
}

/// Replaces experts that a layer has chosen, and of which matrices are to be read, by experts in memory.
pub fn prefer(ranked: &mut Ranked<'_>) {
    let streams = STREAMS.read();
    if let Some(stream) = of_model(&streams, ranked.model)
        && let Some(layer) = stream.reader.position(ranked.layer)
        && stream
            .reader
            .prefer(layer, ranked.mapped, &mut ranked.ranking)
    {
        PREFERENCE.note();
    }
}

/// Sets the margin within which experts in memory are preferred, in all models that are streamed.
pub fn set_margin(margin: f32) -> Result<(), String> {
    if Config::get().preference().is_none() {
        return Err("experts in memory are not preferred in this program: start it with --stream-prefer and --accept-changed-results (LLAMA_EXPERT_STREAM_PREFER=0, LLAMA_EXPERT_STREAM_ACCEPT_CHANGES=1)".into());
    }
    if !(0.0..=1.0).contains(&margin) {
        return Err(format!("the margin is {margin}: use a number from 0 to 1"));
    }
    let streams = STREAMS.read();
    if !streams.iter().any(|stream| stream.reader.is_in_memory()) {
        return Err(NOT_PREFERRED.into());
    }
    streams
        .iter()
        .for_each(|stream| stream.reader.set_margin(margin));
    Ok(())
}

/// Requests the experts of the layer that has bytes at an address, of which the program is about to copy
/// the first matrix to a device, and waits for those that are copied next.
fn copied<'a>(from: usize, is_whole: bool, ids: impl FnOnce() -> Option<Ids<'a>>) {
    for stream in STREAMS.read().iter() {
        let Some(mapped) = stream.matrix_at(from) else {
            continue;
        };
        let (reader, layer) = (&stream.reader, mapped.layer);
        // Later matrices are on their way with the first one.
        if stream.copied.swap(layer, Ordering::Relaxed) != layer
            && let Some(ids) = ids()
        {
            reader.schedule(layer, reader.in_place(layer), &ids);
        }
        let copied = if is_whole {
            reader.in_place(layer)
        } else {
            mapped.matrix
        };
        return reader.wait(layer, copied);
    }
}

impl Stream {
    /// Returns the expert matrix that is mapped at an address.
    fn matrix_at(&self, address: usize) -> Option<&MappedMatrix> {
        let is_before = |of: &MappedMatrix| of.bytes.end <= address;
        let found = self.mapped.get(self.mapped.partition_point(is_before))?;
        found.bytes.contains(&address).then_some(found)
    }

    /// Adds its figures to those of earlier loads of the same path.
    fn add_to(&self, figures: &mut BTreeMap<String, (u64, StreamFigures)>) {
        let (model, sum) = figures.entry(self.path.clone()).or_default();
        *model = self.model;
        sum.add(&self.figures());
    }

    fn figures(&self) -> StreamFigures {
        let figures = self.reader.counts();
        let Some(started) = self.started.get() else {
            return figures;
        };
        let (fitting_bytes, missing_bytes) = match self.reader.is_in_memory() {
            true => (figures.fitting_bytes, figures.missing_bytes),
            false => started.fitting,
        };
        StreamFigures {
            expert_bytes: self.bytes.0,
            fitting_bytes,
            missing_bytes,
            context_tokens: started.context.tokens,
            context_bytes: started.context.bytes,
            freed_bytes: started.context.freed,
            ..figures
        }
    }

    /// Notes in the journal that layers are scheduled, or why none is. A first evaluation without
    /// either gives no verdict: a GPU may compute long prompts.
    fn note_start(&self) {
        let is_streamed = self.reader.layers() > 0;
        let obstacle = match is_streamed {
            true => None,
            false if routing::is_unknown() => Some(NOT_UNDERSTOOD),
            false => return,
        };
        let (experts, others) = self.bytes;
        let (fitting, missing) = fitting(others);
        let _ = self.started.set(Started {
            context: *self.context.lock(),
            fitting: (fitting.min(experts), missing),
        });
        if let Some(obstacle) = obstacle {
            log::warn!("{}: {obstacle}", self.path);
        }
        note_start(&self.path, obstacle.map(str::to_owned), self.figures());
    }
}

/// Makes a reader for a model whose experts are in the mapping of its files.
fn start(model: &Arc<Model>) {
    let path = text::path(model.files[0].gguf.source.path());
    if !load::is_for_streaming(model) {
        // No obstacle: the program is as fast without.
        return journal::note_once(|| Event::StreamStart {
            path,
            obstacle: Some(FITS.into()),
            figures: StreamFigures::default(),
        });
    }
    let Some(memory) = load::expert_memory(model) else {
        log::warn!("{path}: it has no routed experts, so nothing of it is streamed");
        return;
    };
    let unreached = model.unreached.streaming.clone();
    if let Some(obstacle) = unreached.or_else(|| memory.obstacle().map(str::to_owned)) {
        log::warn!("{path}: {obstacle}");
        if !model.kept_out.is_empty() {
            log::warn!(
                "{path}: {} expert tensors were kept out of faster buffers for nothing: start the program without --stream-experts",
                model.kept_out.len()
            );
        }
        note_start(&path, Some(obstacle), StreamFigures::default());
        return;
    }
    let config = Config::get();
    let settings = Settings {
        always: config.expert_stream == ExpertStream::On,
        threads: Settings::default_threads(),
        look_ahead_bytes: Settings::look_ahead_in(free_memory().map(|(bytes, _)| bytes)),
    };
    let files: Vec<_> = model.files.iter().map(|file| &file.gguf).collect();
    let (mapped, experts) = mapped(model);
    load::finish(model, &mapped.others);
    let bytes = (experts, mapped.other_bytes());
    let reader = match needs_memory(model, &mapped, experts) {
        // SAFETY: the program unmaps its files after it has freed the tensors, and the reader ends before.
        true => unsafe { Reader::in_memory(&files, settings, mapped) },
        false => Reader::new(&files, settings, |expert| {
            mapped.tensors.contains_key(&expert.tensor)
        }),
    };
    match reader {
        Ok(reader) => {
            log::info!("streaming the routed experts of {path}");
            begin();
            let mapped = addresses(model, &reader);
            reader.set_margin(config.preference().unwrap_or(0.0));
            STREAMS.write().push(Stream {
                model: model.number,
                set: model.as_set(),
                path,
                reader,
                mapped,
                copied: AtomicUsize::new(usize::MAX),
                bytes,
                context: Mutex::default(),
                started: OnceLock::new(),
            });
            if let Some(stream) = of_model(&STREAMS.read(), model) {
                read_hottest(&stream.reader);
            }
        }
        Err(error) => {
            log::warn!(
                "{path}: cannot stream its experts: {error}; the program reads them as without streaming"
            );
            let obstacle = format!("cannot stream its experts: {error}");
            note_start(&path, Some(obstacle), StreamFigures::default());
        }
    }
}

/// Reads the most used experts of an earlier run ahead, in half of the free memory.
fn read_hottest(reader: &Reader) {
    let Some(path) = &Config::get().expert_stream_trace else {
        return;
    };
    let bytes = free_memory().map_or(0, |(bytes, _)| bytes / 2);
    match trace::read(path) {
        Ok((_, trace)) => {
            let experts = reader.request_hottest(&trace, bytes);
            log::info!(
                "reading the {experts} most used experts of {} ahead",
                text::path(path)
            );
        }
        Err(error) => log::error!(
            "--stream-trace (LLAMA_EXPERT_STREAM_TRACE): {error}; no expert is read before its routing: write a trace with --expert-trace-output trace.json"
        ),
    }
}

/// Returns where the tensors of a model are mapped, and the bytes of its mapped experts.
fn mapped(model: &Model) -> (Mapped, u64) {
    let lengths = model
        .files
        .iter()
        .map(|file| file.gguf.header.tensors.len());
    let before: Vec<usize> = lengths
        .scan(0, |sum, len| Some(std::mem::replace(sum, *sum + len)))
        .collect();
    let mut mapped = Mapped {
        most: Config::get().expert_stream_memory,
        ..Mapped::default()
    };
    // A token uses one row of a tensor that rows are read from.
    let is_always_used =
        |of: &Instance| of.mapped && (of.op() != Some(model.ggml.ops.get_rows) || of.is_shared());
    let mut experts = 0;
    for tensor in &model.tensors {
        let mut instances = tensor.instances.iter();
        let Some(instance) = instances.find(|instance| instance.mapped) else {
            continue;
        };
        match instance.has_experts {
            true => {
                experts += model.info(tensor).nbytes;
                let address = instance.original.data as usize;
                mapped
                    .tensors
                    .insert(before[tensor.file] + tensor.info, address);
            }
            false => mapped.others.push(Other {
                span: Span {
                    file: tensor.file,
                    offset: model.info(tensor).offset,
                    address: instance.original.data as usize,
                    len: model.info(tensor).nbytes as usize,
                },
                is_always_used: tensor.instances.iter().any(is_always_used),
            }),
        }
    }
    (mapped, experts)
}

/// Whether the experts of a model do not fit into the free memory, or into what the user allows, and can be kept in memory of the process
/// instead of the page cache: they are in plain mappings of their files.
fn needs_memory(model: &Model, mapped: &Mapped, experts: u64) -> bool {
    // Post-fetch copies experts before the reader has them.
    if Config::get().program_postfetch.is_used() {
        return false;
    }
    // ggml then lets a GPU read the pages of the mapping at any time, and slots get other bytes.
    if std::env::var_os("GGML_CUDA_REGISTER_HOST").is_some() {
        return false;
    }
    let maps = Maps::read();
    for tensor in &model.tensors {
        let info = model.info(tensor);
        let mut instances = tensor
            .instances
            .iter()
            .filter(|of| of.mapped && of.has_experts);
        let is_plain =
            |of: &Instance| maps.has_plain(of.original.data as usize, info.nbytes, info.offset);
        if !instances.all(is_plain) {
            return false;
        }
    }
    let (fit, _) = fitting(mapped.other_bytes());
    let most = mapped.most.unwrap_or(u64::MAX);
    most > 0 && experts > fit.min(most)
}

/// Returns the bytes of experts that fit beside a model's other tensors and what the program has allocated, and the bytes
/// that are missing for these.
fn fitting(others: u64) -> (u64, u64) {
    let free = free_memory().map_or(u64::MAX, |(free, _)| free);
    program::fitting(free, 0, others.saturating_add(program::untouched()))
}

/// Returns where expert matrices are mapped, ascending.
fn addresses(model: &Model, reader: &Reader) -> Vec<MappedMatrix> {
    let mut all = Vec::new();
    for (at, tensor) in model.tensors.iter().enumerate() {
        let name = model.name(at).to_str().ok().and_then(ExpertName::parse);
        let Some((name, layer)) = name.and_then(|of| Some((of, reader.position(of.layer)?))) else {
            continue;
        };
        for instance in tensor.instances.iter().filter(|of| of.mapped) {
            let start = instance.original.data as usize;
            let mut matrix = Matrices::default();
            matrix.insert(name.projection);
            all.push(MappedMatrix {
                bytes: start..start + model.info(tensor).nbytes as usize,
                layer,
                matrix,
            });
        }
    }
    all.sort_unstable_by_key(|of| of.bytes.start);
    all
}

/// Returns the figures of a model, if its experts are streamed.
pub fn figures(model: &Model) -> Option<StreamFigures> {
    let streams = STREAMS.read();
    Some(of_model(&streams, model)?.figures())
}

/// Notes in the journal, once, whether the experts of a model are streamed. The figures differ with each load of it.
fn note_start(path: &str, obstacle: Option<String>, figures: StreamFigures) {
    if let Some(obstacle) = &obstacle {
        EFFECT.note_obstacle(format!("nothing was streamed: {path}: {obstacle}"));
    }
    let what = format!("{path}: {obstacle:?}");
    journal::note_first(&what, || Event::StreamStart {
        path: path.to_owned(),
        obstacle,
        figures,
    });
}
