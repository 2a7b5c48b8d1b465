//! The thread that issues copies. A driver takes microseconds for each copy and each event;
//! callers do not wait for that.

use std::time::Instant;

use parking_lot::Mutex;
use sidecar_core::fetch::{CopyQueue, Step, Work};

use super::device_state::{CHUNK, CHUNKS, DeviceState};
use super::plan::ExpertWeights;
use super::policy::Reason;
use super::shared::{Backoff, LATE, Shared};
use super::transfer::TransferId;
use super::transfer_table::{Issue, TransferTable};
use crate::device::{Copy2d, DeviceError};

/// Why a copy was not issued.
enum IssueError {
    Read,
    Device(DeviceError),
}

impl From<DeviceError> for IssueError {
    fn from(error: DeviceError) -> IssueError {
        IssueError::Device(error)
    }
}

/// Issues copies until the table is stopped. A panic ends the use of the device.
pub(super) fn run(shared: &Shared) {
    let Some(gpu) = &shared.gpu else {
        return;
    };
    let mut fetcher = Fetcher {
        shared,
        gpu,
        chunk: 0,
        watched: None,
    };
    let fetch = std::panic::AssertUnwindSafe(|| fetcher.run(shared.options.config.spin));
    if std::panic::catch_unwind(fetch).is_err() {
        shared.disable("an internal error of llama-sidecar; report it");
    }
}

struct Fetcher<'a> {
    shared: &'a Shared,
    gpu: &'a DeviceState,
    /// The page-locked buffer to fill next.
    chunk: usize,
    /// The copy that was watched last, and since when.
    watched: Option<(TransferId, Instant)>,
}

impl CopyQueue for Fetcher<'_> {
    type Table = TransferTable;
    type Copy = Issue;
    type Watched = TransferId;

    fn table(&self) -> (&Mutex<TransferTable>, &Work) {
        (&self.shared.table, &self.shared.work)
    }

    fn next(&self, table: &mut TransferTable) -> Step<Issue, TransferId> {
        if table.is_stopped() {
            return Step::Stop;
        }
        if self.shared.is_off() {
            table.refuse_queued();
            return Step::Wait;
        }
        let most = self.shared.options.config.max_transfers;
        if let Some(issue) = table.begin_issue(most) {
            return Step::Issue(issue);
        }
        table.next_to_watch().map_or(Step::Wait, Step::Watch)
    }

    fn issue(&mut self, issue: Issue) {
        let shared = self.shared;
        shared.collect_last(self.gpu, issue.id.index);
        let copy = Copy2d {
            to: self.gpu.memory.address() + issue.offset,
            to_pitch: issue.pitch as usize,
            from: std::ptr::null(),
            from_pitch: issue.weights.nbytes as usize,
            width: issue.weights.nbytes as usize,
            rows: issue.rows as usize,
        };
        let mut source_in_use = false;
        let result = self.copy_in(&issue, copy, &mut source_in_use);
        let mut table = shared.table.lock();
        match result {
            Ok(()) => {
                table.issued(issue.id);
                drop(table);
                let mut stats = shared.stats.lock();
                stats.copies += 1;
                stats.bytes += (copy.width * copy.rows) as u64;
            }
            Err(IssueError::Read) => {
                table.fail(issue.id, Reason::ReadFailed, source_in_use);
            }
            Err(IssueError::Device(error)) => {
                let failures = table.fail(issue.id, Reason::DeviceFailed, source_in_use);
                drop(table);
                shared.note_error(&error);
                shared.after_failure(failures, &error);
            }
        }
    }

    fn watch(&mut self, id: TransferId) {
        let shared = self.shared;
        let same = self.watched.filter(|(before, _)| *before == id);
        let (_, since) = *self.watched.insert(same.unwrap_or((id, Instant::now())));
        let ready = self.gpu.events[id.index].ready;
        match self.gpu.device.is_done(ready) {
            Ok(true) => {
                shared.table.lock().complete(id);
                shared.log_ended(self.gpu);
            }
            Ok(false) if since.elapsed() > shared.options.config.timeout => {
                shared.disable(LATE);
            }
            // Other copies are under way: the link is busy during the sleep.
            Ok(false) => std::thread::sleep(Backoff::SLEEP),
            Err(error) => shared.copy_failed(id, &error),
        }
    }
}

impl Fetcher<'_> {
    fn copy_in(
        &mut self,
        issue: &Issue,
        mut copy: Copy2d,
        source_in_use: &mut bool,
    ) -> Result<(), IssueError> {
        let (shared, gpu) = (self.shared, self.gpu);
        let (device, stream) = (&gpu.device, gpu.fetch);
        let events = &gpu.events[issue.id.index];
        loop {
            let wait = shared.table.lock().next_wait();
            let Some(wait) = wait else {
                break;
            };
            device.stream_wait(stream, gpu.events[wait.index].consumed)?;
            shared.table.lock().wait_issued(wait);
        }
        device.record(events.start, stream)?;
        let in_place = issue.weights.host(&shared.model, 0).filter(|&from| {
            let bytes = (copy.width * copy.rows) as u64;
            gpu.pages
                .as_ref()
                .is_some_and(|pages| pages.cover(from, bytes))
        });
        match in_place {
            Some(from) => {
                copy.from = from;
                *source_in_use = true;
                // SAFETY: the transfer holds the view of the bytes until the stream is known to be
                // past the copy. The next copy to the same device memory is later in the stream.
                unsafe { device.copy_in(stream, copy)? };
            }
            None => {
                shared.table.lock().stage();
                shared.stats.lock().staged_copies += 1;
                self.staged(&issue.weights, copy, source_in_use)?;
            }
        }
        Ok(device.record(events.ready, stream)?)
    }

    /// Copies through the page-locked buffers, piece by piece.
    fn staged(
        &mut self,
        weights: &ExpertWeights,
        copy: Copy2d,
        source_in_use: &mut bool,
    ) -> Result<(), IssueError> {
        let (shared, gpu) = (self.shared, self.gpu);
        let (device, stream) = (&gpu.device, gpu.fetch);
        for row in 0..copy.rows {
            for at in (0..copy.width).step_by(CHUNK) {
                let len = CHUNK.min(copy.width - at);
                self.wait_for_chunk()?;
                // SAFETY: this thread alone uses the buffers, and the last copy is done.
                let buffer = unsafe { gpu.buffer(self.chunk) };
                let offset = weights.offset + row as u64 * weights.nbytes + at as u64;
                let (model, bytes) = (&shared.model, &mut buffer[..len]);
                let read = model.read_view(weights.tensor, &weights.view, offset, bytes);
                read.map_err(|_| IssueError::Read)?;
                let piece = Copy2d {
                    to: copy.to + (row * copy.to_pitch + at) as u64,
                    from: buffer.as_ptr(),
                    width: len,
                    rows: 1,
                    ..copy
                };
                *source_in_use = true;
                // SAFETY: the buffer is filled again only after its event; the destination is
                // reserved as in `copy_in`.
                unsafe { device.copy_in(stream, piece)? };
                let copied = gpu.copied[self.chunk];
                if shared.retry_once(|| device.record(copied, stream)).is_err() {
                    shared.disable("cannot record when a buffer is copied");
                }
                self.chunk = (self.chunk + 1) % CHUNKS;
            }
        }
        Ok(())
    }

    fn wait_for_chunk(&self) -> Result<(), IssueError> {
        let (shared, device) = (self.shared, &self.gpu.device);
        let backoff = Backoff::new();
        while !device.is_done(self.gpu.copied[self.chunk])? {
            let over = backoff.elapsed() > shared.options.config.timeout;
            if over || shared.table.lock().is_stopped() {
                return Err(IssueError::Device(DeviceError::Failed {
                    device: device.name().into(),
                    action: "copy",
                    reason: LATE.into(),
                }));
            }
            backoff.pause();
        }
        Ok(())
    }
}
