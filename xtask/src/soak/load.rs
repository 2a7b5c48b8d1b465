//! Clients of a server, which request text, repeat requests, and cancel them.

use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use testkit::server::{Answer, Request, Server};

/// Clients at a time; there are as many slots.
pub const CLIENTS: usize = 4;
/// Tokens of an answer, and of one that is never heard to its end.
const TOKENS: usize = 12;
const TOKENS_OF_CANCELLED: usize = 64;
/// Of a hundred requests, how many are given up, and how many use what is cached.
const CANCELLED: u64 = 15;
const CACHED: u64 = 45;

/// Pairs of prompts that begin alike.
const BEGINNINGS: [&str; 2] = [
    "Once upon a time, in a village between two rivers, there lived",
    "Three reasons to take up swimming: first,",
];
const ENDS: [&str; 2] = ["", " as is well known, the"];

/// Which model the server has, as far as its clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch {
    /// Counts changes of the other fields.
    pub number: u64,
    /// The model; `None` while it is being swapped.
    pub model: Option<usize>,
    /// Whether every slot was emptied since.
    pub erased: bool,
}

/// What all clients share.
pub struct Load {
    epoch: RwLock<Epoch>,
    /// Held for reading by each request.
    running: RwLock<()>,
    over: AtomicBool,
    /// Requests that were answered to their end.
    pub answered: AtomicU64,
    /// Requests whose client hung up.
    pub cancelled: AtomicU64,
    /// Requests that cannot be compared, because a swap came between.
    pub overlapping: AtomicU64,
}

/// An answer that has to be one of a model's.
pub struct Observation {
    /// Which prompt.
    pub prompt: usize,
    /// Which model.
    pub model: usize,
    /// What was answered.
    pub answer: Answer,
    /// What was asked, for a message.
    pub request: Request,
}

/// How many prompts there are.
pub fn prompts() -> usize {
    BEGINNINGS.len() * ENDS.len()
}

fn prompt(index: usize) -> String {
    let (beginning, end) = (index / ENDS.len(), index % ENDS.len());
    format!("{}{}", BEGINNINGS[beginning], ENDS[end])
}

impl Load {
    /// No load yet, on a server that has a model and nothing cached.
    pub fn new(model: usize) -> Load {
        Load {
            epoch: RwLock::new(Epoch {
                number: 0,
                model: Some(model),
                erased: true,
            }),
            running: RwLock::new(()),
            over: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            cancelled: AtomicU64::new(0),
            overlapping: AtomicU64::new(0),
        }
    }

    /// What the clients know.
    pub fn epoch(&self) -> Epoch {
        *self.epoch.read().expect("no panic")
    }

    /// Notifies the clients of a change.
    pub fn tell(&self, model: Option<usize>, erased: bool) {
        let mut epoch = self.epoch.write().expect("no panic");
        *epoch = Epoch {
            number: epoch.number + 1,
            model,
            erased,
        };
    }

    /// Waits until no request is under way, does something, and lets the clients go on.
    pub fn at_rest<T>(&self, work: impl FnOnce() -> T) -> T {
        let _no_request = self.running.write().expect("no panic");
        work()
    }

    /// Lets the clients end after what they are at.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Whether the clients are to end.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Is one client, until the end or the first error.
    pub fn client(
        &self,
        server: &Server,
        seed: u64,
        observe: &(dyn Fn(Observation) + Sync),
    ) -> Result<(), String> {
        let mut random = Random(seed);
        while !self.is_over() {
            let _one = self.running.read().expect("no panic");
            let index = random.below(prompts() as u64) as usize;
            let mut request = Request::new(&prompt(index), TOKENS);
            let kind = random.below(100);
            let context = |error: String| format!("{request:?}: {error}");
            if kind < CANCELLED {
                let mut request = Request::new(&prompt(index), TOKENS_OF_CANCELLED);
                request.cache_prompt = random.below(2) == 0;
                let pieces = 1 + random.below(8) as usize;
                server.cancel_after(&request, pieces).map_err(context)?;
                self.cancelled.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            request.cache_prompt = kind < CANCELLED + CACHED;
            let before = self.epoch();
            let answer = server.try_complete(&request);
            let answer = answer.map_err(|error| format!("{request:?}: {error}"))?;
            self.answered.fetch_add(1, Ordering::Relaxed);
            let same = self.epoch().number == before.number;
            let untouched = !request.cache_prompt || before.erased;
            match before.model.filter(|_| same && untouched) {
                Some(model) => observe(Observation {
                    prompt: index,
                    model,
                    answer,
                    request,
                }),
                None => {
                    self.overlapping.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

/// Numbers without order (xorshift), the same in each run.
pub struct Random(pub u64);

impl Random {
    /// A number below another.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
