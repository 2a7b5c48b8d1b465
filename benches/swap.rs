//! Measures the cost of a swap for running evaluations: the pause by size of the
//! tensor, and 10,000 swaps under eight evaluating threads.
//!
//! Run it with `cargo xtask bench swap`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use llama_sidecar::device::{Device, HostDevice};
use llama_sidecar::model::{Context, Model, Options, Placement};
use sidecar_core::reload::Report;
use testkit::fixtures::cache;
use testkit::host::link;
use testkit::process::resident;
use testkit::writer::{F16, Gguf, Q8_0};

fn main() {
    let folder = cache().join("bench-swap");
    std::fs::create_dir_all(&folder).expect("the cache can be written");
    pause(&folder);
    soak(&folder);
    std::fs::remove_dir_all(&folder).expect("what was made");
}

/// Two versions of a model with one large tensor, and a path that names one of them.
struct Pair {
    versions: [PathBuf; 2],
    path: PathBuf,
}

impl Pair {
    fn new(folder: &Path, name: &str, files: [Gguf; 2]) -> Pair {
        let versions = [0, 1].map(|i| folder.join(format!("{name}-{i}.gguf")));
        for (path, file) in versions.iter().zip(files) {
            file.write(path).expect("the cache can be written");
        }
        let pair = Pair {
            versions,
            path: folder.join(format!("{name}.gguf")),
        };
        pair.point_to(0);
        pair
    }

    /// Changes the file by a link: no byte is written, only the reload is measured.
    fn point_to(&self, version: usize) {
        link(&self.path, &self.versions[version]);
    }

    fn open(&self, placement: Placement) -> Arc<Model> {
        let devices = 0..placement.split.len() + 1;
        let options = Options {
            hotswap: true,
            devices: devices
                .map(|i| HostDevice::new(format!("d{i}")) as Arc<dyn Device>)
                .collect(),
            placement,
            ..Options::host()
        };
        let model = Model::open(&self.path, options).expect("valid");
        model.load_all(|_| true).expect("memory");
        Arc::new(model)
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn swap(pair: &Pair, model: &Model, version: usize) -> Report {
    pair.point_to(version);
    let report = model.reload().expect("memory");
    assert!(report.changed() && report.failure.is_none());
    report
}

fn pause(folder: &Path) {
    const ROUNDS: usize = 21;
    let sizes = [4 << 20, 400 << 20];
    let runs = sizes.map(|bytes: i64| {
        let tensor = |seed| {
            let file = Gguf::default();
            file.tensor("big.weight", &[1024, bytes / 2048], F16, seed)
        };
        let pair = Pair::new(folder, &format!("pause-{bytes}"), [tensor(1), tensor(2)]);
        let model = pair.open(Placement::default());
        (pair, model)
    });
    let mut switches = [Vec::new(), Vec::new()];
    let mut waits = [Vec::new(), Vec::new()];
    let mut totals = [Vec::new(), Vec::new()];
    for round in 1..=ROUNDS {
        for (side, (pair, model)) in runs.iter().enumerate() {
            // An evaluation begins while the reload runs, again and again: how long
            // does the longest of them wait?
            let stop = AtomicBool::new(false);
            let (report, longest) = std::thread::scope(|scope| {
                let end = StopAtEnd(&stop);
                let evaluating = scope.spawn(|| {
                    let context = Context::new(model.clone());
                    let mut longest = Duration::ZERO;
                    while !stop.load(Ordering::Relaxed) {
                        let asked = Instant::now();
                        context.begin().expect("not evaluating");
                        longest = longest.max(asked.elapsed());
                        context.end().expect("evaluating");
                    }
                    longest
                });
                let report = swap(pair, model, round % 2);
                drop(end);
                (report, evaluating.join().expect("no panic"))
            });
            switches[side].push(report.times.switch);
            waits[side].push(longest);
            totals[side].push(report.times.total);
        }
    }
    let [small, large] = switches.map(median);
    let [small_wait, large_wait] = waits.map(median);
    let [small_total, large_total] = totals.map(median);
    println!("### The pause of a swap\n");
    println!(
        "One tensor, swapped to other bytes and back while one thread begins and ends evaluations; medians of {ROUNDS}, the two sizes alternating. Switch: the time during which no evaluation can run. Longest wait: the longest wait of an evaluation at its beginning, including the scheduling of a 2-core machine. Limit: exchanging two pointers.\n"
    );
    println!("| tensor | switch us | longest wait us | whole reload ms |");
    println!("|---|---|---|---|");
    println!(
        "| 4 MiB | {:.2} | {:.1} | {:.1} |",
        us(small),
        us(small_wait),
        us(small_total) / 1e3
    );
    println!(
        "| 400 MiB | {:.2} | {:.1} | {:.1} |",
        us(large),
        us(large_wait),
        us(large_total) / 1e3
    );
    println!(
        "| ratio | **{:.2}** | **{:.2}** | {:.0} |\n",
        large.as_secs_f64() / small.as_secs_f64(),
        large_wait.as_secs_f64() / small_wait.as_secs_f64(),
        large_total.as_secs_f64() / small_total.as_secs_f64()
    );
}

fn soak(folder: &Path) {
    const SWAPS: usize = 10_000;
    let file = |seed, ty| {
        Gguf::default()
            .tensor("blk.0.ffn_gate_exps.weight", &[64, 128, 4], F16, 1)
            .tensor("blk.0.ffn_up_exps.weight", &[64, 128, 4], F16, 2)
            .tensor("blk.0.ffn_down_exps.weight", &[128, 64, 4], ty, seed)
    };
    let files = [file(3, F16), file(4, Q8_0)];
    let expected = files.each_ref().map(|file| file.tensors[2].data.clone());
    let pair = Pair::new(folder, "soak", files);
    let placement = Placement {
        device: 1,
        split: vec![2.0, 1.0],
        ..Placement::default()
    };
    let model = pair.open(placement);
    let (stop, evaluations) = (AtomicBool::new(false), AtomicU64::new(0));
    let began = Instant::now();
    let mut longest = Duration::ZERO;
    let mut memory = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let context = Context::new(model.clone());
                let mut bytes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    context.begin().expect("not evaluating");
                    bytes.resize(model.tensor(2).nbytes() as usize, 0);
                    model.read(2, 0, &mut bytes).expect("loaded");
                    context.end().expect("evaluating");
                    assert!(expected.contains(&bytes), "a wrong byte");
                    evaluations.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Also when a swap panics, the threads end.
        let _stop = StopAtEnd(&stop);
        for i in 1..=SWAPS {
            longest = longest.max(swap(&pair, &model, i % 2).times.switch);
            if i % (SWAPS / 10) == 0 {
                memory.push((resident(), used(&model)));
            }
        }
    });
    let pauses = model.pauses();
    println!("### {SWAPS} swaps under eight evaluating threads\n");
    println!(
        "A down-projection of experts, split over two devices, alternating between two types; each evaluation compares every byte.\n"
    );
    println!(
        "| swaps | time s | evaluations | wrong bytes | longest switch us | evaluations that waited | longest wait ms |"
    );
    println!("|---|---|---|---|---|---|---|");
    println!(
        "| {SWAPS} | {:.1} | {} | 0 | {:.1} | {} | {:.1} |\n",
        began.elapsed().as_secs_f64(),
        evaluations.into_inner(),
        us(longest),
        pauses.count,
        us(pauses.longest) / 1e3
    );
    println!(
        "Memory after each tenth (resident KiB, device bytes): {}\n",
        memory
            .iter()
            .map(|(rss, used)| format!("{}/{used}", rss >> 10))
            .collect::<Vec<_>>()
            .join(", ")
    );
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn used(model: &Model) -> u64 {
    model
        .devices()
        .iter()
        .map(|device| device.memory().used)
        .sum()
}
