//! The thread that issues copies, so that nobody waits for a driver.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::board::{Board, Phase};
use super::gpu::{CHUNK, CHUNKS, Gpu};
use super::plan::Slice;
use super::stats::add;
use super::{Backoff, Reason, Shared};
use crate::device::{Copy2d, DeviceError};

/// What to do next.
enum Step {
    Stop,
    /// Issue the copy of this transfer.
    Issue(usize),
    /// See whether this transfer, of this number, is done.
    Watch(usize, u64),
}

/// Fetches until it is told to stop.
pub(super) fn fetch(shared: &Shared) {
    let gpu = shared.gpu.as_ref().expect("it is started for a device");
    let mut chunk = 0;
    let mut watched = (0, Instant::now());
    loop {
        match next(shared) {
            Step::Stop => return,
            Step::Issue(index) => issue(shared, gpu, index, &mut chunk),
            Step::Watch(index, number) => {
                if watched.0 != number {
                    watched = (number, Instant::now());
                }
                watch(shared, gpu, index, number, watched.1);
            }
        }
    }
}

fn next(shared: &Shared) -> Step {
    let most = shared.options.config.max_transfers;
    let spin = shared.options.config.spin;
    let idle_since = Instant::now();
    let mut board = shared.board.lock();
    loop {
        if board.stop {
            return Step::Stop;
        }
        if shared.is_off() {
            refuse_all(&mut board);
        } else if board.in_flight < most
            && let Some(index) = board.queue.pop_front()
        {
            board.in_flight += 1;
            board.transfers[index].phase = Phase::Issuing;
            return Step::Issue(index);
        } else if (!board.queue.is_empty() || board.has_abandoned())
            && let Some(index) = board.oldest_in_flight()
        {
            return Step::Watch(index, board.transfers[index].number);
        }
        if idle_since.elapsed() >= spin {
            shared.work.wait(&mut board);
            continue;
        }
        let seen = shared.kicks.load(Ordering::Acquire);
        drop(board);
        while shared.kicks.load(Ordering::Acquire) == seen && idle_since.elapsed() < spin {
            std::hint::spin_loop();
        }
        board = shared.board.lock();
    }
}

fn refuse_all(board: &mut Board) {
    while let Some(&index) = board.queue.front() {
        board.queue.pop_front();
        board.fail(index, Reason::NoDevice, false);
    }
}

fn watch(shared: &Shared, gpu: &Gpu, index: usize, number: u64, since: Instant) {
    match gpu.device.is_done(gpu.marks[index].ready.event) {
        Ok(true) => {
            let mut board = shared.board.lock();
            if board.transfers[index].number == number {
                board.complete(number);
            }
        }
        Ok(false) if since.elapsed() > shared.options.patience => {
            shared.give_up("a copy did not end in time");
        }
        // Others are under way: the link is busy while this sleeps.
        Ok(false) => std::thread::sleep(Backoff::SLEEP),
        Err(error) => shared.failed(index, number, &error),
    }
}

/// Why a transfer failed.
enum Stop {
    Read,
    Device(DeviceError),
}

impl From<DeviceError> for Stop {
    fn from(error: DeviceError) -> Stop {
        Stop::Device(error)
    }
}

fn issue(shared: &Shared, gpu: &Gpu, index: usize, chunk: &mut usize) {
    let clock = shared.clock.lock();
    shared.take_times(gpu);
    let (slice, copy) = {
        let board = shared.board.lock();
        let transfer = &board.transfers[index];
        let slice = transfer.slice.clone().expect("a transfer has a source");
        let copy = Copy2d {
            to: gpu.scratchpad.address() + transfer.place,
            to_pitch: transfer.pitch as usize,
            from: std::ptr::null(),
            from_pitch: slice.nbytes as usize,
            width: slice.nbytes as usize,
            rows: transfer.rows as usize,
        };
        (slice, copy)
    };
    let mut touched = false;
    let result = copy_in(shared, gpu, index, &slice, copy, chunk, &mut touched);
    drop(clock);
    let mut board = shared.board.lock();
    match result {
        Ok(()) => {
            board.transfers[index].phase = Phase::InFlight;
            drop(board);
            add(&shared.counters.copies, 1);
            add(&shared.counters.bytes, (copy.width * copy.rows) as u64);
        }
        Err(Stop::Read) => board.fail(index, Reason::ReadFailed, touched),
        Err(Stop::Device(error)) => {
            board.fail(index, Reason::DeviceFailed, touched);
            let failures = board.failures;
            drop(board);
            shared.note(&error);
            shared.after_failure(failures, &error);
        }
    }
}

fn copy_in(
    shared: &Shared,
    gpu: &Gpu,
    index: usize,
    slice: &Slice,
    mut copy: Copy2d,
    chunk: &mut usize,
    touched: &mut bool,
) -> Result<(), Stop> {
    let (device, stream, marks) = (&gpu.device, gpu.fetch.stream, &gpu.marks[index]);
    loop {
        let event = shared.board.lock().waits.last().copied();
        let Some(event) = event else {
            break;
        };
        device.stream_wait(stream, event)?;
        shared
            .board
            .lock()
            .waits
            .retain(|&waiting| waiting != event);
    }
    device.record(marks.start.event, stream)?;
    let in_place = slice.host(&shared.model, 0).filter(|&from| {
        let bytes = (copy.width * copy.rows) as u64;
        gpu.pages
            .as_ref()
            .is_some_and(|pages| pages.cover(from, bytes))
    });
    match in_place {
        Some(from) => {
            copy.from = from;
            *touched = true;
            // SAFETY: the transfer holds the view of the bytes, and its part of the
            // scratchpad, until the stream is known to be past it.
            unsafe { device.copy_in(stream, copy)? };
        }
        None => {
            add(&shared.counters.staged_copies, 1);
            staged(shared, gpu, slice, copy, chunk, touched)?;
        }
    }
    Ok(device.record(marks.ready.event, stream)?)
}

/// Copies through the page-locked buffers, piece by piece.
fn staged(
    shared: &Shared,
    gpu: &Gpu,
    slice: &Slice,
    copy: Copy2d,
    chunk: &mut usize,
    touched: &mut bool,
) -> Result<(), Stop> {
    let (device, stream) = (&gpu.device, gpu.fetch.stream);
    for row in 0..copy.rows {
        for at in (0..copy.width).step_by(CHUNK) {
            let len = CHUNK.min(copy.width - at);
            wait_for_chunk(shared, gpu, *chunk)?;
            // SAFETY: this thread alone uses the ring, and the last copy is done.
            let buffer = unsafe { gpu.ring.chunk(*chunk) };
            let offset = slice.offset + row as u64 * slice.nbytes + at as u64;
            let (model, bytes) = (&shared.model, &mut buffer[..len]);
            let read = model.read_view(slice.tensor, &slice.view, offset, bytes);
            read.map_err(|_| Stop::Read)?;
            let piece = Copy2d {
                to: copy.to + (row * copy.to_pitch + at) as u64,
                from: buffer.as_ptr(),
                width: len,
                rows: 1,
                ..copy
            };
            *touched = true;
            // SAFETY: the buffer is filled again only after its event; the place as in `copy_in`.
            unsafe { device.copy_in(stream, piece)? };
            let copied = gpu.ring.copied(*chunk);
            if shared.twice(|| device.record(copied, stream)).is_err() {
                shared.give_up("it cannot be known when a buffer is copied");
            }
            *chunk = (*chunk + 1) % CHUNKS;
        }
    }
    Ok(())
}

fn wait_for_chunk(shared: &Shared, gpu: &Gpu, chunk: usize) -> Result<(), Stop> {
    let backoff = Backoff::new();
    while !gpu.device.is_done(gpu.ring.copied(chunk))? {
        if backoff.elapsed() > shared.options.patience || shared.board.lock().stop {
            return Err(Stop::Device(DeviceError::Failed {
                device: gpu.device.name().into(),
                action: "copy",
                reason: "a copy did not end in time".into(),
            }));
        }
        backoff.pause();
    }
    Ok(())
}
