//! Copies of expert matrices to a device, and the thread that issues them.
//!
//! Copies from memory that is not page-locked hold up their caller, so they are issued on a
//! thread of the drop-in. One thread issues the copies of a scheduler, in the order in which
//! they were requested.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::Lazy;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use sidecar_core::config::Config;
use sidecar_core::fetch::{CopyQueue, Step, Work};

use super::figures::FIGURES;
use super::instance::{Instance, OwnEvent};
use crate::ggml::{Backend, Ggml, OwnContext, Tensor};
use crate::process::thread;
use crate::program::barrier;

/// Bytes of a matrix that are copied together.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where they are in host memory.
    pub from: usize,
    /// Where they go in the tensor on the device.
    pub to: Range<usize>,
}

/// Why tensors are not swapped any more.
const READS_WEIGHTS: &str = "swap refused: a copy to the device that did not end in time may still read the weights of now; start the program again";

/// What a transfer copies.
#[derive(Default)]
pub struct Request {
    /// The bytes, without overlaps.
    pub pieces: Vec<Piece>,
    /// The event after which the memory on the device may be written.
    pub after: Option<Arc<OwnEvent>>,
}

/// Progress of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Not requested.
    Idle,
    /// Requested.
    Queued,
    /// The thread issues its copies.
    Copying,
    /// Its copies are issued, and its event is recorded.
    Issued,
    /// Its copies are complete.
    Done,
}

/// The copy of one matrix for the evaluations of a graph.
pub struct Transfer {
    ggml: &'static Ggml,
    instance: Arc<Instance>,
    /// The tensor on the device.
    target: *mut Tensor,
    /// The context of the tensor, unless another owner keeps it.
    _context: Option<OwnContext>,
    done: OwnEvent,
    request: RwLock<Request>,
    progress: Mutex<Progress>,
    /// When computing needed the matrix, in nanoseconds since [`START`]; 0 before.
    needed: AtomicU64,
    times: Mutex<Times>,
}

/// The times of a transfer that was requested.
#[derive(Debug, Clone, Copy, Default)]
pub struct Times {
    /// Of its copies.
    pub transfer: Duration,
    /// For which computing waited for them.
    pub waited: Duration,
    /// Of its copies, if they were not used.
    pub unused: Duration,
    /// When they were complete.
    pub end: Option<Instant>,
}

// SAFETY: the tensor is only used by the thread that issues copies, and by the thread that
// evaluates while the other does not use it.
unsafe impl Send for Transfer {}
// SAFETY: as above.
unsafe impl Sync for Transfer {}

/// The start of the times of transfers.
static START: Lazy<Instant> = Lazy::new(Instant::now);

impl Transfer {
    /// Makes a transfer into a tensor on the device of an instance; `None` without an event.
    pub fn new(
        ggml: &'static Ggml,
        instance: Arc<Instance>,
        (context, target): (Option<OwnContext>, *mut Tensor),
    ) -> Option<Transfer> {
        Some(Transfer {
            ggml,
            done: instance.event()?,
            instance,
            target,
            _context: context,
            request: RwLock::default(),
            progress: Mutex::new(Progress::Idle),
            needed: AtomicU64::new(0),
            times: Mutex::default(),
        })
    }

    /// Returns its progress.
    pub fn progress(&self) -> Progress {
        *self.progress.lock()
    }

    /// Makes it idle after a drain.
    pub fn forget(&self) {
        *self.progress.lock() = Progress::Idle;
        *self.times.lock() = Times::default();
    }

    /// Returns its times since it was last idle.
    pub fn times(&self) -> Times {
        *self.times.lock()
    }

    /// Counts its copies as unused if they are complete and computing did not need them.
    pub fn count_unused(&self) {
        let mut times = self.times.lock();
        if times.end.is_some() && self.needed.load(Ordering::Relaxed) == 0 {
            times.unused = times.transfer;
            FIGURES.lock().unused_seconds += times.unused.as_secs_f64();
        }
    }

    /// Whether its copies are issued: later work can wait for them on the device.
    pub fn is_issued(&self) -> bool {
        matches!(self.progress(), Progress::Issued | Progress::Done)
    }

    /// Waits for its copies, if they were issued.
    pub fn wait(&self) {
        if self.is_issued() {
            self.done.wait();
        }
    }

    /// Returns what it copies.
    pub fn request(&self) -> RwLockReadGuard<'_, Request> {
        self.request.read()
    }

    /// Returns what it will copy, while it is idle.
    pub fn next_request(&self) -> RwLockWriteGuard<'_, Request> {
        self.request.write()
    }

    /// Issues copies of bytes to a tensor in a queue of the device.
    ///
    /// # Safety
    ///
    /// The bytes are readable until the copies are complete, and lie within the tensor; the backend is
    /// used by this thread.
    pub unsafe fn issue(&self, backend: *mut Backend, target: *mut Tensor, pieces: &[Piece]) {
        for piece in pieces {
            // SAFETY: as the caller ensures.
            unsafe {
                (self.ggml.f.ggml_backend_tensor_set_async)(
                    backend,
                    target,
                    piece.from as *const _,
                    piece.to.start,
                    piece.to.len(),
                );
            }
        }
    }

    /// Copies and records the event, on the thread that issues copies.
    fn copy(&self) {
        let backend = self.instance.backend();
        let request = self.request();
        // SAFETY: the program keeps the model and the graph until the transfer was drained.
        unsafe {
            if let Some(after) = &request.after {
                after.hold(backend);
            }
            self.issue(backend, self.target, &request.pieces);
        }
        self.instance.record(&self.done);
        let bytes: usize = request.pieces.iter().map(|piece| piece.to.len()).sum();
        FIGURES.lock().early_bytes += bytes as u64;
    }

    /// Waits until the copies are complete, and counts their time. Returns their end.
    fn finish(&self, begun: Instant) -> Instant {
        self.done.wait();
        let end = Instant::now();
        let needed = match self.needed.load(Ordering::Relaxed) {
            0 => end,
            needed => *START + Duration::from_nanos(needed),
        };
        let times = Times {
            transfer: end - begun,
            waited: end.saturating_duration_since(needed),
            unused: Duration::ZERO,
            end: Some(end),
        };
        let mut figures = FIGURES.lock();
        figures.copy_seconds += times.transfer.as_secs_f64();
        figures.wait_seconds += times.waited.as_secs_f64();
        drop(figures);
        *self.times.lock() = times;
        if Config::get().postfetch.debug {
            self.check();
        }
        end
    }

    /// Compares the bytes on the device with those of the model.
    fn check(&self) {
        let request = self.request();
        for piece in &request.pieces {
            let mut there = vec![0u8; piece.to.len()];
            // SAFETY: the copies are complete, and the bytes of the request are readable.
            let here = unsafe {
                (self.ggml.f.ggml_backend_tensor_get)(
                    self.target,
                    there.as_mut_ptr().cast(),
                    piece.to.start,
                    there.len(),
                );
                std::slice::from_raw_parts(piece.from as *const u8, there.len())
            };
            if here != there {
                FIGURES.lock().mismatches += 1;
                log::error!(
                    "post-fetch: {} bytes at {} of a matrix on the device differ from the model: run without post-fetch, and report it with the name of the device",
                    there.len(),
                    piece.to.start
                );
            }
        }
    }
}

/// The thread that issues copies, and its queue.
pub struct Fetcher(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Work,
    /// Signals progress of a transfer.
    progress: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Arc<Transfer>>,
    /// Transfers that were issued, and when.
    issued: VecDeque<(Arc<Transfer>, Instant)>,
    /// Whether a transfer was begun that is not complete.
    busy: bool,
    stopped: bool,
    /// Whether the thread is not waited for any more: it has ended after an internal error, or a copy
    /// took longer than the timeout.
    lost: bool,
}

impl Queue {
    /// Returns the next transfer, which was not taken back.
    fn pop(&mut self) -> Option<Arc<Transfer>> {
        while let Some(transfer) = self.waiting.pop_front() {
            let mut progress = transfer.progress.lock();
            if *progress == Progress::Queued {
                *progress = Progress::Copying;
                drop(progress);
                self.busy = true;
                return Some(transfer);
            }
        }
        None
    }

    /// Takes back what is queued.
    fn take_back(&mut self) {
        for transfer in self.waiting.drain(..) {
            *transfer.progress.lock() = Progress::Idle;
        }
    }

    /// Gives up the thread: what it has not issued is never waited for.
    fn give_up(&mut self, why: &str) {
        self.lost = true;
        self.take_back();
        barrier::refuse(READS_WEIGHTS);
        FIGURES.note_obstacle(format!(
            "the program copies experts itself, no tensors are swapped, and memory for experts stays in use: {why}"
        ));
    }
}

impl Fetcher {
    /// Starts the thread; `None` if it does not start.
    pub fn start() -> Option<Fetcher> {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let started = thread::spawn("post-fetch", move || {
            let spin = Config::get().postfetch.spin;
            let work = AssertUnwindSafe(|| Copies::of(&of_thread).run(spin));
            if std::panic::catch_unwind(work).is_err() {
                let mut queue = of_thread.queue.lock();
                queue.busy = false;
                queue.give_up("an internal error of llama-sidecar; report it");
                of_thread.progress.notify_all();
            }
        });
        started.then_some(Fetcher(shared))
    }

    /// Queues a transfer whose request is complete.
    pub fn queue(&self, transfer: &Arc<Transfer>) {
        transfer.needed.store(0, Ordering::Relaxed);
        let mut queue = self.0.queue.lock();
        if queue.stopped || queue.lost {
            return;
        }
        *transfer.progress.lock() = Progress::Queued;
        queue.waiting.push_back(transfer.clone());
        drop(queue);
        self.0.work.notify();
    }

    /// Takes back a transfer whose copies have not begun. Returns whether that succeeded.
    pub fn take_back(&self, transfer: &Transfer) -> bool {
        let _queue = self.0.queue.lock();
        let mut progress = transfer.progress.lock();
        let queued = *progress == Progress::Queued;
        if queued {
            *progress = Progress::Idle;
        }
        queued
    }

    /// Makes later work of a backend wait for the copies of a transfer that was queued. Returns false
    /// if the thread does not issue them any more.
    ///
    /// # Safety
    ///
    /// A live backend of the device of the transfer, on the thread that uses the backend.
    pub unsafe fn acquire(&self, transfer: &Transfer, backend: *mut Backend) -> bool {
        let now = START.elapsed().as_nanos().max(1) as u64;
        transfer.needed.store(now, Ordering::Relaxed);
        let is_waiting = || matches!(transfer.progress(), Progress::Queued | Progress::Copying);
        drop(self.wait_while(|_| is_waiting()));
        let is_issued = transfer.is_issued();
        if is_issued {
            // SAFETY: as the caller ensures.
            unsafe { transfer.done.hold(backend) };
        }
        is_issued
    }

    /// Whether nothing is queued, and nothing is copied.
    pub fn is_idle(&self) -> bool {
        let queue = self.0.queue.lock();
        queue.waiting.is_empty() && !queue.busy
    }

    /// Whether the thread is not waited for any more. A copy may end at any later time.
    pub fn is_lost(&self) -> bool {
        self.0.queue.lock().lost
    }

    /// Waits until all that is queued is copied, unless the thread is lost.
    pub fn finish(&self) {
        drop(self.wait_while(|queue| (queue.busy || !queue.waiting.is_empty()) && !queue.stopped));
    }

    /// Forgets what is queued, and waits until nothing is copied. Returns whether all that was
    /// requested is copied.
    pub fn drain(&self) -> bool {
        let mut queue = self.0.queue.lock();
        let complete = queue.waiting.is_empty();
        queue.take_back();
        drop(queue);
        complete && !self.wait_while(|queue| queue.busy).lost
    }

    /// Waits while a condition of the queue is true, as long as the thread makes progress.
    fn wait_while(&self, mut condition: impl FnMut(&Queue) -> bool) -> MutexGuard<'_, Queue> {
        let timeout = Config::get().postfetch.timeout;
        let mut queue = self.0.queue.lock();
        while !queue.lost && condition(&queue) {
            let waited = self.0.progress.wait_for(&mut queue, timeout);
            if waited.timed_out() && !queue.lost && condition(&queue) {
                let seconds = timeout.as_secs_f32();
                queue.give_up(&format!(
                    "a copy took longer than {seconds} s (LLAMA_POSTFETCH_TIMEOUT_MS)"
                ));
            }
        }
        queue
    }

    /// Waits until the thread, lost or not, copies nothing, however long that takes.
    pub fn wait_until_idle(&self) {
        let mut queue = self.0.queue.lock();
        while queue.busy {
            self.0.progress.wait(&mut queue);
        }
    }

    /// Stops the thread, and waits until nothing is copied, for a time at most.
    pub fn stop(&self, timeout: Duration) {
        let mut queue = self.0.queue.lock();
        queue.stopped = true;
        queue.take_back();
        let until = Instant::now() + timeout;
        while queue.busy && !queue.lost {
            if self.0.progress.wait_until(&mut queue, until).timed_out() {
                break;
            }
        }
        drop(queue);
        self.0.progress.notify_all();
        self.0.work.notify();
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.drain();
        self.stop(Duration::ZERO);
    }
}

/// The thread's copies.
struct Copies<'a> {
    shared: &'a Shared,
    /// The most transfers that are under way.
    most: usize,
    /// When the transfer before was complete.
    end_before: Instant,
}

impl Copies<'_> {
    fn of(shared: &Shared) -> Copies<'_> {
        let config = &Config::get().postfetch;
        Copies {
            shared,
            // A later copy into the same memory must not come before the bytes are compared.
            most: match config.debug {
                true => 1,
                false => config.max_transfers as usize,
            },
            end_before: Instant::now(),
        }
    }
}

impl CopyQueue for Copies<'_> {
    type Table = Queue;
    type Copy = Arc<Transfer>;
    type Watched = (Arc<Transfer>, Instant);

    fn table(&self) -> (&Mutex<Queue>, &Work) {
        (&self.shared.queue, &self.shared.work)
    }

    fn next(&self, queue: &mut Queue) -> Step<Arc<Transfer>, (Arc<Transfer>, Instant)> {
        let may_issue = queue.issued.len() < self.most;
        if let Some(transfer) = may_issue.then(|| queue.pop()).flatten() {
            Step::Issue(transfer)
        } else if let Some(watched) = queue.issued.pop_front() {
            Step::Watch(watched)
        } else if queue.stopped {
            Step::Stop
        } else {
            Step::Wait
        }
    }

    fn issue(&mut self, transfer: Arc<Transfer>) {
        let begun = Instant::now();
        transfer.copy();
        let mut queue = self.shared.queue.lock();
        *transfer.progress.lock() = Progress::Issued;
        queue.issued.push_back((transfer, begun));
        self.shared.progress.notify_all();
    }

    fn watch(&mut self, (transfer, begun): (Arc<Transfer>, Instant)) {
        self.end_before = transfer.finish(begun.max(self.end_before));
        let mut queue = self.shared.queue.lock();
        *transfer.progress.lock() = Progress::Done;
        // Its owner may free the backend from here on, and not this thread.
        drop(transfer);
        queue.busy = !queue.issued.is_empty();
        self.shared.progress.notify_all();
    }
}
