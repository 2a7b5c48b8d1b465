//! Experts in memory of the process, in place of pages of their mapped file.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecar_core::experts::{ExpertIndex, Projection};
use sidecar_core::gguf::{Access, GgufFile};
use sidecar_core::stream::{Mapped, Matrices, Reader, Settings};
use sidecar_core::trace::Ids;
use tempfile::TempDir;
use testkit::memory_limit::drop_cache;
use testkit::slow_disk::{SlowDisk, Speed};
use testkit::writer::{F32, Gguf};

const EXPERTS: u32 = 8;
const LAYERS: u32 = 4;
const SETTINGS: Settings = Settings {
    always: false,
    threads: 1,
    look_ahead_bytes: 0,
};
/// A matrix of an expert: 100 rows of 64 numbers, which begin inside pages.
const MATRIX: u64 = 64 * 100 * 4;
/// The most bytes of the pages of a matrix.
const SPAN: u64 = 8 * 4096;

/// A mapped model.
struct Fixture {
    _folder: TempDir,
    path: PathBuf,
    gguf: GgufFile,
    map: memmap2::Mmap,
    /// The bytes of the file.
    bytes: Vec<u8>,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("model.gguf");
        let file = (0..LAYERS).fold(Gguf::default(), |file, layer| {
            ["gate", "up", "down"].iter().fold(file, |file, matrix| {
                let name = format!("blk.{layer}.ffn_{matrix}_exps.weight");
                let seed = layer * 8 + matrix.len() as u32;
                file.tensor(&name, &[64, 100, EXPERTS.into()], F32, seed.into())
            })
        });
        file.write(&path).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        Fixture::of(folder, path, bytes)
    }

    fn of(folder: TempDir, path: PathBuf, bytes: Vec<u8>) -> Fixture {
        let gguf = GgufFile::open(&path, Access::Read).unwrap();
        // SAFETY: no program writes the files of these tests.
        let map = unsafe { memmap2::Mmap::map(gguf.source.handle().get().unwrap()) }.unwrap();
        Fixture {
            bytes,
            _folder: folder,
            path,
            gguf,
            map,
        }
    }

    /// Makes a reader that keeps so many matrices in memory, of a file that is not in the page cache.
    fn reader(&self, matrices: u64) -> Reader {
        let reader = self.reader_with(Some(matrices * SPAN));
        // What the page cache has is not read from the disk, and not counted as read.
        drop_cache(self.gguf.source.handle().get().unwrap()).unwrap();
        reader
    }

    /// Makes a reader that keeps at most so many bytes in memory.
    fn reader_with(&self, most: Option<u64>) -> Reader {
        let tensors = self.gguf.header.tensors.iter().enumerate();
        let address = |offset: u64| self.map.as_ptr() as usize + offset as usize;
        let mapped = Mapped {
            tensors: tensors
                .map(|(at, info)| (at, address(info.offset)))
                .collect(),
            others: Vec::new(),
            most,
        };
        // SAFETY: the tensors are mapped there, and the mapping outlives the readers of a test.
        unsafe { Reader::in_memory(&[&self.gguf], SETTINGS, mapped) }.unwrap()
    }

    /// Returns the mapped bytes of an expert.
    fn mapped(&self, layer: u32, matrix: Projection, expert: u32) -> (&[u8], &[u8]) {
        let slice = ExpertIndex::of([&self.gguf])
            .slice(layer, matrix, expert)
            .unwrap();
        let range = slice.offset as usize..(slice.offset + slice.nbytes) as usize;
        (&self.map[range.clone()], &self.bytes[range])
    }

    fn has_bytes_of_file(&self) -> bool {
        self.map[..] == self.bytes
    }
}

fn packed(experts: &[u32]) -> Vec<u8> {
    experts
        .iter()
        .flat_map(|expert| expert.to_ne_bytes())
        .collect()
}

/// Routes one token to experts of a layer, and waits.
fn route(reader: &Reader, layer: usize, experts: &[u32]) {
    let ids = packed(experts);
    reader.schedule(layer, Matrices::ALL, &Ids::packed(&ids, experts.len()));
    reader.wait(layer, Matrices::ALL);
}

/// Routes a batch of tokens to one expert each.
fn route_batch(reader: &Reader, layer: usize, experts: &[u32]) {
    let ids = packed(experts);
    reader.schedule(layer, Matrices::ALL, &Ids::packed(&ids, 1));
    reader.wait(layer, Matrices::ALL);
}

/// Returns how many parts of this process's memory are slots of readers.
fn slots_mapped(fixture: &Fixture) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let range = fixture.map.as_ptr_range();
    let inside = |line: &&str| {
        let start = line.split('-').next().unwrap();
        let start = usize::from_str_radix(start, 16).unwrap();
        (range.start as usize..range.end as usize).contains(&start)
    };
    let lines = maps.lines().filter(inside);
    lines
        .filter(|line| line.contains("/dev/zero (deleted)"))
        .count()
}

#[test]
fn what_is_here_is_not_read_again() {
    let fixture = Fixture::new();
    let reader = fixture.reader(100);
    route(&reader, 1, &[2, 5]);
    assert_eq!(slots_mapped(&fixture), 6);
    assert!(fixture.has_bytes_of_file());
    let counts = reader.counts();
    assert!((6 * MATRIX..=6 * SPAN).contains(&counts.held_bytes));
    assert_eq!(counts.resident_bytes, 0);
    route(&reader, 1, &[2, 5]);
    let later = reader.counts();
    assert_eq!(later.read_bytes, counts.read_bytes);
    assert_eq!(
        later.checked_bytes - later.resident_bytes,
        counts.checked_bytes
    );
}

#[test]
fn what_is_used_least_gives_its_memory_back() {
    let fixture = Fixture::new();
    // Two experts of each layer, and one or two more.
    let reader = fixture.reader(27);
    let is_here = |layer, expert| {
        let before = reader.counts().resident_bytes;
        route(&reader, layer, &[expert]);
        reader.counts().resident_bytes > before
    };
    for _ in 0..4 {
        (0..4).for_each(|layer| route(&reader, layer, &[1, 6]));
    }
    for expert in [0, 2, 3, 4, 5, 7] {
        route(&reader, 2, &[expert]);
    }
    assert!(reader.counts().held_bytes <= 27 * SPAN);
    assert!((0..4).all(|layer| is_here(layer, 1) && is_here(layer, 6)));
    assert!(!is_here(2, 0));
    assert!(fixture.has_bytes_of_file());
}

#[test]
fn threads_that_read_the_mapping_see_the_bytes_of_the_file() {
    let fixture = Fixture::new();
    let reader = fixture.reader(15);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    assert!(fixture.has_bytes_of_file());
                }
            });
        }
        let mut number = 1u32;
        for step in 0..600 {
            number = number.wrapping_mul(1664525).wrapping_add(1013904223);
            let experts = [number >> 29, (number >> 26) & 7];
            let layer = step % LAYERS as usize;
            route(&reader, layer, &experts);
            for (matrix, expert) in [
                (Projection::Down, experts[0]),
                (Projection::Gate, experts[1]),
            ] {
                let (mapped, expected) = fixture.mapped(layer as u32, matrix, expert);
                assert!(mapped == expected);
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(reader.counts().resident_bytes > 0);
    assert!(reader.counts().held_bytes <= 15 * SPAN);
}

#[test]
fn threads_route_at_once() {
    let fixture = Fixture::new();
    let reader = fixture.reader(20);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (fixture, reader) = (&fixture, &reader);
            scope.spawn(move || {
                for step in 0..500 {
                    let (layer, expert) = ((step + thread) % 4, (step * 3 + thread) as u32 % 8);
                    route(reader, layer, &[expert]);
                    let (mapped, expected) = fixture.mapped(layer as u32, Projection::Up, expert);
                    assert!(mapped == expected);
                }
            });
        }
    });
}

#[test]
fn a_prompt_reads_the_next_layers_and_gives_the_last_one_back() {
    let fixture = Fixture::new();
    // Two layers.
    let reader = fixture.reader(48);
    let all: Vec<u32> = (0..EXPERTS).collect();
    let layer_bytes = 24 * MATRIX.next_multiple_of(4096);
    for layer in 0..LAYERS as usize {
        route_batch(&reader, layer, &all);
        reader.finish();
        // One layer ahead of this one, in half of the memory.
        let read = reader.counts().ahead_bytes;
        let ahead = (layer as u64 + 1).min(u64::from(LAYERS) - 1);
        assert_eq!(read, ahead * layer_bytes, "{layer}");
    }
    let counts = reader.counts();
    assert_eq!(counts.read_bytes, layer_bytes, "{counts:?}");
    assert!(counts.held_bytes <= 48 * SPAN);
    assert!(fixture.has_bytes_of_file());
}

#[test]
fn a_batch_that_does_not_fit_goes_through_the_page_cache() {
    let fixture = Fixture::new();
    let reader = fixture.reader(5);
    let all: Vec<u32> = (0..EXPERTS).collect();
    route_batch(&reader, 3, &all);
    assert!((5..=6).contains(&slots_mapped(&fixture)));
    let none = fixture.reader(0);
    route(&none, 3, &[1]);
    assert_eq!(none.counts().held_bytes, 0);
    assert!(fixture.has_bytes_of_file());
}

#[test]
fn a_forked_child_shares_no_slot() {
    let fixture = Fixture::new();
    let reader = fixture.reader(6);
    route(&reader, 0, &[3, 4]);
    assert_eq!(slots_mapped(&fixture), 6);
    reader.before_fork();
    assert_eq!(slots_mapped(&fixture), 0);
    // The program may evaluate meanwhile.
    route(&reader, 1, &[0, 1]);
    assert_eq!(slots_mapped(&fixture), 0);
    let (mut from, mut to) = std::io::pipe().unwrap();
    // SAFETY: the child reads the mapping and a pipe, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut byte = [0];
        std::io::Read::read_exact(&mut from, &mut byte).unwrap();
        let same = fixture.has_bytes_of_file();
        // SAFETY: ends the child without handlers of the parent.
        unsafe { libc::_exit(i32::from(!same)) };
    }
    reader.after_fork();
    assert_eq!(slots_mapped(&fixture), 6);
    // The slots of the parent get other bytes.
    for layer in 0..LAYERS as usize {
        route(&reader, layer, &[5, 6]);
    }
    std::io::Write::write_all(&mut to, &[1]).unwrap();
    let mut status = -1;
    // SAFETY: waits for the child of this test.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert!(fixture.has_bytes_of_file());
}

#[test]
fn bytes_that_were_written_in_place_are_read_again() {
    let fixture = Fixture::new();
    let reader = fixture.reader(100);
    route(&reader, 1, &[3, 4]);
    let slice = ExpertIndex::of([&fixture.gguf])
        .slice(1, Projection::Up, 3)
        .unwrap();
    let file = File::options().write(true).open(&fixture.path).unwrap();
    let new = vec![7; slice.nbytes as usize];
    std::os::unix::fs::FileExt::write_all_at(&file, &new, slice.offset).unwrap();
    reader.read_again();
    assert_eq!(slots_mapped(&fixture), 0);
    assert!(fixture.mapped(1, Projection::Up, 3).0 == new);
    route(&reader, 1, &[3, 4]);
    assert_eq!(slots_mapped(&fixture), 6);
    assert!(fixture.mapped(1, Projection::Up, 3).0 == new);
    let (mapped, expected) = fixture.mapped(1, Projection::Up, 4);
    assert!(mapped == expected);
}

#[test]
fn a_fork_while_memory_is_given_back_shares_no_slot() {
    let fixture = Fixture::new();
    let reader = fixture.reader(100);
    // Neighbours, whose borders are in the same pages.
    (0..LAYERS as usize).for_each(|layer| route(&reader, layer, &[2, 3, 4]));
    reader.before_fork();
    reader.read_again();
    assert_eq!(slots_mapped(&fixture), 0);
    reader.after_fork();
    assert!(fixture.has_bytes_of_file());
    route(&reader, 0, &[1]);
    assert!(slots_mapped(&fixture) >= 3);
}

#[test]
fn nothing_is_mapped_after_the_end() {
    let fixture = Fixture::new();
    let reader = fixture.reader(100);
    route(&reader, 0, &[3]);
    reader.end();
    let here = slots_mapped(&fixture);
    route(&reader, 1, &[3]);
    assert_eq!(slots_mapped(&fixture), here);
    drop(reader);
    // What is here stays until the program unmaps the file.
    assert!(fixture.has_bytes_of_file());
}

#[test]
fn what_is_in_the_page_cache_is_used_there_while_it_is() {
    let fixture = Fixture::new();
    assert!(fixture.reader_with(None).counts().resting);
    drop_cache(fixture.gguf.source.handle().get().unwrap()).unwrap();
    let reader = fixture.reader_with(None);
    assert!(!reader.counts().resting);
    assert_eq!(std::fs::read(&fixture.path).unwrap(), fixture.bytes);
    let deadline = Instant::now() + Duration::from_secs(60);
    let evaluate_until = |holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(Instant::now() < deadline, "{:?}", reader.counts());
            (0..LAYERS as usize).for_each(|layer| route(&reader, layer, &[2, 5]));
        }
    };
    evaluate_until(&|| reader.counts().resting);
    // At times the kernel misses a page that it has, and a matrix is read.
    let counts = reader.counts();
    assert!(counts.checked_bytes > 0, "{counts:?}");
    assert!(counts.read_bytes * 10 < counts.checked_bytes, "{counts:?}");
    // What the page cache can hold is read there.
    assert_eq!(counts.held_bytes, 0, "{counts:?}");
    // The first page fault that waits for the disk is seen.
    drop_cache(fixture.gguf.source.handle().get().unwrap()).unwrap();
    assert!(fixture.has_bytes_of_file());
    evaluate_until(&|| !reader.counts().resting);
}

#[test]
fn a_file_that_was_cut_short_is_left_alone() {
    let fixture = Fixture::new();
    let reader = fixture.reader(100);
    route(&reader, 0, &[3]);
    let here = slots_mapped(&fixture);
    let slice = ExpertIndex::of([&fixture.gguf])
        .slice(2, Projection::Gate, 0)
        .unwrap();
    let file = File::options().write(true).open(&fixture.path).unwrap();
    file.set_len(slice.offset).unwrap();
    route(&reader, 2, &[0, 7]);
    route(&reader, 3, &[7]);
    assert_eq!(slots_mapped(&fixture), here);
    let (mapped, expected) = fixture.mapped(0, Projection::Down, 3);
    assert!(mapped == expected);
}

#[test]
fn an_expert_that_cannot_be_read_is_read_later_on_emulated_disk() {
    let source = Fixture::new();
    let disk = SlowDisk::mount(&source.path, Speed::new(100, 1000)).expect("an emulated disk");
    let fixture = Fixture::of(tempfile::tempdir().unwrap(), disk.path(), source.bytes);
    let slice = |matrix| {
        ExpertIndex::of([&fixture.gguf])
            .slice(1, matrix, 4)
            .unwrap()
    };
    let reader = fixture.reader(100);
    let down = slice(Projection::Down);
    // The direct read, and that of the page cache.
    disk.fail(down.offset..down.offset + down.nbytes, 2);
    route(&reader, 1, &[4]);
    reader.finish();
    assert_eq!(slots_mapped(&fixture), 2);
    // Reads that fail again and again change nothing for other experts.
    disk.fail(down.offset..down.offset + down.nbytes, u64::MAX);
    (0..100).for_each(|_| route(&reader, 1, &[4]));
    route(&reader, 2, &[4]);
    assert_eq!(slots_mapped(&fixture), 5);
    disk.fail(0..0, 0);
    route(&reader, 1, &[4]);
    assert_eq!(slots_mapped(&fixture), 6);
    for matrix in [Projection::Gate, Projection::Up, Projection::Down] {
        let (mapped, expected) = fixture.mapped(1, matrix, 4);
        assert!(mapped == expected);
    }
    drop(fixture);
}

/// Lets the kernel end this thread when it makes another system call than those that [`runs_without_system_calls`]
/// and a clock without the vDSO need.
fn limit_system_calls() {
    const ALLOWED: [libc::c_long; 3] = [libc::SYS_write, libc::SYS_exit, libc::SYS_clock_gettime];
    let statement = |code: u32, k: u32, jt: usize| libc::sock_filter {
        code: code as u16,
        jt: jt as u8,
        jf: 0,
        k,
    };
    // The number of the call is the first field.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (at, call) in ALLOWED.into_iter().enumerate() {
        let code = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        filter.push(statement(code, call as u32, ALLOWED.len() - at));
    }
    let result = libc::BPF_RET | libc::BPF_K;
    filter.push(statement(result, libc::SECCOMP_RET_KILL_THREAD, 0));
    filter.push(statement(result, libc::SECCOMP_RET_ALLOW, 0));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: a valid program, which the kernel copies.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program),
            0
        );
    }
}

/// Calls `prepare` and then what it returns, in a process of its own, whose first thread may make no system call
/// meanwhile. Returns whether it ended.
fn runs_without_system_calls<Work: FnOnce()>(prepare: impl FnOnce() -> Work) -> bool {
    let (from, to) = std::io::pipe().unwrap();
    let to = std::os::fd::AsRawFd::as_raw_fd(&to);
    // SAFETY: the child makes a reader of its own, and is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let work = prepare();
        limit_system_calls();
        work();
        // SAFETY: both calls are allowed.
        unsafe {
            libc::write(to, c"1".as_ptr().cast(), 1);
            libc::syscall(libc::SYS_exit, 0);
        }
    }
    let mut answer = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(&from),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut answers = || unsafe {
        // SAFETY: a valid struct.
        libc::poll(&raw mut answer, 1, 20) == 1
    };
    // A first thread that was killed or has ended is a zombie while there are others.
    let stat = format!("/proc/{child}/stat");
    let has_ended = || std::fs::read_to_string(&stat).is_ok_and(|text| text.contains(") Z "));
    while !answers() && !has_ended() {}
    let answered = answers();
    // SAFETY: the child of this test.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    answered
}

#[test]
fn what_is_here_costs_no_system_call() {
    let fixture = Fixture::new();
    let ids = packed(&[2, 5]);
    let evaluate = |reader: &Reader| {
        for layer in 0..LAYERS as usize {
            reader.schedule(layer, Matrices::ALL, &Ids::packed(&ids, 2));
            reader.wait(layer, Matrices::ALL);
        }
    };
    let prepared = |evaluations: usize| {
        let (fixture, evaluate) = (&fixture, &evaluate);
        move || {
            let reader = fixture.reader(100);
            (0..evaluations).for_each(|_| evaluate(&reader));
            move || {
                (0..1000).for_each(|_| evaluate(&reader));
                std::mem::forget(reader);
            }
        }
    };
    // Absent experts need system calls.
    assert!(!runs_without_system_calls(prepared(0)));
    assert!(runs_without_system_calls(prepared(1)));
    // In the page cache, the reader rests after some passes.
    let resting = || {
        let bytes = std::fs::read(&fixture.path).unwrap();
        assert_eq!(bytes, fixture.bytes);
        let reader = Reader::new(&[&fixture.gguf], SETTINGS, |_| true).unwrap();
        for _ in 0..1000 {
            evaluate(&reader);
            reader.finish();
            if reader.counts().resting {
                break;
            }
        }
        move || {
            (0..1000).for_each(|_| evaluate(&reader));
            std::mem::forget(reader);
        }
    };
    assert!(runs_without_system_calls(resting));
}
