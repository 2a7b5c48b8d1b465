//! Pages of the command in a real browser.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use testkit::fixtures::fixture;
use testkit::host::DropIn;
use testkit::server::{Options, Request, Server};

use crate::browser::{self, Browser, Scheme};
use crate::install::target_folder;
use crate::llama_cpp;
use crate::run::{Running, command, root, run};

/// Widths of windows.
const WIDTHS: [u32; 2] = [400, 1280];
/// An empty page of these sizes is a few kilobytes of PNG.
const LEAST_BYTES: u64 = 20_000;

/// Why the check cannot run, if so.
pub fn missing() -> Option<String> {
    browser::missing().or_else(llama_cpp::missing)
}

/// Shows reports of a small and a large trace, and running programs.
pub fn check() -> Result<()> {
    let folder = target_folder()?.join("pages");
    std::fs::create_dir_all(&folder)?;
    let browser = Browser::start(&folder)?;
    reports(&browser, &folder)?;
    live_view(&browser, &folder)?;
    println!("pictures are in {}", folder.display());
    Ok(())
}

/// The command, as it is installed.
fn cli() -> Result<std::path::PathBuf> {
    run(command("cargo", &root()).args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "llama-sidecar-cli",
    ]))?;
    Ok(target_folder()?.join("release/llama-sidecar"))
}

fn reports(browser: &Browser, folder: &Path) -> Result<()> {
    let cli = cli()?;
    for (layers, experts) in [(4, 8), (48, 512)] {
        let trace = folder.join("trace.json");
        std::fs::write(&trace, synthetic(layers, experts))?;
        let page = folder.join("report.html");
        run(command(&cli, folder)
            .args(["report", "--force", "-o"])
            .args([&page, &trace]))?;
        browser.open(&format!("file://{}", page.display()))?;
        let cells = "[...document.querySelectorAll('title')].filter(of => of.textContent.startsWith('layer ')).length";
        // The browser opens the page before it has read all of it.
        browser.wait_for(&format!("{cells} === {}", layers * experts))?;
        pictures(browser, folder, &format!("report-{layers}x{experts}"))?;
    }
    Ok(())
}

/// Takes pictures of the page in light and dark, narrow and wide; its text has to fit into the width.
fn pictures(browser: &Browser, folder: &Path, name: &str) -> Result<()> {
    let mut different = BTreeSet::new();
    for width in WIDTHS {
        for scheme in [Scheme::Light, Scheme::Dark] {
            browser.look(width, 1400, scheme)?;
            let wide = browser.value("document.documentElement.scrollWidth")?;
            ensure!(
                wide.as_u64().is_some_and(|wide| wide <= width.into()),
                "the page is {wide} pixels wide in a window of {width}"
            );
            let picture = folder.join(format!("{name}-{width}-{scheme:?}.png"));
            browser.picture(&picture)?;
            let bytes = std::fs::read(&picture)?;
            ensure!(
                bytes.len() as u64 > LEAST_BYTES,
                "{} is blank: {} bytes",
                picture.display(),
                bytes.len()
            );
            different.insert(bytes);
        }
    }
    ensure!(different.len() == 4, "light and dark are the same");
    Ok(())
}

/// Shows a llama-server that answers requests, while its experts are read from the disk and a tensor is swapped.
fn live_view(browser: &Browser, folder: &Path) -> Result<()> {
    let model = folder.join("mixture.gguf");
    std::fs::copy(fixture("moe.gguf"), &model)?;
    let variables = [
        ("LLAMA_EXPERT_TRACE_STATS", "1"),
        ("LLAMA_EXPERT_STREAM", "on"),
        ("LLAMA_EXPERT_STREAM_MEMORY_MB", "64"),
    ];
    let variables = variables.map(|(name, value)| (name, value.to_owned()));
    let options = Options {
        drop_in: DropIn::On(variables.to_vec()),
        ..Options::new(1)
    };
    let server = Server::start(&model, &options);
    let nowhere = folder.join("nowhere");
    let (top, address) = Running::start(
        command(cli()?, folder)
            .args(["top", "--web", "127.0.0.1:0", "--allow-control"])
            .args(["--interval", "0.5", "--socket"])
            .arg(server.socket())
            .arg("--socket")
            .arg(&nowhere),
    )?;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                server.complete(&Request::new("Once upon a time", 32));
            }
        });
        let shown = watch(browser, folder, &address, &server, &model);
        ended.store(true, Ordering::Relaxed);
        shown
    })?;
    drop(top);
    browser.wait_for("document.getElementById('state').textContent.includes('has ended')")
}

fn watch(
    browser: &Browser,
    folder: &Path,
    address: &str,
    server: &Server,
    model: &Path,
) -> Result<()> {
    let shows = |text: &str| {
        let text = serde_json::Value::from(text);
        browser.wait_for(&format!("document.body.innerText.includes({text})"))
    };
    browser.open(address)?;
    shows("1 of 2 programs answer")?;
    shows("tokens/s; at most")?;
    shows("/s read")?;
    shows("8 experts from left to right")?;
    shows("nowhere")?;
    browser.wait_for(
        "document.querySelector('polyline').points.length > 3 && document.querySelector('canvas').height > 3",
    )?;
    let click = |action: &str| {
        browser.value(&format!(
            "document.querySelector('button[data-action={action}]').click()"
        ))
    };
    // The file gets a tensor of another type; the program takes it once the page requests that.
    run(command(cli()?, folder)
        .arg("swap")
        .arg(model)
        .args(["--tensor", ".*", "--from"])
        .arg(fixture("moe-mixed.gguf")))?;
    click("reload")?;
    shows("reload: done")?;
    shows("1 swap,")?;
    click("revert")?;
    shows("revert and freeze: done")?;
    shows("reloads are frozen after a revert")?;
    pictures(browser, folder, "top")?;
    // Without the token there is a page, and no samples.
    let (page, _) = address.split_once('#').context("a token")?;
    browser.open("about:blank")?;
    browser.open(page)?;
    shows("with all that follows the #")?;
    browser.open("about:blank")?;
    browser.open(address)?;
    shows("1 of 2 programs answer")?;
    refuses(address)?;
    shows("1 of 2 programs answer")?;
    ensure!(server.logged("error").is_empty(), "errors in the log");
    Ok(())
}

/// Sends what an attacker could send to the page's server, from this machine or by way of another page.
fn refuses(address: &str) -> Result<()> {
    let (page, token) = address.split_once('#').context("a token")?;
    let host = page.trim_start_matches("http://").trim_end_matches('/');
    let own = format!("Host: {host}\r\n");
    let permitted = format!("{own}Authorization: Bearer {token}\r\n");
    let wrong = format!("{own}Authorization: Bearer {}\r\n", "0".repeat(token.len()));
    let other = |origin: &str| format!("{permitted}Origin: {origin}\r\n");
    let (null, attacker) = (other("null"), other("http://attacker.example"));
    let secure = other(&format!("https://{host}"));
    let rebound = format!("Host: attacker.example\r\nAuthorization: Bearer {token}\r\n");
    let subdomain = format!("Host: {host}.attacker.example\r\nAuthorization: Bearer {token}\r\n");
    let twice = format!("{permitted}Host: attacker.example\r\n");
    let two_tokens = format!("{permitted}Authorization: Bearer {token}\r\n");
    let query = format!("GET /samples?token={token} HTTP/1.1");
    let long = format!("GET /{} HTTP/1.1", "a".repeat(100_000));
    let many = "A: b\r\n".repeat(10_000);
    for (first, headers, status) in [
        ("GET /samples HTTP/1.1", own.as_str(), "401"),
        ("GET /samples HTTP/1.1", &wrong, "401"),
        (&query, &own, "401"),
        ("GET /samples HTTP/1.1", &two_tokens, "401"),
        ("POST /programs/0/revert HTTP/1.1", &own, "401"),
        ("POST /programs/0/revert HTTP/1.1", &wrong, "401"),
        ("POST /programs/0/revert HTTP/1.1", &null, "403"),
        ("POST /programs/0/revert HTTP/1.1", &attacker, "403"),
        ("GET /samples HTTP/1.1", &attacker, "403"),
        ("GET /samples HTTP/1.1", &secure, "403"),
        ("GET / HTTP/1.1", "", "403"),
        ("GET /samples HTTP/1.1", &rebound, "403"),
        ("GET /samples HTTP/1.1", &subdomain, "403"),
        ("GET /samples HTTP/1.1", &twice, "403"),
        ("OPTIONS /programs/0/revert HTTP/1.1", &attacker, "403"),
        ("OPTIONS /programs/0/revert HTTP/1.1", &own, "405"),
        ("PUT /samples HTTP/1.1", &permitted, "405"),
        ("GET /../../etc/passwd HTTP/1.1", &permitted, "404"),
        ("GET /%2e%2e/etc/passwd HTTP/1.1", &permitted, "404"),
        (
            "POST /programs/18446744073709551616/revert HTTP/1.1",
            &permitted,
            "404",
        ),
        ("POST /programs/0/../1/revert HTTP/1.1", &permitted, "404"),
        ("POST /programs/0/shutdown HTTP/1.1", &permitted, "404"),
        ("GET / HTTP/2", &permitted, "400"),
        ("GET\0/ HTTP/1.1", &permitted, "400"),
        (&long, &permitted, "400"),
        ("GET / HTTP/1.1", &many, "400"),
    ] {
        let mut client = TcpStream::connect(host)?;
        // The server may refuse before all was sent.
        let _ = client.write_all(format!("{first}\r\n{headers}\r\n").as_bytes());
        let mut answer = String::new();
        let read = client.read_to_string(&mut answer);
        let was_reset = read.is_err() && status == "400" && first.len() + headers.len() > 8 << 10;
        ensure!(
            was_reset || answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{first:.60} {headers:.200}: {answer:.200}, not {status}"
        );
    }
    // Clients that send nothing keep others waiting for some seconds, and no longer.
    let held: Vec<_> = (0..40).map(|_| TcpStream::connect(host)).collect();
    drop(held);
    Ok(())
}

/// A trace in which some experts are used more than others, and some never.
fn synthetic(layers: usize, experts: usize) -> String {
    let layer = |layer: usize| {
        let counts: Vec<usize> = (0..experts)
            .map(|expert| ((expert * 7919 + layer * 104_729) % 97).pow(2) / 50)
            .collect();
        serde_json::json!({"layer": layer, "tokens": 1000, "counts": counts})
    };
    let layers: Vec<_> = (0..layers).map(layer).collect();
    serde_json::json!({
        "schema": "llama-sidecar/expert-trace/1",
        "model": {"name": "synthetic", "architecture": "", "files": []},
        "experts_used": 2,
        "rejected": 0,
        "seconds": 1.0,
        "layers": layers,
    })
    .to_string()
}
