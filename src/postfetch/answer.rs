//! What to do about an expert: asking the driver, waiting as the policy says.

use super::board::{Board, Cell, Phase};
use super::gpu::Gpu;
use super::plan::{PlannedLayer, Slice};
use super::policy::{Action, action};
use super::stats::add;
use super::{Backoff, Reason, Shared, State};
use crate::device::Stream;
use crate::gguf::TypeInfo;

/// What to do about an expert.
#[derive(Debug, Clone, Copy)]
pub struct Answer {
    /// Where its copy is.
    pub state: State,
    /// Why to compute on the CPU, or [`Reason::None`] to use the device.
    pub reason: Reason,
    /// Where the bytes are on the device; 0 when it is not to be used.
    pub device_address: u64,
    /// Whether the host computes gate and up of this expert on the CPU: it is among the
    /// first [`cpu_limit`](crate::config::PostFetch::cpu_limit) that were scheduled together.
    pub gate_up_on_cpu: bool,
    /// What it is; `None` when it is no down-projection of the model.
    pub expert: Option<ExpertBytes>,
}

/// The down-projection of an expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBytes {
    /// The same bytes in the process, if they can be read there without a copy. Valid until
    /// the expert is released, or for one that is not scheduled until a reload.
    pub host: Option<*const u8>,
    /// Bytes.
    pub nbytes: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Elements of a row, and rows.
    pub ne: [u64; 2],
    /// Type of the elements.
    pub ty: &'static TypeInfo,
    /// How often the tensor was replaced.
    pub generation: u64,
}

/// What an answer is for.
#[derive(Clone, Copy)]
pub(super) enum Use {
    Look,
    Host,
    Stream(Stream),
}

/// An expert on the board.
enum Found {
    Cpu(Reason, u32),
    /// In a transfer: which, its number, which row, which position.
    Transfer(usize, u64, u32, u32, Phase),
}

impl Shared {
    fn find(&self, board: &Board, cell: usize) -> Found {
        match board.cells[cell] {
            Cell::Idle | Cell::Wanted { .. } => Found::Cpu(Reason::NotScheduled, 0),
            Cell::Refused { reason, position } => Found::Cpu(reason, position),
            Cell::Held {
                transfer,
                row,
                position,
            } => {
                let found = &board.transfers[transfer];
                Found::Transfer(transfer, found.number, row, position, found.phase)
            }
        }
    }

    pub(super) fn answer(&self, layer: u32, expert: u32, purpose: Use) -> Answer {
        let answer = match self.cell(layer, expert) {
            Some((planned, cell)) if !self.is_off() => {
                self.answer_from_board(planned, expert, cell, purpose)
            }
            _ => {
                let reason = match self.plan.layer(layer) {
                    None => Reason::Foreign,
                    Some(planned) if expert >= planned.experts => Reason::Foreign,
                    Some(_) => self.never,
                };
                self.cpu(layer, expert, State::CpuOnly, reason, 0)
            }
        };
        if !matches!(purpose, Use::Look) {
            match answer.reason {
                Reason::None => add(&self.counters.hits, 1),
                reason => add(&self.counters.fallbacks[reason as usize], 1),
            }
        }
        answer
    }

    fn answer_from_board(
        &self,
        planned: &PlannedLayer,
        expert: u32,
        cell: usize,
        purpose: Use,
    ) -> Answer {
        let gpu = self
            .gpu
            .as_ref()
            .expect("there is a cell only with a device");
        let cpu =
            |state, reason, position| self.cpu(planned.layer, expert, state, reason, position);
        let mut waited = Waited::new(self, planned);
        loop {
            let found = self.find(&self.board.lock(), cell);
            let (index, number, row, position, phase) = match found {
                Found::Cpu(reason, position) => return cpu(State::CpuOnly, reason, position),
                Found::Transfer(index, number, row, position, phase) => {
                    (index, number, row, position, phase)
                }
            };
            let ready = &gpu.marks[index].ready;
            let state = match phase {
                Phase::Ready => State::GpuReady,
                Phase::InFlight => match gpu.device.is_done(ready.event) {
                    Ok(done) => {
                        let mut board = self.board.lock();
                        // Released, and used for others, while the driver was asked.
                        if board.transfers[index].number != number {
                            continue;
                        }
                        if done {
                            board.complete(number);
                            State::GpuReady
                        } else {
                            State::CopyInFlight
                        }
                    }
                    Err(error) => {
                        self.failed(index, number, &error);
                        continue;
                    }
                },
                _ => State::CopyInFlight,
            };
            if let (Use::Stream(stream), Phase::InFlight | Phase::Ready) = (purpose, phase) {
                return match self.hand_over(gpu, index, number, stream) {
                    Ok(()) => {
                        add(&self.counters.stream_hits, 1);
                        self.device(index, row, position, state)
                    }
                    Err(reason) => cpu(state, reason, position),
                };
            }
            // A stream that is to wait needs an event, and that comes with the copy.
            let block = match purpose {
                Use::Look => false,
                Use::Host => self.options.config.block_on_miss,
                Use::Stream(_) => true,
            };
            match action(state, block) {
                Action::UseDevice => return self.device(index, row, position, state),
                Action::UseCpu => return cpu(state, Reason::Missed, position),
                Action::Wait if self.is_off() => return cpu(state, self.never, position),
                Action::Wait if waited.too_long() => {
                    self.give_up("a copy did not end in time");
                    return cpu(state, Reason::TimedOut, position);
                }
                Action::Wait => waited.a_little(),
            }
        }
    }

    /// Makes a stream wait for a transfer, once.
    fn hand_over(
        &self,
        gpu: &Gpu,
        index: usize,
        number: u64,
        stream: Stream,
    ) -> Result<(), Reason> {
        {
            let mut board = self.board.lock();
            let transfer = &mut board.transfers[index];
            if transfer.number != number {
                return Err(Reason::NotScheduled);
            }
            // Experts that are copied together are for one stream together.
            if *transfer.stream.get_or_insert(stream) != stream {
                return Err(Reason::DeviceFailed);
            }
        }
        let waits = gpu.device.stream_wait(stream, gpu.marks[index].ready.event);
        waits.map_err(|error| {
            self.note(&error);
            Reason::DeviceFailed
        })
    }

    /// An answer for the device.
    fn device(&self, index: usize, row: u32, position: u32, state: State) -> Answer {
        let board = self.board.lock();
        let transfer = &board.transfers[index];
        let gpu = self
            .gpu
            .as_ref()
            .expect("there is a transfer only with a device");
        let address = gpu.scratchpad.address() + transfer.place + u64::from(row) * transfer.pitch;
        Answer {
            state,
            reason: Reason::None,
            device_address: address,
            gate_up_on_cpu: position < self.options.config.cpu_limit,
            expert: transfer
                .slice
                .as_ref()
                .map(|slice| self.describe(slice, row)),
        }
    }

    /// An answer for the CPU: with the bytes that were scheduled, or those that are current.
    fn cpu(&self, layer: u32, expert: u32, state: State, reason: Reason, position: u32) -> Answer {
        let held = self.cell(layer, expert).and_then(|(_, cell)| {
            let board = self.board.lock();
            let Cell::Held { transfer, row, .. } = board.cells[cell] else {
                return None;
            };
            let slice = board.transfers[transfer].slice.as_ref()?;
            Some(self.describe(slice, row))
        });
        let current = || {
            let slice = self.plan.layer(layer)?.slice(&self.model, expert)?;
            Some(self.describe(&slice, 0))
        };
        Answer {
            state,
            reason,
            device_address: 0,
            gate_up_on_cpu: position < self.options.config.cpu_limit,
            expert: held.or_else(current),
        }
    }

    fn describe(&self, slice: &Slice, row: u32) -> ExpertBytes {
        let (ne, nb) = (slice.view.ne(), slice.view.nb());
        ExpertBytes {
            host: slice.host(&self.model, row),
            nbytes: slice.nbytes,
            row_bytes: nb[1],
            ne: [ne[0], ne[1]],
            ty: slice.view.ty(),
            generation: slice.view.generation,
        }
    }
}

/// A wait for one copy, counted when it was one.
struct Waited<'a> {
    shared: &'a Shared,
    planned: &'a PlannedLayer,
    backoff: Option<Backoff>,
}

impl<'a> Waited<'a> {
    fn new(shared: &'a Shared, planned: &'a PlannedLayer) -> Waited<'a> {
        Waited {
            shared,
            planned,
            backoff: None,
        }
    }

    fn a_little(&mut self) {
        self.backoff.get_or_insert_with(Backoff::new).pause();
    }

    fn too_long(&self) -> bool {
        let backoff = self.backoff.as_ref();
        backoff.is_some_and(|backoff| backoff.elapsed() > self.shared.options.patience)
    }
}

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        let Some(backoff) = &self.backoff else {
            return;
        };
        let took = backoff.elapsed();
        add(&self.shared.counters.waits, 1);
        add(&self.shared.counters.wait_ns, took.as_nanos() as u64);
        if self.shared.options.config.debug {
            self.shared
                .layer_times(self.planned, |times| times.waited += took);
        }
    }
}
