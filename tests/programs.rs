//! The drop-in in prebuilt programs with llama.cpp in one object, which may bind its own calls of ggml.

mod hosts;

use std::path::{Path, PathBuf};

use goblin::elf::Elf;
use goblin::elf::reloc::R_X86_64_RELATIVE;
use hosts::{copied, count, on, stream_figures, streaming, taken};
use testkit::fixtures::{cache, fixture};
use testkit::host::{DropIn, Host, Program, replace};

const TEXT: &str = "text 2";
/// Tensors in which the fixtures differ.
const TENSORS: u64 = 8;

/// What a program without the drop-in answers with a model.
fn alone(program: Program, model: &str) -> String {
    let mut host = Host::start(program, &fixture(model), &DropIn::Absent);
    let answer = host.ask(TEXT);
    assert_eq!(host.end(), Some(0));
    answer
}

/// Swaps tensors, frees the model, also while it is swapped, and loads it again: four times, and a
/// hundred in the long form of the tests.
fn released_and_loaded_again(program: Program, set: impl FnOnce(&mut std::process::Command)) {
    let rounds = if testkit::long_tests() { 100 } else { 4 };
    let before = alone(program, "smollm2.gguf");
    let after = alone(program, "smollm2-mixed.gguf");
    assert_ne!(before, after);
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start_with(program, &path, &on(), set);
    for round in 0..rounds {
        assert_eq!(host.ask(TEXT), before, "round {round}");
        replace(&path, &fixture("smollm2-mixed.gguf"));
        assert_eq!(
            taken(&host.control("reload")),
            (TENSORS, 0),
            "round {round}"
        );
        assert_eq!(host.ask(TEXT), after, "round {round}");
        if round % 2 == 0 {
            replace(&path, &fixture("smollm2.gguf"));
            assert_eq!(
                taken(&host.control("reload")),
                (0, TENSORS),
                "round {round}"
            );
        }
        assert_eq!(host.ask("free"), "freed");
        host.wait_logged("the program freed the model", round + 1);
        assert_eq!(
            host.control("status")["models"].as_array().map(Vec::len),
            Some(0)
        );
        replace(&path, &fixture("smollm2.gguf"));
        assert_eq!(host.ask(&format!("load {}", path.display())), "loaded");
    }
    assert_eq!(host.ask(TEXT), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn the_end_of_a_model_is_seen_where_the_compiler_bound_the_calls_that_free_it() {
    released_and_loaded_again(Program::LlamaNode, |_| {});
}

#[test]
fn the_end_of_a_model_is_seen_without_calls_that_free_buffers() {
    let folder = bound("ggml_backend_buffer_free");
    released_and_loaded_again(Program::Xllamacpp, |command| {
        command
            .env("PYTHONPATH", folder.path())
            .env("LD_BIND_NOW", "1");
    });
}

#[test]
fn experts_are_streamed_where_scheduler_and_libllama_are_one_object() {
    let before = alone(Program::Xllamacpp, "moe.gguf");
    let mut host = Host::start(Program::Xllamacpp, &fixture("moe.gguf"), &streaming(&[]));
    assert_eq!(host.ask(TEXT), before);
    assert!(count(&stream_figures(&host), "layers") > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn nothing_is_swapped_where_a_call_that_is_needed_does_not_arrive() {
    for name in [
        "ggml_free",
        "ggml_backend_sched_reserve",
        "ggml_backend_sched_alloc_graph",
        "ggml_backend_sched_graph_compute_async",
        "ggml_backend_sched_free",
    ] {
        let folder = bound(name);
        let (_folder, path) = copied("smollm2.gguf");
        let mut host = Host::start_with(Program::Xllamacpp, &path, &on(), |command| {
            command
                .env("PYTHONPATH", folder.path())
                .env("LD_BIND_NOW", "1");
        });
        let before = host.ask(TEXT);
        host.wait_logged(&format!("calls its own {name}, which"), 1);
        replace(&path, &fixture("smollm2-mixed.gguf"));
        host.control("reload");
        assert_eq!(host.ask(TEXT), before, "{name}");
        assert_eq!(host.end(), Some(0), "{name}");
    }
}

/// Returns a folder with a copy of xllamacpp in which one function of ggml is called past the loader, as a linker binds
/// it with `-Bsymbolic`. The loader takes such a relocation only at the start (`LD_BIND_NOW`).
fn bound(function: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("xllamacpp");
    std::fs::create_dir(&copy).expect("a folder");
    for entry in std::fs::read_dir(package()).expect("the package") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            let to = copy.join(path.file_name().expect("a name"));
            std::fs::copy(&path, &to).expect("free space");
            if to.extension().is_some_and(|of| of == "so") {
                bind(&to, function);
            }
        }
    }
    folder
}

/// The package in the folder of Python, whose name has a version.
fn package() -> PathBuf {
    let versions =
        std::fs::read_dir(cache().join("xllamacpp/lib")).expect("made by 'cargo xtask hosts'");
    let paths = versions.map(|version| version.expect("an entry").path());
    let mut packages = paths.map(|path| path.join("site-packages/xllamacpp"));
    packages.find(|path| path.exists()).expect("the package")
}

fn bind(library: &Path, function: &str) {
    let mut bytes = std::fs::read(library).expect("a library");
    let elf = Elf::parse(&bytes).expect("an ELF file");
    let relocations = elf.pltrelocs.iter().chain(elf.dynrelas.iter());
    let of_function = relocations.filter_map(|to| {
        let symbol = elf.dynsyms.get(to.r_sym)?;
        let is_it = elf.dynstrtab.get_at(symbol.st_name) == Some(function);
        let info = (to.r_sym as u64) << 32 | u64::from(to.r_type);
        let entry = [to.r_offset, info, to.r_addend.unwrap_or(0) as u64];
        let bound = [to.r_offset, u64::from(R_X86_64_RELATIVE), symbol.st_value];
        is_it.then_some((entry, bound))
    });
    let changes: Vec<_> = of_function.collect();
    assert!(
        !changes.is_empty(),
        "{function} is called through the loader"
    );
    let raw = |entry: [u64; 3]| entry.map(u64::to_le_bytes).concat();
    for (entry, bound) in changes {
        let entry = raw(entry);
        let at = bytes
            .windows(entry.len())
            .position(|window| window == entry);
        let at = at.expect("a relocation");
        bytes[at..at + entry.len()].copy_from_slice(&raw(bound));
    }
    std::fs::write(library, bytes).expect("free space");
}
