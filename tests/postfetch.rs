//! Post-fetch on the simulated CUDA driver, which the loader path must name:
//! `cargo xtask test` sets it. One test at a time, because a process has one driver.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use llama_sidecar::device::cuda::{CudaDevice, device_count};
use llama_sidecar::device::{AsyncDevice, Device, HostDevice, Stream};
use llama_sidecar::model::{BorrowedTensor, Model, Options as ModelOptions, Placement};
use llama_sidecar::postfetch::{Acquired, Options, PostFetch, Reason, State};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use sidecar_core::gguf::Access;
use sidecar_core::logger;
use sidecar_core::trace::{LayerCounts, Snapshot};
use tempfile::TempDir;
use testkit::sim::Sim;
use testkit::writer::{F16, Gguf, Kv, Q4_0, Q8_0};

/// Experts of layers 0 and 1; layer 2 has six in tensors of their own.
const EXPERTS: u32 = 16;

/// One layer, whose experts have 139,264 bytes each.
fn large_file() -> Gguf {
    let file = Gguf::default().kv("llama.expert_used_count", Kv::U32(4));
    file.tensor("blk.0.ffn_down_exps.weight", &[1024, 128, 16], Q8_0, 5)
}

/// Layers 0 and 1 with merged experts of different types, layer 2 with tensors of their
/// own of unequal sizes. The sizes are no multiples of 256.
fn model_file(seed: u64) -> Gguf {
    let mut file = Gguf::default().kv("llama.expert_used_count", Kv::U32(4));
    let experts = i64::from(EXPERTS);
    for (layer, ty) in [(0, Q8_0), (1, Q4_0)] {
        for (i, projection) in ["gate", "up", "down"].into_iter().enumerate() {
            let name = format!("blk.{layer}.ffn_{projection}_exps.weight");
            let seed = seed + 10 * layer + i as u64;
            file = file.tensor(&name, &[96, 70, experts], ty, seed);
        }
    }
    for expert in 0..6 {
        let name = format!("blk.2.ffn_down.{expert}.weight");
        file = file.tensor(
            &name,
            &[64, 10 + 30 * expert as i64],
            F16,
            seed + 100 + expert,
        );
    }
    file.tensor("blk.0.attn_q.weight", &[64, 64], F16, 7)
}

/// The simulated driver, and an open model.
struct Fixture {
    sim: Sim,
    _folder: TempDir,
    path: PathBuf,
    model: Arc<Model>,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::with(Access::Map)
    }

    fn with(access: Access) -> Fixture {
        Fixture::of(&model_file(1), access)
    }

    fn of(file: &Gguf, access: Access) -> Fixture {
        let sim = Sim::fresh();
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("model.gguf");
        file.write(&path).unwrap();
        // Nothing has to settle before it is read.
        set_time(&path, 1 << 20);
        let options = ModelOptions {
            hotswap: true,
            access,
            ..ModelOptions::host()
        };
        let model = Arc::new(Model::open(&path, options).unwrap());
        Fixture {
            sim,
            _folder: folder,
            path,
            model,
        }
    }

    fn fetch(&self, change: impl FnOnce(&mut Options)) -> PostFetch {
        fetch(&self.model, 0, change)
    }

    /// Checks that the driver was used correctly, and that everything was freed.
    fn end(self, fetch: PostFetch) {
        drop(fetch);
        assert_eq!(self.sim.problems(), [""; 0]);
    }
}

fn set_time(path: &Path, seconds_ago: u64) {
    let time = SystemTime::now() - Duration::from_secs(seconds_ago);
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(time).unwrap();
}

fn options() -> Options {
    let mut options = Options::from_environment();
    options.config.timeout = Duration::from_secs(10);
    options
}

fn fetch(model: &Arc<Model>, device: usize, change: impl FnOnce(&mut Options)) -> PostFetch {
    let mut options = options();
    change(&mut options);
    PostFetch::new(model.clone(), options, || {
        Ok(CudaDevice::open(device)? as Arc<dyn AsyncDevice>)
    })
}

/// The bytes of an expert's down-projection, read from the model.
fn expert_bytes(model: &Model, layer: u32, expert: u32) -> Vec<u8> {
    let (name, offset) = match layer {
        2 => (format!("blk.2.ffn_down.{expert}.weight"), 0),
        _ => (
            format!("blk.{layer}.ffn_down_exps.weight"),
            u64::from(expert),
        ),
    };
    let index = model.find(&std::ffi::CString::new(name).unwrap()).unwrap();
    let view = model.tensor(index);
    let nbytes = match layer {
        2 => view.nbytes(),
        _ => view.nbytes() / u64::from(EXPERTS),
    };
    let mut bytes = vec![0; nbytes as usize];
    model.read(index, offset * nbytes, &mut bytes).unwrap();
    bytes
}

/// The bytes that an answer leads to, on the device or in the process.
fn answered_bytes(
    fetch: &PostFetch,
    layer: u32,
    expert: u32,
    answer: &Acquired,
) -> Option<Vec<u8>> {
    if answer.device_address != 0 {
        assert_eq!(answer.device_address % 256, 0);
        assert_eq!(answer.reason, Reason::None);
        return fetch.download(layer, expert)?.ok();
    }
    assert_ne!(answer.reason, Reason::None);
    let expert = answer.expert?;
    let host = expert.host?;
    // SAFETY: valid until the next reload.
    Some(unsafe { std::slice::from_raw_parts(host, expert.nbytes as usize) }.to_vec())
}

#[test]
fn a_download_is_of_its_expert_while_others_use_the_memory() {
    let fixture = Fixture::new();
    let fetch = fixture.fetch(|_| ());
    let right: Vec<Vec<u8>> = (0..EXPERTS)
        .map(|expert| expert_bytes(&fixture.model, 0, expert))
        .collect();
    let (ended, downloads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for (expert, right) in right.iter().enumerate() {
                        if let Some(found) = fetch.download(0, expert as u32) {
                            assert!(found.expect("no error") == *right, "expert {expert}");
                            downloads.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        for round in 0.. {
            let expert = round * 7 % EXPERTS;
            fetch.schedule(0, &[expert as i32]);
            fetch.acquire(0, expert);
            fetch.release_layer(0);
            let is_late = std::time::Instant::now() > deadline;
            if round > 2000 && downloads.load(Ordering::Relaxed) > 100 || is_late {
                break;
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(downloads.into_inner() > 100);
    fixture.end(fetch);
}

#[test]
fn a_forked_child_ends_without_the_device() {
    let fixture = Fixture::new();
    let fetch = fixture.fetch(|_| ());
    // SAFETY: the child frees the scheduler and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let freed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(fetch)));
        // SAFETY: ends the child without destructors.
        unsafe { libc::_exit(i32::from(freed.is_err())) };
    }
    let mut status = -1;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    fixture.end(fetch);
}

fn check_bytes(fetch: &PostFetch, layer: u32, expert: u32, answer: &Acquired) {
    let right = expert_bytes(fetch.model(), layer, expert);
    if let Some(bytes) = answered_bytes(fetch, layer, expert, answer) {
        assert!(bytes == right, "wrong bytes for expert {expert} of {layer}");
    }
}

/// Waits until an expert is on the device.
fn until_ready(fetch: &PostFetch, layer: u32, expert: u32) {
    while fetch.query(layer, expert).state != State::GpuReady {
        std::thread::yield_now();
    }
}

/// Schedules, acquires, checks and releases a layer; returns how many experts were on the
/// device.
fn run_layer(fetch: &PostFetch, layer: u32, ids: &[i32]) -> usize {
    fetch.schedule(layer, ids);
    let mut hits = 0;
    for &id in ids {
        let answer = fetch.acquire(layer, id as u32);
        check_bytes(fetch, layer, id as u32, &answer);
        hits += usize::from(answer.reason == Reason::None);
    }
    fetch.release_layer(layer);
    hits
}

#[test]
fn acquired_experts_are_whole_at_their_device_address() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    assert!(
        fetch.mode().contains("page-locked in place"),
        "{}",
        fetch.mode()
    );
    for (layer, ids) in [(0, [3, 9, 0, 12]), (1, [15, 1, 7, 4]), (2, [5, 0, 2, 4])] {
        assert_eq!(run_layer(&fetch, layer, &ids), 4, "{}", fetch.mode());
    }
    let stats = fetch.stats();
    assert_eq!((stats.experts, stats.copies, stats.hits), (12, 12, 12));
    assert_eq!(
        (stats.staged_copies, stats.all_fallbacks(), stats.errors),
        (0, 0, 0)
    );
    assert!(stats.transfer > Duration::ZERO);
    assert_eq!(it.sim.count("pageable"), 0);
    it.end(fetch);
}

#[test]
fn scratchpad_offsets_are_cumulative_and_aligned() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    // Four of the largest: experts 2 to 5 of layer 2 are larger than those of the others.
    let padded =
        |layer, expert| (expert_bytes(&it.model, layer, expert).len() as u64).next_multiple_of(256);
    let expected = (2..6).map(|expert| padded(2, expert)).sum::<u64>();
    let merged = 4 * padded(0, 0);
    assert_eq!(fetch.stats().scratchpad_bytes, expected.max(merged));
    fetch.schedule(2, &[5, 2, 3, 4]);
    let answers = [5, 2, 3, 4].map(|expert| fetch.acquire(2, expert));
    let base = answers[0].device_address;
    let mut offset = 0;
    for (answer, expert) in answers.iter().zip([5, 2, 3, 4]) {
        assert_eq!(answer.device_address, base + offset);
        offset += padded(2, expert);
        let found = answer.expert.unwrap();
        assert_eq!(found.ne, [64, 10 + 30 * u64::from(expert)]);
        assert_eq!((found.row_bytes, found.ty.id), (128, F16));
    }
    it.end(fetch);
}

#[test]
fn the_policy_holds_for_real_copies() {
    for enable in [true, false] {
        for force_cpu in [true, false] {
            for block in [true, false] {
                let it = Fixture::new();
                // So slow that the copy is still under way at the first acquire.
                it.sim.set("SIM_CUDA_LATENCY_NS", 200_000_000);
                let fetch = it.fetch(|options| {
                    options.config.enable = enable;
                    options.config.force_cpu = force_cpu;
                    options.config.block_on_miss = block;
                    options.config.cache_bytes = 1 << 20;
                });
                let works = enable && !force_cpu;
                assert_eq!(fetch.stats().cache_bytes > 0, works);
                fetch.schedule(0, &[2]);
                let expected = match (enable, force_cpu, block) {
                    (false, ..) => (State::CpuOnly, Reason::Disabled),
                    (_, true, _) => (State::CpuOnly, Reason::ForcedCpu),
                    (.., true) => (State::GpuReady, Reason::None),
                    (.., false) => (State::CopyInFlight, Reason::Missed),
                };
                let looked = fetch.query(0, 2);
                assert_eq!(looked.state == State::CopyInFlight, works);
                let answer = fetch.acquire(0, 2);
                assert_eq!((answer.state, answer.reason), expected);
                check_bytes(&fetch, 0, 2, &answer);
                if works {
                    until_ready(&fetch, 0, 2);
                    let later = fetch.acquire(0, 2);
                    assert_eq!((later.state, later.reason), (State::GpuReady, Reason::None));
                    assert_eq!(fetch.stats().waits, u64::from(block));
                } else {
                    assert_eq!(it.sim.count("total"), 0, "no device was to be touched");
                }
                it.end(fetch);
            }
        }
    }
}

#[test]
fn neighbouring_experts_share_a_copy() {
    let it = Fixture::new();
    let fetch = it.fetch(|options| options.active = 8);
    assert_eq!(run_layer(&fetch, 0, &[6, 3, 7, 5, 10, 4]), 6);
    let stats = fetch.stats();
    assert_eq!((stats.experts, stats.copies, stats.coalesced), (6, 2, 4));
    assert_eq!(it.sim.count("cuMemcpy2DAsync_v2"), 1);
    assert_eq!(it.sim.count("cuMemcpyHtoDAsync_v2"), 1);
    // Tensors of their own are never neighbours.
    assert_eq!(run_layer(&fetch, 2, &[0, 1, 2]), 3);
    assert_eq!(fetch.stats().copies, 5);
    it.end(fetch);
}

#[test]
fn schedule_rejects_repeated_and_invalid_ids() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    fetch.schedule(1, &[8, 8, -1, 16, i32::MIN, i32::MAX, 8, 2]);
    fetch.schedule(1, &[2, 11]);
    fetch.schedule(7, &[0]);
    let stats = fetch.stats();
    assert_eq!((stats.experts, stats.duplicates, stats.rejected), (3, 3, 4));
    for (layer, expert, reason) in [
        (1, 8, Reason::None),
        (1, 11, Reason::None),
        (1, 3, Reason::NotScheduled),
        (1, 16, Reason::NotAnExpert),
        (1, u32::MAX, Reason::NotAnExpert),
        (7, 0, Reason::NotAnExpert),
    ] {
        let answer = fetch.acquire(layer, expert);
        assert_eq!(answer.reason, reason, "{layer} {expert}");
        assert_eq!(answer.expert.is_none(), reason == Reason::NotAnExpert);
    }
    fetch.release(1, 8);
    fetch.release(1, 8);
    fetch.release(1, 99);
    fetch.release(9, 0);
    assert_eq!(fetch.acquire(1, 8).reason, Reason::NotScheduled);
    assert_eq!(fetch.acquire(1, 11).reason, Reason::None);
    it.end(fetch);
}

#[test]
fn max_transfers_limits_copies_and_keeps_their_order() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_LATENCY_NS", 200_000_000);
    it.sim.set("SIM_CUDA_HOLD", 1);
    let fetch = it.fetch(|options| {
        options.config.max_transfers = 2;
        options.active = 8;
    });
    fetch.schedule(0, &[14, 2, 8, 0, 6, 4]);
    // It returned while the first copies were under way.
    assert_eq!(fetch.query(0, 14).state, State::CopyInFlight);
    while it.sim.count("cuMemcpyHtoDAsync_v2") < 2 {
        std::thread::yield_now();
    }
    assert_eq!(it.sim.count("cuMemcpyHtoDAsync_v2"), 2);
    it.sim.set("SIM_CUDA_HOLD", 0);
    // When one is ready, those before it are, and those that are further away are not.
    assert_eq!(fetch.acquire(0, 8).reason, Reason::None);
    for (expert, state) in [
        (14, State::GpuReady),
        (2, State::GpuReady),
        (6, State::CopyInFlight),
        (4, State::CopyInFlight),
    ] {
        assert_eq!(fetch.query(0, expert).state, state, "expert {expert}");
    }
    assert_eq!(run_layer(&fetch, 0, &[14, 2, 8, 0, 6, 4]), 6);
    it.end(fetch);
}

#[test]
fn experts_beyond_the_scratchpad_fall_back_to_the_cpu() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    // The scratchpad is for the four largest of these.
    let all = [5, 4, 3, 2, 1, 0];
    assert_eq!(run_layer(&fetch, 2, &all), 4);
    let stats = fetch.stats();
    assert_eq!(stats.fallbacks[Reason::NoRoom as usize], 2);
    assert_eq!(stats.scratchpad_peak, stats.scratchpad_bytes);
    // The memory is free again, and the size can be chosen.
    assert_eq!(run_layer(&fetch, 2, &all), 4);
    let larger = it.fetch(|options| options.config.scratchpad_bytes = 1 << 20);
    assert_eq!(larger.stats().scratchpad_bytes, 1 << 20);
    assert_eq!(run_layer(&larger, 2, &all), 6);
    drop(larger);
    it.end(fetch);
}

#[test]
fn an_automatic_scratchpad_is_at_most_a_tenth_of_the_device() {
    // The device in MiB, the size that is set, and the experts that come from the device.
    for (mib, set, hits, text) in [
        (1024, 0, 4, "(the active experts of the largest layer)"),
        (
            4,
            0,
            3,
            "(10 % of the device; set LLAMA_POSTFETCH_SCRATCHPAD_MB",
        ),
        (4, 1 << 20, 4, "(LLAMA_POSTFETCH_SCRATCHPAD_MB)"),
        (1, 0, 0, "is larger than 10 % of the memory of cuda0"),
    ] {
        let it = Fixture::of(&large_file(), Access::Map);
        it.sim.set("SIM_CUDA_MEMORY_MB", mib);
        let fetch = it.fetch(|options| options.config.scratchpad_bytes = set);
        assert!(fetch.mode().contains(text), "{}", fetch.mode());
        assert_eq!(run_layer(&fetch, 0, &[0, 2, 4, 6]), hits, "{mib} {set}");
        let bytes = fetch.stats().scratchpad_bytes;
        assert!(set > 0 || bytes <= (mib << 20) / 10, "{bytes}");
        it.end(fetch);
    }
}

#[test]
fn cpu_limit_sets_gate_up_on_cpu_by_position() {
    let it = Fixture::new();
    let fetch = it.fetch(|options| options.config.cpu_limit = 2);
    fetch.schedule(0, &[9, 4, 1]);
    let advice = [9, 4, 1].map(|expert| fetch.acquire(0, expert).gate_up_on_cpu);
    assert_eq!(advice, [true, true, false]);
    it.end(fetch);
}

#[test]
fn without_page_locks_copies_go_through_buffers() {
    for (access, register, page_lock) in [
        (Access::Map, 0, true),
        (Access::Map, 1, false),
        (Access::Read, 1, true),
    ] {
        let it = Fixture::with(access);
        it.sim.set("SIM_CUDA_REGISTER", register);
        let fetch = it.fetch(|options| options.config.page_lock = page_lock);
        assert!(
            fetch.mode().contains("through page-locked buffers"),
            "{}",
            fetch.mode()
        );
        assert_eq!(run_layer(&fetch, 0, &[3, 4, 5, 0]), 4);
        assert_eq!(run_layer(&fetch, 2, &[3, 4, 5, 0]), 4);
        let stats = fetch.stats();
        assert_eq!((stats.copies, stats.staged_copies), (6, 6));
        assert_eq!(it.sim.count("pageable"), 0);
        it.end(fetch);
    }
}

#[test]
fn experts_larger_than_all_buffers_are_staged_in_pieces() {
    let it = Fixture::with(Access::Read);
    let mut file = Gguf::default().kv("llama.expert_used_count", Kv::U32(1));
    file = file.tensor("blk.0.ffn_down_exps.weight", &[5 << 20, 1, 2], F16, 3);
    file.replace(&it.path).unwrap();
    let model = Arc::new(Model::open(&it.path, ModelOptions::host()).unwrap());
    let fetch = fetch(&model, 0, |options| options.config.page_lock = false);
    fetch.schedule(0, &[1]);
    let answer = fetch.acquire(0, 1);
    assert_eq!(answer.reason, Reason::None);
    let mut right = vec![0; 10 << 20];
    model.read(0, 10 << 20, &mut right).unwrap();
    assert!(answered_bytes(&fetch, 0, 1, &answer) == Some(right));
    assert_eq!(it.sim.count("cuMemcpyHtoDAsync_v2"), 10);
    it.end(fetch);
}

#[test]
fn a_truncated_file_is_read_failed() {
    let it = Fixture::with(Access::Read);
    let fetch = it.fetch(|_| ());
    let file = std::fs::File::options().write(true).open(&it.path).unwrap();
    file.set_len(4096).unwrap();
    fetch.schedule(1, &[3]);
    let answer = fetch.acquire(1, 3);
    assert_eq!(
        (answer.reason, answer.device_address),
        (Reason::ReadFailed, 0)
    );
    it.end(fetch);
}

#[test]
fn experts_on_a_device_are_not_fetched() {
    let it = Fixture::new();
    let gpu = CudaDevice::open(0).unwrap();
    let options = ModelOptions {
        devices: vec![HostDevice::new("host"), gpu.clone()],
        placement: Placement::on(1),
        hotswap: true,
        ..ModelOptions::host()
    };
    // The model can be loaded to a CUDA device, and swapped there.
    let model = Arc::new(Model::open(&it.path, options).unwrap());
    model.load_all(|_| true).unwrap();
    assert!(gpu.memory().used > 0);
    let right = expert_bytes(&it.model, 0, 5);
    assert!(expert_bytes(&model, 0, 5) == right);
    let fetch = fetch(&model, 0, |_| ());
    fetch.schedule(0, &[5]);
    assert_eq!(fetch.acquire(0, 5).reason, Reason::NotInHostMemory);
    drop(fetch);
    model_file(2).replace(&it.path).unwrap();
    set_time(&it.path, 1 << 19);
    model.reload().unwrap();
    assert!(expert_bytes(&model, 0, 5) != right);
    drop((model, gpu));
    assert_eq!(it.sim.problems(), [""; 0]);
}

#[test]
fn a_swap_between_schedule_and_acquire_gives_the_old_bytes_whole() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_LATENCY_NS", 30_000_000);
    let fetch = it.fetch(|options| options.config.max_transfers = 1);
    let old: Vec<Vec<u8>> = (0..3).map(|e| expert_bytes(&it.model, 1, 4 * e)).collect();
    fetch.schedule(1, &[0, 4, 8]);
    model_file(2).replace(&it.path).unwrap();
    set_time(&it.path, 1 << 19);
    it.model.reload().unwrap();
    for (expert, old) in [0, 4, 8].into_iter().zip(&old) {
        let answer = fetch.acquire(1, expert);
        assert_eq!(answer.reason, Reason::None);
        assert!(answered_bytes(&fetch, 1, expert, &answer).as_ref() == Some(old));
        let host = answer.expert.unwrap();
        // SAFETY: valid until the expert is released.
        let host = unsafe { std::slice::from_raw_parts(host.host.unwrap(), old.len()) };
        assert!(host == old, "both places have the same bytes");
    }
    fetch.release_layer(1);
    // Scheduled again, they are the new ones, from a buffer that is not page-locked.
    assert!(expert_bytes(&it.model, 1, 4) != old[1]);
    assert_eq!(run_layer(&fetch, 1, &[0, 4, 8]), 3);
    assert_eq!(fetch.stats().staged_copies, 3);
    assert_eq!(it.sim.count("pageable"), 0);
    it.end(fetch);
}

/// A stand-in for a kernel: copies from the device to page-locked memory in a stream.
struct Kernels<'a> {
    sim: &'a Sim,
    device: Arc<CudaDevice>,
    memory: *mut u8,
    used: usize,
}

impl Kernels<'_> {
    fn new(sim: &Sim) -> Kernels<'_> {
        let device = CudaDevice::open(0).unwrap();
        let memory = device.allocate_pinned(8 << 20).unwrap();
        Kernels {
            sim,
            device,
            memory,
            used: 0,
        }
    }

    fn read(&mut self, stream: Stream, address: u64, len: usize) -> *const u8 {
        type Copy = unsafe extern "C" fn(*mut c_void, u64, usize, u64) -> u32;
        type Push = unsafe extern "C" fn(usize) -> u32;
        let out = self.memory.wrapping_add(self.used);
        self.used += len;
        // SAFETY: the types of cuda.h; the memory is large enough for these tests.
        unsafe {
            let copy: Copy = std::mem::transmute(self.sim.symbol("cuMemcpyDtoHAsync_v2"));
            let push: Push = std::mem::transmute(self.sim.symbol("cuCtxPushCurrent_v2"));
            let pop: Push = std::mem::transmute(self.sim.symbol("cuCtxPopCurrent_v2"));
            assert_eq!(push(0xc0de_0001), 0);
            assert_eq!(copy(out.cast(), address, len, stream.0), 0);
            let mut gone = 0usize;
            assert_eq!(pop(&raw mut gone as usize), 0);
        }
        out
    }

    /// Waits for a stream.
    fn finish(&self, stream: Stream) {
        let event = self.device.create_event().unwrap();
        self.device.record(event, stream).unwrap();
        while !self.device.is_done(event).unwrap() {}
        self.device.destroy_event(event).unwrap();
    }

    fn free(&self) {
        // SAFETY: allocated in `new`, and not read any more.
        unsafe { self.device.free_pinned(self.memory).unwrap() };
    }
}

#[test]
fn streams_wait_for_bytes_and_memory_waits_for_streams() {
    for dedicated in [true, false] {
        let it = Fixture::new();
        let fetch = it.fetch(|options| options.config.dedicated_streams = dedicated);
        let mut kernels = Kernels::new(&it.sim);
        let stream = fetch.compute_stream().unwrap();
        let streams = it.sim.count("cuStreamCreate");
        assert_eq!(streams, if dedicated { 2 } else { 1 });
        let host = kernels.device.create_stream().unwrap();
        let mut expected = Vec::new();
        // Every round uses the same device memory, and the kernels are far behind.
        it.sim.set("SIM_CUDA_LATENCY_NS", 3_000_000);
        for round in 0..6 {
            let (layer, ids) = (round % 2, [3 + round as i32, 9, 15]);
            fetch.schedule(layer, &ids);
            for id in ids {
                // SAFETY: the stream lives as long as the scheduler.
                let answer = unsafe { fetch.acquire_on(layer, id as u32, stream) };
                assert_eq!(answer.reason, Reason::None);
                let right = expert_bytes(&it.model, layer, id as u32);
                let read = kernels.read(stream, answer.device_address, right.len());
                expected.push((read, right));
            }
            fetch.release_layer(layer);
        }
        // SAFETY: the stream exists.
        unsafe { fetch.hand_back(host).unwrap() };
        kernels.finish(host);
        for (read, right) in &expected {
            // SAFETY: inside the page-locked memory; the stream is done.
            let read = unsafe { std::slice::from_raw_parts(*read, right.len()) };
            assert!(read == right, "a kernel saw other bytes");
        }
        assert_eq!(fetch.stats().stream_hits, 18);
        kernels.device.destroy_stream(host).unwrap();
        kernels.free();
        drop(kernels);
        it.end(fetch);
    }
}

#[test]
fn acquire_on_takes_one_stream_an_expert() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    let device = CudaDevice::open(0).unwrap();
    let (one, two) = (
        device.create_stream().unwrap(),
        device.create_stream().unwrap(),
    );
    fetch.schedule(0, &[1]);
    // SAFETY: the streams exist until the expert is released.
    unsafe {
        assert_eq!(fetch.acquire_on(0, 1, one).reason, Reason::None);
        assert_eq!(fetch.acquire_on(0, 1, one).reason, Reason::None);
        assert_eq!(fetch.acquire_on(0, 1, two).reason, Reason::DeviceFailed);
    }
    fetch.release(0, 1);
    device.destroy_stream(one).unwrap();
    device.destroy_stream(two).unwrap();
    drop(device);
    it.end(fetch);
}

/// Copies that have not begun: a stream waits for them, and its caller does not.
#[test]
fn acquire_on_waits_for_no_copy() {
    let ids = [1, 5, 9, 13];
    for max_transfers in [1, 3, 4, 5] {
        for block in [true, false] {
            let it = Fixture::new();
            it.sim.set("SIM_CUDA_HOLD", 1);
            let fetch = it.fetch(|options| {
                options.config.max_transfers = max_transfers;
                options.config.block_on_miss = block;
            });
            let mut kernels = Kernels::new(&it.sim);
            let stream = fetch.compute_stream().unwrap();
            fetch.schedule(0, &ids);
            let expected = match block {
                true => (State::CopyInFlight, Reason::None),
                false => (State::CopyInFlight, Reason::Missed),
            };
            let acquire = |id: i32| {
                // SAFETY: the stream lives as long as the scheduler.
                let answer = unsafe { fetch.acquire_on(0, id as u32, stream) };
                (id, answer)
            };
            let answers = ids.map(acquire);
            for (id, answer) in answers {
                assert_eq!((answer.state, answer.reason), expected, "{max_transfers}");
                assert_eq!(fetch.query(0, id as u32).state, State::CopyInFlight);
            }
            it.sim.set("SIM_CUDA_HOLD", 0);
            ids.iter().for_each(|&id| until_ready(&fetch, 0, id as u32));
            for (id, answer) in ids.map(acquire) {
                assert_eq!(answer.reason, Reason::None);
                let right = expert_bytes(&it.model, 0, id as u32);
                let read = kernels.read(stream, answer.device_address, right.len());
                kernels.finish(stream);
                // SAFETY: inside the page-locked memory; the stream is done.
                let read = unsafe { std::slice::from_raw_parts(read, right.len()) };
                assert!(read == right, "a kernel saw other bytes");
            }
            assert_eq!(fetch.stats().stream_waits, if block { 4 } else { 0 });
            fetch.release_layer(0);
            kernels.free();
            drop(kernels);
            it.end(fetch);
        }
    }
}

/// The caller waits for each copy, or for none, however many are under way at a time.
#[test]
fn acquire_waits_for_copies_if_it_may() {
    let ids = [1, 5, 9, 13];
    for max_transfers in [1, 3, 4, 5] {
        for block in [true, false] {
            let it = Fixture::new();
            let fetch = it.fetch(|options| {
                options.config.max_transfers = max_transfers;
                options.config.block_on_miss = block;
            });
            it.sim.set("SIM_CUDA_HOLD", u64::from(!block));
            let on_device = if block { 4 } else { 0 };
            assert_eq!(run_layer(&fetch, 0, &ids), on_device);
            it.sim.set("SIM_CUDA_HOLD", 0);
            it.end(fetch);
        }
    }
}

/// Where copies go through buffers, their bytes are read first: the CPU computes what a stream cannot
/// wait for yet.
#[test]
fn acquire_on_leaves_what_is_staged_to_the_cpu() {
    let it = Fixture::of(&large_file(), Access::Map);
    it.sim.set("SIM_CUDA_HOLD", 1);
    let fetch = it.fetch(|options| {
        options.config.page_lock = false;
        // More than all buffers: 139,264 bytes each.
        options.config.scratchpad_bytes = 4 << 20;
        options.config.max_transfers = 16;
    });
    let stream = fetch.compute_stream().unwrap();
    let ids: Vec<i32> = (0..16).rev().collect();
    fetch.schedule(0, &ids);
    // SAFETY: the stream lives as long as the scheduler.
    let acquire = |id: &i32| unsafe { fetch.acquire_on(0, *id as u32, stream) };
    let reasons: BTreeSet<u32> = ids.iter().map(acquire).map(|a| a.reason as u32).collect();
    let expected = [Reason::None, Reason::Missed].map(|reason| reason as u32);
    assert!(reasons.is_subset(&BTreeSet::from(expected)), "{reasons:?}");
    assert!(reasons.contains(&expected[1]));
    it.sim.set("SIM_CUDA_HOLD", 0);
    fetch.release_layer(0);
    assert_eq!(run_layer(&fetch, 0, &ids), 16);
    it.end(fetch);
}

/// The simulation reports a stream that does not wait for a copy.
#[test]
fn the_simulation_sees_a_stream_that_does_not_wait() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_HOLD", 1);
    let fetch = it.fetch(|_| ());
    let mut kernels = Kernels::new(&it.sim);
    let stream = fetch.compute_stream().unwrap();
    fetch.schedule(0, &[1]);
    // SAFETY: the stream lives as long as the scheduler.
    let address = unsafe { fetch.acquire_on(0, 1, stream) }.device_address;
    assert_ne!(address, 0);
    assert_eq!(
        it.sim
            .problems()
            .iter()
            .filter(|p| p.contains("may still"))
            .count(),
        0
    );
    let other = kernels.device.create_stream().unwrap();
    kernels.read(other, address, 64);
    it.sim.set("SIM_CUDA_HOLD", 0);
    let problems = it.sim.problems();
    assert!(
        problems.iter().any(|p| p.contains("may still write")),
        "{problems:?}"
    );
}

#[test]
fn contexts_and_threads_never_share_memory() {
    let it = Fixture::new();
    let contexts = [
        it.fetch(|_| ()),
        it.fetch(|options| {
            options.config.max_transfers = 1;
            options.config.cache_bytes = 100_000;
        }),
    ];
    let hits = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (i, fetch) in contexts.iter().enumerate() {
            for layer in 0..3u32 {
                let hits = &hits;
                scope.spawn(move || {
                    for round in 0..60i32 {
                        let first = (round * 7 + i as i32 * 3) % 5;
                        let found = run_layer(fetch, layer, &[first, first + 1, 5 - first]);
                        hits.fetch_add(found as u64, Ordering::Relaxed);
                    }
                });
            }
        }
    });
    assert!(hits.into_inner() > 300);
    // Both use one registration of the model's pages.
    assert!(it.sim.count("cuMemHostRegister_v2") <= 8);
    let [one, two] = contexts;
    drop(one);
    assert_eq!(run_layer(&two, 0, &[1, 2]), 2, "the pages are locked still");
    it.end(two);
}

/// The device memory of a slot for an expert of layer 0.
const SLOT: u64 = 7168;

/// A layer alone, with the experts of layer 0.
fn one_layer() -> Gguf {
    let experts = i64::from(EXPERTS);
    let file = Gguf::default().kv("llama.expert_used_count", Kv::U32(4));
    file.tensor("blk.0.ffn_down_exps.weight", &[96, 70, experts], Q8_0, 12)
}

/// Batches of one to four experts. Some experts are frequent.
fn routes(seed: u64, batches: usize) -> impl Iterator<Item = Vec<i32>> {
    let mut state = seed * 2 + 88_172_645_463_325_252;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) % below
    };
    let mut batch = move || {
        let mut ids = Vec::new();
        for _ in 0..=random(4) {
            let id = (random(16) * random(16) / 15) as i32;
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        ids
    };
    (0..batches).map(move |_| batch())
}

/// The hits and evictions of a cache that replaces the least recently used expert. Batches of more
/// experts than slots only take free slots.
fn simulated_lru(routes: &[Vec<i32>], slots: usize) -> (u64, u64) {
    let (mut hits, mut evictions, mut time) = (0, 0, 0);
    let mut used = std::collections::HashMap::new();
    let mut resident: Vec<i32> = Vec::new();
    for batch in routes {
        for &id in batch {
            time += 1;
            used.insert(id, time);
        }
        for id in batch {
            if resident.contains(id) {
                hits += 1;
                continue;
            }
            if resident.len() == slots {
                if batch.len() > slots {
                    continue;
                }
                let others = (0..slots).filter(|&at| !batch.contains(&resident[at]));
                let oldest = others.min_by_key(|&at| used[&resident[at]]);
                resident.swap_remove(oldest.unwrap());
                evictions += 1;
            }
            resident.push(*id);
        }
    }
    (hits, evictions)
}

#[test]
fn hits_of_the_cache_are_those_of_a_simulated_lru() {
    let file = one_layer();
    for slots in [1, 2, 3, 5, 8, 12, 15, 16] {
        for page_lock in [true, false] {
            let it = Fixture::of(&file, Access::Map);
            let fetch = it.fetch(|options| {
                options.config.page_lock = page_lock;
                options.config.cache_bytes = slots * SLOT + SLOT - 1;
            });
            let routes: Vec<_> = routes(slots, 300).collect();
            for batch in &routes {
                assert_eq!(run_layer(&fetch, 0, batch), batch.len());
            }
            let stats = fetch.stats();
            let (hits, evictions) = simulated_lru(&routes, slots as usize);
            let all = routes.iter().map(Vec::len).sum::<usize>() as u64;
            assert_eq!(
                (stats.cache_hits, stats.evictions),
                (hits, evictions),
                "{slots}"
            );
            assert_eq!(stats.cache_misses, all - hits);
            assert_eq!((stats.experts, stats.hits), (all - hits, all));
            assert_eq!(stats.bytes, (all - hits) * 7140);
            assert_eq!(stats.cache_bytes, slots * SLOT);
            assert_eq!(stats.errors, 0);
            println!("{slots} slots: {hits} hits of {all}, {evictions} evictions");
            it.end(fetch);
        }
    }
}

/// An expert that was used often outlives one that was used last.
#[test]
fn a_half_life_keeps_experts_that_are_used_often() {
    for (half_life, hits) in [(1, 2), (100, 3)] {
        let it = Fixture::of(&one_layer(), Access::Map);
        let fetch = it.fetch(|options| {
            options.config.cache_bytes = 2 * SLOT;
            options.config.cache_half_life = half_life;
        });
        for expert in [5, 5, 5, 6, 7, 5] {
            assert_eq!(run_layer(&fetch, 0, &[expert]), 1);
        }
        assert_eq!(fetch.stats().cache_hits, hits, "{half_life}");
        it.end(fetch);
    }
}

#[test]
fn a_hit_is_ready_at_once_and_copies_nothing() {
    let it = Fixture::new();
    let fetch = it.fetch(|options| {
        options.config.cache_bytes = 1 << 20;
        options.config.block_on_miss = false;
    });
    let mode = fetch.mode();
    assert!(mode.contains(" for 38 of 38 experts"), "{mode}");
    for (layer, ids) in [(0, [3, 4]), (1, [15, 1]), (2, [5, 0])] {
        fetch.schedule(layer, &ids);
        for id in ids {
            until_ready(&fetch, layer, id as u32);
        }
        fetch.release_layer(layer);
        assert_eq!(
            fetch.query(layer, ids[0] as u32).reason,
            Reason::NotScheduled
        );
    }
    let before = fetch.stats();
    let calls = it.sim.count("total");
    for (layer, ids) in [(0, [4, 3]), (1, [15, 1]), (2, [0, 5])] {
        fetch.schedule(layer, &ids);
        for id in ids {
            assert_eq!(fetch.query(layer, id as u32).state, State::GpuReady);
            assert_eq!(fetch.acquire(layer, id as u32).reason, Reason::None);
        }
        fetch.release_layer(layer);
    }
    assert_eq!(it.sim.count("total"), calls, "no call of the driver");
    let stats = fetch.stats();
    assert_eq!(
        (stats.copies, stats.experts),
        (before.copies, before.experts)
    );
    assert_eq!((before.cache_misses, stats.cache_misses), (6, 6));
    assert_eq!((before.cache_hits, stats.cache_hits), (0, 6));
    for (layer, ids) in [(0, [4, 3]), (1, [15, 1]), (2, [0, 5])] {
        assert_eq!(run_layer(&fetch, layer, &ids), 2);
    }
    it.end(fetch);
}

#[test]
fn batches_larger_than_the_cache_use_the_scratchpad() {
    let it = Fixture::of(&one_layer(), Access::Map);
    let fetch = it.fetch(|options| {
        options.active = 8;
        options.config.cache_bytes = 3 * SLOT;
    });
    assert_eq!(run_layer(&fetch, 0, &[5, 9]), 2);
    // Expert 5 is in the cache, and 4 gets the free slot.
    assert_eq!(run_layer(&fetch, 0, &[4, 5, 6, 7, 8]), 5);
    let stats = fetch.stats();
    assert_eq!(
        (stats.cache_hits, stats.cache_misses, stats.evictions),
        (1, 6, 0)
    );
    assert_eq!((stats.copies, stats.coalesced), (4, 2));
    assert_eq!(run_layer(&fetch, 0, &[5, 9, 4]), 3);
    assert_eq!(fetch.stats().cache_hits, 4);
    it.end(fetch);
}

#[test]
fn a_slot_in_use_is_not_filled() {
    let it = Fixture::of(&one_layer(), Access::Map);
    let fetch = it.fetch(|options| options.config.cache_bytes = 2 * SLOT);
    fetch.schedule(0, &[1, 2]);
    let held = [1, 2].map(|expert| fetch.acquire(0, expert));
    // Both slots are in use: the scratchpad.
    fetch.schedule(0, &[3, 4]);
    for expert in [3, 4] {
        check_bytes(&fetch, 0, expert, &fetch.acquire(0, expert));
    }
    fetch.release(0, 1);
    fetch.release(0, 3);
    fetch.schedule(0, &[5]);
    assert_eq!(fetch.acquire(0, 5).device_address, held[0].device_address);
    for expert in [2, 4, 5] {
        check_bytes(&fetch, 0, expert, &fetch.acquire(0, expert));
    }
    let stats = fetch.stats();
    assert_eq!((stats.cache_misses, stats.evictions, stats.hits), (5, 1, 8));
    fetch.release_layer(0);
    // Both are hits, which keep their slots, too.
    for ids in [&[5, 2][..], &[7, 8]] {
        fetch.schedule(0, ids);
        for expert in [5, 2] {
            check_bytes(&fetch, 0, expert, &fetch.acquire(0, expert));
        }
    }
    for expert in [7, 8, 5, 2] {
        check_bytes(&fetch, 0, expert, &fetch.acquire(0, expert));
    }
    let stats = fetch.stats();
    assert_eq!(
        (stats.cache_hits, stats.cache_misses, stats.evictions),
        (2, 7, 1)
    );
    // A miss does not replace a hit of the same call.
    fetch.release(0, 2);
    fetch.schedule(0, &[9, 2]);
    for expert in [9, 2, 5] {
        check_bytes(&fetch, 0, expert, &fetch.acquire(0, expert));
    }
    let stats = fetch.stats();
    assert_eq!(
        (stats.cache_hits, stats.cache_misses, stats.evictions),
        (3, 8, 1)
    );
    it.end(fetch);
}

/// A copy that is released while it is under way still ends in the cache. One that has not begun
/// does not.
#[test]
fn copies_under_way_are_hits() {
    let it = Fixture::of(&one_layer(), Access::Map);
    it.sim.set("SIM_CUDA_LATENCY_NS", 100_000_000);
    let fetch = it.fetch(|options| {
        options.config.max_transfers = 1;
        options.config.cache_bytes = 4 * SLOT;
    });
    fetch.schedule(0, &[7, 9]);
    while it.sim.count("cuMemcpyHtoDAsync_v2") < 1 {
        std::thread::yield_now();
    }
    fetch.release_layer(0);
    fetch.schedule(0, &[7, 9]);
    assert_eq!(fetch.query(0, 7).state, State::CopyInFlight);
    let stats = fetch.stats();
    assert_eq!((stats.cache_hits, stats.cache_misses), (1, 3));
    assert_eq!(run_layer(&fetch, 0, &[7, 9]), 2);
    assert_eq!(fetch.stats().copies, 2);
    it.end(fetch);
}

#[test]
fn a_swap_drops_the_slots_of_the_tensor() {
    for access in [Access::Map, Access::Read] {
        let it = Fixture::with(access);
        let fetch = it.fetch(|options| options.config.cache_bytes = 1 << 20);
        let ids = [(0, [3, 9]), (1, [0, 4]), (2, [5, 2])];
        for (layer, ids) in ids {
            assert_eq!(run_layer(&fetch, layer, &ids), 2);
        }
        let old = [3, 9].map(|expert| expert_bytes(&it.model, 0, expert));
        fetch.schedule(0, &[3]);
        for round in 2..4 {
            model_file(round).replace(&it.path).unwrap();
            set_time(&it.path, (1 << 20) >> round);
            it.model.reload().unwrap();
            assert!(expert_bytes(&it.model, 0, 3) != old[0]);
            if round == 2 {
                // Scheduled before the swap, it has the old bytes until its release.
                let answer = fetch.acquire(0, 3);
                assert_eq!(answer.expert.unwrap().generation, 0);
                assert!(answered_bytes(&fetch, 0, 3, &answer).as_ref() == Some(&old[0]));
                fetch.release_layer(0);
            }
            let before = fetch.stats().cache_misses;
            for (layer, ids) in ids {
                assert_eq!(run_layer(&fetch, layer, &ids), 2);
                assert_eq!(run_layer(&fetch, layer, &ids), 2);
                fetch.schedule(layer, &ids);
                assert_eq!(
                    fetch.query(layer, ids[0] as u32).expert.unwrap().generation,
                    round - 1
                );
                fetch.release_layer(layer);
            }
            assert_eq!(fetch.stats().cache_misses, before + 6);
        }
        it.end(fetch);
    }
}

#[test]
fn swaps_while_threads_use_the_cache_give_no_mixed_bytes() {
    let it = Fixture::new();
    let fetch = it.fetch(|options| options.config.cache_bytes = 150_000);
    let swapping = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for layer in 0..2u32 {
            let (fetch, swapping) = (&fetch, &swapping);
            scope.spawn(move || {
                let mut generations = BTreeSet::new();
                for batch in routes(layer.into(), 50_000) {
                    fetch.schedule(layer, &batch);
                    for id in batch {
                        let answer = fetch.acquire(layer, id as u32);
                        assert_eq!(answer.reason, Reason::None);
                        let weights = answer.expert.unwrap();
                        let (host, len) = (weights.host.unwrap(), weights.nbytes as usize);
                        let device = answered_bytes(fetch, layer, id as u32, &answer).unwrap();
                        // SAFETY: valid until the expert is released.
                        let host = unsafe { std::slice::from_raw_parts(host, len) };
                        assert!(device == host, "generation {}", weights.generation);
                        generations.insert(weights.generation);
                    }
                    fetch.release_layer(layer);
                    if !swapping.load(Ordering::Relaxed) && generations.contains(&6) {
                        break;
                    }
                }
            });
        }
        for seed in 2..8 {
            model_file(seed).replace(&it.path).unwrap();
            set_time(&it.path, (1 << 20) >> seed);
            it.model.reload().unwrap();
        }
        swapping.store(false, Ordering::Relaxed);
    });
    assert!(fetch.stats().cache_hits > 0);
    it.end(fetch);
}

#[test]
fn a_swap_while_a_copy_is_under_way_leaves_nothing_stale() {
    let it = Fixture::of(&one_layer(), Access::Map);
    it.sim.set("SIM_CUDA_LATENCY_NS", 30_000_000);
    let fetch = it.fetch(|options| options.config.cache_bytes = 4 * SLOT);
    fetch.schedule(0, &[1, 2, 3]);
    while it.sim.count("cuMemcpy2DAsync_v2") + it.sim.count("cuMemcpyHtoDAsync_v2") < 3 {
        std::thread::yield_now();
    }
    fetch.release_layer(0);
    let experts = i64::from(EXPERTS);
    let file = Gguf::default().kv("llama.expert_used_count", Kv::U32(4));
    let other = file.tensor("blk.0.ffn_down_exps.weight", &[96, 70, experts], Q8_0, 99);
    other.replace(&it.path).unwrap();
    set_time(&it.path, 1 << 19);
    it.model.reload().unwrap();
    assert_eq!(run_layer(&fetch, 0, &[3, 2, 1, 0]), 4);
    assert_eq!(run_layer(&fetch, 0, &[0, 1, 2, 3]), 4);
    let stats = fetch.stats();
    assert_eq!((stats.cache_hits, stats.cache_misses), (4, 7));
    it.end(fetch);
}

#[test]
fn experts_that_became_larger_than_a_slot_use_the_scratchpad() {
    let it = Fixture::of(&one_layer(), Access::Map);
    let fetch = it.fetch(|options| {
        options.config.cache_bytes = 16 * SLOT;
        options.config.scratchpad_bytes = 1 << 20;
    });
    assert_eq!(run_layer(&fetch, 0, &[1, 2]), 2);
    let experts = i64::from(EXPERTS);
    let file = Gguf::default().kv("llama.expert_used_count", Kv::U32(4));
    let larger = file.tensor("blk.0.ffn_down_exps.weight", &[96, 70, experts], F16, 99);
    larger.replace(&it.path).unwrap();
    set_time(&it.path, 1 << 19);
    it.model.reload().unwrap();
    for _ in 0..2 {
        assert_eq!(run_layer(&fetch, 0, &[1, 2]), 2);
    }
    let stats = fetch.stats();
    assert_eq!(
        (stats.cache_hits, stats.cache_misses, stats.evictions),
        (0, 6, 0)
    );
    it.end(fetch);
}

#[test]
fn without_memory_for_the_cache_there_is_none() {
    for (file, bytes, memory, text, hits) in [
        (large_file(), 2 << 20, 1, "no cache: device 'cuda0", 0),
        (large_file(), u64::MAX, 1, "no cache: device 'cuda0", 0),
        (model_file(1), u64::MAX, 1024, " for 38 of 38 experts", 2),
        (model_file(1), 100, 1024, "no cache: 100 bytes are less", 0),
        (
            model_file(1),
            0,
            1024,
            "(the active experts of the largest layer); from",
            0,
        ),
    ] {
        let it = Fixture::of(&file, Access::Map);
        it.sim.set("SIM_CUDA_MEMORY_MB", memory);
        let fetch = it.fetch(|options| {
            options.config.cache_bytes = bytes;
            if memory == 1 {
                // More than 10 % of the device.
                options.config.scratchpad_bytes = 600 << 10;
            }
        });
        assert!(fetch.mode().contains(text), "{}", fetch.mode());
        for _ in 0..2 {
            fetch.schedule(0, &[1, 2]);
            assert_eq!(fetch.acquire(0, 1).reason, Reason::None);
            assert_eq!(fetch.acquire(0, 2).reason, Reason::None);
            fetch.release_layer(0);
        }
        let stats = fetch.stats();
        assert_eq!((stats.cache_hits, stats.errors), (hits, 0));
        assert_eq!(stats.cache_bytes > 0, hits > 0);
        it.end(fetch);
    }
}

#[test]
fn a_trace_fills_the_cache_with_the_most_used_experts() {
    let layer = |layer, experts: Vec<u64>| LayerCounts {
        layer,
        tokens: 9,
        experts,
        locality: None,
    };
    let trace = Snapshot {
        // More experts than the model has, and a layer that it does not have.
        layers: vec![
            layer(0, vec![0, 7, 0, 5, 9, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 4, 99]),
            layer(8, vec![1]),
        ],
        rejected: 0,
        time: Duration::ZERO,
    };
    for (slots, expected) in [
        (1, &[4][..]),
        (3, &[4, 1, 3]),
        (16, &[4, 1, 3, 15, 6]),
        (0, &[]),
    ] {
        let it = Fixture::of(&one_layer(), Access::Map);
        let fetch = it.fetch(|options| {
            options.config.cache_bytes = slots * SLOT;
            options.config.block_on_miss = false;
        });
        assert_eq!(fetch.fill_cache(&trace), expected.len() as u64);
        let bytes = fetch.stats().bytes;
        for &expert in expected {
            assert_eq!(run_layer(&fetch, 0, &[expert]), 1);
        }
        assert_eq!(fetch.stats().bytes, bytes);
        assert_eq!(fetch.stats().cache_hits, expected.len() as u64);
        it.end(fetch);
    }
    // The hottest expert is replaced last.
    let it = Fixture::of(&one_layer(), Access::Map);
    let fetch = it.fetch(|options| options.config.cache_bytes = 2 * SLOT);
    fetch.fill_cache(&trace);
    assert_eq!(run_layer(&fetch, 0, &[12]), 1);
    assert_eq!(run_layer(&fetch, 0, &[4]), 1);
    assert_eq!(fetch.stats().cache_hits, 1);
    it.end(fetch);
}

/// Hits of two streams, whose kernels are far behind, and copies to the slots that they read.
#[test]
fn slots_wait_for_all_streams_that_read_them() {
    for slots in [4, 6, 16] {
        let it = Fixture::of(&one_layer(), Access::Map);
        let fetch = it.fetch(|options| options.config.cache_bytes = slots * SLOT);
        let mut kernels = Kernels::new(&it.sim);
        let streams = [0, 1].map(|_| kernels.device.create_stream().unwrap());
        it.sim.set("SIM_CUDA_LATENCY_NS", 300_000);
        let right: Vec<_> = (0..EXPERTS)
            .map(|e| expert_bytes(&it.model, 0, e))
            .collect();
        let (mut reads, mut refused) = (Vec::new(), 0);
        for (round, ids) in routes(slots, 150).enumerate() {
            let stream = streams[(round / 3 + round / 7) % 2];
            fetch.schedule(0, &ids);
            for id in ids {
                // SAFETY: the streams are destroyed at the end.
                let answer = unsafe { fetch.acquire_on(0, id as u32, stream) };
                // No call waits for a stream: with all transfers held, the CPU computes an expert.
                if answer.reason == Reason::NoRoom {
                    refused += 1;
                    for stream in streams {
                        kernels.finish(stream);
                    }
                    continue;
                }
                assert_eq!(answer.reason, Reason::None);
                reads.push((kernels.read(stream, answer.device_address, 7140), id));
            }
            fetch.release_layer(0);
        }
        let stats = fetch.stats();
        assert!(stats.cache_hits > 50 && stats.errors == 0);
        assert_eq!(stats.stream_hits, reads.len() as u64);
        let held = stats.cache_hits + stats.cache_misses;
        assert!((stats.stream_hits..=stats.stream_hits + refused).contains(&held));
        assert!(refused * 2 < stats.stream_hits, "{refused} refused");
        for stream in streams {
            kernels.finish(stream);
        }
        for (read, id) in reads {
            // SAFETY: inside the page-locked memory; the streams are done.
            let read = unsafe { std::slice::from_raw_parts(read, 7140) };
            assert!(read == right[id as usize], "a kernel saw other bytes");
        }
        for stream in streams {
            kernels.device.destroy_stream(stream).unwrap();
        }
        kernels.free();
        drop(kernels);
        it.end(fetch);
    }
}

#[test]
fn the_cuda_context_of_the_program_is_kept() {
    type Context = unsafe extern "C" fn(*mut usize) -> u32;
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    let current = || {
        let mut context = 0;
        // SAFETY: the type of cuda.h.
        unsafe {
            let get: Context = std::mem::transmute(it.sim.symbol("cuCtxGetCurrent"));
            assert_eq!(get(&mut context), 0);
        }
        context
    };
    let before = current();
    run_layer(&fetch, 0, &[1, 2, 3]);
    assert_eq!((before, current()), (0, 0));
    it.end(fetch);
}

#[test]
fn a_forked_child_frees_nothing_of_its_parent() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    run_layer(&fetch, 0, &[1, 2]);
    // SAFETY: the child only drops what it got, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let freed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(fetch)));
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(freed.is_err())) };
    }
    let mut status = 0;
    // SAFETY: writes the status of the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(run_layer(&fetch, 0, &[3, 4]), 2);
    it.end(fetch);
}

#[test]
fn devices_are_counted_and_chosen() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_DEVICES", 3);
    assert_eq!(device_count().unwrap(), 3);
    let there = fetch(&it.model, 2, |_| ());
    assert_eq!(run_layer(&there, 0, &[1]), 1);
    assert!(
        there.mode().contains("cuda2 (simulated GPU)"),
        "{}",
        there.mode()
    );
    let missing = fetch(&it.model, 3, |_| ());
    assert_eq!(run_layer(&missing, 0, &[1]), 0);
    assert_eq!(missing.acquire(0, 1).reason, Reason::NoDevice);
    assert!(
        missing.mode().contains("there are 3 CUDA devices"),
        "{}",
        missing.mode()
    );
    drop(missing);
    it.end(there);
}

#[test]
fn experts_are_divided_over_devices() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_DEVICES", 2);
    let devices = [0, 1].map(|device| fetch(&it.model, device, |_| ()));
    let ids = [0, 1, 2, 3];
    for round in 0..3 {
        // Whole layers.
        for layer in 0..3 {
            let device = &devices[layer as usize % 2];
            assert_eq!(run_layer(device, layer, &ids), 4, "round {round}");
        }
        // The experts of each layer, of which a device has every other one.
        for layer in 0..3 {
            for (device, own) in devices.iter().zip([[0, 2], [1, 3]]) {
                device.schedule(layer, &own);
            }
            for id in ids {
                let (device, id) = (&devices[id as usize % 2], id as u32);
                let answer = device.acquire(layer, id);
                assert_eq!(answer.reason, Reason::None);
                check_bytes(device, layer, id, &answer);
                let other = &devices[(id as usize + 1) % 2];
                assert_eq!(other.acquire(layer, id).reason, Reason::NotScheduled);
            }
            devices.iter().for_each(|of| of.release_layer(layer));
        }
    }
    for (device, name) in devices.iter().zip(["cuda0", "cuda1"]) {
        assert!(device.mode().contains(name), "{}", device.mode());
        assert_eq!(device.stats().staged_copies, 0, "pages are locked once");
    }
    let [first, second] = devices;
    // The locks of the pages are those of both.
    drop(first);
    assert_eq!(run_layer(&second, 0, &ids), 4);
    assert_eq!(second.stats().staged_copies, 0);
    it.end(second);
}

#[test]
fn a_full_device_falls_back_to_the_cpu() {
    let it = Fixture::new();
    it.sim.set("SIM_CUDA_MEMORY_MB", 0);
    let fetch = it.fetch(|_| ());
    assert!(fetch.mode().contains("cannot allocate"), "{}", fetch.mode());
    assert_eq!(run_layer(&fetch, 0, &[1]), 0);
    it.end(fetch);
}

#[test]
fn only_base_weights_are_fetched() {
    let it = Fixture::new();
    let fetch = it.fetch(|_| ());
    let layer_of = |name: &std::ffi::CStr| fetch.layer_of(it.model.find(name).unwrap());
    assert_eq!(layer_of(c"blk.1.ffn_down_exps.weight"), Some(1));
    assert_eq!(layer_of(c"blk.2.ffn_down.3.weight"), Some(2));
    assert_eq!(layer_of(c"blk.1.ffn_gate_exps.weight"), None);
    assert_eq!(layer_of(c"blk.0.attn_q.weight"), None);
    assert_eq!(fetch.layer_of(usize::MAX), None);
    it.end(fetch);
}

#[test]
fn tensors_of_the_program_are_fetched_in_place() {
    let it = Fixture::new();
    let named = it.fetch(|_| ());
    let memory: Vec<Vec<u8>> = (0..it.model.tensor_count())
        .map(|index| {
            let mut bytes = vec![0; it.model.tensor(index).nbytes() as usize];
            it.model.read(index, 0, &mut bytes).expect("its bytes");
            bytes
        })
        .collect();
    let tensors: Vec<BorrowedTensor> = memory
        .iter()
        .enumerate()
        .map(|(index, bytes)| BorrowedTensor {
            name: it.model.name(index),
            ty: it.model.tensor(index).ty().id,
            ne: it.model.tensor(index).ne(),
            data: bytes.as_ptr(),
            nbytes: bytes.len() as u64,
        })
        .collect();
    // SAFETY: the bytes live longer than the model.
    let model = |tensors: &[BorrowedTensor]| unsafe { Model::of_memory(tensors) };
    let own = Arc::new(model(&tensors).expect("a model"));
    let fetch = fetch(&own, 0, |options| options.active = 4);
    for (index, bytes) in memory.iter().enumerate() {
        assert_eq!(
            fetch.layer_at(bytes.as_ptr() as usize),
            named.layer_of(index)
        );
        assert_eq!(fetch.layer_at(bytes.as_ptr() as usize + 1), None);
    }
    for layer in 0..3 {
        assert_eq!(run_layer(&fetch, layer, &[1, 2, 5]), 3);
        for expert in [1, 2, 5] {
            let here = fetch.query(layer, expert).expert.expect("an expert");
            let at = here.host.expect("in host memory");
            let inside = |bytes: &&Vec<u8>| bytes.as_ptr_range().contains(&at);
            assert!(memory.iter().any(|bytes| inside(&bytes)));
            let expected = expert_bytes(&it.model, layer, expert);
            assert_eq!(expert_bytes(&own, layer, expert), expected);
        }
    }
    assert_eq!(fetch.stats().staged_copies, 0, "from locked pages");

    let refused = |change: fn(&mut BorrowedTensor)| {
        let mut tensors = tensors.clone();
        change(&mut tensors[1]);
        model(&tensors).expect_err("refused").to_string()
    };
    for (change, reason) in [
        (
            (|tensor| tensor.nbytes -= 1) as fn(&mut BorrowedTensor),
            "expected",
        ),
        (|tensor| tensor.data = std::ptr::null(), "at 0x0"),
        (|tensor| tensor.ne[0] = 0, "blk.0.ffn_up_exps.weight"),
        (|tensor| tensor.ty = 1 << 20, "1048576"),
        (
            |tensor| tensor.name = c"blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_gate_exps.weight",
        ),
    ] {
        let message = refused(change);
        assert!(message.contains("tensors of the program"), "{message}");
        assert!(message.contains(reason), "{message}");
    }
    drop(named);
    it.end(fetch);
}

#[test]
fn debug_lines_have_the_documented_format() {
    let it = Fixture::new();
    let lines = log_lines();
    let fetch = it.fetch(|options| options.config.debug = true);
    run_layer(&fetch, 0, &[4, 9]);
    logger::set_sink(None);
    let lines = lines.lock();
    let pf: Vec<_> = lines
        .iter()
        .filter(|line| line.starts_with("[PF]"))
        .collect();
    assert_eq!(pf[0], "[PF] Layer 0: Transferring 2 experts, total 0 MB");
    assert_eq!(pf[1], "[PF]   Expert 4: 7140 bytes @ offset 0");
    assert_eq!(pf[2], "[PF]   Expert 9: 7140 bytes @ offset 7168");
    assert!(pf[3].starts_with("[PF] Layer 0: Transfer: 0.") && pf[3].contains("Overlap: "));
    drop(lines);
    it.end(fetch);
}

/// Collects the lines of the log.
fn log_lines() -> Arc<parking_lot::Mutex<Vec<String>>> {
    let lines = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let sink = lines.clone();
    logger::init();
    logger::set_sink(Some(Arc::new(move |_, line: &str| {
        sink.lock().push(line.to_owned())
    })));
    lines
}

/// Transfer, total and overlap of a line of the log about a layer that has ended.
fn ended(line: &str) -> Option<[f64; 3]> {
    let (_, rest) = line.split_once(": Transfer: ")?;
    let numbers = rest.split(|c: char| !c.is_ascii_digit() && c != '.');
    let numbers: Vec<f64> = numbers.filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().ok()
}

/// A layer has a line when its copies have ended, and the waits of streams for them.
#[test]
fn debug_lines_have_all_times_of_a_layer() {
    for on_stream in [false, true] {
        let it = Fixture::new();
        it.sim.set("SIM_CUDA_LATENCY_NS", 1_000_000);
        let lines = log_lines();
        let fetch = it.fetch(|options| options.config.debug = true);
        let stream = fetch.compute_stream().unwrap();
        let visits = 10;
        for visit in 0..visits {
            it.sim.set("SIM_CUDA_HOLD", u64::from(on_stream));
            let ids = [1, 5, 9, 13];
            fetch.schedule(visit % 2, &ids);
            for id in ids {
                let answer = match on_stream {
                    // SAFETY: the stream lives as long as the scheduler.
                    true => unsafe { fetch.acquire_on(visit % 2, id as u32, stream) },
                    false => fetch.acquire(visit % 2, id as u32),
                };
                assert_eq!(answer.reason, Reason::None);
            }
            fetch.release_layer(visit % 2);
            it.sim.set("SIM_CUDA_HOLD", 0);
            let has_line = || lines.lock().iter().filter_map(|line| ended(line)).count();
            let since = std::time::Instant::now();
            while has_line() <= visit as usize {
                assert!(since.elapsed() < Duration::from_secs(20), "no line");
                // Looks again whether the stream has come to its waits.
                fetch.release_layer(visit % 2);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        logger::set_sink(None);
        let times: Vec<_> = lines.lock().iter().filter_map(|line| ended(line)).collect();
        assert_eq!(times.len(), visits as usize);
        for [transfer, total, overlap] in times {
            // Rounded to 0.01.
            assert!(
                0.0 < transfer && transfer < total + 0.02,
                "{transfer} {total}"
            );
            assert!(overlap < 100.0, "all copies were waited for: {overlap}");
        }
        it.end(fetch);
    }
}

#[test]
fn unused_copies_overlap_with_nothing() {
    let ids = [1, 5, 9, 13];
    let it = Fixture::new();
    let fetch = it.fetch(|options| options.config.block_on_miss = false);
    it.sim.set("SIM_CUDA_HOLD", 1);
    fetch.schedule(0, &ids);
    ids.iter().for_each(|&id| {
        let answer = fetch.acquire(0, id as u32);
        assert_eq!(answer.reason, Reason::Missed);
    });
    assert_eq!(fetch.stats().overlap(), None);
    it.sim.set("SIM_CUDA_HOLD", 0);
    ids.iter().for_each(|&id| until_ready(&fetch, 0, id as u32));
    let stats = fetch.stats();
    assert_eq!((stats.unused_copies, stats.unused), (4, stats.transfer));
    assert_eq!(
        (stats.overlap(), stats.fallback_rate()),
        (Some(0.0), Some(1.0))
    );
    // What is used after all has ended before, and nothing waited for it.
    ids.iter().for_each(|&id| {
        assert_eq!(fetch.acquire(0, id as u32).reason, Reason::None);
    });
    fetch.release_layer(0);
    let stats = fetch.stats();
    assert_eq!((stats.unused_copies, stats.unused), (0, Duration::ZERO));
    assert_eq!((stats.early_copies, stats.waits), (4, 0));
    assert_eq!(
        (stats.overlap(), stats.fallback_rate()),
        (Some(1.0), Some(0.5))
    );
    it.end(fetch);
}

/// The times of random schedules are those of the simulation's clock. Waits lie between what the
/// simulation saw of them and what their calls took.
#[test]
fn overlap_is_that_of_the_simulated_clock() {
    const N: usize = 139_264;
    let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_micros(1) + b / 100_000;
    for (seed, max_transfers) in [1, 2, 8, 8].into_iter().enumerate() {
        let it = Fixture::of(&large_file(), Access::Map);
        it.sim.set("SIM_CUDA_LINK_MBPS", 400);
        let fetch = it.fetch(|options| {
            options.config.max_transfers = max_transfers;
            options.config.block_on_miss = seed != 3;
            options.config.scratchpad_bytes = 8 << 20;
        });
        let mut kernels = Kernels::new(&it.sim);
        let stream = fetch.compute_stream().unwrap();
        let base = fetch.query(0, 0).expert.unwrap().host.unwrap() as u64;
        let (mut transfer, mut unused) = (Duration::ZERO, Duration::ZERO);
        let (mut least, mut most) = (Duration::ZERO, Duration::ZERO);
        for ids in routes(seed as u64, 40) {
            let work = Duration::from_micros(ids.iter().sum::<i32>() as u64 * 40);
            fetch.schedule(0, &ids);
            std::thread::sleep(work);
            let mut used = BTreeSet::new();
            for &id in &ids {
                it.sim.polled();
                let began = std::time::Instant::now();
                let answer = match id % 4 {
                    0 | 1 => fetch.acquire(0, id as u32),
                    // SAFETY: the stream lives as long as the scheduler.
                    2 => unsafe { fetch.acquire_on(0, id as u32, stream) },
                    _ => continue,
                };
                most += began.elapsed();
                least += it.sim.polled();
                if answer.reason == Reason::None {
                    used.insert(id as u64);
                    kernels.read(stream, answer.device_address, 64);
                }
            }
            ids.iter().for_each(|&id| until_ready(&fetch, 0, id as u32));
            kernels.finish(stream);
            fetch.release_layer(0);
            for (range, time) in it.sim.copies() {
                let first = (range.start - base) / N as u64;
                let experts = first..(range.end - base).div_ceil(N as u64);
                transfer += time;
                if used.range(experts).next().is_none() {
                    unused += time;
                }
            }
            let stats = fetch.stats();
            assert!(near(stats.transfer, transfer), "{stats:?} {transfer:?}");
            assert!(near(stats.unused, unused), "{stats:?} {unused:?}");
            assert!(
                least <= stats.wait && stats.wait <= most,
                "{stats:?} {least:?} {most:?}"
            );
            let streams = it.sim.waited(stream.0);
            let slack = Duration::from_micros(1) + streams.end / 100_000;
            assert!(
                streams.start <= stats.stream_wait + slack
                    && stats.stream_wait <= streams.end + slack,
                "{stats:?} {streams:?}"
            );
            let lost = stats.wait + streams.end + unused;
            let overlap = (1.0 - lost.as_secs_f64() / transfer.as_secs_f64()).max(0.0);
            assert!(stats.overlap().unwrap() >= overlap - 1e-3);
        }
        let stats = fetch.stats();
        println!("{}", stats.to_text(&fetch.mode()));
        assert!(seed != 3 || stats.stream_waits == 0);
        assert!(stats.unused_copies > 0);
        kernels.free();
        drop(kernels);
        it.end(fetch);
    }
}

/// One use of everything; every answer's bytes are checked.
fn scenario(model: &Arc<Model>, page_lock: bool, cache_bytes: u64) -> (u64, u64) {
    let fetch = fetch(model, 0, |options| {
        options.config.page_lock = page_lock;
        options.config.cache_bytes = cache_bytes;
        options.config.max_transfers = 2;
        options.config.timeout = Duration::from_millis(300);
    });
    for layer in [0, 1, 2] {
        run_layer(&fetch, layer, &[3, 4, 0, 5]);
    }
    if cache_bytes > 0 {
        for ids in [[4, 0], [1, 4], [3, 0]] {
            run_layer(&fetch, 0, &ids);
        }
    }
    if let Some(stream) = fetch.compute_stream() {
        fetch.schedule(0, &[7, 1]);
        for expert in [7, 1] {
            // SAFETY: the stream lives as long as the scheduler.
            let answer = unsafe { fetch.acquire_on(0, expert, stream) };
            assert_eq!(answer.device_address == 0, answer.reason != Reason::None);
        }
        fetch.release_layer(0);
        // SAFETY: as above.
        let _ = unsafe { fetch.hand_back(stream) };
    }
    fetch.schedule(1, &[2, 9, 12]);
    fetch.release(1, 9);
    run_layer(&fetch, 1, &[2, 12]);
    let stats = fetch.stats();
    (stats.hits, stats.all_fallbacks() + stats.errors)
}

/// Discards log messages about injected errors.
fn quietly() {
    logger::init();
    logger::set_sink(Some(Arc::new(|_, _: &str| ())));
}

/// The functions that the scenario calls.
const CALLS: [&str; 28] = [
    "cuGetErrorName",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventElapsedTime",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoH_v2",
];

/// Every n-th fault of a list is injected, so that no more than `short` of them are; in the
/// long form all are.
fn stride(faults: u64, short: u64) -> usize {
    match testkit::long_tests() {
        true => 1,
        false => faults.div_ceil(short).max(1) as usize,
    }
}

#[test]
fn every_driver_function_can_fail_at_any_call() {
    quietly();
    let mut injected = 0;
    let (mut called, mut failed) = (BTreeSet::new(), BTreeSet::new());
    for (page_lock, cache) in [(true, 0), (false, 0), (true, 100_000)] {
        for call in CALLS {
            let it = Fixture::new();
            scenario(&it.model, page_lock, cache);
            let calls = it.sim.count(call);
            if calls > 0 {
                called.insert(call);
            }
            for nth in (1..=calls).step_by(stride(calls, 5)) {
                // What a failure leaves locked belongs to its model.
                let it = Fixture::new();
                it.sim.set(call, nth);
                let (hits, noted) = scenario(&it.model, page_lock, cache);
                if it.sim.count(call) < nth {
                    // The number of polls differs from run to run.
                    continue;
                }
                injected += 1;
                failed.insert(call);
                assert!(hits + noted > 0);
                for problem in it.sim.problems() {
                    // Two problems are consequences of the injected failure: memory whose release
                    // failed, and a call without the context that could not be set.
                    let excused = problem.starts_with("never freed")
                        || (call.starts_with("cuCtx") && problem.contains("context"));
                    assert!(excused, "{call} {nth}: {problem}");
                }
            }
        }
    }
    println!("{injected} calls failed, one at a time");
    assert_eq!(called, failed, "each function that is called failed");
    assert!(
        injected >= if testkit::long_tests() { 500 } else { 100 },
        "{injected}"
    );
}

#[test]
fn the_device_is_lost_at_any_call() {
    quietly();
    let it = Fixture::new();
    scenario(&it.model, true, 100_000);
    let calls = it.sim.count("total");
    let mut injected = 0;
    for nth in (1..calls).step_by(stride(calls, 150)) {
        let it = Fixture::new();
        it.sim.set("SIM_CUDA_LOSE", nth);
        scenario(&it.model, true, 100_000);
        injected += 1;
        assert_eq!(it.sim.problems(), [""; 0], "lost at call {nth}");
    }
    println!("lost at {injected} calls");
    assert!(injected > 100);
}

#[test]
fn the_wait_for_an_event_that_never_comes_ends() {
    quietly();
    let it = Fixture::new();
    scenario(&it.model, true, 100_000);
    let records = it.sim.count("cuEventRecord");
    for nth in (1..=records).step_by(stride(records, 6)) {
        let it = Fixture::new();
        it.sim.set("SIM_CUDA_HANG", nth);
        scenario(&it.model, true, 100_000);
        let wrong = |problem: &&String| !problem.starts_with("never freed");
        let problems = it.sim.problems();
        assert_eq!(problems.iter().find(wrong), None, "event {nth}");
    }
}

fn seeded(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(6),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(seeded(60))]

    #[test]
    fn random_schedules_and_acquires_return_the_right_bytes(
        steps in prop::collection::vec((0u32..5, 0u32..4, prop::collection::vec(-1i32..18, 0..9)), 1..30),
        max_transfers in 1u32..9,
        block in any::<bool>(),
        page_lock in any::<bool>(),
        dedicated in any::<bool>(),
        scratchpad in 0u64..6,
        cache in 0u64..20,
    ) {
        let it = Fixture::new();
        let fetch = it.fetch(|options| {
            options.config.max_transfers = max_transfers;
            options.config.block_on_miss = block;
            options.config.page_lock = page_lock;
            options.config.dedicated_streams = dedicated;
            options.config.scratchpad_bytes = scratchpad * 9000;
            options.config.cache_bytes = cache * 15_000;
        });
        for (what, layer, ids) in steps {
            let experts = || ids.iter().map(|&id| id.max(0) as u32);
            match what {
                0 | 1 => fetch.schedule(layer, &ids),
                2 => for expert in experts() {
                    let answer = fetch.acquire(layer, expert);
                    let real = layer < 2 && expert < EXPERTS || layer == 2 && expert < 6;
                    prop_assert_eq!(answer.expert.is_some(), real);
                    if real {
                        check_bytes(&fetch, layer, expert, &answer);
                    }
                },
                3 => fetch.release_layer(layer),
                _ => experts().for_each(|expert| fetch.release(layer, expert)),
            }
        }
        let stats = fetch.stats();
        prop_assert!(stats.scratchpad_peak <= stats.scratchpad_bytes);
        prop_assert_eq!(stats.errors, 0);
        it.end(fetch);
    }
}
