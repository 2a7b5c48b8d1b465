//! Opening models, shards, lazy loading, arenas.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llama_sidecar::device::{Device, HostDevice};
use llama_sidecar::model::{Model, Options, Placement, State};
use sidecar_core::error::Error;
use sidecar_core::experts::{ExpertIndex, ExpertName, Projection, Routing};
use sidecar_core::gguf::{Access, GgufFile, Value};
use tempfile::TempDir;
use testkit::fixtures::fixture;
use testkit::process::in_own_process;
use testkit::writer::{F16, F32, Gguf, Kv, Q4_0, Q8_0, vocabulary, weights, write_shards};

fn sample() -> Gguf {
    Gguf::default()
        .tensor("token_embd.weight", &[64, 100], Q8_0, 1)
        .tensor("blk.0.ffn_down_exps.weight", &[64, 32, 4], Q4_0, 2)
        .tensor("output_norm.weight", &[64], F32, 3)
        .tensor("empty.weight", &[64, 0], F32, 4)
}

fn written(file: &Gguf) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    file.write(&path).unwrap();
    (folder, path)
}

fn opened(path: &Path, access: Access) -> Model {
    let options = Options {
        access,
        ..Options::host()
    };
    Model::open(path, options).unwrap()
}

fn on(device: Arc<HostDevice>) -> Options {
    Options {
        devices: vec![HostDevice::new("host"), device],
        placement: Placement::on(1),
        ..Options::host()
    }
}

fn bytes(model: &Model, index: usize) -> Vec<u8> {
    let mut bytes = vec![0; model.tensor(index).nbytes() as usize];
    model.read(index, 0, &mut bytes).unwrap();
    bytes
}

fn zero_copy(model: &Model, index: usize) -> Vec<u8> {
    let view = model.tensor(index);
    let bytes = model.host_bytes(&view).expect("readable in place");
    // SAFETY: nothing reloads or writes the file, and the model outlives the copy.
    unsafe { &*bytes }.to_vec()
}

fn three_shards() -> Vec<Gguf> {
    vec![
        Gguf::default().kv("general.name", Kv::Text("whole".into())),
        Gguf::default().tensor("a.weight", &[32], F32, 1),
        Gguf::default()
            .tensor("b.weight", &[32], F16, 2)
            .tensor("c.weight", &[32], Q4_0, 3),
    ]
}

#[test]
fn tensors_are_read_in_place_on_demand_and_all_at_once() {
    let file = sample();
    let (_folder, path) = written(&file);
    for access in [Access::Map, Access::Read] {
        let model = opened(&path, access);
        for (index, tensor) in file.tensors.iter().enumerate() {
            let view = model.tensor(index);
            assert_eq!(model.name(index).to_str(), Ok(tensor.name.as_str()));
            assert_eq!(model.find(model.name(index)), Some(index));
            assert_eq!(
                (view.state, view.generation, view.placed()),
                (State::OnOriginal, 0, None)
            );
            assert_eq!(model.host_bytes(&view).is_some(), access == Access::Map);
            assert_eq!(bytes(&model, index), tensor.data);
        }
        let first = model.load(0).unwrap().placed().unwrap();
        assert_eq!(model.load(0).unwrap().placed(), Some(first), "loaded once");
        let report = model.load_all(|_| true).unwrap();
        assert_eq!((report.tensors, report.allocations), (3, 1));
        assert_eq!(model.load_all(|_| true).unwrap().tensors, 0);
        for (index, tensor) in file.tensors.iter().enumerate() {
            assert_eq!(zero_copy(&model, index), tensor.data);
            let (_, address) = model.tensor(index).placed().unwrap();
            assert_eq!(address % 256, 0);
        }
    }
}

#[test]
fn tensors_that_end_anywhere_in_huge_pages_are_loaded_whole() {
    const MIB: i64 = 1 << 18;
    let mut file = Gguf::default();
    for (index, elements) in [24, 5 * MIB, 8, MIB, 2 * MIB + 72, 1, 3 * MIB - 8]
        .into_iter()
        .enumerate()
    {
        file = file.tensor(&format!("t{index}"), &[elements], F32, index as u64);
    }
    let (_folder, path) = written(&file);
    let model = Model::open(&path, Options::host()).unwrap();
    let report = model.load_all(|_| true).unwrap();
    assert_eq!((report.tensors, report.allocations), (7, 1));
    for (index, tensor) in file.tensors.iter().enumerate() {
        assert!(zero_copy(&model, index) == tensor.data, "{index}");
    }
}

#[test]
fn metadata_is_read_on_demand() {
    let mut file = sample().kv("a.f32", Kv::Raw(6, 1e-5f32.to_le_bytes().to_vec()));
    file.kvs.extend(vocabulary(1000));
    let (_folder, path) = written(&file);
    for access in [Access::Map, Access::Read] {
        let model = opened(&path, access);
        let value = |key: &str| model.value(model.key(key.as_bytes()).unwrap()).unwrap();
        assert_eq!(
            value("general.architecture"),
            Value::Text(b"llama".to_vec())
        );
        assert_eq!(value("a.f32"), Value::Single(1e-5));
        let tokens = model.key(b"tokenizer.ggml.tokens").unwrap();
        assert_eq!((tokens.count, tokens.array), (1000, true));
        let some = model.elements(tokens, 998, 10).unwrap();
        let Kv::Texts(all) = &file.kvs[3].1 else {
            panic!("the tokens are the fourth key");
        };
        let expected: Vec<Value> = all[998..]
            .iter()
            .map(|t| Value::Text(t.clone().into()))
            .collect();
        assert_eq!(some, expected);
        assert!(
            model
                .elements(tokens, u64::MAX, u64::MAX)
                .unwrap()
                .is_empty()
        );
        assert!(model.key(b"no.such.key").is_none());
    }
}

#[test]
fn many_threads_get_the_same_buffer() {
    let (_folder, path) = written(&sample());
    let device = HostDevice::new("gpu");
    let model = Model::open(&path, on(device.clone())).unwrap();
    let barrier = std::sync::Barrier::new(8);
    let addresses: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    model.load(0).unwrap().placed()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(addresses[0].is_some() && addresses.iter().all(|a| *a == addresses[0]));
    assert_eq!(device.memory().allocations, 1);
    drop(model);
    assert_eq!(device.memory().used, 0);
}

/// A device that refuses buffers above a size, as drivers do.
#[derive(Debug)]
struct SmallBuffers {
    inner: Arc<HostDevice>,
    largest: u64,
    calls: AtomicUsize,
}

impl Device for SmallBuffers {
    fn name(&self) -> &str {
        "small buffers"
    }

    fn kind(&self) -> llama_sidecar::device::DeviceKind {
        self.inner.kind()
    }

    fn memory(&self) -> llama_sidecar::device::Memory {
        self.inner.memory()
    }

    fn allocate(
        self: Arc<Self>,
        len: u64,
    ) -> Result<Box<dyn llama_sidecar::device::Buffer>, llama_sidecar::device::DeviceError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if len > self.largest {
            return Err(llama_sidecar::device::DeviceError::OutOfMemory {
                device: self.name().into(),
                requested: len,
                free: self.largest,
            });
        }
        self.inner.clone().allocate(len)
    }
}

#[test]
fn any_model_loads_in_nine_allocations() {
    let mut file = Gguf::default();
    for i in 0..500u64 {
        file = file.tensor(
            &format!("t{i}.weight"),
            &[64, 1 + (i as i64 * 37) % 90],
            F32,
            i,
        );
    }
    let total: u64 = file.tensors.iter().map(|t| t.data.len() as u64).sum();
    let (_folder, path) = written(&file);
    for (largest, expected) in [(u64::MAX, 1), (total / 7, 8)] {
        let device = Arc::new(SmallBuffers {
            inner: HostDevice::new("inner"),
            largest,
            calls: AtomicUsize::new(0),
        });
        let options = Options {
            devices: vec![device.clone()],
            ..Options::host()
        };
        let model = Model::open(&path, options).unwrap();
        let report = model.load_all(|_| true).unwrap();
        assert_eq!(
            (report.tensors, report.bytes, report.allocations),
            (500, total, expected)
        );
        assert!(
            device.calls.load(Ordering::Relaxed) <= 9,
            "refused ones included"
        );
        for (index, tensor) in file.tensors.iter().enumerate() {
            assert_eq!(zero_copy(&model, index), tensor.data, "{}", tensor.name);
        }
    }
}

#[test]
fn a_load_that_is_cancelled_or_does_not_fit_leaves_nothing() {
    let (_folder, path) = written(&sample());
    let device = HostDevice::with_capacity("gpu", 20_000);
    let model = Model::open(&path, on(device.clone())).unwrap();
    assert!(matches!(model.load_all(|_| false), Err(Error::Cancelled)));
    assert_eq!(device.memory().used, 0);
    assert!(model.tensor(0).placed().is_none());

    let mut last = 0;
    model
        .load_all(|progress| {
            assert!(progress.done >= last && progress.done <= progress.total);
            let all = progress.tensors == progress.total_tensors;
            assert!(progress.done < progress.total || all, "{progress:?}");
            assert!(model.find(progress.name).is_some());
            last = progress.done;
            true
        })
        .unwrap();
    assert_eq!(
        last,
        sample()
            .tensors
            .iter()
            .map(|t| t.data.len() as u64)
            .sum::<u64>()
    );

    let tiny = HostDevice::with_capacity("tiny", 7000);
    let model = Model::open(&path, on(tiny.clone())).unwrap();
    assert!(matches!(model.load_all(|_| true), Err(Error::Device(_))));
    assert_eq!(tiny.memory().used, 0);
    assert!(model.load(0).is_ok(), "one still fits");
}

#[test]
fn a_file_written_in_place_is_not_trusted() {
    let (_folder, path) = written(&sample());
    // The later write has another time.
    let file = std::fs::File::options().append(true).open(&path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let model = Model::open(&path, Options::host()).unwrap();
    model.load(0).unwrap();
    let mut other = sample();
    other.tensors[2].data = weights(77, F32, 64);
    other.write(&path).unwrap();
    assert!(matches!(model.load(2), Err(Error::WrittenInPlace { .. })));
    assert!(matches!(
        model.load_all(|_| true),
        Err(Error::WrittenInPlace { .. })
    ));
    let mut read = [0; 4];
    assert!(matches!(
        model.read(2, 0, &mut read),
        Err(Error::WrittenInPlace { .. })
    ));
    assert_eq!(
        bytes(&model, 0),
        sample().tensors[0].data,
        "what was loaded is as it was"
    );

    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(100)
        .unwrap();
    assert!(
        model.load(2).is_err(),
        "truncated: an error and not a bus error"
    );
    let key = model.key(b"general.architecture").unwrap();
    let _ = model.value(key);
}

/// Not a test of its own: the process in which mapping is refused.
#[test]
#[ignore = "started by where_mapping_is_refused_files_are_read, in a process of its own"]
fn process_with_little_address_space() {
    let path = PathBuf::from(std::env::var_os("MODEL").unwrap());
    let model = Model::open(&path, Options::host()).unwrap();
    assert!(
        model.host_bytes(&model.tensor(0)).is_none(),
        "it was mapped"
    );
    let mut last = [1; 2];
    let end = model.tensor(0).nbytes() - 2;
    model.read(0, end, &mut last).unwrap();
    assert_eq!(last, [0, 0]);
    assert_eq!(bytes(&model, 1), weights(5, F32, 32));
    let architecture = model.key(b"general.architecture").unwrap();
    assert_eq!(
        model.value(architecture).unwrap(),
        Value::Text(b"llama".to_vec())
    );
}

#[test]
fn where_mapping_is_refused_files_are_read() {
    // 64 GiB, nearly all of it a hole, in a process that may map 4 GiB.
    let hole = 64u64 << 30;
    let mut file = Gguf::default()
        .tensor("big.weight", &[1 << 20, 0], F16, 0)
        .tensor("small.weight", &[32], F32, 5);
    let small = file.tensors[1].data.clone();
    let mut header = file.header();
    file.tensors.clear();
    let find = |header: &[u8], bytes: &[u8]| {
        header
            .windows(bytes.len())
            .position(|window| window == bytes)
            .unwrap()
    };
    let rows = find(&header, &[(1u64 << 20).to_le_bytes(), [0; 8]].concat()) + 8;
    header[rows..rows + 8].copy_from_slice(&(hole >> 21).to_le_bytes());
    let name = find(&header, b"small.weight");
    let offset = name + "small.weight".len() + 4 + 8 + 4;
    header[offset..offset + 8].copy_from_slice(&hole.to_le_bytes());

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    std::fs::write(&path, &header).unwrap();
    let sparse = std::fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &small, header.len() as u64 + hole).unwrap();
    let child = std::process::Command::new("sh")
        .args(["-c", "ulimit -v 4194304 && exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "process_with_little_address_space"])
        .env("MODEL", &path)
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "{}",
        String::from_utf8_lossy(&child.stdout)
    );
}

#[test]
fn any_shard_opens_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let paths = write_shards(folder.path(), three_shards());
    for path in &paths {
        let model = Model::open(path, Options::host()).unwrap();
        assert_eq!((model.file_count(), model.tensor_count()), (3, 3));
        let c = model.find(c"c.weight").unwrap();
        assert_eq!(model.file_path(model.tensor(c).file), paths[2]);
        assert_eq!(bytes(&model, c), three_shards()[2].tensors[1].data);
        let name = model.key(b"general.name").unwrap();
        assert_eq!(model.value(name).unwrap(), Value::Text(b"whole".to_vec()));
    }
}

#[test]
fn further_shards_may_state_other_counts_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = three_shards();
    let paths = write_shards(folder.path(), files.clone());
    let names = |path| Model::open(path, Options::host()).unwrap().tensor_count();
    let before = names(&paths[0]);
    for (number, count) in [(1, Some(2)), (2, None)] {
        let mut file = std::mem::take(&mut files[number])
            .kv("split.no", Kv::U16(number as u16))
            .kv("split.tensors.count", Kv::I32(3));
        if let Some(count) = count {
            file = file.kv("split.count", Kv::U16(count));
        }
        file.write(&paths[number]).unwrap();
    }
    assert_eq!(names(&paths[0]), before);
}

#[test]
fn wrong_shards_are_named() {
    let fails = |break_it: &dyn Fn(&[PathBuf]), file: &str, words: &str| {
        let folder = tempfile::tempdir().unwrap();
        let paths = write_shards(folder.path(), three_shards());
        break_it(&paths);
        let error = Model::open(&paths[0], Options::host())
            .unwrap_err()
            .to_string();
        assert!(error.contains(file) && error.contains(words), "{error}");
    };
    fails(
        &|paths| std::fs::remove_file(&paths[1]).unwrap(),
        "m-00002-of-00003",
        "No such file",
    );
    fails(
        &|paths| std::fs::copy(&paths[1], &paths[2]).map(|_| ()).unwrap(),
        "m-00003-of-00003",
        "'split.no' is 1, expected 2",
    );
    // A shard of another model of three.
    fails(
        &|paths| {
            let other = tempfile::tempdir().unwrap();
            let mut files = three_shards();
            files[0] = Gguf::default().tensor("x.weight", &[32], F32, 9);
            let others = write_shards(other.path(), files);
            std::fs::copy(&others[1], &paths[1]).unwrap();
        },
        "m-00002-of-00003",
        "'split.tensors.count' is 4, expected 3",
    );
    // The same tensor in two shards.
    fails(
        &|paths| {
            let mut files = three_shards();
            files[1] = Gguf::default().tensor("b.weight", &[32], F32, 1);
            write_shards(paths[0].parent().unwrap(), files);
        },
        "m-00003-of-00003",
        "tensor 'b.weight' is also in",
    );
    fails(
        &|paths| {
            let plain = Gguf::default().tensor("a.weight", &[32], F32, 1);
            plain.write(&paths[1]).unwrap();
        },
        "m-00002-of-00003",
        "'split.no' is none, expected 1",
    );
    fails(
        &|paths| std::fs::write(&paths[2], "not a model").unwrap(),
        "m-00003-of-00003",
        "not a GGUF file",
    );

    let folder = tempfile::tempdir().unwrap();
    let paths = write_shards(folder.path(), three_shards());
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(&paths[0], &renamed).unwrap();
    let error = Model::open(&renamed, Options::host())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("must end in '-00001-of-00003.gguf'"),
        "{error}"
    );
}

#[test]
fn a_thousand_shards_of_one_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let files = (0..900)
        .map(|i| Gguf::default().tensor(&format!("t{i}.weight"), &[32], F32, i))
        .collect();
    let paths = write_shards(folder.path(), files);
    let model = Model::open(&paths[450], Options::host()).unwrap();
    assert_eq!((model.file_count(), model.tensor_count()), (900, 900));
    assert_eq!(model.load_all(|_| true).unwrap().allocations, 1);
    assert_eq!(bytes(&model, 899), weights(899, F32, 32));
}

#[test]
fn real_models_open_whole_and_in_shards() {
    let whole = Model::open(&fixture("smollm2.gguf"), Options::host()).unwrap();
    for name in [
        "smollm2-3-shards/smollm2-00002-of-00003.gguf",
        "smollm2-tensor-shards/smollm2-00001-of-00272.gguf",
    ] {
        let shards = Model::open(&fixture(name), Options::host()).unwrap();
        assert_eq!(shards.tensor_count(), whole.tensor_count());
        shards.load_all(|_| true).unwrap();
        for index in 0..whole.tensor_count() {
            let there = shards.find(whole.name(index)).unwrap();
            assert_eq!(shards.tensor(there).ty(), whole.tensor(index).ty());
            assert!(
                zero_copy(&shards, there) == zero_copy(&whole, index),
                "{:?}",
                whole.name(index)
            );
        }
    }
}

#[test]
fn experts_are_found_by_what_they_are_and_by_name() {
    let gguf = GgufFile::open(&fixture("moe.gguf"), Access::Read).expect("a model");
    let index = ExpertIndex::of([&gguf]);
    assert_eq!(index.tensors().len(), 30 * 3);
    let name = "blk.7.ffn_down_exps.weight";
    let what = ExpertName::parse(name).expect("an expert tensor");
    let tensor = index.find(what).expect("an expert tensor");
    assert_eq!(
        (what.layer, what.projection, tensor.experts),
        (7, Projection::Down, 8)
    );
    assert_eq!(tensor.name.to_string(), name);
    let slice = index.slice(7, Projection::Down, 3).expect("an expert");
    let info = &gguf.header.tensors[slice.tensor];
    assert_eq!(slice.offset, info.offset + 3 * info.nb()[2]);
    assert_eq!(slice.nbytes, info.nb()[2]);
    assert_eq!(index.slice(7, Projection::Down, 8), None);
    assert_eq!(index.slice(30, Projection::Gate, 0), None);
    assert!(ExpertName::parse("blk.7.attn_q.weight").is_none());
}

#[test]
fn a_table_of_tokens_chooses_experts() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    Gguf::default()
        .tensor("blk.3.ffn_gate_tid2eid.weight", &[2, 32], F32, 1)
        .tensor("blk.4.ffn_gate_inp.weight", &[32, 8], F32, 2)
        .write(file.path())
        .expect("free space");
    let file = GgufFile::open(file.path(), Access::Read).expect("a model");
    let routing = Routing::of([&file]);
    let error = routing.check_layer(3).expect_err("a table");
    assert!(error.contains("blk.3.ffn_gate_tid2eid.weight"), "{error}");
    assert_eq!(routing.check_layer(4), Ok(()));
}

/// A mapping ends by SIGBUS where its file was cut: the header is read.
#[test]
fn a_file_that_is_cut_while_it_is_opened_ends_no_process() {
    let name = "a_file_that_is_cut_while_it_is_opened_ends_no_process";
    if let Some(status) = in_own_process(name, Stdio::null()) {
        return assert!(status.success(), "{status}");
    }
    let mut file = sample();
    file.kvs.extend(vocabulary(100_000));
    let (_folder, path) = written(&file);
    let bytes = std::fs::read(&path).unwrap();
    let writer = path.clone();
    let rest = AtomicUsize::new(1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while rest.load(Ordering::Relaxed) > 0 {
                std::fs::write(&writer, &bytes).unwrap();
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let (since, mut seen) = (Instant::now(), [0; 2]);
        while seen.iter().any(|count| *count < 20) && since.elapsed() < Duration::from_secs(60) {
            let is_whole = GgufFile::open(&path, Access::Map).is_ok();
            seen[usize::from(is_whole)] += 1;
        }
        rest.store(0, Ordering::Relaxed);
        assert!(seen.iter().all(|count| *count >= 20), "{seen:?}");
    });
}
