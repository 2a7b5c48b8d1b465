//! Post-fetch: copies down-projections of routed experts to a GPU while gate and up compute.

use std::ffi::{OsStr, c_char, c_void};
use std::io::ErrorKind;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use super::handle::{self, Handle};
use super::model::llama_model;
use super::status::{Failure, call, llama_sidecar_status, status};
use super::trace::Scheduled;
use super::{Flag, SizedStruct, fill, parameters, put, put_text, read, text};
use crate::device::{AsyncDevice, DeviceError, Stream};
use crate::postfetch::{Acquired, Options, PostFetch, REASONS, Reason, State};
use sidecar_core::trace;
use std::sync::Arc;

/// A scheduler that copies routed experts to a GPU.
pub struct llama_postfetch {
    _opaque: [u8; 0],
}

impl Handle for llama_postfetch {
    type Object = Scheduler;
    const NAME: &'static str = "llama_postfetch";
}

/// A scheduler, and the counts of its model, if the variables of the trace request them.
pub(super) struct Scheduler {
    postfetch: PostFetch,
    scheduled: Option<Arc<Scheduled>>,
}

impl Deref for Scheduler {
    type Target = PostFetch;

    fn deref(&self) -> &PostFetch {
        &self.postfetch
    }
}

/// Parameters of llama_postfetch_init. Initialise with llama_postfetch_default_params.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_params {
    /// Set by the caller to sizeof(struct llama_postfetch_params).
    pub struct_size: usize,
    /// Enable copies. Default: LLAMA_POSTFETCH_ENABLE, or true.
    pub enable: Flag,
    /// Use the CPU for every expert. Default: LLAMA_POSTFETCH_FORCE_CPU.
    pub force_cpu: Flag,
    /// Wait for a copy in flight. Default: LLAMA_POSTFETCH_BLOCK_ON_MISS, or true.
    pub block_on_miss: Flag,
    /// Use separate streams for copies and for kernels. Default:
    /// LLAMA_POSTFETCH_USE_DEDICATED_STREAMS, or true.
    pub dedicated_streams: Flag,
    /// Page-lock the model in place. Default: LLAMA_POSTFETCH_PAGE_LOCK, or true.
    pub page_lock: Flag,
    /// Log every transfer. Default: LLAMA_POSTFETCH_DEBUG.
    pub debug: Flag,
    /// Ordinal of the CUDA device, after CUDA_VISIBLE_DEVICES. Default: 0.
    pub device: u32,
    /// Maximum number of copies in flight, 1 to 1024. Default: LLAMA_POSTFETCH_MAX_TRANSFERS, or 8.
    pub max_transfers: u32,
    /// Number of experts per layer whose gate and up projections are computed on the CPU. Default:
    /// LLAMA_POSTFETCH_CPU_LIMIT, or the number of physical cores.
    pub cpu_limit: u32,
    /// Number of experts per token; 0 for the value in the model's metadata. Default: 0.
    pub n_active: u32,
    /// Device memory for experts in bytes; 0 for the size of the active experts of the largest
    /// layer, but at most 10 % of the device. Default: LLAMA_POSTFETCH_SCRATCHPAD_MB.
    pub scratchpad_bytes: u64,
    /// Microseconds that the fetch thread busy-waits before it sleeps. Waking a sleeping thread
    /// adds a few microseconds to llama_postfetch_schedule. Default: LLAMA_POSTFETCH_SPIN_US.
    pub spin_us: u64,
    /// Timeout of a copy in microseconds. After a timeout, the device is no longer used. Default:
    /// LLAMA_POSTFETCH_TIMEOUT_MS, or 5 s.
    pub patience_us: u64,
    /// Device memory in bytes in which recently used experts stay after their release, in addition
    /// to scratchpad_bytes; 0 for none, UINT64_MAX for all experts. Layers share it in proportion
    /// to their experts. Default: LLAMA_POSTFETCH_CACHE_MB.
    pub cache_bytes: u64,
    /// A use of an expert counts for half as much after so many uses of other experts of the layer.
    /// The expert whose uses count least is replaced; 1 for the least recently used. Default:
    /// LLAMA_POSTFETCH_CACHE_HALF_LIFE, or 1.
    pub cache_half_life: u64,
}

parameters!(
    llama_postfetch_params,
    56,
    struct_size,
    enable,
    force_cpu,
    block_on_miss,
    dedicated_streams,
    page_lock,
    debug,
    device,
    max_transfers,
    cpu_limit,
    n_active,
    scratchpad_bytes,
    spin_us,
    patience_us,
    cache_bytes,
    cache_half_life
);

impl llama_postfetch_params {
    fn defaults() -> llama_postfetch_params {
        sidecar_core::logger::init();
        let options = Options::from_environment();
        let config = &options.config;
        llama_postfetch_params {
            struct_size: size_of::<llama_postfetch_params>(),
            enable: config.enable.into(),
            force_cpu: config.force_cpu.into(),
            block_on_miss: config.block_on_miss.into(),
            dedicated_streams: config.dedicated_streams.into(),
            page_lock: config.page_lock.into(),
            debug: config.debug.into(),
            device: 0,
            max_transfers: config.max_transfers,
            cpu_limit: config.cpu_limit,
            n_active: options.active,
            scratchpad_bytes: config.scratchpad_bytes,
            spin_us: config.spin.as_micros() as u64,
            patience_us: config.timeout.as_micros() as u64,
            cache_bytes: config.cache_bytes,
            cache_half_life: config.cache_half_life.into(),
        }
    }

    fn options(&self) -> Result<Options, Failure> {
        if !(1..=1024).contains(&self.max_transfers) {
            return Err(Failure::argument(format!(
                "max_transfers is {}, expected 1 to 1024",
                self.max_transfers
            )));
        }
        Ok(Options {
            config: sidecar_core::config::PostFetch {
                enable: self.enable.into(),
                force_cpu: self.force_cpu.into(),
                block_on_miss: self.block_on_miss.into(),
                max_transfers: self.max_transfers,
                scratchpad_bytes: self.scratchpad_bytes,
                dedicated_streams: self.dedicated_streams.into(),
                cpu_limit: self.cpu_limit,
                page_lock: self.page_lock.into(),
                cache_bytes: self.cache_bytes,
                cache_half_life: u32::try_from(self.cache_half_life).unwrap_or(u32::MAX),
                spin: Duration::from_micros(self.spin_us),
                timeout: Duration::from_micros(self.patience_us),
                debug: self.debug.into(),
            },
            active: self.n_active,
        })
    }
}

/// Fills `params` with the defaults, which depend on the LLAMA_POSTFETCH_* environment variables.
///
/// # Safety
///
/// `params` is null or points to a llama_postfetch_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_default_params(
    params: *mut llama_postfetch_params,
) -> llama_sidecar_status {
    // SAFETY: as the caller guarantees.
    status(|| unsafe { fill(params, &llama_postfetch_params::defaults()) })
}

/// Creates a scheduler for the routed experts of a model. Use one scheduler per concurrent
/// evaluation. The scheduler keeps the model alive.
///
/// Without a CUDA driver, a device, or device memory, the scheduler answers that the CPU must
/// compute every expert; llama_postfetch_describe reports the reason.
///
/// @param params NULL for the defaults of llama_postfetch_default_params.
/// @return The scheduler, or NULL for bad arguments. Free it with llama_postfetch_free.
///
/// # Safety
///
/// `params` is null or points to a llama_postfetch_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_init(
    model: *const llama_model,
    params: *const llama_postfetch_params,
) -> *mut llama_postfetch {
    let made = call(|| {
        let open = handle::get(model)?;
        let mut chosen = llama_postfetch_params::defaults();
        if !params.is_null() {
            // SAFETY: as the caller guarantees.
            chosen = unsafe { read(params, chosen) }?;
        }
        let device = chosen.device as usize;
        let options = chosen.options()?;
        Ok(handle::new(Scheduler {
            postfetch: PostFetch::new(open.model.clone(), options, || open_device(device)),
            scheduled: Scheduled::of(&open.model),
        }))
    });
    made.unwrap_or(std::ptr::null_mut())
}

#[cfg(feature = "cuda")]
fn open_device(index: usize) -> Result<Arc<dyn AsyncDevice>, DeviceError> {
    Ok(crate::device::cuda::CudaDevice::open(index)?)
}

#[cfg(not(feature = "cuda"))]
fn open_device(_index: usize) -> Result<Arc<dyn AsyncDevice>, DeviceError> {
    Err(crate::device::without_cuda())
}

/// Frees a scheduler. Waits for its copies and for the work of streams that use its experts. In a
/// forked child, which cannot use the device, it frees the handle alone.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_free(postfetch: *mut llama_postfetch) -> llama_sidecar_status {
    status(|| handle::free(postfetch))
}

/// Copies the most used experts of a saved trace to the cache, as far as there are slots, and waits
/// for the copies. Call it before the first evaluation. The statistics count the experts as misses.
///
/// @param trace Path of a JSON file of llama_expert_trace_write, or of LLAMA_EXPERT_TRACE_OUTPUT.
/// @param n_filled Number of experts that were copied; can be NULL.
///
/// # Safety
///
/// `trace` is null or a NUL-terminated string; `n_filled` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_fill_cache(
    postfetch: *const llama_postfetch,
    trace: *const c_char,
    n_filled: *mut u64,
) -> llama_sidecar_status {
    status(|| {
        let postfetch = handle::get(postfetch)?;
        // SAFETY: as the caller guarantees.
        let path = unsafe { text(trace, "trace") }?;
        let read = trace::read(Path::new(OsStr::from_bytes(path.to_bytes())));
        let (_, counts) = read.map_err(|error| {
            let status = match error.kind() {
                ErrorKind::NotFound => llama_sidecar_status::NotFound,
                ErrorKind::InvalidData => llama_sidecar_status::Malformed,
                _ => llama_sidecar_status::Io,
            };
            Failure::new(status, error.to_string())
        })?;
        let filled = postfetch.fill_cache(&counts);
        if !n_filled.is_null() {
            // SAFETY: as the caller guarantees.
            unsafe { n_filled.write(filled) };
        }
        Ok(())
    })
}

/// Starts to copy the down-projections of `n` experts of a layer to the device, in this order.
/// Returns without waiting. Call it once per layer as soon as the routed ids are known, with the
/// ids of all tokens, token after token. Ids can repeat. Experts in the cache are not copied. The
/// variables LLAMA_EXPERT_TRACE_* count the ids, unless the program has a trace of the model
/// (llama_expert_trace_new).
///
/// An expert that does not fit into the scratchpad, or that the layer does not have, must be
/// computed on the CPU; llama_postfetch_acquire answers so.
///
/// @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_down_exps.weight.
///
/// # Safety
///
/// `ids` has `n` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_schedule(
    postfetch: *const llama_postfetch,
    layer: u32,
    ids: *const i32,
    n: usize,
) -> llama_sidecar_status {
    status(|| {
        let postfetch = handle::get(postfetch)?;
        if n == 0 {
            return Ok(());
        }
        if ids.is_null() {
            return Err(Failure::null("ids"));
        }
        // SAFETY: not null, with `n` elements as the caller guarantees.
        let ids = unsafe { std::slice::from_raw_parts(ids, n) };
        postfetch.schedule(layer, ids);
        if let Some(scheduled) = &postfetch.scheduled {
            scheduled.count(layer, ids);
        }
        Ok(())
    })
}

/// State of the copy of an expert.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_postfetch_state {
    /// The expert has no copy.
    CpuOnly = 0,
    /// The copy is queued or in flight.
    CopyInFlight = 1,
    /// The copy is on the device.
    GpuReady = 2,
}

impl From<State> for llama_postfetch_state {
    fn from(state: State) -> llama_postfetch_state {
        match state {
            State::CpuOnly => llama_postfetch_state::CpuOnly,
            State::CopyInFlight => llama_postfetch_state::CopyInFlight,
            State::GpuReady => llama_postfetch_state::GpuReady,
        }
    }
}

/// Reason why an expert must be computed on the CPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_postfetch_reason {
    /// No reason: use the device.
    None = 0,
    /// Copies are disabled.
    Disabled = 1,
    /// The parameter force_cpu is set.
    Forced = 2,
    /// No driver, no device, no device memory, or the device was disabled after errors.
    NoDevice = 3,
    /// The model has no down-projection with this layer and expert.
    Foreign = 4,
    /// The expert was not scheduled, or was released.
    NotScheduled = 5,
    /// The scratchpad was full.
    NoRoom = 6,
    /// The copy is in flight and block_on_miss is false, or cannot be submitted to a stream yet.
    Missed = 7,
    /// The data of the expert could not be read.
    ReadFailed = 8,
    /// A driver call failed, or another stream uses the expert.
    DeviceFailed = 9,
    /// The copy exceeded patience_us.
    TimedOut = 10,
    /// The expert is not in host memory.
    Elsewhere = 11,
}

impl From<Reason> for llama_postfetch_reason {
    fn from(reason: Reason) -> llama_postfetch_reason {
        match reason {
            Reason::None => llama_postfetch_reason::None,
            Reason::Disabled => llama_postfetch_reason::Disabled,
            Reason::ForcedCpu => llama_postfetch_reason::Forced,
            Reason::NoDevice => llama_postfetch_reason::NoDevice,
            Reason::NotAnExpert => llama_postfetch_reason::Foreign,
            Reason::NotScheduled => llama_postfetch_reason::NotScheduled,
            Reason::NoRoom => llama_postfetch_reason::NoRoom,
            Reason::Missed => llama_postfetch_reason::Missed,
            Reason::ReadFailed => llama_postfetch_reason::ReadFailed,
            Reason::DeviceFailed => llama_postfetch_reason::DeviceFailed,
            Reason::TimedOut => llama_postfetch_reason::TimedOut,
            Reason::NotInHostMemory => llama_postfetch_reason::Elsewhere,
        }
    }
}

/// Where to compute an expert, and its data.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_answer {
    /// Set by the caller to sizeof(struct llama_postfetch_answer).
    pub struct_size: usize,
    /// Device address of the down-projection (a CUdeviceptr, 256-byte aligned), or 0 if the CPU
    /// must compute the expert. Valid until the expert is released.
    pub device_data: u64,
    /// Host address of the down-projection, or NULL if it is not readable without a copy. Valid
    /// until the expert is released; for an expert that is not scheduled, until a reload.
    pub host_data: *const c_void,
    /// Bytes of the matrix. If the model has no such down-projection, this field and the next four
    /// are 0.
    pub nbytes: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Number of elements per row, and number of rows.
    pub ne: [u64; 2],
    /// Number of times that the tensor changed since the model was opened.
    pub generation: u64,
    /// Value of enum ggml_type.
    pub ggml_type: u32,
    /// State of the copy.
    pub state: llama_postfetch_state,
    /// Reason why the CPU must compute the expert.
    pub reason: llama_postfetch_reason,
    /// Whether cpu_limit assigns the gate and up projections of this expert to the CPU.
    pub gate_up_on_cpu: bool,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_postfetch_answer {
    const NAME: &'static str = "llama_postfetch_answer";
    const FIRST: usize = 80;
}

impl From<Acquired> for llama_postfetch_answer {
    fn from(answer: Acquired) -> llama_postfetch_answer {
        let expert = answer.expert;
        let host = expert.and_then(|expert| expert.host);
        llama_postfetch_answer {
            struct_size: size_of::<llama_postfetch_answer>(),
            device_data: answer.device_address,
            host_data: host.map_or(std::ptr::null(), |host| host.cast()),
            nbytes: expert.map_or(0, |expert| expert.nbytes),
            row_bytes: expert.map_or(0, |expert| expert.row_bytes),
            ne: expert.map_or([0; 2], |expert| expert.ne),
            generation: expert.map_or(0, |expert| expert.generation),
            ggml_type: expert.map_or(0, |expert| expert.ty.id),
            state: answer.state.into(),
            reason: answer.reason.into(),
            gate_up_on_cpu: answer.gate_up_on_cpu,
        }
    }
}

/// Writes the answer of a scheduler to `answer`.
///
/// # Safety
///
/// As for [`fill`].
unsafe fn put_answer(
    postfetch: *const llama_postfetch,
    answer: *mut llama_postfetch_answer,
    ask: impl FnOnce(&PostFetch) -> Acquired,
) -> llama_sidecar_status {
    status(|| {
        let found = ask(&*handle::get(postfetch)?);
        // SAFETY: as the caller guarantees.
        unsafe { fill(answer, &found.into()) }
    })
}

/// Reports the state of an expert. Never waits.
///
/// # Safety
///
/// `answer` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_query(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
    answer: *mut llama_postfetch_answer,
) -> llama_sidecar_status {
    // SAFETY: as the caller guarantees.
    unsafe { put_answer(postfetch, answer, |of| of.query(layer, expert)) }
}

/// Decides whether the device or the CPU computes an expert. The device computes an expert whose
/// copy is on the device. For a copy in flight, the call waits if block_on_miss is true. In all
/// other cases, the CPU computes the expert.
///
/// All use of device_data must end before the expert is released. llama_postfetch_acquire_on_stream
/// ensures this for a stream.
///
/// # Safety
///
/// `answer` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_acquire(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
    answer: *mut llama_postfetch_answer,
) -> llama_sidecar_status {
    // SAFETY: as the caller guarantees.
    unsafe { put_answer(postfetch, answer, |of| of.acquire(layer, expert)) }
}

/// Does the same as llama_postfetch_acquire, but the CUDA stream waits for the copy instead of the
/// caller. The caller waits for no copy: a queued copy is submitted at once, in its turn, however many
/// are in flight. While copies before it go through page-locked buffers, the CPU computes the expert
/// (LLAMA_POSTFETCH_REASON_MISSED). If block_on_miss is false, the CPU also computes each expert whose
/// copy is not complete. Work that is submitted to the stream after the call can use device_data. After the
/// expert is released, its memory is overwritten only when the work submitted to the stream before
/// the release is complete. Only one stream can acquire an expert.
///
/// @param stream A CUstream or cudaStream_t of the same device; must exist until the expert is
/// released.
///
/// # Safety
///
/// `stream` is a CUstream (or cudaStream_t) of the same device that exists until the expert is
/// released; `answer` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_acquire_on_stream(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
    stream: *mut c_void,
    answer: *mut llama_postfetch_answer,
) -> llama_sidecar_status {
    let stream = Stream(stream as u64);
    // SAFETY: as the caller guarantees.
    unsafe { put_answer(postfetch, answer, |of| of.acquire_on(layer, expert, stream)) }
}

/// Returns a CUDA stream for the caller's kernels that does not synchronise with other streams.
///
/// @return A CUstream, or NULL without a device. Owned by the scheduler; do not destroy it.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_compute_stream(postfetch: *const llama_postfetch) -> *mut c_void {
    let found = call(|| Ok(handle::get(postfetch)?.compute_stream()));
    let stream = found.ok().flatten().map_or(0, |stream| stream.0);
    stream as *mut c_void
}

/// Makes a CUDA stream of the caller wait for all work submitted to llama_postfetch_compute_stream
/// so far.
///
/// @param stream A CUstream or cudaStream_t of the same device.
///
/// # Safety
///
/// `stream` is a CUstream (or cudaStream_t) of the same device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_hand_back(
    postfetch: *const llama_postfetch,
    stream: *mut c_void,
) -> llama_sidecar_status {
    let stream = Stream(stream as u64);
    status(|| {
        // SAFETY: as the caller guarantees.
        unsafe { handle::get(postfetch)?.hand_back(stream) }
            .map_err(|error| sidecar_core::error::Error::from(error).into())
    })
}

/// Copies an expert from the device to `buffer`, for debugging. Fails with
/// LLAMA_SIDECAR_STATUS_NOT_FOUND if the expert is not on the device, `size` is not its size in bytes,
/// or another thread releases the expert meanwhile.
///
/// # Safety
///
/// `buffer` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_download(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
    buffer: *mut c_void,
    size: usize,
) -> llama_sidecar_status {
    status(|| {
        if buffer.is_null() {
            return Err(Failure::null("buffer"));
        }
        let found = handle::get(postfetch)?.download(layer, expert);
        let missing = || {
            let what =
                format!("expert {expert} of layer {layer} with {size} bytes is not on the device");
            Failure::new(llama_sidecar_status::NotFound, what)
        };
        let bytes = found
            .ok_or_else(missing)?
            .map_err(sidecar_core::error::Error::from)?;
        if bytes.len() != size {
            return Err(missing());
        }
        // SAFETY: valid for `size` bytes, as the caller guarantees.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), size) };
        Ok(())
    })
}

/// Releases an expert. Its device memory becomes reusable; in the cache, its data stays until
/// another expert replaces it.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_release(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
) -> llama_sidecar_status {
    status(|| handle::get(postfetch).map(|of| of.release(layer, expert)))
}

/// Releases all experts of a layer. Call it when the layer is computed; until then, the experts
/// occupy device memory.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_release_layer(
    postfetch: *const llama_postfetch,
    layer: u32,
) -> llama_sidecar_status {
    status(|| handle::get(postfetch).map(|of| of.release_layer(layer)))
}

/// Writes the number of the layer whose down-projections are in tensor `index` to `layer`. Fails
/// with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other tensor, because post-fetch copies only the
/// base weights of down-projections.
///
/// # Safety
///
/// `layer` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_layer_of(
    postfetch: *const llama_postfetch,
    index: u64,
    layer: *mut u32,
) -> llama_sidecar_status {
    status(|| {
        let found = usize::try_from(index).ok();
        let postfetch = handle::get(postfetch)?;
        let found = found.and_then(|index| postfetch.layer_of(index));
        let found = found.ok_or_else(|| not_fetched(format!("tensor {index} holds")))?;
        // SAFETY: as the caller guarantees.
        unsafe { put(layer, found, "layer") }
    })
}

/// Writes the number of the layer whose down-projections are at `data` to `layer`: the data of a
/// ggml_tensor, where a program has made its own for the bytes of the model, or where the model is
/// one of llama_sidecar_model_from_tensors. `data` is the first byte of the tensor as it was when
/// the scheduler was created. Takes no lock. Fails with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other
/// address, so a hook in the product of all experts can call it for every tensor.
///
/// # Safety
///
/// `layer` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_layer_at(
    postfetch: *const llama_postfetch,
    data: *const c_void,
    layer: *mut u32,
) -> llama_sidecar_status {
    status(|| {
        let found = handle::get(postfetch)?.layer_at(data as usize);
        let found = found.ok_or_else(|| not_fetched(format!("at {data:p} are")))?;
        // SAFETY: as the caller guarantees.
        unsafe { put(layer, found, "layer") }
    })
}

fn not_fetched(what: String) -> Failure {
    let message = format!("{what} no down-projections of routed experts");
    Failure::new(llama_sidecar_status::NotFound, message)
}

/// Statistics of a scheduler since its creation.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_stats {
    /// Set by the caller to sizeof(struct llama_postfetch_stats).
    pub struct_size: usize,
    /// Number of calls of llama_postfetch_schedule.
    pub n_calls: u64,
    /// Number of experts that were queued for a copy.
    pub n_experts: u64,
    /// Number of these that were copied together with the preceding neighbour.
    pub n_coalesced: u64,
    /// Number of ids that were already scheduled.
    pub n_duplicates: u64,
    /// Number of ids that are not experts of their layer.
    pub n_rejected: u64,
    /// Number of copies issued.
    pub n_copies: u64,
    /// Number of these that went through page-locked staging buffers.
    pub n_staged_copies: u64,
    /// Bytes of these copies.
    pub bytes: u64,
    /// Number of answers to use the device.
    pub n_hits: u64,
    /// Number of these for which a stream waits instead of the caller.
    pub n_stream_hits: u64,
    /// Number of answers for which the caller waited.
    pub n_waits: u64,
    /// Total time that callers waited, in microseconds by the clock of the host.
    pub wait_us: u64,
    /// Total time of copies, in microseconds by the clock of the device.
    pub transfer_us: u64,
    /// Number of driver errors.
    pub n_errors: u64,
    /// Number of answers to use the CPU, indexed by enum llama_postfetch_reason.
    pub n_fallbacks: [u64; 16],
    /// Device memory for experts in bytes.
    pub scratchpad_bytes: u64,
    /// Maximum use of this memory in bytes.
    pub scratchpad_peak: u64,
    /// Bytes of the model that are page-locked in place.
    pub locked_bytes: u64,
    /// Overlap of copies with computation: the share of the time of copies for which nothing waited
    /// and which was not spent on unused copies, 1 - (wait_us + stream_wait_us + unused_us) /
    /// transfer_us, at least 0; negative if no copy was timed yet.
    pub overlap: f64,
    /// Device memory of the cache in bytes; 0 without a cache.
    pub cache_bytes: u64,
    /// Number of scheduled experts whose data was in the cache, or in a copy to the cache.
    pub n_cache_hits: u64,
    /// Number of scheduled experts that were not in the cache of their layer.
    pub n_cache_misses: u64,
    /// Number of experts that were replaced in the cache by another.
    pub n_cache_evictions: u64,
    /// Number of copies that a stream of the caller waited for.
    pub n_stream_waits: u64,
    /// Total time that streams waited for copies, in microseconds by the clock of the device.
    pub stream_wait_us: u64,
    /// Number of copies that had ended when their first expert was acquired for the device.
    pub n_early_copies: u64,
    /// Number of copies that ended, and of which no expert was acquired for the device. Copies to the
    /// cache do not count, because they stay there.
    pub n_unused_copies: u64,
    /// Total time of these copies, in microseconds by the clock of the device.
    pub unused_us: u64,
    /// Share of answers to use the CPU, 0 to 1; negative without answers.
    pub fallback_rate: f64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_postfetch_stats {
    const NAME: &'static str = "llama_postfetch_stats";
    const FIRST: usize = 280;
}

/// Fills `stats` with the statistics of a scheduler.
///
/// # Safety
///
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_get_stats(
    postfetch: *const llama_postfetch,
    stats: *mut llama_postfetch_stats,
) -> llama_sidecar_status {
    status(|| {
        let found = handle::get(postfetch)?.stats();
        let mut n_fallbacks = [0; 16];
        for ((reason, _), &count) in REASONS.into_iter().zip(&found.fallbacks) {
            n_fallbacks[llama_postfetch_reason::from(reason) as usize] = count;
        }
        let value = llama_postfetch_stats {
            struct_size: size_of::<llama_postfetch_stats>(),
            n_calls: found.calls,
            n_experts: found.experts,
            n_coalesced: found.coalesced,
            n_duplicates: found.duplicates,
            n_rejected: found.rejected,
            n_copies: found.copies,
            n_staged_copies: found.staged_copies,
            bytes: found.bytes,
            n_hits: found.hits,
            n_stream_hits: found.stream_hits,
            n_waits: found.waits,
            wait_us: found.wait.as_micros() as u64,
            transfer_us: found.transfer.as_micros() as u64,
            n_errors: found.errors,
            n_fallbacks,
            scratchpad_bytes: found.scratchpad_bytes,
            scratchpad_peak: found.scratchpad_peak,
            locked_bytes: found.locked_bytes,
            overlap: found.overlap().unwrap_or(-1.0),
            cache_bytes: found.cache_bytes,
            n_cache_hits: found.cache_hits,
            n_cache_misses: found.cache_misses,
            n_cache_evictions: found.evictions,
            n_stream_waits: found.stream_waits,
            stream_wait_us: found.stream_wait.as_micros() as u64,
            n_early_copies: found.early_copies,
            n_unused_copies: found.unused_copies,
            unused_us: found.unused.as_micros() as u64,
            fallback_rate: found.fallback_rate().unwrap_or(-1.0),
        };
        // SAFETY: as the caller guarantees.
        unsafe { fill(stats, &value) }
    })
}

/// Writes the configuration and the statistics of a scheduler to `buffer`, truncated to `size`
/// bytes including the NUL.
///
/// @param json true for JSON, false for plain text.
/// @param buffer Can be NULL when `size` is 0.
/// @return Length of the whole text without the NUL, or 0 on failure.
///
/// # Safety
///
/// `buffer` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_describe(
    postfetch: *const llama_postfetch,
    json: Flag,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    let written = call(|| {
        let postfetch = handle::get(postfetch)?;
        let (stats, mode) = (postfetch.stats(), postfetch.mode());
        let text = match json.into() {
            true => stats.to_json(&mode).to_string(),
            false => stats.to_text(&mode),
        };
        // SAFETY: as the caller guarantees.
        unsafe { put_text(&text, buffer, size) }
    });
    written.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_can_be_in_a_field() {
        let mut refused = 0;
        super::super::tests::use_with_every_byte(llama_postfetch_params::defaults(), 0..0, |of| {
            refused += usize::from(of.options().is_err());
        });
        // Numbers of transfers are.
        assert!(refused >= 2 * 255);
    }
}
