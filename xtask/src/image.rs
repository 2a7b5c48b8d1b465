//! The image of the example, built and run without a daemon: `cargo xtask check --image`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use testkit::fixtures::{cache, fixture};

use crate::clean_root::{self, COMPLETE, Root};
use crate::dist;
use crate::install::copy;
use crate::machine::Machine;
use crate::run::{command, exists, output, run};

const BUILDER: &str = "buildah";

/// Why this check cannot run here, if so.
pub fn missing() -> Option<String> {
    let builder = || (!exists(BUILDER)).then(|| format!("{BUILDER} is not installed"));
    builder().or_else(clean_root::missing)
}

/// Builds an image of llama.cpp's programs on a small Debian system, and on it that of the example; runs a program there.
pub fn check() -> Result<()> {
    let store = Store(tempfile::tempdir_in(cache())?);
    let context = tempfile::tempdir()?;
    let packages = dist::make(context.path(), Machine::HERE)?;
    let root = Root::with_llama_cpp()?;
    // A user is looked for in a file that the small system lacks.
    fs::write(root.path("etc/passwd"), "root:x:0:0::/:/bin/sh\n")?;
    let base = store.output(&["from", "scratch"])?;
    store.run(&[
        Path::new("add"),
        Path::new(&base),
        root.path("").as_path(),
        Path::new("/"),
    ])?;
    store.run(&["commit", "--quiet", "--rm", &base, "llama-server"])?;

    let example = crate::run::root().join("packaging/examples/Containerfile");
    copy(&example, &context.path().join("Containerfile"))?;
    ensure!(
        packages.deb.parent() == Some(context.path()),
        "the package is in the context"
    );
    let build = [
        "build",
        "--quiet",
        "--build-arg",
        "BASE=localhost/llama-server",
        "--tag",
        "with-sidecar",
    ];
    run(store.command(&build).arg(context.path()))?;

    let models = tempfile::tempdir()?;
    copy(&fixture("smollm2.gguf"), &models.path().join("model.gguf"))?;
    let volume = format!("{}:/models", models.path().display());
    let mut written = Vec::new();
    for image in ["localhost/llama-server", "localhost/with-sidecar"] {
        let container = store.output(&["from", image])?;
        let start = [
            "run",
            "--volume",
            &volume,
            "--env",
            "LLAMA_SIDECAR_LOG=info",
            &container,
            "--",
        ];
        let words = COMPLETE.map(|word| word.replace("/model.gguf", "/models/model.gguf"));
        let ended = store.command(&start).args(words).output()?;
        let log = String::from_utf8_lossy(&ended.stderr).into_owned();
        ensure!(ended.status.success(), "{image}: {log}");
        let is_watching = log.contains("llama-sidecar: info: watching ");
        ensure!(is_watching == image.contains("sidecar"), "{image}: {log}");
        written.push(ended.stdout);
    }
    ensure!(
        written[0] == written[1],
        "the image with llama-sidecar writes another text"
    );
    println!("the image of the example was built and run");
    Ok(())
}

/// Images and containers, removed in the end.
struct Store(tempfile::TempDir);

impl Store {
    fn command<T: AsRef<std::ffi::OsStr>>(&self, words: &[T]) -> Command {
        let folder = |name: &str| -> PathBuf { self.0.path().join(name) };
        let mut builder = command(BUILDER, Path::new("/"));
        builder
            .args(["--storage-driver", "vfs", "--root"])
            .arg(folder("root"))
            .arg("--runroot")
            .arg(folder("run"))
            // Neither a daemon, nor namespaces of its own.
            .env("BUILDAH_ISOLATION", "chroot")
            .args(words);
        builder
    }

    fn run<T: AsRef<std::ffi::OsStr>>(&self, words: &[T]) -> Result<()> {
        run(&mut self.command(words))
    }

    fn output(&self, words: &[&str]) -> Result<String> {
        Ok(output(&mut self.command(words))?.trim().to_owned())
    }
}
