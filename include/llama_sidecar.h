/**
 * @file llama_sidecar.h
 *
 * llama-sidecar: change what a llama.cpp process holds and fetches, while it runs.
 *
 * Generated from src/ffi by 'cargo xtask header'; do not edit.
 *
 * Conventions
 *
 *  - Errors: a call that can fail returns a status, NULL, false or 0, and sets the message of
 *    llama_sidecar_last_error() for its thread.
 *  - Handles are opaque. NULL, a freed handle, or a handle of another library fails with
 *    LLAMA_SIDECAR_STATUS_BAD_HANDLE; it is never undefined behaviour. Freeing NULL does nothing.
 *  - Structs with struct_size: set it to sizeof the struct before the call. A program that was built
 *    with an older header keeps working, with the fields that it knows.
 *  - Threads: every call can be made from any thread, unless its description states otherwise.
 *  - Pointers must be valid for the call. They can be NULL only where the description allows it.
 *  - A bool that a program passes or returns is true unless all its bits are 0.
 *  - Callbacks must return: no C++ exception, longjmp or end of the thread may leave them. Their
 *    descriptions state which calls they can make.
 *  - Strings are NUL-terminated: UTF-8, or the raw bytes of the file. The caller frees only
 *    handles; each description states how long a returned pointer is valid.
 *  - Sizes and offsets are in bytes, times in microseconds, unless the name states otherwise.
 */


#ifndef LLAMA_SIDECAR_H
#define LLAMA_SIDECAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Version of this header. llama_sidecar_version() returns the version of the library. */
#define LLAMA_SIDECAR_VERSION "0.1.0"
/** Major version of this header. */
#define LLAMA_SIDECAR_VERSION_MAJOR 0
/** Minor version of this header. */
#define LLAMA_SIDECAR_VERSION_MINOR 1
/** Patch version of this header. */
#define LLAMA_SIDECAR_VERSION_PATCH 0
/** Version of this header for comparisons: MAJOR * 1000000 + MINOR * 1000 + PATCH. */
#define LLAMA_SIDECAR_VERSION_NUMBER 1000

/** Result of a call. The meaning of a value never changes. */
enum llama_sidecar_status {
    /** The call succeeded. */
    LLAMA_SIDECAR_STATUS_OK = 0,
    /** An argument is NULL, out of range, or of the wrong size. */
    LLAMA_SIDECAR_STATUS_BAD_ARGUMENT = 1,
    /** A handle is NULL, freed, of another type, or not a handle of this library. */
    LLAMA_SIDECAR_STATUS_BAD_HANDLE = 2,
    /** The file, tensor, key, layer, or device does not exist. */
    LLAMA_SIDECAR_STATUS_NOT_FOUND = 3,
    /** The operating system failed to open, read, or write a file. */
    LLAMA_SIDECAR_STATUS_IO = 4,
    /** A file is not a valid GGUF file, or is a shard that does not belong to the model. */
    LLAMA_SIDECAR_STATUS_MALFORMED = 5,
    /** A device does not have enough free memory. */
    LLAMA_SIDECAR_STATUS_OUT_OF_MEMORY = 6,
    /** A device reported another error. */
    LLAMA_SIDECAR_STATUS_DEVICE = 7,
    /** A callback returned false, so the call stopped. */
    LLAMA_SIDECAR_STATUS_CANCELLED = 8,
    /**
     * The call is not possible now: for example, a reload during an evaluation of the same thread.
     */
    LLAMA_SIDECAR_STATUS_BUSY = 9,
    /** A file was modified in place after it was opened, or while it was read. */
    LLAMA_SIDECAR_STATUS_FILE_CHANGED = 10,
    /** The feature is disabled for this model. */
    LLAMA_SIDECAR_STATUS_DISABLED = 11,
    /** Internal error. Nothing was changed. Report the message as a bug of llama-sidecar. */
    LLAMA_SIDECAR_STATUS_INTERNAL = 12
};

/** Kind of memory of a device. */
enum llama_sidecar_device_kind {
    /** Memory of the process. */
    LLAMA_SIDECAR_DEVICE_KIND_HOST = 0,
    /** Memory of an NVIDIA GPU. */
    LLAMA_SIDECAR_DEVICE_KIND_CUDA = 1
};

/** A weight matrix of an expert. */
enum llama_sidecar_projection {
    /** Gate. */
    LLAMA_SIDECAR_PROJECTION_GATE = 0,
    /** Up. */
    LLAMA_SIDECAR_PROJECTION_UP = 1,
    /** Gate and up in one matrix. */
    LLAMA_SIDECAR_PROJECTION_GATE_UP = 2,
    /** Down. */
    LLAMA_SIDECAR_PROJECTION_DOWN = 3
};

/** State of the copy of an expert. */
enum llama_postfetch_state {
    /** The expert has no copy. */
    LLAMA_POSTFETCH_STATE_CPU_ONLY = 0,
    /** The copy is queued or in flight. */
    LLAMA_POSTFETCH_STATE_COPY_IN_FLIGHT = 1,
    /** The copy is on the device. */
    LLAMA_POSTFETCH_STATE_GPU_READY = 2
};

/** Reason why an expert must be computed on the CPU. */
enum llama_postfetch_reason {
    /** No reason: use the device. */
    LLAMA_POSTFETCH_REASON_NONE = 0,
    /** Copies are disabled. */
    LLAMA_POSTFETCH_REASON_DISABLED = 1,
    /** The parameter force_cpu is set. */
    LLAMA_POSTFETCH_REASON_FORCED = 2,
    /** No driver, no device, no device memory, or the device was disabled after errors. */
    LLAMA_POSTFETCH_REASON_NO_DEVICE = 3,
    /** The model has no down-projection with this layer and expert. */
    LLAMA_POSTFETCH_REASON_FOREIGN = 4,
    /** The expert was not scheduled, or was released. */
    LLAMA_POSTFETCH_REASON_NOT_SCHEDULED = 5,
    /** The scratchpad was full. */
    LLAMA_POSTFETCH_REASON_NO_ROOM = 6,
    /** The copy is in flight and block_on_miss is false, or cannot be submitted to a stream yet. */
    LLAMA_POSTFETCH_REASON_MISSED = 7,
    /** The data of the expert could not be read. */
    LLAMA_POSTFETCH_REASON_READ_FAILED = 8,
    /** A driver call failed, or another stream uses the expert. */
    LLAMA_POSTFETCH_REASON_DEVICE_FAILED = 9,
    /** The copy exceeded patience_us. */
    LLAMA_POSTFETCH_REASON_TIMED_OUT = 10,
    /** The expert is not in host memory. */
    LLAMA_POSTFETCH_REASON_ELSEWHERE = 11
};

/** Outcome of a reload for one tensor. */
enum llama_sidecar_outcome {
    /** The file changed, but the data of the tensor did not. */
    LLAMA_SIDECAR_OUTCOME_UNCHANGED = 0,
    /** The tensor has new data in a buffer of its own. */
    LLAMA_SIDECAR_OUTCOME_SWAPPED = 1,
    /** The tensor has its original data again. */
    LLAMA_SIDECAR_OUTCOME_RETURNED = 2,
    /** The file was modified in place, so the mapped data had already changed. */
    LLAMA_SIDECAR_OUTCOME_IN_PLACE = 3,
    /** The tensor or its file was refused. The tensor is unchanged. */
    LLAMA_SIDECAR_OUTCOME_REFUSED = 4,
    /**
     * Same data, new placement: the layout of a sibling changed, a device ran out of memory, or a
     * device has enough memory again.
     */
    LLAMA_SIDECAR_OUTCOME_MOVED = 5
};

/** Outcome of a reload for one file. */
enum llama_sidecar_file_event {
    /** The tensors of the file are now in use. */
    LLAMA_SIDECAR_FILE_EVENT_TAKEN = 0,
    /** The file was skipped; its tensors are unchanged. */
    LLAMA_SIDECAR_FILE_EVENT_IGNORED = 1
};

/** State of a tensor since the model was opened. */
enum llama_sidecar_tensor_state {
    /** The tensor is unchanged. */
    LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL = 0,
    /** The tensor is in buffers of its own, with other data or another layout. */
    LLAMA_SIDECAR_TENSOR_STATE_DETACHED = 1,
    /** The tensor and its layer are in host memory, because a device did not have enough memory. */
    LLAMA_SIDECAR_TENSOR_STATE_FALLBACK_CPU = 2
};

/** Axis along which a tensor is split. */
enum llama_sidecar_axis {
    /** Within rows: each part has some elements of every row. */
    LLAMA_SIDECAR_AXIS_COLUMNS = 0,
    /**
     * Between rows: each part has some rows of every slice; for merged experts, of every expert.
     */
    LLAMA_SIDECAR_AXIS_ROWS = 1,
    /** Not split: the part is the whole tensor. */
    LLAMA_SIDECAR_AXIS_NONE = 2
};

/**
 * An evaluation context of a model. This is not the llama_context of llama.cpp; see llama_model.
 */
struct llama_context;

/** Threads that read routed experts of a model from disk before the program uses them. */
struct llama_expert_stream;

/** Usage counters for the routed experts of a model. */
struct llama_expert_trace;

/**
 * An open model. This is not the llama_model of llama.cpp. Passing a handle of llama.cpp to this
 * library fails with LLAMA_SIDECAR_STATUS_BAD_HANDLE; passing a handle of this library to
 * llama.cpp is undefined behaviour.
 */
struct llama_model;

/** A scheduler that copies routed experts to a GPU. */
struct llama_postfetch;

/** The result of a reload. */
struct llama_sidecar_report;

/**
 * Receives the new generation of the model after a reload that changed tensors. Graphs that were
 * built before are stale.
 *
 * Called on the thread that reloads, after the switch and before the next evaluation can begin.
 * The callback must not begin an evaluation or start a reload.
 */
typedef void (*llama_sidecar_stale)(uint64_t generation, void *user_data);

/** A device and its memory use. */
struct llama_sidecar_device_info {
    /** Set by the caller to sizeof(struct llama_sidecar_device_info). */
    size_t struct_size;
    /** Name of the device, truncated to fit, NUL-terminated. */
    char name[64];
    /** Kind of memory. */
    enum llama_sidecar_device_kind kind;
    /** Total memory in bytes. */
    uint64_t total;
    /** Free memory in bytes. */
    uint64_t free;
    /** Bytes in live buffers of this model. */
    uint64_t used;
    /** Maximum of `used` so far. */
    uint64_t peak;
    /** Number of buffers allocated so far. */
    uint64_t allocations;
};

/** The parsed name of an expert tensor. */
struct llama_sidecar_expert_name {
    /** Set by the caller to sizeof(struct llama_sidecar_expert_name). */
    size_t struct_size;
    /** Number of the layer. */
    uint32_t layer;
    /** Which matrix. */
    enum llama_sidecar_projection projection;
    /** Number of the expert; -1 if the tensor has all experts of the layer. */
    int64_t expert;
};

/** An expert tensor of a model. */
struct llama_sidecar_expert_tensor {
    /** Set by the caller to sizeof(struct llama_sidecar_expert_tensor). */
    size_t struct_size;
    /** Index of the tensor for llama_sidecar_tensor_get_info. */
    uint64_t tensor;
    /** Size of the tensor in bytes, at the time of the call. */
    uint64_t nbytes;
    /** Size of the matrix of one expert in bytes; 0 if n_experts is 0. */
    uint64_t expert_bytes;
    /** Number of the layer. */
    uint32_t layer;
    /** Which matrix. */
    enum llama_sidecar_projection projection;
    /** Number of the first expert in the tensor. */
    uint32_t first_expert;
    /**
     * Number of experts in the tensor, one after the other: 1, or all of the layer. 0 if the shape
     * is not that of experts, or if the layer or an expert has a number of 4096 or more.
     */
    uint32_t n_experts;
};

/**
 * Receives a log message. Can be called from any thread, inside of any call, while the library holds
 * locks. Calls that take a handle fail with LLAMA_SIDECAR_STATUS_BUSY in it; it must not wait for
 * another thread that makes such a call.
 *
 * @param level 1 error, 2 warning, 3 information, 4 debugging.
 * @param text Message without a newline. Valid during the call only.
 */
typedef void (*llama_sidecar_log_callback)(uint32_t level, const char *text, void *user_data);

/** A metadata key and the type of its value. */
struct llama_sidecar_metadata_info {
    /** Set by the caller to sizeof(struct llama_sidecar_metadata_info). */
    size_t struct_size;
    /** Name of the key. Valid until the model is freed. */
    const char *key;
    /** Number of elements of an array; 1 for any other value. */
    uint64_t count;
    /** Value of enum gguf_type (GGUF specification); for an array, the type of its elements. */
    uint32_t gguf_type;
    /** Whether the value is an array. */
    bool is_array;
};

/** Parameters of llama_model_load. Initialise with llama_sidecar_default_params. */
struct llama_sidecar_params {
    /** Set by the caller to sizeof(struct llama_sidecar_params). */
    size_t struct_size;
    /** Allow reloads to replace tensors. Default: LLAMA_HOTSWAP_ENABLED. */
    bool hotswap;
    /**
     * Map files into memory, so that tensors can be used in place. If a file cannot be mapped, it
     * is read instead. Default: true.
     */
    bool use_mmap;
    /** Keep routed experts in host memory (device 0). Default: LLAMA_SIDECAR_CPU_MOE. */
    bool cpu_moe;
    /**
     * Use the CUDA devices of the machine as devices 1, 2, ...; n_devices and device_bytes are
     * then ignored. Default: false.
     */
    bool use_cuda;
    /**
     * Number of devices in host memory, 1 to 64. Device 0 is the memory of the process; the others
     * simulate GPUs. Default: 1.
     */
    uint32_t n_devices;
    /** Device of tensors for which no other rule applies. Default: 0. */
    uint32_t device;
    /** Memory limit per device in bytes, except device 0; 0 for no limit. Default: 0. */
    uint64_t device_bytes;
    /**
     * Maximum number of bytes that a reload stages before it switches; 0 for no limit. A larger
     * reload is done in several consistent steps. Default: LLAMA_SIDECAR_STAGING_MB.
     */
    uint64_t staging_bytes;
    /**
     * Split matrices over devices 1, 2, ... in these proportions, for example "3,1,1"; NULL or
     * empty for no split. Default: LLAMA_SIDECAR_SPLIT.
     */
    const char *split;
    /**
     * Rules REGEX=DEVICE, separated by semicolons, for example "ffn_.*_exps=0;attn=2". A tensor
     * whose name matches is placed unsplit on that device; the first match applies. NULL or empty
     * for no rules. Default: LLAMA_SIDECAR_OVERRIDE_TENSOR.
     */
    const char *override_tensor;
};

/** A tensor that a program has in its memory, such as a ggml_tensor in host memory. */
struct llama_sidecar_tensor_data {
    /** Set by the caller to sizeof(struct llama_sidecar_tensor_data). */
    size_t struct_size;
    /** Name as in a GGUF file, such as blk.3.ffn_down_exps.weight. Copied. */
    const char *name;
    /** The bytes, without gaps between rows and matrices. */
    const void *data;
    /** Number of bytes, as ggml_nbytes returns it. */
    uint64_t nbytes;
    /**
     * Number of elements per dimension, innermost first; 1 for dimensions that the tensor does not
     * have.
     */
    uint64_t ne[4];
    /** Value of enum ggml_type. */
    uint32_t ggml_type;
};

/** Tensor, file, and device counts of a model. */
struct llama_sidecar_model_info {
    /** Set by the caller to sizeof(struct llama_sidecar_model_info). */
    size_t struct_size;
    /** Number of tensors. Indices of tensors start at 0. */
    uint64_t n_tensors;
    /** Number of files. */
    uint64_t n_files;
    /** Number of metadata keys of the first file. */
    uint64_t n_metadata;
    /** Number of devices that the model can use. */
    uint64_t n_devices;
    /** Total size of all files in bytes. */
    uint64_t file_bytes;
    /** Number of times that reloads switched tensors since the model was opened. */
    uint64_t generation;
    /** Number of evaluations that waited for a reload before they began. */
    uint64_t n_pauses;
    /** Longest of these waits in microseconds. */
    uint64_t longest_pause_us;
    /** GGUF version of the first file. */
    uint32_t gguf_version;
};

/** How far llama_sidecar_model_load_all is. */
struct llama_sidecar_load_progress {
    /**
     * Set by the library to sizeof(struct llama_sidecar_load_progress), as the library knows it.
     */
    size_t struct_size;
    /** Bytes loaded so far. */
    uint64_t done;
    /** Bytes to load. */
    uint64_t total;
    /** Number of tensors that are loaded completely. */
    uint64_t n_done;
    /** Number of tensors to load. */
    uint64_t n_tensors;
    /** Name of the tensor whose bytes were loaded last. Valid as long as the model. */
    const char *name;
};

/**
 * Receives the progress of llama_sidecar_model_load_all, on the thread that made that call. The
 * last call has `done` equal to `total`. There is no call if nothing is to be loaded. It can make any
 * call, except that it must not reload this model.
 *
 * @param progress Valid during the call.
 * @return false to cancel the load, also in the last call.
 */
typedef bool (*llama_sidecar_progress)(const struct llama_sidecar_load_progress *progress,
                                       void *user_data);

/** Result of llama_sidecar_model_load_all. */
struct llama_sidecar_load_report {
    /** Set by the caller to sizeof(struct llama_sidecar_load_report). */
    size_t struct_size;
    /** Number of tensors that the call loaded. */
    uint64_t n_tensors;
    /** Bytes of these tensors. */
    uint64_t bytes;
    /**
     * Number of device allocations: at most 9 per model, unless the model has more devices than
     * that.
     */
    uint64_t allocations;
    /** Duration in microseconds. */
    uint64_t time_us;
};

/** Parameters of llama_postfetch_init. Initialise with llama_postfetch_default_params. */
struct llama_postfetch_params {
    /** Set by the caller to sizeof(struct llama_postfetch_params). */
    size_t struct_size;
    /** Enable copies. Default: LLAMA_POSTFETCH_ENABLE, or true. */
    bool enable;
    /** Use the CPU for every expert. Default: LLAMA_POSTFETCH_FORCE_CPU. */
    bool force_cpu;
    /** Wait for a copy in flight. Default: LLAMA_POSTFETCH_BLOCK_ON_MISS, or true. */
    bool block_on_miss;
    /**
     * Use separate streams for copies and for kernels. Default:
     * LLAMA_POSTFETCH_USE_DEDICATED_STREAMS, or true.
     */
    bool dedicated_streams;
    /** Page-lock the model in place. Default: LLAMA_POSTFETCH_PAGE_LOCK, or true. */
    bool page_lock;
    /** Log every transfer. Default: LLAMA_POSTFETCH_DEBUG. */
    bool debug;
    /** Ordinal of the CUDA device, after CUDA_VISIBLE_DEVICES. Default: 0. */
    uint32_t device;
    /**
     * Maximum number of copies in flight, 1 to 1024. Default: LLAMA_POSTFETCH_MAX_TRANSFERS, or 8.
     */
    uint32_t max_transfers;
    /**
     * Number of experts per layer whose gate and up projections are computed on the CPU. Default:
     * LLAMA_POSTFETCH_CPU_LIMIT, or the number of physical cores.
     */
    uint32_t cpu_limit;
    /** Number of experts per token; 0 for the value in the model's metadata. Default: 0. */
    uint32_t n_active;
    /**
     * Device memory for experts in bytes; 0 for the size of the active experts of the largest
     * layer, but at most 10 % of the device. Default: LLAMA_POSTFETCH_SCRATCHPAD_MB.
     */
    uint64_t scratchpad_bytes;
    /**
     * Microseconds that the fetch thread busy-waits before it sleeps. Waking a sleeping thread
     * adds a few microseconds to llama_postfetch_schedule. Default: LLAMA_POSTFETCH_SPIN_US.
     */
    uint64_t spin_us;
    /**
     * Timeout of a copy in microseconds. After a timeout, the device is no longer used. Default:
     * LLAMA_POSTFETCH_TIMEOUT_MS, or 5 s.
     */
    uint64_t patience_us;
    /**
     * Device memory in bytes in which recently used experts stay after their release, in addition
     * to scratchpad_bytes; 0 for none, UINT64_MAX for all experts. Layers share it in proportion
     * to their experts. Default: LLAMA_POSTFETCH_CACHE_MB.
     */
    uint64_t cache_bytes;
    /**
     * A use of an expert counts for half as much after so many uses of other experts of the layer.
     * The expert whose uses count least is replaced; 1 for the least recently used. Default:
     * LLAMA_POSTFETCH_CACHE_HALF_LIFE, or 1.
     */
    uint64_t cache_half_life;
};

/** Where to compute an expert, and its data. */
struct llama_postfetch_answer {
    /** Set by the caller to sizeof(struct llama_postfetch_answer). */
    size_t struct_size;
    /**
     * Device address of the down-projection (a CUdeviceptr, 256-byte aligned), or 0 if the CPU
     * must compute the expert. Valid until the expert is released.
     */
    uint64_t device_data;
    /**
     * Host address of the down-projection, or NULL if it is not readable without a copy. Valid
     * until the expert is released; for an expert that is not scheduled, until a reload.
     */
    const void *host_data;
    /**
     * Bytes of the matrix. If the model has no such down-projection, this field and the next four
     * are 0.
     */
    uint64_t nbytes;
    /** Bytes of a row. */
    uint64_t row_bytes;
    /** Number of elements per row, and number of rows. */
    uint64_t ne[2];
    /** Number of times that the tensor changed since the model was opened. */
    uint64_t generation;
    /** Value of enum ggml_type. */
    uint32_t ggml_type;
    /** State of the copy. */
    enum llama_postfetch_state state;
    /** Reason why the CPU must compute the expert. */
    enum llama_postfetch_reason reason;
    /** Whether cpu_limit assigns the gate and up projections of this expert to the CPU. */
    bool gate_up_on_cpu;
};

/** Statistics of a scheduler since its creation. */
struct llama_postfetch_stats {
    /** Set by the caller to sizeof(struct llama_postfetch_stats). */
    size_t struct_size;
    /** Number of calls of llama_postfetch_schedule. */
    uint64_t n_calls;
    /** Number of experts that were queued for a copy. */
    uint64_t n_experts;
    /** Number of these that were copied together with the preceding neighbour. */
    uint64_t n_coalesced;
    /** Number of ids that were already scheduled. */
    uint64_t n_duplicates;
    /** Number of ids that are not experts of their layer. */
    uint64_t n_rejected;
    /** Number of copies issued. */
    uint64_t n_copies;
    /** Number of these that went through page-locked staging buffers. */
    uint64_t n_staged_copies;
    /** Bytes of these copies. */
    uint64_t bytes;
    /** Number of answers to use the device. */
    uint64_t n_hits;
    /** Number of these for which a stream waits instead of the caller. */
    uint64_t n_stream_hits;
    /** Number of answers for which the caller waited. */
    uint64_t n_waits;
    /** Total time that callers waited, in microseconds by the clock of the host. */
    uint64_t wait_us;
    /** Total time of copies, in microseconds by the clock of the device. */
    uint64_t transfer_us;
    /** Number of driver errors. */
    uint64_t n_errors;
    /** Number of answers to use the CPU, indexed by enum llama_postfetch_reason. */
    uint64_t n_fallbacks[16];
    /** Device memory for experts in bytes. */
    uint64_t scratchpad_bytes;
    /** Maximum use of this memory in bytes. */
    uint64_t scratchpad_peak;
    /** Bytes of the model that are page-locked in place. */
    uint64_t locked_bytes;
    /**
     * Overlap of copies with computation: the share of the time of copies for which nothing waited
     * and which was not spent on unused copies, 1 - (wait_us + stream_wait_us + unused_us) /
     * transfer_us, at least 0; negative if no copy was timed yet.
     */
    double overlap;
    /** Device memory of the cache in bytes; 0 without a cache. */
    uint64_t cache_bytes;
    /** Number of scheduled experts whose data was in the cache, or in a copy to the cache. */
    uint64_t n_cache_hits;
    /** Number of scheduled experts that were not in the cache of their layer. */
    uint64_t n_cache_misses;
    /** Number of experts that were replaced in the cache by another. */
    uint64_t n_cache_evictions;
    /** Number of copies that a stream of the caller waited for. */
    uint64_t n_stream_waits;
    /** Total time that streams waited for copies, in microseconds by the clock of the device. */
    uint64_t stream_wait_us;
    /** Number of copies that had ended when their first expert was acquired for the device. */
    uint64_t n_early_copies;
    /**
     * Number of copies that ended, and of which no expert was acquired for the device. Copies to the
     * cache do not count, because they stay there.
     */
    uint64_t n_unused_copies;
    /** Total time of these copies, in microseconds by the clock of the device. */
    uint64_t unused_us;
    /** Share of answers to use the CPU, 0 to 1; negative without answers. */
    double fallback_rate;
};

/** Counts and durations of a reload. */
struct llama_sidecar_report_info {
    /** Set by the caller to sizeof(struct llama_sidecar_report_info). */
    size_t struct_size;
    /** Number of files that were checked for changes, with one stat call each. */
    uint64_t n_files_checked;
    /** Number of changed files; see llama_sidecar_report_get_file. */
    uint64_t n_files;
    /** Number of tensors in these files; see llama_sidecar_report_get_tensor. */
    uint64_t n_tensors;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_SWAPPED. */
    uint64_t n_swapped;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_RETURNED. */
    uint64_t n_returned;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_UNCHANGED. */
    uint64_t n_unchanged;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_IN_PLACE. */
    uint64_t n_in_place;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_REFUSED. */
    uint64_t n_refused;
    /** Number of tensors with LLAMA_SIDECAR_OUTCOME_MOVED. */
    uint64_t n_moved;
    /** Bytes read into new buffers. */
    uint64_t bytes_staged;
    /** Generation of the model after the reload; 0 if nothing changed. */
    uint64_t generation;
    /**
     * Number of switches: 0 if nothing changed, 1 for an ordinary reload, more for a reload in
     * several steps.
     */
    uint64_t n_commits;
    /**
     * Why a reload in several steps stopped before the last one; empty otherwise. Valid until the
     * report is freed.
     */
    const char *failure;
    /** Time for checking files and parsing changed headers, in microseconds. */
    uint64_t detect_us;
    /** Time for reading and hashing tensors, in microseconds. */
    uint64_t compare_us;
    /** Time for allocating and filling new buffers, in microseconds. */
    uint64_t stage_us;
    /** Time spent waiting for running evaluations to end, in microseconds. */
    uint64_t wait_us;
    /** Time of the switch, during which no evaluation could run, in nanoseconds. */
    uint64_t switch_ns;
    /** Total time in microseconds. */
    uint64_t total_us;
};

/** One tensor of a changed file. */
struct llama_sidecar_report_tensor {
    /** Set by the caller to sizeof(struct llama_sidecar_report_tensor). */
    size_t struct_size;
    /** Index of the tensor in the model. */
    uint64_t index;
    /** Name of the tensor. Valid until the report is freed, as are the other strings. */
    const char *name;
    /** Name of the previous type. A static string. */
    const char *old_type;
    /** Name of the new type. A static string. */
    const char *new_type;
    /** Why the tensor was refused; empty otherwise. */
    const char *reason;
    /**
     * Description of the devices and the rows on each; empty if the tensor did not change or is on
     * no device.
     */
    const char *placement;
    /** Bytes in the file; 0 for a tensor that was refused or only moved. */
    uint64_t nbytes;
    /** Outcome for the tensor. */
    enum llama_sidecar_outcome outcome;
};

/** A file that changed since the last reload. */
struct llama_sidecar_report_file {
    /** Set by the caller to sizeof(struct llama_sidecar_report_file). */
    size_t struct_size;
    /** Path of the file. Valid until the report is freed, as is the reason. */
    const char *path;
    /**
     * Why the file was skipped, or what of it needs a new start of the program; empty otherwise.
     */
    const char *reason;
    /** Outcome for the file. */
    enum llama_sidecar_file_event event;
};

/** Parameters of llama_expert_stream_new. Initialise with llama_expert_stream_default_params. */
struct llama_expert_stream_params {
    /** Set by the caller to sizeof(struct llama_expert_stream_params). */
    size_t struct_size;
    /**
     * Check every layer. Otherwise, only a sample of layers is checked while all experts are in
     * memory. Default: whether LLAMA_EXPERT_STREAM is "on".
     */
    bool always;
    /** Number of threads, 1 to 64. Default: half of the processors, from 1 to 4. */
    uint32_t n_threads;
};

/** Statistics of a stream since its creation. */
struct llama_expert_stream_stats {
    /** Set by the caller to sizeof(struct llama_expert_stream_stats). */
    size_t struct_size;
    /** Number of layers that were scheduled. */
    uint64_t n_layers;
    /** Bytes of routed experts whose residency was checked. */
    uint64_t checked_bytes;
    /** Bytes of these that were in memory or on their way. */
    uint64_t resident_bytes;
    /** Bytes that were read ahead because of routing. */
    uint64_t read_bytes;
    /** Bytes that were read ahead of routing: the next layer of a batch. */
    uint64_t ahead_bytes;
    /** Number of read-ahead calls that failed. */
    uint64_t n_failed;
    /** Number of page faults of the process that waited for a disk. */
    uint64_t n_major_faults;
    /** Time from the first call of llama_expert_stream_schedule to the last, in microseconds. */
    uint64_t schedule_us;
    /** Whether all experts are in memory, so that only a sample of layers is checked. */
    bool resting;
    /** Whether the stream stopped, because reading ahead had no effect. */
    bool stopped;
};

/** A tensor at the time of the call. */
struct llama_sidecar_tensor_info {
    /** Set by the caller to sizeof(struct llama_sidecar_tensor_info). */
    size_t struct_size;
    /** Index of the tensor. */
    uint64_t index;
    /** Name of the tensor. Valid until the model is freed. */
    const char *name;
    /** Name of the type in ggml, for example "q4_K". A static string. */
    const char *type_name;
    /** Path of the file of the tensor. Valid until the model is freed. */
    const char *path;
    /**
     * Host address of the data (host buffer or file mapping), or NULL if it is not readable
     * without a copy. Read-only. Valid until a reload replaces the tensor or the model is freed;
     * reloads do not replace tensors during an evaluation. A file mapping shows in-place changes
     * of the file, so replace files by rename.
     */
    const void *host_data;
    /**
     * Device address of a tensor that is loaded in one part; otherwise 0. Valid as long as
     * host_data.
     */
    uint64_t device_data;
    /** Number of elements per dimension, innermost first, as in ggml. */
    uint64_t ne[4];
    /** Strides in bytes, as in ggml: nb[0] is a block, nb[1] is a row. */
    uint64_t nb[4];
    /** Size of the data in bytes. */
    uint64_t nbytes;
    /** Offset of the data in the file, or UINT64_MAX if a reload replaced the data. */
    uint64_t file_offset;
    /** Number of times that the tensor changed since the model was opened. */
    uint64_t generation;
    /** Value of enum ggml_type. */
    uint32_t ggml_type;
    /** Number of elements in a block of the type. A row is a whole number of blocks. */
    uint32_t block_elements;
    /** Index of the device; -1 if the tensor is not loaded, -2 if it is in several parts. */
    int32_t device;
    /** Number of parts; 0 if the tensor is not loaded. See llama_sidecar_tensor_get_part. */
    uint32_t n_parts;
    /** State of the tensor. */
    enum llama_sidecar_tensor_state state;
};

/** A part of a loaded tensor, contiguous on one device. */
struct llama_sidecar_tensor_part {
    /** Set by the caller to sizeof(struct llama_sidecar_tensor_part). */
    size_t struct_size;
    /** Address of the part on the device. Valid as long as host_data of the tensor. */
    uint64_t device_data;
    /** Size of the part in bytes. */
    uint64_t nbytes;
    /** First row of the part, or first element of each row, depending on the axis. */
    uint64_t first;
    /** Number of rows, or of elements of each row. */
    uint64_t count;
    /** Index of the device. */
    uint32_t device;
    /** Axis along which the tensor is split. */
    enum llama_sidecar_axis axis;
};

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/**
 * Creates an evaluation context of a model. Use one context per evaluating thread. The context
 * keeps the model alive.
 *
 * @return The context, or NULL on failure. Free it with llama_sidecar_context_free.
 */
struct llama_context *llama_sidecar_context_new(const struct llama_model *model);

/** Frees a context and ends its evaluation, if one is running. */
enum llama_sidecar_status llama_sidecar_context_free(struct llama_context *context);

/**
 * Begins an evaluation. Until the evaluation ends, no tensor of the model changes. Waits while a
 * reload switches tensors, and up to 5 seconds for a reload that waits for running evaluations.
 *
 * @param generation Receives the generation of the model; can be NULL. If the value differs from
 * the last evaluation, rebuild graphs.
 */
enum llama_sidecar_status llama_sidecar_eval_begin(const struct llama_context *context,
                                                   uint64_t *generation);

/**
 * Ends the evaluation of a context.
 *
 * The call can be made on another thread than llama_sidecar_eval_begin. The evaluation still
 * belongs to the thread that began it: a reload on that thread fails at once with
 * LLAMA_SIDECAR_STATUS_BUSY. A thread that took over an evaluation must end it before it reloads;
 * otherwise the reload waits for its own thread and fails with LLAMA_SIDECAR_STATUS_BUSY after 60
 * seconds.
 */
enum llama_sidecar_status llama_sidecar_eval_end(const struct llama_context *context);

/**
 * Sets the callback for stale graphs. NULL removes it.
 *
 * @param user_data Passed to `callback`. Must stay valid until the callback is replaced or the
 * context is freed, and until a reload that is running then returns.
 */
enum llama_sidecar_status llama_sidecar_on_stale(const struct llama_context *context,
                                                 llama_sidecar_stale callback,
                                                 void *user_data);

/**
 * Fills `info` with the name and the memory of a device.
 *
 * @param device Index of the device, less than n_devices of llama_sidecar_model_info.
 */
enum llama_sidecar_status llama_sidecar_device_get_info(const struct llama_model *model,
                                                        uint32_t device,
                                                        struct llama_sidecar_device_info *info);

/**
 * Parses the name of an expert tensor, for example blk.5.ffn_down_exps.weight (all experts of
 * layer 5), blk.5.ffn_down.3.weight or blk.5.ffn_down_exps.3.weight (expert 3).
 *
 * Other tensors fail with LLAMA_SIDECAR_STATUS_NOT_FOUND, also biases, routers and shared experts,
 * which every token uses.
 */
enum llama_sidecar_status llama_sidecar_expert_name_parse(const char *name,
                                                          struct llama_sidecar_expert_name *parsed);

/** Writes the number of expert tensors of a model to `count`; 0 without routed experts. */
enum llama_sidecar_status llama_sidecar_expert_tensor_count(const struct llama_model *model,
                                                            uint64_t *count);

/**
 * Fills `info` with the layer, the matrix, the experts and the sizes of an expert tensor.
 *
 * @param index Less than the number of llama_sidecar_expert_tensor_count. The tensors are ascending
 * by layer, then by projection, then by expert.
 */
enum llama_sidecar_status llama_sidecar_expert_tensor_get_info(const struct llama_model *model,
                                                               uint64_t index,
                                                               struct llama_sidecar_expert_tensor *info);

/**
 * Sends log messages to `callback` instead of standard error. The variable LLAMA_SIDECAR_LOG sets
 * the lowest level that is logged.
 *
 * @param callback NULL restores standard error.
 * @param user_data Passed to `callback`. It must stay valid until the callback is replaced and the
 * calls of the library that other threads have begun before have ended.
 */
enum llama_sidecar_status llama_sidecar_log_set(llama_sidecar_log_callback callback,
                                                void *user_data);

/** Finds a key by name, for example "general.architecture", and writes its index to `index`. */
enum llama_sidecar_status llama_sidecar_metadata_find(const struct llama_model *model,
                                                      const char *key,
                                                      uint64_t *index);

/**
 * Fills `info` with the name and the type of a key.
 *
 * @param index Index of the key, less than n_metadata of llama_sidecar_model_info.
 */
enum llama_sidecar_status llama_sidecar_metadata_get_info(const struct llama_model *model,
                                                          uint64_t index,
                                                          struct llama_sidecar_metadata_info *info);

/**
 * Writes a value as text to `buffer`, truncated to `size` bytes including the NUL. Numbers are
 * decimal, booleans are "true" or "false", strings are copied.
 *
 * @param element Index of an array element; 0 for a value that is not an array.
 * @param buffer Can be NULL when `size` is 0.
 * @param length Receives the length of the whole text without the NUL; can be NULL.
 *
 * The model caches the last array of strings that was read, so a loop over a vocabulary reads the
 * file once.
 */
enum llama_sidecar_status llama_sidecar_metadata_text(const struct llama_model *model,
                                                      uint64_t index,
                                                      uint64_t element,
                                                      char *buffer,
                                                      size_t size,
                                                      size_t *length);

/**
 * Opens the model of a GGUF file or of any of its shards.
 *
 * The call reads headers only. Tensor data is read on demand.
 *
 * @param params NULL for the defaults of llama_sidecar_default_params.
 * @return The model, or NULL on failure. Free it with llama_sidecar_model_free.
 */
struct llama_model *llama_model_load(const char *path, const struct llama_sidecar_params *params);

/**
 * Makes a model of tensors that the program has in its memory: no file is opened, and nothing is
 * copied. Post-fetch copies experts from there, and expert traces count them. Only the tensors of
 * the experts are needed. The model has no metadata: set n_active of llama_postfetch_params. It
 * cannot be reloaded or streamed, because it has no file: the path of each tensor is "tensors of
 * the program".
 *
 * The bytes must be readable and stay as they are until the model and its schedulers are freed.
 *
 * @param tensors Array of `n` structs, whose size is the struct_size of the first.
 * @return The model, or NULL on failure: for example, for two tensors of one name, or a number of
 * bytes that type and dimensions do not have. Free it with llama_sidecar_model_free.
 */
struct llama_model *llama_sidecar_model_from_tensors(const struct llama_sidecar_tensor_data *tensors,
                                                     size_t n);

/**
 * Frees the handle of a model. The model itself lives until its contexts, post-fetch schedulers and
 * expert streams are freed. Reports and expert traces do not use it.
 */
enum llama_sidecar_status llama_sidecar_model_free(struct llama_model *model);

/** Fills `info` with the tensor, file, and device counts of a model. */
enum llama_sidecar_status llama_sidecar_model_get_info(const struct llama_model *model,
                                                       struct llama_sidecar_model_info *info);

/**
 * Loads every tensor that is not loaded yet to its device.
 *
 * @param progress Can be NULL. If it returns false, the call frees what it loaded and fails with
 * LLAMA_SIDECAR_STATUS_CANCELLED.
 * @param user_data Passed to `progress`; not used after the call.
 * @param report Receives the result; can be NULL.
 */
enum llama_sidecar_status llama_sidecar_model_load_all(const struct llama_model *model,
                                                       llama_sidecar_progress progress,
                                                       void *user_data,
                                                       struct llama_sidecar_load_report *report);

/** Fills `params` with the defaults, which depend on the LLAMA_* environment variables. */
enum llama_sidecar_status llama_sidecar_default_params(struct llama_sidecar_params *params);

/**
 * Fills `params` with the defaults, which depend on the LLAMA_POSTFETCH_* environment variables.
 */
enum llama_sidecar_status llama_postfetch_default_params(struct llama_postfetch_params *params);

/**
 * Creates a scheduler for the routed experts of a model. Use one scheduler per concurrent
 * evaluation. The scheduler keeps the model alive.
 *
 * Without a CUDA driver, a device, or device memory, the scheduler answers that the CPU must
 * compute every expert; llama_postfetch_describe reports the reason.
 *
 * @param params NULL for the defaults of llama_postfetch_default_params.
 * @return The scheduler, or NULL for bad arguments. Free it with llama_postfetch_free.
 */
struct llama_postfetch *llama_postfetch_init(const struct llama_model *model,
                                             const struct llama_postfetch_params *params);

/**
 * Frees a scheduler. Waits for its copies and for the work of streams that use its experts. In a
 * forked child, which cannot use the device, it frees the handle alone.
 */
enum llama_sidecar_status llama_postfetch_free(struct llama_postfetch *postfetch);

/**
 * Copies the most used experts of a saved trace to the cache, as far as there are slots, and waits
 * for the copies. Call it before the first evaluation. The statistics count the experts as misses.
 *
 * @param trace Path of a JSON file of llama_expert_trace_write, or of LLAMA_EXPERT_TRACE_OUTPUT.
 * @param n_filled Number of experts that were copied; can be NULL.
 */
enum llama_sidecar_status llama_postfetch_fill_cache(const struct llama_postfetch *postfetch,
                                                     const char *trace,
                                                     uint64_t *n_filled);

/**
 * Starts to copy the down-projections of `n` experts of a layer to the device, in this order.
 * Returns without waiting. Call it once per layer as soon as the routed ids are known, with the
 * ids of all tokens, token after token. Ids can repeat. Experts in the cache are not copied. The
 * variables LLAMA_EXPERT_TRACE_* count the ids, unless the program has a trace of the model
 * (llama_expert_trace_new).
 *
 * An expert that does not fit into the scratchpad, or that the layer does not have, must be
 * computed on the CPU; llama_postfetch_acquire answers so.
 *
 * @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_down_exps.weight.
 */
enum llama_sidecar_status llama_postfetch_schedule(const struct llama_postfetch *postfetch,
                                                   uint32_t layer,
                                                   const int32_t *ids,
                                                   size_t n);

/** Reports the state of an expert. Never waits. */
enum llama_sidecar_status llama_postfetch_query(const struct llama_postfetch *postfetch,
                                                uint32_t layer,
                                                uint32_t expert,
                                                struct llama_postfetch_answer *answer);

/**
 * Decides whether the device or the CPU computes an expert. The device computes an expert whose
 * copy is on the device. For a copy in flight, the call waits if block_on_miss is true. In all
 * other cases, the CPU computes the expert.
 *
 * All use of device_data must end before the expert is released. llama_postfetch_acquire_on_stream
 * ensures this for a stream.
 */
enum llama_sidecar_status llama_postfetch_acquire(const struct llama_postfetch *postfetch,
                                                  uint32_t layer,
                                                  uint32_t expert,
                                                  struct llama_postfetch_answer *answer);

/**
 * Does the same as llama_postfetch_acquire, but the CUDA stream waits for the copy instead of the
 * caller. The caller waits for no copy: a queued copy is submitted at once, in its turn, however many
 * are in flight. While copies before it go through page-locked buffers, the CPU computes the expert
 * (LLAMA_POSTFETCH_REASON_MISSED). If block_on_miss is false, the CPU also computes each expert whose
 * copy is not complete. Work that is submitted to the stream after the call can use device_data. After the
 * expert is released, its memory is overwritten only when the work submitted to the stream before
 * the release is complete. Only one stream can acquire an expert.
 *
 * @param stream A CUstream or cudaStream_t of the same device; must exist until the expert is
 * released.
 */
enum llama_sidecar_status llama_postfetch_acquire_on_stream(const struct llama_postfetch *postfetch,
                                                            uint32_t layer,
                                                            uint32_t expert,
                                                            void *stream,
                                                            struct llama_postfetch_answer *answer);

/**
 * Returns a CUDA stream for the caller's kernels that does not synchronise with other streams.
 *
 * @return A CUstream, or NULL without a device. Owned by the scheduler; do not destroy it.
 */
void *llama_postfetch_compute_stream(const struct llama_postfetch *postfetch);

/**
 * Makes a CUDA stream of the caller wait for all work submitted to llama_postfetch_compute_stream
 * so far.
 *
 * @param stream A CUstream or cudaStream_t of the same device.
 */
enum llama_sidecar_status llama_postfetch_hand_back(const struct llama_postfetch *postfetch,
                                                    void *stream);

/**
 * Copies an expert from the device to `buffer`, for debugging. Fails with
 * LLAMA_SIDECAR_STATUS_NOT_FOUND if the expert is not on the device, `size` is not its size in bytes,
 * or another thread releases the expert meanwhile.
 */
enum llama_sidecar_status llama_postfetch_download(const struct llama_postfetch *postfetch,
                                                   uint32_t layer,
                                                   uint32_t expert,
                                                   void *buffer,
                                                   size_t size);

/**
 * Releases an expert. Its device memory becomes reusable; in the cache, its data stays until
 * another expert replaces it.
 */
enum llama_sidecar_status llama_postfetch_release(const struct llama_postfetch *postfetch,
                                                  uint32_t layer,
                                                  uint32_t expert);

/**
 * Releases all experts of a layer. Call it when the layer is computed; until then, the experts
 * occupy device memory.
 */
enum llama_sidecar_status llama_postfetch_release_layer(const struct llama_postfetch *postfetch,
                                                        uint32_t layer);

/**
 * Writes the number of the layer whose down-projections are in tensor `index` to `layer`. Fails
 * with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other tensor, because post-fetch copies only the
 * base weights of down-projections.
 */
enum llama_sidecar_status llama_postfetch_layer_of(const struct llama_postfetch *postfetch,
                                                   uint64_t index,
                                                   uint32_t *layer);

/**
 * Writes the number of the layer whose down-projections are at `data` to `layer`: the data of a
 * ggml_tensor, where a program has made its own for the bytes of the model, or where the model is
 * one of llama_sidecar_model_from_tensors. `data` is the first byte of the tensor as it was when
 * the scheduler was created. Takes no lock. Fails with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other
 * address, so a hook in the product of all experts can call it for every tensor.
 */
enum llama_sidecar_status llama_postfetch_layer_at(const struct llama_postfetch *postfetch,
                                                   const void *data,
                                                   uint32_t *layer);

/** Fills `stats` with the statistics of a scheduler. */
enum llama_sidecar_status llama_postfetch_get_stats(const struct llama_postfetch *postfetch,
                                                    struct llama_postfetch_stats *stats);

/**
 * Writes the configuration and the statistics of a scheduler to `buffer`, truncated to `size`
 * bytes including the NUL.
 *
 * @param json true for JSON, false for plain text.
 * @param buffer Can be NULL when `size` is 0.
 * @return Length of the whole text without the NUL, or 0 on failure.
 */
size_t llama_postfetch_describe(const struct llama_postfetch *postfetch,
                                bool json,
                                char *buffer,
                                size_t size);

/**
 * Reloads the tensors of the context's model whose files changed.
 *
 * Name and meaning are those of ik_llama.cpp, so programs that are written for it link without
 * changes. The call waits at most 60 seconds for running evaluations to end, then fails with
 * LLAMA_SIDECAR_STATUS_BUSY and keeps the tensors that were not switched. A thread must not call
 * it during its own evaluation.
 *
 * @return true if any tensor changed; false if none changed or on failure.
 * llama_sidecar_last_error has the message of a failure.
 */
bool llama_reload_changed_tensors(struct llama_context *context);

/**
 * Does the same as llama_reload_changed_tensors, and reports the outcome of each tensor.
 *
 * All changed tensors are switched together between evaluations; on failure, none is switched.
 * Files that cannot be used (unreadable, incomplete, of another model) are skipped and reported.
 * If a reload needs more memory than is free, or more than staging_bytes, it is done in several
 * consistent steps. If a later step fails, the report has the reason, and the next reload
 * continues from there.
 *
 * @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK. Free it with
 * llama_sidecar_report_free. It stays valid after the model is freed.
 */
enum llama_sidecar_status llama_sidecar_reload(const struct llama_context *context,
                                               struct llama_sidecar_report **report);

/**
 * Gives tensors the type and data of another GGUF file, for example in another quantisation. The
 * model's own files stay as they are.
 *
 * The file is any version of the same model, or any shard of one. All tensors are checked and
 * switched together between evaluations, as llama_sidecar_reload does; if one of them is missing
 * in the file, has another shape, or is damaged, none is switched. The data is copied, so the file
 * can be removed afterwards. These tensors no longer follow the model's own files, until
 * llama_sidecar_overlay_revert. Other tensors keep what they have; a reload is not included.
 *
 * @param path The file to take the tensors from.
 * @param names Names of the tensors; NULL for all tensors of the model.
 * @param n_names Number of names; 0 if names is NULL.
 * @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK; can be NULL. Free it
 * with llama_sidecar_report_free.
 */
enum llama_sidecar_status llama_sidecar_overlay_set(const struct llama_context *context,
                                                    const char *path,
                                                    const char *const *names,
                                                    uint64_t n_names,
                                                    struct llama_sidecar_report **report);

/**
 * Returns tensors with an overlay to the data of the model's own files. Tensors without one stay
 * as they are.
 *
 * All tensors are switched together between evaluations. A tensor gets the data of the version of
 * its file that is in use: its original data without a copy, or the data of a changed file that a
 * reload used meanwhile, which must still be there.
 *
 * @param names Names of the tensors; NULL for all tensors of the model.
 * @param n_names Number of names; 0 if names is NULL.
 * @param report Receives a report if the status is LLAMA_SIDECAR_STATUS_OK; can be NULL. Free it
 * with llama_sidecar_report_free.
 */
enum llama_sidecar_status llama_sidecar_overlay_revert(const struct llama_context *context,
                                                       const char *const *names,
                                                       uint64_t n_names,
                                                       struct llama_sidecar_report **report);

/** Frees a report. */
enum llama_sidecar_status llama_sidecar_report_free(struct llama_sidecar_report *report);

/** Fills `info` with the counts and durations of a reload. */
enum llama_sidecar_status llama_sidecar_report_get_info(const struct llama_sidecar_report *report,
                                                        struct llama_sidecar_report_info *info);

/**
 * Fills `info` with a tensor of a report.
 *
 * @param at Index of the entry, less than n_tensors of llama_sidecar_report_info.
 */
enum llama_sidecar_status llama_sidecar_report_get_tensor(const struct llama_sidecar_report *report,
                                                          uint64_t at,
                                                          struct llama_sidecar_report_tensor *info);

/**
 * Fills `info` with a file of a report.
 *
 * @param at Index of the entry, less than n_files of llama_sidecar_report_info.
 */
enum llama_sidecar_status llama_sidecar_report_get_file(const struct llama_sidecar_report *report,
                                                        uint64_t at,
                                                        struct llama_sidecar_report_file *info);

/**
 * Returns the version of the library, for example "0.1.0". LLAMA_SIDECAR_VERSION is the version of
 * the header.
 *
 * @return A static string.
 */
const char *llama_sidecar_version(void);

/**
 * Returns the message of the last failed call of this thread: what failed, why, and what to do.
 *
 * @return A string of the library, empty if no call has failed. Valid until the next failed call
 * of the same thread.
 */
const char *llama_sidecar_last_error(void);

/**
 * Returns the status of the last failed call of this thread. Use it after a call that returns NULL
 * or false on failure.
 */
enum llama_sidecar_status llama_sidecar_last_status(void);

/**
 * Returns the name of a status, for example "out of memory".
 *
 * @return A static string; "unknown status" for a number that is not a status.
 */
const char *llama_sidecar_status_name(uint32_t status);

/**
 * Fills `params` with the defaults, which depend on the LLAMA_EXPERT_STREAM* environment
 * variables. The value "off" of LLAMA_EXPERT_STREAM is the same as "auto" here, because a stream
 * exists only in a program that creates it.
 */
enum llama_sidecar_status llama_expert_stream_default_params(struct llama_expert_stream_params *params);

/**
 * Creates a stream for the routed experts of a model that is larger than memory, and starts its
 * threads. Any number of threads and contexts can use one stream. The stream keeps the model alive
 * and its files open. Reloads do not wait for the stream.
 *
 * The stream reads into the page cache, so the program must use the experts in place, through the
 * mapping of the files: host_data of llama_sidecar_tensor_get_info for a tensor that is not
 * loaded. Fails with LLAMA_SIDECAR_STATUS_DISABLED if no expert can be used in place, because
 * use_mmap is false, the files cannot be mapped, or all experts are loaded.
 *
 * @param params NULL for the defaults of llama_expert_stream_default_params.
 * @return The stream, or NULL on failure: for example, when the model has no routed experts. Free
 * it with llama_expert_stream_free.
 */
struct llama_expert_stream *llama_expert_stream_new(const struct llama_model *model,
                                                    const struct llama_expert_stream_params *params);

/** Frees a stream. Ends its threads; requests that have not begun are dropped. */
enum llama_sidecar_status llama_expert_stream_free(struct llama_expert_stream *stream);

/**
 * Starts to read the experts that a layer was routed to. Returns without waiting for the disk, and
 * allocates no memory. Call it for each layer of each evaluation as soon as the routed ids are
 * known. The ids are not used after the call.
 *
 * The ids are laid out as src[2] of GGML_OP_MUL_MAT_ID in ggml. Ids that are not experts of the
 * layer are ignored. A matrix that is loaded, or that a reload replaced, is left out, because the
 * program does not use it in place.
 *
 * @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_gate_exps.weight.
 * @param n_used Number of experts per token.
 * @param used_stride Bytes between the ids of a token: nb[0].
 * @param token_stride Bytes between the rows of two tokens: nb[1].
 */
enum llama_sidecar_status llama_expert_stream_schedule(const struct llama_expert_stream *stream,
                                                       uint32_t layer,
                                                       const int32_t *ids,
                                                       size_t n_used,
                                                       size_t n_tokens,
                                                       size_t used_stride,
                                                       size_t token_stride);

/**
 * Waits until all experts that were scheduled are in memory or on their way from the disk. An
 * evaluation does not need the call: it is for programs that measure or warm up. Another thread
 * that schedules without a pause can make the call wait longer.
 */
enum llama_sidecar_status llama_expert_stream_finish(const struct llama_expert_stream *stream);

/** Fills `stats` with the statistics of a stream. */
enum llama_sidecar_status llama_expert_stream_get_stats(const struct llama_expert_stream *stream,
                                                        struct llama_expert_stream_stats *stats);

/** Finds a tensor by name and writes its index to `index`. */
enum llama_sidecar_status llama_sidecar_tensor_find(const struct llama_model *model,
                                                    const char *name,
                                                    uint64_t *index);

/** Fills `info` with the type, shape, and location of a tensor. */
enum llama_sidecar_status llama_sidecar_tensor_get_info(const struct llama_model *model,
                                                        uint64_t index,
                                                        struct llama_sidecar_tensor_info *info);

/**
 * Fills `info` with a part of a tensor.
 *
 * @param part Index of the part, less than n_parts of llama_sidecar_tensor_info.
 */
enum llama_sidecar_status llama_sidecar_tensor_get_part(const struct llama_model *model,
                                                        uint64_t index,
                                                        uint32_t part,
                                                        struct llama_sidecar_tensor_part *info);

/**
 * Loads a tensor to its devices. Does nothing if the tensor is loaded. Concurrent calls for the
 * same tensor load it once.
 */
enum llama_sidecar_status llama_sidecar_tensor_load(const struct llama_model *model,
                                                    uint64_t index);

/**
 * Copies `size` bytes of a tensor, starting at `offset`, to `buffer`. Reads from the device if the
 * tensor is loaded, otherwise from the file. Does not load the tensor.
 */
enum llama_sidecar_status llama_sidecar_tensor_read(const struct llama_model *model,
                                                    uint64_t index,
                                                    uint64_t offset,
                                                    void *buffer,
                                                    size_t size);

/**
 * Creates usage counters for the routed experts of a model. The trace does not keep the model
 * alive.
 *
 * Any number of threads can record at the same time. Each thread has its own counters; only
 * threads that record batches of the same layer wait for each other, for its locality
 * (docs/expert-trace.md).
 *
 * The variables LLAMA_EXPERT_TRACE_STATS, _NAMES, _PER_LAYER, _TOP and _OUTPUT add what they state,
 * on standard error: the first trace of the process prints which of them are on, the thread that
 * records prints the names, and summary and file follow when the trace is freed, or at exit. The second
 * trace of the process writes to stats-2.json, and so on.
 *
 * As long as a model has no trace, the variables count what llama_postfetch_schedule is given, and
 * summary and file follow at exit. So each use is counted once.
 *
 * @return The trace, or NULL on failure: for example, when the model has no routed experts. Free
 * it with llama_expert_trace_free.
 */
struct llama_expert_trace *llama_expert_trace_new(const struct llama_model *model);

/** Frees a trace, after its summary and its file if the variables request them. */
enum llama_sidecar_status llama_expert_trace_free(struct llama_expert_trace *trace);

/**
 * Counts one use of an expert by one token. The use is not part of the locality, because the
 * other experts of the token are not known.
 *
 * @param layer Number of the layer in tensor names, such as 3 in blk.3.ffn_gate_exps.weight.
 */
enum llama_sidecar_status llama_expert_trace_record(const struct llama_expert_trace *trace,
                                                    uint32_t layer,
                                                    uint32_t expert);

/**
 * Counts a matrix of routed ids, laid out as src[2] of GGML_OP_MUL_MAT_ID in ggml, and adds its
 * tokens in order to the locality. Rows can be padded.
 *
 * Ids that are not experts of the layer are counted as rejected only.
 *
 * @param n_used Number of experts per token.
 * @param used_stride Bytes between the ids of a token: nb[0].
 * @param token_stride Bytes between the rows of two tokens: nb[1].
 */
enum llama_sidecar_status llama_expert_trace_record_batch(const struct llama_expert_trace *trace,
                                                          uint32_t layer,
                                                          const int32_t *ids,
                                                          size_t n_used,
                                                          size_t n_tokens,
                                                          size_t used_stride,
                                                          size_t token_stride);

/**
 * Copies the counts of a layer since the trace was created or reset. If the layer has more than
 * `n_counts` experts, the first `n_counts` are copied.
 *
 * @param counts Receives the number of uses of each expert; can be NULL when `n_counts` is 0.
 * @param tokens Receives the number of tokens that the layer routed; can be NULL.
 * @param n_experts Receives the number of experts of the layer; can be NULL.
 */
enum llama_sidecar_status llama_expert_trace_counts(const struct llama_expert_trace *trace,
                                                    uint32_t layer,
                                                    uint64_t *counts,
                                                    size_t n_counts,
                                                    uint64_t *tokens,
                                                    size_t *n_experts);

/** Resets all counters to 0. */
enum llama_sidecar_status llama_expert_trace_reset(const struct llama_expert_trace *trace);

/**
 * Writes the trace to a file: the counts as CSV (layer,expert,count,share) if the path ends in
 * ".csv", otherwise counts and locality as JSON (docs/expert-trace.md). The call writes a temporary file in the same folder
 * and renames it to the path. It fails if another file than an earlier trace is there.
 */
enum llama_sidecar_status llama_expert_trace_write(const struct llama_expert_trace *trace,
                                                   const char *path);

/**
 * Writes a plain-text summary to `buffer`, truncated to `size` bytes including the NUL. It lists the
 * experts that were used, the most used first: all, or as many as LLAMA_EXPERT_TRACE_TOP states.
 *
 * @param per_layer true to add a section per layer.
 * @param buffer Can be NULL when `size` is 0.
 * @return Length of the whole text without the NUL, or 0 on failure.
 */
size_t llama_expert_trace_summary(const struct llama_expert_trace *trace,
                                  bool per_layer,
                                  char *buffer,
                                  size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  /* __cplusplus */

#endif  /* LLAMA_SIDECAR_H */
