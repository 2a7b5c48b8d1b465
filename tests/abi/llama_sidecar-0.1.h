/*
 * llama-sidecar: change what a llama.cpp process holds and fetches, while it runs.
 *
 * Generated from src/ffi by 'cargo xtask header'; do not edit.
 *
 * Conventions
 *
 *  - Every call that can fail returns a status, NULL or false, and leaves a sentence in
 *    llama_sidecar_last_error() of the same thread.
 *  - Handles are opaque. NULL, a handle of another library or one that was freed gives
 *    LLAMA_SIDECAR_STATUS_BAD_HANDLE, never undefined behaviour. Freeing NULL does nothing.
 *  - Structs that the library fills start with struct_size: set it to sizeof the struct before the
 *    call. A program built against an older header keeps working; it gets the fields it knows.
 *  - All calls can be made from any thread, unless their text says otherwise.
 *  - Pointers are NULL where the text allows it, or valid for what the call does with them.
 *  - Strings are UTF-8 or the raw bytes of the file, NUL-terminated.
 *  - Sizes and offsets are bytes; times are microseconds.
 */


#ifndef LLAMA_SIDECAR_H
#define LLAMA_SIDECAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Result of a call. Values never change their meaning.
enum llama_sidecar_status {
    // Done.
    LLAMA_SIDECAR_STATUS_OK = 0,
    // An argument is NULL, out of range or of the wrong size.
    LLAMA_SIDECAR_STATUS_BAD_ARGUMENT = 1,
    // A handle is NULL, not one of this library, of another kind, or was freed.
    LLAMA_SIDECAR_STATUS_BAD_HANDLE = 2,
    // There is no such file, tensor, key or device.
    LLAMA_SIDECAR_STATUS_NOT_FOUND = 3,
    // The operating system refused: opening, reading, mapping.
    LLAMA_SIDECAR_STATUS_IO = 4,
    // A file is no valid GGUF file, or a shard that does not belong to its model.
    LLAMA_SIDECAR_STATUS_MALFORMED = 5,
    // A device has no room.
    LLAMA_SIDECAR_STATUS_OUT_OF_MEMORY = 6,
    // A device failed otherwise.
    LLAMA_SIDECAR_STATUS_DEVICE = 7,
    // A callback asked to stop.
    LLAMA_SIDECAR_STATUS_CANCELLED = 8,
    // The call cannot be made now, for example a reload during an evaluation of the same thread.
    LLAMA_SIDECAR_STATUS_BUSY = 9,
    // The file was written in place, so its bytes cannot be trusted.
    LLAMA_SIDECAR_STATUS_FILE_CHANGED = 10,
    // The feature is switched off for this model.
    LLAMA_SIDECAR_STATUS_DISABLED = 11,
    // A defect of this library. Nothing was changed; please report the message.
    LLAMA_SIDECAR_STATUS_INTERNAL = 12,
};

// What kind of memory a device is.
enum llama_sidecar_device_kind {
    // Memory of the process.
    LLAMA_SIDECAR_DEVICE_KIND_HOST = 0,
    // Memory of an NVIDIA GPU.
    LLAMA_SIDECAR_DEVICE_KIND_CUDA = 1,
};

// Where the copy of an expert is.
enum llama_postfetch_state {
    // There is none.
    LLAMA_POSTFETCH_STATE_CPU_ONLY = 0,
    // Queued or under way.
    LLAMA_POSTFETCH_STATE_COPY_IN_FLIGHT = 1,
    // On the device.
    LLAMA_POSTFETCH_STATE_GPU_READY = 2,
};

// Why an expert is to be computed on the CPU.
enum llama_postfetch_reason {
    // It is not: use the device.
    LLAMA_POSTFETCH_REASON_NONE = 0,
    // Fetching is switched off.
    LLAMA_POSTFETCH_REASON_DISABLED = 1,
    // "CPU" was asked for always.
    LLAMA_POSTFETCH_REASON_FORCED = 2,
    // No driver, no device, no memory there, or given up after errors.
    LLAMA_POSTFETCH_REASON_NO_DEVICE = 3,
    // No down-projection of the model: another layer, or an expert that it does not have.
    LLAMA_POSTFETCH_REASON_FOREIGN = 4,
    // Nobody scheduled it, or it was released.
    LLAMA_POSTFETCH_REASON_NOT_SCHEDULED = 5,
    // The scratchpad was full.
    LLAMA_POSTFETCH_REASON_NO_ROOM = 6,
    // Still under way, and it is not to be waited for.
    LLAMA_POSTFETCH_REASON_MISSED = 7,
    // Its bytes could not be read.
    LLAMA_POSTFETCH_REASON_READ_FAILED = 8,
    // The driver refused something, or the expert is used by another stream.
    LLAMA_POSTFETCH_REASON_DEVICE_FAILED = 9,
    // The copy did not end in time.
    LLAMA_POSTFETCH_REASON_TIMED_OUT = 10,
    // It is not in host memory: there is nothing to fetch.
    LLAMA_POSTFETCH_REASON_ELSEWHERE = 11,
};

// What happened to a tensor in a reload.
enum llama_sidecar_outcome {
    // Its file changed, its bytes did not.
    LLAMA_SIDECAR_OUTCOME_UNCHANGED = 0,
    // It has new bytes in a buffer of its own.
    LLAMA_SIDECAR_OUTCOME_SWAPPED = 1,
    // It is back on its original bytes.
    LLAMA_SIDECAR_OUTCOME_RETURNED = 2,
    // Its file was written in place: the bytes in use had changed already.
    LLAMA_SIDECAR_OUTCOME_IN_PLACE = 3,
    // It, or its whole file, was refused; it is as before.
    LLAMA_SIDECAR_OUTCOME_REFUSED = 4,
    // The same bytes in other places, because something that is laid out with it changed, or there
    // was no room on a device, or there is again.
    LLAMA_SIDECAR_OUTCOME_MOVED = 5,
};

// What became of a changed file.
enum llama_sidecar_file_event {
    // Its tensors are now the ones in use.
    LLAMA_SIDECAR_FILE_EVENT_TAKEN = 0,
    // It was left out; its tensors are as before.
    LLAMA_SIDECAR_FILE_EVENT_IGNORED = 1,
};

// What has happened to a tensor since the model was opened.
enum llama_sidecar_tensor_state {
    // As it was when the model was opened.
    LLAMA_SIDECAR_TENSOR_STATE_ON_ORIGINAL = 0,
    // In buffers of its own, with other bytes or laid out in another way.
    LLAMA_SIDECAR_TENSOR_STATE_DETACHED = 1,
    // In host memory, with its whole layer, because a device had no room.
    LLAMA_SIDECAR_TENSOR_STATE_FALLBACK_CPU = 2,
};

// Where a tensor is cut.
enum llama_sidecar_axis {
    // Inside rows: each part holds some elements of every row.
    LLAMA_SIDECAR_AXIS_COLUMNS = 0,
    // Between rows: each part holds some rows of every slice (of every expert, for merged ones).
    LLAMA_SIDECAR_AXIS_ROWS = 1,
    // Nowhere: the part is all of it.
    LLAMA_SIDECAR_AXIS_NONE = 2,
};

// Somebody who evaluates a model. Not the llama_context of llama.cpp: neither library accepts the
// other's.
struct llama_context;

// Counts of the experts of a model.
struct llama_expert_trace;

// An open model. Not the llama_model of llama.cpp: neither library accepts the other's.
struct llama_model;

// Fetches experts to a GPU.
struct llama_postfetch;

// What a reload did.
struct llama_sidecar_report;

// Told that a reload changed tensors, with the model's new generation: graphs that were built
// before no longer fit.
//
// Called on the thread that reloads, after the switch and before the next evaluation can begin. It
// must not begin an evaluation or reload.
typedef void (*llama_sidecar_stale)(uint64_t generation, void *user_data);

// A device and what we hold of it.
struct llama_sidecar_device_info {
    // sizeof(struct llama_sidecar_device_info), set by the caller.
    size_t struct_size;
    // Its name, cut to fit.
    char name[64];
    // What kind of memory it is.
    enum llama_sidecar_device_kind kind;
    // All its memory.
    uint64_t total;
    // What can still be allocated.
    uint64_t free;
    // What live buffers of this model hold.
    uint64_t used;
    // The most they ever held.
    uint64_t peak;
    // How many buffers were ever allocated.
    uint64_t allocations;
};

// Takes a message: its level (1 error, 2 warning, 3 information, 4 debugging) and its text without
// a newline. Called from any thread.
typedef void (*llama_sidecar_log_callback)(uint32_t level, const char *text, void *user_data);

// A metadata key and what kind of value it has.
struct llama_sidecar_metadata_info {
    // sizeof(struct llama_sidecar_metadata_info), set by the caller.
    size_t struct_size;
    // Its name. Valid until the model is freed.
    const char *key;
    // Elements of an array, else 1.
    uint64_t count;
    // Value of enum gguf_type; of the elements, for an array.
    uint32_t gguf_type;
    // Whether the value is an array.
    bool is_array;
};

// How to open a model. Fill it with llama_sidecar_default_params first.
struct llama_sidecar_params {
    // sizeof(struct llama_sidecar_params), set by the caller.
    size_t struct_size;
    // Whether llama_reload_changed_tensors can replace tensors. Default: LLAMA_HOTSWAP_ENABLED.
    bool hotswap;
    // Map files, so that tensors can be used in place. Where mapping is refused, files are read.
    // Default: true.
    bool use_mmap;
    // Keep routed experts in host memory, device 0. Default: LLAMA_SIDECAR_CPU_MOE.
    bool cpu_moe;
    // Devices 1, 2, ... are the CUDA devices of the machine; n_devices and device_bytes are not used
    // then. Default: false.
    bool use_cuda;
    // How many host devices the model has, 1 to 64; beside the first, which is the memory of the
    // process, they stand for GPUs. Default: 1.
    uint32_t n_devices;
    // The device of tensors that nothing else is said about. Default: 0.
    uint32_t device;
    // The most bytes each device but the first gives out at a time, 0 for all there are. Default: 0.
    uint64_t device_bytes;
    // The most bytes a reload stages before it switches, 0 for no limit. Reloads of more are done in
    // steps, each consistent. Default: LLAMA_SIDECAR_STAGING_MB.
    uint64_t staging_bytes;
    // Cut matrices over devices 1, 2, ... in these proportions, for example "3,1,1"; NULL or empty
    // for no cutting. Default: LLAMA_SIDECAR_SPLIT.
    const char *split;
    // Tensors whose name matches a regular expression go to a device, whole; the first match counts.
    // For example "ffn_.*_exps=0;attn=2"; NULL or empty for none. Default:
    // LLAMA_SIDECAR_OVERRIDE_TENSOR.
    const char *override_tensor;
};

// What a model is.
struct llama_sidecar_model_info {
    // sizeof(struct llama_sidecar_model_info), set by the caller.
    size_t struct_size;
    // How many tensors it has; their indices count from 0.
    uint64_t n_tensors;
    // How many files it comes in.
    uint64_t n_files;
    // How many metadata keys its first file has.
    uint64_t n_metadata;
    // How many devices it can use.
    uint64_t n_devices;
    // Size of all files.
    uint64_t file_bytes;
    // How many reloads changed something.
    uint64_t generation;
    // How many evaluations had to wait for a reload before they began.
    uint64_t n_pauses;
    // The longest of those waits.
    uint64_t longest_pause_us;
    // GGUF version of its first file.
    uint32_t gguf_version;
};

// Told how far loading is: bytes that are in place, bytes in all. Called on the thread that called
// llama_sidecar_model_load_all. Returning false stops it.
typedef bool (*llama_sidecar_progress)(uint64_t done, uint64_t total, void *user_data);

// What llama_sidecar_model_load_all did.
struct llama_sidecar_load_report {
    // sizeof(struct llama_sidecar_load_report), set by the caller.
    size_t struct_size;
    // Tensors that were not loaded before.
    uint64_t n_tensors;
    // Their bytes.
    uint64_t bytes;
    // Device allocations, at most 9 for any model.
    uint64_t allocations;
    // How long it took.
    uint64_t time_us;
};

// How to fetch. Fill it with llama_postfetch_default_params first.
struct llama_postfetch_params {
    // sizeof(struct llama_postfetch_params), set by the caller.
    size_t struct_size;
    // Fetch at all. Default: LLAMA_POSTFETCH_ENABLE, or true.
    bool enable;
    // Answer "CPU" always. Default: LLAMA_POSTFETCH_FORCE_CPU.
    bool force_cpu;
    // Wait for a copy that is under way. Default: LLAMA_POSTFETCH_BLOCK_ON_MISS, or true.
    bool block_on_miss;
    // Copies and kernels in streams of their own. Default: LLAMA_POSTFETCH_USE_DEDICATED_STREAMS, or
    // true.
    bool dedicated_streams;
    // Page-lock the model where it is. Default: LLAMA_POSTFETCH_PAGE_LOCK, or true.
    bool page_lock;
    // Log every transfer. Default: LLAMA_POSTFETCH_DEBUG.
    bool debug;
    // The CUDA device, as CUDA_VISIBLE_DEVICES counts them. Default: 0.
    uint32_t device;
    // Copies under way at a time, 1 to 1024. Default: LLAMA_POSTFETCH_MAX_TRANSFERS, or 8.
    uint32_t max_transfers;
    // Of a layer's experts, how many have gate and up computed on the CPU. Default:
    // LLAMA_POSTFETCH_CPU_LIMIT, or the physical cores.
    uint32_t cpu_limit;
    // Experts that a token uses; 0 for what the model's file says. Default: 0.
    uint32_t n_active;
    // Device memory for experts; 0 for what the active experts of the largest layer need. Default:
    // LLAMA_POSTFETCH_SCRATCHPAD_MB.
    uint64_t scratchpad_bytes;
    // How long the fetching thread looks out for work before it sleeps: a thread that sleeps is woken
    // by the call of schedule, which takes that some microseconds. Default: LLAMA_POSTFETCH_SPIN_US.
    uint64_t spin_us;
    // How long a copy may take before the device is given up. Default: 5,000,000.
    uint64_t patience_us;
};

// What to do about an expert.
struct llama_postfetch_answer {
    // sizeof(struct llama_postfetch_answer), set by the caller.
    size_t struct_size;
    // Address of its down-projection on the device (a CUdeviceptr, 256-byte aligned); 0 when the CPU
    // is to compute it. Valid until the expert is released.
    uint64_t device_data;
    // The same bytes in the memory of the process, or NULL where they cannot be read without a copy.
    // Valid as long as device_data; for an expert that is not scheduled, until a reload.
    const void *host_data;
    // Bytes of the matrix; 0 when it is no down-projection of the model, and the next ones too.
    uint64_t nbytes;
    // Bytes of a row.
    uint64_t row_bytes;
    // Elements of a row, and rows.
    uint64_t ne[2];
    // How often the tensor was replaced since the model was opened.
    uint64_t generation;
    // Value of enum ggml_type.
    uint32_t ggml_type;
    // Where its copy is.
    enum llama_postfetch_state state;
    // Why the CPU is to compute it.
    enum llama_postfetch_reason reason;
    // Whether gate and up of this expert are for the CPU, by cpu_limit.
    bool gate_up_on_cpu;
};

// What a scheduler did since it was made.
struct llama_postfetch_stats {
    // sizeof(struct llama_postfetch_stats), set by the caller.
    size_t struct_size;
    // Calls of llama_postfetch_schedule.
    uint64_t n_calls;
    // Experts that were put into copies.
    uint64_t n_experts;
    // Those of them that were copied together with a neighbour before them.
    uint64_t n_coalesced;
    // Ids that were scheduled already.
    uint64_t n_duplicates;
    // Ids that are no experts of their layer.
    uint64_t n_rejected;
    // Copies that were issued.
    uint64_t n_copies;
    // Those of them that went through page-locked buffers.
    uint64_t n_staged_copies;
    // Their bytes.
    uint64_t bytes;
    // Answers "use the device".
    uint64_t n_hits;
    // Those of them for which a stream waits, and not the caller.
    uint64_t n_stream_hits;
    // Answers for which the caller waited.
    uint64_t n_waits;
    // How long it waited.
    uint64_t wait_us;
    // How long copies took on the device.
    uint64_t transfer_us;
    // Errors of the driver.
    uint64_t n_errors;
    // Answers "compute on the CPU", by enum llama_postfetch_reason.
    uint64_t n_fallbacks[16];
    // Device memory for experts.
    uint64_t scratchpad_bytes;
    // The most of it that was in use.
    uint64_t scratchpad_peak;
    // Memory of the model that is page-locked in place.
    uint64_t locked_bytes;
    // 1 - wait / transfer; negative before a copy was timed.
    double overlap;
};

// What a reload did, in numbers.
struct llama_sidecar_report_info {
    // sizeof(struct llama_sidecar_report_info), set by the caller.
    size_t struct_size;
    // Files that were looked at, one stat each.
    uint64_t n_files_checked;
    // Files that are not as they were; ask for each with llama_sidecar_report_get_file.
    uint64_t n_files;
    // Tensors of those files; ask for each with llama_sidecar_report_get_tensor.
    uint64_t n_tensors;
    // Tensors with new bytes in a buffer of their own.
    uint64_t n_swapped;
    // Tensors that are back on their original bytes.
    uint64_t n_returned;
    // Tensors whose file changed and whose bytes did not.
    uint64_t n_unchanged;
    // Tensors whose file was written in place: they had changed already.
    uint64_t n_in_place;
    // Tensors that were refused.
    uint64_t n_refused;
    // Tensors whose bytes are the same in other places.
    uint64_t n_moved;
    // Bytes read into new buffers.
    uint64_t bytes_staged;
    // The model's generation after the reload; 0 when it changed nothing.
    uint64_t generation;
    // How often evaluations were kept out: 1 when something changed, more when it was done in steps.
    uint64_t n_commits;
    // Why a reload that was done in steps stopped after some of them; empty otherwise. Valid until
    // the report is freed.
    const char *failure;
    // Looking at files and parsing changed headers.
    uint64_t detect_us;
    // Reading and hashing tensors.
    uint64_t compare_us;
    // Allocating and filling new buffers.
    uint64_t stage_us;
    // Waiting for running evaluations to end.
    uint64_t wait_us;
    // The switch, during which no evaluation could run, in nanoseconds.
    uint64_t switch_ns;
    // Everything.
    uint64_t total_us;
};

// One tensor of a changed file.
struct llama_sidecar_report_tensor {
    // sizeof(struct llama_sidecar_report_tensor), set by the caller.
    size_t struct_size;
    // Its index in the model.
    uint64_t index;
    // Its name. Valid until the report is freed, as the other strings.
    const char *name;
    // Name of its type before. Static.
    const char *old_type;
    // Name of its type now. Static.
    const char *new_type;
    // Why it was refused; empty otherwise.
    const char *reason;
    // Which devices hold which rows of it now, in words; empty when it did not change or is on no
    // device.
    const char *placement;
    // Bytes in the file; 0 for a tensor that was refused or only moved.
    uint64_t nbytes;
    // What happened to it.
    enum llama_sidecar_outcome outcome;
};

// One file that is not as it was at the last reload.
struct llama_sidecar_report_file {
    // sizeof(struct llama_sidecar_report_file), set by the caller.
    size_t struct_size;
    // Its path. Valid until the report is freed, as the other string.
    const char *path;
    // Why it was ignored; empty otherwise.
    const char *reason;
    // What became of it.
    enum llama_sidecar_file_event event;
};

// A tensor, at the moment of the call.
struct llama_sidecar_tensor_info {
    // sizeof(struct llama_sidecar_tensor_info), set by the caller.
    size_t struct_size;
    // Its index.
    uint64_t index;
    // Its name. Valid until the model is freed.
    const char *name;
    // Name of its type, for example "q4_K". Static.
    const char *type_name;
    // Path of its file. Valid until the model is freed.
    const char *path;
    // Its bytes where the process can read them without a copy: in its host buffer if it is loaded
    // in one part, in the mapping of its file if it is not loaded; else NULL. Valid until a reload replaces the tensor (hold an evaluation
    // to keep reloads away) or the model is freed. Read only. In the mapping, it also shows what
    // others write into the file: replace files by rename.
    const void *host_data;
    // Its address on its device once it is loaded in one part; else 0. Valid as long as host_data.
    uint64_t device_data;
    // Elements per dimension, innermost first.
    uint64_t ne[4];
    // Strides as ggml computes them: nb[0] one block, nb[1] one row.
    uint64_t nb[4];
    // Bytes of data.
    uint64_t nbytes;
    // Where its bytes start in its file, or UINT64_MAX once a reload replaced them.
    uint64_t file_offset;
    // How often it changed since the model was opened.
    uint64_t generation;
    // Value of enum ggml_type.
    uint32_t ggml_type;
    // Elements in a block of its type; a row is a whole number of blocks.
    uint32_t block_elements;
    // The device it is loaded to; -1 when it is not loaded, -2 when it is in parts.
    int32_t device;
    // How many parts it is in: 0 when it is not loaded. Ask for each with
    // llama_sidecar_tensor_get_part.
    uint32_t n_parts;
    // What has happened to it.
    enum llama_sidecar_tensor_state state;
};

// A part of a loaded tensor: its bytes one after the other on a device.
struct llama_sidecar_tensor_part {
    // sizeof(struct llama_sidecar_tensor_part), set by the caller.
    size_t struct_size;
    // Its address on the device. Valid as long as host_data of the tensor.
    uint64_t device_data;
    // Bytes of the part.
    uint64_t nbytes;
    // First row, or first element of each row, that it holds.
    uint64_t first;
    // How many of them it holds.
    uint64_t count;
    // Index of the device.
    uint32_t device;
    // Where the tensor is cut.
    enum llama_sidecar_axis axis;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Attaches a context to a model. Use one for each thread that evaluates. Returns NULL on failure.
// Free the result with llama_sidecar_context_free; until then it keeps the model alive.
struct llama_context *llama_sidecar_context_new(const struct llama_model *model);

// Frees a context; an evaluation that it began ends.
enum llama_sidecar_status llama_sidecar_context_free(struct llama_context *context);

// Begins an evaluation: until it ends, no tensor of the model changes. Waits for a switch that is
// under way.
//
// `generation` can be NULL; it gets the model's generation. When it differs from that of the last
// evaluation, graphs must be built again.
enum llama_sidecar_status llama_sidecar_eval_begin(const struct llama_context *context,
                                                   uint64_t *generation);

// Ends the evaluation of a context.
enum llama_sidecar_status llama_sidecar_eval_end(const struct llama_context *context);

// Sets what is called when graphs have become stale; NULL for nothing.
enum llama_sidecar_status llama_sidecar_on_stale(const struct llama_context *context,
                                                 llama_sidecar_stale callback,
                                                 void *user_data);

// Tells about device `device` of a model.
enum llama_sidecar_status llama_sidecar_device_get_info(const struct llama_model *model,
                                                        uint32_t device,
                                                        struct llama_sidecar_device_info *info);

// Sends messages to `callback` instead of standard error; NULL for standard error again. Which
// levels there are messages of is set by LLAMA_SIDECAR_LOG.
enum llama_sidecar_status llama_sidecar_log_set(llama_sidecar_log_callback callback,
                                                void *user_data);

// Puts the index of a key, for example "general.architecture", into `index`.
enum llama_sidecar_status llama_sidecar_metadata_find(const struct llama_model *model,
                                                      const char *key,
                                                      uint64_t *index);

// Tells about the key with an index.
enum llama_sidecar_status llama_sidecar_metadata_get_info(const struct llama_model *model,
                                                          uint64_t index,
                                                          struct llama_sidecar_metadata_info *info);

// Writes a value as text to `buffer`, NUL-terminated and cut to fit: numbers in decimal, truth
// values as "true" and "false", strings as they are. `element` picks one of an array and is 0
// otherwise.
//
// `length` can be NULL; it gets the length of the whole text without its NUL. With `size` 0,
// `buffer` can be NULL, too.
//
// The array of strings that was last asked for is kept in memory until another one is, or the model
// is freed: a vocabulary can be walked element by element.
enum llama_sidecar_status llama_sidecar_metadata_text(const struct llama_model *model,
                                                      uint64_t index,
                                                      uint64_t element,
                                                      char *buffer,
                                                      size_t size,
                                                      size_t *length);

// Opens the model that a GGUF file, or any shard of one, belongs to.
//
// Reads headers only; tensors stay where they are until they are asked for.
//
// `params` can be NULL for the defaults. Returns NULL on failure. Free the result with
// llama_sidecar_model_free.
struct llama_model *llama_model_load(const char *path, const struct llama_sidecar_params *params);

// Lets go of a model. Contexts keep it alive until they are freed, too; reports do not need it.
enum llama_sidecar_status llama_sidecar_model_free(struct llama_model *model);

// Tells what a model is.
enum llama_sidecar_status llama_sidecar_model_get_info(const struct llama_model *model,
                                                       struct llama_sidecar_model_info *info);

// Loads every tensor that is not loaded yet to the model's device, in at most 9 allocations.
//
// `progress` can be NULL; when it stops the call, everything that the call had loaded is dropped
// again. It must not reload this model. `report` can be NULL.
enum llama_sidecar_status llama_sidecar_model_load_all(const struct llama_model *model,
                                                       llama_sidecar_progress progress,
                                                       void *user_data,
                                                       struct llama_sidecar_load_report *report);

// Fills `params` with the defaults, which follow from the LLAMA_* variables. Set struct_size before.
enum llama_sidecar_status llama_sidecar_default_params(struct llama_sidecar_params *params);

// Fills `params` with the defaults, which follow from the LLAMA_POSTFETCH_* variables. Set
// struct_size before.
enum llama_sidecar_status llama_postfetch_default_params(struct llama_postfetch_params *params);

// Makes a scheduler for the routed experts of a model. Use one for each evaluation that runs at the
// same time. `params` can be NULL for the defaults.
//
// Without a CUDA driver or device, or without memory there, it works too: all its answers are then
// "compute on the CPU", and llama_postfetch_describe tells why. NULL for bad arguments only. Free the
// result with llama_postfetch_free; until then it keeps the model alive.
struct llama_postfetch *llama_postfetch_init(const struct llama_model *model,
                                             const struct llama_postfetch_params *params);

// Ends a scheduler. Waits for its copies, and for the work of streams that use experts.
enum llama_sidecar_status llama_postfetch_free(struct llama_postfetch *postfetch);

// Starts to copy the down-projections of `n` experts of a layer to the device, in this order, and
// returns at once. To be called once a layer, as soon as routing is known. Ids can repeat; of several
// tokens, give all. `layer` is the number in the tensors' names.
//
// Experts for which there is no room, or that the layer does not have, are answered with "CPU" later.
enum llama_sidecar_status llama_postfetch_schedule(const struct llama_postfetch *postfetch,
                                                   uint32_t layer,
                                                   const int32_t *ids,
                                                   size_t n);

// Tells where an expert is. Never waits.
enum llama_sidecar_status llama_postfetch_query(const struct llama_postfetch *postfetch,
                                                uint32_t layer,
                                                uint32_t expert,
                                                struct llama_postfetch_answer *answer);

// Tells whether to use the device or the CPU for an expert, by the policy: a copy that is on the
// device is used, one that is under way is waited for (or not, see block_on_miss), and otherwise the
// CPU computes it. Whatever uses device_data must have ended before the expert is released;
// llama_postfetch_acquire_on_stream sees to that for a stream.
enum llama_sidecar_status llama_postfetch_acquire(const struct llama_postfetch *postfetch,
                                                  uint32_t layer,
                                                  uint32_t expert,
                                                  struct llama_postfetch_answer *answer);

// llama_postfetch_acquire for kernels: the CUDA stream waits for the bytes, the caller does not.
// What is put into the stream afterwards can use device_data. When the expert is released, its memory
// is overwritten only after the work that was in the stream by then. An expert is for one stream.
enum llama_sidecar_status llama_postfetch_acquire_on_stream(const struct llama_postfetch *postfetch,
                                                            uint32_t layer,
                                                            uint32_t expert,
                                                            void *stream,
                                                            struct llama_postfetch_answer *answer);

// A CUDA stream for the host's kernels that waits for no other (a CUstream); NULL without a device.
// It belongs to the scheduler.
void *llama_postfetch_compute_stream(const struct llama_postfetch *postfetch);

// Makes a CUDA stream of the host wait for all work that is in llama_postfetch_compute_stream now.
enum llama_sidecar_status llama_postfetch_hand_back(const struct llama_postfetch *postfetch,
                                                    void *stream);

// Copies an expert that is on the device back, to look at it. Fails with
// LLAMA_SIDECAR_STATUS_NOT_FOUND when it is not there, or `size` is not its size.
enum llama_sidecar_status llama_postfetch_download(const struct llama_postfetch *postfetch,
                                                   uint32_t layer,
                                                   uint32_t expert,
                                                   void *buffer,
                                                   size_t size);

// Lets go of an expert.
enum llama_sidecar_status llama_postfetch_release(const struct llama_postfetch *postfetch,
                                                  uint32_t layer,
                                                  uint32_t expert);

// Lets go of all experts of a layer, to be called when the layer is computed: until then their device
// memory is taken.
enum llama_sidecar_status llama_postfetch_release_layer(const struct llama_postfetch *postfetch,
                                                        uint32_t layer);

// Puts the layer whose down-projections tensor `index` of the model holds into `layer`. Only base
// weights can be fetched: fails with LLAMA_SIDECAR_STATUS_NOT_FOUND for any other tensor.
enum llama_sidecar_status llama_postfetch_layer_of(const struct llama_postfetch *postfetch,
                                                   uint64_t index,
                                                   uint32_t *layer);

// Tells what a scheduler did.
enum llama_sidecar_status llama_postfetch_get_stats(const struct llama_postfetch *postfetch,
                                                    struct llama_postfetch_stats *stats);

// Writes what a scheduler works with and what it did into `buffer`, as JSON or for people, cut to
// `size` bytes with the NUL, and returns how long the whole text is; 0 on failure. `buffer` can be
// NULL when `size` is 0.
size_t llama_postfetch_describe(const struct llama_postfetch *postfetch,
                                bool json,
                                char *buffer,
                                size_t size);

// Brings all tensors of the context's model up to date with their files, and says whether any
// changed. False also when it failed: llama_sidecar_last_error then says why.
//
// Same name and meaning as in ik_llama.cpp, whose programs link against this library unchanged.
// Waits until running evaluations end; a thread must not call it during its own.
bool llama_reload_changed_tensors(struct llama_context *context);

// Like llama_reload_changed_tensors, and tells what happened to each tensor.
//
// Everything that changed is switched together, between evaluations; on failure nothing is. Files
// that cannot be taken (unreadable, incomplete, of another model) are left out and reported. Only
// when there is less memory, or staging_bytes, than a reload needs is it done in several steps, each
// consistent; when a later one fails, the report says so and the next reload goes on from there.
//
// `report` gets a report to be freed with llama_sidecar_report_free; it is independent of the
// model. With a status other than OK there is none.
enum llama_sidecar_status llama_sidecar_reload(const struct llama_context *context,
                                               struct llama_sidecar_report **report);

// Frees a report.
enum llama_sidecar_status llama_sidecar_report_free(struct llama_sidecar_report *report);

// Tells what a reload did, in numbers.
enum llama_sidecar_status llama_sidecar_report_get_info(const struct llama_sidecar_report *report,
                                                        struct llama_sidecar_report_info *info);

// Tells about entry `at` of a report, of n_tensors.
enum llama_sidecar_status llama_sidecar_report_get_tensor(const struct llama_sidecar_report *report,
                                                          uint64_t at,
                                                          struct llama_sidecar_report_tensor *info);

// Tells about entry `at` of a report, of n_files.
enum llama_sidecar_status llama_sidecar_report_get_file(const struct llama_sidecar_report *report,
                                                        uint64_t at,
                                                        struct llama_sidecar_report_file *info);

// Version of the library, for example "0.1.0".
const char *llama_sidecar_version(void);

// What went wrong in the last call of this thread that failed: what was expected, what was found,
// where, and what to do. The empty string when none failed yet. Valid until the next failing call
// of the same thread.
const char *llama_sidecar_last_error(void);

// The status of the last call of this thread that failed; tells why a call returned NULL or false.
enum llama_sidecar_status llama_sidecar_last_status(void);

// Name of a status, for example "out of memory"; "unknown status" for other numbers.
const char *llama_sidecar_status_name(uint32_t status);

// Puts the index of the tensor with this name into `index`.
enum llama_sidecar_status llama_sidecar_tensor_find(const struct llama_model *model,
                                                    const char *name,
                                                    uint64_t *index);

// Tells what a tensor is now.
enum llama_sidecar_status llama_sidecar_tensor_get_info(const struct llama_model *model,
                                                        uint64_t index,
                                                        struct llama_sidecar_tensor_info *info);

// Tells about part `part` of a tensor, of n_parts.
enum llama_sidecar_status llama_sidecar_tensor_get_part(const struct llama_model *model,
                                                        uint64_t index,
                                                        uint32_t part,
                                                        struct llama_sidecar_tensor_part *info);

// Loads a tensor to the devices where it belongs, unless it is there already. Threads that ask for the same
// one at the same time get the same buffer.
enum llama_sidecar_status llama_sidecar_tensor_load(const struct llama_model *model,
                                                    uint64_t index);

// Copies `size` bytes of a tensor, from `offset` on, to `buffer`: from its device if it is loaded,
// else from its file. Does not load it.
enum llama_sidecar_status llama_sidecar_tensor_read(const struct llama_model *model,
                                                    uint64_t index,
                                                    uint64_t offset,
                                                    void *buffer,
                                                    size_t size);

// Begins to count which experts of a model are used. Returns NULL on failure, for example when the
// model has no routed experts. Free the result with llama_expert_trace_free; it does not keep the
// model alive.
//
// Any number of threads may record at the same time: each has counters of its own.
struct llama_expert_trace *llama_expert_trace_new(const struct llama_model *model);

// Frees a trace.
enum llama_sidecar_status llama_expert_trace_free(struct llama_expert_trace *trace);

// Counts one token that used one expert. `layer` is the number in the tensors' names.
enum llama_sidecar_status llama_expert_trace_record(const struct llama_expert_trace *trace,
                                                    uint32_t layer,
                                                    uint32_t expert);

// Counts a matrix of routed ids: for each of `n_tokens` tokens `n_used` experts, as ggml lays out
// src[2] of GGML_OP_MUL_MAT_ID. `used_stride` is its nb[0] and `token_stride` its nb[1], in bytes;
// rows may be padded.
//
// Ids that are no experts of the layer are counted as rejected and otherwise left out.
enum llama_sidecar_status llama_expert_trace_record_batch(const struct llama_expert_trace *trace,
                                                          uint32_t layer,
                                                          const int32_t *ids,
                                                          size_t n_used,
                                                          size_t n_tokens,
                                                          size_t used_stride,
                                                          size_t token_stride);

// Copies the counts of a layer: how often each expert was used since the trace began or was reset,
// and how many tokens the layer routed. Of more than `n_counts` experts, the first are copied.
//
// `counts` can be NULL when `n_counts` is 0; `tokens` and `n_experts` can be NULL.
enum llama_sidecar_status llama_expert_trace_counts(const struct llama_expert_trace *trace,
                                                    uint32_t layer,
                                                    uint64_t *counts,
                                                    size_t n_counts,
                                                    uint64_t *tokens,
                                                    size_t *n_experts);

// Forgets what was counted so far.
enum llama_sidecar_status llama_expert_trace_reset(const struct llama_expert_trace *trace);

// Writes what was counted: CSV to a path that ends in ".csv" (layer,expert,count,share), JSON to any
// other (docs/expert-trace.md). The file is written beside the path and renamed.
enum llama_sidecar_status llama_expert_trace_write(const struct llama_expert_trace *trace,
                                                   const char *path);

// Writes a summary for people into `buffer`, cut to `size` bytes with the NUL, and returns how long
// the whole text is; 0 on failure. `buffer` can be NULL when `size` is 0.
size_t llama_expert_trace_summary(const struct llama_expert_trace *trace,
                                  bool per_layer,
                                  char *buffer,
                                  size_t size);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* LLAMA_SIDECAR_H */
