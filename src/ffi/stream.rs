//! Expert streaming: routed experts, read from disk as soon as routing is known.

use std::sync::Arc;

use super::handle::{self, Handle};
use super::model::llama_model;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{Flag, SizedStruct, fill, parameters, read, routed_ids};
use crate::model::Model;
use sidecar_core::config::{Config, ExpertStream};
use sidecar_core::memory::free_memory;
use sidecar_core::stream::{Matrices, Reader, Settings};

/// The most threads of a stream.
const MOST_THREADS: u32 = 64;

/// Threads that read routed experts of a model from disk before the program uses them.
pub struct llama_expert_stream {
    _opaque: [u8; 0],
}

impl Handle for llama_expert_stream {
    type Object = OwnedReader;
    const NAME: &'static str = "llama_expert_stream";
}

/// A reader and the model whose files it reads.
pub(super) struct OwnedReader {
    reader: Reader,
    model: Arc<Model>,
}

impl OwnedReader {
    /// Returns the matrices of a layer that the program reads through the mapping of a file.
    fn in_place(&self, layer: u32) -> Matrices {
        let tensors = self.model.experts().of_layer(layer);
        Matrices::of(tensors, |tensor| self.model.is_in_place(tensor.tensor))
    }
}

/// Parameters of llama_expert_stream_new. Initialise with llama_expert_stream_default_params.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_expert_stream_params {
    /// Set by the caller to sizeof(struct llama_expert_stream_params).
    pub struct_size: usize,
    /// Check every layer. Otherwise, only a sample of layers is checked while all experts are in
    /// memory. Default: whether LLAMA_EXPERT_STREAM is "on".
    pub always: Flag,
    /// Number of threads, 1 to 64. Default: half of the processors, from 1 to 4.
    pub n_threads: u32,
}

parameters!(
    llama_expert_stream_params,
    16,
    struct_size,
    always,
    n_threads
);

impl llama_expert_stream_params {
    fn defaults() -> llama_expert_stream_params {
        let config = Config::get();
        sidecar_core::logger::init();
        llama_expert_stream_params {
            struct_size: size_of::<llama_expert_stream_params>(),
            always: (config.expert_stream == ExpertStream::On).into(),
            n_threads: Settings::default_threads() as u32,
        }
    }

    fn settings(&self) -> Result<Settings, Failure> {
        if !(1..=MOST_THREADS).contains(&self.n_threads) {
            return Err(Failure::argument(format!(
                "n_threads is {}, expected 1 to {MOST_THREADS}: set a number in this range, or use the default of llama_expert_stream_default_params",
                self.n_threads
            )));
        }
        Ok(Settings {
            always: self.always.into(),
            threads: self.n_threads as usize,
            look_ahead_bytes: Settings::look_ahead_in(free_memory().map(|(bytes, _)| bytes)),
        })
    }
}

/// Fills `params` with the defaults, which depend on the LLAMA_EXPERT_STREAM* environment
/// variables. The value "off" of LLAMA_EXPERT_STREAM is the same as "auto" here, because a stream
/// exists only in a program that creates it.
///
/// # Safety
///
/// `params` is null or points to a llama_expert_stream_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_stream_default_params(
    params: *mut llama_expert_stream_params,
) -> llama_sidecar_status {
    // SAFETY: as the caller guarantees.
    status(|| unsafe { fill(params, &llama_expert_stream_params::defaults()) })
}

/// Creates a stream for the routed experts of a model that is larger than memory, and starts its
/// threads. Any number of threads and contexts can use one stream. The stream keeps the model alive
/// and its files open. Reloads do not wait for the stream.
///
/// The stream reads into the page cache, so the program must use the experts in place, through the
/// mapping of the files: host_data of llama_sidecar_tensor_get_info for a tensor that is not
/// loaded. Fails with LLAMA_SIDECAR_STATUS_DISABLED if no expert can be used in place, because
/// use_mmap is false, the files cannot be mapped, or all experts are loaded.
///
/// @param params NULL for the defaults of llama_expert_stream_default_params.
/// @return The stream, or NULL on failure: for example, when the model has no routed experts. Free
/// it with llama_expert_stream_free.
///
/// # Safety
///
/// `params` is null or points to a llama_expert_stream_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_stream_new(
    model: *const llama_model,
    params: *const llama_expert_stream_params,
) -> *mut llama_expert_stream {
    let made = call(|| {
        let open = handle::get(model)?;
        let mut chosen = llama_expert_stream_params::defaults();
        if !params.is_null() {
            // SAFETY: as the caller guarantees.
            chosen = unsafe { read(params, chosen) }?;
        }
        let settings = chosen.settings()?;
        let model = open.model.clone();
        let index = model.experts();
        if index.layers().next().is_none() {
            return Err(Failure::new(
                llama_sidecar_status::NotFound,
                "the model has no routed experts (tensors such as blk.0.ffn_gate_exps.weight): use it without a stream",
            ));
        }
        let mut experts = index.tensors().iter();
        if !experts.any(|expert| model.is_in_place(expert.tensor)) {
            return Err(Failure::new(
                llama_sidecar_status::Disabled,
                "no routed expert of the model can be used in place, through the mapping of its file: open the model from its file, set use_mmap of llama_sidecar_params, and do not load the tensors of experts",
            ));
        }
        let files: Vec<_> = model.gguf_files().collect();
        let reader = Reader::new(&files, settings, |tensor| model.is_in_place(tensor.tensor));
        let reader = reader.map_err(|error| {
            Failure::new(
                llama_sidecar_status::Io,
                format!(
                    "cannot start to stream experts: {error}: use the model without a stream, or set fewer threads"
                ),
            )
        })?;
        Ok(handle::new(OwnedReader { reader, model }))
    });
    made.unwrap_or(std::ptr::null_mut())
}

/// Frees a stream. Ends its threads; requests that have not begun are dropped.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_stream_free(
    stream: *mut llama_expert_stream,
) -> llama_sidecar_status {
    status(|| handle::free(stream))
}

/// Starts to read the experts that a layer was routed to. Returns without waiting for the disk, and
/// allocates no memory. Call it for each layer of each evaluation as soon as the routed ids are
/// known. The ids are not used after the call.
///
/// The ids are laid out as src[2] of GGML_OP_MUL_MAT_ID in ggml. Ids that are not experts of the
/// layer are ignored. A matrix that is loaded, or that a reload replaced, is left out, because the
/// program does not use it in place.
///
/// @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_gate_exps.weight.
/// @param n_used Number of experts per token.
/// @param used_stride Bytes between the ids of a token: nb[0].
/// @param token_stride Bytes between the rows of two tokens: nb[1].
///
/// # Safety
///
/// `ids` is null, or every id is readable: the last one ends
/// `(n_tokens - 1) * token_stride + (n_used - 1) * used_stride + 4` bytes after `ids`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_stream_schedule(
    stream: *const llama_expert_stream,
    layer: u32,
    ids: *const i32,
    n_used: usize,
    n_tokens: usize,
    used_stride: usize,
    token_stride: usize,
) -> llama_sidecar_status {
    status(|| {
        let owned = handle::get(stream)?;
        let position = owned.reader.position(layer).ok_or_else(|| {
            Failure::new(
                llama_sidecar_status::NotFound,
                format!(
                    "layer {layer} of the model has no routed experts: schedule only layers that have them"
                ),
            )
        })?;
        // SAFETY: as the caller guarantees.
        let ids = unsafe { routed_ids(ids, n_used, n_tokens, used_stride, token_stride) }?;
        let Some(ids) = ids else {
            return Ok(());
        };
        let matrices = owned.in_place(layer);
        owned.reader.schedule(position, matrices, &ids);
        Ok(())
    })
}

/// Waits until all experts that were scheduled are in memory or on their way from the disk. An
/// evaluation does not need the call: it is for programs that measure or warm up. Another thread
/// that schedules without a pause can make the call wait longer.
#[unsafe(no_mangle)]
pub extern "C" fn llama_expert_stream_finish(
    stream: *const llama_expert_stream,
) -> llama_sidecar_status {
    status(|| {
        handle::get(stream)?.reader.finish();
        Ok(())
    })
}

/// Statistics of a stream since its creation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_expert_stream_stats {
    /// Set by the caller to sizeof(struct llama_expert_stream_stats).
    pub struct_size: usize,
    /// Number of layers that were scheduled.
    pub n_layers: u64,
    /// Bytes of routed experts whose residency was checked.
    pub checked_bytes: u64,
    /// Bytes of these that were in memory or on their way.
    pub resident_bytes: u64,
    /// Bytes that were read ahead because of routing.
    pub read_bytes: u64,
    /// Bytes that were read ahead of routing: the next layer of a batch.
    pub ahead_bytes: u64,
    /// Number of read-ahead calls that failed.
    pub n_failed: u64,
    /// Number of page faults of the process that waited for a disk.
    pub n_major_faults: u64,
    /// Time from the first call of llama_expert_stream_schedule to the last, in microseconds.
    pub schedule_us: u64,
    /// Whether all experts are in memory, so that only a sample of layers is checked.
    pub resting: bool,
    /// Whether the stream stopped, because reading ahead had no effect.
    pub stopped: bool,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_expert_stream_stats {
    const NAME: &'static str = "llama_expert_stream_stats";
    const FIRST: usize = 80;
}

/// Fills `stats` with the statistics of a stream.
///
/// # Safety
///
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_expert_stream_get_stats(
    stream: *const llama_expert_stream,
    stats: *mut llama_expert_stream_stats,
) -> llama_sidecar_status {
    status(|| {
        let found = handle::get(stream)?.reader.counts();
        let value = llama_expert_stream_stats {
            struct_size: size_of::<llama_expert_stream_stats>(),
            n_layers: found.layers,
            checked_bytes: found.checked_bytes,
            resident_bytes: found.resident_bytes,
            read_bytes: found.read_bytes,
            ahead_bytes: found.ahead_bytes,
            n_failed: found.failed,
            n_major_faults: found.major_faults,
            schedule_us: (found.seconds * 1e6) as u64,
            resting: found.resting,
            stopped: found.stopped,
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(stats, &value) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_can_be_in_a_field() {
        let defaults = llama_expert_stream_params::defaults();
        let mut refused = 0;
        super::super::tests::use_with_every_byte(defaults, 0..0, |of| {
            refused += usize::from(of.settings().is_err());
        });
        // Numbers of threads are.
        assert!(refused >= 3 * 255);
    }
}
