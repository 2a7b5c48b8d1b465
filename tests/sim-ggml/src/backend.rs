//! The tables of functions that the host calls.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::calls::{Call, Effect};
use crate::capture::Captures;
use crate::ggml::{
    Backend, BackendInterface, Buffer, BufferInterface, BufferType, Device, DeviceInterface, Event,
    FAILED, GPU, Graph, Properties, Registry, SUCCESS, Tensor,
};
use crate::host::HostThread;
use crate::memory::{Block, POISON};
use crate::order::Use;
use crate::routing;
use crate::sim::{Direction, Moment, sim};
use crate::stream::{self, Stream};

const DESCRIPTION: &CStr = c"simulated GPU";
/// Of tensors, as GPU backends have it.
const ALIGNMENT: usize = 128;
static GUID: [u8; 16] = *b"llama-sidecarSIM";

/// What the host gets pointers to. It is made once and never freed.
struct Tables {
    registry: *mut Registry,
    devices: Vec<OfDevice>,
}

/// A device, and its memory.
struct OfDevice {
    name: CString,
    device: *mut Device,
    memory: *mut BufferType,
    host_memory: *mut BufferType,
}

// SAFETY: nothing is changed after `tables` has made it.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let registry = Box::leak(Box::new(Registry {
            version: sim().ggml.version,
            name: registry_name,
            device_count,
            device,
            function: Some(function),
            context: null_mut(),
        }));
        let devices = 0..sim().settings.memory.len();
        Tables {
            registry,
            devices: devices.map(|number| made(number, registry)).collect(),
        }
    })
}

/// Makes a device. Its number is its context.
fn made(number: usize, registry: *mut Registry) -> OfDevice {
    let device = Box::leak(Box::new(Device {
        interface: DEVICE,
        registry,
        context: number as *mut c_void,
    }));
    let ggml = &sim().ggml;
    let memory = ggml.buffer_type(memory_name, alloc, alignment, is_not_host, device);
    let host_memory = ggml.buffer_type(host_memory_name, alloc_host, alignment, is_host, device);
    OfDevice {
        name: CString::new(format!("SIM{number}")).expect("no zero"),
        device,
        memory: Box::leak(Box::new(memory)),
        host_memory: Box::leak(Box::new(host_memory)),
    }
}

/// Returns the number of a device.
fn number_of(device: *mut Device) -> usize {
    // SAFETY: the host passes a device that `made` made.
    unsafe { (*device).context as usize }
}

/// Returns the number of the device that has this memory.
fn number_of_memory(ty: *mut BufferType) -> usize {
    let mut all = tables().devices.iter();
    all.position(|of| of.memory == ty)
        .expect("the memory of a device")
}

fn of(device: *mut Device) -> &'static OfDevice {
    &tables().devices[number_of(device)]
}

/// The registry, for the host.
pub fn registry() -> *mut Registry {
    tables().registry
}

extern "C" fn registry_name(_: *mut Registry) -> *const c_char {
    c"SIM".as_ptr()
}

extern "C" fn device_count(_: *mut Registry) -> usize {
    tables().devices.len()
}

extern "C" fn device(_: *mut Registry, number: usize) -> *mut Device {
    tables().devices[number].device
}

extern "C" fn function(_: *mut Registry, name: *const c_char) -> *mut c_void {
    // SAFETY: the host passes a C string.
    match unsafe { CStr::from_ptr(name) }.to_bytes() {
        b"ggml_backend_register_host_buffer" => register as *mut c_void,
        b"ggml_backend_unregister_host_buffer" => unregister as *mut c_void,
        _ => null_mut(),
    }
}

extern "C" fn register(address: *mut c_void, size: usize) -> bool {
    sim().count(Call::RegisterHostBuffer) == Effect::Usual
        && sim().memory.lock(address as usize, size)
}

extern "C" fn unregister(address: *mut c_void) {
    sim().count(Call::UnregisterHostBuffer);
    sim().memory.unlock(address as usize);
}

// The device.

const DEVICE: DeviceInterface = DeviceInterface {
    name: device_name,
    description,
    memory: device_memory,
    ty: device_type,
    properties,
    init,
    buffer_type,
    host_buffer_type: Some(host_buffer_type),
    buffer_from_host_ptr: None,
    supports_op,
    supports_buffer_type,
    offload_op: Some(offload_op),
    event_new: Some(event_new),
    event_free: Some(event_free),
    event_synchronize: Some(event_synchronize),
};

extern "C" fn device_name(device: *mut Device) -> *const c_char {
    of(device).name.as_ptr()
}

extern "C" fn description(_: *mut Device) -> *const c_char {
    DESCRIPTION.as_ptr()
}

/// Returns how much memory of a device is free, and all of it.
fn memory_of(device: *mut Device) -> (usize, usize) {
    let number = number_of(device);
    let total = sim().settings.memory[number];
    (total.saturating_sub(sim().memory.used(number).now), total)
}

extern "C" fn device_memory(device: *mut Device, free: *mut usize, total: *mut usize) {
    let memory = memory_of(device);
    // SAFETY: the host passes two places.
    unsafe {
        free.write(memory.0);
        total.write(memory.1);
    }
}

extern "C" fn device_type(_: *mut Device) -> c_int {
    GPU
}

extern "C" fn properties(device: *mut Device, properties: *mut Properties) {
    let (memory_free, memory_total) = memory_of(device);
    // SAFETY: the host passes a place.
    unsafe {
        properties.write(Properties {
            name: device_name(device),
            description: DESCRIPTION.as_ptr(),
            memory_free,
            memory_total,
            ty: GPU,
            id: null(),
            asynchronous: true,
            host_buffer: true,
            buffer_from_host_ptr: false,
            events: true,
            mmap: true,
        });
    }
}

extern "C" fn init(device: *mut Device, _: *const c_char) -> *mut Backend {
    if sim().count(Call::InitDevice) == Effect::Fails {
        return null_mut();
    }
    Box::leak(Box::new(Backend {
        guid: &GUID,
        interface: BACKEND,
        device,
        context: Box::into_raw(Box::new(OfBackend {
            stream: Stream::start(number_of(device)),
            captures: Mutex::default(),
        }))
        .cast(),
    }))
}

extern "C" fn buffer_type(device: *mut Device) -> *mut BufferType {
    of(device).memory
}

extern "C" fn host_buffer_type(device: *mut Device) -> *mut BufferType {
    of(device).host_memory
}

extern "C" fn supports_op(_: *mut Device, tensor: *const Tensor) -> bool {
    sim().ggml.cpu_supports(tensor)
}

extern "C" fn supports_buffer_type(device: *mut Device, ty: *mut BufferType) -> bool {
    ty == of(device).memory
}

/// Takes operations of large batches, by the rule of ggml's CUDA backend.
extern "C" fn offload_op(_: *mut Device, tensor: *const Tensor) -> bool {
    // SAFETY: the host passes a node.
    let tensor = unsafe { &*tensor };
    let operations = &sim().ggml.operations;
    let batch = if tensor.op == operations.get_rows {
        0
    } else if tensor.op == operations.mul_mat {
        tensor.ne[1]
    } else if tensor.op == operations.mul_mat_id {
        tensor.ne[2]
    } else {
        tensor.ne[1..].iter().product()
    };
    batch >= sim().settings.offload_batch
}

extern "C" fn event_new(device: *mut Device) -> *mut Event {
    if sim().count(Call::EventNew) == Effect::Fails {
        return null_mut();
    }
    Box::leak(Box::new(Event {
        device,
        context: Box::into_raw(Box::<stream::Event>::default()).cast(),
    }))
}

extern "C" fn event_free(_: *mut Device, event: *mut Event) {
    sim().count(Call::EventFree);
    // SAFETY: made by `event_new`; streams that wait for it keep what they wait for.
    unsafe {
        drop(Box::from_raw((*event).context.cast::<stream::Event>()));
        drop(Box::from_raw(event));
    }
}

extern "C" fn event_synchronize(_: *mut Device, event: *mut Event) {
    if sim().count(Call::EventSynchronize) == Effect::Usual
        && let Some(recording) = recorded(event).last()
    {
        HostThread::this().join(&recording.wait());
        recorded(event).waited_for();
    }
}

fn recorded<'a>(event: *mut Event) -> &'a stream::Event {
    // SAFETY: an event of `event_new` that the host did not free.
    unsafe { &*(*event).context.cast() }
}

// Streams.

const BACKEND: BackendInterface = BackendInterface {
    name: backend_name,
    free: backend_free,
    set_async: Some(set_async),
    get_async: Some(get_async),
    set_2d_async: None,
    get_2d_async: None,
    copy_async: Some(copy_async),
    synchronize: Some(synchronize),
    plans: [None; 4],
    compute,
    event_record: Some(event_record),
    event_wait: Some(event_wait),
    optimize: None,
};

/// A backend of the host.
struct OfBackend {
    stream: Stream,
    /// The graphs that it replays.
    captures: Mutex<Captures>,
}

fn of_backend<'a>(backend: *mut Backend) -> &'a OfBackend {
    // SAFETY: a backend of `init` that the host did not free.
    unsafe { &*(*backend).context.cast() }
}

fn stream<'a>(backend: *mut Backend) -> &'a Stream {
    &of_backend(backend).stream
}

fn count_in(backend: *mut Backend, call: Call) -> Effect {
    sim().count_in(stream(backend).number, call)
}

extern "C" fn backend_name(backend: *mut Backend) -> *const c_char {
    tables().devices[stream(backend).device].name.as_ptr()
}

/// Ends the stream, after all of its work.
extern "C" fn backend_free(backend: *mut Backend) {
    // SAFETY: made by `init`.
    unsafe {
        drop(Box::from_raw((*backend).context.cast::<OfBackend>()));
        drop(Box::from_raw(backend));
    }
}

extern "C" fn synchronize(backend: *mut Backend) {
    if count_in(backend, Call::Synchronize) == Effect::Usual {
        HostThread::this().join(&stream(backend).recording().wait());
    }
}

extern "C" fn event_record(backend: *mut Backend, event: *mut Event) {
    if count_in(backend, Call::EventRecord) == Effect::Usual {
        recorded(event).record(stream(backend));
    }
}

extern "C" fn event_wait(backend: *mut Backend, event: *mut Event) {
    if count_in(backend, Call::EventWait) == Effect::Usual {
        stream(backend).wait_for(recorded(event));
    }
}

extern "C" fn compute(backend: *mut Backend, graph: *mut Graph) -> c_int {
    if count_in(backend, Call::GraphCompute) == Effect::Fails {
        return FAILED;
    }
    let OfBackend { stream, captures } = of_backend(backend);
    // SAFETY: the host passes a graph.
    let snapshot = unsafe { captures.lock().expect("no panic").of(graph) };
    stream.submit(move |worker| snapshot.run(worker));
    SUCCESS
}

/// A copy between the host and a tensor in device memory.
struct Copy {
    direction: Direction,
    /// The address of the device's side, as the host sees it.
    device: usize,
    host: usize,
    size: usize,
    /// Whether the host's side is page-locked.
    locked: bool,
    name: String,
    /// The copied part, for numbers of experts where nothing is computed.
    made: Option<Made>,
}

/// A copy of numbers of experts that are made here.
struct Made {
    tensor: Tensor,
    experts: usize,
    offset: usize,
}

// SAFETY: the pointers of the tensor are not followed.
unsafe impl Send for Made {}

impl Copy {
    fn new(
        tensor: *const Tensor,
        host: *const c_void,
        offset: usize,
        size: usize,
        direction: Direction,
    ) -> Copy {
        // SAFETY: the host passes a tensor.
        let tensor = unsafe { &*tensor };
        let verb = match direction {
            Direction::ToDevice => "copy to",
            Direction::FromDevice => "copy from",
        };
        // SAFETY: tensors of graphs that exist have views of tensors that exist.
        let experts = unsafe { routing::experts(tensor, sim().ggml.operations.argsort) };
        Copy {
            direction,
            device: tensor.data as usize + offset,
            host: host as usize,
            size,
            locked: sim().memory.is_locked(host as usize, size),
            name: format!("{verb} {}", tensor.name()),
            made: experts.map(|experts| Made {
                tensor: *tensor,
                experts,
                offset,
            }),
        }
    }

    /// Moves the bytes, as a piece of work that comes after `moment`.
    ///
    /// Bytes for page-locked memory of the host, where nothing waits for the copy, are `later`
    /// there.
    fn run(&self, who: &Use, moment: &Moment, later: bool) {
        let Some((block, offset)) = sim().memory.find(self.device) else {
            sim().unknown_memory(&self.name);
            return;
        };
        let range = offset as u64..((offset + self.size) as u64).min(block.whole().end);
        let writes = self.direction == Direction::ToDevice;
        sim().access(&block, range, writes, who, &moment.clock);
        let host = self.host as *mut u8;
        // SAFETY: the host passes this many bytes, and the tensor has them.
        unsafe {
            match (block.at(offset), self.direction) {
                (Some(device), Direction::ToDevice) => {
                    device.copy_from_nonoverlapping(host, self.size);
                }
                (Some(device), Direction::FromDevice) if later => {
                    let bytes = std::slice::from_raw_parts(device, self.size);
                    sim().keep(who, self.host, bytes.to_vec());
                }
                (Some(device), Direction::FromDevice) => {
                    host.copy_from_nonoverlapping(device, self.size);
                }
                (None, Direction::ToDevice) => {}
                (None, Direction::FromDevice) => {
                    host.write_bytes(0, self.size);
                    if let Some(Made {
                        tensor,
                        experts,
                        offset,
                    }) = &self.made
                    {
                        let routes = sim().settings.routes.as_ref();
                        routing::fill(tensor, *experts, routes, host, *offset, self.size);
                    }
                }
            }
        }
    }

    /// Copies in the order of a stream. A copy of memory that is not page-locked holds up its
    /// caller, who may not conclude anything from it.
    fn submit(self, stream: &Stream) {
        let locked = self.locked;
        if locked && self.direction == Direction::FromDevice {
            // SAFETY: what the host passed, which has no content until the host has waited.
            unsafe { (self.host as *mut u8).write_bytes(POISON, self.size) };
        }
        stream.submit(move |worker| {
            worker.copy(self.direction, self.size, self.locked);
            let name = self.name.clone();
            self.run(&worker.uses(name), &worker.moment, self.locked);
        });
        if !locked {
            let copied = stream.recording().wait();
            HostThread::this().wait_until(copied.time);
        }
    }

    /// Copies outside of all streams, and returns when that is done.
    fn now(self) {
        let thread = HostThread::this();
        let (number, moment) = thread.begin();
        let found = sim().memory.find(self.device);
        let device = found.map_or(0, |(block, _)| block.device);
        let (direction, from) = (self.direction, moment.time);
        let taken = sim().take_link(device, direction, from, self.size, self.locked);
        self.run(&by(&thread, number, self.name.clone()), &moment, false);
        thread.end(number, taken.end);
    }
}

fn by(thread: &HostThread, number: u64, what: String) -> Use {
    Use {
        who: thread.who,
        number,
        what: what.into(),
    }
}

extern "C" fn set_async(
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    if count_in(backend, Call::SetTensorAsync) == Effect::Late {
        let graphs = sim().counts.of(Call::GraphCompute) + 32;
        while sim().counts.of(Call::GraphCompute) < graphs {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Copy::new(tensor, data, offset, size, Direction::ToDevice).submit(stream(backend));
}

extern "C" fn get_async(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    sim().count(Call::GetTensorAsync);
    Copy::new(tensor, data, offset, size, Direction::FromDevice).submit(stream(backend));
}

/// Copies between two devices, or in one, on the stream that has the source, as ggml's CUDA backend does, after what was
/// submitted to both, as `ggml_backend_tensor_copy_async` states. False where a side is not of this backend.
///
/// CUDA's does not wait for the stream of the target. Without that, the sums of `ggml-backend-meta.cpp` over several
/// devices are overwritten while they are read, where the backend has no function for these sums.
extern "C" fn copy_async(
    from: *mut Backend,
    to: *mut Backend,
    source: *const Tensor,
    target: *mut Tensor,
) -> bool {
    // SAFETY: the host passes backends that it did not free.
    let is_stream = |backend: *mut Backend| unsafe { (*backend).guid == &GUID };
    if !is_stream(from) || !is_stream(to) {
        return false;
    }
    // SAFETY: the host passes tensors.
    let (source, target) = unsafe { (&*source, &*target) };
    let of = |backend: *mut Backend, tensor: &Tensor| {
        let found = sim().memory.find(tensor.data as usize);
        found.filter(|(block, _)| block.device == stream(backend).device)
    };
    let (Some(read), Some(written)) = (of(from, source), of(to, target)) else {
        return false;
    };
    count_in(from, Call::CopyTensorAsync);
    let size = sim().ggml.nbytes(target);
    let name = format!("copy of {}", source.name());
    let (from, to) = (stream(from), stream(to));
    if !std::ptr::eq(from, to) {
        from.wait_until(to.recording());
    }
    from.submit(move |worker| {
        worker.copy(Direction::FromDevice, size, true);
        let of_worker = worker.uses(name);
        for (place, writes) in [(&read, false), (&written, true)] {
            let (block, offset) = place;
            let range = *offset as u64..(offset + size) as u64;
            sim().access(block, range, writes, &of_worker, &worker.moment.clock);
        }
        if let (Some(bytes), Some(place)) = (read.0.at(read.1), written.0.at(written.1)) {
            // SAFETY: both tensors have this many bytes.
            unsafe { place.copy_from(bytes, size) };
        }
    });
    if !std::ptr::eq(from, to) {
        to.wait_until(from.recording());
    }
    true
}

// Buffers.

const BUFFER: BufferInterface = BufferInterface {
    free: buffer_free,
    base: buffer_base,
    init_tensor: None,
    memset,
    set,
    get,
    set_2d: None,
    get_2d: None,
    copy: None,
    clear,
    reset: None,
};

extern "C" fn memory_name(ty: *mut BufferType) -> *const c_char {
    tables().devices[number_of_memory(ty)].name.as_ptr()
}

extern "C" fn host_memory_name(_: *mut BufferType) -> *const c_char {
    c"SIM_Host".as_ptr()
}

extern "C" fn alignment(_: *mut BufferType) -> usize {
    ALIGNMENT
}

extern "C" fn is_host(_: *mut BufferType) -> bool {
    true
}

extern "C" fn is_not_host(_: *mut BufferType) -> bool {
    false
}

extern "C" fn alloc(ty: *mut BufferType, size: usize) -> *mut Buffer {
    let sim = sim();
    if sim.count(Call::AllocBuffer) == Effect::Fails {
        return null_mut();
    }
    let number = number_of_memory(ty);
    let limit = sim.settings.memory[number];
    match sim.memory.alloc(number, size, limit, sim.settings.computes) {
        Some(block) => {
            let context = Arc::into_raw(block).cast_mut().cast();
            sim.ggml.new_buffer(ty, BUFFER, context, size)
        }
        None => null_mut(),
    }
}

/// Allocates page-locked memory. Where that fails, the memory is not page-locked, as in ggml's
/// CUDA backend.
extern "C" fn alloc_host(ty: *mut BufferType, size: usize) -> *mut Buffer {
    let sim = sim();
    let locked = sim.count(Call::AllocHostBuffer) == Effect::Usual;
    let Some(address) = sim.memory.alloc_locked(size) else {
        return null_mut();
    };
    if !locked {
        sim.memory.unlock(address);
    }
    let buffer = sim.ggml.cpu_buffer(address as *mut c_void, size);
    // SAFETY: a new buffer, whose base is its context.
    unsafe {
        (*buffer).buffer_type = ty;
        (*buffer).interface.free = host_buffer_free;
    }
    buffer
}

extern "C" fn host_buffer_free(buffer: *mut Buffer) {
    // SAFETY: a buffer of `alloc_host`.
    let (address, size) = unsafe { ((*buffer).context as usize, (*buffer).size) };
    sim().memory.free_locked(address, size);
}

fn block<'a>(buffer: *mut Buffer) -> &'a Block {
    // SAFETY: a buffer of `alloc` that the host did not free.
    unsafe { &*(*buffer).context.cast() }
}

extern "C" fn buffer_free(buffer: *mut Buffer) {
    sim().count(Call::FreeBuffer);
    // SAFETY: the reference that `alloc` gave to the buffer.
    let block: Arc<Block> = unsafe { Arc::from_raw((*buffer).context.cast()) };
    sim().memory.free(&block);
}

extern "C" fn buffer_base(buffer: *mut Buffer) -> *mut c_void {
    block(buffer).seen as *mut c_void
}

extern "C" fn memset(_: *mut Buffer, tensor: *mut Tensor, value: u8, offset: usize, size: usize) {
    sim().count(Call::MemsetTensor);
    // SAFETY: the host passes a tensor.
    let tensor = unsafe { &*tensor };
    let what = format!("memset of {}", tensor.name());
    let Some((block, at)) = sim().memory.find(tensor.data as usize + offset) else {
        sim().unknown_memory(&what);
        return;
    };
    fill(&block, at, size, value, what, &HostThread::this());
}

/// Clears a buffer after all work of the device, as ggml's CUDA backend does.
extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    sim().count(Call::ClearBuffer);
    let thread = HostThread::this();
    stream::wait_for_all(&thread);
    let block = block(buffer);
    fill(
        block,
        0,
        block.whole().end as usize,
        value,
        "clear of a buffer".into(),
        &thread,
    );
}

fn fill(block: &Block, at: usize, size: usize, value: u8, what: String, thread: &HostThread) {
    let (number, moment) = thread.begin();
    let range = at as u64..(at + size) as u64;
    sim().access(block, range, true, &by(thread, number, what), &moment.clock);
    if let Some(bytes) = block.at(at) {
        // SAFETY: inside of the allocation, as the host promises.
        unsafe { bytes.write_bytes(value, size) };
    }
    thread.end(number, moment.time);
}

extern "C" fn set(
    _: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    sim().count(Call::SetTensor);
    Copy::new(tensor, data, offset, size, Direction::ToDevice).now();
}

extern "C" fn get(
    _: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    sim().count(Call::GetTensor);
    Copy::new(tensor, data, offset, size, Direction::FromDevice).now();
}
