//! The functions of cuda.h.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::order::{Accesses, Clock};
use crate::state::{
    Code, Copy, Event, Pinned, SIM, Sim, Stream, Work, code, lock, move_bytes, work,
};

/// The first context is this, the next ones follow.
const CONTEXT: usize = 0xc0de_0001;

/// The polls of a thread: the event that it waits for since a moment, and the time of all waits.
#[derive(Default)]
pub struct Polled {
    waits: Option<(u64, Instant)>,
    pub time: Duration,
}

impl Polled {
    fn note(&mut self, event: u64, done: bool, now: Instant) {
        let since = self.waits.filter(|waits| waits.0 == event);
        match (done, since) {
            (false, None) => self.waits = Some((event, now)),
            (true, Some((_, since))) => {
                self.time += now - since;
                self.waits = None;
            }
            _ => {}
        }
    }
}

thread_local! {
    pub static POLLED: RefCell<Polled> = RefCell::default();
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Begins a call: counts it, fails it if it is to fail.
fn enter(name: &'static str) -> Result<MutexGuard<'static, Sim>, Code> {
    let mut sim = lock();
    sim.count(name)?;
    Ok(sim)
}

/// Begins a call that needs a current context; the device of that, too.
fn enter_device(name: &'static str) -> Result<(MutexGuard<'static, Sim>, usize), Code> {
    let mut sim = enter(name)?;
    let current = CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0));
    if current < CONTEXT {
        sim.problem(format!("{name} without a current context"));
        return Err(code::INVALID_CONTEXT);
    }
    let device = (current - CONTEXT) / 16;
    if sim.contexts.get(&device).copied().unwrap_or(0) < 1 {
        sim.problem(format!("{name} with a context that was released"));
        return Err(code::INVALID_CONTEXT);
    }
    Ok((sim, device))
}

fn finish(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(code::SUCCESS)
}

macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> Code {
            let body = || -> Result<(), Code> { $body };
            finish(body())
        }
    )*};
}

/// An event that exists.
fn event<'a>(sim: &'a mut Sim, id: u64, who: &str) -> Result<&'a mut Event, Code> {
    if sim.events.get(&id).is_none_or(|event| event.destroyed) {
        sim.problem(format!("{who} with event {id:x}, which does not exist"));
        return Err(code::INVALID_HANDLE);
    }
    Ok(sim.events.get_mut(&id).expect("just seen"))
}

/// A copy that its caller waits for.
fn copy_now(name: &'static str, copy: Copy) -> Result<(), Code> {
    let (mut sim, _) = enter_device(name)?;
    let range = copy.device_range();
    if sim.allocation(&range).is_none() {
        sim.problem(format!("{name} of {range:x?}, which is not allocated"));
        return Err(code::INVALID_VALUE);
    }
    // Non-blocking streams do not wait for it, nor it for them.
    let seen = sim.seen.clone();
    sim.access(range, 0, 0, copy.to_device, &seen);
    sim.seen.note(0, 0);
    move_bytes(&mut sim, &copy);
    Ok(())
}

/// A copy on a stream. From pageable memory, its caller waits for it.
fn copy_later(name: &'static str, stream: u64, copy: Copy) -> Result<(), Code> {
    let (mut sim, device) = enter_device(name)?;
    if sim
        .streams
        .get(&stream)
        .is_some_and(|found| found.device != device)
    {
        sim.problem(format!("{name} on a stream of another device"));
        return Err(code::INVALID_HANDLE);
    }
    let number = sim.enqueue_copy(stream, copy)?;
    if sim.pinned(&copy.host_range()).is_none() {
        while !sim.lost
            && sim
                .streams
                .get(&stream)
                .is_some_and(|found| found.done < number)
        {
            sim = SIM
                .changed
                .wait(sim)
                .unwrap_or_else(|poison| poison.into_inner());
        }
    }
    Ok(())
}

fn copy(device: u64, host: usize, len: usize, to_device: bool) -> Copy {
    Copy {
        device_address: device,
        device_pitch: len,
        host,
        host_pitch: len,
        width: len,
        rows: 1,
        to_device,
        pageable: false,
    }
}

/// `CUDA_MEMCPY2D` of cuda.h.
#[repr(C)]
#[derive(Debug)]
pub struct Memcpy2D {
    src_x: usize,
    src_y: usize,
    src_type: c_uint,
    src_host: *const c_void,
    src_device: u64,
    src_array: *const c_void,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_type: c_uint,
    dst_host: *mut c_void,
    dst_device: u64,
    dst_array: *const c_void,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

extern "C" fn at_exit() {
    let findings = lock().findings();
    for finding in &findings {
        eprintln!("sim-cuda: {finding}");
    }
    if !findings.is_empty() {
        // SAFETY: ends the process; the handlers that ran before had their turn.
        unsafe { libc::_exit(97) };
    }
}

exports! {
    /// See the CUDA driver manual, also for the others.
    fn cuInit(flags: c_uint) {
        static STRICT: AtomicBool = AtomicBool::new(false);
        drop(enter("cuInit")?);
        let strict = std::env::var("SIM_CUDA_STRICT").is_ok_and(|value| value == "1");
        if strict && !STRICT.swap(true, Ordering::Relaxed) {
            // SAFETY: a function of this library, which is never unloaded.
            unsafe { libc::atexit(at_exit) };
        }
        if flags == 0 { Ok(()) } else { Err(code::INVALID_VALUE) }
    }

    /// Names a code.
    fn cuGetErrorName(number: Code, name: *mut *const c_char) {
        drop(enter("cuGetErrorName")?);
        let text = match number {
            code::SUCCESS => c"CUDA_SUCCESS",
            code::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            code::INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
            code::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            code::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
            code::NOT_READY => c"CUDA_ERROR_NOT_READY",
            code::LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
            code::NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
            _ => return Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's pointer.
        unsafe { name.write(text.as_ptr()) };
        Ok(())
    }

    /// Counts devices.
    fn cuDeviceGetCount(count: *mut c_int) {
        let sim = enter("cuDeviceGetCount")?;
        // SAFETY: the caller's pointer.
        unsafe { count.write(sim.config.devices as c_int) };
        Ok(())
    }

    /// Opens a device.
    fn cuDeviceGet(device: *mut c_int, index: c_int) {
        let sim = enter("cuDeviceGet")?;
        if index < 0 || index as u64 >= sim.config.devices {
            return Err(code::INVALID_DEVICE);
        }
        // SAFETY: the caller's pointer.
        unsafe { device.write(index) };
        Ok(())
    }

    /// Names a device.
    fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) {
        drop(enter("cuDeviceGetName")?);
        let text = b"simulated GPU\0";
        if (len as usize) < text.len() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's buffer holds `len` bytes.
        unsafe { name.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
        Ok(())
    }

    /// Retains the primary context.
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        let mut sim = enter("cuDevicePrimaryCtxRetain")?;
        *sim.contexts.entry(device as usize).or_default() += 1;
        // SAFETY: the caller's pointer.
        unsafe { context.write(CONTEXT + device as usize * 16) };
        Ok(())
    }

    /// Releases it.
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut sim = enter("cuDevicePrimaryCtxRelease_v2")?;
        let count = sim.contexts.entry(device as usize).or_default();
        *count -= 1;
        if *count < 0 {
            sim.problem("a context released too often".into());
        }
        Ok(())
    }

    /// The current context of the thread.
    fn cuCtxGetCurrent(context: *mut usize) {
        drop(enter("cuCtxGetCurrent")?);
        let top = CONTEXTS.with_borrow(|stack| stack.last().copied().unwrap_or(0));
        // SAFETY: the caller's pointer.
        unsafe { context.write(top) };
        Ok(())
    }

    /// Makes a context current.
    fn cuCtxPushCurrent_v2(context: usize) {
        drop(enter("cuCtxPushCurrent_v2")?);
        CONTEXTS.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    /// Makes the one before it current again.
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        drop(enter("cuCtxPopCurrent_v2")?);
        let top = CONTEXTS.with_borrow_mut(|stack| stack.pop());
        // SAFETY: the caller's pointer.
        unsafe { context.write(top.ok_or(code::INVALID_CONTEXT)?) };
        Ok(())
    }

    /// Returns free and total memory.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let (sim, device) = enter_device("cuMemGetInfo_v2")?;
        let here = sim.allocations.values().filter(|a| a.device == device);
        let used: usize = here.map(|allocation| allocation.bytes.len()).sum();
        // SAFETY: the caller's pointers.
        unsafe {
            free.write(sim.config.memory as usize - used);
            total.write(sim.config.memory as usize);
        }
        Ok(())
    }

    /// Allocates.
    fn cuMemAlloc_v2(address: *mut u64, len: usize) {
        let (mut sim, device) = enter_device("cuMemAlloc_v2")?;
        if len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let found = sim.allocate(device, len)?;
        // SAFETY: the caller's pointer.
        unsafe { address.write(found) };
        Ok(())
    }

    /// Frees.
    fn cuMemFree_v2(address: u64) {
        let (mut sim, _) = enter_device("cuMemFree_v2")?;
        let Some(allocation) = sim.allocations.remove(&address) else {
            sim.problem(format!("{address:x} freed twice, or never allocated"));
            return Err(code::INVALID_VALUE);
        };
        let all = 0..u64::MAX;
        if let Some(access) = allocation.accesses.race(&all, true, &sim.seen).cloned() {
            sim.problem(format!("{address:x} freed before {access:x?} was seen to end"));
        }
        Ok(())
    }

    /// Allocates page-locked memory.
    fn cuMemHostAlloc(memory: *mut *mut c_void, len: usize, _flags: c_uint) {
        let (mut sim, _) = enter_device("cuMemHostAlloc")?;
        // SAFETY: maps fresh pages.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if pages == libc::MAP_FAILED {
            return Err(code::OUT_OF_MEMORY);
        }
        let pinned = Pinned { len, ours: true, sources: Accesses::default() };
        sim.pinned.insert(pages as usize, pinned);
        // SAFETY: the caller's pointer.
        unsafe { memory.write(pages) };
        Ok(())
    }

    /// Frees it.
    fn cuMemFreeHost(memory: *mut c_void) {
        let (mut sim, _) = enter_device("cuMemFreeHost")?;
        let pinned = unpin(&mut sim, memory as usize, true)?;
        // SAFETY: mapped by cuMemHostAlloc. The pages stay reserved, so a late use is seen.
        unsafe { libc::mprotect(memory, pinned.len, libc::PROT_NONE) };
        Ok(())
    }

    /// Page-locks memory of the process.
    fn cuMemHostRegister_v2(memory: *mut c_void, len: usize, _flags: c_uint) {
        let (mut sim, _) = enter_device("cuMemHostRegister_v2")?;
        if !sim.config.registers {
            return Err(code::NOT_SUPPORTED);
        }
        let (start, end) = (memory as usize, memory as usize + len);
        let taken = |(&at, pinned): (&usize, &Pinned)| at < end && start < at + pinned.len;
        if sim.pinned.iter().any(taken) {
            return Err(code::ALREADY_REGISTERED);
        }
        let pinned = Pinned { len, ours: false, sources: Accesses::default() };
        sim.pinned.insert(start, pinned);
        Ok(())
    }

    /// Undoes it.
    fn cuMemHostUnregister(memory: *mut c_void) {
        let (mut sim, _) = enter_device("cuMemHostUnregister")?;
        unpin(&mut sim, memory as usize, false).map(|_| ())
    }

    /// Makes a stream.
    fn cuStreamCreate(stream: *mut u64, _flags: c_uint) {
        let (mut sim, device) = enter_device("cuStreamCreate")?;
        let id = sim.new_handle();
        let new = Stream {
            device,
            queue: Default::default(),
            free_at: Instant::now(),
            clock: Clock::default(),
            number: 0,
            done: 0,
            destroyed: false,
            quit: false,
            figures: Default::default(),
        };
        sim.streams.insert(id, new);
        std::thread::spawn(move || work(id));
        // SAFETY: the caller's pointer.
        unsafe { stream.write(id) };
        Ok(())
    }

    /// Frees a stream; its work goes on.
    fn cuStreamDestroy_v2(stream: u64) {
        let (mut sim, _) = enter_device("cuStreamDestroy_v2")?;
        match sim.streams.get_mut(&stream) {
            Some(found) if !found.destroyed => found.destroyed = true,
            _ => {
                sim.problem(format!("stream {stream:x} freed twice, or never made"));
                return Err(code::INVALID_HANDLE);
            }
        }
        SIM.changed.notify_all();
        Ok(())
    }

    /// Waits for all work of a stream. Stream 0 has none that lasts.
    fn cuStreamSynchronize(stream: u64) {
        let (mut sim, _) = enter_device("cuStreamSynchronize")?;
        let Some(number) = sim.streams.get(&stream).map(|found| found.number) else {
            return if stream == 0 { Ok(()) } else { Err(code::INVALID_HANDLE) };
        };
        while !sim.lost && sim.streams.get(&stream).is_some_and(|found| found.done < number) {
            sim = SIM.changed.wait(sim).unwrap_or_else(|poison| poison.into_inner());
        }
        let clock = sim.streams.get(&stream).map(|found| found.clock.clone());
        sim.seen.join(&clock.unwrap_or_default());
        Ok(())
    }

    /// Holds a stream up until an event.
    fn cuStreamWaitEvent(stream: u64, id: u64, _flags: c_uint) {
        let (mut sim, _) = enter_device("cuStreamWaitEvent")?;
        let found = event(&mut sim, id, "cuStreamWaitEvent")?;
        let (time, clock) = (found.recorded, found.clock.clone());
        sim.enqueue(stream, Work::Wait(id, time))?;
        if let Some(stream) = sim.streams.get_mut(&stream) {
            stream.clock.join(&clock);
        }
        Ok(())
    }

    /// Makes an event.
    fn cuEventCreate(out: *mut u64, _flags: c_uint) {
        let (mut sim, device) = enter_device("cuEventCreate")?;
        let id = sim.new_handle();
        sim.events.insert(id, Event { device, ..Event::default() });
        // SAFETY: the caller's pointer.
        unsafe { out.write(id) };
        Ok(())
    }

    /// Frees an event.
    fn cuEventDestroy_v2(id: u64) {
        let (mut sim, _) = enter_device("cuEventDestroy_v2")?;
        event(&mut sim, id, "cuEventDestroy")?.destroyed = true;
        Ok(())
    }

    /// Marks a place in a stream.
    fn cuEventRecord(id: u64, stream: u64) {
        let (mut sim, _) = enter_device("cuEventRecord")?;
        let device = sim.streams.get(&stream).map(|stream| stream.device);
        let found = event(&mut sim, id, "cuEventRecord")?;
        if device.is_some_and(|device| device != found.device) {
            sim.problem("an event recorded on a stream of another device".into());
            return Err(code::INVALID_HANDLE);
        }
        found.recorded += 1;
        let time = found.recorded;
        if sim.config.hang > 0 && sim.calls["cuEventRecord"] >= sim.config.hang {
            // Waits for a time that never comes.
            sim.enqueue(stream, Work::Wait(id, u64::MAX))?;
        }
        sim.enqueue(stream, Work::Record(id, time))?;
        let clock = sim.streams[&stream].clock.clone();
        event(&mut sim, id, "cuEventRecord")?.clock = clock;
        Ok(())
    }

    /// Whether an event was reached.
    fn cuEventQuery(id: u64) {
        let (mut sim, _) = enter_device("cuEventQuery")?;
        let found = event(&mut sim, id, "cuEventQuery")?;
        let now = Instant::now();
        let done = found.reached >= found.recorded && found.at.is_none_or(|at| at <= now);
        POLLED.with_borrow_mut(|polled| polled.note(id, done, now));
        if !done {
            return Err(code::NOT_READY);
        }
        let clock = found.clock.clone();
        sim.seen.join(&clock);
        Ok(())
    }

    /// Milliseconds between two events.
    fn cuEventElapsedTime(ms: *mut f32, from: u64, to: u64) {
        let (mut sim, _) = enter_device("cuEventElapsedTime")?;
        let mut at = |id| {
            let found = event(&mut sim, id, "cuEventElapsedTime")?;
            match found.at {
                _ if found.recorded == 0 => Err(code::INVALID_HANDLE),
                Some(at) if found.reached == found.recorded => Ok(at),
                _ => Err(code::NOT_READY),
            }
        };
        let (from, to) = (at(from)?, at(to)?);
        let sign = if to < from { -1.0 } else { 1.0 };
        let apart = to.max(from) - from.min(to);
        // SAFETY: the caller's pointer.
        unsafe { ms.write(sign * apart.as_secs_f32() * 1e3) };
        Ok(())
    }

    /// Copies to a device.
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) {
        copy_now("cuMemcpyHtoD_v2", copy(to, from as usize, len, true))
    }

    /// Copies from a device.
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) {
        copy_now("cuMemcpyDtoH_v2", copy(from, to as usize, len, false))
    }

    /// Copies to a device in the background.
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: u64) {
        copy_later("cuMemcpyHtoDAsync_v2", stream, copy(to, from as usize, len, true))
    }

    /// Copies from a device in the background: in tests, the kernel that uses the bytes.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: u64) {
        copy_later("cuMemcpyDtoHAsync_v2", stream, copy(from, to as usize, len, false))
    }

    /// Copies rows to a device in the background.
    fn cuMemcpy2DAsync_v2(rows: *const Memcpy2D, stream: u64) {
        // SAFETY: the caller's struct.
        let rows = unsafe { &*rows };
        let plain = rows.src_type == 1 && rows.dst_type == 2 && rows.height > 0;
        if !plain || rows.width > rows.src_pitch.min(rows.dst_pitch) {
            return Err(code::INVALID_VALUE);
        }
        let copy = Copy {
            device_address: rows.dst_device,
            device_pitch: rows.dst_pitch,
            host: rows.src_host as usize,
            host_pitch: rows.src_pitch,
            width: rows.width,
            rows: rows.height,
            to_device: true,
            pageable: false,
        };
        copy_later("cuMemcpy2DAsync_v2", stream, copy)
    }
}

fn unpin(sim: &mut Sim, memory: usize, ours: bool) -> Result<Pinned, Code> {
    let found = sim
        .pinned
        .get(&memory)
        .is_some_and(|pinned| pinned.ours == ours);
    if !found {
        sim.problem(format!("{memory:x} unlocked twice, or never locked"));
        return Err(code::NOT_REGISTERED);
    }
    let pinned = sim.pinned.remove(&memory).expect("just seen");
    if let Some(access) = pinned
        .sources
        .race(&(0..u64::MAX), true, &sim.seen)
        .cloned()
    {
        sim.problem(format!(
            "{memory:x} unlocked before {access:x?} was seen to end"
        ));
    }
    Ok(pinned)
}
