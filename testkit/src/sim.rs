//! The simulated CUDA driver, from inside the process that uses it.

use std::ffi::{CString, c_char, c_void};
use std::ops::Range;
use std::time::Duration;

use libc::{RTLD_NOW, dlopen, dlsym};

/// The driver that the loader path leads to, which must be the simulated one. There is
/// one in a process, so tests that use it run one after the other.
#[derive(Debug)]
pub struct Sim {
    library: *mut c_void,
}

impl Sim {
    /// Finds it, and resets it. Panics where another driver or none is found.
    pub fn fresh() -> Sim {
        // SAFETY: loads what the library under test loads anyway.
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
        let sim = Sim { library };
        assert!(
            !library.is_null() && !sim.symbol("sim_cuda_reset").is_null(),
            "the loader path leads to no simulated CUDA driver: run 'cargo xtask test', or set LD_LIBRARY_PATH to target/sim-cuda"
        );
        sim.reset();
        sim
    }

    /// An exported function of the driver.
    pub fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("a name");
        // SAFETY: looks a name up.
        unsafe { dlsym(self.library, name.as_ptr()) }
    }

    /// Forgets everything that happened.
    pub fn reset(&self) {
        // SAFETY: the type that the simulation declares.
        unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn()>(self.symbol("sim_cuda_reset"))()
        }
    }

    /// Sets a setting (`SIM_CUDA_MEMORY_MB`), or makes the n-th call of a function fail.
    pub fn set(&self, name: &str, value: u64) {
        type Set = extern "C" fn(*const c_char, u64);
        let name = CString::new(name).expect("a name");
        // SAFETY: the type that the simulation declares.
        let set = unsafe { std::mem::transmute::<*mut c_void, Set>(self.symbol("sim_cuda_set")) };
        set(name.as_ptr(), value);
    }

    /// How often a function was called; also `pageable` and `total`.
    pub fn count(&self, name: &str) -> u64 {
        type Count = extern "C" fn(*const c_char) -> u64;
        let name = CString::new(name).expect("a name");
        // SAFETY: the type that the simulation declares.
        let count =
            unsafe { std::mem::transmute::<*mut c_void, Count>(self.symbol("sim_cuda_count")) };
        count(name.as_ptr())
    }

    /// The copies of streams since the last call: where their bytes are in the process, and the time
    /// between the records around each.
    pub fn copies(&self) -> Vec<(Range<u64>, Duration)> {
        let text = self.text("sim_cuda_copies");
        let numbers = |line: &str| -> Option<(Range<u64>, Duration)> {
            let mut words = line.split(' ').map(|word| word.parse().ok());
            let range = words.next()??..words.next()??;
            Some((range, Duration::from_nanos(words.next()??)))
        };
        let lines = text
            .lines()
            .map(|line| numbers(line).expect("three numbers"));
        lines.collect()
    }

    /// How long a stream waited for events: from each call that made it wait, and from the record
    /// before that call.
    pub fn waited(&self, stream: u64) -> Range<Duration> {
        type Waited = unsafe extern "C" fn(u64, *mut [u64; 2]);
        let mut waited = [0; 2];
        // SAFETY: the type that the simulation declares.
        unsafe {
            std::mem::transmute::<*mut c_void, Waited>(self.symbol("sim_cuda_waited"))(
                stream,
                &mut waited,
            );
        }
        let [least, most] = waited.map(Duration::from_nanos);
        least..most
    }

    /// How long this thread polled events until they were reached, since the last call.
    pub fn polled(&self) -> Duration {
        // SAFETY: the type that the simulation declares.
        let polled = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn() -> u64>(
                self.symbol("sim_cuda_polled"),
            )
        };
        Duration::from_nanos(polled())
    }

    /// What callers did wrong so far, and what is not freed now.
    pub fn problems(&self) -> Vec<String> {
        let text = self.text("sim_cuda_problems");
        text.lines().map(str::to_owned).collect()
    }

    /// The text of an exported function that writes one.
    fn text(&self, name: &str) -> String {
        type Write = extern "C" fn(*mut u8, usize) -> usize;
        // SAFETY: the type that the simulation declares.
        let write = unsafe { std::mem::transmute::<*mut c_void, Write>(self.symbol(name)) };
        let mut text = vec![0; 1 << 16];
        let len = write(text.as_mut_ptr(), text.len()).min(text.len());
        String::from_utf8_lossy(&text[..len]).into_owned()
    }
}
