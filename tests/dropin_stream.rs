//! Expert streaming in real hosts: the results are those of a program without it, experts are
//! read ahead, and whatever goes wrong leaves the program as it would be without streaming.

mod hosts;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use hosts::simulated::Setup;
use hosts::{
    TOKENS, WAYS, check_way, copied, count, counted_by_host, fresh, same_with_streaming,
    stream_figures, streamed_text, streaming, traced,
};
use serde_json::Value;
use sidecar_core::experts::ExpertIndex;
use sidecar_core::gguf::{Access, GgufFile, TYPE_AND_OFFSET, type_fields, write_data};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, load_beside, replace};
use testkit::process::stopped_often;

#[test]
fn node_writes_the_same() {
    same_with_streaming(Program::Node, "moe.gguf");
}

#[test]
fn python_writes_the_same() {
    same_with_streaming(Program::Python, "moe.gguf");
}

#[test]
fn c_writes_the_same_with_one_thread_and_with_two() {
    same_with_streaming(Program::C, "moe.gguf");
    same_with_streaming(Program::CTwoThreads, "moe.gguf");
}

/// Experts that the program copies to a GPU, or to the first of two, are read from disk as soon as their layer is routed,
/// with early copies and without.
#[test]
fn experts_that_are_copied_to_a_gpu() {
    let commands = ["prompt 40", "prompt 64", "hashes 3", "prompt 33"];
    let model = fixture("small-moe.gguf");
    let layers = ExpertIndex::of([&GgufFile::open(&model, Access::Read).expect("a model")]);
    let layers = layers.layers().count() as u64;
    let hosts = [
        Setup::default(),
        Setup::default().built_from_source(),
        Setup::default().built_from_source().two_gpus(),
    ];
    for host in hosts {
        let expected = host.run(&commands).answers;
        for (mode, memory) in [("off", ""), ("off", "8"), ("on", "")] {
            let setup = host
                .clone()
                .with("LLAMA_SIDECAR_HOTSWAP", "0")
                .with("LLAMA_EXPERT_STREAM", "on")
                .with("LLAMA_EXPERT_STREAM_MEMORY_MB", memory)
                .with("LLAMA_POSTFETCH_MODE", mode);
            let sim = setup.simulation();
            let mut host = setup.start(&sim, &model);
            let mut streamed = 0;
            for (command, expected) in commands.iter().zip(&expected) {
                assert_eq!(host.ask(command), *expected, "{mode}: {command}");
                let before = streamed;
                streamed = count(&stream_figures(&host), "layers");
                // The CPU computes the experts of single tokens.
                let evaluations = if *command == "hashes 3" { 3 } else { 1 };
                assert_eq!(streamed - before, evaluations * layers, "{mode}: {command}");
            }
            let held = count(&stream_figures(&host), "held_bytes");
            assert_eq!(held > 0, !memory.is_empty(), "{held}");
            assert_eq!(host.end(), Some(0));
            sim.report().assert_ordered();
        }
    }
}

/// A trace of an earlier run, and a file that is none.
#[test]
fn a_start_from_a_trace_changes_no_result() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.json");
    let trace = path.to_str().expect("UTF-8");
    let model = fixture("moe.gguf");
    let (text, _) = streamed_text(
        Program::C,
        &model,
        &streaming(&[("LLAMA_EXPERT_TRACE_OUTPUT", trace)]),
    );
    let with_trace = streaming(&[("LLAMA_EXPERT_STREAM_TRACE", trace)]);
    for message in ["most used experts of", "LLAMA_EXPERT_STREAM_TRACE"] {
        let mut host = Host::start(Program::C, &model, &with_trace);
        assert_eq!(host.text(TOKENS), text);
        assert_ne!(stream_figures(&host), Value::Null);
        assert_eq!(host.logged(message).len(), 1, "{message}");
        assert_eq!(host.end(), Some(0));
        std::fs::write(&path, "{}").expect("free space");
    }
}

#[test]
fn two_contexts_at_a_time() {
    let model = fixture("moe.gguf");
    let text = fresh(Program::Python, &model).ids;
    for way in WAYS {
        let mut host = Host::start(Program::Python, &model, &streaming(way));
        assert_eq!(
            host.ask(&format!("both {TOKENS}")),
            format!("{text} | {text}")
        );
        check_way(&stream_figures(&host), way);
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn a_model_can_be_freed_and_another_loaded() {
    WAYS.into_iter().for_each(free_and_load);
}

fn free_and_load(way: &[(&'static str, &str)]) {
    let mut host = Host::start(Program::C, &fixture("moe.gguf"), &streaming(way));
    host.text(TOKENS);
    for name in ["smollm2.gguf", "moe-q8_0.gguf", "moe.gguf"] {
        assert_eq!(host.ask("free"), "freed");
        let path = fixture(name);
        assert_eq!(host.ask(&format!("load {}", path.display())), "loaded");
        let text = host.text(TOKENS);
        let streams = stream_figures(&host) != Value::Null;
        assert_eq!(streams, name != "smollm2.gguf", "{name}");
        if streams {
            check_way(&stream_figures(&host), way);
        }
        // Other kernels compute with experts that stay in the mapping.
        if name != "moe-q8_0.gguf" {
            assert_eq!(text, fresh(Program::C, &path), "{name}");
        }
    }
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_swapped_matrix_is_no_longer_read() {
    WAYS.into_iter().for_each(swap_and_return);
}

fn swap_and_return(way: &[(&'static str, &str)]) {
    let (_folder, path) = copied("moe.gguf");
    let mut host = Host::start(Program::C, &path, &streaming(way));
    host.text(TOKENS);
    let before = count(&stream_figures(&host), "checked_bytes");
    replace(&path, &fixture("moe-mixed.gguf"));
    let report = host.control("reload");
    assert_eq!(report["ok"], true, "{report}");
    host.text(TOKENS);
    let after = count(&stream_figures(&host), "checked_bytes") - before;
    assert!(after < before, "{after} bytes, {before} before the swap");

    replace(&path, &fixture("moe.gguf"));
    assert_eq!(host.control("reload")["ok"], true);
    assert_eq!(host.text(TOKENS), fresh(Program::C, &fixture("moe.gguf")));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn experts_are_counted_as_without_streaming() {
    let model = fixture("moe.gguf");
    let with = streaming(&[("LLAMA_EXPERT_TRACE_STATS", "1")]);
    let mut host = Host::start(Program::PythonCounting, &model, &with);
    host.text(TOKENS);
    let counted = counted_by_host(&mut host);
    let trace = host.control("trace");
    assert_eq!(traced(&trace["traces"][0]), counted);
    assert!(count(&stream_figures(&host), "layers") > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn streaming_rests_while_all_experts_are_in_memory() {
    let model = fixture("moe.gguf");
    let mut always = Host::start(Program::C, &model, &streaming(&[]));
    always.text(TOKENS);
    let all = count(&stream_figures(&always), "checked_bytes");
    let auto = DropIn::On(vec![("LLAMA_EXPERT_STREAM", "auto".into())]);
    let mut host = Host::start(Program::C, &model, &auto);
    let mut before = 0;
    // The system may drop pages of the file, and of others: each time, the reader looks again.
    let rests = |_| {
        host.text(TOKENS);
        let checked = count(&stream_figures(&host), "checked_bytes");
        checked - std::mem::replace(&mut before, checked) < all / 10
    };
    assert!((0..20).any(rests), "{}", stream_figures(&host));
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_program_that_is_stopped_again_and_again_writes_the_same() {
    let model = fixture("moe.gguf");
    for way in WAYS {
        write_while_stopped(&model, way);
    }
}

fn write_while_stopped(model: &Path, way: &[(&'static str, &str)]) {
    let mut host = Host::start(Program::C, model, &streaming(way));
    let (text, stops) = stopped_often(host.id(), || host.text(TOKENS));
    assert_eq!(text, fresh(Program::C, model));
    assert!(stops > 0 && count(&stream_figures(&host), "layers") > 0);
    assert_eq!(host.end(), Some(0));
}

/// The handler of a signal forks while a thread has the lock of what is in memory.
#[test]
fn a_signal_whose_handler_forks_leaves_the_program_as_it_is() {
    let model = fixture("small-moe.gguf");
    let folder = tempfile::tempdir().expect("a folder");
    let count = folder.path().join("forks");
    let few = streaming(&[("LLAMA_EXPERT_STREAM_MEMORY_MB", "8")]);
    let mut host = Host::start_with(Program::C, &model, &few, |command| {
        load_beside(command, "hosts-c/libsignalled.so");
        command.env("SIGNALLED_COUNT", &count);
    });
    for _ in 0..4 {
        assert_eq!(host.text(TOKENS), fresh(Program::C, &model));
    }
    assert_eq!(host.end(), Some(0));
    let forks = std::fs::read_to_string(&count).expect("the library writes it");
    assert!(forks.parse::<u32>().expect("a number") > 0);
}

/// A thread of the drop-in needs 2^60 bytes for its stack.
#[test]
fn a_reader_without_threads_leaves_the_program_as_it_is() {
    let model = fixture("moe.gguf");
    let with = streaming(&[("RUST_MIN_STACK", "1152921504606846976")]);
    let mut host = Host::start(Program::C, &model, &with);
    assert_eq!(host.text(TOKENS), fresh(Program::C, &model));
    let said = host.logged("cannot stream its experts: cannot start a thread: ");
    assert_eq!(said.len(), 1, "{:?}", host.log());
    assert!(
        said[0].contains("reads them as without streaming"),
        "{said:?}"
    );
    assert_eq!(host.end(), Some(0));
}

/// Writes a copy of a model with one of its tensors behind all others. Returns where the data of
/// that tensor begins, and its bytes.
fn with_last(copy: &Path, model: &Path, last: &str) -> (u64, u64) {
    let header = GgufFile::open(model, Access::Read).expect("a model").header;
    let bytes = std::fs::read(model).expect("a model");
    // An info ends with its type and its offset.
    let types = type_fields(&header, &bytes).expect("the bytes of the header");
    let ends: Vec<usize> = types.iter().map(|at| at + TYPE_AND_OFFSET).collect();
    let name = header.name(&header.tensors[0]).count_bytes();
    let first = ends[0] - TYPE_AND_OFFSET - 8 * header.tensors[0].n_dims as usize - 4 - name - 8;
    let is_last = |at: &usize| header.name(&header.tensors[*at]).to_bytes() == last.as_bytes();
    let (end, mut order): (Vec<usize>, Vec<usize>) = (0..ends.len()).partition(is_last);
    order.extend(&end);
    let mut infos = bytes[..first].to_vec();
    let mut data = 0u64;
    for &at in &order {
        let start = at.checked_sub(1).map_or(first, |before| ends[before]);
        infos.extend(&bytes[start..ends[at] - 8]);
        infos.extend(data.to_le_bytes());
        data = (data + header.tensors[at].nbytes).next_multiple_of(header.alignment);
    }
    infos.resize(header.data_offset as usize, 0);
    let mut file = BufWriter::new(File::create(copy).expect("a folder"));
    file.write_all(&infos).expect("space");
    for &at in &order {
        let info = &header.tensors[at];
        let of_tensor = &bytes[info.offset as usize..];
        write_data(&mut file, of_tensor, info.nbytes, header.alignment).expect("space");
    }
    file.flush().expect("space");
    let copied = GgufFile::open(copy, Access::Read).expect("a model").header;
    let info = copied.tensors.last().expect("a tensor");
    assert_eq!(copied.name(info).to_bytes(), last.as_bytes());
    (info.offset, info.nbytes)
}

/// The answer to the first tokens of the fixed text, in one batch, after a model lost the last
/// expert of its last tensor.
fn after_a_cut(path: &Path, end: u64, drop_in: &DropIn) -> (String, Value) {
    let size = std::fs::metadata(path).expect("a file").len();
    let mut host = Host::start(Program::C, path, drop_in);
    let file = File::options().write(true).open(path).expect("a file");
    file.set_len(end).expect("a shorter file");
    let answer = host.ask("prefill 8");
    let figures = match drop_in {
        DropIn::Absent => Value::Null,
        _ => stream_figures(&host),
    };
    assert_eq!(host.end(), Some(0));
    file.set_len(size).expect("free space");
    let hash = answer.rsplit(' ').next().expect("a hash");
    (hash.to_owned(), figures)
}

/// The batch uses most experts of layer 12, so that all of layer 13 are read ahead; it is routed
/// to six of them, and not to the one that is missing. A program that is routed to it ends with
/// SIGBUS, with streaming and without.
#[test]
fn a_file_that_is_cut_short_leaves_the_program_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let last = "blk.13.ffn_down_exps.weight";
    let (start, nbytes) = with_last(&path, &fixture("moe.gguf"), last);
    let end = (start + nbytes / 8 * 7).next_multiple_of(4096);
    let (stock, _) = after_a_cut(&path, end, &DropIn::Absent);
    for way in WAYS {
        let (with, figures) = after_a_cut(&path, end, &streaming(way));
        assert_eq!(with, stock);
        check_way(&figures, way);
        assert_eq!(count(&figures, "layers"), 30, "{figures}");
        assert_eq!(figures["stopped"], false, "{figures}");
    }
}
