//! Measures the overlap of post-fetch, its cost for the calling thread, and its cost without
//! a GPU.
//!
//! Run it with `cargo xtask bench postfetch`: on the CUDA driver that is installed, or on
//! the simulated one, and once without any.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llama_sidecar::device::cuda::{CudaDevice, device_count};
use llama_sidecar::device::{AsyncDevice, Copy2d, Device};
use llama_sidecar::model::{Model, Options as ModelOptions};
use llama_sidecar::postfetch::{Options, PostFetch};
use testkit::median;
use testkit::writer::{Gguf, Kv, MXFP4, Q4_K};

/// Layers of tokens per round; rounds.
const LAYERS: usize = 60;
const ROUNDS: usize = 5;
/// How long the fetch thread busy-waits.
const SPIN: Duration = Duration::from_millis(20);

/// The down-projections of a model.
struct Shape {
    name: &'static str,
    ty: u32,
    /// Elements per row, rows, experts.
    ne: [i64; 3],
    nbytes: usize,
    active: usize,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "GPT-OSS-120B",
        ty: MXFP4,
        ne: [2880, 2880, 128],
        nbytes: 2880 * 2880 / 32 * 17,
        active: 4,
    },
    Shape {
        name: "Qwen3-Next-80B",
        ty: Q4_K,
        ne: [512, 2048, 512],
        nbytes: 512 * 2048 / 256 * 144,
        active: 10,
    },
    Shape {
        name: "Mixtral-8x7B",
        ty: Q4_K,
        ne: [14336, 4096, 8],
        nbytes: 14336 * 4096 / 256 * 144,
        active: 2,
    },
];

impl Shape {
    /// A file of this shape, with a layer and holes for data.
    fn model(&self, folder: &std::path::Path) -> Arc<Model> {
        let path = folder.join(format!("{}.gguf", self.name));
        let file = Gguf::default()
            .kv("llama.expert_used_count", Kv::U32(self.active as u32))
            .zeros("blk.0.ffn_down_exps.weight", &self.ne, self.ty);
        file.write_sparse(&path).expect("a file with holes");
        Arc::new(Model::open(&path, ModelOptions::host()).expect("a model"))
    }

    /// Experts of a token, in no order, the same in every run.
    fn ids(&self, token: usize) -> Vec<i32> {
        let n = self.ne[2] as usize;
        let mut ids = Vec::new();
        let mut state = token as u32 * 2_654_435_761 + 1;
        while ids.len() < self.active {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let id = (state as usize % n) as i32;
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    }
}

/// Stands for gate and up.
fn compute(long: Duration) {
    let began = Instant::now();
    while began.elapsed() < long {
        std::hint::spin_loop();
    }
}

fn main() {
    match device_count() {
        Ok(count) if count > 0 => with_device(),
        found => without_device(&found.map_or_else(|e| e.to_string(), |_| "no device".into())),
    }
}

fn without_device(why: &str) {
    println!("### Post-fetch without a GPU\n");
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let shape = &SHAPES[1];
    let fetch = PostFetch::new(
        shape.model(folder.path()),
        Options::from_environment(),
        || Ok(CudaDevice::open(0)? as Arc<dyn AsyncDevice>),
    );
    let ids = shape.ids(1);
    let mut best = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        const CALLS: u32 = 200_000;
        let began = Instant::now();
        for _ in 0..CALLS {
            fetch.schedule(0, black_box(&ids));
        }
        best.0
            .push(began.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
        let began = Instant::now();
        for _ in 0..CALLS {
            black_box(fetch.acquire(0, black_box(7)));
        }
        best.1
            .push(began.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
    }
    println!("{why}. Medians of {ROUNDS}.\n");
    println!("| call | ns |\n|---|---|");
    println!(
        "| schedule, {} experts | {:.0} |",
        ids.len(),
        median(&mut best.0)
    );
    println!(
        "| acquire, with the address of the expert on the host | {:.0} |",
        median(&mut best.1)
    );
}

fn with_device() {
    let device = CudaDevice::open(0).expect("a device");
    println!("### Post-fetch on {}\n", device.name());
    println!(
        "One layer per step: schedule its active experts, compute for as long as their copies take, acquire all, release. {LAYERS} steps a round, alternating with the peer, medians of {ROUNDS} rounds. Peer: a copy from pageable memory for each expert, and then the same computation. Limit: the same copies from page-locked memory, one behind the other, with nothing else to do. Schedule: the median call, with a busy-waiting fetch thread, and with a sleeping one (the difference is the cost of waking a thread).\n"
    );
    println!(
        "| experts of | bytes | GB/s | schedule us, awake | asleep | overlap, awake | asleep | peer ms | ours ms | limit ms | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    for shape in &SHAPES {
        measure(&device, shape, folder.path());
    }
    println!();
    println!(
        "With a cache: schedule the active experts, acquire all, release, and compute nothing. Three of four experts are those of the token before. {LAYERS} steps a round after as many to fill the cache, medians of {ROUNDS} rounds. Schedule: the median call, with a busy-waiting fetch thread.\n"
    );
    println!(
        "| experts of | slots | hits | MB copied per step | schedule us | step ms | without a cache |"
    );
    println!("|---|---|---|---|---|---|---|");
    for shape in &SHAPES {
        let model = shape.model(folder.path());
        let without = cached(&device, shape, &model, 0);
        let mut all = [8, 4, 2]
            .map(|part| (shape.ne[2] as usize / part).max(shape.active))
            .to_vec();
        all.dedup();
        for slots in all {
            let with = cached(&device, shape, &model, slots);
            println!(
                "| {}: {} of {} | {slots} | {:.1} % | {:.2} | {:.2} | **{:.3}** | {:.3} |",
                shape.name,
                shape.active,
                shape.ne[2],
                with.hits * 100.0,
                with.bytes / 1e6,
                with.asked,
                with.step,
                without.step,
            );
        }
    }
    println!();
}

/// What a step costs with a cache.
struct Cached {
    /// Share of the experts that were in the cache.
    hits: f64,
    /// Bytes copied per step.
    bytes: f64,
    /// Microseconds of a call of schedule.
    asked: f64,
    /// Milliseconds of a step.
    step: f64,
}

fn cached(device: &Arc<CudaDevice>, shape: &Shape, model: &Arc<Model>, slots: usize) -> Cached {
    let opened = device.clone();
    let mut options = Options::from_environment();
    options.config.spin = SPIN;
    options.config.cache_bytes = (slots * shape.nbytes.next_multiple_of(256)) as u64;
    let fetch = PostFetch::new(
        model.clone(),
        options,
        || Ok(opened as Arc<dyn AsyncDevice>),
    );
    let (mut asked, mut steps, mut ids) = (Vec::new(), Vec::new(), shape.ids(0));
    let mut round = |round: usize| {
        let began = Instant::now();
        for step in 0..LAYERS {
            let token = round * LAYERS + step;
            let other = shape.ids(token + 1);
            let changed = token % shape.active;
            for at in 0..shape.active.div_ceil(4) {
                let at = (changed + at) % shape.active;
                if !ids.contains(&other[at]) {
                    ids[at] = other[at];
                }
            }
            let call = Instant::now();
            fetch.schedule(0, &ids);
            asked.push(call.elapsed().as_secs_f64() * 1e6);
            for &id in &ids {
                let answer = fetch.acquire(0, id as u32);
                assert!(answer.device_address != 0, "{}", fetch.mode());
            }
            fetch.release_layer(0);
        }
        steps.push(began.elapsed().as_secs_f64() * 1e3 / LAYERS as f64);
    };
    round(0);
    let before = fetch.stats();
    for number in 1..=ROUNDS {
        round(number);
    }
    let after = fetch.stats();
    let all = (after.hits - before.hits) as f64;
    steps.remove(0);
    Cached {
        hits: (after.cache_hits - before.cache_hits) as f64 / all,
        bytes: (after.bytes - before.bytes) as f64 / (ROUNDS * LAYERS) as f64,
        asked: median(&mut asked),
        step: median(&mut steps),
    }
}

fn measure(device: &Arc<CudaDevice>, shape: &Shape, folder: &std::path::Path) {
    let model = shape.model(folder);
    let bytes = shape.nbytes * shape.active;
    let naive = Naive::new(device, shape, &model);
    let plain = naive.plain_copies();
    let mut theirs = Vec::new();
    let mut ours = [Run::default(), Run::default()];
    for round in 0..ROUNDS {
        let began = Instant::now();
        for step in 0..LAYERS / 4 {
            naive.copy(&shape.ids(round * LAYERS + step));
            compute(plain);
        }
        theirs.push(began.elapsed().as_secs_f64() * 1e3 / (LAYERS / 4) as f64);
        for (run, spin) in ours.iter_mut().zip([SPIN, Duration::ZERO]) {
            run.round(device, shape, &model, plain, spin, round * LAYERS);
        }
    }
    let theirs = median(&mut theirs);
    let [awake, asleep] = ours.map(Run::medians);
    println!(
        "| {}: {} of {} | {} x {} | {:.1} | **{:.2}** | {:.2} | **{:.1} %** | {:.1} % | {theirs:.3} | {:.3} | {:.3} | **{:.2}x** |",
        shape.name,
        shape.active,
        shape.ne[2],
        shape.active,
        shape.nbytes,
        bytes as f64 / plain.as_secs_f64() / 1e9,
        awake.0,
        asleep.0,
        awake.1 * 100.0,
        asleep.1 * 100.0,
        awake.2,
        plain.as_secs_f64() * 1e3,
        theirs / awake.2,
    );
}

/// What was measured with the scheduler: microseconds of each call of schedule, the overlap
/// and the milliseconds of a layer in each round.
#[derive(Default)]
struct Run {
    asked: Vec<f64>,
    overlaps: Vec<f64>,
    layers: Vec<f64>,
}

impl Run {
    fn round(
        &mut self,
        device: &Arc<CudaDevice>,
        shape: &Shape,
        model: &Arc<Model>,
        plain: Duration,
        spin: Duration,
        first: usize,
    ) {
        // Page locks are taken again in each round: while they last, the peer's memory is locked too.
        let opened = device.clone();
        let mut options = Options::from_environment();
        options.config.spin = spin;
        let fetch = PostFetch::new(
            model.clone(),
            options,
            || Ok(opened as Arc<dyn AsyncDevice>),
        );
        let began = Instant::now();
        for step in 0..LAYERS {
            let ids = shape.ids(first + step);
            let call = Instant::now();
            fetch.schedule(0, &ids);
            self.asked.push(call.elapsed().as_secs_f64() * 1e6);
            compute(plain);
            for id in ids {
                assert!(
                    fetch.acquire(0, id as u32).device_address != 0,
                    "{}",
                    fetch.mode()
                );
            }
            fetch.release_layer(0);
        }
        self.layers
            .push(began.elapsed().as_secs_f64() * 1e3 / LAYERS as f64);
        self.overlaps
            .push(fetch.stats().overlap().expect("copies were timed"));
    }

    fn medians(mut self) -> (f64, f64, f64) {
        (
            median(&mut self.asked),
            median(&mut self.overlaps),
            median(&mut self.layers),
        )
    }
}

/// Copies as a program without a scheduler does.
struct Naive<'a> {
    device: &'a Arc<CudaDevice>,
    shape: &'a Shape,
    data: *const u8,
    memory: Box<dyn llama_sidecar::device::Buffer>,
}

impl<'a> Naive<'a> {
    fn new(device: &'a Arc<CudaDevice>, shape: &'a Shape, model: &Model) -> Naive<'a> {
        let bytes = (shape.nbytes * shape.active) as u64;
        let data = model.host_bytes(&model.tensor(0)).expect("it is mapped");
        Naive {
            device,
            shape,
            data: data.cast(),
            memory: device.clone().allocate(bytes).expect("memory"),
        }
    }

    fn copy(&self, ids: &[i32]) {
        let stream = self.device.create_stream().expect("a stream");
        for (i, &id) in ids.iter().enumerate() {
            let from = self.data.wrapping_add(id as usize * self.shape.nbytes);
            let to = self.memory.address() + (i * self.shape.nbytes) as u64;
            // SAFETY: inside the tensor, and inside the buffer.
            unsafe { self.one(stream, to, from, self.shape.nbytes) };
        }
        self.finish(stream);
    }

    /// How long the copies of a layer take from page-locked memory, one behind the other.
    fn plain_copies(&self) -> Duration {
        let len = self.shape.nbytes;
        let pinned = self
            .device
            .allocate_pinned(len)
            .expect("page-locked memory");
        let mut times = Vec::new();
        for _ in 0..9 {
            let stream = self.device.create_stream().expect("a stream");
            let began = Instant::now();
            for i in 0..self.shape.active {
                // SAFETY: as large as the buffers.
                unsafe {
                    self.one(
                        stream,
                        self.memory.address() + (i * len) as u64,
                        pinned,
                        len,
                    )
                };
            }
            self.finish(stream);
            times.push(began.elapsed().as_secs_f64());
        }
        // SAFETY: all copies are done.
        unsafe { self.device.free_pinned(pinned).expect("freed") };
        Duration::from_secs_f64(median(&mut times))
    }

    /// # Safety
    ///
    /// The ranges are alive until the stream is finished.
    unsafe fn one(
        &self,
        stream: llama_sidecar::device::Stream,
        to: u64,
        from: *const u8,
        len: usize,
    ) {
        let copy = Copy2d {
            to,
            to_pitch: len,
            from,
            from_pitch: len,
            width: len,
            rows: 1,
        };
        // SAFETY: as the caller guarantees.
        unsafe { self.device.copy_in(stream, copy).expect("a copy") };
    }

    fn finish(&self, stream: llama_sidecar::device::Stream) {
        let event = self.device.create_event().expect("an event");
        self.device.record(event, stream).expect("recorded");
        while !self.device.is_done(event).expect("asked") {}
        self.device.destroy_event(event).expect("freed");
        self.device.destroy_stream(stream).expect("freed");
    }
}
