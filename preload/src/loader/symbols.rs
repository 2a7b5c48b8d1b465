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
    /// Whether a function of another name has the same code: the linker keeps one of several that are equal.
    pub is_shared: bool,
}

#[cfg(test)]
impl Function {
    pub fn new(address: usize, bytes: usize) -> Function {
        Function {
            name: CString::default(),
            address,
            bytes,
            is_shared: false,
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

/// Reads the functions of the program, with these program headers at this base, if it has ggml and they are wanted.
/// Returns whether it did. Allocates nothing in other programs.
pub fn read(headers: &[Elf64_Phdr], base: usize, are_wanted: impl FnOnce() -> bool) -> bool {
    let found = || {
        let file = descriptors::open(std::fs::File::options().read(true), "/proc/self/exe").ok()?;
        // SAFETY: the kernel refuses writes to the file of a running program.
        let file = unsafe { Mmap::map(&file) }.ok()?;
        let table = Table::of(Memory::of(&file), headers)?;
        let has_ggml = table.functions().any(|(name, _)| name == GGML);
        (has_ggml && are_wanted()).then(|| by_name(&table, base))
    };
    found().is_some_and(|found| PROGRAM.set(found).is_ok())
}

fn by_name(table: &Table, base: usize) -> Vec<Function> {
    let functions = table.functions().take(MOST);
    let mut found: Vec<_> = functions
        .map(|(name, symbol)| Function {
            name: name.to_owned(),
            address: base.wrapping_add(symbol.st_value as usize),
            bytes: symbol.st_size as usize,
            is_shared: false,
        })
        .collect();
    found.sort_by_key(|function| function.address);
    for symbol in table.symbols() {
        let address = base.wrapping_add(symbol.st_value as usize);
        let first = found.partition_point(|function| function.address < address);
        let same = found[first..].iter_mut();
        for function in same.take_while(|function| function.address == address) {
            function.is_shared |= function.name.as_c_str() != table.name(&symbol);
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    // Two copies of ggml in one program, whose functions have the same names.
    found.dedup_by(|next, kept| {
        let same = next.name == kept.name;
        if same && next.address != kept.address {
            kept.address = 0;
        }
        same
    });
    found
}

/// Returns the function of the program of this name, if there is one.
pub fn function(name: &CStr) -> Option<&'static Function> {
    let functions = PROGRAM.get()?;
    let at = functions.binary_search_by(|known| known.name.as_c_str().cmp(name));
    let found = &functions[at.ok()?];
    (found.address != 0).then_some(found)
}

/// The symbol table of a file.
struct Table {
    symbols: Memory,
    strings: Memory,
}

impl Table {
    /// Returns the table of a file; `None` if it has none, or not these program headers.
    fn of(file: Memory, headers: &[Elf64_Phdr]) -> Option<Table> {
        const SHT_SYMTAB: u32 = 2;
        let header: Elf64_Ehdr = file.read(0)?;
        let parts = file.part(header.e_phoff, u64::MAX)?;
        let parts = parts.entries::<Elf64_Phdr>().take(headers.len());
        let key = |of: &Elf64_Phdr| (of.p_type, of.p_vaddr, of.p_memsz);
        if !parts.map(|of| key(&of)).eq(headers.iter().map(key)) {
            return None;
        }
        let sections = file.part(header.e_shoff, u64::MAX)?;
        let mut all = sections.entries::<Elf64_Shdr>().take(header.e_shnum.into());
        let symbols = all.find(|section| section.sh_type == SHT_SYMTAB)?;
        let strings: Elf64_Shdr = sections.entry(symbols.sh_link as usize)?;
        Some(Table {
            symbols: file.part(symbols.sh_offset, symbols.sh_size)?,
            strings: file.part(strings.sh_offset, strings.sh_size)?,
        })
    }

    /// Returns the functions of the file.
    fn symbols(&self) -> impl Iterator<Item = Elf64_Sym> {
        const STT_FUNC: u8 = 2;
        let symbols = self.symbols.entries::<Elf64_Sym>();
        symbols.filter(|of| of.st_info & 15 == STT_FUNC && of.st_value != 0)
    }

    fn name(&self, symbol: &Elf64_Sym) -> &CStr {
        self.strings.text(symbol.st_name as usize)
    }

    /// Returns the functions of llama.cpp.
    fn functions(&self) -> impl Iterator<Item = (&CStr, Elf64_Sym)> {
        let is_of_llama = |symbol: &Elf64_Sym| {
            let at = symbol.st_name as usize;
            let begins = |prefix: &&[u8]| self.strings.slice(at, prefix.len()) == Some(prefix);
            PREFIXES.iter().any(begins)
        };
        let functions = self.symbols().filter(is_of_llama);
        functions.map(|symbol| (self.name(&symbol), symbol))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{BuildHasher, RandomState};

    /// Bytes of a file with a table of four functions.
    struct Small(Vec<u8>);

    impl Small {
        const SECTIONS: usize = 128;
        const SYMBOLS: usize = 320;
        const STRINGS: usize = 440;
        const NAMES: &[u8] = b"\0ggml_init\0ggml_free\0llama_decode\0main\0";

        fn put<T: Copy>(&mut self, at: usize, value: T) {
            // SAFETY: a struct of numbers, without padding.
            let bytes = unsafe {
                std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>())
            };
            self.0[at..][..bytes.len()].copy_from_slice(bytes);
        }

        fn new() -> (Small, [Elf64_Phdr; 1]) {
            // SAFETY: structs of numbers.
            let (mut header, mut part, empty): (Elf64_Ehdr, Elf64_Phdr, Elf64_Shdr) =
                unsafe { std::mem::zeroed() };
            let mut file = Small(vec![0; Small::STRINGS + Small::NAMES.len()]);
            header.e_phoff = 64;
            header.e_shoff = Small::SECTIONS as u64;
            header.e_shnum = 3;
            file.put(0, header);
            (part.p_type, part.p_memsz) = (libc::PT_LOAD, 1 << 20);
            file.put(64, part);
            let table = Elf64_Shdr {
                sh_type: 2,
                sh_offset: Small::SYMBOLS as u64,
                sh_size: (Small::STRINGS - Small::SYMBOLS) as u64,
                sh_link: 2,
                ..empty
            };
            file.put(Small::SECTIONS + 64, table);
            let strings = Elf64_Shdr {
                sh_type: 3,
                sh_offset: Small::STRINGS as u64,
                sh_size: Small::NAMES.len() as u64,
                ..empty
            };
            file.put(Small::SECTIONS + 128, strings);
            for (number, name) in [1, 11, 21, 34].into_iter().enumerate() {
                // SAFETY: a struct of numbers.
                let mut symbol: Elf64_Sym = unsafe { std::mem::zeroed() };
                (symbol.st_name, symbol.st_info) = (name, 2);
                (symbol.st_value, symbol.st_size) = (0x1000 * (number as u64 + 1), 64);
                file.put(Small::SYMBOLS + 24 * (number + 1), symbol);
            }
            file.0[Small::STRINGS..].copy_from_slice(Small::NAMES);
            (file, [part])
        }
    }

    #[test]
    fn a_program_without_llama_cpp_has_none_of_its_functions() {
        let file = std::fs::read("/proc/self/exe").expect("this program");
        let header: Elf64_Ehdr = Memory::of(&file).read(0).expect("a header");
        let headers = Memory::of(&file).part(header.e_phoff, u64::MAX);
        let headers = headers.expect("in the file").entries::<Elf64_Phdr>();
        let headers: Vec<_> = headers.take(header.e_phnum.into()).collect();
        let table = Table::of(Memory::of(&file), &headers).expect("a table");
        assert_eq!(by_name(&table, 0), []);
        assert!(Table::of(Memory::of(&file[..file.len() / 2]), &headers).is_none());
    }

    #[test]
    fn damaged_tables_are_read_or_refused() {
        let (Small(mut file), headers) = Small::new();
        let read = |file: &[u8]| {
            let table = Table::of(Memory::of(file), &headers)?;
            Some(by_name(&table, 0).len())
        };
        assert_eq!(read(&file), Some(3));
        assert_eq!(read(&file[..file.len() / 2]), None);
        let rounds = match std::env::var_os("SIDECAR_LONG_TESTS") {
            Some(_) => 10_000_000,
            None => 20_000,
        };
        let fixed = RandomState::new();
        let (mut refused, mut others) = (0, 0);
        for round in 0..rounds {
            let random = |which: u32| fixed.hash_one((round, which)) as usize;
            let before = file.clone();
            for damage in 0..1 + random(0) as u32 % 3 {
                let random = |which| random(1 + 10 * damage + which);
                let place = random(0) % file.len();
                let value: u64 = match random(1) % 4 {
                    0 => random(2) as u64,
                    1 => (random(2) % 1024) as u64,
                    2 => u64::MAX - (random(2) % 64) as u64,
                    _ => 0,
                };
                let bytes = &value.to_ne_bytes();
                let bytes = &bytes[..[1, 2, 4, 8][random(3) % 4].min(file.len() - place)];
                file[place..][..bytes.len()].copy_from_slice(bytes);
            }
            match read(&file) {
                None => refused += 1,
                found => others += usize::from(found != Some(3)),
            }
            file = before;
        }
        assert!(
            refused > rounds / 100 && others > rounds / 100,
            "{refused}, {others}"
        );
        assert_eq!(read(&file), Some(3));
    }
}
