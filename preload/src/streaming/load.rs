//! How the program loads a model whose experts are streamed.
//!
//! Streaming reads an expert when it is routed to. Three things that llama.cpp does at the
//! start would read all of them:
//!
//! | at the start | here |
//! |---|---|
//! | `mmap` with `MAP_POPULATE` reads the file | the flag is removed, for files with routed experts |
//! | the warm-up routes to all experts | the warm-up routes like any evaluation |
//! | special buffer types of the CPU take copies in another order | routed experts stay in the mapping |
//!
//! Every token uses the weights of the other tensors: a thread reads those ahead. A model that does not fit only
//! because memory is kept for the program is read as ever: the page cache has it until that memory is needed.
//!
//! Other advice that llama.cpp gives is left alone: `MADV_WILLNEED` for the whole mapping reads
//! one read-ahead window at most, and `POSIX_FADV_SEQUENTIAL` doubles the window.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

use parking_lot::Mutex;
use sidecar_core::config::{Config, ExpertStream};
use sidecar_core::experts::{ExpertIndex, ExpertName};
use sidecar_core::gguf::GgufFile;
use sidecar_core::memory::{free_memory, usable};
use sidecar_core::stream::{Other, Span, WINDOW, read_ahead};
use sidecar_core::text;

use crate::ggml::{Buffer, BufferType, DEVICE_CPU, Device, Ggml, Tensor, USAGE_WEIGHTS};
use crate::loader::caller::Caller;
use crate::loader::loaded;
use crate::loader::redirect::Redirection;
use crate::process::maps::{self, Maps};
use crate::process::thread;
use crate::program::loads;
use crate::program::models::Model;

fn streams() -> bool {
    Config::get().expert_stream.streams()
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// Files that were loaded for streaming because their model does not fit into the free memory.
static NEEDED: Mutex<Vec<FileId>> = Mutex::new(Vec::new());
/// Whether there are any: an evaluation takes no lock.
static ANY_NEEDED: AtomicBool = AtomicBool::new(false);

fn id(file: &GgufFile) -> FileId {
    (file.source.id().dev, file.source.id().ino)
}

/// Whether only models are streamed that do not fit into the free memory.
fn only_needed() -> bool {
    Config::get().expert_stream == ExpertStream::Needed
}

/// Whether a model with these files is streamed: each is, unless only those are to be streamed
/// that do not fit into memory.
fn is_needed(files: &[GgufFile]) -> bool {
    if !only_needed() {
        return true;
    }
    free_memory().is_some_and(|(free, _)| bytes_of(files) > usable(free))
}

/// Whether a model with these files is read as a whole, although it is streamed.
fn is_read(files: &[GgufFile]) -> bool {
    only_needed()
        && Config::get().expert_stream_memory.is_none()
        && free_memory().is_some_and(|(free, _)| bytes_of(files) <= free)
}

/// Returns the bytes of all tensors.
fn bytes_of(files: &[GgufFile]) -> u64 {
    let tensors = files.iter().flat_map(|file| &file.header.tensors);
    tensors.fold(0, |sum, tensor| sum.saturating_add(tensor.nbytes))
}

/// Whether a model was loaded to be streamed.
pub fn is_for_streaming(model: &Model) -> bool {
    let needed = NEEDED.lock();
    let mut files = model.files.iter();
    !only_needed() || files.any(|file| needed.contains(&id(&file.gguf)))
}

/// Whether any model was loaded to be streamed, or will be.
pub fn has_any() -> bool {
    !only_needed() || ANY_NEEDED.load(Ordering::Relaxed)
}

/// Where the routed experts of a model are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertMemory {
    /// At least some are in the mapping of their file, and the kernel may drop their pages.
    Mapped,
    /// They are in the mapping of their file, and locked in memory.
    Locked,
    /// They are in buffers: the program read them, or a device has them.
    Copied,
    /// `/proc/self/maps` cannot be read.
    Unknown,
}

impl ExpertMemory {
    /// Returns why experts there are not streamed, and the next step.
    pub fn obstacle(self) -> Option<&'static str> {
        match self {
            ExpertMemory::Mapped => None,
            ExpertMemory::Locked => Some(
                "its experts are locked in memory, so nothing is left to stream: start the program without mlock",
            ),
            ExpertMemory::Copied => Some(
                "its experts are not in the mapping of the file, so nothing is left to stream: start the program with mmap, and keep experts on the CPU",
            ),
            ExpertMemory::Unknown => Some(
                "whether its experts are in the mapping of the file is not known without /proc/self/maps, so nothing of it is streamed: mount /proc",
            ),
        }
    }
}

/// Returns where the routed experts of a model are; `None` for a model without experts.
/// Reads files in `/proc`.
pub fn expert_memory(model: &Model) -> Option<ExpertMemory> {
    let tensors = model.tensors.iter().map(|tensor| &tensor.instances[0]);
    let mut experts = tensors.filter(|tensor| tensor.has_experts).peekable();
    experts.peek()?;
    Some(match experts.find(|tensor| tensor.mapped) {
        None if Maps::read().is_empty() => ExpertMemory::Unknown,
        None => ExpertMemory::Copied,
        Some(tensor) => match maps::is_locked(tensor.original.data as usize) {
            true => ExpertMemory::Locked,
            false => ExpertMemory::Mapped,
        },
    })
}

fn is_expert(name: &CStr) -> bool {
    let name = name.to_str().ok();
    name.and_then(ExpertName::parse).is_some()
}

/// Logs what loading a model with mapped experts did, and reads what it left out besides
/// experts.
pub fn finish(model: &Arc<Model>, others: &[Other]) {
    let path = text::path(model.files[0].gguf.source.path());
    let unread = UNREAD.swap(0, Ordering::Relaxed) >> 20;
    log::info!("{path}: {unread} MiB were mapped without reading them");
    if !model.kept_out.is_empty() {
        log::info!(
            "{path}: {} expert tensors stay in the mapping; the program's kernels for repacked tensors are not used for them",
            model.kept_out.len()
        );
    }
    read_shared(model, others);
}

/// Reads the weights that every token uses, on a thread: page faults of an evaluation would
/// read them one window after the other.
fn read_shared(model: &Arc<Model>, others: &[Other]) {
    let used = others.iter().filter(|other| other.is_always_used);
    let mut spans: Vec<Span> = used.map(|other| other.span).collect();
    spans.sort_unstable_by_key(|span| (span.file, span.offset));
    let model = Arc::downgrade(model);
    thread::spawn("shared-weights", move || {
        for span in spans {
            let Some(model) = model.upgrade() else {
                return;
            };
            // What the kernel refuses to read ahead, the program reads itself.
            if let Ok(file) = model.files[span.file].gguf.source.handle().get() {
                read_ahead(file, &span.bytes(), WINDOW, || model.is_alive());
            }
        }
    });
}

static MMAP: Redirection = Redirection::of(c"mmap");
static MMAP64: Redirection = Redirection::of(c"mmap64");
/// How libllama chooses buffers.
pub static SUPPORTS_OP: Redirection = Redirection::of(c"ggml_backend_dev_supports_op");
/// How programs begin and end a warm-up that reads all experts.
pub static SET_WARMUP: Redirection = Redirection::of(c"llama_set_warmup");

/// The copy of ggml whose `ggml_backend_dev_supports_op` is redirected; null before.
static GGML: AtomicPtr<Ggml> = AtomicPtr::new(std::ptr::null_mut());
/// Bytes that were mapped without `MAP_POPULATE` although the program set the flag.
static UNREAD: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this thread loads files with routed experts.
    static LOADS_EXPERTS: Cell<bool> = const { Cell::new(false) };
    /// Those of them that are mapped without reading them.
    static UNREAD_FILES: RefCell<Vec<FileId>> = const { RefCell::new(Vec::new()) };
}

/// Prepares for loading a file that the program has opened on this thread, and that
/// [`loads`] knows already.
pub fn file_opened(caller: &Caller, ggml: &'static Ggml) {
    // Others open files for their metadata.
    if !streams() || !caller.is_llama() {
        return;
    }
    let has_experts = |file: &&GgufFile| ExpertIndex::of([*file]).layers().next().is_some();
    let (files, is_read): (Vec<FileId>, bool) =
        loads::opened_files(|files| match is_needed(files) {
            true => (
                files.iter().filter(has_experts).map(id).collect(),
                is_read(files),
            ),
            false => (Vec::new(), false),
        });
    if only_needed() {
        let mut needed = NEEDED.lock();
        for file in &files {
            if !needed.contains(file) {
                needed.push(*file);
                ANY_NEEDED.store(true, Ordering::Relaxed);
            }
        }
    }
    LOADS_EXPERTS.set(!files.is_empty());
    if !files.is_empty() {
        redirect(caller, ggml);
    }
    let unread = if is_read { Vec::new() } else { files };
    // Fails on a thread that is ending, which maps nothing.
    let _ = UNREAD_FILES.try_with(|known| known.replace(unread));
}

/// Redirects the calls of libllama that would read experts. Called for each file: a call of
/// another thread that was bound at the same time may have undone it.
fn redirect(caller: &Caller, ggml: &'static Ggml) {
    let is_llama = |object: &loaded::Object| caller.is(object);
    // SAFETY: the replacements have the types of the functions, which the C library's and
    // llama.cpp's headers give; libllama stays loaded once its ggml is known, and programs do
    // not unload what calls it while they load a model.
    unsafe {
        let mappings = [(&MMAP, map as *const ()), (&MMAP64, map_large as *const ())];
        let redirected = mappings.map(|(function, to)| {
            // Not `Caller::symbol`: a library before this one may have its own.
            let real = libc::dlsym(libc::RTLD_DEFAULT, function.name().as_ptr());
            function.install(to as usize, real as usize, is_llama)
        });
        if !redirected.contains(&true) {
            say_once(
                &MAPPED,
                "cannot change how libllama maps files: loading a model reads the whole file",
            );
        }
        let real = ggml.f.ggml_backend_dev_supports_op as *const () as usize;
        match SUPPORTS_OP.install(supports_op as *const () as usize, real, is_llama) {
            true => GGML.store(std::ptr::from_ref(ggml).cast_mut(), Ordering::Release),
            // ik_llama.cpp has no special buffer types.
            false if ggml.ops.fused.is_some() => {}
            false => say_once(
                &CHOSEN,
                "cannot change how libllama chooses buffers, so it may copy experts out of the mapping: start the program without repacking (--no-repack)",
            ),
        }
        // Programs with a newer llama.cpp do not call it.
        let real = caller.symbol(SET_WARMUP.name()) as usize;
        SET_WARMUP.install_in_all(set_warmup as *const () as usize, real);
    }
}

static MAPPED: AtomicBool = AtomicBool::new(false);
static CHOSEN: AtomicBool = AtomicBool::new(false);
static WARMED: AtomicBool = AtomicBool::new(false);

fn say_once(said: &AtomicBool, sentence: &str) {
    if !said.swap(true, Ordering::Relaxed) {
        log::info!("{sentence}");
    }
}

type Map =
    unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, libc::off_t) -> *mut c_void;

/// Replaces `mmap` in libllama.
unsafe extern "C" fn map(
    address: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let flags = unpopulated(flags, file, len);
    // SAFETY: the function of this type that was called before, with its arguments.
    unsafe {
        let real: Map = std::mem::transmute(MMAP.before());
        real(address, len, access, flags, file, offset)
    }
}

/// Replaces `mmap64` in libllama.
unsafe extern "C" fn map_large(
    address: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let flags = unpopulated(flags, file, len);
    // SAFETY: the function of this type that was called before, with its arguments.
    unsafe {
        let real: Map = std::mem::transmute(MMAP64.before());
        real(address, len, access, flags, file, offset)
    }
}

/// Returns the flags without `MAP_POPULATE` for a file with experts that this thread loads.
/// Allocates nothing, takes no lock and keeps `errno`.
fn unpopulated(flags: c_int, file: c_int, len: usize) -> c_int {
    if flags & libc::MAP_POPULATE == 0 || !LOADS_EXPERTS.get() {
        return flags;
    }
    let Some(id) = id_of(file) else {
        return flags;
    };
    let has = |files: &RefCell<Vec<_>>| files.try_borrow().is_ok_and(|files| files.contains(&id));
    if UNREAD_FILES.try_with(has).unwrap_or(false) {
        UNREAD.fetch_add(len as u64, Ordering::Relaxed);
        return flags & !libc::MAP_POPULATE;
    }
    flags
}

/// Returns device and inode of an open file. Keeps `errno`.
fn id_of(file: c_int) -> Option<FileId> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: fstat fills the struct; errno is a word of this thread.
    unsafe {
        let errno = *libc::__errno_location();
        let failed = libc::fstat(file, found.as_mut_ptr()) != 0;
        *libc::__errno_location() = errno;
        let found = found.assume_init();
        (!failed).then_some((found.st_dev, found.st_ino))
    }
}

/// Replaces `ggml_backend_dev_supports_op` in libllama, which chooses the buffer type of a
/// tensor by it.
///
/// Where libllama and ggml are one object, ggml's scheduler calls it, too: for a placed weight, whose
/// operation no backend would compute after another answer than the backend's.
unsafe extern "C-unwind" fn supports_op(device: *mut Device, node: *const Tensor) -> bool {
    type SupportsOp = unsafe extern "C-unwind" fn(*mut Device, *const Tensor) -> bool;
    // SAFETY: the function of this type that was called before, with its arguments; a copy of
    // ggml is never freed.
    unsafe {
        let real: SupportsOp = std::mem::transmute(SUPPORTS_OP.before());
        let supported = real(device, node);
        if !supported || !LOADS_EXPERTS.get() {
            return supported;
        }
        let Some(ggml) = GGML.load(Ordering::Acquire).as_ref() else {
            return true;
        };
        match refused_weight(ggml, device, node) {
            Some(name) => loads::note_kept_out(name),
            None => return true,
        }
        false
    }
}

/// Returns the name of the weight of an operation if that is kept out of its buffer type.
///
/// # Safety
///
/// A live device and a live node of this copy of ggml; the weight is live as long as the name.
unsafe fn refused_weight<'a>(
    ggml: &Ggml,
    device: *mut Device,
    node: *const Tensor,
) -> Option<&'a CStr> {
    let layout = &ggml.layout;
    // SAFETY: as the caller ensures; sources of a node are live, and so are their buffers.
    unsafe {
        let op: i32 = layout.read(node, layout.op);
        if op != ggml.ops.mul_mat_id {
            return None;
        }
        let weight: *mut Tensor = layout.read(node, layout.src);
        let buffer: *mut Buffer = layout.read(weight, layout.buffer);
        // libllama chooses with an empty buffer; buffers of placed weights have their usage, also those of no
        // bytes (`no_alloc`).
        if buffer.is_null() || (ggml.f.ggml_backend_buffer_get_usage)(buffer) == USAGE_WEIGHTS {
            return None;
        }
        let name = CStr::from_ptr((ggml.f.ggml_get_name)(weight));
        let buft = (ggml.f.ggml_backend_buffer_get_type)(buffer);
        let refused = is_expert(name) && keeps_experts_out(ggml, device, buft);
        refused.then_some(name)
    }
}

/// Whether routed experts are kept out of a buffer type of a device: a special buffer type of
/// the CPU would hold a copy of them. False where libllama still chooses such types.
pub fn keeps_experts_out(ggml: &Ggml, device: *mut Device, buft: *mut BufferType) -> bool {
    std::ptr::eq(ggml, GGML.load(Ordering::Acquire))
        // SAFETY: a live device.
        && unsafe { (ggml.f.ggml_backend_dev_type)(device) } == DEVICE_CPU
        && ggml.special_types(device).contains(&buft)
}

/// Replaces `llama_set_warmup`, which makes evaluations route to all experts.
unsafe extern "C-unwind" fn set_warmup(context: *mut c_void, on: bool) {
    type SetWarmup = unsafe extern "C-unwind" fn(*mut c_void, bool);
    if on {
        say_once(
            &WARMED,
            "the program's warm-up routes like any evaluation: one that routes to all experts would read them all",
        );
    }
    // SAFETY: the function of this type that was called before.
    unsafe {
        let real: SetWarmup = std::mem::transmute(SET_WARMUP.before());
        real(context, false);
    }
}
