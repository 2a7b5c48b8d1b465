//! The drop-in in ik_llama.cpp, whose ggml has no devices, types of its own, and nodes that read
//! several weights.

mod hosts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use hosts::{
    TOKENS, copied, count, counted_by_host, exchange_blocks, fresh, on, other_bytes,
    same_with_streaming, stream_figures, streamed_text, streaming, swap_and_back, taken, traced,
};
use serde_json::Value;
use sidecar_core::gguf::{Access, GgufFile, TypeInfo, type_fields};
use testkit::fixtures::fixture;
use testkit::host::{DropIn, Host, Program, built, ik_llama_file, preload_library, replace};
use testkit::mixtures::Mixture;

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
    // Two graphs at least: one to find out how, and one after the swap.
    let renewed = host.control("status")["graphs_renewed"].as_u64();
    let reuses = program == IK;
    assert_eq!(
        renewed.is_some_and(|renewed| renewed >= 2),
        reuses,
        "{renewed:?}"
    );
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
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = Host::start(IK, &path, &on());
    let before = host.text(TOKENS);
    // Blocks of q8_0 and of q8_0_r8 have one size.
    let other = path.with_extension("other");
    std::fs::copy(fixture("smollm2.gguf"), &other).expect("free space");
    let gguf = GgufFile::open(&other, Access::Read).expect("a model");
    let tensor = gguf.header.find(c"token_embd.weight").expect("embeddings");
    let mut bytes = std::fs::read(&other).expect("our own copy");
    let types = type_fields(&gguf.header, &bytes).expect("the bytes of the header");
    let q8_0_r8 = TypeInfo::from_name("q8_0_r8").expect("a type").id;
    bytes[types[tensor]..][..4].copy_from_slice(&q8_0_r8.to_le_bytes());
    std::fs::write(&other, &bytes).expect("free space");
    replace(&path, &other);
    let report = host.control("reload");
    assert_eq!(report["ok"], false, "{report}");
    let refused = "rows are looked up in it, and q8_0_r8 interleaves rows";
    assert!(report.to_string().contains(refused), "{report}");
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

/// ik_llama.cpp aborts where one node reads gate and up in such a type.
#[test]
fn a_type_without_a_kernel_for_experts_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let types = [(r"blk\.2\.ffn_(gate|up)_exps\.weight", "q8_KV")];
    let variant = requantised(folder.path(), "moe.gguf", &types);
    let (_folder, path) = copied("moe.gguf");
    let mut host = Host::start(IK, &path, &on());
    let before = host.text(TOKENS);
    replace(&path, &variant);
    let report = host.control("reload");
    assert_eq!(report["ok"], false, "{report}");
    assert!(
        report.to_string().contains("supports weights in q8_KV"),
        "{report}"
    );
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn unquantised_experts_swap() {
    let folder = tempfile::tempdir().expect("a folder");
    let types = [
        (r"blk\.2\.ffn_(gate|up)_exps\.weight", "bf16"),
        (r"blk\.3\.ffn_(gate|up|down)_exps\.weight", "f16"),
        (r"blk\.4\.ffn_gate_exps\.weight", "q8_0_r8"),
    ];
    let variant = requantised(folder.path(), "moe.gguf", &types);
    swap_and_back(IK, "moe.gguf", &variant, 6);
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
        (&["repack"][..], "blk."),
        (&["merge-qkv"], "blk.0.attn_qkv.weight"),
        (&["merge-up-gate"], "ffn_gate_up_exps.weight"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        match options {
            ["repack"] => replace(&path, &fixture("smollm2-one-q8_0.gguf")),
            ["merge-up-gate"] => Mixture::SharedExpert.write(&path).expect("free space"),
            _ => replace(&path, &fixture("smollm2.gguf")),
        }
        let mut host = Host::start(Program::IkLlama(options), &path, &on());
        let before = host.text(TOKENS);
        let said = host.logged("hot-swap stays off: the program merged or repacked");
        assert_eq!(said.len(), 1, "{options:?}: {:?}", host.log());
        assert!(said[0].contains(weight), "{said:?}");
        let other = folder.path().join("other.gguf");
        std::fs::copy(&path, &other).expect("free space");
        let gguf = GgufFile::open(&other, Access::Read).expect("a model");
        exchange_blocks(
            &other,
            gguf.header.find(c"token_embd.weight").expect("embeddings"),
        );
        replace(&path, &other);
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
        assert_eq!(traced(&trace["traces"][0]), counted, "{program:?}");
        assert!(counted[0].iter().sum::<u64>() > 200, "{counted:?}");
        assert_eq!(host.end(), Some(0));
    }
}

/// All numbers in a JSON value.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        Value::Object(values) => values.values().flat_map(numbers).collect(),
        value => value.as_f64().into_iter().collect(),
    }
}

#[test]
fn routes_and_saliency_are_those_of_a_program_with_a_node_for_each_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let written = |program: Program, name: &str| {
        let [routes, saliency] =
            ["routes", "json"].map(|kind| folder.path().join(format!("{name}.{kind}")));
        let drop_in = DropIn::On(vec![
            ("LLAMA_EXPERT_TRACE_ROUTES", routes.display().to_string()),
            (
                "LLAMA_EXPERT_TRACE_SALIENCY",
                saliency.display().to_string(),
            ),
        ]);
        let mut host = Host::start(program, &fixture("moe.gguf"), &drop_in);
        host.text(TOKENS);
        host.ask("prompt 50");
        assert_eq!(host.end(), Some(0));
        let saliency = std::fs::read(saliency).expect("written at the end");
        let saliency: Value = serde_json::from_slice(&saliency).expect("JSON");
        let routes = std::fs::read(routes).expect("written at the end");
        (routes, numbers(&saliency["layers"]))
    };
    let (routes, saliency) = written(IK, "fused");
    let (plain_routes, plain_saliency) = written(Program::IkLlama(&["no-fusion"]), "plain");
    assert!(
        routes == plain_routes && routes.len() > 1000,
        "{} bytes",
        routes.len()
    );
    assert_eq!(saliency.len(), plain_saliency.len());
    // The fused kernel rounds in another place.
    for (fused, plain) in saliency.iter().zip(&plain_saliency) {
        assert!(
            (fused - plain).abs() <= 1e-5 * plain.abs(),
            "{fused} {plain}"
        );
    }
    assert!(saliency.iter().sum::<f64>() > 0.0);
}

#[test]
fn streaming_writes_the_same() {
    same_with_streaming(IK, "moe.gguf");
    same_with_streaming(Program::IkLlama(&["threads=2"]), "moe.gguf");
    same_with_streaming(Program::IkLlama(&["no-fusion"]), "moe.gguf");
}

/// Experts, shared experts, and matrices of two types in a layer.
#[test]
fn a_mixture_with_shared_experts_is_swapped_traced_and_streamed() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, variant) = (folder.path().join("a.gguf"), folder.path().join("b.gguf"));
    let model = folder.path().join("model.gguf");
    Mixture::SharedExpert.write(&path).expect("free space");
    Mixture::SharedExpert
        .write_variant(1, &variant)
        .expect("free space");
    let (before, after) = (fresh(COUNTING, &path), fresh(COUNTING, &variant));
    replace(&model, &path);
    let more = [("LLAMA_EXPERT_TRACE_STATS", "1")];
    let mut host = Host::start(COUNTING, &model, &streaming(&more));
    assert_eq!(host.text(TOKENS), before);
    let counts: Value = serde_json::from_str(&host.ask("counts")).expect("JSON");
    for (layer, traced) in traced(&host.control("trace")["traces"][0])
        .iter()
        .enumerate()
    {
        let used =
            |(expert, count): (usize, &u64)| (*count > 0).then(|| (expert.to_string(), *count));
        let traced: BTreeMap<String, u64> = traced.iter().enumerate().filter_map(used).collect();
        assert_eq!(
            serde_json::json!(traced),
            counts[layer.to_string()],
            "layer {layer}"
        );
    }
    let figures = stream_figures(&host);
    assert!(count(&figures, "layers") > 0, "{figures}");
    replace(&model, &variant);
    assert!(taken(&host.control("reload")).0 > 0);
    assert_eq!(host.text(TOKENS), after);
    replace(&model, &path);
    assert_eq!(taken(&host.control("reload")).0, 0);
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn streaming_reads_all_matrices_of_a_layer() {
    let model = fixture("moe.gguf");
    let scheduled = |program| {
        let (_, figures) = streamed_text(program, &model, &streaming(&[]));
        (count(&figures, "layers"), count(&figures, "checked_bytes"))
    };
    // The program of the other line has a node for each matrix. A reader that is late checks the requests of two tokens as
    // one; a matrix that is left out would be a third.
    let (layers, bytes) = scheduled(IK);
    let (other_layers, other_bytes) = scheduled(Program::IkLlama(&["no-fusion"]));
    assert_eq!(layers, other_layers);
    let ratio = bytes as f64 / other_bytes as f64;
    assert!((0.85..1.18).contains(&ratio), "{bytes} {other_bytes}");
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
        ("LLAMA_POSTFETCH_MODE", "on"),
        ("LLAMA_POSTFETCH_CACHE_MB", "auto"),
    ];
    let variables = variables.map(|(name, value)| (name, value.to_owned()));
    let model = fixture("moe.gguf");
    let mut host = Host::start(IK, &model, &DropIn::On(variables.to_vec()));
    assert_eq!(host.text(TOKENS), fresh(IK, &model));
    assert_eq!(host.end(), Some(0));
}

/// The program's own hot-swap and the drop-in's.
fn both() -> DropIn {
    DropIn::On(vec![("LLAMA_HOTSWAP_ENABLED", "1".into())])
}

/// A host beside which a hot-swap of its own is loaded.
fn with_own_hotswap(program: Program, model: &Path, drop_in: &DropIn) -> Host {
    let libraries = [preload_library(), built("hosts-c/libown_hotswap.so")];
    Host::start_with(program, model, drop_in, |command| {
        let joined = std::env::join_paths(libraries).expect("no colon");
        command.env("LD_PRELOAD", joined);
    })
}

#[test]
fn the_hot_swap_of_a_program_stands_back_if_its_calls_come_to_the_drop_in() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = with_own_hotswap(Program::C, &path, &both());
    host.text(TOKENS);
    assert_eq!(
        host.logged("and the drop-in's works: the program's calls")
            .len(),
        1
    );
    assert_eq!(host.ask("reload"), "unchanged");
    replace(&path, &fixture("smollm2-mixed.gguf"));
    // A reload that the program did not request counts at its next call.
    assert_eq!(taken(&host.control("reload")), (8, 0));
    assert_eq!(host.ask("reload"), "changed");
    assert_eq!(host.ask("reload"), "unchanged");
    replace(&path, &fixture("smollm2.gguf"));
    assert_eq!(host.ask("reload"), "changed");
    assert_eq!(
        host.text(TOKENS),
        fresh(Program::C, &fixture("smollm2.gguf"))
    );
    assert_eq!(host.logged("hotswap: reloaded tensor").len(), 8);
    assert!(host.logged("own hot-swap was called").is_empty());
    assert_eq!(host.end(), Some(0));
}

#[test]
fn the_drop_in_stands_back_if_a_program_may_call_its_own_hot_swap() {
    let (_folder, path) = copied("smollm2.gguf");
    let mut host = with_own_hotswap(IK, &path, &both());
    let before = host.text(TOKENS);
    let said = "hot-swap stays off: LLAMA_HOTSWAP_ENABLED turns on the program's own";
    assert_eq!(host.logged(said).len(), 1, "{:?}", host.log());
    replace(&path, &fixture("smollm2-mixed.gguf"));
    let report = host.control("reload");
    assert_eq!(report["ok"], false, "{report}");
    assert_eq!(host.ask("reload"), "changed");
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.logged("own hot-swap was called").len(), 1);
    assert_eq!(host.end(), Some(0));
    // The program's own is off with the variable of the drop-in's alone.
    replace(&path, &fixture("smollm2.gguf"));
    let mut host = with_own_hotswap(IK, &path, &on());
    host.text(TOKENS);
    replace(&path, &fixture("smollm2-mixed.gguf"));
    assert_eq!(taken(&host.control("reload")), (8, 0));
    assert_eq!(host.text(TOKENS), fresh(IK, &fixture("smollm2-mixed.gguf")));
    assert_eq!(host.end(), Some(0));
    // With nothing enabled, the call is the program's.
    let mut host = with_own_hotswap(IK, &path, &DropIn::Idle);
    host.ask("text 2");
    assert_eq!(host.ask("reload"), "changed");
    assert!(host.logged("llama-sidecar").is_empty());
    assert_eq!(host.end(), Some(0));
}
