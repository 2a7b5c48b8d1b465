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
//! A transfer of an expert that is in a slot of the cache has nothing to copy: it is `Ready` from
//! the beginning. If the copy to the slot is not done yet, the expert returns to the transfer of
//! that copy. Each slot of the cache names the transfer that filled it, and is forgotten if that
//! transfer fails, or is released before its copy is issued.
//!
//! All of this is guarded by one lock, for some hundred nanoseconds at a time. No method calls
//! the driver. The methods keep these rules:
//!
//! - A slot is in at most one transfer, and a transfer counts the slots that are not released.
//! - A transfer keeps its part of the scratchpad, or its slot of the cache, until all its experts
//!   are released and the stream that uses them has been recorded. Later copies are in the same
//!   stream, so the memory can be given out again before the copy is done.
//! - A transfer keeps its source until the copy is done, or has not begun.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::cache::Cache;
use super::plan::{ExpertWeights, PlannedLayer, padded};
use super::policy::Reason;
use super::scratchpad::Scratchpad;
use super::stats::Stats;
use super::transfer::{Phase, TransferId};
use crate::device::Stream;
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

/// Device memory of a transfer.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    /// Offset in the device memory of the scheduler, and bytes from expert to expert there.
    offset: u64,
    pitch: u64,
    /// The slot of the cache; `None` for a part of the scratchpad.
    cached: Option<usize>,
}

/// Experts that are copied together, or an expert whose bytes are in a slot of the cache.
#[derive(Debug, Default)]
struct Transfer {
    phase: Phase,
    /// Differs each time the transfer is used.
    number: u64,
    /// The slot of its first expert.
    first_slot: usize,
    rows: u32,
    /// Experts that are not released.
    live: u32,
    memory: Memory,
    /// Whether the part of the scratchpad is still taken, or the slot of the cache in use.
    placed: bool,
    /// The weights of the first expert.
    weights: Option<ExpertWeights>,
    /// The stream of the caller that uses the experts.
    stream: Option<Stream>,
    /// Released, but the end of the caller's work in `stream` is not recorded yet.
    awaiting_consumer: bool,
    /// Whether something is copied: the bytes were not in the cache.
    is_copy: bool,
    /// Whether an expert was acquired for the device.
    used: bool,
    /// Whether a stream of the caller waits for its copy.
    holds_stream: bool,
    /// Its time, as long as it counts as unused.
    unused: Option<Duration>,
    /// The last copy that is done, but whose times are not collected yet.
    untimed: Option<Untimed>,
}

/// A copy that is done, and whose times are to be collected.
#[derive(Debug, Clone, Copy)]
pub(super) struct Untimed {
    pub id: TransferId,
    /// The slot of its first expert.
    pub slot: usize,
    /// Whether a stream waited for it.
    pub held_stream: bool,
    /// Whether an expert was acquired for the device, or stays in the cache.
    used: bool,
}

/// A transfer for the fetching thread to issue.
#[derive(Debug)]
pub(super) struct Issue {
    pub id: TransferId,
    /// The weights of the first expert; the others follow in the same tensor.
    pub weights: ExpertWeights,
    /// Offset in the device memory, and bytes from expert to expert there.
    pub offset: u64,
    pub pitch: u64,
    pub rows: u32,
}

/// A record of the event that follows the use of a transfer by a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Consumed {
    /// Position of the transfer and of its events.
    pub index: usize,
    /// Differs each time the event is recorded.
    number: u64,
}

/// A transfer that a stream used, and whose last expert was released.
#[derive(Debug, Clone, Copy)]
pub(super) struct Released {
    pub id: TransferId,
    pub stream: Stream,
    /// The event still stands for an earlier use, which no copy waits for yet.
    pub event_in_use: bool,
}

/// An expert in a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held<'a> {
    pub id: TransferId,
    pub phase: Phase,
    /// The weights of the first expert of the transfer.
    pub weights: &'a ExpertWeights,
    /// Position of the expert in the transfer.
    pub row: u32,
    /// Offset of the expert in the device memory.
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
    cache: Cache,
    /// What the fetch stream has to wait for before the next copy. One at most for each transfer.
    pub waits: Vec<Consumed>,
    /// Transfers that are issuing or in flight.
    in_flight: u32,
    /// Transfers up to this number are issued however many are in flight: a stream needs them.
    needed: u64,
    /// The fetching thread fills page-locked buffers.
    staging: bool,
    stopped: bool,
    /// The device may use some memory for ever.
    pub leaked: bool,
    /// Transfers that failed since the last successful one.
    failures: u32,
    /// The last number of a transfer or of a record.
    last_number: u64,
}

impl TransferTable {
    /// Makes a table for `slots` experts, a scratchpad of `bytes` bytes, a cache, and `transfers`
    /// transfers.
    pub fn new(slots: usize, bytes: u64, cache: Cache, transfers: usize) -> TransferTable {
        TransferTable {
            slots: vec![ExpertSlot::Idle; slots],
            transfers: (0..transfers).map(|_| Transfer::default()).collect(),
            free: (0..transfers).collect(),
            queue: VecDeque::with_capacity(transfers),
            scratchpad: Scratchpad::new(bytes, transfers),
            cache,
            waits: Vec::with_capacity(transfers),
            in_flight: 0,
            needed: 0,
            staging: false,
            stopped: false,
            leaked: false,
            failures: 0,
            last_number: 0,
        }
    }

    /// Queues transfers of the experts that are in no transfer yet, in the order of `ids`. Those in
    /// a slot of the cache are on the device at once. The others are copied to free slots. If the
    /// layer has a slot for each expert of `ids`, they also replace experts that are not in use.
    /// What is left is copied to the scratchpad. Returns the bytes of the new transfers.
    pub fn schedule(
        &mut self,
        model: &Model,
        layer: &PlannedLayer,
        ids: &[i32],
        stats: &mut Stats,
    ) -> u64 {
        let slot = |id: i32| {
            let expert = u32::try_from(id).ok()?;
            Some((expert, layer.slot(expert)?))
        };
        let mut position = 0;
        for &id in ids {
            let Some((expert, slot)) = slot(id) else {
                stats.rejected += 1;
                continue;
            };
            match self.slots[slot] {
                ExpertSlot::Idle | ExpertSlot::Refused { .. } => {
                    self.slots[slot] = ExpertSlot::Wanted { position };
                    self.cache.touch(layer.position, expert);
                    position += 1;
                }
                ExpertSlot::Wanted { .. } | ExpertSlot::Held { .. } => stats.duplicates += 1,
            }
        }
        let cache_slots = self.cache_slots(layer);
        let fits = position as usize <= cache_slots;
        let (hits, mut bytes) = (stats.cache_hits, 0);
        for &id in ids {
            if let Some((expert, slot)) = slot(id)
                && let ExpertSlot::Wanted { position } = self.slots[slot]
            {
                match self.place(model, layer, expert, fits, stats) {
                    Ok(queued) => bytes += queued,
                    Err(reason) => self.slots[slot] = ExpertSlot::Refused { reason, position },
                }
            }
        }
        if cache_slots > 0 {
            stats.cache_misses += u64::from(position) - (stats.cache_hits - hits);
        }
        bytes
    }

    /// Holds an expert that is in a slot of the cache, or queues a transfer of the expert. Returns
    /// the bytes of the transfer.
    fn place(
        &mut self,
        model: &Model,
        layer: &PlannedLayer,
        expert: u32,
        fits: bool,
        stats: &mut Stats,
    ) -> Result<u64, Reason> {
        let weights = layer.weights(model, expert).ok_or(Reason::NotAnExpert)?;
        if !weights.is_on_host() {
            return Err(Reason::NotInHostMemory);
        }
        let generation = weights.view.generation;
        if let Some(slot) = self.cache.find(layer.position, expert, generation) {
            self.hold(layer.first_slot + expert as usize, slot, weights)?;
            stats.cache_hits += 1;
            return Ok(0);
        }
        let index = *self.free.front().ok_or(Reason::NoRoom)?;
        let (run, memory) = match self.load(layer, expert, weights.nbytes, fits, stats) {
            Some(memory) => (expert..expert + 1, memory),
            None => self.take(layer, expert, &weights)?,
        };
        self.free.pop_front();
        let (rows, nbytes) = (run.len() as u32, weights.nbytes);
        let first_slot = layer.first_slot + run.start as usize;
        let weights = ExpertWeights {
            offset: weights.offset - u64::from(expert - run.start) * nbytes,
            ..weights
        };
        let id = self.begin(index, Phase::Queued, first_slot, rows, memory, weights);
        if let Some(slot) = memory.cached {
            self.cache.fill(slot, expert, generation, id);
        }
        self.queue.push_back(index);
        stats.experts += u64::from(rows);
        stats.coalesced += u64::from(rows - 1);
        Ok(nbytes * u64::from(rows))
    }

    /// Holds an expert that is in a slot of the cache, or will be there after a copy.
    fn hold(
        &mut self,
        expert_slot: usize,
        slot: usize,
        weights: ExpertWeights,
    ) -> Result<(), Reason> {
        if self.free.is_empty() || self.cache.slots[slot].in_use {
            return Err(Reason::NoRoom);
        }
        let copy = self.cache.slots[slot].copy;
        let found = &mut self.transfers[copy.index];
        if found.number == copy.number && matches!(found.phase, Phase::Issuing | Phase::InFlight) {
            found.live = 1;
            found.placed = true;
            self.hold_rows(copy.index, expert_slot, 1);
        } else if let Some(index) = self.free.pop_back() {
            // The transfer that was used last: the fewer there are, the fewer waits there are.
            let memory = self.slot_memory(slot);
            self.begin(index, Phase::Ready, expert_slot, 1, memory, weights);
        }
        self.cache.slots[slot].in_use = true;
        Ok(())
    }

    /// Takes a slot of the cache for an expert.
    fn load(
        &mut self,
        layer: &PlannedLayer,
        expert: u32,
        nbytes: u64,
        fits: bool,
        stats: &mut Stats,
    ) -> Option<Memory> {
        let slots = &self.slots;
        let replaces = |expert| {
            let slot = layer.slot(expert).map(|slot| slots[slot]);
            fits && !matches!(slot, Some(ExpertSlot::Wanted { .. }))
        };
        let (slot, evicts) = self.cache.load(layer.position, expert, nbytes, replaces)?;
        stats.evictions += u64::from(evicts);
        Some(self.slot_memory(slot))
    }

    fn slot_memory(&self, slot: usize) -> Memory {
        let found = &self.cache.slots[slot];
        Memory {
            offset: found.offset,
            pitch: found.bytes,
            cached: Some(slot),
        }
    }

    /// Takes a part of the scratchpad for an expert, with its wanted neighbours if possible.
    fn take(
        &mut self,
        layer: &PlannedLayer,
        expert: u32,
        weights: &ExpertWeights,
    ) -> Result<(Range<u32>, Memory), Reason> {
        let pitch = padded(weights.nbytes);
        let most = match weights.parts {
            1 => 1,
            _ => (MAX_MERGED_BYTES / pitch.max(1)).max(1) as u32,
        };
        let wanted = |expert: u32| {
            let slot = layer.slot(expert).map(|slot| self.slots[slot]);
            let is_wanted = matches!(slot, Some(ExpertSlot::Wanted { .. }));
            is_wanted && !self.cache.has(layer.position, expert)
        };
        let mut run = run_around(expert, wanted, most);
        let mut offset = self.scratchpad.take(pitch * run.len() as u64);
        if offset.is_none() && run.len() > 1 {
            run = expert..expert + 1;
            offset = self.scratchpad.take(pitch);
        }
        let memory = Memory {
            offset: offset.ok_or(Reason::NoRoom)?,
            pitch,
            cached: None,
        };
        Ok((run, memory))
    }

    /// Begins a use of a free transfer.
    fn begin(
        &mut self,
        index: usize,
        phase: Phase,
        first_slot: usize,
        rows: u32,
        memory: Memory,
        weights: ExpertWeights,
    ) -> TransferId {
        self.last_number += 1;
        let transfer = &mut self.transfers[index];
        transfer.phase = phase;
        transfer.number = self.last_number;
        transfer.first_slot = first_slot;
        transfer.rows = rows;
        transfer.live = rows;
        transfer.memory = memory;
        transfer.placed = true;
        transfer.weights = Some(weights);
        transfer.stream = None;
        transfer.is_copy = phase == Phase::Queued;
        transfer.used = false;
        transfer.holds_stream = false;
        transfer.unused = None;
        self.hold_rows(index, first_slot, rows);
        self.id(index)
    }

    /// Notes which transfer holds the wanted experts in a range.
    fn hold_rows(&mut self, transfer: usize, first_slot: usize, rows: u32) {
        for (row, slot) in (0..rows).zip(&mut self.slots[first_slot..]) {
            if let ExpertSlot::Wanted { position } = *slot {
                *slot = ExpertSlot::Held {
                    transfer,
                    row,
                    position,
                };
            }
        }
    }

    /// Returns the position of an expert among those that were scheduled together, and its transfer
    /// or the reason why it is in none.
    pub fn lookup(&self, slot: usize) -> (u32, Result<Held<'_>, Reason>) {
        match self.slots[slot] {
            ExpertSlot::Idle | ExpertSlot::Wanted { .. } => (0, Err(Reason::NotScheduled)),
            ExpertSlot::Refused { reason, position } => (position, Err(reason)),
            ExpertSlot::Held {
                transfer,
                row,
                position,
            } => {
                let found = &self.transfers[transfer];
                let held = |weights| Held {
                    id: self.id(transfer),
                    phase: found.phase,
                    weights,
                    row,
                    offset: found.memory.offset + u64::from(row) * found.memory.pitch,
                };
                let weights = found.weights.as_ref();
                (position, weights.map(held).ok_or(Reason::NotScheduled))
            }
        }
    }

    /// Gives the next transfer to the fetching thread, unless `most` are under way and no stream needs
    /// it. [`TransferTable::issued`] or [`TransferTable::fail`] has to follow.
    pub fn begin_issue(&mut self, most: u32) -> Option<Issue> {
        let index = *self.queue.front()?;
        if self.in_flight >= most && self.transfers[index].number > self.needed {
            return None;
        }
        self.queue.pop_front();
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
            offset: transfer.memory.offset,
            pitch: transfer.memory.pitch,
            rows: transfer.rows,
        })
    }

    /// Notes that the copy of a transfer is in the stream.
    pub fn issued(&mut self, id: TransferId) {
        debug_assert_eq!(self.transfers[id.index].phase, Phase::Issuing);
        self.transfers[id.index].phase = Phase::InFlight;
        self.staging = false;
    }

    /// Notes that the copy of the issuing transfer goes through page-locked buffers.
    pub fn stage(&mut self) {
        self.staging = true;
    }

    /// Requests that a transfer is issued now, because a stream needs it. Returns false while the
    /// fetching thread may wait for buffers.
    pub fn need(&mut self, id: TransferId) -> bool {
        if self.is_current(id) {
            self.needed = self.needed.max(id.number);
        }
        !self.staging
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
                    transfer.untimed = Some(Untimed {
                        id: TransferId {
                            index,
                            number: transfer.number,
                        },
                        slot: transfer.first_slot,
                        held_stream: transfer.holds_stream,
                        used: transfer.used || transfer.memory.cached.is_some(),
                    });
                    self.in_flight -= 1;
                }
                Phase::Stuck => transfer.phase = Phase::Ready,
                _ => continue,
            }
            self.settle(index);
        }
        true
    }

    /// Notes that a transfer failed, unless it was released and used again: the CPU computes its
    /// experts. `source_in_use` means that the device may still read the source. Returns the number
    /// of failures in a row.
    pub fn fail(&mut self, id: TransferId, reason: Reason, source_in_use: bool) -> u32 {
        let phase = self.transfers[id.index].phase;
        if self.is_current(id) && matches!(phase, Phase::Issuing | Phase::InFlight) {
            self.fail_at(id.index, reason, source_in_use);
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
        self.staging &= transfer.phase != Phase::Issuing;
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
        self.forget_copy(index);
        self.settle(index);
    }

    /// Reserves a transfer for a stream of the caller. Returns whether the stream did not have it.
    pub fn claim(&mut self, id: TransferId, stream: Stream) -> Result<bool, Reason> {
        if !self.is_current(id) {
            return Err(Reason::NotScheduled);
        }
        // Experts that are copied together are for one stream.
        match self.transfers[id.index].stream.replace(stream) {
            None => Ok(true),
            Some(before) if before == stream => Ok(false),
            Some(before) => {
                self.transfers[id.index].stream = Some(before);
                Err(Reason::DeviceFailed)
            }
        }
    }

    /// Notes that a stream waits for a transfer. A transfer that is done holds up no stream.
    pub fn holds_stream(&mut self, id: TransferId) {
        let transfer = &mut self.transfers[id.index];
        if transfer.number == id.number && transfer.phase == Phase::InFlight {
            transfer.holds_stream = true;
        }
    }

    /// Notes that an expert of a transfer is acquired for the device. Returns `None` unless it is the
    /// first one of a copy, and otherwise the time of the copy if that counts as unused so far.
    pub fn note_use(&mut self, id: TransferId) -> Option<Option<Duration>> {
        let transfer = &mut self.transfers[id.index];
        let is_first = transfer.number == id.number && !transfer.used && transfer.is_copy;
        if !is_first {
            return None;
        }
        transfer.used = true;
        if let Some(untimed) = transfer.untimed.as_mut().filter(|of| of.id == id) {
            untimed.used = true;
        }
        Some(transfer.unused.take())
    }

    /// Forgets the slot of the cache that a transfer did not fill.
    fn forget_copy(&mut self, index: usize) {
        if let Some(slot) = self.transfers[index].memory.cached {
            self.cache.forget(slot, self.id(index));
        }
    }

    /// Releases an expert. When it was the last of a transfer that a stream uses, the caller has
    /// to record an event in that stream, and to call [`TransferTable::consumed`].
    #[must_use]
    pub fn release(&mut self, slot: usize) -> Option<Released> {
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
            return Some(Released {
                id: self.id(index),
                stream,
                event_in_use: self.waits.iter().any(|wait| wait.index == index),
            });
        }
        self.settle(index);
        None
    }

    /// Ends what [`TransferTable::release`] began. If the event was not recorded, the memory stays
    /// taken.
    pub fn consumed(&mut self, id: TransferId, recorded: bool) {
        if !recorded {
            self.leaked = true;
            return;
        }
        self.last_number += 1;
        let (index, number) = (id.index, self.last_number);
        match self.waits.iter_mut().find(|wait| wait.index == index) {
            Some(wait) => wait.number = number,
            None => self.waits.push(Consumed { index, number }),
        }
        self.transfers[index].awaiting_consumer = false;
        self.settle(index);
    }

    /// Frees what a transfer no longer needs: its device memory at once, its source when its copy
    /// is done. The cache keeps the bytes, unless their copy has not begun.
    fn settle(&mut self, index: usize) {
        let transfer = &mut self.transfers[index];
        if transfer.live > 0 || transfer.awaiting_consumer {
            return;
        }
        if std::mem::take(&mut transfer.placed) {
            match transfer.memory.cached {
                Some(slot) => self.cache.slots[slot].in_use = false,
                None => self.scratchpad.give(transfer.memory.offset),
            }
        }
        match transfer.phase {
            Phase::Ready => {}
            Phase::Queued => {
                self.queue.retain(|&queued| queued != index);
                self.forget_copy(index);
            }
            Phase::Issuing | Phase::InFlight | Phase::Stuck | Phase::Free => return,
        }
        let transfer = &mut self.transfers[index];
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

    /// Returns what the fetch stream has to wait for before the next copy.
    pub fn next_wait(&self) -> Option<Consumed> {
        self.waits.last().copied()
    }

    /// Notes that the fetch stream waits for an event. If the event was recorded again meanwhile,
    /// the fetch stream has to wait again.
    pub fn wait_issued(&mut self, wait: Consumed) {
        self.waits.retain(|&waiting| waiting != wait);
    }

    /// Returns the first copy in a range of transfers whose times are to be collected.
    pub fn untimed(&self, mut range: Range<usize>) -> Option<Untimed> {
        range.find_map(|index| self.transfers[index].untimed)
    }

    /// Notes that the times of a copy are collected. Returns whether the copy is unused so far.
    pub fn timed(&mut self, id: TransferId, time: Duration) -> bool {
        let transfer = &mut self.transfers[id.index];
        let unused = transfer.untimed.take().is_some_and(|of| !of.used);
        if unused && transfer.number == id.number {
            transfer.unused = Some(time);
        }
        unused
    }

    /// Returns whether experts in a range of slots are held, or copies of theirs are under way or not
    /// timed.
    pub fn is_busy(&self, slots: &Range<usize>) -> bool {
        let is_held = |slot: &ExpertSlot| matches!(slot, ExpertSlot::Held { .. });
        self.slots[slots.clone()].iter().any(is_held)
            || self.transfers.iter().any(|of| {
                let untimed = of.untimed.is_some_and(|of| slots.contains(&of.slot));
                let under_way = !matches!(of.phase, Phase::Free | Phase::Ready);
                untimed || under_way && slots.contains(&of.first_slot)
            })
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

    /// Returns the number of slots that a layer has in the cache.
    pub fn cache_slots(&self, layer: &PlannedLayer) -> usize {
        self.cache.slots_of(layer.position)
    }

    /// Adds the sizes of scratchpad and cache to statistics.
    pub fn note_sizes(&self, stats: &mut Stats) {
        stats.scratchpad_bytes = self.scratchpad.len;
        stats.scratchpad_peak = self.scratchpad.peak;
        stats.cache_bytes = self.cache.bytes();
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
