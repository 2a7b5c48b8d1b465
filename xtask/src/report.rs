//! The report of an expert trace in a real browser.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::fixtures::{self, DEBIAN_LIBRARIES};
use crate::install::target_folder;
use crate::run::{command, exists, root, run};

const BROWSER: &str = "chromium";
/// For headless use, without network access.
const FLAGS: [&str; 8] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
];
/// An empty page of these sizes is a few kilobytes of PNG.
const LEAST_BYTES: u64 = 30_000;

/// Why the check cannot run, if so.
pub fn missing() -> Option<String> {
    let error = browser(&root()).err()?;
    Some(format!(
        "{BROWSER} is not installed, nor from Debian: {error:#}"
    ))
}

/// The browser of this machine, or that of Debian's package.
fn browser(folder: &Path) -> Result<Command> {
    if exists(BROWSER) {
        return Ok(command(BROWSER, folder));
    }
    let unpacked = fixtures::browser()?;
    let libraries = unpacked.join(DEBIAN_LIBRARIES);
    let folders = ["", "pulseaudio", "nss"].map(|name| libraries.join(name));
    let mut browser = command(unpacked.join("usr/lib/chromium/chromium"), folder);
    browser.env("LD_LIBRARY_PATH", std::env::join_paths(folders)?);
    Ok(browser)
}

/// Draws a small and a large trace at two sizes, in light and dark.
pub fn check() -> Result<()> {
    let folder = target_folder()?.join("report");
    std::fs::create_dir_all(&folder)?;
    run(command("cargo", &root()).args([
        "build",
        "--quiet",
        "--workspace",
        "--bin",
        "llama-sidecar",
    ]))?;
    let cli = target_folder()?.join("debug/llama-sidecar");
    for (layers, experts) in [(4, 8), (48, 512)] {
        let trace = folder.join("trace.json");
        std::fs::write(&trace, synthetic(layers, experts))?;
        let page = folder.join("report.html");
        run(command(&cli, &folder)
            .arg("report")
            .arg(&trace)
            .arg("-o")
            .arg(&page))?;
        let dom = browse(&page, &["--dump-dom"], &folder)?;
        let cells = dom.matches("<title>layer ").count();
        ensure!(cells == layers * experts, "{cells} cells in the browser");
        for (name, width, scheme) in [("light", 1280, 1), ("dark", 480, 0)] {
            let picture = folder.join(format!("{layers}x{experts}-{name}.png"));
            let _ = std::fs::remove_file(&picture);
            let size = format!("--window-size={width},1400");
            let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
            let screenshot = format!("--screenshot={}", picture.display());
            browse(&page, &[&size, &scheme, &screenshot], &folder)?;
            let bytes = std::fs::metadata(&picture)?.len();
            ensure!(
                bytes > LEAST_BYTES,
                "{} is blank: {bytes} bytes",
                picture.display()
            );
        }
    }
    println!("screenshots are in {}", folder.display());
    Ok(())
}

/// Opens a page and returns what the browser prints, without its messages about the desktop
/// that is missing.
fn browse(page: &Path, flags: &[&str], folder: &Path) -> Result<String> {
    let profile = format!("--user-data-dir={}", folder.join("profile").display());
    let out = browser(folder)?
        .args(FLAGS)
        .arg(profile)
        .args(flags)
        .arg(format!("file://{}", page.display()))
        .output()?;
    ensure!(out.status.success(), "{BROWSER} ended with {}", out.status);
    Ok(String::from_utf8(out.stdout)?)
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
