//! Streams, each with a thread that does its work in order, and events.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::ggml::Backend;
use crate::host::HostThread;
use crate::order::{Use, Who};
use crate::sim::{Direction, Moment, Taken, sim};

/// A state of a stream that others wait for.
#[derive(Default)]
pub struct Recording {
    reached: Mutex<Option<Moment>>,
    changed: Condvar,
}

impl Recording {
    fn reach(&self, moment: &Moment) {
        *self.reached.lock().expect("no panic") = Some(moment.clone());
        self.changed.notify_all();
    }

    /// Waits until the stream has reached it.
    pub fn wait(&self) -> Moment {
        let reached = self.reached.lock().expect("no panic");
        let reached = self
            .changed
            .wait_while(reached, |reached| reached.is_none());
        reached.expect("no panic").clone().expect("it was reached")
    }
}

/// An event: what it was last recorded as.
#[derive(Default)]
pub struct Event {
    last: Mutex<Option<Arc<Recording>>>,
    /// The stream for which it counts as recorded, until a thread waits for it.
    open_in: Mutex<Option<Arc<Shared>>>,
}

impl Event {
    /// Returns what it was last recorded as.
    pub fn last(&self) -> Option<Arc<Recording>> {
        self.last.lock().expect("no panic").clone()
    }

    /// Records the state of a stream.
    pub fn record(&self, stream: &Stream) {
        let recording = Arc::new(Recording::default());
        *self.last.lock().expect("no panic") = Some(recording.clone());
        self.waited_for();
        *self.open_in.lock().expect("no panic") = Some(stream.shared.clone());
        let open = stream.shared.open_events.fetch_add(1, Ordering::Relaxed) + 1;
        let most = &stream.shared.most_open_events;
        most.fetch_max(open, Ordering::Relaxed);
        stream.submit(move |worker| recording.reach(&worker.moment));
    }

    /// Notes that a thread has waited for it.
    pub fn waited_for(&self) {
        if let Some(stream) = self.open_in.lock().expect("no panic").take() {
            stream.open_events.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What a stream did, for the report. Times are virtual, in nanoseconds.
#[derive(Debug, Default, Clone)]
pub struct Figures {
    /// Its name.
    pub name: String,
    /// Its time.
    pub time: u64,
    /// Pieces of work.
    pub works: u64,
    /// Time of kernels.
    pub kernel: u64,
    /// Time of copies.
    pub copy: u64,
    /// Time without work.
    pub waited_for_host: u64,
    /// Time before events of other streams.
    pub waited_for_events: u64,
    /// Time before copies of other streams.
    pub waited_for_link: u64,
}

/// What the thread of a stream has while it works.
pub struct Worker {
    /// The number of its device.
    device: usize,
    /// Its number as a participant.
    pub who: Who,
    number: u64,
    /// What comes before the next piece of work, and when.
    pub moment: Moment,
    /// What it did.
    pub figures: Figures,
    /// The backend that computes its kernels, once there are any.
    cpu: Option<*mut Backend>,
}

type Work = Box<dyn FnOnce(&mut Worker) + Send>;

/// A stream, as others see it.
pub struct Shared {
    /// Its work; `None` after its end.
    queue: Mutex<Option<Sender<(Moment, Work)>>>,
    /// What it did.
    pub figures: Mutex<Figures>,
    /// Events that were recorded and for which no thread has waited.
    open_events: AtomicU64,
    /// The most of them at a time.
    pub most_open_events: AtomicU64,
}

/// All of them, in the order of their starts.
pub static STREAMS: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

/// A stream of a device. Dropping it does the rest of its work first.
pub struct Stream {
    /// Its number, from 1 in the order of the starts.
    pub number: usize,
    /// The number of its device.
    pub device: usize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    /// Starts a stream of a device.
    pub fn start(device: usize) -> Stream {
        let (who, name) = sim().participate("stream");
        let figures = Figures {
            name: name.to_string(),
            ..Figures::default()
        };
        let (queue, works) = channel::<(Moment, Work)>();
        let shared = Arc::new(Shared {
            queue: Mutex::new(Some(queue)),
            figures: Mutex::new(figures.clone()),
            open_events: AtomicU64::new(0),
            most_open_events: AtomicU64::new(0),
        });
        let number = {
            let mut streams = STREAMS.lock().expect("no panic");
            streams.push(shared.clone());
            streams.len()
        };
        let shown = shared.clone();
        let run = move || {
            let mut worker = Worker {
                device,
                who,
                number: 0,
                moment: Moment::default(),
                figures,
                cpu: None,
            };
            for (from, work) in works {
                worker.begin(&from);
                work(&mut worker);
                worker.figures.time = worker.moment.time;
                let mut shown = shown.figures.lock().expect("no panic");
                shown.clone_from(&worker.figures);
            }
            worker.end();
        };
        let thread = std::thread::Builder::new().name(name.to_string());
        Stream {
            number,
            device,
            shared,
            thread: Some(thread.spawn(run).expect("a thread starts")),
        }
    }

    /// Adds a piece of work, which comes after what the calling thread comes after.
    pub fn submit(&self, work: impl FnOnce(&mut Worker) + Send + 'static) {
        self.shared.submit(work);
    }

    /// Adds a piece of work that reaches this state of the stream.
    pub fn recording(&self) -> Arc<Recording> {
        self.shared.recording()
    }

    /// Lets further work come after an event.
    pub fn wait_for(&self, event: &Event) {
        if let Some(recording) = event.last() {
            self.wait_until(recording);
        }
    }

    /// Lets further work come after a state of a stream.
    pub fn wait_until(&self, recording: Arc<Recording>) {
        self.submit(move |worker| {
            let moment = recording.wait();
            worker.figures.waited_for_events += worker.advance(moment.time);
            worker.moment.clock.join(&moment.clock);
        });
    }
}

impl Shared {
    /// Whether work was added: the stream has not ended.
    fn submit(&self, work: impl FnOnce(&mut Worker) + Send + 'static) -> bool {
        let (_, from) = HostThread::this().begin();
        let queue = self.queue.lock().expect("no panic");
        let work: (Moment, Work) = (from, Box::new(work));
        queue.as_ref().is_some_and(|queue| queue.send(work).is_ok())
    }

    fn recording(&self) -> Arc<Recording> {
        let recording = Arc::new(Recording::default());
        let reached = recording.clone();
        if !self.submit(move |worker| reached.reach(&worker.moment)) {
            recording.reach(&Moment::default());
        }
        recording
    }
}

/// Lets a thread come after all work of all streams.
pub fn wait_for_all(thread: &HostThread) {
    let streams = STREAMS.lock().expect("no panic").clone();
    for stream in streams {
        thread.join(&stream.recording().wait());
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        *self.shared.queue.lock().expect("no panic") = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Worker {
    fn begin(&mut self, from: &Moment) {
        self.number += 1;
        self.moment.clock.note(self.who, self.number);
        self.moment.clock.join(&from.clock);
        self.figures.waited_for_host += self.advance(from.time);
        self.figures.works += 1;
    }

    /// Moves its time forward; returns by how much.
    fn advance(&mut self, time: u64) -> u64 {
        let by = time.saturating_sub(self.moment.time);
        self.moment.time += by;
        by
    }

    /// Spends time on a kernel.
    pub fn spend(&mut self, time: u64) {
        let start = self.moment.time;
        self.moment.time += time;
        self.figures.kernel += time;
        let kernels = &sim().devices[self.device].kernels;
        let mut kernels = kernels.lock().expect("no panic");
        kernels.add(start, self.moment.time);
    }

    /// Takes the link for a copy, and spends its time.
    pub fn copy(&mut self, direction: Direction, size: usize, locked: bool) {
        let from = self.moment.time;
        let Taken { start, end } = sim().take_link(self.device, direction, from, size, locked);
        self.figures.waited_for_link += self.advance(start);
        self.figures.copy += self.advance(end);
    }

    /// Describes a use of memory by the present piece of work.
    pub fn uses(&self, what: String) -> Use {
        Use {
            who: self.who,
            number: self.number,
            what: what.into(),
        }
    }

    /// Returns the backend for its kernels.
    pub fn cpu(&mut self) -> *mut Backend {
        let new = || sim().ggml.new_cpu(sim().settings.threads);
        *self.cpu.get_or_insert_with(new)
    }

    fn end(self) {
        if let Some(cpu) = self.cpu {
            // SAFETY: a backend of `Ggml::new_cpu`, which only this thread used.
            unsafe { ((*cpu).interface.free)(cpu) };
        }
    }
}
