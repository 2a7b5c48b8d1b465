//! Which expert is in which transfer, and how far each is.
//!
//! Everything here is done under one lock, for some hundred nanoseconds, and nothing here
//! calls the driver.

use std::collections::VecDeque;
use std::ops::Range;

use super::plan::{PlannedLayer, Slice, padded};
use super::policy::Reason;
use super::scratchpad::Scratchpad;
use crate::device::{Event, Stream};
use crate::model::Model;

/// Neighbours are copied together up to this size. A copy costs some microseconds beside
/// its bytes, which a 13 GB/s link moves 100 KB in: below a megabyte that shows, above it
/// an expert would only wait for its neighbours.
const TOGETHER: u64 = 2 << 20;

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cell {
    /// Not scheduled.
    Idle,
    /// Asked for by the call that is under way.
    Wanted { position: u32 },
    /// Part of a transfer.
    Held {
        transfer: usize,
        /// Which row of it.
        row: u32,
        /// Which of the experts that were asked for together.
        position: u32,
    },
    /// Scheduled in vain.
    Refused { reason: Reason, position: u32 },
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Free,
    Queued,
    /// The fetching thread is busy with it.
    Issuing,
    InFlight,
    Ready,
    /// Failed half-way: its source may be in use until the stream is past it.
    Stuck,
}

/// Experts that are copied together.
#[derive(Debug)]
pub(super) struct Transfer {
    pub phase: Phase,
    /// Differs each time it is used.
    pub number: u64,
    /// The cell of its first expert.
    pub cell: usize,
    pub rows: u32,
    /// Experts that nobody has released yet.
    live: u32,
    /// Where in the scratchpad, and bytes from expert to expert there.
    pub place: u64,
    pub pitch: u64,
    /// Whether that place is still taken.
    placed: bool,
    /// The first expert's bytes.
    pub slice: Option<Slice>,
    /// The host's stream that uses it.
    pub stream: Option<Stream>,
    /// Somebody still records when that has used it.
    closing: bool,
    /// Its time on the device was not asked for yet.
    pub untimed: bool,
}

#[derive(Debug)]
pub(super) struct Board {
    pub cells: Vec<Cell>,
    pub transfers: Vec<Transfer>,
    free: VecDeque<usize>,
    pub queue: VecDeque<usize>,
    pub pad: Scratchpad,
    /// What the fetch stream has to wait for before it copies again.
    pub waits: Vec<Event>,
    /// Transfers that are issued and not known to be done.
    pub in_flight: u32,
    pub stop: bool,
    /// Some memory may be in use for ever.
    pub doubtful: bool,
    /// Transfers that failed since the last one that did not.
    pub failures: u32,
    numbers: u64,
}

/// What a call of schedule did.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Scheduled {
    /// Experts in transfers, those among them that share one, and their bytes.
    pub experts: u64,
    pub coalesced: u64,
    pub bytes: u64,
    pub duplicates: u64,
    pub rejected: u64,
}

impl Board {
    pub fn new(cells: usize, bytes: u64, transfers: usize) -> Board {
        let transfer = |_| Transfer {
            phase: Phase::Free,
            number: 0,
            cell: 0,
            rows: 0,
            live: 0,
            place: 0,
            pitch: 0,
            placed: false,
            slice: None,
            stream: None,
            closing: false,
            untimed: false,
        };
        Board {
            cells: vec![Cell::Idle; cells],
            transfers: (0..transfers).map(transfer).collect(),
            free: (0..transfers).collect(),
            queue: VecDeque::with_capacity(transfers),
            pad: Scratchpad::new(bytes, transfers),
            waits: Vec::with_capacity(transfers),
            in_flight: 0,
            stop: false,
            doubtful: false,
            failures: 0,
            numbers: 0,
        }
    }

    /// Makes transfers of the experts that are not in one yet, in the order in which they
    /// are first asked for.
    pub fn schedule(&mut self, model: &Model, layer: &PlannedLayer, ids: &[i32]) -> Scheduled {
        let mut done = Scheduled::default();
        let cell = |id: i32| {
            let expert = u32::try_from(id)
                .ok()
                .filter(|&expert| expert < layer.experts)?;
            Some((expert, layer.first_cell + expert as usize))
        };
        let mut position = 0;
        for &id in ids {
            let Some((_, cell)) = cell(id) else {
                done.rejected += 1;
                continue;
            };
            match self.cells[cell] {
                Cell::Idle | Cell::Refused { .. } => {
                    self.cells[cell] = Cell::Wanted { position };
                    position += 1;
                }
                Cell::Wanted { .. } | Cell::Held { .. } => done.duplicates += 1,
            }
        }
        for &id in ids {
            if let Some((expert, at)) = cell(id)
                && let Cell::Wanted { position } = self.cells[at]
                && let Err(reason) = self.transfer(model, layer, expert, &mut done)
            {
                self.cells[at] = Cell::Refused { reason, position };
            }
        }
        done
    }

    /// Queues a transfer of an expert and those of its neighbours that are wanted too.
    fn transfer(
        &mut self,
        model: &Model,
        layer: &PlannedLayer,
        expert: u32,
        done: &mut Scheduled,
    ) -> Result<(), Reason> {
        let slice = layer.slice(model, expert).ok_or(Reason::Foreign)?;
        if !slice.is_on_host() {
            return Err(Reason::Elsewhere);
        }
        let pitch = padded(slice.nbytes);
        let most = match slice.parts {
            1 => 1,
            _ => (TOGETHER / pitch.max(1)).max(1) as u32,
        };
        let wanted = |expert: u32| {
            let cell = self.cells[layer.first_cell..].get(expert as usize);
            expert < layer.experts && matches!(cell, Some(Cell::Wanted { .. }))
        };
        let mut run = run_around(expert, wanted, most);
        let index = *self.free.front().ok_or(Reason::NoRoom)?;
        let mut place = self.pad.take(pitch * run.len() as u64);
        if place.is_none() && run.len() > 1 {
            run = expert..expert + 1;
            place = self.pad.take(pitch);
        }
        let place = place.ok_or(Reason::NoRoom)?;
        self.free.pop_front();
        self.numbers += 1;
        let rows = run.len() as u32;
        let nbytes = slice.nbytes;
        let transfer = &mut self.transfers[index];
        transfer.phase = Phase::Queued;
        transfer.number = self.numbers;
        transfer.cell = layer.first_cell + run.start as usize;
        transfer.rows = rows;
        transfer.live = rows;
        transfer.place = place;
        transfer.pitch = pitch;
        transfer.placed = true;
        transfer.slice = Some(Slice {
            offset: slice.offset - u64::from(expert - run.start) * nbytes,
            ..slice
        });
        transfer.stream = None;
        for row in 0..rows {
            let cell = &mut self.cells[layer.first_cell + (run.start + row) as usize];
            if let Cell::Wanted { position } = *cell {
                *cell = Cell::Held {
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

    /// Lets go of an expert. Whoever gets a transfer back has to record when its stream has
    /// used it, and then to [`Board::close`] it.
    #[must_use]
    pub fn release(&mut self, cell: usize) -> Option<(usize, Stream)> {
        let before = std::mem::replace(&mut self.cells[cell], Cell::Idle);
        let Cell::Held {
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
            transfer.closing = true;
            return Some((index, stream));
        }
        self.settle(index);
        None
    }

    /// Ends what [`Board::release`] began. Without the event, the memory stays taken.
    pub fn close(&mut self, index: usize, consumed: Option<Event>) {
        let Some(consumed) = consumed else {
            self.doubtful = true;
            return;
        };
        self.waits.push(consumed);
        self.transfers[index].closing = false;
        self.settle(index);
    }

    /// The stream is past a transfer, and so past all before it.
    pub fn complete(&mut self, number: u64) {
        self.failures = 0;
        for index in 0..self.transfers.len() {
            let transfer = &mut self.transfers[index];
            if transfer.number > number {
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
    }

    /// A transfer failed. Its experts are computed on the CPU.
    pub fn fail(&mut self, index: usize, reason: Reason, touched: bool) {
        self.failures += 1;
        let transfer = &mut self.transfers[index];
        if matches!(transfer.phase, Phase::Issuing | Phase::InFlight) {
            self.in_flight -= 1;
        }
        transfer.phase = if touched { Phase::Stuck } else { Phase::Ready };
        for cell in transfer.cell..transfer.cell + transfer.rows as usize {
            if let Cell::Held {
                transfer: holder,
                position,
                ..
            } = self.cells[cell]
                && holder == index
            {
                self.cells[cell] = Cell::Refused { reason, position };
                self.transfers[index].live -= 1;
            }
        }
        self.settle(index);
    }

    /// Frees what nobody needs any more of a transfer: its place at once, since later copies
    /// are in the same stream and so behind its own; its source when its copy is done.
    fn settle(&mut self, index: usize) {
        let transfer = &mut self.transfers[index];
        if transfer.live > 0 || transfer.closing {
            return;
        }
        if std::mem::take(&mut transfer.placed) {
            self.pad.give(transfer.place);
        }
        match transfer.phase {
            Phase::Ready => {}
            Phase::Queued => self.queue.retain(|&queued| queued != index),
            // When its copy is done.
            Phase::Issuing | Phase::InFlight | Phase::Stuck | Phase::Free => return,
        }
        transfer.phase = Phase::Free;
        transfer.slice = None;
        self.free.push_back(index);
    }

    /// The transfer that will be done first.
    pub fn oldest_in_flight(&self) -> Option<usize> {
        let all = self.transfers.iter().enumerate();
        let under_way = all.filter(|(_, transfer)| transfer.phase == Phase::InFlight);
        Some(under_way.min_by_key(|(_, transfer)| transfer.number)?.0)
    }

    /// Whether something comes free when a copy is done.
    pub fn has_abandoned(&self) -> bool {
        let all = &mut self.transfers.iter();
        all.any(|transfer| transfer.phase == Phase::InFlight && transfer.live == 0)
    }
}

/// An expert and its neighbours as far as they are wanted, at most so many.
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
