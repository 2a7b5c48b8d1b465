//! `llama-sidecar status`, `reload`, `revert`, `unfreeze`, `metrics`, `trace` and `ping`:
//! requests to the control socket of a running host.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, bail};
use llama_sidecar::trace::{from_json, to_text};
use serde_json::{Value, json};

use crate::server;

/// Sends a request and prints the answer, as text or as it came.
pub fn run(socket: &Path, command: &str, as_json: bool) -> Result<()> {
    let answer = ask(socket, command)?;
    if as_json {
        println!("{answer:#}");
    } else {
        match command {
            "status" => print_status(&answer),
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
    taken(&answer)
}

/// Lets a host look at its files; then empties the slots of its server, if one is named.
pub fn reload(socket: &Path, server: &server::ServerOptions, as_json: bool) -> Result<()> {
    // Before anything changes: whether the slots can be emptied after it.
    let server = server.check(process_at(socket)?)?;
    let mut answer = ask(socket, "reload")?;
    let mut erased = None;
    if let Some(server) = &server {
        // The host may have looked at its files before it was asked to. Only as long as
        // nothing was ever switched, nothing can be cached of other weights.
        let switches = ask(socket, "status")?["generation"].as_u64();
        let result = match switches {
            Some(0) => Ok(0),
            _ => server.erase(),
        };
        if let Ok(count) = result {
            answer["slots_erased"] = count.into();
        }
        erased = Some(result);
    }
    if as_json {
        println!("{answer:#}");
    } else {
        print_reload(&answer);
        if let Some(Ok(count)) = erased {
            println!("{count} slots of the server emptied");
        }
    }
    erased.transpose()?;
    taken(&answer)
}

/// An error if an answer says that not everything was done.
fn taken(answer: &Value) -> Result<()> {
    if answer["ok"] != true {
        let error = answer["error"]
            .as_str()
            .unwrap_or("not everything was taken");
        bail!("{error}");
    }
    Ok(())
}

/// The process that listens at a socket, by its number here (in a container it may have
/// another one of its own).
fn process_at(socket: &Path) -> Result<u32> {
    let stream = connect(socket)?;
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the option fills in a struct of this size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error())
            .with_context(|| format!("who listens at {}", socket.display()));
    }
    Ok(peer.pid.unsigned_abs())
}

fn ask(socket: &Path, command: &str) -> Result<Value> {
    let mut stream = connect(socket)?;
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

fn connect(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).with_context(|| {
        format!(
            "cannot connect to {}: start the program with 'llama-sidecar run --hotswap --socket {0} -- COMMAND'; the socket appears after its first evaluation",
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
        if let Some(error) = model["blocked"]["error"].as_str() {
            println!(
                "  reloads have failed for {:.0} s, {} attempts: {error}",
                model["blocked"]["seconds"].as_f64().unwrap_or(0.0),
                model["blocked"]["attempts"]
            );
        }
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
