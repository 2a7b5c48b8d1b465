//! Executable files: search, format, and whether the drop-in can be loaded into them.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use goblin::elf::Elf;
use goblin::elf::header::machine_to_str;
use rustix::process::geteuid;
use sidecar_core::text;

use crate::words::quoted;

/// An executable file.
pub struct Executable {
    pub path: PathBuf,
    pub kind: Kind,
    /// Whether the file runs with the rights of another user, where the loader ignores LD_PRELOAD.
    set_uid: bool,
}

/// Format of an executable file.
pub enum Kind {
    /// A script, with the interpreter in its first line.
    Script(String),
    Elf(Image),
    /// GGUF, which is no program.
    Model,
    /// Another format.
    Unknown,
}

/// Properties of an ELF file.
pub struct Image {
    pub machine: u16,
    /// The loader; none for a statically linked program.
    pub interpreter: Option<String>,
    /// The needed libraries.
    pub libraries: Vec<String>,
}

impl Executable {
    /// Finds a program in `PATH`, as a shell does.
    pub fn find(word: &OsStr) -> Result<Executable> {
        let path = resolve(word)?;
        let found = std::fs::metadata(&path)
            .with_context(|| format!("cannot run {}: check the path", text::path(&path)))?;
        // What is no file may wait for a writer.
        let kind = found.is_file().then(|| kind(&path)).flatten();
        let kind = kind.unwrap_or(Kind::Unknown);
        ensure!(
            !matches!(kind, Kind::Model),
            "{} is a model: put the program before it, as in llama-server -m {}",
            text::path(&path),
            text::line(&quoted(path.as_os_str()))
        );
        if !is_executable(&path) {
            bail!(
                "{} is not executable: pass a program, or make the file executable with chmod +x",
                text::path(&path)
            );
        }
        Ok(Executable {
            kind,
            set_uid: found.mode() & 0o4000 != 0 && found.uid() != geteuid().as_raw(),
            path,
        })
    }

    /// Returns the libraries of llama.cpp that the loader finds for the program.
    pub fn libraries(&self) -> Result<Vec<PathBuf>> {
        let output = Command::new(&self.path)
            .env("LD_TRACE_LOADED_OBJECTS", "1")
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", text::path(&self.path)))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let path = |line: &str| {
            let path = line.split_once(" => ")?.1.split_once(" (")?.0;
            let name = Path::new(path).file_name()?.to_string_lossy();
            (name.contains("ggml") || name.contains("llama")).then(|| PathBuf::from(path))
        };
        let mut found: Vec<PathBuf> = text.lines().filter_map(path).collect();
        // Backends that ggml loads at run time are beside its library.
        let ggml = found
            .iter()
            .find(|path| path.to_string_lossy().contains("libggml"));
        if let Some(folder) = ggml.and_then(|path| path.parent()) {
            let beside = std::fs::read_dir(folder).into_iter().flatten().flatten();
            let is_backend = |name: &str| name.starts_with("libggml-") && name.ends_with(".so");
            let backends = beside.map(|entry| entry.path());
            found.extend(backends.filter(|path| {
                path.file_name()
                    .is_some_and(|name| is_backend(&name.to_string_lossy()))
            }));
        }
        found.sort();
        found.dedup();
        Ok(found)
    }

    /// Returns why the drop-in cannot be loaded into the program, and the next step.
    pub fn obstacle(&self, preload: &Path) -> Option<String> {
        let name = text::path(&self.path);
        if self.set_uid {
            return Some(format!(
                "{name} is set-uid, so the loader ignores LD_PRELOAD: run a copy without the set-uid bit"
            ));
        }
        let Kind::Elf(image) = &self.kind else {
            return None;
        };
        let Some(interpreter) = &image.interpreter else {
            return Some(format!(
                "{name} is linked statically, where LD_PRELOAD does nothing: use a build with shared libraries (cmake -DBUILD_SHARED_LIBS=ON)"
            ));
        };
        if interpreter.contains("ld-musl") {
            return Some(format!(
                "{name} is built for musl, and the drop-in for glibc: use a build for glibc"
            ));
        }
        match kind(preload) {
            Some(Kind::Elf(ours)) if ours.machine != image.machine => Some(format!(
                "{name} is built for {}, and the drop-in for {}: use builds for the same machine",
                machine_to_str(image.machine),
                machine_to_str(ours.machine)
            )),
            _ => None,
        }
    }
}

impl Kind {
    /// Describes the format.
    pub fn describe(&self) -> String {
        match self {
            Kind::Script(first) => format!("a script for {first}"),
            Kind::Model => "a model".into(),
            Kind::Unknown => "neither ELF nor a script".into(),
            Kind::Elf(image) => {
                let machine = machine_to_str(image.machine);
                let linked = match image.interpreter {
                    Some(_) => "dynamically",
                    None => "statically",
                };
                let ggml =
                    |library: &&String| library.contains("llama") || library.contains("ggml");
                let ours: Vec<_> = image.libraries.iter().filter(ggml).cloned().collect();
                match ours.is_empty() {
                    true => format!("{machine}, {linked} linked, needs no llama.cpp library"),
                    false => format!("{machine}, {linked} linked, needs {}", ours.join(", ")),
                }
            }
        }
    }
}

/// Whether a program is this one, which starts others: it chooses what is on in them.
pub fn is_ours(word: &OsStr) -> bool {
    let path = resolve(word).ok().and_then(|path| path.canonicalize().ok());
    path.is_some() && path == std::env::current_exe().ok()
}

/// Returns the path of a program, as a shell finds it.
fn resolve(word: &OsStr) -> Result<PathBuf> {
    match Path::new(word).components().count() {
        0 => bail!("expected a command"),
        1 => {
            let all = std::env::var_os("PATH").unwrap_or_default();
            let places = std::env::split_paths(&all).map(|place| place.join(word));
            let mut runnable = places.filter(|path| is_executable(path));
            runnable.next().with_context(|| {
                format!(
                    "{} is not in PATH: pass the path of the program, or install it",
                    text::path(Path::new(word))
                )
            })
        }
        _ => Ok(PathBuf::from(word)),
    }
}

fn is_executable(path: &Path) -> bool {
    let found = std::fs::metadata(path);
    found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Reads the format of a file; `None` if the file cannot be read.
fn kind(path: &Path) -> Option<Kind> {
    /// Size of the largest file that is read.
    const MOST: u64 = 1 << 30;
    let mut start = [0; 4];
    let mut file = File::open(path).ok()?;
    file.read_exact(&mut start).ok()?;
    if start.starts_with(b"#!") {
        let mut line = [0; 256];
        let len = file.read(&mut line).ok()?;
        let text = [&start[2..], &line[..len]].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        let first = text.lines().next().unwrap_or_default();
        return Some(Kind::Script(first.trim().to_owned()));
    }
    if &start == b"GGUF" {
        return Some(Kind::Model);
    }
    if &start != b"\x7fELF" || file.metadata().ok()?.len() > MOST {
        return Some(Kind::Unknown);
    }
    let bytes = std::fs::read(path).ok()?;
    let elf = Elf::parse(&bytes).ok()?;
    Some(Kind::Elf(Image {
        machine: elf.header.e_machine,
        interpreter: elf.interpreter.map(str::to_owned),
        libraries: elf
            .libraries
            .iter()
            .map(|name| (*name).to_owned())
            .collect(),
    }))
}

/// Leads to the root where the loader of glibc has put the folder of its libraries in place of `$LIB` (ld.so(8)). The loader of
/// musl looks for a folder of this name, finds none, and goes on; by its path, it would load the drop-in, miss functions of
/// glibc, and end the program.
const ROOT_OF_GLIBC: &str = "/usr/$LIB/../../../../../..";

/// Returns whether the loader follows [`ROOT_OF_GLIBC`] here: to its own library, which is loaded already.
fn has_root_of_glibc() -> bool {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    let function = libc::gnu_get_libc_version as *const libc::c_void;
    // SAFETY: dladdr fills the struct, whose name is a C string of a loaded object; NOLOAD loads nothing.
    unsafe {
        if libc::dladdr(function, found.as_mut_ptr()) == 0 {
            return false;
        }
        let path = CStr::from_ptr(found.assume_init().dli_fname).to_bytes();
        let path = CString::new([ROOT_OF_GLIBC.as_bytes(), path].concat());
        path.is_ok_and(|path| {
            !libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY).is_null()
        })
    }
}

/// Returns `LD_PRELOAD` for a program: the drop-in before the libraries that the variable has now.
pub fn ld_preload(drop_in: &Path) -> OsString {
    let mut list = OsString::new();
    if drop_in.is_absolute() && has_root_of_glibc() {
        list.push(ROOT_OF_GLIBC);
    }
    list.push(drop_in);
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    list
}

/// Returns the path with which this program was executed, which is known without /proc.
fn executed() -> PathBuf {
    // SAFETY: the kernel left the address of a string (getauxval(3)), or 0 stands for none.
    let path = unsafe {
        let address = libc::getauxval(libc::AT_EXECFN) as *const libc::c_char;
        if address.is_null() {
            c""
        } else {
            CStr::from_ptr(address)
        }
    };
    PathBuf::from(OsStr::from_bytes(path.to_bytes()))
}

/// Returns the path of the drop-in library, relative to this program: installed, or in the build
/// tree.
pub fn preload_library() -> Result<PathBuf> {
    const NAME: &str = "libllama_sidecar_preload.so";
    let program = std::env::current_exe().or_else(|_| executed().canonicalize());
    let program = program.context("cannot find the path of this program")?;
    let folder = program
        .parent()
        .context("the path of this program has no folder")?;
    let places = ["../lib", "../dropin", "."];
    for place in places {
        if let Ok(found) = folder.join(place).join(NAME).canonicalize() {
            return Ok(found);
        }
    }
    bail!(
        "{NAME} is not in {}: install it with 'cargo xtask install --prefix DIR' and run DIR/bin/llama-sidecar",
        text::path(&folder.join("../lib"))
    )
}
