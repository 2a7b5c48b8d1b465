//! Transfers of experts to the device: their memory, their phase and the experts in them.
//!
//! ```text
//! Free ── schedule ──► Queued ── begin_issue ──► Issuing ── issued ──► InFlight ── complete ──► Ready
//!                        │                          │                     │                       │
//!                        └──────────────────────── fail ──────────────────┘                    release
//!                                                   │                                             │
//!                                    Ready, or Stuck until the stream is past it                Free
//! ```
//!
//! All of this is guarded by one lock, for some hundred nanoseconds at a time. No method calls
//! the driver. The methods keep these rules:
//!
//! - A slot is in at most one transfer, and a transfer counts the slots that are not released.
//! - A transfer keeps its part of the scratchpad until all its slots are released and the
//!   stream that uses them has been recorded. Later copies are in the same stream, so the
//!   part can be given out again before the copy is done.
//! - A transfer keeps its source until the copy is done, or has not begun.

use std::collections::VecDeque;
use std::ops::Range;

use super::plan::{ExpertWeights, PlannedLayer, padded};
use super::policy::Reason;
use super::scratchpad::Scratchpad;
use crate::device::{Event, Stream};
use crate::model::Model;

/// Largest copy of several experts. A copy costs some microseconds in addition to its bytes:
/// the time in which a 13 GB/s link moves 100 KB. Beyond some megabytes that does not matter,
/// and an expert would only wait for its neighbours.
const MAX_MERGED_BYTES: u64 = 2 << 20;

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpertSlot {
    /// Not scheduled.
    Idle,
    /// Requested by the running call of schedule.
    Wanted { position: u32 },
    /// Part of a transfer.
    Held {
        transfer: usize,
        /// Row in the transfer.
        row: u32,
        /// Position among the experts that were scheduled together.
        position: u32,
    },
    /// Scheduled, but not transferred.
    Refused { reason: Reason, position: u32 },
}

/// Progress of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not in use.
    Free,
    /// Waits for the fetching thread.
    Queued,
    /// The fetching thread issues the copy.
    Issuing,
    /// In the stream.
    InFlight,
    /// Done.
    Ready,
    /// Failed; the device may read the source until the stream is past the copy.
    Stuck,
}

/// One use of a transfer. A later use of the same transfer has another id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransferId {
    index: usize,
    number: u64,
}

impl TransferId {
    /// Returns the position of the transfer and of its events.
    pub fn index(self) -> usize {
        self.index
    }
}

/// Experts that are copied together.
#[derive(Debug)]
struct Transfer {
    phase: Phase,
    /// Differs each time the transfer is used.
    number: u64,
    /// The slot of its first expert.
    first_slot: usize,
    rows: u32,
    /// Experts that are not released.
    live: u32,
    /// Offset in the scratchpad, and bytes from expert to expert there.
    offset: u64,
    pitch: u64,
    /// Whether the part of the scratchpad is still taken.
    placed: bool,
    /// The weights of the first expert.
    weights: Option<ExpertWeights>,
    /// The stream of the caller that uses the experts.
    stream: Option<Stream>,
    /// Released, but the end of the caller's work in `stream` is not recorded yet.
    awaiting_consumer: bool,
    /// Done, but its time is not collected yet.
    untimed: bool,
}

/// A transfer for the fetching thread to issue.
#[derive(Debug)]
pub(super) struct Issue {
    pub id: TransferId,
    /// The weights of the first expert; the others follow in the same tensor.
    pub weights: ExpertWeights,
    /// Offset in the scratchpad, and bytes from expert to expert there.
    pub offset: u64,
    pub pitch: u64,
    pub rows: u32,
}

/// The state of an expert.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lookup {
    /// In no transfer: the CPU computes the expert.
    Cpu { reason: Reason, position: u32 },
    /// In a transfer.
    Transfer {
        id: TransferId,
        position: u32,
        phase: Phase,
    },
}

/// An expert in a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held<'a> {
    pub id: TransferId,
    /// The weights of the first expert of the transfer.
    pub weights: &'a ExpertWeights,
    /// Position of the expert in the transfer.
    pub row: u32,
    /// Offset of the expert in the scratchpad.
    pub offset: u64,
}

/// All transfers of a scheduler, and the state of every expert.
#[derive(Debug)]
pub(super) struct TransferTable {
    slots: Vec<ExpertSlot>,
    transfers: Vec<Transfer>,
    free: VecDeque<usize>,
    queue: VecDeque<usize>,
    scratchpad: Scratchpad,
    /// Events that the fetch stream has to wait for before the next copy.
    waits: Vec<Event>,
    /// Transfers that are issuing or in flight.
    in_flight: u32,
    stopped: bool,
    /// The device may use some memory for ever.
    leaked: bool,
    /// Transfers that failed since the last successful one.
    failures: u32,
    last_number: u64,
}

/// Counts of one call of schedule.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Scheduled {
    /// Experts in new transfers.
    pub experts: u64,
    /// Those of them that share a transfer with an expert before them.
    pub coalesced: u64,
    /// Bytes of the new transfers.
    pub bytes: u64,
    pub duplicates: u64,
    pub rejected: u64,
}

impl TransferTable {
    /// Makes a table for `slots` experts, a scratchpad of `bytes` bytes and `transfers` transfers.
    pub fn new(slots: usize, bytes: u64, transfers: usize) -> TransferTable {
        let transfer = |_| Transfer {
            phase: Phase::Free,
            number: 0,
            first_slot: 0,
            rows: 0,
            live: 0,
            offset: 0,
            pitch: 0,
            placed: false,
            weights: None,
            stream: None,
            awaiting_consumer: false,
            untimed: false,
        };
        TransferTable {
            slots: vec![ExpertSlot::Idle; slots],
            transfers: (0..transfers).map(transfer).collect(),
            free: (0..transfers).collect(),
            queue: VecDeque::with_capacity(transfers),
            scratchpad: Scratchpad::new(bytes, transfers),
            waits: Vec::with_capacity(transfers),
            in_flight: 0,
            stopped: false,
            leaked: false,
            failures: 0,
            last_number: 0,
        }
    }

    /// Queues transfers of the experts that are in no transfer yet, in the order of `ids`.
    pub fn schedule(&mut self, model: &Model, layer: &PlannedLayer, ids: &[i32]) -> Scheduled {
        let mut done = Scheduled::default();
        let slot = |id: i32| {
            let expert = u32::try_from(id).ok()?;
            Some((expert, layer.slot(expert)?))
        };
        let mut position = 0;
        for &id in ids {
            let Some((_, slot)) = slot(id) else {
                done.rejected += 1;
                continue;
            };
            match self.slots[slot] {
                ExpertSlot::Idle | ExpertSlot::Refused { .. } => {
                    self.slots[slot] = ExpertSlot::Wanted { position };
                    position += 1;
                }
                ExpertSlot::Wanted { .. } | ExpertSlot::Held { .. } => done.duplicates += 1,
            }
        }
        for &id in ids {
            if let Some((expert, slot)) = slot(id)
                && let ExpertSlot::Wanted { position } = self.slots[slot]
                && let Err(reason) = self.queue(model, layer, expert, &mut done)
            {
                self.slots[slot] = ExpertSlot::Refused { reason, position };
            }
        }
        done
    }

    /// Queues a transfer of an expert and of its wanted neighbours.
    fn queue(
        &mut self,
        model: &Model,
        layer: &PlannedLayer,
        expert: u32,
        done: &mut Scheduled,
    ) -> Result<(), Reason> {
        let weights = layer.weights(model, expert).ok_or(Reason::NotAnExpert)?;
        if !weights.is_on_host() {
            return Err(Reason::NotInHostMemory);
        }
        let pitch = padded(weights.nbytes);
        let most = match weights.parts {
            1 => 1,
            _ => (MAX_MERGED_BYTES / pitch.max(1)).max(1) as u32,
        };
        let wanted = |expert: u32| {
            let slot = layer.slot(expert).map(|slot| self.slots[slot]);
            matches!(slot, Some(ExpertSlot::Wanted { .. }))
        };
        let mut run = run_around(expert, wanted, most);
        let index = *self.free.front().ok_or(Reason::NoRoom)?;
        let mut offset = self.scratchpad.take(pitch * run.len() as u64);
        if offset.is_none() && run.len() > 1 {
            run = expert..expert + 1;
            offset = self.scratchpad.take(pitch);
        }
        let offset = offset.ok_or(Reason::NoRoom)?;
        self.free.pop_front();
        self.last_number += 1;
        let rows = run.len() as u32;
        let nbytes = weights.nbytes;
        let first_slot = layer.first_slot + run.start as usize;
        let transfer = &mut self.transfers[index];
        transfer.phase = Phase::Queued;
        transfer.number = self.last_number;
        transfer.first_slot = first_slot;
        transfer.rows = rows;
        transfer.live = rows;
        transfer.offset = offset;
        transfer.pitch = pitch;
        transfer.placed = true;
        transfer.weights = Some(ExpertWeights {
            offset: weights.offset - u64::from(expert - run.start) * nbytes,
            ..weights
        });
        transfer.stream = None;
        for (row, slot) in (0..rows).zip(&mut self.slots[first_slot..]) {
            if let ExpertSlot::Wanted { position } = *slot {
                *slot = ExpertSlot::Held {
                    transfer: index,
                    row,
                    position,
                };
            }
        }
        self.queue.push_back(index);
        done.experts += u64::from(rows);
        done.coalesced += u64::from(rows - 1);
        done.bytes += nbytes * u64::from(rows);
        Ok(())
    }

    /// Returns the state of an expert.
    pub fn lookup(&self, slot: usize) -> Lookup {
        match self.slots[slot] {
            ExpertSlot::Idle | ExpertSlot::Wanted { .. } => Lookup::Cpu {
                reason: Reason::NotScheduled,
                position: 0,
            },
            ExpertSlot::Refused { reason, position } => Lookup::Cpu { reason, position },
            ExpertSlot::Held {
                transfer, position, ..
            } => Lookup::Transfer {
                id: self.id(transfer),
                position,
                phase: self.transfers[transfer].phase,
            },
        }
    }

    /// Returns the weights and the memory of an expert that is in a transfer.
    pub fn held(&self, slot: usize) -> Option<Held<'_>> {
        let ExpertSlot::Held { transfer, row, .. } = *self.slots.get(slot)? else {
            return None;
        };
        let found = &self.transfers[transfer];
        Some(Held {
            id: self.id(transfer),
            weights: found.weights.as_ref()?,
            row,
            offset: found.offset + u64::from(row) * found.pitch,
        })
    }

    /// Gives the next transfer to the fetching thread, unless `most` are under way.
    /// [`TransferTable::issued`] or [`TransferTable::fail`] has to follow.
    pub fn begin_issue(&mut self, most: u32) -> Option<Issue> {
        if self.in_flight >= most {
            return None;
        }
        let index = self.queue.pop_front()?;
        self.in_flight += 1;
        let id = self.id(index);
        let transfer = &mut self.transfers[index];
        transfer.phase = Phase::Issuing;
        Some(Issue {
            id,
            weights: transfer
                .weights
                .clone()
                .expect("a queued transfer has weights"),
            offset: transfer.offset,
            pitch: transfer.pitch,
            rows: transfer.rows,
        })
    }

    /// Notes that the copy of a transfer is in the stream.
    pub fn issued(&mut self, id: TransferId) {
        debug_assert_eq!(self.transfers[id.index].phase, Phase::Issuing);
        self.transfers[id.index].phase = Phase::InFlight;
    }

    /// Notes that the stream is past a transfer, and so past all transfers before it. Returns
    /// false when the transfer has been released and used again meanwhile.
    pub fn complete(&mut self, id: TransferId) -> bool {
        if !self.is_current(id) {
            return false;
        }
        self.failures = 0;
        for index in 0..self.transfers.len() {
            let transfer = &mut self.transfers[index];
            if transfer.number > id.number {
                continue;
            }
            match transfer.phase {
                Phase::InFlight => {
                    transfer.phase = Phase::Ready;
                    transfer.untimed = true;
                    self.in_flight -= 1;
                }
                Phase::Stuck => transfer.phase = Phase::Ready,
                _ => continue,
            }
            self.settle(index);
        }
        true
    }

    /// Notes that a transfer failed: the CPU computes its experts. `source_in_use` means that
    /// the device may still read the source. Returns the number of failures in a row.
    pub fn fail(&mut self, id: TransferId, reason: Reason, source_in_use: bool) -> u32 {
        self.fail_at(id.index, reason, source_in_use);
        self.failures
    }

    /// Notes that the state of a transfer in flight cannot be read. Returns the number of
    /// failures in a row.
    pub fn fail_in_flight(&mut self, id: TransferId) -> u32 {
        if self.is_current(id) && self.transfers[id.index].phase == Phase::InFlight {
            self.fail_at(id.index, Reason::DeviceFailed, true);
        }
        self.failures
    }

    /// Refuses all queued transfers.
    pub fn refuse_queued(&mut self) {
        while let Some(index) = self.queue.pop_front() {
            self.fail_at(index, Reason::NoDevice, false);
        }
    }

    fn fail_at(&mut self, index: usize, reason: Reason, source_in_use: bool) {
        self.failures += 1;
        let transfer = &mut self.transfers[index];
        if matches!(transfer.phase, Phase::Issuing | Phase::InFlight) {
            self.in_flight -= 1;
        }
        transfer.phase = match source_in_use {
            true => Phase::Stuck,
            false => Phase::Ready,
        };
        for slot in transfer.first_slot..transfer.first_slot + transfer.rows as usize {
            if let ExpertSlot::Held {
                transfer: holder,
                position,
                ..
            } = self.slots[slot]
                && holder == index
            {
                self.slots[slot] = ExpertSlot::Refused { reason, position };
                self.transfers[index].live -= 1;
            }
        }
        self.settle(index);
    }

    /// Reserves a transfer for a stream of the caller.
    pub fn claim(&mut self, id: TransferId, stream: Stream) -> Result<(), Reason> {
        if !self.is_current(id) {
            return Err(Reason::NotScheduled);
        }
        // Experts that are copied together are for one stream.
        match *self.transfers[id.index].stream.get_or_insert(stream) == stream {
            true => Ok(()),
            false => Err(Reason::DeviceFailed),
        }
    }

    /// Releases an expert. When it was the last of a transfer that a stream uses, the caller has
    /// to record an event in that stream, and to call [`TransferTable::consumed`].
    #[must_use]
    pub fn release(&mut self, slot: usize) -> Option<(TransferId, Stream)> {
        let before = std::mem::replace(&mut self.slots[slot], ExpertSlot::Idle);
        let ExpertSlot::Held {
            transfer: index, ..
        } = before
        else {
            return None;
        };
        let transfer = &mut self.transfers[index];
        transfer.live -= 1;
        if transfer.live > 0 {
            return None;
        }
        if let Some(stream) = transfer.stream.take() {
            transfer.awaiting_consumer = true;
            return Some((self.id(index), stream));
        }
        self.settle(index);
        None
    }

    /// Ends what [`TransferTable::release`] began. Without the event, the memory stays taken.
    pub fn consumed(&mut self, id: TransferId, event: Option<Event>) {
        let Some(event) = event else {
            self.leaked = true;
            return;
        };
        self.waits.push(event);
        self.transfers[id.index].awaiting_consumer = false;
        self.settle(id.index);
    }

    /// Frees what a transfer no longer needs: its part of the scratchpad at once, its source
    /// when its copy is done.
    fn settle(&mut self, index: usize) {
        let transfer = &mut self.transfers[index];
        if transfer.live > 0 || transfer.awaiting_consumer {
            return;
        }
        if std::mem::take(&mut transfer.placed) {
            self.scratchpad.give(transfer.offset);
        }
        match transfer.phase {
            Phase::Ready => {}
            Phase::Queued => self.queue.retain(|&queued| queued != index),
            Phase::Issuing | Phase::InFlight | Phase::Stuck | Phase::Free => return,
        }
        transfer.phase = Phase::Free;
        transfer.weights = None;
        self.free.push_back(index);
    }

    /// Returns the transfer whose end frees something that is waited for: the oldest in flight,
    /// if transfers are queued or a transfer in flight has been released.
    pub fn next_to_watch(&self) -> Option<TransferId> {
        let in_flight = |transfer: &&Transfer| transfer.phase == Phase::InFlight;
        let mut all = self.transfers.iter().filter(in_flight);
        if self.queue.is_empty() && !all.any(|transfer| transfer.live == 0) {
            return None;
        }
        let all = self.transfers.iter().enumerate();
        let all = all.filter(|(_, transfer)| in_flight(transfer));
        let (index, _) = all.min_by_key(|(_, transfer)| transfer.number)?;
        Some(self.id(index))
    }

    /// Returns an event that the fetch stream has to wait for before the next copy.
    pub fn next_wait(&self) -> Option<Event> {
        self.waits.last().copied()
    }

    /// Notes that the fetch stream waits for an event.
    pub fn wait_issued(&mut self, event: Event) {
        self.waits.retain(|&waiting| waiting != event);
    }

    /// Takes all events that the fetch stream would have to wait for.
    pub fn take_waits(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.waits)
    }

    /// Takes a transfer whose time is to be collected, with the slot of its first expert.
    pub fn take_untimed(&mut self) -> Option<(TransferId, usize)> {
        let index = self
            .transfers
            .iter()
            .position(|transfer| transfer.untimed)?;
        self.transfers[index].untimed = false;
        Some((self.id(index), self.transfers[index].first_slot))
    }

    /// Returns whether an id still names the same use of its transfer.
    pub fn is_current(&self, id: TransferId) -> bool {
        self.transfers[id.index].number == id.number
    }

    /// Ends the fetching thread.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// Returns whether the fetching thread has to end.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Returns the number of experts.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether the device may use some memory for ever.
    pub fn has_leaked(&self) -> bool {
        self.leaked
    }

    /// Returns the most bytes of the scratchpad that were taken at a time.
    pub fn peak(&self) -> u64 {
        self.scratchpad.peak()
    }

    fn id(&self, index: usize) -> TransferId {
        TransferId {
            index,
            number: self.transfers[index].number,
        }
    }
}

/// Returns an expert and its neighbours as far as they are wanted, at most `most`.
fn run_around(expert: u32, wanted: impl Fn(u32) -> bool, most: u32) -> Range<u32> {
    let (mut start, mut end) = (expert, expert + 1);
    while end - start < most && wanted(end) {
        end += 1;
    }
    while end - start < most && start > 0 && wanted(start - 1) {
        start -= 1;
    }
    start..end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_found_on_both_sides() {
        let wanted = |expert| [0, 1, 2, 4, 5].contains(&expert);
        assert_eq!(run_around(1, wanted, 8), 0..3);
        assert_eq!(run_around(5, wanted, 8), 4..6);
        assert_eq!(run_around(0, wanted, 2), 0..2);
        assert_eq!(run_around(7, wanted, 8), 7..8);
        assert_eq!(
            run_around(u32::MAX - 1, |_| true, 1),
            u32::MAX - 1..u32::MAX
        );
    }
}
