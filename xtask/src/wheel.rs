//! The wheel, with the tools of its field, and what its command serves: `cargo xtask check --wheel`.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use testkit::fixtures::{cache, fixture};
use testkit::server::llama_cpp;

use crate::machine::Machine;
use crate::run::{command, output, root, run};
use crate::{dist, fixtures, llama_cpp as built};

/// Documentation of the module that runs, and what numpy changes.
const EXAMPLES: &str = "
import doctest, llama_sidecar, llama_sidecar._files, llama_sidecar._sidecar, numpy
for module in llama_sidecar, llama_sidecar._files, llama_sidecar._sidecar:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0 and failed == 0, module
trace = llama_sidecar._sidecar._trace(
    {'tokens': 2, 'experts_used': 1, 'layers': [{'layer': 0, 'tokens': 2, 'counts': [0, 2]}]})
assert isinstance(trace.counts(), numpy.ndarray) and trace.counts().tolist() == [[0, 2]]
assert isinstance(trace.layers[0].counts, numpy.ndarray)
";

/// Why this check cannot run here, if so.
pub fn missing() -> Option<String> {
    let tools = || fixtures::python_tools().and_then(|()| fixtures::llama_cpp_python());
    dist::missing()
        .or_else(built::missing)
        .or_else(|| tools().err().map(|error| format!("{error:#}")))
}

/// Makes the wheel and the source distribution; checks their form, their types and their examples, and uses the module.
pub fn check() -> Result<()> {
    fixtures::python_tools()?;
    let folder = tempfile::tempdir()?;
    let packages = dist::make(folder.path(), Machine::HERE)?;
    let tool = |name: &str| {
        let mut tool = command(cache().join("python-tools/bin").join(name), folder.path());
        tool.env("PYTHONPATH", folder.path().join("installed"));
        tool
    };
    run(tool("pip")
        .args(["install", "--quiet", "--no-index", "--target", "installed"])
        .arg("--disable-pip-version-check")
        .arg(&packages.wheel))?;
    let shown = output(tool("auditwheel").arg("show").arg(&packages.wheel))?;
    let name = packages.wheel.file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    let tag = name.trim_end_matches(".whl").rsplit('-').next();
    let tag = tag.unwrap_or_default();
    let words: Vec<&str> = shown.split_whitespace().collect();
    ensure!(
        words.join(" ").contains(&format!(
            "is consistent with the following platform tag: \"{tag}\""
        )),
        "auditwheel does not confirm {tag}: {shown}"
    );
    run(tool("twine")
        .args(["check", "--strict"])
        .args([&packages.wheel, &packages.sources]))?;
    run(tool("mypy").args(["--strict", "--no-error-summary", "installed/llama_sidecar"]))?;
    run(tool("python").args(["-c", EXAMPLES]))?;
    used(&tool("python"), folder.path())
}

/// Uses the module with llama-server and with llama-cpp-python.
fn used(python: &std::process::Command, folder: &Path) -> Result<()> {
    let mixture = folder.join("mixture.gguf");
    fs::copy(fixture("small-moe.gguf"), &mixture)?;
    let script = |name: &str| {
        let mut script = command(python.get_program(), folder);
        script.env("PYTHONPATH", folder.join("installed"));
        script.arg(root().join("python/tests").join(name));
        script
    };
    for name in ["first_use.py", "exporter.py"] {
        let server = llama_cpp("llama-server");
        run(script(name).args([&server, &mixture]))?;
    }
    run(&mut script("replies.py"))?;
    run(script("operators.py").arg(root().join("packaging/examples")))?;
    run(script("notebook.py")
        .arg(root().join("python/examples/tune_a_layer.ipynb"))
        .env("LLAMA_PERPLEXITY", llama_cpp("llama-perplexity"))
        .env("MODEL", fixture("smollm2.gguf"))
        .env("TEXT", root().join("hosts/c/text.txt"))
        .envs([
            ("TYPES", "q8_0 q4_K q2_K"),
            ("CONTEXT", "128"),
            ("CHUNKS", "3"),
        ]))?;
    fixtures::llama_cpp_python()?;
    run(script("in_llama_cpp_python.py")
        .arg(cache().join("llama-cpp-python/bin/python"))
        .arg(root().join("hosts/python/llama_cpp_python.py"))
        .args([fixture("smollm2.gguf"), fixture("smollm2-mixed.gguf")])
        .env("LLAMA_CPP_LIB_PATH", llama_cpp("")))
}
