//! The simulated devices: their memory, their links, and what was found.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::calls::{Call, Counts, Effect};
use crate::ggml::Ggml;
use crate::memory::{Block, Memory};
use crate::order::{Clock, Use, Who};
use crate::queue::Queue;
use crate::schedule::Schedule;
use crate::settings::Settings;

/// Unordered accesses that the report describes.
const EXAMPLES: usize = 16;
/// Products of routed weights that the report lists.
const PRODUCTS: usize = 4096;

/// A state of a participant: what it comes after, and its virtual time in nanoseconds.
#[derive(Debug, Clone, Default)]
pub struct Moment {
    /// What it comes after.
    pub clock: Clock,
    /// When it is.
    pub time: u64,
}

/// A direction of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the host.
    ToDevice,
    /// To the host.
    FromDevice,
}

/// One direction of the link.
#[derive(Debug, Default)]
pub struct Link {
    /// Who has it when.
    pub queue: Queue,
    /// Bytes copied.
    pub bytes: u64,
    /// Copies from or to page-locked memory.
    pub locked: u64,
    /// Other copies.
    pub pageable: u64,
}

/// When the link was taken for a copy.
#[derive(Debug)]
pub struct Taken {
    /// Its start.
    pub start: u64,
    /// Its end.
    pub end: u64,
}

/// A product of routed weights.
#[derive(Debug)]
pub struct Product {
    /// The name of the node.
    pub name: String,
    /// The stream that computed it.
    pub stream: String,
    /// Start and end.
    pub time: Range<u64>,
    /// Experts that it used.
    pub experts: usize,
}

/// Bytes that were copied to page-locked memory of the host, which sees them when a thread has
/// waited for the copy.
#[derive(Debug)]
struct Arrival {
    who: Who,
    number: u64,
    address: usize,
    bytes: Vec<u8>,
}

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Accesses that nothing orders.
    pub unordered: u64,
    /// Accesses of memory that is not allocated.
    pub unknown: u64,
    /// The first of both, described.
    pub examples: Vec<String>,
}

/// What a device has of its own, besides memory.
#[derive(Debug, Default)]
pub struct OfDevice {
    /// By direction.
    links: [Mutex<Link>; 2],
    /// When kernels run, on any stream.
    pub kernels: Mutex<Schedule>,
}

/// The simulation; there is one in a process.
pub struct Sim {
    pub settings: Settings,
    pub ggml: Ggml,
    pub memory: Memory,
    pub counts: Counts,
    pub devices: Vec<OfDevice>,
    pub accesses: AtomicU64,
    /// Graphs that were replayed.
    pub replays: AtomicU64,
    pub findings: Mutex<Findings>,
    pub products: Mutex<Vec<Product>>,
    /// Names of streams and threads, by their number.
    participants: Mutex<Vec<Arc<str>>>,
    /// In the order of the copies of each stream.
    arrivals: Mutex<Vec<Arrival>>,
    /// Accesses of threads of the host that have ended. Threads are ordered with each other by
    /// means that cannot be seen here, so all that comes later knows them.
    pub ended: Mutex<Clock>,
    after_first_finding: fn(&Sim),
}

static SIM: OnceLock<Sim> = OnceLock::new();

/// The simulation. Panics before `start`.
pub fn sim() -> &'static Sim {
    SIM.get().expect("ggml_backend_init was called")
}

/// The simulation, if it was started.
pub fn started() -> Option<&'static Sim> {
    SIM.get()
}

/// Starts the simulation in a process with these functions. `after_first_finding` is called after
/// the first unordered access: the process may not live to its end.
pub fn start(settings: Settings, ggml: Ggml, after_first_finding: fn(&Sim)) {
    SIM.get_or_init(|| Sim {
        devices: settings
            .memory
            .iter()
            .map(|_| OfDevice::default())
            .collect(),
        settings,
        ggml,
        memory: Memory::default(),
        counts: Counts::default(),
        accesses: AtomicU64::new(0),
        replays: AtomicU64::new(0),
        findings: Mutex::default(),
        products: Mutex::default(),
        participants: Mutex::default(),
        arrivals: Mutex::default(),
        ended: Mutex::default(),
        after_first_finding,
    });
}

impl OfDevice {
    /// One direction of the link.
    pub fn link(&self, direction: Direction) -> &Mutex<Link> {
        &self.links[direction as usize]
    }
}

impl Sim {
    /// Counts a call; returns what it does.
    pub fn count(&self, call: Call) -> Effect {
        self.count_in(0, call)
    }

    /// Counts a call of a stream; returns what it does.
    pub fn count_in(&self, stream: usize, call: Call) -> Effect {
        self.counts.count(call, stream, &self.settings.faults)
    }

    /// Adds a participant; returns its number and its name, which ends with a number.
    pub fn participate(&self, kind: &str) -> (Who, Arc<str>) {
        let mut participants = self.participants.lock().expect("no panic");
        let same = participants.iter().filter(|name| name.starts_with(kind));
        let name: Arc<str> = format!("{kind} {}", same.count() + 1).into();
        participants.push(name.clone());
        (participants.len() - 1, name)
    }

    /// Takes the link of a device for a copy that may start at a time.
    pub fn take_link(
        &self,
        device: usize,
        direction: Direction,
        from: u64,
        size: usize,
        locked: bool,
    ) -> Taken {
        let settings = &self.settings;
        let speed = if locked {
            settings.link
        } else {
            settings.pageable
        };
        let length = settings.latency + (size as f64 / speed) as u64;
        let link = self.devices[device].link(direction);
        let mut link = link.lock().expect("no panic");
        link.bytes += size as u64;
        *(if locked {
            &mut link.locked
        } else {
            &mut link.pageable
        }) += 1;
        let start = link.queue.take(from, length);
        Taken {
            start,
            end: start + length,
        }
    }

    /// Adds an access of device memory, which comes after what `clock` knows.
    pub fn access(&self, block: &Block, range: Range<u64>, writes: bool, new: &Use, clock: &Clock) {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        let unordered = {
            let mut uses = block.uses.lock().expect("no panic");
            uses.add(range, writes, new, clock)
        };
        if unordered.is_empty() {
            return;
        }
        let participants = self.participants.lock().expect("no panic").clone();
        let mut findings = self.findings.lock().expect("no panic");
        let first = findings.unordered == 0;
        for found in unordered {
            findings.unordered += 1;
            if findings.examples.len() < EXAMPLES {
                let earlier = found.earlier;
                findings.examples.push(format!(
                    "{}: {}; after {}: {}; {} bytes",
                    participants[new.who],
                    new.what,
                    participants[earlier.who],
                    earlier.what,
                    found.bytes,
                ));
            }
        }
        drop(findings);
        if first {
            (self.after_first_finding)(self);
        }
    }

    /// Keeps bytes that the host sees after it has waited for this work.
    pub fn keep(&self, by: &Use, address: usize, bytes: Vec<u8>) {
        let (who, number) = (by.who, by.number);
        self.arrivals.lock().expect("no panic").push(Arrival {
            who,
            number,
            address,
            bytes,
        });
    }

    /// Lets the host see what it has waited for.
    pub fn arrive(&self, known: &Clock) {
        self.arrivals.lock().expect("no panic").retain(|arrival| {
            let Arrival { address, bytes, .. } = arrival;
            let waits = !known.knows(arrival.who, arrival.number);
            if !waits && self.memory.is_locked(*address, bytes.len()) {
                let to = *address as *mut u8;
                // SAFETY: the host passed this memory, and has it still.
                unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
            waits
        });
    }

    /// Notes an access of memory that is not allocated.
    pub fn unknown_memory(&self, what: &str) {
        let mut findings = self.findings.lock().expect("no panic");
        findings.unknown += 1;
        if findings.examples.len() < EXAMPLES {
            findings.examples.push(format!("not allocated: {what}"));
        }
    }

    /// Notes a product of routed weights.
    pub fn product(&self, product: Product) {
        let mut products = self.products.lock().expect("no panic");
        if products.len() < PRODUCTS {
            products.push(product);
        }
    }
}
