//! Copies of expert matrices to a device, and the thread that issues them.
//!
//! Copies from memory that is not page-locked hold up their caller, so they are issued on a
//! thread of the drop-in. One thread issues the copies of a scheduler, in the order in which
//! they were requested.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use once_cell::sync::Lazy;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use sidecar_core::config::Config;

use super::figures::FIGURES;
use super::instance::{Instance, OwnEvent};
use crate::ggml::{Backend, Ggml, OwnContext, Tensor};
use crate::process::thread;

/// Bytes of a matrix that are copied together.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where they are in host memory.
    pub from: usize,
    /// Where they go in the tensor on the device.
    pub to: Range<usize>,
}

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

    /// Waits for its copies, if they were issued.
    pub fn wait(&self) {
        if matches!(self.progress(), Progress::Issued | Progress::Done) {
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

    /// Issues the copies in a queue of the device. Returns their bytes.
    ///
    /// # Safety
    ///
    /// The bytes of the request are readable; the backend is used by this thread.
    unsafe fn issue(&self, backend: *mut Backend) -> u64 {
        let request = self.request();
        let mut bytes = 0;
        for piece in &request.pieces {
            bytes += piece.to.len() as u64;
            // SAFETY: as the caller ensures; the pieces are within the tensor.
            unsafe {
                (self.ggml.f.ggml_backend_tensor_set_async)(
                    backend,
                    self.target,
                    piece.from as *const _,
                    piece.to.start,
                    piece.to.len(),
                );
            }
        }
        bytes
    }

    /// Copies and records the event, on the thread that issues copies.
    fn copy(&self) {
        let backend = self.instance.backend();
        let after = self.request().after.clone();
        // SAFETY: the program keeps the model and the graph until the transfer was drained.
        let bytes = unsafe {
            if let Some(after) = after {
                after.hold(backend);
            }
            self.issue(backend)
        };
        self.instance.record(&self.done);
        FIGURES.early_bytes.fetch_add(bytes, Ordering::Relaxed);
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
            end: Some(end),
        };
        FIGURES.add_copy(times.transfer);
        FIGURES.add_wait(times.waited);
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
                FIGURES.mismatches.fetch_add(1, Ordering::Relaxed);
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
    /// Signals work for the thread.
    work: Condvar,
    /// Signals progress of a transfer.
    progress: Condvar,
    /// Counts requests, for a thread that spins.
    requests: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Arc<Transfer>>,
    busy: bool,
    stopped: bool,
    /// Whether the thread has ended after an internal error.
    failed: bool,
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
}

impl Fetcher {
    /// Starts the thread; `None` if it does not start.
    pub fn start() -> Option<Fetcher> {
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let started = thread::spawn("post-fetch", move || {
            let work = AssertUnwindSafe(|| of_thread.run());
            if std::panic::catch_unwind(work).is_err() {
                of_thread.queue.lock().failed = true;
                of_thread.progress.notify_all();
                log::error!("post-fetch: an internal error of llama-sidecar; report it");
            }
        });
        started.then_some(Fetcher(shared))
    }

    /// Queues a transfer whose request is complete.
    pub fn queue(&self, transfer: &Arc<Transfer>) {
        transfer.needed.store(0, Ordering::Relaxed);
        let mut queue = self.0.queue.lock();
        if queue.stopped {
            return;
        }
        *transfer.progress.lock() = Progress::Queued;
        queue.waiting.push_back(transfer.clone());
        drop(queue);
        self.0.requests.fetch_add(1, Ordering::Release);
        self.0.work.notify_one();
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

    /// Makes later work of a backend wait for the copies of a transfer that was queued. Copies
    /// that the thread does not issue any more are issued by that backend.
    ///
    /// # Safety
    ///
    /// A live backend of the device of the transfer, on the thread that uses the backend.
    pub unsafe fn acquire(&self, transfer: &Transfer, backend: *mut Backend) {
        let now = START.elapsed().as_nanos().max(1) as u64;
        transfer.needed.store(now, Ordering::Relaxed);
        let mut queue = self.0.queue.lock();
        let is_waiting = || matches!(transfer.progress(), Progress::Queued | Progress::Copying);
        while is_waiting() && !queue.failed {
            self.0.progress.wait(&mut queue);
        }
        drop(queue);
        let is_issued = || matches!(transfer.progress(), Progress::Issued | Progress::Done);
        // SAFETY: as the caller ensures; the program's own copy has the same source.
        unsafe {
            match is_issued() {
                true => transfer.done.hold(backend),
                false => drop(transfer.issue(backend)),
            }
        }
    }

    /// Whether nothing is queued, and nothing is copied.
    pub fn is_idle(&self) -> bool {
        let queue = self.0.queue.lock();
        queue.waiting.is_empty() && !queue.busy
    }

    /// Waits until all that is queued is copied, unless the thread has ended.
    pub fn finish(&self) {
        let mut queue = self.0.queue.lock();
        while (queue.busy || !queue.waiting.is_empty()) && !queue.failed && !queue.stopped {
            self.0.progress.wait(&mut queue);
        }
    }

    /// Forgets what is queued, and waits until nothing is copied. Returns whether all that was
    /// requested is copied.
    pub fn drain(&self) -> bool {
        let mut queue = self.0.queue.lock();
        let complete = queue.waiting.is_empty() && !queue.failed;
        for transfer in queue.waiting.drain(..) {
            *transfer.progress.lock() = Progress::Idle;
        }
        while queue.busy && !queue.failed {
            self.0.progress.wait(&mut queue);
        }
        complete
    }

    /// Stops the thread, and waits until nothing is copied, for a time at most.
    pub fn stop(&self, timeout: Duration) {
        let mut queue = self.0.queue.lock();
        queue.stopped = true;
        for transfer in queue.waiting.drain(..) {
            *transfer.progress.lock() = Progress::Idle;
        }
        let until = Instant::now() + timeout;
        while queue.busy && !queue.failed {
            if self.0.progress.wait_until(&mut queue, until).timed_out() {
                break;
            }
        }
        drop(queue);
        self.0.progress.notify_all();
        self.0.requests.fetch_add(1, Ordering::Release);
        self.0.work.notify_one();
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        self.drain();
        self.stop(Duration::ZERO);
    }
}

impl Shared {
    /// Issues copies while there may be more, and waits for the oldest one otherwise: so the
    /// link has the next copy before one is complete.
    fn run(&self) {
        let config = &Config::get().postfetch;
        // A later copy into the same memory must not come before the bytes are compared.
        let most = if config.debug {
            1
        } else {
            config.max_transfers as usize
        };
        let mut issued: VecDeque<(Arc<Transfer>, Instant)> = VecDeque::new();
        let mut end_before = Instant::now();
        loop {
            let next = match issued.len() {
                0 => self.next(),
                len if len < most => self.queue.lock().pop(),
                _ => None,
            };
            if let Some(transfer) = next {
                let begun = Instant::now();
                transfer.copy();
                self.advance(&transfer, Progress::Issued);
                issued.push_back((transfer, begun));
            } else if let Some((transfer, begun)) = issued.pop_front() {
                end_before = transfer.finish(begun.max(end_before));
                self.advance(&transfer, Progress::Done);
                // Its owner may free the backend from here on, and not this thread.
                drop(transfer);
                self.queue.lock().busy = !issued.is_empty();
                self.progress.notify_all();
            } else {
                return;
            }
        }
    }

    fn advance(&self, transfer: &Transfer, to: Progress) {
        let _queue = self.queue.lock();
        *transfer.progress.lock() = to;
        self.progress.notify_all();
    }

    /// Waits for the next transfer: spins for the configured time, then sleeps. `None` at the
    /// end.
    fn next(&self) -> Option<Arc<Transfer>> {
        let spin = Config::get().postfetch.spin;
        let idle_since = Instant::now();
        let mut queue = self.queue.lock();
        loop {
            if queue.stopped {
                return None;
            }
            if let Some(transfer) = queue.pop() {
                return Some(transfer);
            }
            let seen = self.requests.load(Ordering::Acquire);
            if idle_since.elapsed() < spin {
                MutexGuard::unlocked(&mut queue, || {
                    while self.requests.load(Ordering::Acquire) == seen
                        && idle_since.elapsed() < spin
                    {
                        std::hint::spin_loop();
                    }
                });
            } else {
                self.work.wait(&mut queue);
            }
        }
    }
}
