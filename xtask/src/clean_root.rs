//! The packages on a clean root: a small Debian system, to which nothing of this project was
//! installed before. There dpkg installs the package, its programs run, and dpkg removes it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use regex::Regex;
use testkit::fixtures::{cache, fixture};
use testkit::server::llama_cpp;

use crate::dist::{self, Packages, files};
use crate::install::copy;
use crate::machine::Machine;
use crate::run::{command, exists, output, run};
use crate::{fixtures, llama_cpp, packaging};

/// Options of `unshare` for mounts of its own: as root, and as another user.
const MOUNTS: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];
/// Makes devices and processes visible in a root, and runs a command there.
const ENTER: &str =
    "mount --rbind /proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && exec chroot \"$0\" \"$@\"";
/// As [`ENTER`], where only /run and /tmp can be written, as in a service with `ProtectSystem=strict`.
const ENTER_READ_ONLY: &str = "mount --bind \"$0\" \"$0\" && mount -o remount,bind,ro \"$0\" \
    && mount -t tmpfs none \"$0/run\" && mount -t tmpfs none \"$0/tmp\" \
    && mount --rbind /proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && exec chroot \"$0\" \"$@\"";
/// Starts what its arguments name as a service, and prints the status of its socket `$0`. A server without a handler of
/// SIGTERM yet ends by it.
const SERVICE: &str = "mkdir ${0%/*} && \"$@\" & process=$!
    for attempt in $(seq 600); do sleep 0.1; llama-sidecar status --socket $0 2>/dev/null && break; done
    kill $process; wait $process || test $? = 143";
/// What dpkg and ldconfig keep about all packages.
const DATABASES: [&str; 4] = [
    "etc/ld.so.cache",
    "var/cache/ldconfig",
    "var/lib/dpkg",
    "var/log/dpkg.log",
];

/// Returns why this check cannot run here, if so.
pub fn missing() -> Option<String> {
    let root = || fixtures::clean_root().and_then(|_| mounts());
    dist::missing()
        .or_else(llama_cpp::missing)
        .or_else(|| root().err().map(|error| format!("{error:#}")))
}

/// The options of `unshare` that work here.
fn mounts() -> Result<&'static [&'static str]> {
    let works = |options: &&&[&str]| {
        let mut unshare = command("unshare", Path::new("/"));
        unshare.args(**options).arg("true").stderr(Stdio::null());
        unshare.status().is_ok_and(|status| status.success())
    };
    MOUNTS.iter().find(works).copied().context(
        "no root can be entered: run as root, or allow user namespaces (kernel.unprivileged_userns_clone, \
         kernel.apparmor_restrict_unprivileged_userns)",
    )
}

/// A copy of the clean root, removed in the end.
pub struct Root {
    folder: tempfile::TempDir,
    mounts: &'static [&'static str],
}

impl Root {
    fn new() -> Result<Root> {
        let clean = fixtures::clean_root()?;
        // On the file system of the models, so that they can be linked.
        let folder = tempfile::tempdir_in(cache())?;
        run(command("cp", &clean)
            .args(["--archive", "--reflink=auto", "."])
            .arg(folder.path()))?;
        Ok(Root {
            folder,
            mounts: mounts()?,
        })
    }

    /// A root with the programs of llama.cpp.
    pub fn with_llama_cpp() -> Result<Root> {
        let root = Root::new()?;
        fs::create_dir(root.path("opt"))?;
        run(command("cp", Path::new("/"))
            .args(["--archive", "--dereference"])
            .arg(llama_cpp(""))
            .arg(root.path("opt/llama.cpp")))?;
        Ok(root)
    }

    /// Where a path of the root is.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    /// A command in the root, with nothing of this environment.
    fn command(&self, words: &[&str]) -> Command {
        self.entered(ENTER, words)
    }

    fn entered(&self, enter: &str, words: &[&str]) -> Command {
        let mut inside = command("unshare", Path::new("/"));
        inside
            .args(self.mounts)
            .args(["sh", "-c", enter])
            .arg(self.folder.path())
            .args(words)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        inside
    }

    fn output(&self, words: &[&str]) -> Result<String> {
        output(&mut self.command(words)).with_context(|| words.join(" "))
    }

    /// All files but those of databases.
    fn files(&self) -> Result<BTreeSet<PathBuf>> {
        let mut files = files(self.folder.path())?;
        files.retain(|file| !DATABASES.iter().any(|kept| file.starts_with(kept)));
        Ok(files)
    }
}

/// Makes the packages, and uses them where nothing else is installed.
pub fn check() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let packages = same_bytes(folder.path())?;
    let root = Root::with_llama_cpp()?;
    let model = root.path("model.gguf");
    fs::hard_link(fixture("smollm2.gguf"), &model)
        .or_else(|_| fs::copy(fixture("smollm2.gguf"), &model).map(|_| ()))?;
    copy(&packages.deb, &root.path("llama-sidecar.deb"))?;

    let before = root.files()?;
    text(&root, &["dpkg", "--install", "/llama-sidecar.deb"])?;
    package(&root)?;
    let (written, _) = text(&root, &COMPLETE)?;
    programs(&root, "/usr", &written)?;
    container(&root, &written)?;
    c_program(&root)?;
    units(&root)?;
    service(&root)?;
    text(&root, &["dpkg", "--purge", "llama-sidecar"])?;
    let after = root.files()?;
    let differ: Vec<_> = before.symmetric_difference(&after).collect();
    ensure!(differ.is_empty(), "dpkg left or removed {differ:?}");
    let mut known = files(&root.path("var/lib/dpkg"))?.into_iter();
    let known = known.find(|file| file.to_string_lossy().contains("llama"));
    ensure!(known.is_none(), "dpkg kept {known:?}");
    archive(&root, &packages.archive, &written)?;
    wheel(&root, &packages.wheel)?;
    println!("the packages work on a clean root, and removing leaves nothing");
    Ok(())
}

/// Makes the packages twice, and fails unless their bytes are the same.
fn same_bytes(folder: &Path) -> Result<Packages> {
    let packages = dist::make(&folder.join("first"), Machine::HERE)?;
    let again = dist::make(&folder.join("second"), Machine::HERE)?;
    for (first, second) in packages.all().into_iter().zip(again.all()) {
        ensure!(
            fs::read(first)? == fs::read(second)?,
            "{} and {} differ: make the packages from the same files only",
            first.display(),
            second.display()
        );
    }
    Ok(packages)
}

/// What dpkg knows about the package, and its files.
fn package(root: &Root) -> Result<()> {
    let status = root.output(&["dpkg", "--status", "llama-sidecar"])?;
    for line in ["Status: install ok installed", "Depends: libc6 (>= 2."] {
        ensure!(status.contains(line), "expected '{line}' in {status}");
    }
    let damaged = root.output(&["dpkg", "--verify", "llama-sidecar"])?;
    ensure!(damaged.is_empty(), "{damaged}");
    for file in packaging::FILES {
        let file = match file.ends_with(".1") {
            true => format!("usr/{file}.gz"),
            false => format!(
                "usr/{}",
                file.replace("site-functions", "vendor-completions")
            ),
        };
        let path = root.path(&file);
        ensure!(path.exists(), "the package has no {file}");
        if file.ends_with(".gz") {
            run(command("gzip", Path::new("/")).arg("--test").arg(path))?;
        }
    }
    let documents = root.path("usr/share/doc/llama-sidecar");
    for file in [
        "copyright",
        "THIRD-PARTY.txt",
        "rust-standard-library.html",
        "README.md",
    ] {
        ensure!(documents.join(file).exists(), "the package has no {file}");
    }
    // The examples name files of the package.
    let path = Regex::new(r"/usr/(bin|lib)/\S+")?;
    for example in files(&documents.join("examples"))? {
        let text = fs::read_to_string(documents.join("examples").join(&example))?;
        for named in path.find_iter(&text) {
            let named = named.as_str();
            ensure!(
                root.path(named).exists(),
                "{} names {named}, which the package does not have",
                example.display()
            );
        }
    }
    Ok(())
}

/// The program, which writes a few tokens.
pub const COMPLETE: [&str; 12] = [
    "/opt/llama.cpp/llama-completion",
    "--model",
    "/model.gguf",
    "--prompt",
    "Once upon a time",
    "--predict",
    "8",
    "--temp",
    "0",
    "-no-cnv",
    "--threads",
    "2",
];

/// Runs the command, and llama.cpp with the drop-in, which writes what it wrote without.
fn programs(root: &Root, prefix: &str, expected: &str) -> Result<()> {
    let sidecar = format!("{prefix}/bin/llama-sidecar");
    let version = root.output(&[&sidecar, "--version"])?;
    ensure!(
        version == format!("llama-sidecar {}\n", env!("CARGO_PKG_VERSION")),
        "{version}"
    );
    let inspected = root.output(&[&sidecar, "inspect", "/model.gguf"])?;
    ensure!(inspected.contains("blk.0.attn_k.weight"), "{inspected}");
    let run = [sidecar.as_str(), "run", "--hotswap", "--"];
    let (written, log) = text(root, &[&run[..], &COMPLETE].concat())?;
    ensure!(written == expected, "'{written}' is not '{expected}'");
    ensure!(log.contains(" evaluations of /model.gguf"), "{log}");
    Ok(())
}

/// Runs llama.cpp with the variables of the example of a container.
fn container(root: &Root, expected: &str) -> Result<()> {
    let example = root.path("usr/share/doc/llama-sidecar/examples/Containerfile");
    let example = fs::read_to_string(example)?;
    let variables = example.lines().filter_map(|line| line.strip_prefix("ENV "));
    let variables: Vec<&str> = variables.chain(["LLAMA_SIDECAR_LOG=info"]).collect();
    let (written, log) = text(root, &[&["env"], &variables[..], &COMPLETE].concat())?;
    ensure!(written == expected, "'{written}' is not '{expected}'");
    ensure!(log.contains("llama-sidecar: info: watching "), "{log}");
    Ok(())
}

/// What a program wrote, and its log.
fn text(root: &Root, words: &[&str]) -> Result<(String, String)> {
    let output = root.command(words).output()?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {log}", words.join(" "));
    Ok((String::from_utf8(output.stdout)?, log))
}

/// Compiles a program against the files of the package, with what pkgconf reports there, and
/// runs it there.
fn c_program(root: &Root) -> Result<()> {
    let flags = root.output(&["pkgconf", "--cflags", "--libs", "llama_sidecar"])?;
    let program = root.path("inspect");
    run(command("gcc", &crate::run::root().join("c_examples"))
        .arg(format!("--sysroot={}", root.folder.path().display()))
        .args(["-std=gnu11", "inspect.c", "-o"])
        .arg(&program)
        .args(flags.split_whitespace()))?;
    let inspected = root.output(&["/inspect", "/model.gguf"])?;
    ensure!(inspected.contains("blk.0.attn_k.weight"), "{inspected}");
    Ok(fs::remove_file(program)?)
}

/// Checks the examples of units where systemd is.
fn units(root: &Root) -> Result<()> {
    if !exists("systemd-analyze") {
        println!("the examples of units are not checked: systemd-analyze is not installed");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let examples = root.path("usr/share/doc/llama-sidecar/examples");
    for file in files(&examples)? {
        // The unit must name a program of this machine.
        let sidecar = root.path("usr/bin/llama-sidecar");
        let text = fs::read_to_string(examples.join(&file))?
            .replace("/usr/bin/llama-sidecar", &sidecar.display().to_string());
        let copied = folder.path().join(file);
        fs::create_dir_all(copied.parent().context("a folder")?)?;
        fs::write(copied, text)?;
    }
    // It ends well also after it reported keys that it does not know.
    let verified = command("systemd-analyze", folder.path())
        .args(["verify", "--man=no"])
        .args(["./llama-server.service", "./llama-sidecar-metrics.service"])
        .output()?;
    let report = String::from_utf8_lossy(&verified.stderr).into_owned();
    ensure!(
        verified.status.success() && !report.contains("llama-"),
        "systemd-analyze reports: {report}"
    );
    Ok(())
}

/// Starts the service of the example where only its folder in /run and /tmp can be written.
fn service(root: &Root) -> Result<()> {
    let unit = root.path("usr/share/doc/llama-sidecar/examples/llama-server.service");
    let unit = fs::read_to_string(unit)?;
    ensure!(unit.contains("\nProtectSystem=strict\n"), "{unit}");
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="))
        .context("a command in the unit")?
        .replace("%t/%N", "/run/llama-server")
        .replace("/usr/local/bin/", "/opt/llama.cpp/")
        .replace("/srv/models/", "/")
        .replace("--port 8080", "--port 0 --offline");
    let run = |words: &[&str]| output(&mut root.entered(ENTER_READ_ONLY, words));
    ensure!(run(&["touch", "/etc/file"]).is_err(), "/etc can be written");
    let socket = "/run/llama-server/sidecar.sock";
    let started: Vec<&str> = start.split(' ').collect();
    let status = run(&[&["sh", "-c", SERVICE, socket], &started[..]].concat())?;
    ensure!(
        status.contains("/model.gguf"),
        "the service has no status: {status}"
    );
    Ok(())
}

/// Unpacks the archive and uses what is in it.
fn archive(root: &Root, archive: &Path, expected: &str) -> Result<()> {
    run(command("tar", &root.path("opt"))
        .arg("--extract")
        .arg("--file")
        .arg(archive))?;
    let name = archive.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!("/opt/{}", name.trim_end_matches(".tar.gz"));
    for file in packaging::FILES {
        let path = root.path(&prefix).join(file);
        ensure!(path.exists(), "the archive has no {file}");
    }
    programs(root, &prefix, expected)
}

/// Installs the wheel with the root's own pip, and uses it as a new user does: a server, a swap and a trace.
fn wheel(root: &Root, wheel: &Path) -> Result<()> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    copy(wheel, &root.path(&name))?;
    let mixture = root.path("mixture.gguf");
    fs::copy(fixture("small-moe.gguf"), &mixture)?;
    for script in ["first_use.py", "programs.py"] {
        let from = crate::run::root().join("python/tests").join(script);
        copy(&from, &root.path(script))?;
    }
    let began = std::time::Instant::now();
    let pip = ["pip", "install", "--no-index", "--break-system-packages"];
    root.output(&[&["python3", "-m"], &pip[..], &[&format!("/{name}")]].concat())?;
    let installed = began.elapsed().as_secs_f64();
    let server = "/opt/llama.cpp/llama-server";
    let used = root.output(&["python3", "/first_use.py", server, "/mixture.gguf"])?;
    println!("pip installed the wheel in {installed:.1} s; after that:\n{used}");
    let version = root.output(&["/usr/local/bin/llama-sidecar", "--version"])?;
    ensure!(version.starts_with("llama-sidecar "), "{version}");
    root.output(&[
        "python3",
        "-m",
        "pip",
        "uninstall",
        "--yes",
        "--break-system-packages",
        "llama-sidecar",
    ])?;
    Ok(())
}
