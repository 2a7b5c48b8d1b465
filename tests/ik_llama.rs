//! The drop-in in ik_llama.cpp, whose ggml has no devices, types of its own, and nodes that read
//! several weights.

mod hosts;

use std::path::{Path, PathBuf};
use std::process::Command;

use hosts::{
    TOKENS, copied, count, counted_by_host, fresh, on, other_bytes, same_with_streaming,
    streamed_text, streaming, swap_and_back, taken, traced,
};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, built, ik_llama_file, replace};

const IK: Program = Program::IkLlama(&[]);
const COUNTING: Program = Program::IkLlama(&["count"]);

/// A copy of a fixture with some tensors in other types, which ik_llama.cpp made: pairs of a
/// pattern and a type.
fn requantised(folder: &Path, name: &str, types: &[(&str, &str)]) -> PathBuf {
    let all = folder.join("all.gguf");
    let rules: Vec<String> = types.iter().map(|(re, ty)| format!("{re}={ty}")).collect();
    run(Command::new(quantize())
        .args(["--allow-requantize", "--token-embedding-type", "q8_0"])
        .args(["--custom-q", &rules.join(",")])
        .arg(fixture(name))
        .arg(&all)
        .args(["Q4_1", "2"]));
    let path = folder.join("variant.gguf");
    replace(&path, &fixture(name));
    for (pattern, _) in types {
        run(Command::new(built("release/llama-sidecar"))
            .args(["swap", "--tensor", pattern, "--from"])
            .args([&all, &path]));
        std::fs::remove_file(path.with_extension("gguf.originals")).expect("made by the command");
    }
    path
}

fn quantize() -> PathBuf {
    // The folder has the version of Python in its name.
    let versions = std::fs::read_dir(ik_llama_file("lib")).expect("a folder");
    let paths = versions.map(|version| version.expect("an entry").path());
    let mut paths = paths.map(|path| path.join("site-packages/ik_llama_cpp/bin/llama-quantize"));
    paths
        .find(|path| path.exists())
        .expect("the program of the package")
}

fn run(command: &mut Command) {
    let output = command.output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
}

#[test]
fn tensors_swap_to_types_of_its_own_and_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let types = [
        // With bytes before each row.
        (r"blk\.3\.ffn_down\.weight", "iq4_ks"),
        (r"blk\.4\.ffn_down\.weight", "iq4_kt"),
        // With interleaved rows.
        (r"blk\.5\.ffn_down\.weight", "q8_0_r8"),
        (r"blk\.6\.attn_.*\.weight", "q4_0_r8"),
        (r"blk\.7\.ffn_(gate|up)\.weight", "iq4_nl_r4"),
        // The node that reads both needs one type.
        (r"blk\.8\.ffn_gate\.weight", "q6_0"),
    ];
    let variant = requantised(folder.path(), "smollm2.gguf", &types);
    swap_and_back(IK, "smollm2.gguf", &variant, 10);
}

#[test]
fn mapped_tensors_swap_to_other_bytes_of_the_same_type() {
    let folder = tempfile::tempdir().expect("a folder");
    let variant = other_bytes(folder.path(), "smollm2.gguf", c"blk.3.ffn_up.weight");
    swap_and_back(IK, "smollm2.gguf", &variant, 1);
    swap_and_back(Program::IkLlama(&["no-mmap"]), "smollm2.gguf", &variant, 1);
}

#[test]
fn experts_swap() {
    for options in [IK, Program::IkLlama(&["no-fusion"])] {
        swap_and_back(options, "moe.gguf", &fixture("moe-q8_0.gguf"), 3);
        swap_and_back(options, "moe.gguf", &fixture("moe-mixed.gguf"), 4);
    }
}

/// The tokens after a swap in the middle of a text: the keys and values are those of the old
/// weights.
fn goes_on_after_swap(program: Program, variant: &Path) -> String {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(program, &path, &on());
    host.text(TOKENS);
    replace(&path, variant);
    assert_eq!(taken(&host.control("reload")).1, 0);
    let text = host.ask("more 8");
    assert_eq!(host.end(), Some(0));
    text
}

#[test]
fn a_kept_graph_is_rebuilt_after_a_swap() {
    let folder = tempfile::tempdir().expect("a folder");
    let types = [(r"blk\.8\.ffn_gate\.weight", "q6_0")];
    let variant = requantised(folder.path(), "smollm2.gguf", &types);
    let without_reuse = goes_on_after_swap(Program::IkLlama(&["no-reuse"]), &variant);
    assert_eq!(goes_on_after_swap(IK, &variant), without_reuse);
}

#[test]
fn rows_that_are_looked_up_keep_a_type_without_interleaved_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(IK, &path, &on());
    let before = host.text(TOKENS);
    let all = folder.path().join("repacked.gguf");
    run(Command::new(quantize())
        .args(["--repack", "--repack-pattern", "token_embd"])
        .arg(fixture("smollm2.gguf"))
        .arg(&all)
        .args(["Q8_0_R8", "2"]));
    replace(&path, &all);
    let report = host.control("reload");
    assert_eq!(report["ok"], false, "{report}");
    let refused = "rows are looked up in it, and q8_0_r8 interleaves rows";
    assert!(report.to_string().contains(refused), "{report}");
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_damaged_file_is_ignored() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(IK, &path, &on());
    let before = host.text(TOKENS);
    let short = path.with_extension("short");
    std::fs::copy(fixture("smollm2-mixed.gguf"), &short).expect("free space");
    let file = std::fs::OpenOptions::new().write(true).open(&short);
    file.and_then(|file| file.set_len(50 << 20))
        .expect("our own copy");
    for other in [short, fixture("moe.gguf")] {
        replace(&path, &other);
        let report = host.control("reload");
        assert_eq!(report["ok"], false, "{report}");
        assert_eq!(host.text(TOKENS), before);
    }
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_model_whose_weights_are_altered_at_load_is_not_swapped() {
    for (options, weight) in [
        (&["repack", "no-mmap"][..], "blk.0."),
        (&["merge-qkv"], "blk.0.attn_qkv.weight"),
        (&["merge-up-gate"], "ffn_gate_up_exps.weight"),
    ] {
        let model = match options {
            ["merge-up-gate"] => "moe.gguf",
            _ => "smollm2.gguf",
        };
        let (_folder, path) = copied(model);
        let mut host = Host::start(Program::IkLlama(options), &path, &on());
        let before = host.text(TOKENS);
        let said = host.logged("hot-swap stays off: the program merged or repacked");
        assert_eq!(said.len(), 1, "{options:?}: {:?}", host.log());
        assert!(said[0].contains(weight), "{said:?}");
        let folder = tempfile::tempdir().expect("a folder");
        replace(
            &path,
            &other_bytes(folder.path(), model, c"output_norm.weight"),
        );
        let report = host.control("reload");
        assert_eq!(report["ok"], false, "{report}");
        assert!(report.to_string().contains("-rtr"), "{report}");
        assert_eq!(host.text(TOKENS), before);
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn the_trace_counts_what_the_program_uses() {
    for program in [COUNTING, Program::IkLlama(&["count", "no-fusion"])] {
        let drop_in = DropIn::On(vec![("LLAMA_EXPERT_TRACE_STATS", "1".into())]);
        let mut host = Host::start(program, &fixture("moe.gguf"), &drop_in);
        host.text(TOKENS);
        host.ask("prompt 100");
        let counted = counted_by_host(&mut host);
        let trace = host.control("trace");
        assert_eq!(traced(&trace["models"][0]), counted, "{program:?}");
        assert!(counted[0].iter().sum::<u64>() > 200, "{counted:?}");
        assert_eq!(host.end(), Some(0));
    }
}

#[test]
fn streaming_writes_the_same() {
    same_with_streaming(IK, "moe.gguf");
    same_with_streaming(Program::IkLlama(&["no-fusion"]), "moe.gguf");
}

#[test]
fn streaming_reads_all_matrices_of_a_layer() {
    let model = fixture("moe.gguf");
    let scheduled = |program| {
        let (_, figures) = streamed_text(program, &model, &streaming(&[]));
        (count(&figures, "layers"), count(&figures, "checked_bytes"))
    };
    // The program of the other line has a node for each matrix.
    assert_eq!(scheduled(IK), scheduled(Program::IkLlama(&["no-fusion"])));
}

#[test]
fn a_prompt_is_the_same_with_streaming() {
    let answer = |drop_in: &DropIn| {
        let mut host = Host::start(IK, &fixture("moe.gguf"), drop_in);
        let answer = host.ask("prompt 100");
        assert_eq!(host.end(), Some(0));
        answer
    };
    assert_eq!(answer(&streaming(&[])), answer(&DropIn::Absent));
}

#[test]
fn two_models_are_swapped_each_with_its_file() {
    let (_first, first) = copied("smollm2.gguf");
    let (_second, second) = copied("moe.gguf");
    let mut host = Host::start(IK, &first, &on());
    host.text(TOKENS);
    assert_eq!(host.ask(&format!("load {}", second.display())), "loaded");
    host.text(TOKENS);
    replace(&first, &fixture("smollm2-mixed.gguf"));
    replace(&second, &fixture("moe-q8_0.gguf"));
    let report = host.control("reload");
    assert_eq!(report["ok"], true, "{report}");
    assert_eq!(host.text(TOKENS), fresh(IK, &fixture("moe-q8_0.gguf")));
    host.ask("use 0");
    assert_eq!(host.text(TOKENS), fresh(IK, &fixture("smollm2-mixed.gguf")));
    host.ask("free");
    host.ask("use 0");
    assert_eq!(host.text(TOKENS), fresh(IK, &fixture("moe-q8_0.gguf")));
    let status = host.control("status");
    let models = status["models"].as_array().expect("a list");
    assert_eq!(models.len(), 1, "{status}");
    assert_eq!(host.end(), Some(0));
}

#[test]
fn post_fetch_and_the_expert_cache_leave_a_program_without_devices_alone() {
    let variables = [
        ("LLAMA_POSTFETCH_HOST", "on"),
        ("LLAMA_POSTFETCH_CACHE_MB", "auto"),
    ];
    let variables = variables.map(|(name, value)| (name, value.to_owned()));
    let model = fixture("moe.gguf");
    let mut host = Host::start(IK, &model, &DropIn::On(variables.to_vec()));
    assert_eq!(host.text(TOKENS), fresh(IK, &model));
    assert_eq!(host.end(), Some(0));
}
