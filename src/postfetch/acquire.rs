//! The choice between device and CPU for one expert, with the waits that the policy permits.

use super::device_state::DeviceState;
use super::plan::{ExpertWeights, PlannedLayer};
use super::policy::{Action, Reason, State, action};
use super::shared::{Backoff, LATE, Shared};
use super::stats::add;
use super::transfer::{Phase, TransferId};
use super::transfer_table::Lookup;
use crate::device::Stream;
use sidecar_core::gguf::TypeInfo;

/// Where to compute an expert.
#[derive(Debug, Clone, Copy)]
pub struct Acquired {
    /// Progress of the copy.
    pub state: State,
    /// Why to compute on the CPU, or [`Reason::None`] to use the device.
    pub reason: Reason,
    /// Address of the bytes on the device; 0 to compute on the CPU.
    pub device_address: u64,
    /// Whether the caller computes gate and up of this expert on the CPU: the expert is among
    /// the first [`cpu_limit`](sidecar_core::config::PostFetch::cpu_limit) that were scheduled together.
    pub gate_up_on_cpu: bool,
    /// The weights; `None` when the model does not have the expert.
    pub expert: Option<ExpertBytes>,
}

/// The down-projection of an expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertBytes {
    /// Address of the same bytes in the process, if they can be read there without a copy. Valid
    /// until the expert is released; for an expert that is not scheduled, until a reload.
    pub host: Option<*const u8>,
    /// Bytes of the matrix.
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

/// Who reads the bytes of an expert.
#[derive(Debug, Clone, Copy)]
pub(super) enum Access {
    /// No reader: only the state is wanted. Never waits, counts nothing.
    Query,
    /// The caller, which waits for the copy.
    Host,
    /// A stream of the caller, which waits for the copy instead of the caller.
    Stream(Stream),
}

/// Chooses where to compute an expert.
pub(super) fn acquire(shared: &Shared, layer: u32, expert: u32, access: Access) -> Acquired {
    let acquired = match shared.slot(layer, expert) {
        Some((gpu, planned, slot)) if !shared.is_off() => {
            let request = Request {
                shared,
                gpu,
                planned,
                expert,
                slot,
            };
            request.acquire(access)
        }
        _ => {
            let planned = shared.plan.layer(layer);
            let reason = match planned.and_then(|planned| planned.slot(expert)) {
                None => Reason::NotAnExpert,
                Some(_) => shared.initial_fallback,
            };
            on_cpu(shared, (layer, expert), State::CpuOnly, reason, 0)
        }
    };
    if !matches!(access, Access::Query) {
        match acquired.reason {
            Reason::None => add(&shared.counters.hits, 1),
            reason => add(&shared.counters.fallbacks[reason as usize], 1),
        }
    }
    acquired
}

/// One call for an expert that has a slot.
struct Request<'a> {
    shared: &'a Shared,
    gpu: &'a DeviceState,
    planned: &'a PlannedLayer,
    expert: u32,
    slot: usize,
}

impl Request<'_> {
    fn acquire(&self, access: Access) -> Acquired {
        let shared = self.shared;
        let mut wait = Wait::new(shared, self.planned);
        loop {
            let found = shared.table.lock().lookup(self.slot);
            let (id, position, phase) = match found {
                Lookup::Cpu { reason, position } => {
                    return self.on_cpu(State::CpuOnly, reason, position);
                }
                Lookup::Transfer {
                    id,
                    position,
                    phase,
                } => (id, position, phase),
            };
            let Some(state) = self.state(id, phase) else {
                continue;
            };
            if let (Access::Stream(stream), Phase::InFlight | Phase::Ready) = (access, phase) {
                if let Err(reason) = self.hand_over(id, stream) {
                    return self.on_cpu(state, reason, position);
                }
                let Some(acquired) = self.on_device(id, position, state) else {
                    continue;
                };
                add(&shared.counters.stream_hits, 1);
                return acquired;
            }
            let block = match access {
                Access::Query => false,
                Access::Host => shared.options.config.block_on_miss,
                // The stream waits for an event, which is recorded after the copy is issued.
                Access::Stream(_) => true,
            };
            match action(state, block) {
                Action::UseDevice => match self.on_device(id, position, state) {
                    Some(acquired) => return acquired,
                    None => continue,
                },
                Action::UseCpu => return self.on_cpu(state, Reason::Missed, position),
                Action::Wait if shared.is_off() => {
                    return self.on_cpu(state, shared.initial_fallback, position);
                }
                Action::Wait if wait.is_over() => {
                    shared.disable(LATE);
                    return self.on_cpu(state, Reason::TimedOut, position);
                }
                Action::Wait => wait.pause(),
            }
        }
    }

    /// Returns the progress of a transfer; `None` when it failed, or was released and used again.
    fn state(&self, id: TransferId, phase: Phase) -> Option<State> {
        let ready = &self.gpu.events[id.index].ready;
        match phase {
            Phase::Ready => Some(State::GpuReady),
            Phase::InFlight => match self.gpu.device.is_done(ready.event) {
                Ok(true) => {
                    let current = self.shared.table.lock().complete(id);
                    current.then_some(State::GpuReady)
                }
                Ok(false) => {
                    let current = self.shared.table.lock().is_current(id);
                    current.then_some(State::CopyInFlight)
                }
                Err(error) => {
                    self.shared.copy_failed(id, &error);
                    None
                }
            },
            _ => Some(State::CopyInFlight),
        }
    }

    /// Makes a stream wait for a transfer.
    fn hand_over(&self, id: TransferId, stream: Stream) -> Result<(), Reason> {
        self.shared.table.lock().claim(id, stream)?;
        let ready = self.gpu.events[id.index].ready.event;
        let waits = self.gpu.device.stream_wait(stream, ready);
        waits.map_err(|error| {
            self.shared.counters.note_error(&error);
            Reason::DeviceFailed
        })
    }

    /// Answers with the device; `None` when the expert is not in this transfer any more.
    fn on_device(&self, id: TransferId, position: u32, state: State) -> Option<Acquired> {
        let table = self.shared.table.lock();
        let held = table.held(self.slot).filter(|held| held.id == id)?;
        Some(Acquired {
            state,
            reason: Reason::None,
            device_address: self.gpu.memory.address() + held.offset,
            gate_up_on_cpu: position < self.shared.options.config.cpu_limit,
            expert: Some(describe(self.shared, held.weights, held.row)),
        })
    }

    fn on_cpu(&self, state: State, reason: Reason, position: u32) -> Acquired {
        let expert = (self.planned.layer, self.expert);
        on_cpu(self.shared, expert, state, reason, position)
    }
}

/// Answers with the CPU, and with the weights that were scheduled or, without a transfer, the
/// current ones.
fn on_cpu(
    shared: &Shared,
    (layer, expert): (u32, u32),
    state: State,
    reason: Reason,
    position: u32,
) -> Acquired {
    let held = || {
        let (.., slot) = shared.slot(layer, expert)?;
        let table = shared.table.lock();
        let held = table.held(slot)?;
        Some(describe(shared, held.weights, held.row))
    };
    let current = || {
        let weights = shared.plan.layer(layer)?.weights(&shared.model, expert)?;
        Some(describe(shared, &weights, 0))
    };
    Acquired {
        state,
        reason,
        device_address: 0,
        gate_up_on_cpu: position < shared.options.config.cpu_limit,
        expert: held().or_else(current),
    }
}

fn describe(shared: &Shared, weights: &ExpertWeights, row: u32) -> ExpertBytes {
    let (ne, nb) = (weights.view.ne(), weights.view.nb());
    ExpertBytes {
        host: weights.host(&shared.model, row),
        nbytes: weights.nbytes,
        row_bytes: nb[1],
        ne: [ne[0], ne[1]],
        ty: weights.view.ty(),
        generation: weights.view.generation,
    }
}

/// A wait for one copy. It counts if there was at least one pause.
struct Wait<'a> {
    shared: &'a Shared,
    planned: &'a PlannedLayer,
    backoff: Option<Backoff>,
}

impl<'a> Wait<'a> {
    fn new(shared: &'a Shared, planned: &'a PlannedLayer) -> Wait<'a> {
        Wait {
            shared,
            planned,
            backoff: None,
        }
    }

    fn pause(&mut self) {
        self.backoff.get_or_insert_with(Backoff::new).pause();
    }

    fn is_over(&self) -> bool {
        let backoff = self.backoff.as_ref();
        backoff.is_some_and(|backoff| backoff.elapsed() > self.shared.options.config.timeout)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let Some(backoff) = &self.backoff else {
            return;
        };
        let took = backoff.elapsed();
        add(&self.shared.counters.waits, 1);
        add(&self.shared.counters.wait_ns, took.as_nanos() as u64);
        if self.shared.options.config.debug {
            self.shared.times.waited(self.planned, took);
        }
    }
}
