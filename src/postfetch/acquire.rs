//! The choice between device and CPU for one expert, with the waits that the policy permits.

use super::device_state::DeviceState;
use super::plan::{ExpertWeights, PlannedLayer};
use super::policy::{Reason, State};
use super::shared::{Backoff, LATE, Shared};
use super::transfer::{Phase, TransferId};
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
    let planned = shared.plan.layer(layer);
    let found = planned.and_then(|planned| Some((planned, planned.slot(expert)?)));
    let request = found.map(|(planned, slot)| Request {
        shared,
        planned,
        expert,
        slot,
    });
    let acquired = match (&request, &shared.gpu) {
        (Some(request), Some(gpu)) if !shared.is_off() => request.acquire(gpu, access),
        (Some(request), _) => request.on_cpu(State::CpuOnly, shared.initial_fallback, 0),
        (None, _) => Acquired {
            state: State::CpuOnly,
            reason: Reason::NotAnExpert,
            device_address: 0,
            gate_up_on_cpu: shared.options.config.cpu_limit > 0,
            expert: None,
        },
    };
    if !matches!(access, Access::Query) {
        shared.stats.lock().answered(acquired.reason);
    }
    acquired
}

/// The wait of one call.
struct Wait {
    backoff: Backoff,
    /// Whether the caller waited.
    waited: bool,
}

/// One call for an expert of the model.
struct Request<'a> {
    shared: &'a Shared,
    planned: &'a PlannedLayer,
    expert: u32,
    slot: usize,
}

impl Request<'_> {
    fn acquire(&self, gpu: &DeviceState, access: Access) -> Acquired {
        // Begins before the copy is known to be under way: no part of a wait is left out.
        let mut wait = Wait {
            backoff: Backoff::new(),
            waited: false,
        };
        let acquired = loop {
            if let Some(acquired) = self.choose(gpu, access, &mut wait) {
                break acquired;
            }
        };
        if wait.waited {
            let took = wait.backoff.elapsed();
            let mut stats = self.shared.stats.lock();
            stats.waits += 1;
            stats.wait += took;
            self.shared.times.lock()[self.planned.position].times.waited += took;
        }
        acquired
    }

    /// Chooses device or CPU; `None` after a wait, and when the transfer is not the same any more.
    fn choose(&self, gpu: &DeviceState, access: Access, wait: &mut Wait) -> Option<Acquired> {
        let shared = self.shared;
        let (position, held) = {
            let table = shared.table.lock();
            let (position, held) = table.lookup(self.slot);
            (position, held.map(|held| (held.id, held.phase)))
        };
        let (id, phase) = match held {
            Ok(held) => held,
            Err(reason) => return Some(self.on_cpu(State::CpuOnly, reason, position)),
        };
        let state = self.state(gpu, id, phase)?;
        let is_ready = state == State::GpuReady;
        let may_wait = shared.options.config.block_on_miss;
        let missed = || Some(self.on_cpu(state, Reason::Missed, position));
        match access {
            Access::Query if is_ready => return self.on_device(gpu, id, position, state),
            Access::Host if is_ready => return self.used(gpu, id, position, state, wait),
            Access::Query => return missed(),
            _ if !is_ready && !may_wait => return missed(),
            Access::Stream(stream) if is_ready || phase == Phase::InFlight => {
                if let Err(reason) = self.hand_over(gpu, id, state, stream) {
                    return Some(self.on_cpu(state, reason, position));
                }
                let acquired = self.used(gpu, id, position, state, wait)?;
                shared.stats.lock().stream_hits += 1;
                return Some(acquired);
            }
            // The stream waits for an event, which is recorded when the copy is issued.
            Access::Stream(_) if !shared.table.lock().need(id) => return missed(),
            Access::Stream(_) if !wait.waited => shared.work.notify(),
            Access::Stream(_) | Access::Host => {}
        }
        let reason = if shared.is_off() {
            shared.initial_fallback
        } else if wait.backoff.elapsed() > shared.options.config.timeout {
            shared.disable(LATE);
            Reason::TimedOut
        } else {
            wait.waited = true;
            wait.backoff.pause();
            return None;
        };
        Some(self.on_cpu(state, reason, position))
    }

    /// Returns the progress of a transfer; `None` when it failed, or was released and used again.
    fn state(&self, gpu: &DeviceState, id: TransferId, phase: Phase) -> Option<State> {
        match phase {
            Phase::Ready => Some(State::GpuReady),
            Phase::InFlight => match gpu.device.is_done(gpu.events[id.index].ready) {
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

    /// Makes a stream wait for a transfer. Records where the wait of the stream begins.
    fn hand_over(
        &self,
        gpu: &DeviceState,
        id: TransferId,
        state: State,
        stream: Stream,
    ) -> Result<(), Reason> {
        let shared = self.shared;
        let events = &gpu.events[id.index];
        let is_first = shared.table.lock().claim(id, stream)?;
        if is_first && state == State::CopyInFlight {
            match gpu.device.record(events.needed, stream) {
                Ok(()) => shared.table.lock().holds_stream(id),
                Err(error) => shared.note_error(&error),
            }
        }
        let waits = gpu.device.stream_wait(stream, events.ready);
        waits.map_err(|error| {
            shared.note_error(&error);
            Reason::DeviceFailed
        })
    }

    /// Answers with the device, and counts the use of the transfer.
    fn used(
        &self,
        gpu: &DeviceState,
        id: TransferId,
        position: u32,
        state: State,
        wait: &Wait,
    ) -> Option<Acquired> {
        let shared = self.shared;
        let acquired = self.on_device(gpu, id, position, state)?;
        let mut table = shared.table.lock();
        if let Some(unused) = table.note_use(id) {
            let mut stats = shared.stats.lock();
            stats.early_copies += u64::from(state == State::GpuReady && !wait.waited);
            if let Some(time) = unused {
                stats.unused_copies -= 1;
                stats.unused -= time;
                let of_layer = &mut shared.times.lock()[self.planned.position].times;
                // A line of the log may have begun the sums again.
                of_layer.unused = of_layer.unused.saturating_sub(time);
            }
        }
        Some(acquired)
    }

    /// Answers with the device; `None` when the expert is not in this transfer any more.
    fn on_device(
        &self,
        gpu: &DeviceState,
        id: TransferId,
        position: u32,
        state: State,
    ) -> Option<Acquired> {
        let table = self.shared.table.lock();
        let held = table
            .lookup(self.slot)
            .1
            .ok()
            .filter(|held| held.id == id)?;
        let address = gpu.memory.address() + held.offset;
        let weights = Some((held.weights, held.row));
        Some(self.answer(state, Reason::None, address, position, weights))
    }

    /// Answers with the CPU, and with the weights that were scheduled or, without a transfer, the
    /// current ones.
    fn on_cpu(&self, state: State, reason: Reason, position: u32) -> Acquired {
        let (shared, planned) = (self.shared, self.planned);
        if shared.gpu.is_some()
            && let Ok(held) = shared.table.lock().lookup(self.slot).1
        {
            let weights = Some((held.weights, held.row));
            return self.answer(state, reason, 0, position, weights);
        }
        let current = planned.weights(&shared.model, self.expert);
        let weights = current.as_ref().map(|weights| (weights, 0));
        self.answer(state, reason, 0, position, weights)
    }

    fn answer(
        &self,
        state: State,
        reason: Reason,
        device_address: u64,
        position: u32,
        weights: Option<(&ExpertWeights, u32)>,
    ) -> Acquired {
        let describe = |(weights, row): (&ExpertWeights, u32)| {
            let (ne, nb) = (weights.view.ne(), weights.view.nb());
            ExpertBytes {
                host: weights.host(&self.shared.model, row),
                nbytes: weights.nbytes,
                row_bytes: nb[1],
                ne: [ne[0], ne[1]],
                ty: weights.view.ty(),
                generation: weights.view.generation,
            }
        };
        Acquired {
            state,
            reason,
            device_address,
            gate_up_on_cpu: position < self.shared.options.config.cpu_limit,
            expert: weights.map(describe),
        }
    }
}
