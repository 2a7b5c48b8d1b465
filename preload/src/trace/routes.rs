//! Routes: the experts of every token, written to a file by a background thread.
//!
//! The expert trace passes the routed ids of each layer after an evaluation. They become rows in
//! memory of the evaluation's scheduler, and are appended to a queue of bounded size, which a
//! thread writes every [`PAUSE`], or sooner when much is in it. The program never waits for a disk: tokens that find the queue
//! full are dropped and counted.
//!
//! The last layer of a prompt computes only the tokens whose output is requested. Their positions
//! are the operand of the rows that the graph takes there.

use std::collections::TryReserveError;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, RwLock};
use sidecar_core::config::{Config, Variable};
use sidecar_core::files;
use sidecar_core::protocol::{Event, NoEffect};
use sidecar_core::text;
use sidecar_core::trace::{Ids, NOT_ROUTED, RouteLayout, RouteWriter};

use crate::ggml::{Ggml, Tensor};
use crate::process::{journal, thread};
use crate::program::capability::{Capability, Effect};
use crate::program::graph::WeightedExperts;
use crate::program::sched::Allocated;
use crate::program::{barrier, graph};

/// Ids that the queue of a model takes between two writes; with gate weights, as many of them.
const QUEUE_IDS: usize = 4 << 20;
/// Evaluations, marks and gaps that the queue takes.
const QUEUE_ITEMS: usize = 1 << 16;
/// Marks that wait for a disk.
const MOST_MARKS: usize = 1024;
/// The time between two writes. To wake the thread is a system call, which evaluations make only
/// where the queue fills faster.
const PAUSE: Duration = Duration::from_secs(1);
/// Pauses without rows after which the thread sleeps until there are some.
const EMPTY_PAUSES: u32 = 60;
/// How long the end of the process waits for a running write.
const LONGEST_WRITE: Duration = Duration::from_secs(2);

/// Whether rows were written.
static EFFECT: Effect = Effect::of(NoEffect::ROUTES);

/// Routes, as a capability. Its tensors are found and read by the expert trace.
pub struct Routes;

impl Capability for Routes {
    fn is_enabled(&self) -> bool {
        Config::get().trace_routes.is_some()
    }

    fn start(&self) {
        thread::spawn("llama-sidecar-r", write_behind);
    }

    fn finish(&self) {
        for queue in queues() {
            queue.write();
            queue.report();
        }
    }

    fn no_effect(&self) -> Vec<NoEffect> {
        EFFECT.missing(|| {
            "no route was written: no evaluation besides warm-ups had routed experts; let a model with routed experts generate a token".into()
        })
    }
}

/// What evaluations of all loads of a model leave for its file.
pub struct Queue {
    path: PathBuf,
    layout: RouteLayout,
    pending: Mutex<Pending>,
    output: Mutex<Output>,
    /// Whether all loads of the model are freed.
    rests: AtomicBool,
}

/// Rows and marks that are to be written. Its memory is reserved once.
#[derive(Default)]
struct Pending {
    items: Vec<Item>,
    experts: Vec<i16>,
    weights: Vec<f32>,
    /// Tokens that were dropped since the last item.
    dropped: u64,
}

enum Item {
    /// Rows of an evaluation in this context, so many tokens.
    Rows(u32, usize),
    Mark(String),
    Dropped(u64),
}

/// The file of a queue.
#[derive(Default)]
struct Output {
    /// The rows that are written now.
    taken: Pending,
    writer: Option<RouteWriter>,
    /// Where it writes.
    path: Option<PathBuf>,
    /// The first failure.
    error: Option<String>,
    /// Tokens that were dropped without a file.
    dropped: u64,
    /// Whether a message has reported dropped tokens.
    is_reported: bool,
    /// Whether another process has the file.
    is_refused: bool,
    /// Marks that are not written yet, [`MOST_MARKS`] at most.
    marks: Vec<String>,
}

/// The thread that writes the queues to their files.
struct Writer {
    /// The queues of all models, also of freed ones.
    queues: RwLock<Vec<Arc<Queue>>>,
    /// Whether a write must not wait for the end of the pause; set with `woken`.
    urgent: Mutex<bool>,
    woken: Condvar,
    /// Whether the thread sleeps, or is about to, until it is woken.
    sleeps: AtomicBool,
}

static WRITER: Writer = Writer {
    queues: RwLock::new(Vec::new()),
    urgent: Mutex::new(false),
    woken: Condvar::new(),
    sleeps: AtomicBool::new(false),
};

fn queues() -> Vec<Arc<Queue>> {
    // The process may end while another thread holds the lock.
    let queues = WRITER.queues.try_read_for(LONGEST_WRITE);
    queues.map(|queues| queues.clone()).unwrap_or_default()
}

fn wake() {
    let mut urgent = WRITER.urgent.lock();
    if !*urgent {
        *urgent = true;
        WRITER.woken.notify_one();
    }
}

/// Writes all queues; for a thread of its own.
fn write_behind() {
    let mut empty = 0;
    while !barrier::is_shut() {
        let mut written = false;
        for queue in queues() {
            written |= queue.write();
            queue.release();
        }
        empty = if written { 0 } else { empty + 1 };
        // Rows that come after this are found after one more pause, or wake the thread.
        WRITER.sleeps.store(empty >= EMPTY_PAUSES, Ordering::SeqCst);
        let mut urgent = WRITER.urgent.lock();
        if !*urgent {
            match empty > EMPTY_PAUSES {
                true => WRITER.woken.wait(&mut urgent),
                false => drop(WRITER.woken.wait_for(&mut urgent, PAUSE)),
            }
        }
        *urgent = false;
    }
}

/// Notes a text at the current position of all routes.
pub fn mark(text: &str) -> Result<(), String> {
    if !Routes.is_enabled() {
        return Err(format!(
            "no routes are written: start the program with {}",
            title()
        ));
    }
    let mut queues = queues();
    queues.retain(|queue| !queue.rests.load(Ordering::Relaxed));
    if queues.is_empty() {
        return Err("no model with routed experts is loaded: mark after its first token".into());
    }
    for queue in queues {
        let mut pending = queue.pending.lock();
        if !pending.has_space(0) {
            return Err(format!(
                "the queue of {} is full: repeat when its disk has caught up",
                text::path(&queue.path)
            ));
        }
        pending.items.push(Item::Mark(text.to_owned()));
        drop(pending);
        wake();
    }
    Ok(())
}

impl Pending {
    /// Reserves a queue, where memory is short a smaller one: rows for which it has no space are counted.
    fn reserved(weights: bool) -> Pending {
        let reserve = |part: usize| {
            let mut queue = Pending::default();
            queue.items.try_reserve_exact(QUEUE_ITEMS / part)?;
            queue.experts.try_reserve_exact(QUEUE_IDS / part)?;
            let weights = if weights { QUEUE_IDS / part } else { 0 };
            queue.weights.try_reserve_exact(weights)?;
            Ok::<_, TryReserveError>(queue)
        };
        let mut queues = [1, 8, 64].into_iter().filter_map(|part| reserve(part).ok());
        queues.next().unwrap_or_default()
    }

    fn has_space(&self, ids: usize) -> bool {
        // What is left of the items is for a gap before rows, and for one at the end.
        let items = self.items.len() + 2 < self.items.capacity();
        items && self.experts.len() + ids <= self.experts.capacity()
    }

    /// Whether a quarter of the memory is in use.
    fn fills(&self) -> bool {
        let items = self.items.len() * 4 > self.items.capacity();
        items || self.experts.len() * 4 > self.experts.capacity()
    }

    /// Notes where tokens were dropped.
    fn note_dropped(&mut self) {
        if self.dropped > 0 {
            self.items.push(Item::Dropped(self.dropped));
            self.dropped = 0;
        }
    }

    fn clear(&mut self) {
        self.items.clear();
        self.experts.clear();
        self.weights.clear();
    }
}

/// Reports that a layer has several sets of ids, and the file has a place for one.
pub fn refuse_several(layer: u32) {
    EFFECT.log_obstacle(format!(
        "{}: layer {layer} reads several sets of experts for each token, and routes have one: no routes of its model are written",
        title()
    ));
}

/// How messages name the variable.
fn title() -> String {
    Variable::title_of("LLAMA_EXPERT_TRACE_ROUTES")
}

impl Queue {
    /// Makes the queue of a model that writes to this path; `None` where the format cannot hold
    /// the model.
    pub fn new(
        path: PathBuf,
        name: &str,
        layers: &[(u32, u32)],
        top_k: usize,
    ) -> Option<Arc<Queue>> {
        let weights = Config::get().trace_weights;
        let layout = match RouteLayout::new(name, layers, top_k, weights) {
            Ok(layout) => layout,
            Err(reason) => {
                let sentence = format!("{}: {name}: {reason}; its routes are not written", title());
                EFFECT.log_obstacle(sentence);
                return None;
            }
        };
        let queue = Arc::new(Queue {
            path,
            layout,
            pending: Mutex::default(),
            output: Mutex::default(),
            rests: AtomicBool::new(true),
        });
        WRITER.queues.write().push(queue.clone());
        Some(queue)
    }

    /// Appends rows, or drops them if there is no space.
    fn push(&self, context: usize, rows: &Rows) {
        let mut pending = self.pending.lock();
        if !pending.has_space(rows.experts.len()) {
            pending.dropped += rows.tokens as u64;
            return;
        }
        pending.note_dropped();
        pending.experts.extend_from_slice(&rows.experts);
        pending.weights.extend_from_slice(&rows.weights);
        pending.items.push(Item::Rows(context as u32, rows.tokens));
        EFFECT.note();
        let fills = pending.fills();
        drop(pending);
        if fills || WRITER.sleeps.load(Ordering::SeqCst) {
            wake();
        }
    }

    /// Writes what is pending; returns whether there was anything.
    fn write(&self) -> bool {
        let Some(mut output) = self.output.try_lock_for(LONGEST_WRITE) else {
            return false;
        };
        let Some(mut pending) = self.pending.try_lock_for(LONGEST_WRITE) else {
            return false;
        };
        pending.note_dropped();
        if pending.items.is_empty() {
            return false;
        }
        if output.taken.items.capacity() == 0 {
            output.taken = Pending::reserved(self.layout.has_weights());
        }
        std::mem::swap(&mut *pending, &mut output.taken);
        drop(pending);
        output.write(self);
        true
    }

    /// Reserves its memory, which a model that is loaded uses.
    pub fn resume(&self) {
        if !self.rests.load(Ordering::Relaxed) {
            return;
        }
        let mut pending = self.pending.lock();
        self.rests.store(false, Ordering::Relaxed);
        if pending.items.capacity() == 0 {
            *pending = Pending::reserved(self.layout.has_weights());
        }
    }

    /// Records that the model is freed. Its file stays open: a later load goes on with it.
    pub fn rest(&self) {
        self.rests.store(true, Ordering::Relaxed);
        wake();
    }

    /// Frees its memory if the model is freed and nothing is left to write.
    fn release(&self) {
        let mut output = self.output.lock();
        let mut pending = self.pending.lock();
        if self.rests.load(Ordering::Relaxed) && pending.items.is_empty() {
            output.taken = Pending::default();
            *pending = Pending::default();
        }
    }

    /// Notes in the journal what the file has.
    fn report(&self) {
        let Some(output) = self.output.try_lock_for(LONGEST_WRITE) else {
            return;
        };
        let tokens = output.writer.as_ref().map_or(0, RouteWriter::tokens);
        if tokens + output.missing() > 0 {
            journal::note(|| Event::Routes {
                path: text::path(output.path.as_ref().unwrap_or(&self.path)),
                tokens,
                dropped: output.missing(),
                error: output.error.clone(),
            });
        }
    }
}

impl Output {
    fn write(&mut self, queue: &Queue) {
        if self.writer.is_none() && !self.is_refused {
            let create = |path: &Path| RouteWriter::create(path, queue.layout.clone());
            match files::at_free_name(&queue.path, create) {
                Ok((path, mut writer)) => {
                    self.path = Some(path);
                    writer.dropped(std::mem::take(&mut self.dropped));
                    self.writer = Some(writer);
                }
                Err(error) => {
                    self.is_refused = error.kind() == ErrorKind::ResourceBusy;
                    self.fail(queue, &error);
                }
            }
        }
        let places = queue.layout.places();
        let (mut at, mut failure) = (0, None);
        if let Some(writer) = &mut self.writer {
            failure = write_marks(writer, &mut self.marks).err();
        }
        for item in &self.taken.items {
            let result = match (item, &mut self.writer) {
                (Item::Rows(context, tokens), Some(writer)) => {
                    let ids = at..at + tokens * places;
                    at = ids.end;
                    let weights = self.taken.weights.get(ids.clone());
                    let weights = weights.unwrap_or_default();
                    writer.rows(*context, &self.taken.experts[ids], weights)
                }
                (Item::Mark(text), writer) => {
                    if self.marks.len() < MOST_MARKS {
                        self.marks.push(text.clone());
                    }
                    let marks = &mut self.marks;
                    writer
                        .as_mut()
                        .map_or(Ok(()), |writer| write_marks(writer, marks))
                }
                (Item::Dropped(tokens), Some(writer)) => {
                    writer.dropped(*tokens);
                    Ok(())
                }
                (Item::Rows(_, tokens), None) => {
                    self.dropped += *tokens as u64;
                    Ok(())
                }
                (Item::Dropped(tokens), None) => {
                    self.dropped += tokens;
                    Ok(())
                }
            };
            failure = failure.or(result.err());
        }
        self.taken.clear();
        let flushed = self.writer.as_mut().map_or(Ok(()), RouteWriter::flush);
        if let Some(error) = failure.or(flushed.err()) {
            self.fail(queue, &error);
        }
        let dropped = self.missing();
        if dropped > 0 && !self.is_reported && self.error.is_none() {
            self.is_reported = true;
            log::warn!(
                "{}: {dropped} tokens were dropped, because {} is written too slowly; use a faster disk, or the compact format (.routes)",
                title(),
                text::path(&queue.path)
            );
        }
    }

    /// Reports the first failure.
    fn fail(&mut self, queue: &Queue, error: &std::io::Error) {
        if self.error.is_none() {
            self.error = Some(error.to_string());
            let sentence = format!(
                "{}: cannot write {}: {error}; tokens are dropped until it can be written",
                title(),
                text::path(&queue.path)
            );
            log::error!("{sentence}");
            if self.writer.is_none() {
                EFFECT.note_obstacle(sentence);
            }
        }
    }

    fn missing(&self) -> u64 {
        self.dropped + self.writer.as_ref().map_or(0, RouteWriter::missing)
    }
}

/// Writes marks in their order, and removes those that are written.
fn write_marks(writer: &mut RouteWriter, marks: &mut Vec<String>) -> std::io::Result<()> {
    let mut written = 0;
    let results = marks.iter().map(|text| writer.mark(text));
    let result = results
        .inspect(|result| written += usize::from(result.is_ok()))
        .collect();
    marks.drain(..written);
    result
}

/// Rows of an evaluation. Their memory is used again for the next one.
struct Rows {
    tokens: usize,
    /// `[tokens, layers, top_k]`.
    experts: Vec<i16>,
    /// As many gate weights, if they are wanted.
    weights: Vec<f32>,
}

/// Rows that a graph takes of a result.
struct Taken {
    /// The input with their positions.
    input: *mut Tensor,
    /// Of how many rows.
    rows: i64,
    /// The positions in the evaluation that was begun last.
    positions: Vec<u8>,
}

/// What the graph of a scheduler has for routes, and the rows of its evaluations. Used by the
/// thread that evaluates.
pub struct GraphRoutes {
    queue: Option<Arc<Queue>>,
    taken: Vec<Taken>,
    /// Layers with gate weights.
    experts: Vec<WeightedExperts>,
    rows: Rows,
    /// The tokens that a layer computed.
    places: Vec<usize>,
    /// What is read of other tensors.
    bytes: Vec<u8>,
}

// SAFETY: the tensors are only read by the thread that evaluates, while it keeps the graph.
unsafe impl Send for GraphRoutes {}

impl GraphRoutes {
    /// Of no graph.
    pub const NONE: GraphRoutes = GraphRoutes {
        queue: None,
        taken: Vec::new(),
        experts: Vec::new(),
        rows: Rows {
            tokens: 0,
            experts: Vec::new(),
            weights: Vec::new(),
        },
        places: Vec::new(),
        bytes: Vec::new(),
    };

    /// Finds what another graph has, and keeps it for after the evaluation.
    ///
    /// # Safety
    ///
    /// A live graph of this copy that is not yet allocated.
    pub unsafe fn renew(&mut self, queue: Option<Arc<Queue>>, ggml: &Ggml, graph: &Allocated) {
        self.clear();
        self.queue = queue;
        let Some(queue) = &self.queue else {
            return;
        };
        let (f, layout) = (&ggml.f, &ggml.layout);
        // SAFETY: nodes of a live graph are live tensors, and so are their sources.
        unsafe {
            for i in 0..(f.ggml_graph_n_nodes)(graph.graph) {
                let node = (f.ggml_graph_node)(graph.graph, i);
                if layout.read::<i32>(node, layout.op) != ggml.ops.get_rows {
                    continue;
                }
                let [source, positions]: [*mut Tensor; 2] = layout.read(node, layout.src);
                let flags: i32 = layout.read(positions, layout.flags);
                // Rows of a result, not of a weight.
                let computed = layout.read::<i32>(source, layout.op) != 0;
                if flags & graph::FLAG_INPUT != 0 && computed {
                    let [_, rows, ..]: [i64; 4] = layout.read(source, layout.ne);
                    self.taken.push(Taken {
                        input: positions,
                        rows,
                        positions: Vec::new(),
                    });
                    graph.outputs.keep(ggml, positions);
                }
            }
            if queue.layout.has_weights() {
                self.experts = graph::weighted_experts(ggml, graph.graph);
                for experts in &self.experts {
                    graph.outputs.keep(ggml, experts.gates);
                }
            }
        }
    }

    /// Forgets the graph.
    pub fn clear(&mut self) {
        self.queue = None;
        self.taken.clear();
        self.experts.clear();
    }

    /// Reads the positions of rows that the evaluation takes, which begins. The program may set
    /// them for the next one before this one is counted.
    ///
    /// # Safety
    ///
    /// The graph is live, and its inputs are set.
    pub unsafe fn read_inputs(&mut self, ggml: &Ggml) {
        for taken in &mut self.taken {
            // SAFETY: as the caller ensures; an input has as many bytes as ggml returns.
            unsafe {
                let size = (ggml.f.ggml_nbytes)(taken.input);
                taken.positions.resize(size, 0);
                let to = taken.positions.as_mut_ptr().cast();
                (ggml.f.ggml_backend_tensor_get)(taken.input, to, 0, size);
            }
        }
    }

    /// Begins the rows of an evaluation.
    pub fn begin(&mut self) {
        self.rows.tokens = 0;
    }

    /// Adds the ids of a layer, by its position.
    ///
    /// # Safety
    ///
    /// The graph is live and its backends are done.
    pub unsafe fn add(&mut self, ggml: &Ggml, layer: usize, ids: &Ids<'_>) {
        let Some(queue) = &self.queue else {
            return;
        };
        let layout = &queue.layout;
        let (places, top_k) = (layout.places(), layout.top_k());
        let rows = &mut self.rows;
        if rows.tokens == 0 {
            rows.tokens = ids.tokens;
            rows.experts.clear();
            rows.experts.resize(ids.tokens * places, NOT_ROUTED);
            rows.weights.clear();
            let weights = if layout.has_weights() {
                ids.tokens * places
            } else {
                0
            };
            rows.weights.resize(weights, f32::NAN);
        }
        let number = layout.layers()[layer].0;
        if !places_of(&self.taken, rows.tokens, ids.tokens, &mut self.places) {
            return;
        }
        let starts = self
            .places
            .iter()
            .map(|token| token * places + layer * top_k);
        let used = ids.used.min(top_k);
        for (token, at) in starts.clone().enumerate() {
            for (place, expert) in rows.experts[at..at + used].iter_mut().enumerate() {
                let id = ids.get(token, place).and_then(|id| i16::try_from(id).ok());
                *expert = id.unwrap_or(NOT_ROUTED);
            }
        }
        let Some(experts) = self.experts.iter().find(|layer| layer.layer == number) else {
            return;
        };
        // SAFETY: as the caller ensures; the weights were kept.
        let gates = unsafe { graph::read_matrix(ggml, experts.gates, 1, &mut self.bytes) };
        let same = |gates: &Ids<'_>| (gates.used, gates.tokens) == (ids.used, ids.tokens);
        if let Some(gates) = gates.filter(same) {
            for (token, at) in starts.enumerate() {
                for (place, weight) in rows.weights[at..at + used].iter_mut().enumerate() {
                    let bits = gates.get(token, place).map(|bits| bits as u32);
                    *weight = bits.map_or(f32::NAN, f32::from_bits);
                }
            }
        }
    }

    /// Ends the rows of an evaluation, and passes them on.
    pub fn end(&self, context: usize) {
        if let Some(queue) = &self.queue
            && self.rows.tokens > 0
        {
            queue.push(context, &self.rows);
        }
    }
}

/// Finds which of the tokens of an evaluation a layer computed: all, or those whose rows are
/// `taken`. Returns whether that is known.
fn places_of(taken: &[Taken], tokens: usize, computed: usize, places: &mut Vec<usize>) -> bool {
    places.clear();
    if computed == tokens {
        places.extend(0..tokens);
        return true;
    }
    let fits = |of: &&Taken| of.rows == tokens as i64 && of.positions.len() == 4 * computed;
    // The results of a graph are at its end.
    let Some(taken) = taken.iter().rev().find(fits) else {
        return false;
    };
    let numbers = taken.positions.as_chunks().0.iter();
    // A negative number is no place, like one that is too large.
    places.extend(numbers.map(|number| i32::from_ne_bytes(*number) as usize));
    places.iter().all(|place| *place < tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecar_core::trace::{RouteReader, RouteRecord};

    /// 48 layers of 512 experts, 10 of them for a token.
    fn queue(path: &std::path::Path) -> Queue {
        let layers: Vec<(u32, u32)> = (0..48).map(|layer| (layer, 512)).collect();
        Queue {
            path: path.to_owned(),
            layout: RouteLayout::new("a model", &layers, 10, false).expect("it fits"),
            pending: Mutex::new(Pending::reserved(false)),
            output: Mutex::new(Output {
                taken: Pending::reserved(false),
                ..Output::default()
            }),
            rests: AtomicBool::new(false),
        }
    }

    fn rows(tokens: usize) -> Rows {
        Rows {
            tokens,
            experts: vec![7; tokens * 480],
            weights: Vec::new(),
        }
    }

    /// Tokens and dropped tokens of a file, in order.
    fn lengths(path: &std::path::Path) -> Vec<(usize, u64)> {
        let mut reader = RouteReader::open(path).expect("routes");
        let mut lengths = Vec::new();
        while let Some(record) = reader.read().expect("a valid file") {
            lengths.push(match record {
                RouteRecord::Rows { experts, .. } => (experts.len() / 480, 0),
                RouteRecord::Dropped(tokens) => (0, tokens),
                RouteRecord::Mark(_) => (0, 0),
            });
        }
        lengths
    }

    #[test]
    fn a_full_queue_drops_tokens_and_takes_no_memory() {
        let name = format!("llama-sidecar-{}.routes", std::process::id());
        let path = std::env::temp_dir().join(name);
        let queue = queue(&path);
        let thousand = rows(1000);
        for _ in 0..20 {
            queue.push(0, &thousand);
        }
        assert_eq!(queue.pending.lock().experts.capacity(), QUEUE_IDS);
        queue.write();
        queue.push(0, &rows(3));
        queue.write();
        let lengths = lengths(&path);
        let tokens = lengths.iter().map(|(tokens, _)| *tokens).sum::<usize>();
        assert_eq!(tokens, 8003, "{lengths:?}");
        assert_eq!(lengths[lengths.len() - 2..], [(0, 12_000), (3, 0)]);
        // Many tokens, one at a time, in the memory that was reserved.
        let one = rows(1);
        for _ in 0..25 {
            for _ in 0..4000 {
                queue.push(0, &one);
            }
            queue.write();
            std::fs::File::create(&path).expect("free space");
        }
        assert_eq!(queue.output.lock().missing(), 12_000);
        let pending = queue.pending.lock();
        assert_eq!(pending.experts.capacity(), QUEUE_IDS);
        assert_eq!(pending.items.capacity(), QUEUE_ITEMS);
        std::fs::remove_file(&path).expect("it was written");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_made_later() {
        let folder = std::env::temp_dir().join(format!("llama-sidecar-{}-r", std::process::id()));
        let path = folder.join("later.routes");
        let queue = queue(&path);
        queue.push(0, &rows(3));
        queue.pending.lock().items.push(Item::Mark("a".into()));
        queue.write();
        assert_eq!(queue.output.lock().missing(), 3);
        std::fs::create_dir(&folder).expect("a folder");
        queue.push(0, &rows(2));
        queue.write();
        // The gap, the mark and the rows.
        assert_eq!(lengths(&path), [(0, 3), (0, 0), (2, 0)]);
        assert_eq!(queue.output.lock().missing(), 3);
        std::fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_file_of_another_writer_is_left_alone() {
        let name = format!("llama-sidecar-{}-two.routes", std::process::id());
        let path = std::env::temp_dir().join(name);
        let (first, second) = (queue(&path), queue(&path));
        for (queue, tokens) in [(&first, 2), (&second, 5), (&first, 1), (&second, 4)] {
            queue.push(0, &rows(tokens));
            queue.write();
        }
        assert_eq!(lengths(&path), [(2, 0), (1, 0)]);
        let error = second.output.lock().error.clone();
        assert!(error.is_some_and(|error| error.contains("%p")));
        drop(first);
        second.push(0, &rows(1));
        second.write();
        assert_eq!(lengths(&path), [(2, 0), (1, 0)]);
        std::fs::remove_file(&path).expect("removed");
    }
}
