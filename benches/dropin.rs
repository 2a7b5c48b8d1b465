//! Measures the cost of the idle drop-in per evaluation, and a swap of one tensor against a
//! restart of the program.
//!
//! Run it with `cargo xtask bench dropin`. The program is `hosts/c/host.c`, which starts
//! faster than the others.

use std::ffi::CString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use sidecar_core::gguf::{Access, GgufFile, HeaderWriter};
use testkit::fixtures::{cache, fixture};
use testkit::host::{DropIn, Host, Program, link, preload_library};
use testkit::median;

fn main() {
    start();
    idle();
    let folder = cache().join("bench-dropin");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("the cache can be written");
    swaps(&folder);
    rounds(&folder);
    std::fs::remove_dir_all(&folder).expect("what was made");
}

/// As a user has it: nothing logged but warnings, and files looked at every so many ms.
fn quiet(poll_ms: &str) -> DropIn {
    DropIn::On(vec![
        ("LLAMA_SIDECAR_LOG", "warn".into()),
        ("LLAMA_HOTSWAP_POLL_MS", poll_ms.into()),
    ])
}

fn seconds(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64()
}

/// Time that a program which is no host takes from start to end, and its page faults.
fn start() {
    const ROUNDS: usize = 2001;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let empty = folder.path().join("libempty.so");
    let source = ["-shared", "-fPIC", "-x", "c", "/dev/null", "-o"];
    let cc = Command::new("cc").args(source).arg(&empty).status();
    assert!(cc.expect("a C compiler").success());

    println!("### Programs without ggml\n");
    println!(
        "`true`, from start to exit, {ROUNDS} times, alternating. Limit: an empty library. Page faults are counted: they do not vary with the load of the machine.\n"
    );
    println!("| preloaded | ms | added ms | page faults |");
    println!("|---|---|---|---|");
    let sides = [
        ("nothing", None),
        ("an empty library", Some(empty)),
        ("the drop-in", Some(preload_library())),
    ];
    let mut times = [const { Vec::new() }; 3];
    let mut faults = [const { Vec::new() }; 3];
    for round in 0..ROUNDS {
        for turn in 0..sides.len() {
            let at = (round + turn) % sides.len();
            let mut command = Command::new("true");
            if let Some(library) = &sides[at].1 {
                command.env("LD_PRELOAD", library);
            }
            let before = faults_of_children();
            let time = seconds(|| assert!(command.status().expect("it starts").success()));
            faults[at].push(faults_of_children() - before);
            times[at].push(time * 1e3);
        }
    }
    let times = times.map(|mut times| median(&mut times));
    for (at, (name, _)) in sides.iter().enumerate() {
        faults[at].sort_unstable();
        let faults = faults[at][ROUNDS / 2];
        let (time, added) = (times[at], times[at] - times[0]);
        println!("| {name} | {time:.3} | **{added:.3}** | {faults} |");
    }
    println!();
}

/// Page faults without input of all children that ended.
fn faults_of_children() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: fills the struct, which is valid as zeros, too.
    unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init().ru_minflt
    }
}

/// Time per token with the drop-in idle and without it.
fn idle() {
    const TOKENS: usize = 60;
    const ROUNDS: usize = 41;
    println!("### Evaluations with hot-swap and nothing to swap, and with the expert trace\n");
    println!(
        "Peer: the same program without the drop-in, in two processes, which shows the difference between equal processes. {ROUNDS} rounds of a text of {TOKENS} tokens, alternating; the range of the middle half of the rounds in brackets. Limit: a few atomic operations per token, and copying 30 x 8 bytes for the experts; for routes, writing 120 bytes to a file, for their gate weights 240 more.\n"
    );
    println!(
        "| model | with | without ms/token | with ms/token | ratio of medians | of the fastest rounds |"
    );
    println!("|---|---|---|---|---|---|");
    let trace = || {
        DropIn::On(vec![
            ("LLAMA_SIDECAR_HOTSWAP", "0".into()),
            ("LLAMA_EXPERT_TRACE_OUTPUT", "/dev/null".into()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ])
    };
    let names = || {
        DropIn::On(vec![
            ("LLAMA_HOTSWAP_ENABLED", "0".into()),
            ("LLAMA_EXPERT_TRACE_NAMES", "1".into()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ])
    };
    let folder = tempfile::tempdir_in(cache()).expect("the cache can be written");
    let routes = |weights: &str| {
        let path = folder.path().join(format!("routes-{weights}.npy"));
        DropIn::On(vec![
            ("LLAMA_SIDECAR_HOTSWAP", "0".into()),
            ("LLAMA_EXPERT_TRACE_ROUTES", path.display().to_string()),
            ("LLAMA_EXPERT_TRACE_WEIGHTS", weights.into()),
            ("LLAMA_SIDECAR_LOG", "warn".into()),
        ])
    };
    for name in ["smollm2.gguf", "moe.gguf"] {
        let model = fixture(name);
        let labels = [
            "nothing (the second process)",
            "hot-swap",
            "expert trace",
            "expert trace with names",
            "routes",
            "routes and gate weights",
        ];
        let with = [quiet("1000"), trace(), names(), routes("0"), routes("1")];
        let mut hosts = [DropIn::Absent, DropIn::Absent]
            .into_iter()
            .chain(with)
            .map(|drop_in| Host::start(Program::CTwoThreads, &model, &drop_in))
            .collect::<Vec<_>>();
        let command = format!("text {TOKENS}");
        let mut times = vec![Vec::new(); hosts.len()];
        for round in 0..ROUNDS + 1 {
            for turn in 0..hosts.len() {
                let at = (round + turn) % hosts.len();
                let time = seconds(|| drop(hosts[at].ask(&command)));
                // The first round warms up.
                if round > 0 {
                    times[at].push(time * 1e3 / TOKENS as f64);
                }
            }
        }
        let fastest = |times: &[f64]| times.iter().copied().fold(f64::MAX, f64::min);
        for (with, label) in labels.iter().enumerate().map(|(at, label)| (at + 1, label)) {
            // The second process without it is compared with the first alone.
            let without = |round: usize| match with {
                1 => times[0][round],
                _ => (times[0][round] + times[1][round]) / 2.0,
            };
            let mut ratios: Vec<f64> = (0..ROUNDS)
                .map(|round| times[with][round] / without(round))
                .collect();
            let ratio = median(&mut ratios);
            let mut peer: Vec<f64> = (0..ROUNDS).map(without).collect();
            println!(
                "| {name} | {label} | {:.3} | {:.3} | **{ratio:.4}** ({:.3} to {:.3}) | {:.4} |",
                median(&mut peer),
                median(&mut times[with].clone()),
                ratios[ROUNDS / 4],
                ratios[ROUNDS * 3 / 4],
                fastest(&times[with]) / fastest(&peer),
            );
        }
    }
    println!();
}

/// A model of which each tensor is a file, and two versions of one of them.
struct Shards {
    first: PathBuf,
    path: PathBuf,
    versions: [PathBuf; 2],
    bytes: u64,
}

impl Shards {
    fn new(folder: &Path, tensor: &str) -> Shards {
        let folder = folder.join(tensor);
        std::fs::create_dir_all(&folder).expect("a new folder");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(fixture("smollm2-large-shards")).expect("a fixture") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_owned();
            std::fs::hard_link(&path, folder.join(&name)).expect("links are supported");
            names.push(name);
        }
        names.sort();
        let wanted = CString::new(tensor).expect("no NUL");
        let holds = |name: &&std::ffi::OsString| {
            let gguf = GgufFile::open(&folder.join(name), Access::Read).expect("a shard");
            gguf.header.find(&wanted).is_some()
        };
        let name = names.iter().find(holds).expect("a shard with this tensor");
        let path = folder.join(name);
        let versions = [0, 1].map(|i| folder.join(format!("version-{i}")));
        for version in &versions {
            std::fs::copy(&path, version).expect("space for a copy");
        }
        let gguf = GgufFile::open(&versions[1], Access::Read).expect("a shard");
        let info = &gguf.header.tensors[0];
        let mut row = vec![0; 4096];
        gguf.source.read_at(&mut row, info.offset).expect("bytes");
        row.rotate_left(1024);
        let file = std::fs::OpenOptions::new().write(true).open(&versions[1]);
        let file = file.expect("a private copy");
        file.write_all_at(&row, info.offset).expect("space");
        Shards {
            first: folder.join(&names[0]),
            path,
            versions,
            bytes: info.nbytes,
        }
    }

    /// Changes the file by a link: no byte is written, only the reload is measured.
    fn point_to(&self, version: usize) {
        link(&self.path, &self.versions[version]);
    }
}

/// Writes a file with the only tensor of a shard, whose first bytes are rotated.
fn write_rotated(shard: &Path, by: usize, path: &Path) {
    let gguf = GgufFile::open(shard, Access::Read).expect("a shard");
    let info = &gguf.header.tensors[0];
    let mut bytes = vec![0; info.nbytes as usize];
    gguf.source.read_at(&mut bytes, info.offset).expect("bytes");
    bytes[..4096].rotate_left(by);
    let mut header = HeaderWriter::new(32);
    let name = gguf.header.name(info).to_bytes();
    let ne = &info.ne[..info.n_dims as usize];
    header
        .tensor(name, ne, info.ty.id, info.nbytes)
        .expect("it fits");
    std::fs::write(path, [header.finish(), bytes].concat()).expect("space");
}

/// Overlays that replace each other, as in a sweep: with a buffer of the one before, and without.
fn rounds(folder: &Path) {
    const ROUNDS: usize = 21;
    println!("\n### Overlays one after the other\n");
    println!(
        "A tensor of the same model takes its bytes from one file and from another. Cold: the first overlay, after the original bytes, in new memory. Warm: an overlay in the buffer of an earlier one, from a version of a file that was read before, and from a new version. From the request until its answer, while the program is idle; medians of {ROUNDS}, alternating. Limit: a copy of the bytes in memory.\n"
    );
    println!("| tensor MB | cold ms | warm ms | ratio | warm, new version ms | copy ms |");
    println!("|---|---|---|---|---|---|");
    for tensor in ["blk.0.ffn_up.weight", "token_embd.weight"] {
        let shards = Shards::new(&folder.join("rounds"), tensor);
        let sources = [1024, 2048].map(|by| {
            let path = folder.join(format!("{tensor}-{by}.gguf"));
            write_rotated(&shards.path, by, &path);
            path
        });
        std::thread::sleep(Duration::from_millis(50));
        let mut host = Host::start(Program::CTwoThreads, &shards.first, &quiet("0"));
        host.ask("text 4");
        let swap = |revert: Option<&str>, from: Option<&Path>| {
            let overlays = from.map(|from| json!({"tensor": regex(tensor), "from": from}));
            let overlays: Vec<Value> = overlays.into_iter().collect();
            let request = json!({"cmd": "swap", "revert": revert, "overlays": overlays});
            let mut report = Value::Null;
            let time = seconds(|| report = host.request(&request));
            assert_eq!(report["ok"], true, "{report}");
            let report = &report["reports"][0];
            assert_eq!(report["swapped"], u64::from(from.is_some()), "{report}");
            time * 1e3
        };
        let [mut cold, mut warm, mut new, mut copy] = [const { Vec::new() }; 4];
        for round in 0..ROUNDS {
            swap(Some(".*"), None);
            cold.push(swap(None, Some(&sources[0])));
            swap(None, Some(&sources[1]));
            warm.push(swap(None, Some(&sources[0])));
            // Another time, the same bytes.
            let file = std::fs::File::options().append(true).open(&sources[1]);
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(round as u64);
            file.and_then(|file| file.set_modified(time))
                .expect("our own file");
            new.push(swap(None, Some(&sources[1])));
            copy.push(copied(shards.bytes as usize) * 1e3);
        }
        let times = [&mut cold, &mut warm, &mut new, &mut copy];
        let [cold, warm, new, copy] = times.map(|times| median(times));
        println!(
            "| {:.1} | {cold:.2} | {warm:.2} | **{:.1}x** | {new:.2} | {copy:.2} |",
            shards.bytes as f64 / 1e6,
            cold / warm,
        );
    }
}

fn regex(name: &str) -> String {
    name.replace('.', "\\.")
}

/// Seconds of a copy from memory to memory, both in use before.
fn copied(bytes: usize) -> f64 {
    let from = vec![1u8; bytes];
    let mut to = vec![2u8; bytes];
    let time = seconds(|| to.copy_from_slice(&from));
    std::hint::black_box(&to);
    time
}

fn swaps(folder: &Path) {
    const ROUNDS: usize = 15;
    println!("### A swap of one tensor against a restart\n");
    println!(
        "A model of 272 files, one tensor each, 200 MB. Start: from the start of the process until the model is loaded, with its files in the page cache; for the C program and for node-llama-cpp. Swap: in the C program, from the rename until the answer to the reload; once while the program is idle, and once while it generates text, which includes the rest of a token's evaluation. Medians of {ROUNDS}, alternating. Limit: the new bytes are read twice and written once, at the speed of memory.\n"
    );
    println!(
        "| tensor MB | start C ms | start Node ms | swap ms | ratio C | ratio Node | swap while generating ms | switch us | longest pause of an evaluation us |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for tensor in ["blk.0.ffn_up.weight", "token_embd.weight"] {
        let shards = Shards::new(folder, tensor);
        // Later than any clock tick in which the files could change again.
        std::thread::sleep(Duration::from_millis(50));
        let mut host = Host::start(Program::CTwoThreads, &shards.first, &quiet("0"));
        host.ask("text 4");
        let [mut start, mut node, mut rest, mut busy, mut switch] = [const { Vec::new() }; 5];
        for _ in 0..ROUNDS {
            for (program, times) in [
                (Program::CTwoThreads, &mut start),
                (Program::Node, &mut node),
            ] {
                let mut other = None;
                times.push(seconds(|| {
                    other = Some(Host::start(program, &shards.first, &DropIn::Absent));
                }));
            }
            for (writing, times) in [(false, &mut rest), (true, &mut busy)] {
                for version in [1, 0] {
                    if writing {
                        host.tell("text 40");
                        // Past the prompt.
                        std::thread::sleep(Duration::from_millis(60));
                    }
                    shards.point_to(version);
                    let began = Instant::now();
                    let report = host.control("reload");
                    let time = began.elapsed().as_secs_f64();
                    assert_eq!(report["ok"], true, "{report}");
                    let report = &report["reports"][0];
                    // Back is cheaper: nothing is read but to compare it.
                    if version == 1 {
                        assert_eq!(report["swapped"], 1, "{report}");
                        times.push(time);
                    } else {
                        assert_eq!(report["returned"], 1, "{report}");
                    }
                    switch.push(report["ms"]["switch"].as_f64().expect("ms") * 1e3);
                    if writing {
                        host.line();
                    }
                }
            }
        }
        let times = [&mut start, &mut node, &mut rest, &mut busy, &mut switch];
        let [start, node, rest, busy, switch] = times.map(|times| median(times));
        println!(
            "| {:.1} | {:.0} | {:.0} | {:.2} | **{:.1}x** | **{:.1}x** | {:.2} | {switch:.1} | {} |",
            shards.bytes as f64 / 1e6,
            start * 1e3,
            node * 1e3,
            rest * 1e3,
            start / rest,
            node / rest,
            busy * 1e3,
            host.control("status")["longest_pause_us"],
        );
    }
}
