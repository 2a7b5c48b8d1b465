//! Reachable hooks: the interposed functions that the libraries of a program call through the
//! dynamic loader, and why other hooks are not reachable.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use goblin::elf::Elf;
use goblin::elf::header::{EM_AARCH64, EM_X86_64};
use goblin::elf::reloc::{
    R_AARCH64_ABS64, R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT, R_X86_64_64, R_X86_64_GLOB_DAT,
    R_X86_64_JUMP_SLOT,
};
use goblin::elf::sym::{STB_LOCAL, Sym};
use memmap2::Mmap;

/// Functions that ggml also calls from inside its own libraries, in llama.cpp and in
/// ik_llama.cpp.
const CALLED_BY_GGML: [&str; 8] = [
    "ggml_free",
    "ggml_backend_tensor_alloc",
    "ggml_backend_buft_alloc_buffer",
    "ggml_backend_buffer_free",
    "ggml_backend_buffer_get_size",
    "ggml_backend_graph_compute_async",
    "ggml_backend_sched_alloc_graph",
    "ggml_backend_sched_synchronize",
];

/// Functions that ggml's scheduler calls while it copies experts. Post-fetch needs all of them.
const CALLED_BY_SCHEDULER: [&str; 5] = [
    "ggml_backend_offload_op",
    "ggml_backend_tensor_get_async",
    "ggml_backend_synchronize",
    "ggml_backend_tensor_set_async",
    "ggml_backend_graph_compute_async",
];

/// This machine in ELF files, and the relocations of words that hold the address of a function.
const MACHINE: (u16, [u32; 3]) = if cfg!(target_arch = "aarch64") {
    let addresses = [R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64];
    (EM_AARCH64, addresses)
} else {
    (
        EM_X86_64,
        [R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64],
    )
};

/// A function of the library that has the scheduler.
const SCHEDULER: &str = "ggml_backend_sched_graph_compute_async";

/// The function that the drop-in defines itself where no library defines it.
const DEFINED_BY_DROP_IN: &str = "llama_reload_changed_tensors";

/// The interposed functions in one file of a program.
struct Library {
    path: PathBuf,
    /// Functions that the file exports.
    defines: BTreeSet<String>,
    /// Functions that the file calls through its procedure linkage table or global offset table.
    calls: BTreeSet<String>,
    /// Functions in the file that it does not export.
    inside: BTreeSet<String>,
}

/// Returns the files that a process has mapped as executable.
pub fn mapped(pid: u32) -> BTreeSet<PathBuf> {
    executable(&std::fs::read(format!("/proc/{pid}/maps")).unwrap_or_default())
}

/// Returns the files that are mapped as executable, by the text of `/proc/PID/maps`.
fn executable(maps: &[u8]) -> BTreeSet<PathBuf> {
    let path = |line: &[u8]| {
        // address, permissions, offset, device, inode, path
        let mut fields = line.split(|&byte| byte == b' ');
        let path = &line[line.iter().position(|&byte| byte == b'/')?..];
        let is_executable = fields.nth(1)?.contains(&b'x');
        is_executable.then(|| PathBuf::from(OsStr::from_bytes(path)))
    };
    maps.split(|&byte| byte == b'\n').filter_map(path).collect()
}

/// Returns a line with the number of reachable hooks of a program that ggml is linked into, and a line for each cause
/// why others are not reachable. `functions` are those hooks, each with the cause if it is not reachable.
pub fn describe_linked(functions: &[(String, Option<String>)]) -> Vec<String> {
    let mut causes = Causes::default();
    let mut reached = functions.len();
    for (name, why) in functions {
        let Some(why) = why else { continue };
        // The drop-in defines this one, and the program calls none.
        if name != DEFINED_BY_DROP_IN {
            causes.add(why.clone(), name);
            reached -= 1;
        }
    }
    let first = format!(
        "{reached} of {} reachable, at the functions: ggml is linked into the program",
        functions.len()
    );
    [first].into_iter().chain(causes.lines()).collect()
}

/// Why hooks are not reachable: each cause, and the functions that it affects.
#[derive(Default)]
struct Causes<'a>(Vec<(String, Vec<&'a str>)>);

impl<'a> Causes<'a> {
    fn add(&mut self, cause: String, name: &'a str) {
        match self.0.iter_mut().find(|(known, _)| *known == cause) {
            Some((_, names)) => names.push(name),
            None => self.0.push((cause, vec![name])),
        }
    }

    fn lines(&self) -> impl Iterator<Item = String> {
        let line = |(cause, names): &(String, Vec<&str>)| {
            format!("not reachable: {}: {cause}", names.join(", "))
        };
        self.0.iter().map(line)
    }
}

/// Returns a line with the number of reachable hooks, and a line for each cause why others are
/// not reachable.
pub fn describe(preload: &Path, files: &BTreeSet<PathBuf>) -> Vec<String> {
    let Some(hooks) = exports(preload) else {
        return Vec::new();
    };
    let libraries = libraries(preload, files, &hooks);
    if libraries.is_empty() {
        return Vec::new();
    }
    let exported = |hook: &String| {
        libraries
            .iter()
            .find(|library| library.defines.contains(hook))
    };
    let called = |hook: &String| libraries.iter().any(|library| library.calls.contains(hook));
    let is_reached =
        |hook: &&String| called(hook) && (*hook == DEFINED_BY_DROP_IN || exported(hook).is_some());
    let (reached, rest): (Vec<&String>, Vec<&String>) = hooks.iter().partition(is_reached);
    let mut lines = vec![format!("{} of {} reachable", reached.len(), hooks.len())];
    let mut causes = Causes::default();
    let mut nowhere = Vec::new();
    for hook in rest {
        let Some(library) = exported(hook) else {
            if !libraries
                .iter()
                .any(|library| library.inside.contains(hook))
            {
                nowhere.push(hook.as_str());
            }
            continue;
        };
        let cause = format!(
            "no library calls it through the loader: the program finds it with dlsym, or {} binds its own calls (-Bsymbolic)",
            library.name()
        );
        causes.add(cause, hook);
    }
    for library in libraries
        .iter()
        .filter(|library| !library.inside.is_empty())
    {
        let cause = format!(
            "linked into {} and not exported: use a build with shared libraries (cmake -DBUILD_SHARED_LIBS=ON)",
            library.name()
        );
        let names = library.inside.iter().map(String::as_str);
        causes.0.push((cause, names.collect()));
    }
    lines.extend(causes.lines());
    if !nowhere.is_empty() {
        let what = match reached.is_empty() {
            true => "in no library",
            false => "this ggml does not have",
        };
        lines.push(format!("{what}: {}", nowhere.join(", ")));
    }
    for library in &libraries {
        let bound: Vec<_> = CALLED_BY_GGML
            .into_iter()
            .filter(|name| library.defines.contains(*name) && !library.calls.contains(*name))
            .filter(|name| reached.iter().any(|reached| reached == name))
            .collect();
        if !bound.is_empty() {
            lines.push(format!(
                "not reachable from inside {}: {}: it binds its own calls; use a build without -Bsymbolic",
                library.name(),
                bound.join(", ")
            ));
        }
    }
    lines
}

/// Returns why calls of the scheduler cannot be interposed, and the next step; `None` if they can,
/// or if no library has a scheduler.
pub fn scheduler_obstacle(preload: &Path, files: &BTreeSet<PathBuf>) -> Option<String> {
    let names = CALLED_BY_SCHEDULER.into_iter().chain([SCHEDULER]);
    let names = names.map(str::to_owned).collect();
    let libraries = libraries(preload, files, &names);
    let schedulers = libraries
        .iter()
        .filter(|library| library.defines.contains(SCHEDULER));
    let mut obstacles = schedulers.filter_map(|library| {
        let missing = CALLED_BY_SCHEDULER
            .into_iter()
            .filter(|name| !library.calls.contains(*name));
        let missing: Vec<_> = missing.collect();
        (!missing.is_empty()).then(|| {
            format!(
                "the scheduler in {} does not call {} through the loader: use a build without -Bsymbolic and without link-time optimisation, of a llama.cpp from August 2025 or later",
                library.name(),
                missing.join(", ")
            )
        })
    });
    obstacles.next()
}

/// Returns the files of a program that have functions of these names, without the drop-in.
fn libraries(preload: &Path, files: &BTreeSet<PathBuf>, names: &BTreeSet<String>) -> Vec<Library> {
    let same = |path: &PathBuf| std::fs::canonicalize(path).ok();
    let ours = std::fs::canonicalize(preload).ok();
    let others = files.iter().filter(|path| same(path) != ours);
    others
        .filter_map(|path| Library::of(path, &map(path)?, names))
        .collect()
}

impl Library {
    /// Returns what a file has; `None` if it has none of the hooks, or is not an ELF file for this
    /// machine.
    fn of(path: &Path, bytes: &[u8], hooks: &BTreeSet<String>) -> Option<Library> {
        let elf = Elf::parse(bytes).ok()?;
        let (machine, addresses) = MACHINE;
        if elf.header.e_machine != machine {
            return None;
        }
        let hook =
            |name: Option<&str>| name.filter(|name| hooks.contains(*name)).map(str::to_owned);
        let exported = |symbol: &Sym| !symbol.is_import() && symbol.st_bind() != STB_LOCAL;
        let dynamic = |symbol: &Sym| hook(elf.dynstrtab.get_at(symbol.st_name));
        let relocations = elf.pltrelocs.iter().chain(elf.dynrelas.iter());
        let calls = relocations
            .filter(|to| addresses.contains(&to.r_type))
            .filter_map(|to| dynamic(&elf.dynsyms.get(to.r_sym)?));
        let defines = elf.dynsyms.iter().filter(exported);
        let defines: BTreeSet<_> = defines.filter_map(|symbol| dynamic(&symbol)).collect();
        let defined = elf.syms.iter().filter(|symbol| symbol.st_shndx != 0);
        let inside = defined.filter_map(|symbol| hook(elf.strtab.get_at(symbol.st_name)));
        let library = Library {
            path: path.to_owned(),
            calls: calls.collect(),
            inside: inside.filter(|name| !defines.contains(name)).collect(),
            defines,
        };
        let concerned = [&library.defines, &library.calls, &library.inside];
        concerned
            .iter()
            .any(|names| !names.is_empty())
            .then_some(library)
    }

    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }
}

/// Returns the functions that a library exports.
fn exports(library: &Path) -> Option<BTreeSet<String>> {
    let bytes = map(library)?;
    let elf = Elf::parse(&bytes).ok()?;
    let exported = elf
        .dynsyms
        .iter()
        .filter(|symbol| !symbol.is_import() && symbol.is_function());
    let names = exported.filter_map(|symbol| elf.dynstrtab.get_at(symbol.st_name));
    Some(names.map(str::to_owned).collect())
}

/// Maps a file: libraries with GPU kernels are too large to read.
fn map(path: &Path) -> Option<Mmap> {
    let file = File::open(path).ok()?;
    // SAFETY: the file is a program or library in use, which installers replace as a whole
    // and do not truncate; the mapping outlives its readers.
    unsafe { Mmap::map(&file) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, RandomState};

    #[test]
    fn paths_of_mapped_files_are_bytes() {
        let maps = b"00400000-00452000 r-xp 00000000 08:02 173521 /caf\xe9/a b.so\n\
            00651000-00652000 r--p 00051000 08:02 173522 /models/caf\xe9.gguf\n\
            7ffc0000-7ffc1000 r-xp 00000000 00:00 0 [vdso]\n";
        let expected = PathBuf::from(OsStr::from_bytes(b"/caf\xe9/a b.so"));
        assert_eq!(executable(maps), BTreeSet::from([expected]));
    }

    #[test]
    fn damaged_files_are_read_or_refused() {
        let long = std::env::var_os("SIDECAR_LONG_TESTS").is_some();
        let files = mapped(std::process::id());
        let small = files
            .iter()
            .filter_map(|path| Some((map(path)?.len(), path)));
        let (_, path) = small.min().expect("the loader");
        let whole = std::fs::read(path).expect("a library");
        let elf = Elf::parse(&whole).expect("a library");
        let names = elf
            .dynsyms
            .iter()
            .filter_map(|of| elf.dynstrtab.get_at(of.st_name));
        let names: BTreeSet<String> = names.map(str::to_owned).collect();
        let found = Library::of(path, &whole, &names).expect("its functions");
        assert!(found.defines.len() > 10, "{:?}", found.defines);
        let fixed = RandomState::new();
        let mut refused = 0;
        for round in 0..if long { 1_000_000 } else { 1000 } {
            let random = |which: u32| fixed.hash_one((round, which)) as usize;
            let mut damaged = whole.clone();
            if random(0) % 4 == 0 {
                damaged.truncate(random(1) % whole.len());
            }
            for damage in 0..1 + random(2) % 4 {
                let random = |which| random(10 * (1 + damage as u32) + which);
                // Mostly where headers and tables are.
                let most = [64, 1024, 16384, damaged.len()][random(0) % 4];
                let at = random(1) % most.min(damaged.len()).max(1);
                let value = [0, u64::MAX, random(2) as u64, 1 << (random(3) % 64)][random(4) % 4];
                let bytes = value.to_le_bytes().into_iter().take(1 << (random(5) % 4));
                for (to, byte) in damaged.iter_mut().skip(at).zip(bytes) {
                    *to = byte;
                }
            }
            refused += usize::from(Library::of(path, &damaged, &names).is_none());
        }
        assert!(refused > 10, "{refused}");
    }
}
