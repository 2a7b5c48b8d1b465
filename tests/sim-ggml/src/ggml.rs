//! ggml as the host has it: its structs, and the functions that are called of it.
//!
//! The structs of backends are private to ggml. Those below are the same in the versions 2 and
//! 3 of its interface, apart from the table of a buffer type.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;

/// `struct ggml_tensor`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub ty: c_int,
    pub buffer: *mut Buffer,
    pub ne: [i64; 4],
    pub nb: [usize; 4],
    pub op: c_int,
    pub op_params: [i32; 16],
    pub flags: i32,
    pub src: [*mut Tensor; 10],
    pub view_src: *mut Tensor,
    pub view_offs: usize,
    pub data: *mut c_void,
    pub name: [c_char; 64],
    pub extra: *mut c_void,
    padding: [u8; 8],
}

/// `GGML_TYPE_I32`.
pub const I32: c_int = 26;
/// `GGML_TENSOR_FLAG_COMPUTE`.
pub const COMPUTE: i32 = 16;
/// `GGML_STATUS_SUCCESS` and `GGML_STATUS_FAILED`.
pub const SUCCESS: c_int = 0;
pub const FAILED: c_int = -1;
/// Values of `enum ggml_backend_dev_type`.
const CPU: c_int = 0;
pub const GPU: c_int = 1;

impl Tensor {
    pub fn name(&self) -> String {
        let bytes: Vec<u8> = self.name.iter().map(|&byte| byte as u8).collect();
        let end = bytes.iter().position(|&byte| byte == 0);
        String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
    }

    pub fn elements(&self) -> i64 {
        self.ne.iter().product()
    }
}

/// Where a graph has its identifier, the last field of `struct ggml_cgraph`, if it has one.
const GRAPH_IDENTIFIER: usize = 88;

/// A graph, which only ggml looks into.
pub enum Graph {}
/// A context of ggml, which only ggml looks into.
pub enum Context {}
/// A buffer type: a table of pointers whose length depends on the version.
pub type BufferType = [*const c_void; 10];

type Init = extern "C" fn(*mut Device, *const c_char) -> *mut Backend;
type Set = extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize);
type Get = extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize);
type SetAsync = extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize);
type GetAsync = extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize);
type CopyAsync = extern "C" fn(*mut Backend, *mut Backend, *const Tensor, *mut Tensor) -> bool;
/// A function that this backend leaves out.
type Absent = Option<extern "C" fn()>;

/// `struct ggml_backend_buffer_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BufferInterface {
    pub free: extern "C" fn(*mut Buffer),
    pub base: extern "C" fn(*mut Buffer) -> *mut c_void,
    pub init_tensor: Absent,
    pub memset: extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize),
    pub set: Set,
    pub get: Get,
    pub set_2d: Absent,
    pub get_2d: Absent,
    pub copy: Absent,
    pub clear: extern "C" fn(*mut Buffer, u8),
    pub reset: Absent,
}

/// `struct ggml_backend_buffer`.
#[repr(C)]
pub struct Buffer {
    pub interface: BufferInterface,
    pub buffer_type: *mut BufferType,
    pub context: *mut c_void,
    pub size: usize,
    pub usage: c_int,
}

/// `struct ggml_backend_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BackendInterface {
    pub name: extern "C" fn(*mut Backend) -> *const c_char,
    pub free: extern "C" fn(*mut Backend),
    pub set_async: Option<SetAsync>,
    pub get_async: Option<GetAsync>,
    pub set_2d_async: Absent,
    pub get_2d_async: Absent,
    pub copy_async: Option<CopyAsync>,
    pub synchronize: Option<extern "C" fn(*mut Backend)>,
    pub plans: [Absent; 4],
    pub compute: extern "C" fn(*mut Backend, *mut Graph) -> c_int,
    pub event_record: Option<extern "C" fn(*mut Backend, *mut Event)>,
    pub event_wait: Option<extern "C" fn(*mut Backend, *mut Event)>,
    pub optimize: Absent,
}

/// `struct ggml_backend`.
#[repr(C)]
pub struct Backend {
    pub guid: *const [u8; 16],
    pub interface: BackendInterface,
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `struct ggml_backend_event`.
#[repr(C)]
pub struct Event {
    pub device: *mut Device,
    pub context: *mut c_void,
}

/// `struct ggml_backend_dev_props`.
#[repr(C)]
pub struct Properties {
    pub name: *const c_char,
    pub description: *const c_char,
    pub memory_free: usize,
    pub memory_total: usize,
    pub ty: c_int,
    pub id: *const c_char,
    pub asynchronous: bool,
    pub host_buffer: bool,
    pub buffer_from_host_ptr: bool,
    pub events: bool,
    /// Padding in earlier versions.
    pub mmap: bool,
}

/// `struct ggml_backend_device_i`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceInterface {
    pub name: extern "C" fn(*mut Device) -> *const c_char,
    pub description: extern "C" fn(*mut Device) -> *const c_char,
    pub memory: extern "C" fn(*mut Device, *mut usize, *mut usize),
    pub ty: extern "C" fn(*mut Device) -> c_int,
    pub properties: extern "C" fn(*mut Device, *mut Properties),
    pub init: Init,
    pub buffer_type: extern "C" fn(*mut Device) -> *mut BufferType,
    pub host_buffer_type: Option<extern "C" fn(*mut Device) -> *mut BufferType>,
    pub buffer_from_host_ptr: Absent,
    pub supports_op: extern "C" fn(*mut Device, *const Tensor) -> bool,
    pub supports_buffer_type: extern "C" fn(*mut Device, *mut BufferType) -> bool,
    pub offload_op: Option<extern "C" fn(*mut Device, *const Tensor) -> bool>,
    pub event_new: Option<extern "C" fn(*mut Device) -> *mut Event>,
    pub event_free: Option<extern "C" fn(*mut Device, *mut Event)>,
    pub event_synchronize: Option<extern "C" fn(*mut Device, *mut Event)>,
}

/// `struct ggml_backend_device`.
#[repr(C)]
pub struct Device {
    pub interface: DeviceInterface,
    pub registry: *mut Registry,
    pub context: *mut c_void,
}

/// `struct ggml_backend_reg`.
#[repr(C)]
pub struct Registry {
    pub version: c_int,
    pub name: extern "C" fn(*mut Registry) -> *const c_char,
    pub device_count: extern "C" fn(*mut Registry) -> usize,
    pub device: extern "C" fn(*mut Registry, usize) -> *mut Device,
    pub function: Option<extern "C" fn(*mut Registry, *const c_char) -> *mut c_void>,
    pub context: *mut c_void,
}

/// `struct ggml_init_params`.
#[repr(C)]
struct InitParams {
    size: usize,
    memory: *mut c_void,
    no_alloc: bool,
}

/// Numbers of operations, which change from version to version.
#[derive(Debug)]
pub struct Operations {
    pub none: c_int,
    pub views: [c_int; 4],
    pub mul_mat: c_int,
    pub mul_mat_id: c_int,
    pub get_rows: c_int,
    pub set_rows: c_int,
    pub argsort: c_int,
    pub flash_attention: c_int,
}

impl Operations {
    /// Whether an operation moves no bytes.
    pub fn only_names(&self, op: c_int) -> bool {
        op == self.none || self.views.contains(&op)
    }
}

/// The functions of the host's ggml.
pub struct Ggml {
    /// The version of the interface of backends.
    pub version: c_int,
    pub operations: Operations,
    /// The host's own CPU device.
    cpu: *mut Device,
    /// Its function that starts a backend.
    cpu_init: Init,
    nbytes: extern "C" fn(*const Tensor) -> usize,
    buffer_init: extern "C" fn(*mut BufferType, BufferInterface, *mut c_void, usize) -> *mut Buffer,
    buffer_from_ptr: extern "C" fn(*mut c_void, usize) -> *mut Buffer,
    graph_n_nodes: extern "C" fn(*mut Graph) -> c_int,
    graph_node: extern "C" fn(*mut Graph, c_int) -> *mut Tensor,
    graph_overhead: extern "C" fn(usize, bool) -> usize,
    new_graph: extern "C" fn(*mut Context, usize, bool) -> *mut Graph,
    graph_add_node: extern "C" fn(*mut Graph, *mut Tensor),
    init: extern "C" fn(InitParams) -> *mut Context,
    free: extern "C" fn(*mut Context),
    /// Whether its graphs have identifiers.
    graphs_have_identifiers: bool,
}

// SAFETY: pointers to functions, and to the CPU device, which ggml never frees.
unsafe impl Send for Ggml {}
// SAFETY: as above; the functions may be called by any thread.
unsafe impl Sync for Ggml {}

/// Libraries of ggml that the process has loaded, wherever their names are visible.
struct Loaded(Vec<*mut c_void>);

impl Loaded {
    fn find() -> Loaded {
        extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
            // SAFETY: the loader's entry, which has a name, and the vector passed below.
            let (name, names) = unsafe {
                let name = CStr::from_ptr((*info).dlpi_name).to_owned();
                (name, &mut *names.cast::<Vec<CString>>())
            };
            let path = name.to_string_lossy();
            let file = path.rsplit('/').next().unwrap_or_default();
            if file.starts_with("libggml") {
                names.push(name.clone());
            }
            0
        }
        let mut names: Vec<CString> = Vec::new();
        // SAFETY: the callback has the type that the loader calls it with.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut names).cast()) };
        // The process itself, for a host with ggml inside.
        let mut handles: Vec<*mut c_void> = Vec::new();
        for name in names {
            // SAFETY: increments the count of a loaded library.
            handles
                .push(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) });
        }
        handles.push(libc::RTLD_DEFAULT);
        Loaded(handles)
    }

    /// Returns a function, past what a preloaded library interposes.
    ///
    /// # Safety
    ///
    /// `Function` is a pointer to a function of the type that ggml declares for this name.
    unsafe fn symbol<Function: Copy>(&self, name: &str) -> Result<Function, String> {
        const { assert!(size_of::<Function>() == size_of::<*mut c_void>()) };
        let symbol = CString::new(name).expect("no NUL in a name");
        let mut found = self.0.iter().map(|&handle| {
            // SAFETY: looks a name up.
            unsafe { libc::dlsym(handle, symbol.as_ptr()) }
        });
        match found.find(|address| !address.is_null()) {
            // SAFETY: both are pointers, and the caller promises the type.
            Some(address) => Ok(unsafe { std::mem::transmute_copy(&address) }),
            None => Err(format!(
                "the process has no {name}; load ggml before this backend"
            )),
        }
    }
}

impl Ggml {
    /// Finds the functions; an error states what is missing.
    pub fn of_process() -> Result<Ggml, String> {
        let loaded = Loaded::find();
        // SAFETY: the type of `ggml_backend_dev_by_type`.
        let by_type: extern "C" fn(c_int) -> *mut Device =
            unsafe { loaded.symbol("ggml_backend_dev_by_type")? };
        let cpu = by_type(CPU);
        if cpu.is_null() {
            return Err("the host has no CPU backend; load it before this backend".into());
        }
        // SAFETY: a registered device has its registry.
        let (version, cpu_init) = unsafe { ((*(*cpu).registry).version, (*cpu).interface.init) };
        if !matches!(version, 2 | 3) {
            return Err(format!(
                "the host has version {version} of the interface of backends; use one with 2 or 3"
            ));
        }
        // SAFETY: the fields have the types of these functions.
        let mut ggml = unsafe {
            Ggml {
                version,
                operations: operations(loaded.symbol("ggml_op_name")?)?,
                cpu,
                cpu_init,
                nbytes: loaded.symbol("ggml_nbytes")?,
                buffer_init: loaded.symbol("ggml_backend_buffer_init")?,
                buffer_from_ptr: loaded.symbol("ggml_backend_cpu_buffer_from_ptr")?,
                graph_n_nodes: loaded.symbol("ggml_graph_n_nodes")?,
                graph_node: loaded.symbol("ggml_graph_node")?,
                graph_overhead: loaded.symbol("ggml_graph_overhead_custom")?,
                new_graph: loaded.symbol("ggml_new_graph_custom")?,
                graph_add_node: loaded.symbol("ggml_graph_add_node")?,
                init: loaded.symbol("ggml_init")?,
                free: loaded.symbol("ggml_free")?,
                graphs_have_identifiers: false,
            }
        };
        ggml.graphs_have_identifiers = ggml.size_of_graph() == GRAPH_IDENTIFIER + 8;
        Ok(ggml)
    }

    /// Returns the size of a graph's struct, which its nodes follow.
    fn size_of_graph(&self) -> usize {
        let (context, graph) = self.graph(1);
        // SAFETY: a new graph; the pointer follows the three numbers of the struct.
        let nodes = unsafe { graph.cast::<usize>().add(2).read() };
        (self.free)(context);
        nodes - graph as usize
    }

    /// Makes a graph without nodes.
    fn graph(&self, size: usize) -> (*mut Context, *mut Graph) {
        let context = (self.init)(InitParams {
            size: (self.graph_overhead)(size, false) + 4096,
            memory: null_mut(),
            no_alloc: true,
        });
        (context, (self.new_graph)(context, size, false))
    }

    /// Returns a table of a buffer type.
    pub fn buffer_type(
        &self,
        name: extern "C" fn(*mut BufferType) -> *const c_char,
        alloc: extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
        alignment: extern "C" fn(*mut BufferType) -> usize,
        is_host: extern "C" fn(*mut BufferType) -> bool,
        device: *mut Device,
    ) -> BufferType {
        let absent = std::ptr::null();
        let (name, alloc) = (name as *const c_void, alloc as *const c_void);
        let (alignment, is_host) = (alignment as *const c_void, is_host as *const c_void);
        let mut table = vec![name, alloc];
        // alloc_buffer_n
        table.extend((self.version >= 3).then_some(absent));
        // then get_max_size and get_alloc_size
        table.extend([alignment, absent, absent]);
        // get_alloc_size_n
        table.extend((self.version >= 3).then_some(absent));
        // then the context
        table.extend([is_host, device.cast_const().cast(), absent]);
        table.resize(10, absent);
        table.try_into().expect("ten pointers")
    }

    /// Returns the bytes that a tensor takes.
    pub fn nbytes(&self, tensor: &Tensor) -> usize {
        (self.nbytes)(tensor)
    }

    /// Returns a buffer of the host.
    pub fn new_buffer(
        &self,
        ty: *mut BufferType,
        interface: BufferInterface,
        context: *mut c_void,
        size: usize,
    ) -> *mut Buffer {
        (self.buffer_init)(ty, interface, context, size)
    }

    /// Returns a buffer of the CPU's functions over memory that it does not free.
    pub fn cpu_buffer(&self, memory: *mut c_void, size: usize) -> *mut Buffer {
        (self.buffer_from_ptr)(memory, size)
    }

    /// Returns the host's identifier of a graph; 0 where it has none.
    pub fn graph_identifier(&self, graph: *mut Graph) -> u64 {
        if !self.graphs_have_identifiers {
            return 0;
        }
        // SAFETY: the last field of the struct.
        unsafe {
            graph
                .cast::<u8>()
                .add(GRAPH_IDENTIFIER)
                .cast::<u64>()
                .read()
        }
    }

    /// Returns the nodes of a graph.
    pub fn nodes(&self, graph: *mut Graph) -> Vec<*mut Tensor> {
        let count = (self.graph_n_nodes)(graph);
        (0..count)
            .map(|index| (self.graph_node)(graph, index))
            .collect()
    }

    /// Whether the CPU computes an operation.
    pub fn cpu_supports(&self, tensor: *const Tensor) -> bool {
        // SAFETY: the device is registered, and stays.
        unsafe { ((*self.cpu).interface.supports_op)(self.cpu, tensor) }
    }

    /// Starts a CPU backend for the host.
    pub fn init_cpu(&self, device: *mut Device, settings: *const c_char) -> *mut Backend {
        (self.cpu_init)(device, settings)
    }

    /// Replaces the function that starts CPU backends for the host.
    pub fn replace_cpu_init(&self, by: Init) {
        // SAFETY: the table of the device is ordinary memory; the host starts no backend while
        // it loads this one.
        unsafe { (*self.cpu).interface.init = by };
    }

    /// Returns a new CPU backend with so many threads.
    ///
    /// It is called past ggml's exported functions, which a preloaded library may interpose.
    pub fn new_cpu(&self, threads: c_int) -> *mut Backend {
        // SAFETY: the device and its registry stay; the function has the type that ggml
        // declares for its name.
        unsafe {
            let cpu = (self.cpu_init)(self.cpu, std::ptr::null());
            assert!(!cpu.is_null(), "the CPU backend starts");
            let registry = (*self.cpu).registry;
            let function = (*registry).function.map_or(null_mut(), |function| {
                function(registry, c"ggml_backend_set_n_threads".as_ptr())
            });
            if !function.is_null() {
                type SetThreads = extern "C" fn(*mut Backend, c_int);
                std::mem::transmute::<*mut c_void, SetThreads>(function)(cpu, threads);
            }
            cpu
        }
    }

    /// Computes nodes on a CPU backend.
    pub fn compute(&self, cpu: *mut Backend, nodes: &[*mut Tensor]) {
        let (context, graph) = self.graph(nodes.len() + 1);
        for &node in nodes {
            (self.graph_add_node)(graph, node);
        }
        // SAFETY: a backend of `new_cpu`.
        let status = unsafe { ((*cpu).interface.compute)(cpu, graph) };
        assert_eq!(status, SUCCESS, "kernels of the CPU backend");
        (self.free)(context);
    }
}

fn operations(name: extern "C" fn(c_int) -> *const c_char) -> Result<Operations, String> {
    // All that are looked for are among the first in each version.
    let name_of = |op| {
        // SAFETY: ggml's table has more entries than are looked at.
        let name = unsafe { CStr::from_ptr(name(op)) };
        name.to_string_lossy().into_owned()
    };
    let names: Vec<String> = (0..80).map(name_of).collect();
    let number = |wanted: &str| {
        let found = names.iter().position(|name| name == wanted);
        let found = found.map(|number| number as c_int);
        found.ok_or_else(|| format!("the host's ggml has no operation {wanted}"))
    };
    Ok(Operations {
        none: number("NONE")?,
        views: [
            number("VIEW")?,
            number("RESHAPE")?,
            number("PERMUTE")?,
            number("TRANSPOSE")?,
        ],
        mul_mat: number("MUL_MAT")?,
        mul_mat_id: number("MUL_MAT_ID")?,
        get_rows: number("GET_ROWS")?,
        set_rows: number("SET_ROWS")?,
        argsort: number("ARGSORT")?,
        flash_attention: number("FLASH_ATTN_EXT")?,
    })
}
