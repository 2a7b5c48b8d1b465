//! Functions of a program that ggml is linked into: they are in the symbol table of its file, and the loader knows none
//! of them.
//!
//! The table is in the file alone. It is read when this library is loaded, and only from a file whose program headers
//! are those of the running program. A program without this table (`strip`) has no functions here.

use std::ffi::{CStr, CString};

use libc::{Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr, Elf64_Sym};
use memmap2::Mmap;
use once_cell::sync::OnceCell;
use sidecar_core::descriptors;

use crate::loader::view::Memory;

/// A function of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    name: CString,
    /// The address of its first instruction.
    pub address: usize,
    /// How many bytes it has.
    pub bytes: usize,
}

#[cfg(test)]
impl Function {
    pub fn new(address: usize, bytes: usize) -> Function {
        let name = CString::default();
        Function {
            name,
            address,
            bytes,
        }
    }
}

/// The functions of the program, by name.
static PROGRAM: OnceCell<Vec<Function>> = OnceCell::new();

/// What names of functions of llama.cpp begin with.
const PREFIXES: [&[u8]; 3] = [b"ggml_", b"gguf_", b"llama_"];
/// A function without which there is no ggml.
const GGML: &CStr = c"ggml_init";
/// More functions than any llama.cpp has: a damaged table has no end.
const MOST: usize = 1 << 16;

/// Reads the functions of the program, with these program headers at this base. Returns whether it has ggml.
pub fn read(headers: &[Elf64_Phdr], base: usize) -> bool {
    let found = || {
        let file = descriptors::open(std::fs::File::options().read(true), "/proc/self/exe").ok()?;
        // SAFETY: the kernel refuses writes to the file of a running program.
        let file = unsafe { Mmap::map(&file) }.ok()?;
        functions(Memory::of(&file), headers, base)
    };
    let mut found = found().unwrap_or_default();
    found.sort_by(|a, b| a.name.cmp(&b.name));
    // Two copies of ggml in one program, whose functions have the same names.
    found.dedup_by(|next, kept| {
        let same = next.name == kept.name;
        if same && next.address != kept.address {
            kept.address = 0;
        }
        same
    });
    PROGRAM.set(found).is_ok() && function(GGML).is_some()
}

/// Returns the function of the program of this name, if there is one.
pub fn function(name: &CStr) -> Option<&'static Function> {
    let functions = PROGRAM.get()?;
    let at = functions.binary_search_by(|known| known.name.as_c_str().cmp(name));
    let found = &functions[at.ok()?];
    (found.address != 0).then_some(found)
}

/// Returns the functions of llama.cpp in the symbol table of a file; `None` if it is not that of these program headers.
fn functions(file: Memory, headers: &[Elf64_Phdr], base: usize) -> Option<Vec<Function>> {
    const SHT_SYMTAB: u32 = 2;
    const STT_FUNC: u8 = 2;
    let header: Elf64_Ehdr = file.read(0)?;
    let parts = file.part(header.e_phoff, u64::MAX)?.entries::<Elf64_Phdr>();
    let key = |of: &Elf64_Phdr| (of.p_type, of.p_vaddr, of.p_memsz);
    if !parts
        .take(headers.len())
        .map(|of| key(&of))
        .eq(headers.iter().map(key))
    {
        return None;
    }
    let sections = file.part(header.e_shoff, u64::MAX)?;
    let mut all = sections.entries::<Elf64_Shdr>().take(header.e_shnum.into());
    let symbols = all.find(|section| section.sh_type == SHT_SYMTAB)?;
    let strings: Elf64_Shdr = sections.entry(symbols.sh_link as usize)?;
    let strings = file.part(strings.sh_offset, strings.sh_size)?;
    let symbols = file.part(symbols.sh_offset, symbols.sh_size)?;
    let is_function = |of: &Elf64_Sym| of.st_info & 15 == STT_FUNC && of.st_value != 0;
    let functions = symbols.entries::<Elf64_Sym>().filter(is_function);
    let functions = functions.filter_map(|symbol| {
        let at = symbol.st_name as usize;
        let is_named = |prefix: &&[u8]| strings.slice(at, prefix.len()) == Some(prefix);
        PREFIXES.iter().find(|prefix| is_named(prefix))?;
        Some(Function {
            name: strings.text(at).to_owned(),
            address: base.wrapping_add(symbol.st_value as usize),
            bytes: symbol.st_size as usize,
        })
    });
    Some(functions.take(MOST).collect())
}
