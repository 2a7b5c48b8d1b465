//! Compares open, load and reload with their peers, as ratios within one run.
//!
//! Both sides of a comparison alternate, so noise affects both; each figure is the
//! median. Run it with `cargo xtask bench load`.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use llama_sidecar::model::{Model, Options};
use memmap2::{Advice, Mmap, MmapMut};
use sidecar_core::gguf::{Access, GgufFile, Header, shard_name};
use testkit::fixtures::{cache, fixture, upstream_libraries};
use testkit::ggml::Ggml;
use testkit::process::{allow_many_open_files, resident};
use testkit::writer::{F16, F32, Gguf, Kv, vocabulary};

fn main() {
    allow_many_open_files();
    let folder = cache().join("bench");
    std::fs::create_dir_all(&folder).expect("the cache can be written");
    open(&folder);
    sparse(&folder);
    load_all();
    unchanged_reload(&folder);
}

/// Time of each side, `rounds` times in turn; medians.
fn alternate<const N: usize>(rounds: usize, sides: [&dyn Fn(); N]) -> [Duration; N] {
    alternate_with_cpu(rounds, sides).map(|(time, _)| time)
}

/// Time of each side and the CPU time of all its threads, `rounds` times in turn; medians.
fn alternate_with_cpu<const N: usize>(
    rounds: usize,
    sides: [&dyn Fn(); N],
) -> [(Duration, Duration); N] {
    let mut times = [const { (Vec::new(), Vec::new()) }; N];
    for round in 0..=rounds {
        for (side, times) in sides.iter().zip(&mut times) {
            let (began, used) = (Instant::now(), cpu_time());
            side();
            let (took, used) = (began.elapsed(), cpu_time() - used);
            // The first round warms caches and is not counted.
            if round > 0 {
                times.0.push(took);
                times.1.push(used);
            }
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    times.map(|(times, cpu)| (median(times), median(cpu)))
}

/// Returns the CPU time of this process.
fn cpu_time() -> Duration {
    let mut time = std::mem::MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: fills the struct, which is valid as zeros, too.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, time.as_mut_ptr());
        time.assume_init()
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Reads a file into the page cache from its start, so that the kernel chooses the sizes of pages, as it
/// does for a file that is read for the first time.
fn read_anew(path: &Path) {
    let mut file = File::open(path).expect("a fixture");
    file.sync_all().expect("it can be written back");
    // SAFETY: advice for an open file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    std::io::copy(&mut file, &mut std::io::sink()).expect("readable");
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn made(path: PathBuf, make: impl FnOnce() -> Gguf) -> PathBuf {
    if !path.exists() {
        make().replace(&path).expect("the cache can be written");
    }
    path
}

fn open(folder: &Path) {
    let vocabulary_file = made(folder.join("vocabulary-262144.gguf"), || {
        let mut file = Gguf::default();
        file.kvs.extend(vocabulary(262_144));
        file.tensor("output_norm.weight", &[32], F32, 1)
    });
    let tensors_file = made(folder.join("tensors-20000.gguf"), || {
        let mut file = Gguf::default();
        file.kvs.extend(vocabulary(150_000));
        let names = (0..20_000).map(|i| format!("blk.{}.ffn_down.{}.weight", i / 400, i % 400));
        names.fold(file, |file, name| file.tensor(&name, &[32], F32, 1))
    });
    let ggml = Ggml::load(&upstream_libraries());

    println!("### Open: header and index of all tensors\n");
    println!(
        "Peer: `gguf_init_from_file` of upstream's prebuilt libggml-base.so. Limit: one pass over a header that is already in memory and mapped.\n"
    );
    println!("| file | ggml ms | model open ms | ratio | limit ms | header MB |");
    println!("|---|---|---|---|---|---|");
    for path in [fixture("smollm2.gguf"), vocabulary_file, tensors_file] {
        let bytes = std::fs::read(&path).expect("readable");
        let header_bytes = Header::parse(&bytes, bytes.len() as u64)
            .expect("valid")
            .data_offset;
        let [theirs, ours, limit] = alternate(
            31,
            [
                &|| assert!(ggml.accepts(&path)),
                &|| {
                    drop(black_box(
                        Model::open(&path, Options::host()).expect("valid"),
                    ))
                },
                &|| {
                    drop(black_box(
                        Header::parse(&bytes, bytes.len() as u64).expect("valid"),
                    ))
                },
            ],
        );
        println!(
            "| {} | {:.2} | {:.3} | **{:.1}x** | {:.3} | {:.1} |",
            path.file_name().expect("a name").to_string_lossy(),
            ms(theirs),
            ms(ours),
            theirs.as_secs_f64() / ours.as_secs_f64(),
            ms(limit),
            header_bytes as f64 / 1e6,
        );
    }
    println!();
}

fn sparse(folder: &Path) {
    const TENSORS: u64 = 240;
    const ELEMENTS: i64 = 1 << 27;
    let path = folder.join("sparse-60gb.gguf");
    if !path.exists() {
        // Only the header has bytes; the data is a hole.
        let names = (0..TENSORS).map(|i| format!("blk.{i}.ffn_up.weight"));
        let mut file = Gguf::default();
        file.kvs.extend(vocabulary(100_000));
        let mut header = names
            .fold(file, |file, name| {
                file.tensor(&name, &[ELEMENTS, 0], F16, 0)
            })
            .header();
        set_rows_and_offsets(&mut header, ELEMENTS as u64 * 2);
        std::fs::write(&path, &header).expect("the cache can be written");
        let hole = File::options()
            .write(true)
            .open(&path)
            .expect("just written");
        hole.set_len(header.len() as u64 + TENSORS * ELEMENTS as u64 * 2)
            .expect("sparse files are supported");
    }
    let before = resident();
    let opening = Instant::now();
    let model = Model::open(&path, Options::host()).expect("valid");
    let took = opening.elapsed();
    let opened = resident();
    let view = model.tensor(100);
    let bytes = model.host_bytes(&view).expect("mapped");
    // SAFETY: no process writes the file, and the model outlives the loop.
    let sum: u64 = unsafe { &*bytes }
        .iter()
        .step_by(4096)
        .map(|&b| u64::from(b))
        .sum();
    black_box(sum);
    let touched = resident();
    println!(
        "### A model of {:.0} GB (sparse file)\n",
        model.file_bytes() as f64 / 1e9
    );
    println!("| step | added resident MiB | target |");
    println!("|---|---|---|");
    println!(
        "| open ({:.2} ms) | {:.1} | < 32 |",
        ms(took),
        mib(opened - before)
    );
    println!(
        "| touch one tensor of {:.0} MiB | {:.1} | about its size |",
        mib(view.nbytes()),
        mib(touched - opened)
    );
    println!();
}

/// Turns the tensors of a header, written without rows, into tensors of one row
/// each that follow each other.
fn set_rows_and_offsets(header: &mut [u8], row_bytes: u64) {
    let mut tensor = 0u64;
    let pattern: Vec<u8> = [(1i64 << 27).to_le_bytes(), 0i64.to_le_bytes()].concat();
    let mut at = 0;
    while let Some(found) = header[at..]
        .windows(16)
        .position(|window| window == pattern)
    {
        let rows = at + found + 8;
        header[rows..rows + 8].copy_from_slice(&1u64.to_le_bytes());
        let offset = rows + 8 + 4;
        header[offset..offset + 8].copy_from_slice(&(tensor * row_bytes).to_le_bytes());
        tensor += 1;
        at = offset + 8;
    }
}

fn load_all() {
    println!("### Load everything into host memory\n");
    println!(
        "Peer: the same bytes copied from a warm mapping by as many threads, into plain memory and into memory that may use huge pages. Limit: the faster of the two. CPU: time of both threads together, which varies less on a shared machine. The file was read into the page cache from its start, as after a start of the machine.\n"
    );
    println!(
        "| model | bytes | plain copy ms | copy, huge pages ms | load_all ms | of the limit | copy, CPU ms | load_all, CPU ms | of the limit | allocations |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for name in ["smollm2.gguf", "moe.gguf"] {
        let path = fixture(name);
        read_anew(&path);
        // SAFETY: the fixtures are not written while the bench runs.
        let map = unsafe { Mmap::map(&File::open(&path).expect("a fixture")) }.expect("mapped");
        let header = GgufFile::open(&path, Access::Map).expect("valid").header;
        let data = &map[header.data_offset as usize..];
        let allocations = std::cell::Cell::new(0);
        let [plain, huge, ours] = alternate_with_cpu(
            21,
            [
                &|| {
                    let mut target = vec![0u8; data.len()];
                    copy(data, &mut target);
                    black_box(&target);
                },
                &|| {
                    let mut target = MmapMut::map_anon(data.len()).expect("memory");
                    target.advise(Advice::HugePage).expect("a hint");
                    copy(data, &mut target);
                    black_box(&target);
                },
                &|| {
                    let model = Model::open(&path, Options::host()).expect("valid");
                    allocations.set(model.load_all(|_| true).expect("memory").allocations);
                    black_box(&model);
                },
            ],
        );
        let share =
            |limit: Duration, ours: Duration| 100.0 * limit.as_secs_f64() / ours.as_secs_f64();
        println!(
            "| {name} | {} | {:.1} | {:.1} | {:.1} | **{:.0} %** | {:.1} | {:.1} | **{:.0} %** | {} |",
            data.len(),
            ms(plain.0),
            ms(huge.0),
            ms(ours.0),
            share(plain.0.min(huge.0), ours.0),
            ms(huge.1),
            ms(ours.1),
            share(plain.1.min(huge.1), ours.1),
            allocations.get(),
        );
    }
    println!();
}

fn copy(from: &[u8], to: &mut [u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = from.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

fn unchanged_reload(folder: &Path) {
    let one = made(folder.join("tensors-1000.gguf"), || {
        let names = (0..1000).map(|i| format!("t{i}.weight"));
        names.fold(Gguf::default(), |file, name| {
            file.tensor(&name, &[32], F32, 1)
        })
    });
    let shards = folder.join("shards-1000");
    std::fs::create_dir_all(&shards).expect("the cache can be written");
    let first = shards.join(shard_name("m", 0, 1000));
    for i in (0..1000).rev() {
        made(shards.join(shard_name("m", i, 1000)), || {
            Gguf::default()
                .kv("split.no", Kv::U16(i as u16))
                .kv("split.count", Kv::U16(1000))
                .kv("split.tensors.count", Kv::I32(1000))
                .tensor(&format!("t{i}.weight"), &[32], F32, i)
        });
    }
    println!("### Reload when nothing changed\n");
    println!("Limit: one `stat` for each file.\n");
    println!("| model | reload us | bare stats us |");
    println!("|---|---|---|");
    for (name, path) in [
        ("1 file, 1,000 tensors", one),
        ("1,000 files, 1,000 tensors", first),
    ] {
        let options = Options {
            hotswap: true,
            ..Options::host()
        };
        let model = Model::open(&path, options).expect("valid");
        let paths: Vec<&Path> = (0..model.file_count())
            .map(|i| model.file_path(i))
            .collect();
        let [ours, limit] = alternate(
            201,
            [
                &|| assert!(!model.reload().expect("no error").changed()),
                &|| {
                    for path in &paths {
                        black_box(std::fs::metadata(path).expect("there"));
                    }
                },
            ],
        );
        println!(
            "| {name} | {:.1} | {:.1} |",
            ms(ours) * 1e3,
            ms(limit) * 1e3
        );
    }
    println!();
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
