//! What can be changed in a command: options of llama.cpp's programs, and of `run`.

use std::collections::BTreeSet;
use std::ffi::OsString;

use super::options::{self, Known};
use crate::report::stream::Sizes;

/// Tokens of a batch that are tried with a GPU; llama.cpp's default is 512.
const BATCHES: [u64; 2] = [1024, 2048];
/// Memory of the GPUs that is left for the context and activations, at most: llama.cpp's `--fit-target`.
const MARGIN: u64 = 1 << 30;
/// Options of `run`.
const STREAM: &str = "--stream-experts";
const COPIES: [&str; 3] = ["--expert-cache", "--post-fetch", "--page-lock"];

/// A change of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Threads {
        answers: u32,
        prompts: u32,
    },
    /// All layers on the GPU, except the experts of the first layers.
    Gpu {
        host_layers: u32,
    },
    NoGpu,
    /// An option of `run` for experts that a GPU needs and host memory has.
    Copies(&'static str),
    /// llama.cpp's own cache of these experts.
    MoeCache {
        mib: u64,
    },
    Batch(u64),
    Stream,
    ReadIntoMemory,
    Map,
    /// Whether weights are stored in the order of the processor's kernels.
    Repack(bool),
}

/// What a change decides: of each kind, a command has one at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Threads,
    Device,
    Copies,
    Batch,
    File,
    Order,
}

/// What is known before anything runs.
pub struct Facts {
    pub sizes: Sizes,
    /// Memory that programs can still use.
    pub free: u64,
    /// Free memory of all GPUs that the program lists; `None` without one.
    pub gpu_free: Option<u64>,
    /// Cores of the processor, and threads.
    pub cores: u32,
    pub threads: u32,
    /// The threads of answers and of prompts in the command that was typed.
    pub typed_threads: (u32, u32),
}

impl Facts {
    /// Whether the whole model fits into the free memory, with an eighth of it left for the context and the program.
    pub fn fits(&self) -> bool {
        self.sizes.all_bytes() < self.free / 8 * 7
    }

    /// Returns what could make a command faster; what is likely to have the largest effect is first.
    pub fn changes(&self, words: &[OsString], known: &Known) -> Vec<Change> {
        let mut changes = Vec::new();
        if !self.sizes.layers.is_empty() && !self.fits() {
            changes.push(Change::Stream);
        }
        if let Some(free) = self.gpu_free.filter(|_| known.has(options::GPU_LAYERS)) {
            changes.extend(self.placements(free, words, known));
        }
        changes.extend(
            self.numbers_of_threads()
                .into_iter()
                .map(|threads| Change::Threads {
                    answers: threads,
                    prompts: threads,
                }),
        );
        let is_read = options::is_in(words, options::NO_MMAP)
            || options::value_in(words, options::LOAD_MODE).is_some_and(|mode| mode == "none");
        let can_choose = known.has(options::LOAD_MODE) || known.has(options::NO_MMAP);
        match is_read {
            true => changes.push(Change::Map),
            // What does not fit would take the memory of other programs.
            false if can_choose && self.fits() => changes.push(Change::ReadIntoMemory),
            false => {}
        }
        if known.has(no_repack(known)) {
            let is_plain = options::is_in(words, options::NO_REPACK)
                || options::value_in(words, options::REPACK).is_some_and(|value| value == "0");
            changes.push(Change::Repack(is_plain));
        }
        changes
    }

    /// Returns where a model can be with GPUs that have so much free memory.
    fn placements(&self, free: u64, words: &[OsString], known: &Known) -> Vec<Change> {
        let mut changes = Vec::new();
        let layers = &self.sizes.layers;
        let usable = free - MARGIN.min(free / 8);
        let left = usable.saturating_sub(self.sizes.other_bytes);
        let of_layer = self.sizes.expert_bytes / layers.len().max(1) as u64;
        let on_gpu = (left / of_layer.max(1)).min(layers.len() as u64) as usize;
        // The experts of the first layers, of which some may have none.
        let up_to = |count: usize| count.checked_sub(1).map_or(0, |last| layers[last] + 1);
        let fewest = layers.len() - on_gpu;
        let more = (fewest + layers.len().div_ceil(8)).min(layers.len());
        let can_split = known.has(options::HOST_LAYERS);
        let mut counts = vec![fewest, more, layers.len()];
        counts.retain(|&count| count == 0 || can_split);
        counts.dedup();
        if self.sizes.other_bytes <= usable {
            changes.extend(counts.into_iter().map(|count| Change::Gpu {
                host_layers: up_to(count),
            }));
        }
        if !layers.is_empty() && fewest > 0 {
            changes.extend(COPIES.map(Change::Copies));
            let mib = left >> 21;
            if known.has(options::MOE_CACHE) && mib > 0 {
                changes.push(Change::MoeCache { mib });
            }
        }
        let typed = options::number_in(words, options::BATCH).unwrap_or(512);
        if known.has(options::BATCH) {
            let larger = BATCHES.into_iter().filter(|&batch| batch != typed);
            changes.extend(larger.map(Change::Batch));
        }
        changes.push(Change::NoGpu);
        changes
    }

    /// Returns numbers of threads: the cores first, then fewer; a quarter of the cores at least, as fewer are never best.
    fn numbers_of_threads(&self) -> Vec<u32> {
        let (cores, threads) = (self.cores, self.threads);
        let powers = (0..10).map(|power| 1 << power).filter(|&of| of < cores);
        let all: BTreeSet<u32> = powers.chain([(cores * 3 / 4).max(1), cores]).collect();
        let fewer = all.into_iter().rev().filter(|of| of * 4 >= cores);
        let hyperthreads = (threads > cores).then_some(threads);
        let typed = self.typed_threads;
        fewer
            .chain(hyperthreads)
            .filter(|&of| (of, of) != typed)
            .collect()
    }
}

impl Change {
    pub fn kind(self) -> Kind {
        match self {
            Change::Threads { .. } => Kind::Threads,
            Change::Gpu { .. } | Change::NoGpu => Kind::Device,
            Change::Copies(_) | Change::MoeCache { .. } => Kind::Copies,
            Change::Batch(_) => Kind::Batch,
            Change::Stream | Change::ReadIntoMemory | Change::Map => Kind::File,
            Change::Repack(_) => Kind::Order,
        }
    }

    /// Returns the option of `run` for it.
    pub fn flag(self) -> Option<&'static str> {
        match self {
            Change::Stream => Some(STREAM),
            Change::Copies(flag) => Some(flag),
            _ => None,
        }
    }

    /// Changes the options of the program.
    pub fn apply(self, words: &mut Vec<OsString>, known: &Known) {
        match self {
            Change::Threads { answers, prompts } => {
                known.set(words, options::THREADS, &answers.to_string());
                options::remove(words, options::BATCH_THREADS);
                if prompts != answers {
                    known.set(words, options::BATCH_THREADS, &prompts.to_string());
                }
            }
            Change::Gpu { host_layers } => {
                remove_placement(words);
                known.set(words, options::GPU_LAYERS, "999");
                if host_layers > 0 {
                    known.set(words, options::HOST_LAYERS, &host_layers.to_string());
                }
            }
            Change::NoGpu => {
                remove_placement(words);
                known.set(words, options::GPU_LAYERS, "0");
            }
            Change::MoeCache { mib } => known.set(words, options::MOE_CACHE, &mib.to_string()),
            Change::Batch(tokens) => {
                known.set(words, options::BATCH, &tokens.to_string());
                let logical = options::number_in(words, options::LOGICAL_BATCH).unwrap_or(2048);
                if tokens > logical {
                    known.set(words, options::LOGICAL_BATCH, &tokens.to_string());
                }
            }
            Change::ReadIntoMemory if known.has(options::LOAD_MODE) => {
                known.set(words, options::LOAD_MODE, "none");
            }
            Change::ReadIntoMemory => known.add(words, options::NO_MMAP),
            Change::Map => {
                options::remove(words, options::NO_MMAP);
                options::remove(words, options::LOAD_MODE);
            }
            Change::Repack(true) => options::remove(words, no_repack(known)),
            Change::Repack(false) if known.has(options::NO_REPACK) => {
                known.add(words, options::NO_REPACK);
            }
            Change::Repack(false) => known.set(words, options::REPACK, "0"),
            Change::Copies(_) | Change::Stream => {}
        }
    }
}

fn remove_placement(words: &mut Vec<OsString>) {
    for name in [
        options::HOST_LAYERS,
        options::ALL_HOST,
        options::GPU_LAYERS,
        options::MOE_CACHE,
    ] {
        options::remove(words, name);
    }
}

/// Returns the option that turns the processor's order of weights off: that of llama-bench has a value.
fn no_repack(known: &Known) -> options::Name {
    match known.has(options::NO_REPACK) {
        true => options::NO_REPACK,
        false => options::REPACK,
    }
}
