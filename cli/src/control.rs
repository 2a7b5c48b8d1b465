//! `llama-sidecar status`, `reload`, `revert`, `unfreeze`, `metrics`, `trace` and `ping`:
//! requests to the control socket of a running host.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use llama_sidecar::trace::{from_json, to_text};
use serde_json::{Value, json};

/// Sends a request and prints the answer, as text or as it came.
pub fn run(socket: &Path, command: &str, as_json: bool) -> Result<()> {
    let answer = ask(socket, command)?;
    if as_json {
        println!("{answer:#}");
    } else {
        match command {
            "status" => print_status(&answer),
            "reload" => print_reload(&answer),
            "revert" => {
                print_reload(&answer);
                println!("reloads are frozen: 'llama-sidecar unfreeze' ends that");
            }
            "unfreeze" => println!("changed files are reloaded again"),
            "metrics" => print!("{}", text(&answer["text"])),
            "hash" => print_hashes(&answer),
            "trace" => print_trace(&answer)?,
            "trace-reset" => println!("counted anew from here on"),
            _ => println!("a host answers at {}", socket.display()),
        }
    }
    if answer["ok"] != true {
        let error = answer["error"]
            .as_str()
            .unwrap_or("not everything was taken");
        bail!("{error}");
    }
    Ok(())
}

fn ask(socket: &Path, command: &str) -> Result<Value> {
    let mut stream = UnixStream::connect(socket).with_context(|| {
        format!(
            "cannot connect to {}: start the program with 'llama-sidecar run --hotswap --socket {0} -- COMMAND'; the socket appears after its first evaluation",
            socket.display()
        )
    })?;
    writeln!(stream, "{}", json!({"cmd": command}))?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    serde_json::from_str(&answer).with_context(|| {
        format!(
            "{} is no control socket of llama-sidecar: expected JSON, found {answer:?}",
            socket.display()
        )
    })
}

fn print_status(answer: &Value) {
    println!(
        "process {}, {} evaluations, {} switches, longest pause {} us",
        answer["pid"], answer["evaluations"], answer["generation"], answer["longest_pause_us"]
    );
    if answer["frozen"] == true {
        println!("frozen: changed files are not reloaded before 'llama-sidecar unfreeze'");
    }
    if let Some(seconds) = answer["waiting"]["seconds"].as_f64() {
        let obstacle = answer["waiting"]["obstacle"].as_str().unwrap_or("nothing");
        println!("a swap has been waiting for {seconds:.1} s; in its way: {obstacle}");
    }
    if let Some(error) = answer["blocked"]["error"].as_str() {
        println!(
            "reloads have failed for {:.0} s, {} attempts: {error}",
            answer["blocked"]["seconds"].as_f64().unwrap_or(0.0),
            answer["blocked"]["attempts"]
        );
    }
    for model in list(&answer["models"]) {
        let files = list(&model["files"]);
        let first = files.first().map(text).unwrap_or_default();
        println!(
            "model {}: {} tensors of {} file(s), {} as loaded: {first}",
            model["model"],
            model["tensors"],
            files.len(),
            model["on_original"]
        );
        println!(
            "  {} bytes in buffers beside the model, content {}",
            model["private_bytes"],
            model["content_hash"]
                .as_str()
                .unwrap_or("not hashed yet (status --hash)")
        );
        for tensor in list(&model["changed"]) {
            let states: Vec<&str> = list(&tensor["states"]).iter().map(text).collect();
            println!("  {:40} {}", text(&tensor["name"]), states.join(", "));
        }
    }
}

fn print_hashes(answer: &Value) {
    for model in list(&answer["models"]) {
        let hash = model["content_hash"].as_str();
        println!(
            "model {}: {}",
            model["model"],
            hash.unwrap_or("cannot be read")
        );
    }
}

fn print_reload(answer: &Value) {
    for report in list(&answer["reports"]) {
        if let Some(error) = report["error"].as_str() {
            println!("model {}: {error}", report["model"]);
            continue;
        }
        println!(
            "model {}: {} swapped, {} returned, {} unchanged, {} in place, {} refused; {:.1} ms, evaluations held for {:.1} us",
            report["model"],
            report["swapped"],
            report["returned"],
            report["unchanged"],
            report["in_place"],
            report["refused"],
            report["ms"]["total"].as_f64().unwrap_or(0.0),
            report["ms"]["switch"].as_f64().unwrap_or(0.0) * 1e3,
        );
        for file in list(&report["files"]) {
            let reason = text(&file["reason"]);
            let colon = if reason.is_empty() { "" } else { ": " };
            println!(
                "  {} {}{colon}{reason}",
                text(&file["event"]),
                text(&file["path"])
            );
        }
        for tensor in list(&report["tensors"]) {
            println!(
                "  {:8} {:40} {} -> {} {} {}",
                text(&tensor["outcome"]),
                text(&tensor["name"]),
                text(&tensor["old_type"]),
                text(&tensor["new_type"]),
                text(&tensor["place"]),
                text(&tensor["reason"]),
            );
        }
    }
}

fn print_trace(answer: &Value) -> Result<()> {
    for trace in list(&answer["traces"]) {
        let (about, counts) = from_json(trace).map_err(anyhow::Error::msg)?;
        print!("{}", to_text(&about, &counts, true));
    }
    Ok(())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
