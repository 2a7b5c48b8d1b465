//! What the simulated driver holds, and the workers of its streams.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::order::{Access, Accesses, Clock};

/// A code of cuda.h.
pub type Code = u32;
/// Codes that the simulation returns.
pub mod code {
    pub const SUCCESS: u32 = 0;
    pub const INVALID_VALUE: u32 = 1;
    pub const OUT_OF_MEMORY: u32 = 2;
    pub const INVALID_DEVICE: u32 = 101;
    pub const INVALID_CONTEXT: u32 = 201;
    pub const INVALID_HANDLE: u32 = 400;
    pub const NOT_READY: u32 = 600;
    pub const ALREADY_REGISTERED: u32 = 712;
    pub const NOT_REGISTERED: u32 = 713;
    pub const LAUNCH_FAILED: u32 = 719;
    pub const NOT_SUPPORTED: u32 = 801;
}

/// Device memory lies here: not canonical, so touching it ends the process.
const DEVICE_MEMORY: u64 = 1 << 52;
/// What fresh device memory holds.
const POISON: u8 = 0xa5;
/// Before this, a worker sleeps; then it watches the clock.
const WATCH: Duration = Duration::from_micros(80);

/// Settings; see the variables.
#[derive(Debug, Clone)]
pub struct Config {
    pub devices: u64,
    pub memory: u64,
    pub link: f64,
    pub pageable: f64,
    pub latency: Duration,
    pub moves: bool,
    pub registers: bool,
    /// The call of a function that fails, counted from the last `set`.
    pub fail: Option<(String, u64)>,
    pub lose: u64,
    pub hang: u64,
    pub hold: bool,
    /// When copies were last allowed to begin again.
    pub released: Option<Instant>,
}

impl Config {
    pub fn from_environment() -> Config {
        let mut config = Config {
            devices: 1,
            memory: 1 << 30,
            link: 13e9,
            pageable: 6e9,
            latency: Duration::from_micros(5),
            moves: true,
            registers: true,
            fail: None,
            lose: 0,
            hang: 0,
            hold: false,
            released: None,
        };
        for (name, value) in std::env::vars() {
            if name == "SIM_CUDA_FAIL" {
                let (call, nth) = value.split_once(':').unwrap_or((&value, "1"));
                config.fail = Some((call.into(), nth.parse().unwrap_or(1)));
            } else if let Ok(value) = value.parse() {
                config.set(&name, value);
            }
        }
        config
    }

    fn set(&mut self, name: &str, value: u64) -> bool {
        match name {
            "SIM_CUDA_DEVICES" => self.devices = value,
            "SIM_CUDA_MEMORY_MB" => self.memory = value << 20,
            "SIM_CUDA_LINK_MBPS" => self.link = value as f64 * 1e6,
            "SIM_CUDA_PAGEABLE_MBPS" => self.pageable = value as f64 * 1e6,
            "SIM_CUDA_LATENCY_NS" => self.latency = Duration::from_nanos(value),
            "SIM_CUDA_MOVE" => self.moves = value != 0,
            "SIM_CUDA_REGISTER" => self.registers = value != 0,
            "SIM_CUDA_LOSE" => self.lose = value,
            "SIM_CUDA_HANG" => self.hang = value,
            "SIM_CUDA_HOLD" => {
                if self.hold && value == 0 {
                    self.released = Some(Instant::now());
                }
                self.hold = value != 0;
            }
            _ => return false,
        }
        true
    }
}

/// An allocation on a device.
pub struct Allocation {
    pub device: usize,
    pub bytes: Vec<u8>,
    pub accesses: Accesses,
}

/// Page-locked memory of the process.
pub struct Pinned {
    pub len: usize,
    /// Whether the driver allocated it.
    pub ours: bool,
    pub sources: Accesses,
}

/// A copy between the process and a device, in rows.
#[derive(Clone, Copy)]
pub struct Copy {
    pub device_address: u64,
    pub device_pitch: usize,
    pub host: usize,
    pub host_pitch: usize,
    pub width: usize,
    pub rows: usize,
    pub to_device: bool,
    pub pageable: bool,
}

impl Copy {
    pub fn device_range(&self) -> std::ops::Range<u64> {
        let last = self.device_pitch * (self.rows - 1);
        self.device_address..self.device_address + (last + self.width) as u64
    }

    pub fn host_range(&self) -> std::ops::Range<u64> {
        let last = self.host_pitch * (self.rows - 1);
        self.host as u64..(self.host + last + self.width) as u64
    }
}

pub enum Work {
    Copy(Copy),
    Record(u64, u64),
    Wait(u64, u64),
}

pub struct Stream {
    pub device: usize,
    /// What is to do, and since when.
    pub queue: VecDeque<(Instant, Work)>,
    /// When its last work ended, by the clock of the simulation.
    pub free_at: Instant,
    pub clock: Clock,
    /// Numbers of the work put in, and of the work that is done.
    pub number: u64,
    pub done: u64,
    pub destroyed: bool,
    pub quit: bool,
    pub figures: Figures,
}

/// The times of a stream, by the clock of the simulation.
#[derive(Default)]
pub struct Figures {
    /// The record that the stream is at: where nothing follows it yet.
    recorded: Option<Instant>,
    /// Copies to the device since the last record: where in the process the first one begins and the last one ends.
    copies: Option<(Instant, std::ops::Range<u64>)>,
    /// How long it waited for events: from the call that made it wait, and from the record before.
    pub waited: [Duration; 2],
}

#[derive(Default)]
pub struct Event {
    pub device: usize,
    /// How often it was recorded, and which of those was reached, when.
    pub recorded: u64,
    pub reached: u64,
    pub at: Option<Instant>,
    pub clock: Clock,
    pub destroyed: bool,
}

pub struct Sim {
    pub config: Config,
    pub allocations: BTreeMap<u64, Allocation>,
    pub pinned: BTreeMap<usize, Pinned>,
    pub streams: HashMap<u64, Stream>,
    pub events: HashMap<u64, Event>,
    /// References to the primary context of each device.
    pub contexts: HashMap<usize, i64>,
    /// When the link to each device is free: into it, out of it.
    links: HashMap<(usize, bool), Instant>,
    /// What the process has seen the end of.
    pub seen: Clock,
    pub problems: Vec<String>,
    pub calls: HashMap<String, u64>,
    pub lost: bool,
    /// Copies between two records, and the time between them.
    pub copied: Vec<(std::ops::Range<u64>, Duration)>,
    next: u64,
}

pub struct Shared {
    sim: Mutex<Sim>,
    pub changed: Condvar,
}

pub static SIM: LazyLock<Shared> = LazyLock::new(|| Shared {
    sim: Mutex::new(Sim {
        config: Config::from_environment(),
        allocations: BTreeMap::new(),
        pinned: BTreeMap::new(),
        streams: HashMap::new(),
        events: HashMap::new(),
        contexts: HashMap::new(),
        links: HashMap::new(),
        seen: Clock::default(),
        problems: Vec::new(),
        calls: HashMap::new(),
        lost: false,
        copied: Vec::new(),
        next: 0,
    }),
    changed: Condvar::new(),
});

pub fn lock() -> MutexGuard<'static, Sim> {
    SIM.sim.lock().unwrap_or_else(|poison| poison.into_inner())
}

impl Sim {
    pub fn start_over(&mut self, config: Config) {
        self.config = config;
        self.allocations.clear();
        self.pinned.clear();
        self.streams.clear();
        self.events.clear();
        self.contexts.clear();
        self.links.clear();
        self.seen = Clock::default();
        self.problems.clear();
        self.calls.clear();
        self.copied.clear();
        self.lost = false;
    }

    pub fn set(&mut self, name: &str, value: u64) {
        if !self.config.set(name, value) {
            let so_far = self.calls.get(name).copied().unwrap_or(0);
            self.config.fail = Some((name.into(), so_far + value));
        }
    }

    /// Counts a call; the code that it fails with, if it is to.
    pub fn count(&mut self, name: &'static str) -> Result<(), Code> {
        *self.calls.entry("total".into()).or_default() += 1;
        let count = self.calls.entry(name.into()).or_default();
        *count += 1;
        if matches!(&self.config.fail, Some((call, nth)) if call == name && nth == count) {
            return Err(match name {
                "cuMemAlloc_v2" | "cuMemHostAlloc" => code::OUT_OF_MEMORY,
                _ => code::INVALID_VALUE,
            });
        }
        if self.config.lose > 0 && self.calls["total"] >= self.config.lose {
            self.lost = true;
            SIM.changed.notify_all();
        }
        // A lost device is lost to its context; what only knows the process still works.
        let local = [
            "cuGetErrorName",
            "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2",
            "cuCtxPopCurrent_v2",
        ];
        if self.lost && !local.contains(&name) {
            return Err(code::LAUNCH_FAILED);
        }
        Ok(())
    }

    pub fn problem(&mut self, text: String) {
        self.problems.push(text);
    }

    pub fn new_handle(&mut self) -> u64 {
        self.next += 1;
        // Odd, unlike an address.
        0x51c0_0001 + self.next * 16
    }

    /// What callers did wrong, and what they left.
    pub fn findings(&self) -> Vec<String> {
        let mut all = self.problems.clone();
        if self.lost {
            // What a lost device held is gone with it.
            return all;
        }
        let mut left = |what: &str, count: usize| {
            if count > 0 {
                all.push(format!("never freed: {count} {what}"));
            }
        };
        let registered = self.pinned.values().filter(|pinned| !pinned.ours).count();
        left("allocations", self.allocations.len());
        left("page-locked allocations", self.pinned.len() - registered);
        left("registrations", registered);
        left(
            "streams",
            self.streams.values().filter(|s| !s.destroyed).count(),
        );
        left(
            "events",
            self.events.values().filter(|e| !e.destroyed).count(),
        );
        left(
            "contexts",
            self.contexts.values().filter(|&&n| n != 0).count(),
        );
        all
    }

    pub fn allocate(&mut self, device: usize, len: usize) -> Result<u64, Code> {
        let used: u64 = self
            .allocations
            .values()
            .filter(|allocation| allocation.device == device)
            .map(|allocation| allocation.bytes.len() as u64)
            .sum();
        if used + len as u64 > self.config.memory {
            return Err(code::OUT_OF_MEMORY);
        }
        let end = self.allocations.last_key_value();
        let end = end.map_or(DEVICE_MEMORY, |(at, found)| at + found.bytes.len() as u64);
        let address = end.next_multiple_of(512) + 512;
        let allocation = Allocation {
            device,
            bytes: vec![POISON; len],
            accesses: Accesses::default(),
        };
        self.allocations.insert(address, allocation);
        Ok(address)
    }

    /// The allocation that holds a range, and where in it.
    pub fn allocation(&mut self, range: &std::ops::Range<u64>) -> Option<(&mut Allocation, usize)> {
        let (&at, found) = self.allocations.range_mut(..=range.start).next_back()?;
        let offset = (range.start - at) as usize;
        (range.end <= at + found.bytes.len() as u64).then_some((found, offset))
    }

    pub fn pinned(&mut self, range: &std::ops::Range<u64>) -> Option<&mut Pinned> {
        let (&at, found) = self.pinned.range_mut(..=range.start as usize).next_back()?;
        (range.end <= (at + found.len) as u64).then_some(found)
    }

    /// Puts a copy into a stream, after checking who else uses its memory.
    pub fn enqueue_copy(&mut self, stream: u64, mut copy: Copy) -> Result<u64, Code> {
        let range = copy.device_range();
        if self.allocation(&range).is_none() {
            self.problem(format!("a copy of {range:x?}, which is not allocated"));
            return Err(code::INVALID_VALUE);
        }
        let host = copy.host_range();
        copy.pageable = self.pinned(&host).is_none();
        let number = self.enqueue(stream, Work::Copy(copy))?;
        let clock = self.streams[&stream].clock.clone();
        self.access(range, stream, number, copy.to_device, &clock);
        let seen = self.seen.clone();
        if let Some(pinned) = self.pinned(&host) {
            let access = Access {
                range: host,
                stream,
                number,
                writes: !copy.to_device,
            };
            pinned.sources.add(access, &seen);
        } else {
            *self.calls.entry("pageable".into()).or_default() += 1;
        }
        Ok(number)
    }

    /// Notes a use of device memory, and complains when it races.
    pub fn access(
        &mut self,
        range: std::ops::Range<u64>,
        stream: u64,
        number: u64,
        writes: bool,
        clock: &Clock,
    ) {
        let seen = self.seen.clone();
        let Some((allocation, _)) = self.allocation(&range) else {
            return;
        };
        let race = allocation.accesses.race(&range, writes, clock).cloned();
        let access = Access {
            range: range.clone(),
            stream,
            number,
            writes,
        };
        allocation.accesses.add(access, &seen);
        if let Some(other) = race {
            self.problem(format!(
                "work {number} of stream {stream:x} uses {range:x?} while work {} of stream {:x} may still {} it",
                other.number,
                other.stream,
                if other.writes { "write" } else { "read" },
            ));
        }
    }

    pub fn enqueue(&mut self, id: u64, work: Work) -> Result<u64, Code> {
        let seen = self.seen.clone();
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| !stream.destroyed) else {
            self.problem(format!("work for stream {id:x}, which does not exist"));
            return Err(code::INVALID_HANDLE);
        };
        stream.number += 1;
        stream.clock.join(&seen);
        stream.clock.note(id, stream.number);
        let number = stream.number;
        if self.config.moves {
            stream.queue.push_back((Instant::now(), work));
            SIM.changed.notify_all();
        } else {
            self.foretell(id, work);
        }
        Ok(number)
    }

    /// Where nothing moves, returns at once when work will be done: like a copy engine, that
    /// uses no core.
    fn foretell(&mut self, id: u64, work: Work) {
        let Some(stream) = self.streams.get(&id) else {
            return;
        };
        let (device, mut end) = (stream.device, stream.free_at.max(Instant::now()));
        match work {
            Work::Copy(copy) => end = self.occupy_link(device, &copy, end),
            Work::Record(event, time) => {
                if let Some(event) = self.events.get_mut(&event) {
                    event.reached = time;
                    event.at = Some(end);
                }
            }
            Work::Wait(event, _) => {
                let at = self.events.get(&event).and_then(|event| event.at);
                end = at.map_or(end, |at| at.max(end));
            }
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.free_at = end;
            stream.done = stream.number;
        }
    }

    /// Takes the link for a copy that can begin at `start`; when it will be done.
    fn occupy_link(&mut self, device: usize, copy: &Copy, start: Instant) -> Instant {
        let bytes = (copy.width * copy.rows) as f64;
        let rate = match copy.pageable {
            true => self.config.pageable,
            false => self.config.link,
        };
        let takes = self.config.latency + Duration::from_secs_f64(bytes / rate);
        let link = self.links.entry((device, copy.to_device)).or_insert(start);
        *link = start.max(*link) + takes;
        *link
    }
}

/// Does the work of a stream, in order.
pub fn work(id: u64) {
    // Sleeps end when they should.
    // SAFETY: sets a property of this thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    let mut sim = lock();
    loop {
        let Some(stream) = sim.streams.get_mut(&id) else {
            return;
        };
        let Some((since, work)) = stream.queue.pop_front() else {
            if stream.destroyed || stream.quit {
                sim.streams.remove(&id);
                return;
            }
            sim = SIM
                .changed
                .wait(sim)
                .unwrap_or_else(|poison| poison.into_inner());
            continue;
        };
        let mut start = since.max(stream.free_at);
        let device = stream.device;
        let record = stream.figures.recorded.take();
        let mut end = start;
        match work {
            Work::Copy(copy) => {
                while sim.config.hold && !stopped(&sim, id) {
                    sim = SIM
                        .changed
                        .wait(sim)
                        .unwrap_or_else(|poison| poison.into_inner());
                }
                // Also where this thread comes to the copy only now.
                start = sim.config.released.map_or(start, |at| at.max(start));
                if let Some(stream) = sim.streams.get_mut(&id)
                    && copy.to_device
                {
                    let new = (record.unwrap_or(start), copy.host_range());
                    let first = stream.figures.copies.take().unwrap_or(new);
                    let all = first.1.start..copy.host_range().end;
                    stream.figures.copies = Some((first.0, all));
                }
                end = sim.occupy_link(device, &copy, start);
                move_bytes(&mut sim, &copy);
                drop(sim);
                wait_until(end);
                sim = lock();
            }
            Work::Record(event, time) => {
                if let Some(event) = sim.events.get_mut(&event) {
                    event.reached = event.reached.max(time);
                    event.at = Some(start);
                }
                let figures = sim.streams.get_mut(&id).map(|stream| &mut stream.figures);
                let copies = figures.and_then(|figures| {
                    figures.recorded = Some(start);
                    figures.copies.take()
                });
                if let Some((from, range)) = copies {
                    sim.copied.push((range, start - from));
                }
            }
            Work::Wait(event, time) => loop {
                if stopped(&sim, id) {
                    return;
                }
                match sim.events.get(&event) {
                    Some(event) if event.reached < time => {}
                    found => {
                        let at = found.and_then(|found| found.at).unwrap_or(end);
                        end = at.max(end);
                        if let Some(stream) = sim.streams.get_mut(&id) {
                            let [called, recorded] = &mut stream.figures.waited;
                            *called += end - start;
                            *recorded += at.saturating_duration_since(record.unwrap_or(start));
                        }
                        break;
                    }
                }
                sim = SIM
                    .changed
                    .wait(sim)
                    .unwrap_or_else(|poison| poison.into_inner());
            },
        }
        // A lost device does nothing any more, and neither does one that hangs.
        while sim.lost && !stopped(&sim, id) {
            sim = SIM
                .changed
                .wait(sim)
                .unwrap_or_else(|poison| poison.into_inner());
        }
        let Some(stream) = sim.streams.get_mut(&id) else {
            return;
        };
        stream.free_at = end;
        stream.done += 1;
        SIM.changed.notify_all();
    }
}

fn stopped(sim: &Sim, id: u64) -> bool {
    sim.streams.get(&id).is_none_or(|stream| stream.quit)
}

/// Moves the bytes of a copy. The lock is held: memory cannot go away meanwhile.
pub fn move_bytes(sim: &mut Sim, copy: &Copy) {
    let range = copy.device_range();
    let Some((allocation, offset)) = sim.allocation(&range) else {
        return sim.problem(format!("{range:x?} was freed under a copy"));
    };
    for row in 0..copy.rows {
        let at = offset + row * copy.device_pitch;
        let device = &mut allocation.bytes[at..at + copy.width];
        let host = copy.host + row * copy.host_pitch;
        // SAFETY: the caller of the copy keeps its host memory valid until it is done.
        unsafe {
            match copy.to_device {
                true => (host as *const u8).copy_to_nonoverlapping(device.as_mut_ptr(), copy.width),
                false => (host as *mut u8).copy_from_nonoverlapping(device.as_ptr(), copy.width),
            }
        }
    }
}

/// Sleeps, and then watches the clock.
pub fn wait_until(end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    if left > WATCH {
        std::thread::sleep(left - WATCH);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
