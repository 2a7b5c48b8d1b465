//! NVIDIA GPUs, through the CUDA driver API that is loaded at run time.
//!
//! cudarc loads the driver library and defines its types. This module resolves all functions before
//! it calls the first one, for two reasons. The wrappers of cudarc panic if an old driver lacks a
//! function. They also return a Rust enum, for which the error code of a newer driver can be
//! invalid.
//!
//! All methods can be called from any thread. Each call makes the primary context of the device
//! current. The CUDA runtime API uses the same context, so streams of the program and of this
//! module are interchangeable.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cudarc::driver::sys;
use once_cell::sync::OnceCell;

use super::{AsyncDevice, Buffer, Copy2d, Device, DeviceError, DeviceKind, Event, Memory, Stream};

/// A code of the driver; `CUDA_SUCCESS` is 0.
type Code = c_uint;
const SUCCESS: Code = 0;
const NOT_READY: Code = 600;
const OUT_OF_MEMORY: Code = 2;

macro_rules! driver {
    ($($field:ident: $name:literal = fn($($argument:ty),*);)*) => {
        /// The functions of the driver in use, by their exported names.
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl Driver {
            fn resolve() -> Result<Driver, String> {
                // SAFETY: loading the driver library runs its initialisers only.
                if !unsafe { sys::is_culib_present() } {
                    return Err("no CUDA driver is installed (libcuda.so.1 was not found)".into());
                }
                // SAFETY: it is present. Each name has the type that cuda.h declares it with.
                unsafe {
                    let library = sys::culib();
                    $(let $field = library.get(concat!($name, "\0").as_bytes());)*
                    Ok(Driver {
                        $($field: *$field.map_err(|_| {
                            format!("the CUDA driver is too old, because it lacks {}: update the driver", $name)
                        })?,)*
                    })
                }
            }
        }
    };
}

driver! {
    init: "cuInit" = fn(c_uint);
    error_name: "cuGetErrorName" = fn(Code, *mut *const c_char);
    device_count: "cuDeviceGetCount" = fn(*mut c_int);
    device_get: "cuDeviceGet" = fn(*mut sys::CUdevice, c_int);
    device_name: "cuDeviceGetName" = fn(*mut c_char, c_int, sys::CUdevice);
    context_retain: "cuDevicePrimaryCtxRetain" = fn(*mut sys::CUcontext, sys::CUdevice);
    context_release: "cuDevicePrimaryCtxRelease_v2" = fn(sys::CUdevice);
    context_current: "cuCtxGetCurrent" = fn(*mut sys::CUcontext);
    context_push: "cuCtxPushCurrent_v2" = fn(sys::CUcontext);
    context_pop: "cuCtxPopCurrent_v2" = fn(*mut sys::CUcontext);
    memory_info: "cuMemGetInfo_v2" = fn(*mut usize, *mut usize);
    memory_allocate: "cuMemAlloc_v2" = fn(*mut sys::CUdeviceptr, usize);
    memory_free: "cuMemFree_v2" = fn(sys::CUdeviceptr);
    host_allocate: "cuMemHostAlloc" = fn(*mut *mut c_void, usize, c_uint);
    host_free: "cuMemFreeHost" = fn(*mut c_void);
    host_register: "cuMemHostRegister_v2" = fn(*mut c_void, usize, c_uint);
    host_unregister: "cuMemHostUnregister" = fn(*mut c_void);
    stream_create: "cuStreamCreate" = fn(*mut sys::CUstream, c_uint);
    stream_destroy: "cuStreamDestroy_v2" = fn(sys::CUstream);
    stream_synchronize: "cuStreamSynchronize" = fn(sys::CUstream);
    stream_wait: "cuStreamWaitEvent" = fn(sys::CUstream, sys::CUevent, c_uint);
    event_create: "cuEventCreate" = fn(*mut sys::CUevent, c_uint);
    event_destroy: "cuEventDestroy_v2" = fn(sys::CUevent);
    event_record: "cuEventRecord" = fn(sys::CUevent, sys::CUstream);
    event_query: "cuEventQuery" = fn(sys::CUevent);
    event_elapsed: "cuEventElapsedTime" = fn(*mut f32, sys::CUevent, sys::CUevent);
    copy_in: "cuMemcpyHtoD_v2" = fn(sys::CUdeviceptr, *const c_void, usize);
    copy_out: "cuMemcpyDtoH_v2" = fn(*mut c_void, sys::CUdeviceptr, usize);
    copy_in_async: "cuMemcpyHtoDAsync_v2" = fn(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    copy_2d_async: "cuMemcpy2DAsync_v2" = fn(*const sys::CUDA_MEMCPY2D, sys::CUstream);
}

impl Driver {
    /// Returns the initialised driver, or why there is none. The driver is loaded once.
    fn get() -> Result<&'static Driver, &'static str> {
        static DRIVER: OnceCell<Result<Driver, String>> = OnceCell::new();
        let driver = DRIVER.get_or_init(|| {
            let driver = Driver::resolve()?;
            // SAFETY: cuInit takes 0 and can be called at any time.
            match unsafe { (driver.init)(0) } {
                SUCCESS => Ok(driver),
                code => Err(format!("cuInit: {}", driver.describe(code))),
            }
        });
        driver.as_ref().map_err(String::as_str)
    }

    /// Returns the name of an error code.
    fn describe(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the driver sets the pointer to a static string, or leaves it.
        let known = unsafe { (self.error_name)(code, &mut name) } == SUCCESS && !name.is_null();
        if !known {
            return format!("error {code}");
        }
        // SAFETY: a static string of the driver.
        let name = unsafe { CStr::from_ptr(name) };
        format!("{} ({code})", name.to_string_lossy())
    }
}

/// Returns the number of CUDA devices, or why none can be used.
pub fn device_count() -> Result<usize, DeviceError> {
    let driver = Driver::get().map_err(|reason| failed("cuda", "be used", reason))?;
    let mut count = 0;
    // SAFETY: the driver writes a number.
    match unsafe { (driver.device_count)(&mut count) } {
        SUCCESS => Ok(count.max(0) as usize),
        code => Err(failed("cuda", "count devices", &driver.describe(code))),
    }
}

fn failed(device: &str, action: &'static str, reason: &str) -> DeviceError {
    DeviceError::Failed {
        device: device.into(),
        action,
        reason: reason.into(),
    }
}

/// An NVIDIA GPU.
pub struct CudaDevice {
    driver: &'static Driver,
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    used: AtomicU64,
    peak: AtomicU64,
    allocations: AtomicU64,
}

// SAFETY: the context is only handed to the driver, which can be called from any thread.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.name).finish()
    }
}

impl CudaDevice {
    /// Opens the device with this ordinal, after `CUDA_VISIBLE_DEVICES`.
    pub fn open(index: usize) -> Result<Arc<CudaDevice>, DeviceError> {
        let count = device_count()?;
        let unnamed = format!("cuda{index}");
        if index >= count {
            let reason = format!("there are {count} CUDA devices");
            return Err(failed(&unnamed, "be opened", &reason));
        }
        let driver = Driver::get().map_err(|reason| failed(&unnamed, "be used", reason))?;
        let checked = |action, code| match code {
            SUCCESS => Ok(()),
            code => Err(failed(&unnamed, action, &driver.describe(code))),
        };
        let (mut device, mut context) = (0, std::ptr::null_mut());
        let mut name = [0u8; 128];
        // SAFETY: the driver writes a device, a name with its NUL of at most the
        // given length, and a context.
        unsafe {
            checked(
                "be opened: cuDeviceGet",
                (driver.device_get)(&mut device, index as c_int),
            )?;
            let (text, len) = (name.as_mut_ptr().cast(), name.len() as c_int);
            checked(
                "be named: cuDeviceGetName",
                (driver.device_name)(text, len, device),
            )?;
            checked(
                "be used: cuDevicePrimaryCtxRetain",
                (driver.context_retain)(&mut context, device),
            )?;
        }
        let model = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(Arc::new(CudaDevice {
            driver,
            device,
            context,
            name: format!("cuda{index} ({})", model.to_string_lossy()),
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
        }))
    }

    /// Makes one call with the context of this device current, and restores the previous context of
    /// the thread.
    fn code(&self, call: impl FnOnce(&Driver) -> Code) -> Code {
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver writes a context; that of this device lives as long as `self`.
        unsafe {
            let code = (self.driver.context_current)(&mut current);
            if code == SUCCESS && current == self.context {
                return call(self.driver);
            }
            let code = (self.driver.context_push)(self.context);
            if code != SUCCESS {
                return code;
            }
            let code = call(self.driver);
            (self.driver.context_pop)(&mut current);
            code
        }
    }

    fn call(
        &self,
        action: &'static str,
        call: impl FnOnce(&Driver) -> Code,
    ) -> Result<(), DeviceError> {
        match self.code(call) {
            SUCCESS => Ok(()),
            code => Err(failed(&self.name, action, &self.driver.describe(code))),
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn memory(&self) -> Memory {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers. When it fails, they say that there is none.
        let _ = self.call("report its memory: cuMemGetInfo", |driver| unsafe {
            (driver.memory_info)(&mut free, &mut total)
        });
        Memory {
            total: total as u64,
            free: free as u64,
            used: self.used.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
            allocations: self.allocations.load(Ordering::Relaxed),
        }
    }

    fn allocate(self: Arc<Self>, len: u64) -> Result<Box<dyn Buffer>, DeviceError> {
        let mut address = 0;
        // The driver refuses 0 bytes.
        let room = usize::try_from(len.max(1)).unwrap_or(usize::MAX);
        // SAFETY: the driver writes an address.
        let code = self.code(|driver| unsafe { (driver.memory_allocate)(&mut address, room) });
        match code {
            SUCCESS => {}
            OUT_OF_MEMORY => {
                return Err(DeviceError::OutOfMemory {
                    device: self.name.clone(),
                    requested: len,
                    free: self.memory().free,
                });
            }
            code => {
                let reason = self.driver.describe(code);
                return Err(failed(&self.name, "allocate: cuMemAlloc", &reason));
            }
        }
        let before = self.used.fetch_add(len, Ordering::Relaxed);
        self.peak.fetch_max(before + len, Ordering::Relaxed);
        self.allocations.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(CudaBuffer {
            device: self,
            address,
            len,
        }))
    }
}

impl AsyncDevice for CudaDevice {
    fn create_stream(&self) -> Result<Stream, DeviceError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the driver writes a stream.
        self.call("make a stream: cuStreamCreate", |driver| unsafe {
            (driver.stream_create)(&mut stream, flags)
        })?;
        Ok(Stream(stream as u64))
    }

    fn destroy_stream(&self, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: the creator of the stream destroys it once.
        self.call("free a stream: cuStreamDestroy", |driver| unsafe {
            (driver.stream_destroy)(stream.0 as sys::CUstream)
        })
    }

    fn create_event(&self) -> Result<Event, DeviceError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes an event. With timing: see `elapsed`.
        self.call("make an event: cuEventCreate", |driver| unsafe {
            (driver.event_create)(&mut event, 0)
        })?;
        Ok(Event(event as u64))
    }

    fn destroy_event(&self, event: Event) -> Result<(), DeviceError> {
        // SAFETY: the creator of the event destroys it once.
        self.call("free an event: cuEventDestroy", |driver| unsafe {
            (driver.event_destroy)(event.0 as sys::CUevent)
        })
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive, as the trait demands.
        self.call("record an event: cuEventRecord", |driver| unsafe {
            (driver.event_record)(event.0 as sys::CUevent, stream.0 as sys::CUstream)
        })
    }

    fn is_done(&self, event: Event) -> Result<bool, DeviceError> {
        // SAFETY: the event is alive.
        match self.code(|driver| unsafe { (driver.event_query)(event.0 as sys::CUevent) }) {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => {
                let reason = self.driver.describe(code);
                Err(failed(&self.name, "copy: cuEventQuery", &reason))
            }
        }
    }

    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError> {
        // SAFETY: both are alive; there are no flags.
        self.call("wait for an event: cuStreamWaitEvent", |driver| unsafe {
            (driver.stream_wait)(stream.0 as sys::CUstream, event.0 as sys::CUevent, 0)
        })
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, DeviceError> {
        let mut ms = 0f32;
        // SAFETY: both are alive; the driver writes a number.
        self.call("report times: cuEventElapsedTime", |driver| unsafe {
            (driver.event_elapsed)(&mut ms, from.0 as sys::CUevent, to.0 as sys::CUevent)
        })?;
        Ok(Duration::try_from_secs_f32(ms / 1e3).unwrap_or_default())
    }

    unsafe fn copy_in(&self, stream: Stream, copy: Copy2d) -> Result<(), DeviceError> {
        let stream = stream.0 as sys::CUstream;
        if copy.rows == 1 {
            // SAFETY: as the caller guarantees.
            return self.call("copy: cuMemcpyHtoDAsync", |driver| unsafe {
                (driver.copy_in_async)(copy.to, copy.from.cast(), copy.width, stream)
            });
        }
        let rows = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
            srcHost: copy.from.cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: copy.from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: copy.to,
            dstArray: std::ptr::null_mut(),
            dstPitch: copy.to_pitch,
            WidthInBytes: copy.width,
            Height: copy.rows,
        };
        // SAFETY: as the caller guarantees.
        self.call("copy: cuMemcpy2DAsync", |driver| unsafe {
            (driver.copy_2d_async)(&rows, stream)
        })
    }

    fn allocate_pinned(&self, len: usize) -> Result<*mut u8, DeviceError> {
        let mut memory = std::ptr::null_mut();
        // SAFETY: the driver writes an address.
        self.call("page-lock memory: cuMemHostAlloc", |driver| unsafe {
            (driver.host_allocate)(&mut memory, len, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        Ok(memory.cast())
    }

    unsafe fn free_pinned(&self, memory: *mut u8) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        self.call("free page-locked memory: cuMemFreeHost", |driver| unsafe {
            (driver.host_free)(memory.cast())
        })
    }

    unsafe fn lock_pages(&self, start: *const u8, len: usize) -> Result<(), DeviceError> {
        // Mappings of models are read-only, and locking them for writing would be refused.
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_READ_ONLY;
        // SAFETY: as the caller guarantees.
        self.call("page-lock the model: cuMemHostRegister", |driver| unsafe {
            (driver.host_register)(start.cast_mut().cast(), len, flags)
        })
    }

    unsafe fn unlock_pages(&self, start: *const u8) -> Result<(), DeviceError> {
        // SAFETY: as the caller guarantees.
        self.call("unlock pages: cuMemHostUnregister", |driver| unsafe {
            (driver.host_unregister)(start.cast_mut().cast())
        })
    }
}

/// Memory of a GPU.
#[derive(Debug)]
struct CudaBuffer {
    device: Arc<CudaDevice>,
    address: u64,
    len: u64,
}

impl CudaBuffer {
    fn range(&self, offset: u64, len: usize) -> u64 {
        let end = offset.checked_add(len as u64);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} of a buffer of {}",
            self.len
        );
        self.address + offset
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once. A failure leaves nothing to do.
        let _ = self.device.call("free: cuMemFree", |driver| unsafe {
            (driver.memory_free)(self.address)
        });
        self.device.used.fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl Buffer for CudaBuffer {
    fn len(&self) -> u64 {
        self.len
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn host_mut(&mut self) -> Option<&mut [u8]> {
        None
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let to = self.range(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        let (from, len) = (bytes.as_ptr().cast(), bytes.len());
        // SAFETY: the range is inside the buffer, and `bytes` can be read.
        let copy = |driver: &Driver| unsafe { (driver.copy_in)(to, from, len) };
        self.device.call("copy to it: cuMemcpyHtoD", copy)?;
        // From pageable memory the call returns when the bytes are staged (CUDA driver manual,
        // "API synchronization behavior"): other streams could still read what was there before.
        // SAFETY: NULL is the stream that the copy ran on.
        let wait = |driver: &Driver| unsafe { (driver.stream_synchronize)(std::ptr::null_mut()) };
        self.device.call("copy to it: cuStreamSynchronize", wait)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.range(offset, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is inside the buffer, and `bytes` can be written.
        self.device
            .call("copy from it: cuMemcpyDtoH", |driver| unsafe {
                (driver.copy_out)(bytes.as_mut_ptr().cast(), from, bytes.len())
            })
    }
}
