//! Post-fetch: routed experts' down-projections go to a GPU while gate and up compute.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::handle::{self, llama_model, llama_postfetch};
use super::status::{Failure, call, llama_sidecar_status, status};
use super::{SizedStruct, fill, put, put_text, read};
use crate::device::{AsyncDevice, DeviceError, Stream};
use crate::postfetch::{Acquired, Options, PostFetch, Reason, State};
use std::sync::Arc;

/// How to fetch. Fill it with llama_postfetch_default_params first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_params {
    /// sizeof(struct llama_postfetch_params), set by the caller.
    pub struct_size: usize,
    /// Fetch at all. Default: LLAMA_POSTFETCH_ENABLE, or true.
    pub enable: bool,
    /// Answer "CPU" always. Default: LLAMA_POSTFETCH_FORCE_CPU.
    pub force_cpu: bool,
    /// Wait for a copy that is under way. Default: LLAMA_POSTFETCH_BLOCK_ON_MISS, or true.
    pub block_on_miss: bool,
    /// Copies and kernels in streams of their own. Default: LLAMA_POSTFETCH_USE_DEDICATED_STREAMS, or
    /// true.
    pub dedicated_streams: bool,
    /// Page-lock the model where it is. Default: LLAMA_POSTFETCH_PAGE_LOCK, or true.
    pub page_lock: bool,
    /// Log every transfer. Default: LLAMA_POSTFETCH_DEBUG.
    pub debug: bool,
    /// The CUDA device, as CUDA_VISIBLE_DEVICES counts them. Default: 0.
    pub device: u32,
    /// Copies under way at a time, 1 to 1024. Default: LLAMA_POSTFETCH_MAX_TRANSFERS, or 8.
    pub max_transfers: u32,
    /// Of a layer's experts, how many have gate and up computed on the CPU. Default:
    /// LLAMA_POSTFETCH_CPU_LIMIT, or the physical cores.
    pub cpu_limit: u32,
    /// Experts that a token uses; 0 for what the model's file says. Default: 0.
    pub n_active: u32,
    /// Device memory for experts; 0 for what the active experts of the largest layer need. Default:
    /// LLAMA_POSTFETCH_SCRATCHPAD_MB.
    pub scratchpad_bytes: u64,
    /// How long the fetching thread looks out for work before it sleeps: a thread that sleeps is woken
    /// by the call of schedule, which takes that some microseconds. Default: LLAMA_POSTFETCH_SPIN_US.
    pub spin_us: u64,
    /// How long a copy may take before the device is given up. Default: 5,000,000.
    pub patience_us: u64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_postfetch_params {
    const NAME: &'static str = "llama_postfetch_params";
    const FIRST: usize = 56;
}

impl llama_postfetch_params {
    fn defaults() -> llama_postfetch_params {
        crate::logger::init();
        let options = Options::from_environment();
        let config = &options.config;
        llama_postfetch_params {
            struct_size: size_of::<llama_postfetch_params>(),
            enable: config.enable,
            force_cpu: config.force_cpu,
            block_on_miss: config.block_on_miss,
            dedicated_streams: config.dedicated_streams,
            page_lock: config.page_lock,
            debug: config.debug,
            device: 0,
            max_transfers: config.max_transfers,
            cpu_limit: config.cpu_limit,
            n_active: options.active,
            scratchpad_bytes: config.scratchpad_bytes,
            spin_us: config.spin.as_micros() as u64,
            patience_us: options.timeout.as_micros() as u64,
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
            config: crate::config::PostFetch {
                enable: self.enable,
                force_cpu: self.force_cpu,
                block_on_miss: self.block_on_miss,
                max_transfers: self.max_transfers,
                scratchpad_bytes: self.scratchpad_bytes,
                dedicated_streams: self.dedicated_streams,
                cpu_limit: self.cpu_limit,
                page_lock: self.page_lock,
                spin: Duration::from_micros(self.spin_us),
                debug: self.debug,
            },
            active: self.n_active,
            timeout: Duration::from_micros(self.patience_us),
        })
    }
}

/// Fills `params` with the defaults, which follow from the LLAMA_POSTFETCH_* variables. Set
/// struct_size before.
///
/// # Safety
///
/// `params` is null or points to a llama_postfetch_params whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_default_params(
    params: *mut llama_postfetch_params,
) -> llama_sidecar_status {
    // SAFETY: as the caller vouches.
    status(|| unsafe { fill(params, &llama_postfetch_params::defaults()) })
}

/// Makes a scheduler for the routed experts of a model. Use one for each evaluation that runs at the
/// same time. `params` can be NULL for the defaults.
///
/// Without a CUDA driver or device, or without memory there, it works too: all its answers are then
/// "compute on the CPU", and llama_postfetch_describe tells why. NULL for bad arguments only. Free the
/// result with llama_postfetch_free; until then it keeps the model alive.
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
            // SAFETY: as the caller vouches.
            chosen = unsafe { read(params, chosen) }?;
        }
        let device = chosen.device as usize;
        let made = PostFetch::new(open.model.clone(), chosen.options()?, || {
            open_device(device)
        });
        Ok(handle::new(made))
    });
    made.unwrap_or(std::ptr::null_mut())
}

#[cfg(feature = "cuda")]
fn open_device(index: usize) -> Result<Arc<dyn AsyncDevice>, DeviceError> {
    Ok(crate::device::cuda::CudaDevice::open(index)?)
}

#[cfg(not(feature = "cuda"))]
fn open_device(_index: usize) -> Result<Arc<dyn AsyncDevice>, DeviceError> {
    Err(DeviceError::without_cuda())
}

/// Ends a scheduler. Waits for its copies, and for the work of streams that use experts.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_free(postfetch: *mut llama_postfetch) -> llama_sidecar_status {
    status(|| handle::free(postfetch))
}

/// Starts to copy the down-projections of `n` experts of a layer to the device, in this order, and
/// returns at once. To be called once a layer, as soon as routing is known. Ids can repeat; of several
/// tokens, give all. `layer` is the number in the tensors' names.
///
/// Experts for which there is no room, or that the layer does not have, are answered with "CPU" later.
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
        // SAFETY: not null, with `n` elements as the caller vouches.
        postfetch.schedule(layer, unsafe { std::slice::from_raw_parts(ids, n) });
        Ok(())
    })
}

/// Where the copy of an expert is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_postfetch_state {
    /// There is none.
    CpuOnly = 0,
    /// Queued or under way.
    CopyInFlight = 1,
    /// On the device.
    GpuReady = 2,
}

/// Why an expert is to be computed on the CPU.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum llama_postfetch_reason {
    /// It is not: use the device.
    None = 0,
    /// Fetching is switched off.
    Disabled = 1,
    /// "CPU" was asked for always.
    Forced = 2,
    /// No driver, no device, no memory there, or given up after errors.
    NoDevice = 3,
    /// No down-projection of the model: another layer, or an expert that it does not have.
    Foreign = 4,
    /// Nobody scheduled it, or it was released.
    NotScheduled = 5,
    /// The scratchpad was full.
    NoRoom = 6,
    /// Still under way, and it is not to be waited for.
    Missed = 7,
    /// Its bytes could not be read.
    ReadFailed = 8,
    /// The driver refused something, or the expert is used by another stream.
    DeviceFailed = 9,
    /// The copy did not end in time.
    TimedOut = 10,
    /// It is not in host memory: there is nothing to fetch.
    Elsewhere = 11,
}

const REASONS: [llama_postfetch_reason; Reason::ALL.len()] = {
    use llama_postfetch_reason as R;
    [
        R::None,
        R::Disabled,
        R::Forced,
        R::NoDevice,
        R::Foreign,
        R::NotScheduled,
        R::NoRoom,
        R::Missed,
        R::ReadFailed,
        R::DeviceFailed,
        R::TimedOut,
        R::Elsewhere,
    ]
};

/// What to do about an expert.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_answer {
    /// sizeof(struct llama_postfetch_answer), set by the caller.
    pub struct_size: usize,
    /// Address of its down-projection on the device (a CUdeviceptr, 256-byte aligned); 0 when the CPU
    /// is to compute it. Valid until the expert is released.
    pub device_data: u64,
    /// The same bytes in the memory of the process, or NULL where they cannot be read without a copy.
    /// Valid as long as device_data; for an expert that is not scheduled, until a reload.
    pub host_data: *const c_void,
    /// Bytes of the matrix; 0 when it is no down-projection of the model, and the next ones too.
    pub nbytes: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Elements of a row, and rows.
    pub ne: [u64; 2],
    /// How often the tensor was replaced since the model was opened.
    pub generation: u64,
    /// Value of enum ggml_type.
    pub ggml_type: u32,
    /// Where its copy is.
    pub state: llama_postfetch_state,
    /// Why the CPU is to compute it.
    pub reason: llama_postfetch_reason,
    /// Whether gate and up of this expert are for the CPU, by cpu_limit.
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
            state: match answer.state {
                State::CpuOnly => llama_postfetch_state::CpuOnly,
                State::CopyInFlight => llama_postfetch_state::CopyInFlight,
                State::GpuReady => llama_postfetch_state::GpuReady,
            },
            reason: REASONS[answer.reason as usize],
            gate_up_on_cpu: answer.gate_up_on_cpu,
        }
    }
}

/// Asks a scheduler, and gives its answer.
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
        // SAFETY: as the caller vouches.
        unsafe { fill(answer, &found.into()) }
    })
}

/// Tells where an expert is. Never waits.
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
    // SAFETY: as the caller vouches.
    unsafe {
        put_answer(postfetch, answer, |postfetch| {
            postfetch.query(layer, expert)
        })
    }
}

/// Tells whether to use the device or the CPU for an expert, by the policy: a copy that is on the
/// device is used, one that is under way is waited for (or not, see block_on_miss), and otherwise the
/// CPU computes it. Whatever uses device_data must have ended before the expert is released;
/// llama_postfetch_acquire_on_stream sees to that for a stream.
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
    // SAFETY: as the caller vouches.
    unsafe {
        put_answer(postfetch, answer, |postfetch| {
            postfetch.acquire(layer, expert)
        })
    }
}

/// llama_postfetch_acquire for kernels: the CUDA stream waits for the bytes, the caller does not.
/// What is put into the stream afterwards can use device_data. When the expert is released, its memory
/// is overwritten only after the work that was in the stream by then. An expert is for one stream.
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
    // SAFETY: as the caller vouches.
    unsafe {
        put_answer(postfetch, answer, |postfetch| {
            postfetch.acquire_on(layer, expert, stream)
        })
    }
}

/// A CUDA stream for the host's kernels that waits for no other (a CUstream); NULL without a device.
/// It belongs to the scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_compute_stream(postfetch: *const llama_postfetch) -> *mut c_void {
    let found = call(|| Ok(handle::get(postfetch)?.compute_stream()));
    let stream = found.ok().flatten().map_or(0, |stream| stream.0);
    stream as *mut c_void
}

/// Makes a CUDA stream of the host wait for all work that is in llama_postfetch_compute_stream now.
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
        // SAFETY: as the caller vouches.
        unsafe { handle::get(postfetch)?.hand_back(stream) }
            .map_err(|error| crate::error::Error::from(error).into())
    })
}

/// Copies an expert that is on the device back, to look at it. Fails with
/// LLAMA_SIDECAR_STATUS_NOT_FOUND when it is not there, or `size` is not its size.
///
/// # Safety
///
/// `buffer` has room for `size` bytes.
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
            .map_err(crate::error::Error::from)?;
        if bytes.len() != size {
            return Err(missing());
        }
        // SAFETY: room for `size` bytes, as the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), size) };
        Ok(())
    })
}

/// Lets go of an expert.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_release(
    postfetch: *const llama_postfetch,
    layer: u32,
    expert: u32,
) -> llama_sidecar_status {
    status(|| {
        handle::get(postfetch)?.release(layer, expert);
        Ok(())
    })
}

/// Lets go of all experts of a layer, to be called when the layer is computed: until then their device
/// memory is taken.
#[unsafe(no_mangle)]
pub extern "C" fn llama_postfetch_release_layer(
    postfetch: *const llama_postfetch,
    layer: u32,
) -> llama_sidecar_status {
    status(|| {
        handle::get(postfetch)?.release_layer(layer);
        Ok(())
    })
}

/// Puts the layer whose down-projections tensor `index` of the model holds into `layer`. Only base
/// weights can be fetched: fails with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other tensor.
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
        let found = found.ok_or_else(|| {
            let what = format!("tensor {index} holds no down-projections of routed experts");
            Failure::new(llama_sidecar_status::NotFound, what)
        })?;
        // SAFETY: as the caller vouches.
        unsafe { put(layer, found, "layer") }
    })
}

/// What a scheduler did since it was made.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct llama_postfetch_stats {
    /// sizeof(struct llama_postfetch_stats), set by the caller.
    pub struct_size: usize,
    /// Calls of llama_postfetch_schedule.
    pub n_calls: u64,
    /// Experts that were put into copies.
    pub n_experts: u64,
    /// Those of them that were copied together with a neighbour before them.
    pub n_coalesced: u64,
    /// Ids that were scheduled already.
    pub n_duplicates: u64,
    /// Ids that are no experts of their layer.
    pub n_rejected: u64,
    /// Copies that were issued.
    pub n_copies: u64,
    /// Those of them that went through page-locked buffers.
    pub n_staged_copies: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Answers "use the device".
    pub n_hits: u64,
    /// Those of them for which a stream waits, and not the caller.
    pub n_stream_hits: u64,
    /// Answers for which the caller waited.
    pub n_waits: u64,
    /// How long it waited.
    pub wait_us: u64,
    /// How long copies took on the device.
    pub transfer_us: u64,
    /// Errors of the driver.
    pub n_errors: u64,
    /// Answers "compute on the CPU", by enum llama_postfetch_reason.
    pub n_fallbacks: [u64; 16],
    /// Device memory for experts.
    pub scratchpad_bytes: u64,
    /// The most of it that was in use.
    pub scratchpad_peak: u64,
    /// Memory of the model that is page-locked in place.
    pub locked_bytes: u64,
    /// 1 - wait / transfer; negative before a copy was timed.
    pub overlap: f64,
}

// SAFETY: repr(C), starts with struct_size, plain fields.
unsafe impl SizedStruct for llama_postfetch_stats {
    const NAME: &'static str = "llama_postfetch_stats";
    const FIRST: usize = 280;
}

/// Tells what a scheduler did.
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
        n_fallbacks[..found.fallbacks.len()].copy_from_slice(&found.fallbacks);
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
        };
        // SAFETY: as the caller vouches.
        unsafe { fill(stats, &value) }
    })
}

/// Writes what a scheduler works with and what it did into `buffer`, as JSON or for people, cut to
/// `size` bytes with the NUL, and returns how long the whole text is; 0 on failure. `buffer` can be
/// NULL when `size` is 0.
///
/// # Safety
///
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llama_postfetch_describe(
    postfetch: *const llama_postfetch,
    json: bool,
    buffer: *mut c_char,
    size: usize,
) -> usize {
    let written = call(|| {
        let postfetch = handle::get(postfetch)?;
        let (stats, mode) = (postfetch.stats(), postfetch.mode());
        let text = match json {
            true => stats.to_json(&mode).to_string(),
            false => stats.to_text(&mode),
        };
        // SAFETY: as the caller vouches.
        unsafe { put_text(&text, buffer, size) }
    });
    written.unwrap_or(0)
}
