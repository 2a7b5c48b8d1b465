//! The models that the program is loading: their files, and the tensors made from them.
//!
//! A load belongs to the process: llama.cpp opens the files of a model on one thread, any thread may
//! give its tensors memory, and other models may be loaded at the same time. A tensor is of the load
//!
//! 1. that alone has a file with a tensor of its name and shape, or else
//! 2. that has other tensors in its buffer, or else
//! 3. in the mapping of whose file it is, or else
//! 4. whose files were opened by the thread that gives it memory, or else
//! 5. in whose file its bytes are. They are compared when a graph reads the first tensor of a model.
//!
//! Where several loads remain, [`Load::unclear`] has the name of the tensor.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;
use sidecar_core::files;
use sidecar_core::gguf::{Access, GgufFile, Value, has_tensor};
use sidecar_core::protocol::Event;
use sidecar_core::text;

use crate::ggml::{Buffer, Ggml, Tensor};
use crate::loader::caller::Caller;
use crate::process::journal;
use crate::process::maps::Maps;
use crate::program::derived;

/// A model that is being loaded.
pub struct Load {
    number: u64,
    /// The thread that opened its files.
    thread: ThreadId,
    /// The copy of ggml that opened its files.
    pub ggml: &'static Ggml,
    /// The object that opened its files.
    pub caller: &'static Caller,
    /// Its only file, or its first shard.
    pub path: PathBuf,
    /// Its files that have tensors.
    pub files: Vec<GgufFile>,
    /// Whether one of its files could not be opened here.
    is_unwatched: bool,
    /// Its tensors that have memory.
    pub tensors: Vec<Placed>,
    /// The tensors that were kept out of special buffer types: [`note_kept_out`].
    pub kept_out: BTreeSet<CString>,
    /// Whether the program listed the special buffer types of the CPU.
    pub lists_special_types: bool,
    /// The files that were replaced after their headers were read here and before the first tensor got memory: by then the
    /// program has opened all of its files, and may have either version.
    pub replaced: Vec<PathBuf>,
    /// The name of a weight that the program made of others.
    pub altered: Option<CString>,
    /// The name of a tensor that may belong to this load or to another one.
    pub unclear: Option<CString>,
}

/// A tensor that was given memory.
pub struct Placed {
    /// Its address.
    pub tensor: usize,
    /// The address of its buffer.
    pub buffer: usize,
    /// The address of its bytes.
    address: usize,
    /// The index of its file.
    pub file: usize,
    /// Its index in the header.
    pub info: usize,
}

/// A tensor that was given memory and may belong to several loads.
struct Unclear {
    tensor: usize,
    buffer: usize,
    address: usize,
    name: CString,
    ne: [u64; 4],
    /// The numbers of the loads.
    of: Vec<u64>,
}

struct Loads {
    next: u64,
    /// In the order in which they were opened.
    open: Vec<Load>,
    unclear: Vec<Unclear>,
}

/// The loads of the process, and what hooks read of them without the lock.
struct Shared {
    loads: Mutex<Loads>,
    /// Whether any load is open.
    is_loading: AtomicBool,
    /// Whether any file was opened.
    any: AtomicBool,
    /// Addresses of all tensors that were ever recorded.
    lowest: AtomicUsize,
    highest: AtomicUsize,
}

static SHARED: Shared = Shared {
    loads: Mutex::new(Loads {
        next: 0,
        open: Vec::new(),
        unclear: Vec::new(),
    }),
    is_loading: AtomicBool::new(false),
    any: AtomicBool::new(false),
    lowest: AtomicUsize::new(usize::MAX),
    highest: AtomicUsize::new(0),
};

thread_local! {
    /// The last file that this thread opened and that is not a further shard.
    static FIRST: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
    /// Set on a thread that opened a file.
    static OPENER: Opener = Opener(std::thread::current().id());
}

/// Closes, at the end of a thread, files that the thread opened for their metadata only.
struct Opener(ThreadId);

impl Drop for Opener {
    fn drop(&mut self) {
        let thread = self.0;
        let mut loads = SHARED.loads.lock();
        loads.retain(|load, has_begun| load.thread != thread || has_begun);
    }
}

/// Whether no file was opened so far.
pub fn is_empty() -> bool {
    !SHARED.any.load(Ordering::Relaxed)
}

/// Whether tensors that are given memory may be weights.
pub fn is_loading() -> bool {
    SHARED.is_loading.load(Ordering::Acquire)
}

/// Returns the range of addresses that has all tensors that were recorded.
pub fn addresses() -> Range<usize> {
    SHARED.lowest.load(Ordering::Relaxed)..SHARED.highest.load(Ordering::Relaxed)
}

/// Whether a tensor was given memory and is, or may be, of a model that is being loaded.
pub fn is_recorded(tensor: *mut Tensor) -> bool {
    if !is_loading() {
        return false;
    }
    let loads = SHARED.loads.lock();
    let mut placed = loads.open.iter().flat_map(|load| &load.tensors);
    let mut unclear = loads.unclear.iter();
    placed.any(|of| of.tensor == tensor as usize) || unclear.any(|of| of.tensor == tensor as usize)
}

/// Records a GGUF file that the program opened on this thread.
pub fn file_opened(caller: &'static Caller, ggml: &'static Ggml, path: &Path) {
    // Another file may have the same descriptor later.
    let lasting = files::lasting_path(path).map_err(|error| error.to_string());
    let opened = lasting.and_then(|path| {
        let opened = GgufFile::open(&path, Access::Read);
        opened
            .map(|gguf| (gguf, path))
            .map_err(|error| error.to_string())
    });
    let opened = opened.map_err(|error| {
        let reason = format!("cannot watch a file that the program opened: {error}");
        log::warn!("{reason}");
        journal::note_once(|| Event::Passive { reason });
    });
    let thread = std::thread::current().id();
    let mut loads = SHARED.loads.lock();
    // If tensors have memory already, this file is of the next model.
    let mut current = loads.not_begun(thread);
    let Ok((gguf, path)) = opened else {
        // The program needs descriptors for the other files.
        if let Some(load) = current {
            load.files.clear();
            load.is_unwatched = true;
        }
        return;
    };
    let is_unwatched = current.as_ref().is_some_and(|load| load.is_unwatched);
    if is_adapter(&gguf) || is_unwatched && gguf.is_further_shard() {
        return;
    }
    // A file that is not a further shard begins a model: what was opened before was read for
    // its metadata alone, or to fit this model to a device.
    if !gguf.is_further_shard() {
        if let Some(load) = &mut current {
            load.files.clear();
            load.is_unwatched = false;
            load.kept_out.clear();
            load.lists_special_types = false;
            load.altered = None;
            load.unclear = None;
        }
        // Fails on a thread that is ending, as below.
        let _ = FIRST.try_with(|first| first.replace(Some(path.clone())));
    }
    if gguf.header.tensors.is_empty() {
        return;
    }
    journal::note_once(|| Event::Opened {
        path: text::path(&path),
    });
    let first = FIRST.try_with(|first| first.borrow().clone());
    let first = first.ok().flatten().unwrap_or_default();
    match current {
        Some(load) => {
            load.path = first;
            load.files.retain(|file| file.source.path() != path);
            load.files.push(gguf);
        }
        None => {
            let number = loads.next;
            loads.next += 1;
            loads.open.push(Load {
                number,
                thread,
                ggml,
                caller,
                path: first,
                files: vec![gguf],
                is_unwatched: false,
                tensors: Vec::new(),
                kept_out: BTreeSet::new(),
                lists_special_types: false,
                replaced: Vec::new(),
                altered: None,
                unclear: None,
            });
        }
    }
    SHARED.any.store(true, Ordering::Relaxed);
    SHARED.is_loading.store(true, Ordering::Relaxed);
    // Fails on a thread that is ending, which keeps nothing.
    let _ = OPENER.try_with(|_| ());
}

/// Whether a file has what is added to the tensors of a model (LoRA), and no model.
fn is_adapter(gguf: &GgufFile) -> bool {
    let key = gguf.header.key(b"general.type");
    let value = key.and_then(|key| gguf.value(key).ok());
    matches!(value, Some(Value::Text(text)) if text == b"adapter")
}

/// Calls `work` with the files of the model that this thread opened last; none before it opens one.
pub fn opened_files<R>(work: impl FnOnce(&[GgufFile]) -> R) -> R {
    let thread = std::thread::current().id();
    let loads = SHARED.loads.lock();
    let load = loads.open.iter().rev().find(|load| load.thread == thread);
    work(load.map_or(&[], |load| &load.files))
}

/// The function of a backend that lists special buffer types.
const LIST_SPECIAL_TYPES: &CStr = c"ggml_backend_dev_get_extra_bufts";

/// Whether libllama was seen to look up a function of a backend.
static LOOKS_UP: AtomicBool = AtomicBool::new(false);

/// Records a function of a backend that libllama looks up by its name on this thread. It lists the
/// special buffer types of a GPU with any option, and those of the CPU for each adapter, too.
pub fn function_looked_up(backend: &CStr, function: &CStr) {
    LOOKS_UP.store(true, Ordering::Relaxed);
    if backend == c"CPU" && function == LIST_SPECIAL_TYPES {
        let mut loads = SHARED.loads.lock();
        if let Some(load) = loads.not_begun(std::thread::current().id()) {
            load.lists_special_types = true;
        }
    }
}

/// Whether what libllama looks up is seen: it looks up functions for each context.
pub fn sees_lookups() -> bool {
    LOOKS_UP.load(Ordering::Relaxed)
}

/// Records that a tensor is kept out of a special buffer type, although the program would have used
/// that type.
pub fn note_kept_out(name: &CStr) {
    let thread = std::thread::current().id();
    let mut loads = SHARED.loads.lock();
    let has = |load: &Load| has_tensor(&load.files, name);
    let with = |load: &&mut Load| has(load) && load.thread == thread;
    let found = match loads.open.iter_mut().rev().find(with) {
        None => loads.open.iter_mut().rev().find(|load| has(load)),
        found => found,
    };
    if let Some(load) = found {
        load.kept_out.insert(name.to_owned());
    }
}

/// Records a tensor that was given memory. Returns whether it is a weight of a model that is being loaded.
///
/// # Safety
///
/// A live tensor of this copy of ggml that has a name.
pub unsafe fn tensor_placed(ggml: &'static Ggml, tensor: *mut Tensor, buffer: *mut Buffer) -> bool {
    // SAFETY: as the caller ensures.
    let (name, ne, address) = unsafe {
        let name = CStr::from_ptr((ggml.f.ggml_get_name)(tensor));
        let ne: [i64; 4] = ggml.layout.read(tensor, ggml.layout.ne);
        let data: *mut c_void = ggml.layout.read(tensor, ggml.layout.data);
        (name, ne.map(|extent| extent as u64), data as usize)
    };
    let (tensor, buffer) = (tensor as usize, buffer as usize);
    let mut loads = SHARED.loads.lock();
    let candidates = loads.with_tensor(ggml, name, &ne);
    if candidates.is_empty() {
        // ik_llama.cpp made it of others: those of the file are views of it.
        // SAFETY: as the caller ensures.
        let is_derived = unsafe { derived::is_known(ggml, tensor as *const Tensor) };
        if ggml.ops.fused.is_some() && name.to_bytes().starts_with(b"blk.") && !is_derived {
            loads.note_altered(ggml, name);
        }
        return false;
    }
    SHARED.lowest.fetch_min(tensor, Ordering::Relaxed);
    SHARED.highest.fetch_max(tensor + 1, Ordering::Relaxed);
    match loads.choose(&candidates, buffer, address) {
        Ok((at, file, info)) => {
            let load = &mut loads.open[at];
            if load.tensors.is_empty() {
                load.note_replaced();
            }
            load.tensors.push(Placed {
                tensor,
                buffer,
                address,
                file,
                info,
            });
        }
        Err(of) => loads.unclear.push(Unclear {
            tensor,
            buffer,
            address,
            name: name.to_owned(),
            ne,
            of,
        }),
    }
    true
}

/// Takes the load that has the first of these tensors that any has.
pub fn take(tensors: &[*mut Tensor]) -> Option<Load> {
    if tensors.is_empty() {
        return None;
    }
    let mut loads = SHARED.loads.lock();
    loads.settle(tensors);
    let position = tensors.iter().find_map(|&weight| {
        let has = |load: &Load| load.tensors.iter().any(|of| of.tensor == weight as usize);
        loads.open.iter().position(has)
    })?;
    let load = loads.open.remove(position);
    // The thread opened its other files for their metadata only.
    loads.retain(|other, has_begun| other.thread != load.thread || has_begun);
    Some(load)
}

/// Forgets the loads that use a buffer, which is about to be freed.
pub fn buffer_freed(buffer: *mut Buffer) {
    forget(
        |of| of.buffer == buffer as usize,
        |of| of.buffer == buffer as usize,
    );
}

/// Forgets the loads that have tensors at these addresses, whose memory is about to be freed.
pub fn tensors_freed(range: &Range<usize>) {
    forget(
        |of| range.contains(&of.tensor),
        |of| range.contains(&of.tensor),
    );
}

fn forget(placed: impl Fn(&Placed) -> bool, unclear: impl Fn(&Unclear) -> bool) {
    let mut loads = SHARED.loads.lock();
    loads.unclear.retain(|of| !unclear(of));
    loads.retain(|load, _| !load.tensors.iter().any(&placed));
}

impl Loads {
    /// Keeps the loads that fulfil a condition on the load and on whether any of its tensors may
    /// have memory.
    fn retain(&mut self, mut keeps: impl FnMut(&Load, bool) -> bool) {
        let unclear = &self.unclear;
        self.open.retain(|load| {
            let may_have = || unclear.iter().any(|of| of.of.contains(&load.number));
            keeps(load, !load.tensors.is_empty() || may_have())
        });
        SHARED
            .is_loading
            .store(!self.open.is_empty(), Ordering::Release);
    }

    /// Returns the load of a thread that has no memory yet.
    fn not_begun(&mut self, thread: ThreadId) -> Option<&mut Load> {
        let unclear = &self.unclear;
        self.open.iter_mut().find(|load| {
            let may_have = || unclear.iter().any(|of| of.of.contains(&load.number));
            load.thread == thread && load.tensors.is_empty() && !may_have()
        })
    }

    /// Returns the loads with a tensor of this name and shape: the index of the load, of the file
    /// and of the tensor in the header.
    fn with_tensor(&self, ggml: &Ggml, name: &CStr, ne: &[u64; 4]) -> Vec<(usize, usize, usize)> {
        let loads = self.open.iter().enumerate();
        let loads = loads.filter(|(_, load)| std::ptr::eq(load.ggml, ggml));
        loads
            .filter_map(|(at, load)| load.find(name, ne).map(|(file, info)| (at, file, info)))
            .collect()
    }

    /// Chooses the load of a tensor; the numbers of the loads where several remain.
    fn choose(
        &self,
        candidates: &[(usize, usize, usize)],
        buffer: usize,
        address: usize,
    ) -> Result<(usize, usize, usize), Vec<u64>> {
        if let [only] = candidates {
            return Ok(*only);
        }
        let load = |of: &(usize, usize, usize)| &self.open[of.0];
        let shares_buffer = |of: &&(usize, usize, usize)| {
            let mut others = load(of).tensors.iter();
            others.any(|other| other.buffer == buffer)
        };
        if let Some(found) = candidates.iter().find(shares_buffer) {
            return Ok(*found);
        }
        let maps = Maps::read();
        let mapped: Vec<_> = candidates
            .iter()
            .filter(|of| load(of).may_be_mapped(&maps, of.1, address))
            .copied()
            .collect();
        let is_mapped = !mapped.is_empty();
        let left = if is_mapped {
            mapped
        } else {
            candidates.to_vec()
        };
        let thread = std::thread::current().id();
        let opened_here = left.iter().rev().find(|of| load(of).thread == thread);
        // Loads of one file differ in nothing before their first tensor has memory.
        let is_new =
            |of: &(usize, usize, usize)| load(of).files.len() == 1 && load(of).tensors.is_empty();
        match (left.as_slice(), opened_here) {
            ([only], _) => Ok(*only),
            (_, Some(found)) => Ok(*found),
            ([.., last], None) if is_mapped && left.iter().all(is_new) => Ok(*last),
            _ => Err(left.iter().map(|of| load(of).number).collect()),
        }
    }

    /// Records a weight that the program made of others: of the model that this thread loads, else
    /// of all that are being loaded.
    fn note_altered(&mut self, ggml: &Ggml, name: &CStr) {
        let thread = std::thread::current().id();
        let here = self.open.iter().rposition(|load| load.thread == thread);
        for (at, load) in self.open.iter_mut().enumerate() {
            if std::ptr::eq(load.ggml, ggml) && here.is_none_or(|here| here == at) {
                load.altered.get_or_insert_with(|| name.to_owned());
            }
        }
    }

    /// Gives each tensor that may belong to several loads to the load whose file has the bytes of
    /// all such tensors of its buffer. A tensor that a graph reads is given to one of the loads in any
    /// case.
    fn settle(&mut self, read: &[*mut Tensor]) {
        let mut groups: BTreeMap<usize, Vec<Unclear>> = BTreeMap::new();
        for of in self.unclear.drain(..) {
            groups.entry(of.buffer).or_default().push(of);
        }
        for group in groups.into_values() {
            let is_read = |of: &Unclear| read.contains(&(of.tensor as *mut Tensor));
            if !group.iter().any(is_read) {
                // Its bytes may not be loaded yet.
                self.unclear.extend(group);
                continue;
            }
            let is_among = |load: &&mut Load| group.iter().all(|of| of.of.contains(&load.number));
            let mut left: Vec<&mut Load> = self.open.iter_mut().filter(is_among).collect();
            if left.len() > 1 {
                let has_bytes = |load: &Load| group.iter().all(|of| load.has_bytes_of(of));
                let same: Vec<usize> = (0..left.len()).filter(|&at| has_bytes(left[at])).collect();
                if let [only] = same.as_slice() {
                    left = vec![left.swap_remove(*only)];
                } else {
                    for load in &mut left {
                        load.unclear.get_or_insert_with(|| group[0].name.clone());
                    }
                }
            }
            if let Some(load) = left.first_mut() {
                for of in group {
                    let found = load.find(&of.name, &of.ne);
                    load.tensors.extend(found.map(|(file, info)| Placed {
                        tensor: of.tensor,
                        buffer: of.buffer,
                        address: of.address,
                        file,
                        info,
                    }));
                }
            }
        }
    }
}

impl Load {
    /// Returns the index of the file with a tensor of this name and shape, and its index in the
    /// header.
    fn find(&self, name: &CStr, ne: &[u64; 4]) -> Option<(usize, usize)> {
        let files = self.files.iter().enumerate().rev();
        files
            .filter_map(|(at, file)| Some((at, file.header.find(name)?)))
            .find(|&(at, info)| self.files[at].header.tensors[info].ne == *ne)
    }

    fn note_replaced(&mut self) {
        let files = self.files.iter().map(|file| &file.source);
        let replaced = files.filter(|file| !file.is_at_its_path());
        self.replaced = replaced.map(|file| file.path().to_owned()).collect();
    }

    /// Whether an address is in the mapping of a file that may be the one of this load.
    fn may_be_mapped(&self, maps: &Maps, file: usize, address: usize) -> bool {
        let is_of = |address| maps.is_of(address as *mut c_void, &self.files[file]);
        let here = maps.around(address).unwrap_or_default();
        let elsewhere =
            |of: &Placed| of.file == file && !here.contains(&of.address) && is_of(of.address);
        is_of(address) && !self.tensors.iter().any(elsewhere)
    }

    /// Whether samples of the bytes of a tensor, which the program has loaded, are in the file.
    fn has_bytes_of(&self, of: &Unclear) -> bool {
        const SAMPLES: u64 = 32;
        const BYTES: u64 = 256;
        let (f, layout) = (&self.ggml.f, &self.ggml.layout);
        let Some((file, info)) = self.find(&of.name, &of.ne) else {
            return false;
        };
        let file = &self.files[file];
        let info = &file.header.tensors[info];
        let tensor = of.tensor as *mut Tensor;
        // SAFETY: tensors whose memory the program frees are removed from the list.
        if unsafe { layout.read::<i32>(tensor, layout.ty) } as u32 != info.ty.id {
            return false;
        }
        let last = info.nbytes.saturating_sub(BYTES);
        (0..SAMPLES).all(|sample| {
            let (mut here, mut there) = ([0; BYTES as usize], [0; BYTES as usize]);
            let at = last / (SAMPLES - 1) * sample;
            let len = BYTES.min(info.nbytes) as usize;
            // SAFETY: as above, and the tensor has the size that the file states.
            unsafe {
                let to = here.as_mut_ptr().cast();
                (f.ggml_backend_tensor_get)(tensor, to, at as usize, len);
            }
            let read = file.source.read_at(&mut there[..len], info.offset + at);
            read.is_ok() && here[..len] == there[..len]
        })
    }
}
