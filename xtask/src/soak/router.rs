//! llama-server in its router mode: models are loaded, evaluated and freed all the time, each in a
//! process of its own.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testkit::host::DropIn;
use testkit::server::Server;

use super::failures::Failures;
use super::options::options;

/// How long a model may take to be freed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two loads: the other server needs the processors, too.
const PAUSE: Duration = Duration::from_secs(2);

/// Loads and frees models until the end; returns how often.
pub fn run(files: &[&Path], outputs: &Path, over: &AtomicBool, failures: &Failures) -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let models = folder.path().join("models");
    fs::create_dir(&models)?;
    let mut expected = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let name = format!("model-{number}");
        std::os::unix::fs::symlink(file, models.join(&name).with_extension("gguf"))?;
        let unused = tempfile::tempdir()?;
        let server = Server::start(file, &options(unused.path(), 1));
        expected.push((name, answer(&server, "")));
        server.end();
    }
    // Each process has files and a socket of its own.
    let mut options = options(&outputs.join("%p-"), 1);
    if let DropIn::On(variables) = &mut options.drop_in {
        let socket = outputs.join("%p-socket").display().to_string();
        variables.push(("LLAMA_SIDECAR_CONTROL", socket));
    }
    let server = Server::start_router(&models, &options);
    let mut loads = 0;
    while !over.load(Ordering::Relaxed) {
        for (name, expected) in &expected {
            let found = answer(&server, name);
            if found != *expected {
                let what = format!("{name}: expected {expected}, found {found}");
                failures.add("answers of the router", what);
            }
            server.ask("/models/unload", &json!({"model": name}));
            let deadline = Instant::now() + PATIENCE;
            while server.model_status(name)["value"] != "unloaded" {
                ensure!(Instant::now() < deadline, "{name} is not freed");
                std::thread::sleep(Duration::from_millis(20));
            }
            loads += 1;
            check_outputs(outputs, failures)?;
        }
        std::thread::sleep(PAUSE);
    }
    let (ended, log) = server.end();
    if !ended.success() {
        failures.add(
            "the end of the router",
            format!("{ended}: {}", log.join("\n")),
        );
    }
    Ok(loads)
}

fn answer(server: &Server, model: &str) -> Value {
    let body = json!({
        "model": model, "prompt": "Once upon a time", "n_predict": 8, "temperature": 0,
        "ignore_eos": true, "n_probs": 3, "cache_prompt": false,
    });
    let answer = server.ask("/completion", &body);
    json!([answer["content"], answer["completion_probabilities"]])
}

/// Checks and removes what the process of a freed model wrote.
fn check_outputs(outputs: &Path, failures: &Failures) -> Result<()> {
    let mut traces = 0;
    for entry in fs::read_dir(outputs)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.starts_with(|first: char| first.is_ascii_digit()) {
            continue;
        }
        if name.ends_with("socket") {
            failures.add("sockets that stay", name);
        } else if name.ends_with("t.json") {
            let trace: Value = serde_json::from_slice(&fs::read(&path)?).unwrap_or_default();
            traces += u64::from(trace["activations"].as_u64() > Some(0));
        }
        fs::remove_file(&path)?;
    }
    if traces != 1 {
        let what = format!("expected one with activations, found {traces}");
        failures.add("traces of the router", what);
    }
    Ok(())
}
