//! Measures a model that is larger than memory on an emulated disk: tokens per second, bytes and
//! page faults of a token, time until the first token.
//!
//! Run it with `cargo xtask bench stream`; `cargo bench --bench stream -- --quick` is a short form.
//! Each argument `--with=NAME=VALUE,NAME=VALUE` adds a run with these variables of the drop-in,
//! `--only=LABEL` leaves out the runs but stock and those whose labels contain it, and
//! `--disk=MICROSECONDS,MB_PER_SECOND,PERCENT` measures on that disk alone.
//! The program is `hosts/c/host.c` with one thread, in a control group with a limit of memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use sidecar_core::gguf::{Access, GgufFile};
use testkit::fixtures::{large_model, large_shards};
use testkit::host::{DropIn, Host, Program};
use testkit::median;
use testkit::memory_limit::{MemoryLimit, drop_cache};
use testkit::process::{memory, read_by};
use testkit::slow_disk::{SlowDisk, Speed};

/// What the program is run with.
struct Way {
    label: String,
    /// Variables of the drop-in, or nothing where it is absent.
    drop_in: DropIn,
    /// Whether the program itself reads the experts of a matrix when its multiplication begins, as
    /// ik_llama.cpp does (`hosts/c/read_at_matmul.h`).
    at_matmul: bool,
}

/// What is compared: the first with each of the others.
fn ways(arguments: &[String]) -> Vec<Way> {
    let with = arguments
        .iter()
        .filter_map(|argument| argument.strip_prefix("--with="));
    let mut ways = vec![
        Way {
            label: "stock".into(),
            drop_in: DropIn::Absent,
            at_matmul: false,
        },
        Way {
            label: "read at each matmul".into(),
            drop_in: DropIn::Absent,
            at_matmul: true,
        },
        Way::new("streaming", "LLAMA_EXPERT_STREAM=auto"),
    ];
    ways.extend(with.map(|variables| Way::new(variables, variables)));
    let mut only = arguments.iter().filter_map(|of| of.strip_prefix("--only="));
    if let Some(only) = only.next() {
        ways.retain(|way| way.label == "stock" || way.label.contains(only));
    }
    ways
}

impl Way {
    /// The drop-in with variables that are separated by commas.
    fn new(label: &str, variables: &str) -> Way {
        let common = "LLAMA_SIDECAR_HOTSWAP=0,LLAMA_SIDECAR_LOG=warn";
        let all = common.split(',').chain(variables.split(','));
        let parts = all.map(|variable| variable.split_once('=').expect("NAME=VALUE"));
        // Their names live as long as the program.
        let named = parts.map(|(name, value)| (&*name.to_owned().leak(), value.to_owned()));
        Way {
            label: label.into(),
            drop_in: DropIn::On(named.collect()),
            at_matmul: false,
        }
    }

    fn start(&self, model: &Path, set: impl FnOnce(&mut Command)) -> Host {
        Host::start_with(Program::C, model, &self.drop_in, |command| {
            command.env("HOST_CONTEXT", "512");
            if self.at_matmul {
                command.env("HOST_READ_AT_MATMUL", "1");
            }
            set(command);
        })
    }
}

/// A disk, and the share of the model that fits into memory, in percent.
const DISKS: [(Speed, u64); 3] = [
    (Speed::new(1000, 1000), 25),
    (Speed::new(1000, 1000), 50),
    (Speed::new(100, 2000), 25),
];

/// Read-ahead of the kernel, its default for most disks.
const READ_AHEAD_KB: u64 = 128;

/// Returns the disks of the arguments, or else of a table.
fn disks(arguments: &[String], table: &[(Speed, u64)]) -> Vec<(Speed, u64)> {
    let given = arguments.iter().filter_map(|of| of.strip_prefix("--disk="));
    let disk = |text: &str| {
        let numbers: Vec<u64> = text
            .split(',')
            .map(|of| of.parse().expect("a number"))
            .collect();
        let [latency, bandwidth, percent] = numbers[..] else {
            panic!("--disk={text}: expected three numbers");
        };
        (Speed::new(latency, bandwidth), percent)
    };
    let given: Vec<_> = given.map(disk).collect();
    if given.is_empty() {
        table.to_vec()
    } else {
        given
    }
}

/// How much is measured.
struct Amount {
    disks: &'static [(Speed, u64)],
    rounds: usize,
    /// Tokens of the prompt, of the text before the measurement, and of the measurement.
    prefill: usize,
    warm_up: usize,
    decode: usize,
    /// Rounds with everything in memory.
    resident_rounds: usize,
}

const FULL: Amount = Amount {
    disks: &DISKS,
    rounds: 3,
    prefill: 256,
    warm_up: 24,
    decode: 24,
    resident_rounds: 41,
};

const QUICK: Amount = Amount {
    disks: DISKS.split_at(1).0,
    rounds: 1,
    prefill: 64,
    warm_up: 16,
    decode: 16,
    resident_rounds: 7,
};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let amount = if quick { QUICK } else { FULL };
    let ways = ways(&arguments);
    let model = large_model();
    println!("### A model larger than memory\n");
    let disk = SlowDisk::mount(&model, DISKS[0].0).and_then(|disk| {
        disk.read_ahead_kb(READ_AHEAD_KB)
            .map_err(|error| format!("read-ahead cannot be set: {error}"))?;
        MemoryLimit::new(1 << 30).map(|_| disk)
    });
    let disk = match disk {
        Ok(disk) => disk,
        Err(reason) => return println!("Skipped: {reason}.\n"),
    };
    let parts = Parts::of(&model);
    let reference = reference(&ways[0], &model, &amount);
    let disks = disks(&arguments, amount.disks);
    slow(&disk, &disks, &ways, &parts, &reference, &amount);
    if disks == amount.disks {
        two_disks(&disk, &ways, &parts, &reference, &amount);
        drop(disk);
        own_disk(&ways, &model, &parts, &reference, &amount);
        resident(&ways, &model, &amount);
    }
}

/// The answer of the program to `force` and `prefill`.
struct Answer {
    median_ms: f64,
    mean_ms: f64,
    faults: f64,
    hash: String,
}

fn ask(host: &mut Host, command: &str, tokens: usize) -> Answer {
    let line = host.ask(&format!("{command} {tokens}"));
    let words: Vec<&str> = line.split(' ').collect();
    let [
        "median_ms",
        median,
        "mean_ms",
        mean,
        "faults",
        faults,
        "hash",
        hash,
    ] = words[..]
    else {
        panic!("{line}");
    };
    let number = |text: &str| text.parse().expect("a number");
    Answer {
        median_ms: number(median),
        mean_ms: number(mean),
        faults: number(faults),
        hash: hash.to_owned(),
    }
}

/// Evaluates the whole text of the measurement; the last answer is the measured one.
fn evaluate(host: &mut Host, amount: &Amount) -> [Answer; 4] {
    [
        ("force", 1),
        ("prefill", amount.prefill),
        ("force", amount.warm_up),
        ("force", amount.decode),
    ]
    .map(|(command, tokens)| ask(host, command, tokens))
}

fn hashes(answers: &[Answer; 4]) -> Vec<String> {
    answers.iter().map(|answer| answer.hash.clone()).collect()
}

/// What the tensors of the model consist of, in bytes.
struct Parts {
    /// Gate, up and down of one expert.
    expert: u64,
    /// What is no expert.
    others: u64,
    all: u64,
}

impl Parts {
    fn of(model: &Path) -> Parts {
        let gguf = GgufFile::open(model, Access::Read).expect("a model");
        let all = std::fs::metadata(model).expect("a model").len();
        let mut experts = 0;
        let mut expert = 0;
        for tensor in &gguf.header.tensors {
            let name = gguf.header.name(tensor).to_string_lossy();
            if name.ends_with("_exps.weight") {
                experts += tensor.nbytes;
                if name.starts_with("blk.0.") {
                    expert += tensor.nbytes / tensor.ne[2];
                }
            }
        }
        Parts {
            expert,
            others: all - experts,
            all,
        }
    }
}

/// What an evaluation of the text routes, by layer: the experts that it uses.
type Route = BTreeMap<u32, BTreeSet<u32>>;

/// The program with everything in memory.
struct Reference {
    /// Of each evaluation.
    routes: Vec<Route>,
    hashes: Vec<String>,
    ms_per_token: f64,
}

fn reference(stock: &Way, model: &Path, amount: &Amount) -> Reference {
    let file = tempfile::NamedTempFile::new().expect("a folder");
    let mut traced = stock.start(model, |command| {
        command.env("HOST_ROUTES", file.path());
    });
    let expected = hashes(&evaluate(&mut traced, amount));
    let text = std::fs::read_to_string(file.path()).expect("routes");
    let mut routes: Vec<Route> = Vec::new();
    for line in text.lines() {
        if line == "evaluation" {
            routes.push(Route::new());
            continue;
        }
        let mut numbers = line.split(' ').map(|word| word.parse().expect("a number"));
        let layer = numbers.next().expect("a layer");
        let route = routes.last_mut().expect("an evaluation");
        route.entry(layer).or_default().extend(numbers);
    }
    let mut host = stock.start(model, |_| {});
    assert_eq!(hashes(&evaluate(&mut host, amount)), expected);
    let fastest = (0..5).map(|_| {
        ask(&mut host, "prefill", 8);
        ask(&mut host, "force", amount.decode).median_ms
    });
    Reference {
        routes,
        hashes: expected,
        ms_per_token: fastest.fold(f64::MAX, f64::min),
    }
}

/// What an exact LRU reads for the measured tokens, each on average.
struct Lru {
    bytes: f64,
    /// Layers that miss an expert.
    layers: f64,
}

impl Lru {
    /// Simulates a cache of so many experts.
    fn of(routes: &[Route], measured: usize, capacity: usize, expert_bytes: u64) -> Lru {
        let mut used: HashMap<(u32, u32), u64> = HashMap::new();
        let mut oldest: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
        let (mut time, mut misses, mut layers) = (0, 0, 0);
        for (at, route) in routes.iter().enumerate() {
            let counted = at + measured >= routes.len();
            for (layer, experts) in route {
                let mut missed = 0;
                for expert in experts {
                    let key = (*layer, *expert);
                    time += 1;
                    match used.insert(key, time) {
                        Some(before) => drop(oldest.remove(&before)),
                        None => missed += 1,
                    }
                    oldest.insert(time, key);
                    if used.len() > capacity {
                        let (_, key) = oldest.pop_first().expect("as many as are in use");
                        used.remove(&key);
                    }
                }
                if counted {
                    misses += missed;
                    layers += u64::from(missed > 0);
                }
            }
        }
        Lru {
            bytes: (misses * expert_bytes) as f64 / measured as f64,
            layers: layers as f64 / measured as f64,
        }
    }
}

/// What is measured of one way on one disk.
#[derive(Default)]
struct Figures {
    first_token_s: Vec<f64>,
    prefill_s: Vec<f64>,
    ms: Vec<f64>,
    mb: Vec<f64>,
    faults: Vec<f64>,
}

/// Measures each way on each disk, alternating.
fn slow(
    disk: &SlowDisk,
    disks: &[(Speed, u64)],
    ways: &[Way],
    parts: &Parts,
    reference: &Reference,
    amount: &Amount,
) {
    println!(
        "A mixture of 64 experts, 4 per token, {:.1} GB, on a disk with a latency and a bandwidth; memory for a share of the model, nothing in the page cache at the start, {READ_AHEAD_KB} KB read-ahead, one thread. First token: from the start of the process. Prefill: {} tokens at a time. Then {} tokens one by one, and the {} that are measured. Medians of {}, alternating; the logits are the same as those with everything in memory, where a token takes {:.1} ms (the fastest of 5 texts). LRU: what an exact LRU in the same memory reads. Limit: the longer of the computation, and the bytes of the LRU at the disk's bandwidth with one latency for each layer that misses an expert.\n",
        parts.all as f64 / 1e9,
        amount.prefill,
        amount.warm_up,
        amount.decode,
        amount.rounds,
        reference.ms_per_token,
    );
    println!(
        "| disk | memory | with | first token s | prefill s | tokens/s | ratio | MB/token | LRU MB/token | ratio | major faults/token | share of the limit |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (speed, percent) in disks {
        disk.set_speed(*speed);
        let limit = parts.all * percent / 100;
        let mut figures: Vec<Figures> = ways.iter().map(|_| Figures::default()).collect();
        let mut private = None;
        for _ in 0..amount.rounds {
            for (figures, way) in figures.iter_mut().zip(ways) {
                // The first way keeps no experts in memory of the process.
                let of_way = measure(
                    &[disk],
                    &disk.path(),
                    limit,
                    way,
                    reference,
                    amount,
                    figures,
                );
                private.get_or_insert(of_way);
            }
        }
        let room = limit.saturating_sub(parts.others + private.unwrap_or(0));
        let capacity = (room / parts.expert) as usize;
        let lru = Lru::of(&reference.routes, amount.decode, capacity, parts.expert);
        let reading_ms = lru.bytes * 1e3 / speed.bandwidth as f64
            + lru.layers * speed.latency.as_secs_f64() * 1e3;
        let limit_ms = reference.ms_per_token.max(reading_ms);
        let mut stock = None;
        for (figures, way) in figures.iter_mut().zip(ways) {
            let ms = median(&mut figures.ms);
            let mb = median(&mut figures.mb);
            let stock = *stock.get_or_insert(ms);
            println!(
                "| {:.1} ms, {:.0} GB/s | {percent} % | {} | {:.2} | {:.2} | {:.2} | **{:.2}x** | {mb:.1} | {:.1} | {:.2} | {:.0} | {:.0} % |",
                speed.latency.as_secs_f64() * 1e3,
                speed.bandwidth as f64 / 1e9,
                way.label,
                median(&mut figures.first_token_s),
                median(&mut figures.prefill_s),
                1e3 / ms,
                stock / ms,
                lru.bytes / 1e6,
                mb * 1e6 / lru.bytes,
                median(&mut figures.faults),
                1e2 * limit_ms / ms,
            );
        }
    }
    let counts = disk.counts();
    println!(
        "\nThe disk answered {} requests, up to {} at a time, on average {:.0} us before or after their time.\n",
        counts.requests,
        counts.depth,
        counts.off.as_secs_f64() * 1e6 / counts.requests as f64,
    );
}

/// Speeds of each of two disks: a volume of a cloud with its usual quota, and one whose double is near to what
/// the two cores of a small machine can emulate.
const EACH_OF_TWO: [Speed; 2] = [Speed::new(1000, 125), Speed::new(1000, 400)];

/// Compares streaming from one disk with streaming from two, which have half of the model each.
fn two_disks(disk: &SlowDisk, ways: &[Way], parts: &Parts, reference: &Reference, amount: &Amount) {
    let Some(way) = ways.iter().find(|way| way.label == "streaming") else {
        return;
    };
    println!("### A model on two disks\n");
    let mounted = large_shards().map(|shard| SlowDisk::mount(&shard, EACH_OF_TWO[0]));
    let [first, second] = mounted.map(|disk| disk.expect("one is mounted already"));
    let folder = tempfile::tempdir().expect("a folder");
    for (disk, shard) in [&first, &second].iter().zip(large_shards()) {
        let link = folder.path().join(shard.file_name().expect("a file"));
        std::os::unix::fs::symlink(disk.path(), link).expect("a new name");
        disk.read_ahead_kb(READ_AHEAD_KB).expect("a mounted disk");
    }
    let shard = large_shards()[0]
        .file_name()
        .map(|name| folder.path().join(name));
    let places = [
        ("one", disk.path(), vec![disk]),
        ("two", shard.expect("a file"), vec![&first, &second]),
    ];
    println!(
        "The same model in two shards with a disk for each; of the three matrices of a layer, one disk has two, in turn. Memory for 25 % of the model. Medians of {}, alternating; the same logits. Limit: twice the speed of one disk for prompts, and 1.5 times for single tokens, which wait for the disk with two matrices in each layer.\n",
        amount.rounds
    );
    println!("| each disk | disks | prefill s | ratio | tokens/s | ratio |");
    println!("|---|---|---|---|---|---|");
    for speed in EACH_OF_TWO {
        for disk in [disk, &first, &second] {
            disk.set_speed(speed);
        }
        let mut figures = [Figures::default(), Figures::default()];
        for _ in 0..amount.rounds {
            for ((_, model, disks), figures) in places.iter().zip(&mut figures) {
                measure(disks, model, parts.all / 4, way, reference, amount, figures);
            }
        }
        let [one, two] = figures.map(|mut of| (median(&mut of.prefill_s), median(&mut of.ms)));
        for ((label, ..), of) in places.iter().zip([one, two]) {
            println!(
                "| {:.1} ms, {:.3} GB/s | {label} | {:.2} | **{:.2}x** | {:.2} | **{:.2}x** |",
                speed.latency.as_secs_f64() * 1e3,
                speed.bandwidth as f64 / 1e9,
                of.0,
                one.0 / of.0,
                1e3 / of.1,
                one.1 / of.1
            );
        }
    }
    println!();
}

/// Measures one way once, and returns the memory that the process has for itself.
fn measure(
    disks: &[&SlowDisk],
    model: &Path,
    limit: u64,
    way: &Way,
    reference: &Reference,
    amount: &Amount,
    figures: &mut Figures,
) -> u64 {
    for disk in disks {
        disk.drop_cache().expect("no process has mapped the file");
    }
    if disks.is_empty() {
        let file = File::open(model).expect("a model");
        drop_cache(&file).expect("no process has mapped the file");
    }
    let group = MemoryLimit::new(limit).unwrap_or_else(|reason| panic!("{reason}"));
    let began = Instant::now();
    let mut host = way.start(model, |command| group.apply(command));
    let process = host.id();
    // Without an emulated disk, what the process has read from a disk (proc_pid_io(5)).
    let read = || match disks {
        [] => read_by(process),
        _ => disks.iter().map(|disk| disk.counts().bytes).sum::<u64>(),
    };
    let first = ask(&mut host, "force", 1);
    figures.first_token_s.push(began.elapsed().as_secs_f64());
    let prefill = ask(&mut host, "prefill", amount.prefill);
    figures.prefill_s.push(prefill.mean_ms / 1e3);
    let warm_up = ask(&mut host, "force", amount.warm_up);
    let before = read();
    let decode = ask(&mut host, "force", amount.decode);
    let bytes = read() - before;
    figures.ms.push(decode.mean_ms);
    figures.mb.push(bytes as f64 / 1e6 / amount.decode as f64);
    figures.faults.push(decode.faults);
    let hashes = hashes(&[first, prefill, warm_up, decode]);
    assert_eq!(hashes, reference.hashes, "the logits differ");
    let private = memory(&host.id().to_string(), "RssAnon:");
    assert_eq!(host.end(), Some(0));
    private
}

/// Measures on the disk of this machine, without an emulation.
fn own_disk(ways: &[Way], model: &Path, parts: &Parts, reference: &Reference, amount: &Amount) {
    println!("### The disk of this machine\n");
    println!(
        "The same model on the disk of this machine, with its own read-ahead. Memory for 25 % of the model, nothing in the page cache at the start. Before each run, the disk was read for a second by 8 threads, 512 KiB at a time, around the page cache. Medians of {}, alternating; the same logits.\n",
        amount.rounds
    );
    println!("| with | the disk alone, MB/s | prefill s | ratio | tokens/s | ratio | MB/token |");
    println!("|---|---|---|---|---|---|---|");
    let mut figures: Vec<Figures> = ways.iter().map(|_| Figures::default()).collect();
    let mut alone = vec![Vec::new(); ways.len()];
    for _ in 0..amount.rounds {
        for (at, way) in ways.iter().enumerate() {
            alone[at].push(disk_speed(model));
            let figures = &mut figures[at];
            measure(&[], model, parts.all / 4, way, reference, amount, figures);
        }
    }
    let mut stock = None;
    for (at, way) in ways.iter().enumerate() {
        let prefill = median(&mut figures[at].prefill_s);
        let ms = median(&mut figures[at].ms);
        let (stock_prefill, stock_ms) = *stock.get_or_insert((prefill, ms));
        println!(
            "| {} | {:.0} | {prefill:.2} | **{:.2}x** | {:.2} | **{:.2}x** | {:.1} |",
            way.label,
            median(&mut alone[at]),
            stock_prefill / prefill,
            1e3 / ms,
            stock_ms / ms,
            median(&mut figures[at].mb),
        );
    }
    println!();
}

/// Returns how many megabytes of a file 8 threads read in a second around the page cache, at places all over
/// it.
fn disk_speed(path: &Path) -> f64 {
    const THREADS: u64 = 8;
    const PIECE: u64 = 512 << 10;
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(path);
    let file = file.expect("a disk with direct reads");
    let pieces = file.metadata().expect("a file").len() / PIECE;
    let began = Instant::now();
    let (file, began) = (&file, &began);
    let read = move |thread: u64| {
        // Alignment for direct reads.
        let mut memory = memmap2::MmapMut::map_anon(PIECE as usize).expect("memory");
        let mut number = thread;
        let mut bytes = 0;
        while began.elapsed().as_secs_f64() < 1.0 {
            number = number
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let offset = (number >> 33) % pieces * PIECE;
            bytes += file
                .read_at(&mut memory, offset)
                .expect("a disk that reads");
        }
        bytes
    };
    let bytes: usize = std::thread::scope(|scope| {
        let threads = (0..THREADS).map(|thread| scope.spawn(move || read(thread)));
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .sum()
    });
    bytes as f64 / 1e6 / began.elapsed().as_secs_f64()
}

/// Compares the ways with everything in memory, on the real disk.
fn resident(ways: &[Way], model: &Path, amount: &Amount) {
    const TOKENS: usize = 32;
    println!("### A model in memory\n");
    println!(
        "The same model with everything in the page cache. {} rounds of {TOKENS} tokens, alternating; the range of the middle half of the rounds in brackets. Limit: no cost.\n",
        amount.resident_rounds
    );
    println!("| with | ms/token | ratio of tokens/s |");
    println!("|---|---|---|");
    let mut hosts = ways
        .iter()
        .map(|way| way.start(model, |_| {}))
        .collect::<Vec<_>>();
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..amount.resident_rounds + 1 {
        for turn in 0..hosts.len() {
            let at = (round + turn) % hosts.len();
            ask(&mut hosts[at], "prefill", 8);
            let answer = ask(&mut hosts[at], "force", TOKENS);
            // The first round warms up.
            if round > 0 {
                times[at].push(answer.median_ms);
            }
        }
    }
    for (at, way) in ways.iter().enumerate() {
        let mut ratios: Vec<f64> = (0..amount.resident_rounds)
            .map(|round| times[0][round] / times[at][round])
            .collect();
        let ratio = median(&mut ratios);
        println!(
            "| {} | {:.2} | **{ratio:.4}** ({:.3} to {:.3}) |",
            way.label,
            median(&mut times[at].clone()),
            ratios[ratios.len() / 4],
            ratios[ratios.len() * 3 / 4],
        );
    }
}
