//! A real browser, driven through WebDriver (<https://www.w3.org/TR/webdriver2/>).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::fixtures::{self, DEBIAN_LIBRARIES};
use crate::run::{command, exists};

const BROWSER: &str = "chromium";
const DRIVER: &str = "chromedriver";
/// For headless use, without network access.
const FLAGS: [&str; 7] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
];
/// How long a page may take until it shows what is waited for, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Light or dark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Light,
    Dark,
}

/// A browser with one page. It ends when dropped.
pub struct Browser {
    driver: Child,
    /// The address of the session.
    session: String,
}

/// Why no browser can be had, if so.
pub fn missing() -> Option<String> {
    let error = places().err()?;
    Some(format!(
        "{BROWSER} and {DRIVER} are not installed, nor from Debian: {error:#}"
    ))
}

/// The browser and the driver of this machine, or those of Debian's packages, and where their libraries are.
fn places() -> Result<(String, String, Option<std::ffi::OsString>)> {
    if exists(BROWSER) && exists(DRIVER) {
        return Ok((BROWSER.into(), DRIVER.into(), None));
    }
    let unpacked = fixtures::browser()?;
    let libraries = unpacked.join(DEBIAN_LIBRARIES);
    let folders = ["", "pulseaudio", "nss"].map(|name| libraries.join(name));
    let path = |name: &str| unpacked.join(name).to_string_lossy().into_owned();
    Ok((
        path("usr/lib/chromium/chromium"),
        path("usr/bin/chromedriver"),
        Some(std::env::join_paths(folders)?),
    ))
}

impl Browser {
    /// Starts a browser, whose files are in a folder.
    pub fn start(folder: &Path) -> Result<Browser> {
        let (browser, driver, libraries) = places()?;
        let mut driver: Command = command(driver, folder);
        if let Some(libraries) = libraries {
            driver.env("LD_LIBRARY_PATH", libraries);
        }
        let mut driver = driver
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let lines = BufReader::new(driver.stdout.take().context("a pipe")?).lines();
        let mut started = Browser {
            driver,
            session: String::new(),
        };
        let port = lines.map_while(Result::ok).find_map(|line| {
            let port = line.split_once("started successfully on port ")?.1;
            Some(port.trim_end_matches('.').to_owned())
        });
        let port = port.with_context(|| format!("{DRIVER} does not start"))?;
        let profile = format!("--user-data-dir={}", folder.join("profile").display());
        let flags: Vec<&str> = FLAGS.into_iter().chain([profile.as_str()]).collect();
        let wanted = json!({"goog:chromeOptions": {"binary": browser, "args": flags}});
        let url = format!("http://127.0.0.1:{port}/session");
        let made = post(&url, &json!({"capabilities": {"alwaysMatch": wanted}}))?;
        let id = made["sessionId"].as_str().context("a session")?;
        started.session = format!("{url}/{id}");
        Ok(started)
    }

    fn ask(&self, request: &str, body: &Value) -> Result<Value> {
        post(&format!("{}/{request}", self.session), body)
    }

    /// Opens a page.
    pub fn open(&self, url: &str) -> Result<()> {
        self.ask("url", &json!({"url": url})).map(|_| ())
    }

    /// Returns the value of an expression of JavaScript in the page.
    pub fn value(&self, expression: &str) -> Result<Value> {
        let script = format!("return {expression}");
        self.ask("execute/sync", &json!({"script": script, "args": []}))
    }

    /// Waits until an expression of JavaScript is true in the page.
    pub fn wait_for(&self, expression: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.value(expression)? != true {
            ensure!(
                Instant::now() < until,
                "never true in the page: {expression}; its text: {}",
                self.value("document.body.innerText")?
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Shows the page in a window of so many pixels.
    pub fn look(&self, width: u32, height: u32, scheme: Scheme) -> Result<()> {
        let scheme = match scheme {
            Scheme::Light => "light",
            Scheme::Dark => "dark",
        };
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        for (name, parameters) in [
            ("Emulation.setEmulatedMedia", json!({"features": [feature]})),
            ("Emulation.setDeviceMetricsOverride", size),
        ] {
            let body = json!({"cmd": name, "params": parameters});
            self.ask("goog/cdp/execute", &body)?;
        }
        Ok(())
    }

    /// Writes a picture of the window as PNG.
    pub fn picture(&self, path: &Path) -> Result<()> {
        let text = get(&format!("{}/screenshot", self.session))?;
        let text = text.as_str().context("a picture")?;
        Ok(std::fs::write(path, BASE64_STANDARD.decode(text)?)?)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let _ = ureq::delete(&self.session).call();
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn post(url: &str, body: &Value) -> Result<Value> {
    let sent = agent().post(url).send(body.to_string());
    value_of(sent)
}

fn get(url: &str) -> Result<Value> {
    value_of(agent().get(url).call())
}

/// A client for which an answer with an error is an answer.
fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(PATIENCE));
    config.build().into()
}

fn value_of(answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Value> {
    let text = answer?
        .body_mut()
        .with_config()
        .limit(64 << 20)
        .read_to_string()?;
    let mut answer: Value = serde_json::from_str(&text)?;
    let value = answer["value"].take();
    if let Some(error) = value["error"].as_str() {
        bail!("{BROWSER}: {error}: {}", value["message"]);
    }
    Ok(value)
}
