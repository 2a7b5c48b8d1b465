//! The objects that the dynamic loader has loaded: their definitions, references,
//! dependencies, and the slots through which they call functions of other objects.
//!
//! Reads their dynamic sections in memory. `dlopen` and `dlsym` are not usable here: both
//! wait for the loader's lock, which a thread holds while it runs a library's constructor;
//! `dlopen` keeps an object loaded; and both replace the message that the program may yet
//! read with `dlerror`. Crates for ELF read files: they need the sizes of tables, which a
//! loaded object does not have.
//!
//! The rules are those of glibc's loader (`elf/dl-lookup.c`), except that nothing in an object is
//! trusted: programs open libraries with damaged tables, of which the loader reads none. All
//! reads are bounded by the part of the object that has the table (`Memory`), and all
//! walks by [`MOST_STEPS`]. Indirect functions count as missing: ggml has none, and a damaged one would be run.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{Elf64_Phdr, Elf64_Sym, PF_R, PF_W, PF_X, dl_phdr_info};

use crate::arch::{GLOB_DAT, JUMP_SLOT};
use crate::loader::symbols;
use crate::loader::view::{MOST_STEPS, Memory};

/// The addresses and the name of an object. Two are equal when the same file is loaded at
/// the same addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first address.
    pub start: usize,
    /// The address behind its last byte.
    pub end: usize,
    /// A hash of the loader's name of the object.
    name: u64,
}

/// A loaded object. Its tables are valid only inside of [`look`].
#[derive(Clone, Copy)]
pub struct Object {
    /// Its addresses.
    pub place: Place,
    /// The loader's name: a path; null or empty for the main program.
    name: *const c_char,
    base: usize,
    headers: *const [Elf64_Phdr],
    /// The pages that the loader made read-only after it had filled the slots in them.
    read_only: (usize, usize),
    tables: Tables,
}

/// The tables of a dynamic section; empty where one is missing.
#[derive(Clone, Copy, Default)]
struct Tables {
    dynamic: Memory,
    strings: Memory,
    symbols: Memory,
    gnu_hash: Memory,
    hash: Memory,
    versions: Memory,
    defined_versions: Memory,
    needed_versions: Memory,
    soname: Option<usize>,
    relocations: Memory,
    plt_relocations: Memory,
}

/// A reference of an object to a name that it does not define.
#[derive(Debug, Clone, Copy)]
pub struct Reference {
    /// Whether the object works without a definition.
    pub weak: bool,
    /// The version of the reference.
    pub version: Option<Version>,
}

/// A word of an object that holds the address of a function. The object calls the function
/// through it. Valid while the object is loaded.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    address: usize,
    read_only: bool,
}

/// The version of a symbol, by its hash in the file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version(u32);

const DT_NULL: usize = 0;
const DT_NEEDED: usize = 1;
const DT_PLTRELSZ: usize = 2;
const DT_HASH: usize = 4;
const DT_STRTAB: usize = 5;
const DT_SYMTAB: usize = 6;
const DT_RELA: usize = 7;
const DT_RELASZ: usize = 8;
const DT_SONAME: usize = 14;
const DT_JMPREL: usize = 23;
const DT_GNU_HASH: usize = 0x6fff_fef5;
const DT_VERSYM: usize = 0x6fff_fff0;
const DT_VERDEF: usize = 0x6fff_fffc;
const DT_VERNEED: usize = 0x6fff_fffe;

const SHN_UNDEF: u16 = 0;
const SHN_ABS: u16 = 0xfff1;
const STB_GLOBAL: u8 = 1;
const STB_WEAK: u8 = 2;
const STB_GNU_UNIQUE: u8 = 10;
const STT_NOTYPE: u8 = 0;
const STT_FUNC: u8 = 2;
const STV_INTERNAL: u8 = 1;
const STV_HIDDEN: u8 = 2;
/// The bit of a version index that hides the symbol from references without a version.
const VERSION_HIDDEN: u16 = 0x8000;
/// The first index of a version after the first version of an object.
const LATER_VERSION: u16 = 3;

/// `struct Elf64_Rela`: offset, info, addend.
type Relocation = [usize; 3];

/// Calls `visit` with each loaded object, in load order, until it returns false. No object
/// is loaded or unloaded meanwhile.
fn each(mut visit: impl FnMut(&dl_phdr_info) -> bool) {
    unsafe extern "C" fn call<F: FnMut(&dl_phdr_info) -> bool>(
        info: *mut dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid entry, and what was given to it below.
        let (info, visit) = unsafe { (&*info, &mut *visit.cast::<F>()) };
        c_int::from(!visit(info))
    }
    fn callback<F: FnMut(&dl_phdr_info) -> bool>(
        _: &F,
    ) -> unsafe extern "C" fn(*mut dl_phdr_info, usize, *mut c_void) -> c_int {
        call::<F>
    }
    let call = callback(&visit);
    // SAFETY: the callback has the right type and gets a pointer that outlives it.
    unsafe { libc::dl_iterate_phdr(Some(call), (&raw mut visit).cast()) };
}

/// Returns how often an object was unloaded so far.
pub fn unloads() -> u64 {
    let mut count = 0;
    each(|info| {
        count = info.dlpi_subs;
        false
    });
    count
}

/// Returns the place of the object that has an address.
pub fn place_of(address: usize) -> Option<Place> {
    let mut found = None;
    each(|info| {
        let (start, end) = bounds(info);
        if (start..end).contains(&address) {
            found = Some(Place::of(info));
        }
        found.is_none()
    });
    found
}

/// The main program, which stays loaded.
pub struct Program {
    /// Its addresses.
    pub place: Place,
    /// What is added to addresses in its file.
    pub base: usize,
    /// Its program headers.
    pub headers: &'static [Elf64_Phdr],
}

/// Returns the main program.
pub fn program() -> Option<Program> {
    let mut found = None;
    each(|info| {
        let headers: *const [Elf64_Phdr] = headers(info);
        found = Some(Program {
            place: Place::of(info),
            base: info.dlpi_addr as usize,
            // SAFETY: the first object is the main program, which stays loaded.
            headers: unsafe { &*headers },
        });
        false
    });
    found
}

impl Program {
    /// Returns the addresses and the bytes of its code.
    pub fn parts(&self) -> impl Iterator<Item = (usize, &'static [u8])> {
        let access = PF_R | PF_X;
        let is_code = move |h: &&Elf64_Phdr| h.p_type == libc::PT_LOAD && h.p_flags == access;
        let parts = self.headers.iter().filter(is_code);
        parts.map(|part| {
            let start = self.base.wrapping_add(part.p_vaddr as usize);
            // SAFETY: a part of the program that may be read, and is not written.
            let bytes =
                unsafe { std::slice::from_raw_parts(start as *const u8, part.p_memsz as usize) };
            (start, bytes)
        })
    }

    /// Returns bytes of its code at an address.
    pub fn code(&self, address: usize, bytes: usize) -> Option<&'static [u8]> {
        self.parts()
            .find_map(|(start, part)| part.get(address.checked_sub(start)?..)?.get(..bytes))
    }
}

/// Calls `work` with all loaded objects in load order; none is unloaded meanwhile.
/// `None` when there is no memory for the list.
///
/// `work` must not allocate: a thread that does may wait for one that waits for the loader.
pub fn look<R>(work: impl FnOnce(&[Object], &mut Scratch) -> R) -> Option<R> {
    /// Objects that may be loaded between counting and listing.
    const MORE: usize = 16;
    let mut work = Some(work);
    loop {
        let mut count = 0;
        each(|_| {
            count += 1;
            true
        });
        let mut objects: Vec<Object> = Vec::new();
        let mut scratch = Scratch::default();
        objects.try_reserve_exact(count + MORE).ok()?;
        scratch.order.try_reserve_exact(count + MORE).ok()?;
        scratch.seen.try_reserve_exact(count + MORE).ok()?;
        let mut result = None;
        // The same thread takes the loader's lock again, and holds it until `work` returns.
        each(|_| {
            let mut complete = true;
            each(|info| {
                complete = objects.len() < objects.capacity();
                if complete {
                    objects.push(Object::of(info));
                }
                complete
            });
            if complete && let Some(work) = work.take() {
                result = Some(work(&objects, &mut scratch));
            }
            false
        });
        if result.is_some() || work.is_none() {
            return result;
        }
    }
}

/// Memory for putting [`Object`]s in order, allocated before the loader's lock is taken.
#[derive(Default)]
pub struct Scratch {
    order: Vec<usize>,
    seen: Vec<bool>,
}

impl Scratch {
    /// Returns the objects that were loaded because of a root, in the order in which the
    /// loader searches them: the root, its dependencies, their dependencies.
    fn group<'a>(&'a mut self, objects: &[Object], root: usize) -> &'a [usize] {
        self.order.clear();
        self.seen.clear();
        // Both have capacity for all objects.
        self.seen
            .resize(objects.len().min(self.seen.capacity()), false);
        let mut add = |order: &mut Vec<usize>, at: usize| {
            if let Some(seen) = self.seen.get_mut(at)
                && !std::mem::replace(seen, true)
                && order.len() < order.capacity()
            {
                order.push(at);
            }
        };
        add(&mut self.order, root);
        let mut next = 0;
        while let Some(object) = self.order.get(next).and_then(|at| objects.get(*at)) {
            next += 1;
            for needed in object.needed() {
                let found = objects.iter().position(|object| object.is_called(needed));
                if let Some(at) = found {
                    add(&mut self.order, at);
                }
            }
        }
        &self.order
    }
}

/// Returns the definition of a name in the object at `from` and its dependencies.
pub fn in_own_group(
    objects: &[Object],
    scratch: &mut Scratch,
    from: usize,
    name: &CStr,
    except: Place,
) -> Option<usize> {
    let root = objects.iter().position(|object| object.contains(from))?;
    first_definition(objects, scratch.group(objects, root), name, None, except)
}

/// Whether two addresses are in objects that one object needs, or that one of them needs.
pub fn are_together(objects: &[Object], scratch: &mut Scratch, addresses: [usize; 2]) -> bool {
    let [one, other] =
        addresses.map(|address| objects.iter().position(|object| object.contains(address)));
    let (Some(one), Some(other)) = (one, other) else {
        return false;
    };
    (0..objects.len()).any(|root| {
        let group = scratch.group(objects, root);
        group.contains(&one) && group.contains(&other)
    })
}

fn first_definition(
    objects: &[Object],
    group: &[usize],
    name: &CStr,
    version: Option<Version>,
    except: Place,
) -> Option<usize> {
    let members = group.iter().filter_map(|at| objects.get(*at));
    members
        .filter(|object| object.place != except)
        .find_map(|object| object.definition(name, version))
}

/// Returns the definition of a name for the object at `from`, in the groups of objects that
/// it was loaded with: the loader searches them after the global objects.
pub fn in_local_scope(
    objects: &[Object],
    scratch: &mut Scratch,
    from: usize,
    name: &CStr,
    version: Option<Version>,
    except: Place,
) -> Option<usize> {
    let from = objects.iter().position(|object| object.contains(from))?;
    // An object is loaded together with the first root that needs it; the groups of later
    // roots come after.
    (0..objects.len()).find_map(|root| {
        let group = scratch.group(objects, root);
        match group.contains(&from) {
            true => first_definition(objects, group, name, version, except),
            false => None,
        }
    })
}

impl Place {
    /// The place of no object.
    pub const NOWHERE: Place = Place {
        start: 0,
        end: 0,
        name: 0,
    };

    fn of(info: &dl_phdr_info) -> Place {
        let (start, end) = bounds(info);
        let mut name = DefaultHasher::new();
        if !info.dlpi_name.is_null() {
            // SAFETY: the loader's name is a C string.
            name.write(unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes());
        }
        Place {
            start,
            end,
            name: name.finish(),
        }
    }
}

/// Returns the first address of an object, and the address behind its last byte.
fn bounds(info: &dl_phdr_info) -> (usize, usize) {
    let loaded = headers(info).iter().filter(|h| h.p_type == libc::PT_LOAD);
    let parts = loaded.map(|h| {
        let start = (info.dlpi_addr as usize).wrapping_add(h.p_vaddr as usize);
        (start, start.wrapping_add(h.p_memsz as usize))
    });
    parts.fold((usize::MAX, 0), |(low, high), (start, end)| {
        (low.min(start), high.max(end))
    })
}

fn headers(info: &dl_phdr_info) -> &[Elf64_Phdr] {
    if info.dlpi_phdr.is_null() {
        return &[];
    }
    // SAFETY: the entry has the number of program headers.
    unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) }
}

/// Returns the first address of the page of an address.
pub fn page_of(address: usize) -> usize {
    address & !(page_bytes() - 1)
}

/// Returns the size of a page.
pub fn page_bytes() -> usize {
    // SAFETY: takes a constant.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

impl Slot {
    fn word(&self) -> &AtomicUsize {
        // SAFETY: slots are aligned words of a loaded object, as the loader itself requires.
        unsafe { &*(self.address as *const AtomicUsize) }
    }

    /// Returns the address that it holds. Before the first call through it, that is an address
    /// in its own object, where the call asks the loader.
    pub fn get(&self) -> usize {
        self.word().load(Ordering::Acquire)
    }

    /// Lets it hold another address; returns whether the page could be written.
    pub fn set(&self, to: usize) -> bool {
        let page = page_of(self.address) as *mut c_void;
        // SAFETY: a page of a loaded object, which keeps its protection.
        let protect = |access| unsafe { libc::mprotect(page, page_bytes(), access) } == 0;
        if self.read_only && !protect(libc::PROT_READ | libc::PROT_WRITE) {
            return false;
        }
        self.word().store(to, Ordering::Release);
        if self.read_only {
            protect(libc::PROT_READ);
        }
        true
    }
}

impl Object {
    fn of(info: &dl_phdr_info) -> Object {
        let base = info.dlpi_addr as usize;
        Object::new(Place::of(info), info.dlpi_name, base, headers(info))
    }

    fn new(place: Place, name: *const c_char, base: usize, headers: &[Elf64_Phdr]) -> Object {
        let header = |kind| headers.iter().find(|header| header.p_type == kind);
        // Where the loader makes pages read-only after relocation.
        let read_only = header(libc::PT_GNU_RELRO).map_or((0, 0), |part| {
            let start = base.wrapping_add(part.p_vaddr as usize);
            let end = start.wrapping_add(part.p_memsz as usize);
            (page_of(start), page_of(end))
        });
        let mut object = Object {
            place,
            name,
            base,
            headers,
            read_only,
            tables: Tables::default(),
        };
        if let Some(dynamic) = header(libc::PT_DYNAMIC) {
            let start = base.wrapping_add(dynamic.p_vaddr as usize);
            object.tables.dynamic = object.memory(start, PF_R).unwrap_or_default();
            object.read_tables();
        }
        object
    }

    /// Returns the memory from an address to the end of the part of this object that has it;
    /// `None` where no part has it, or not for this access.
    fn memory(&self, start: usize, access: u32) -> Option<Memory> {
        // SAFETY: the loader's headers of a loaded object.
        let headers = unsafe { &*self.headers };
        let parts = headers
            .iter()
            .filter(|h| h.p_type == libc::PT_LOAD && h.p_flags & access != 0);
        let mut rests = parts.filter_map(|part| {
            let offset = start.wrapping_sub(self.base.wrapping_add(part.p_vaddr as usize));
            let bytes = (part.p_memsz as usize).checked_sub(offset)?;
            start.checked_add(bytes)?;
            (bytes > 0).then_some(Memory { start, bytes })
        });
        rests.next()
    }

    fn read_tables(&mut self) {
        let mut found = self.tables;
        let (mut relocations, mut plt_relocations) = (0, 0);
        for (tag, value) in self.dynamic() {
            match tag {
                DT_STRTAB => found.strings = self.table(value),
                DT_SYMTAB => found.symbols = self.table(value),
                DT_GNU_HASH => found.gnu_hash = self.table(value),
                DT_HASH => found.hash = self.table(value),
                DT_VERSYM => found.versions = self.table(value),
                DT_VERDEF => found.defined_versions = self.table(value),
                DT_VERNEED => found.needed_versions = self.table(value),
                DT_SONAME => found.soname = Some(value),
                DT_RELA => found.relocations = self.table(value),
                DT_RELASZ => relocations = value,
                DT_JMPREL => found.plt_relocations = self.table(value),
                DT_PLTRELSZ => plt_relocations = value,
                _ => {}
            }
        }
        found.relocations = found.relocations.first(relocations);
        found.plt_relocations = found.plt_relocations.first(plt_relocations);
        self.tables = found;
    }

    /// Returns the entries of the dynamic section.
    fn dynamic(&self) -> impl Iterator<Item = (usize, usize)> {
        let entries = self.tables.dynamic.entries::<[usize; 2]>();
        let entries = entries.take_while(|[tag, _]| *tag != DT_NULL);
        entries.map(|[tag, value]| (tag, value))
    }

    /// Returns a table; an empty one if it is outside of the object. The loader has replaced
    /// offsets by addresses where the section can be written.
    fn table(&self, value: usize) -> Memory {
        let starts = [value, self.base.wrapping_add(value)];
        let found = starts.iter().find_map(|start| self.memory(*start, PF_R));
        found.unwrap_or_default()
    }

    /// Whether an address is in this object.
    pub fn contains(&self, address: usize) -> bool {
        (self.place.start..self.place.end).contains(&address)
    }

    /// Returns the loader's name; empty for the main program.
    pub fn name(&self) -> &CStr {
        if self.name.is_null() {
            return c"";
        }
        // SAFETY: the loader's name is a C string.
        unsafe { CStr::from_ptr(self.name) }
    }

    fn needed(&self) -> impl Iterator<Item = &CStr> {
        let names = self.dynamic().filter(|(tag, _)| *tag == DT_NEEDED);
        names.map(|(_, offset)| self.tables.strings.text(offset))
    }

    /// Whether a dependency of this name means this object.
    fn is_called(&self, name: &CStr) -> bool {
        let is_soname = |offset| self.tables.strings.has_text(offset, name);
        if self.tables.soname.is_some_and(is_soname) {
            return true;
        }
        let (path, name) = (self.name().to_bytes(), name.to_bytes());
        match name.contains(&b'/') {
            true => path == name,
            false => path.rsplit(|byte| *byte == b'/').next() == Some(name),
        }
    }

    fn version_index(&self, symbol: usize) -> u16 {
        self.tables.versions.entry(symbol).unwrap_or(0)
    }

    /// Whether it defines a function of this name.
    pub fn defines(&self, name: &CStr) -> bool {
        self.functions(name).next().is_some()
    }

    /// Whether it defines versions of a function.
    pub fn defines_versions_of(&self, name: &CStr) -> bool {
        !self.tables.defined_versions.is_empty() && self.defines(name)
    }

    /// Whether it defines a function of this name at this address.
    pub fn defines_at(&self, name: &CStr, address: usize) -> bool {
        self.functions(name).any(|(_, found)| found == address)
    }

    /// Returns the address of a function that this object defines, in the version of a
    /// reference.
    pub fn definition(&self, name: &CStr, version: Option<Version>) -> Option<usize> {
        // The default of several versions, if there is no older one.
        let mut later = None;
        let mut laters = 0;
        for (symbol, address) in self.functions(name) {
            let full = self.version_index(symbol);
            let (index, hidden) = (full & !VERSION_HIDDEN, full & VERSION_HIDDEN != 0);
            let matches = match version {
                _ if self.tables.versions.is_empty() => true,
                Some(wanted) => {
                    let own = self.version_name(index);
                    own == Some(wanted) || own.is_none() && !hidden
                }
                None => index < LATER_VERSION,
            };
            if matches {
                return Some(address);
            }
            if version.is_none() && !hidden {
                later.get_or_insert(address);
                laters += 1;
            }
        }
        later.filter(|_| laters == 1)
    }

    /// Returns the version of an index of defined symbols; `None` for the object's own name.
    fn version_name(&self, index: u16) -> Option<Version> {
        // struct Elf64_Verdef: u16 version, flags, index, count; u32 hash, aux, next.
        let table = self.tables.defined_versions;
        let entries = table.list(0, 16).map(|at| (at + 4, at + 8));
        find_version(table, entries, index)
    }

    /// Returns the version of an index of undefined symbols.
    fn needed_version(&self, index: u16) -> Option<Version> {
        // struct Elf64_Verneed: u16 version, count; u32 file, aux, next.
        // struct Elf64_Vernaux: u32 hash; u16 flags, index; u32 name, next.
        let table = self.tables.needed_versions;
        let files = table.list(0, 12);
        let entries = files.flat_map(|file| {
            let first = table.read::<u32>(file + 8).unwrap_or(0);
            table.list(file + first as usize, 12)
        });
        find_version(table, entries.map(|at| (at + 6, at)), index)
    }

    /// Returns the reference of this object to a name, if it has one.
    pub fn reference(&self, name: &CStr) -> Option<Reference> {
        let (_, _, index) = self.relocations_for(name).next()?;
        let symbol: Elf64_Sym = self.tables.symbols.entry(index)?;
        let version = self.version_index(index) & !VERSION_HIDDEN;
        Some(Reference {
            weak: symbol.st_info >> 4 == STB_WEAK,
            version: match symbol.st_shndx {
                SHN_UNDEF => self.needed_version(version),
                _ => self.version_name(version),
            },
        })
    }

    /// Returns the slots through which this object calls the function of a name.
    pub fn slots(&self, name: &CStr) -> impl Iterator<Item = Slot> {
        let (start, end) = self.read_only;
        self.relocations_for(name)
            .filter(|(_, kind, _)| [GLOB_DAT, JUMP_SLOT].contains(kind))
            .map(|(offset, ..)| self.base.wrapping_add(offset))
            .filter(|address| {
                let memory = self.memory(*address, PF_W);
                address.is_multiple_of(align_of::<AtomicUsize>())
                    && memory.is_some_and(|memory| memory.bytes >= size_of::<AtomicUsize>())
            })
            .map(move |address| Slot {
                address,
                read_only: (start..end).contains(&address),
            })
    }

    /// Returns the relocations for a name: offset of the slot, kind, and index of the symbol.
    fn relocations_for(&self, name: &CStr) -> impl Iterator<Item = (usize, u32, usize)> {
        let tables = [self.tables.plt_relocations, self.tables.relocations];
        tables
            .into_iter()
            .flat_map(|table| table.entries::<Relocation>())
            // Info is the symbol's index and the kind.
            .map(|[offset, info, _]| (offset, info as u32, info >> 32))
            .filter(move |&(_, _, index)| index != 0 && self.is_named(index, name))
    }

    /// Whether a symbol has this name.
    fn is_named(&self, index: usize, name: &CStr) -> bool {
        let symbol = self.tables.symbols.entry::<Elf64_Sym>(index);
        symbol.is_some_and(|of| self.tables.strings.has_text(of.st_name as usize, name))
    }

    /// Returns the functions of a name that this object defines: index of the symbol, and address.
    fn functions(&self, name: &CStr) -> impl Iterator<Item = (usize, usize)> {
        let hashed = self.in_gnu_hash(name);
        // `DT_HASH` has the number of symbols in its second word.
        let all = match self.tables.gnu_hash.is_empty() {
            true => self.tables.hash.entry::<u32>(1).unwrap_or(0),
            false => 0,
        };
        let all = (0..all as usize).take(MOST_STEPS);
        hashed
            .into_iter()
            .flatten()
            .chain(all)
            .filter(move |index| self.is_named(*index, name))
            .filter_map(|index| {
                let symbol: Elf64_Sym = self.tables.symbols.entry(index)?;
                let address = self.base.wrapping_add(symbol.st_value as usize);
                is_definition(&symbol).then_some((index, address))
            })
            .chain(self.linked(name))
            // It may be called.
            .filter(|(_, address)| self.memory(*address, PF_X).is_some())
    }

    /// Returns a function of the program that the loader does not know; its index is that of no symbol.
    fn linked(&self, name: &CStr) -> Option<(usize, usize)> {
        let is_program = self.name().is_empty();
        let function = symbols::function(name).filter(|_| is_program)?;
        Some((0, function.address))
    }

    /// Returns the symbols that may have a name, according to `DT_GNU_HASH`.
    fn in_gnu_hash(&self, name: &CStr) -> Option<impl Iterator<Item = usize>> {
        let table = self.tables.gnu_hash;
        let hash = name.to_bytes().iter().fold(5381u32, |hash, byte| {
            hash.wrapping_mul(33).wrapping_add(u32::from(*byte))
        });
        // Four words, then the filter, the buckets, and chains that end with an odd hash.
        let [buckets, first, filters, shift] = table.read::<[u32; 4]>(0)?;
        let filter = 16 + 8 * (hash / 64).checked_rem(filters)? as usize;
        let filter = table.read::<u64>(filter)?;
        let bits = (1u64 << (hash % 64)) | (1u64 << (hash.wrapping_shr(shift) % 64));
        if filter & bits != bits {
            return None;
        }
        let bucket = 16 + 8 * filters as usize;
        let chain = bucket + 4 * buckets as usize;
        let index = table.read::<u32>(bucket + 4 * hash.checked_rem(buckets)? as usize)?;
        let start = index.checked_sub(first)? as usize;
        let mut has_ended = false;
        let entries = (start..).map_while(move |at| {
            let entry = table.read::<u32>(chain + 4 * at).filter(|_| !has_ended)?;
            has_ended = entry & 1 != 0;
            Some((at + first as usize, entry))
        });
        let entries = entries.take(MOST_STEPS);
        let found = entries.filter(move |(_, entry)| entry | 1 == hash | 1);
        Some(found.map(|(index, _)| index))
    }
}

/// Returns the version of an index in a table. Each entry has an offset of its index, and of its hash.
fn find_version(
    table: Memory,
    entries: impl Iterator<Item = (usize, usize)>,
    index: u16,
) -> Option<Version> {
    // The first two indices have no version.
    let mut entries = entries.take(if index <= 1 { 0 } else { MOST_STEPS });
    let (_, hash) = entries.find(|(at, _)| {
        let found = table.read::<u16>(*at);
        found.is_some_and(|found| found & !VERSION_HIDDEN == index)
    })?;
    table.read(hash).map(Version)
}

/// Whether the loader takes a symbol for a definition of a function.
fn is_definition(symbol: &Elf64_Sym) -> bool {
    let (binding, kind) = (symbol.st_info >> 4, symbol.st_info & 15);
    ![SHN_UNDEF, SHN_ABS].contains(&symbol.st_shndx)
        && symbol.st_value != 0
        && [STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE].contains(&binding)
        && [STT_NOTYPE, STT_FUNC].contains(&kind)
        && ![STV_INTERNAL, STV_HIDDEN].contains(&(symbol.st_other & 3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    /// A library, laid out as the loader does, between pages that cannot be read.
    struct Image {
        base: usize,
        headers: Vec<Elf64_Phdr>,
        /// What has tables: where damages are made.
        tables: Vec<Memory>,
        /// Names of symbols.
        names: Vec<std::ffi::CString>,
    }

    impl Image {
        fn of(path: &str) -> Image {
            let file = std::fs::read(path).expect("a library");
            let file = Memory::of(&file);
            let first = file.read(32).expect("a header");
            let count = file.read::<u16>(56).expect("a header").into();
            let headers = file.part(first, u64::MAX).expect("in the file");
            let headers: Vec<Elf64_Phdr> = headers.entries().take(count).collect();
            let parts = || headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
            let end = parts().map(|part| part.p_vaddr + part.p_memsz).max();
            let bytes = end.expect("a part") as usize;
            let (pages, page) = (bytes.next_multiple_of(page_bytes()), page_bytes());
            // SAFETY: a new mapping, in which the loaded pages lie between two others.
            let base = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                let none = std::ptr::null_mut();
                let all = libc::mmap(none, pages + 2 * page, libc::PROT_NONE, flags, -1, 0);
                assert_ne!(all, libc::MAP_FAILED);
                let inner = all.byte_add(page);
                libc::mprotect(inner, pages, libc::PROT_READ | libc::PROT_WRITE);
                // The last part ends where the next page begins.
                inner as usize + (pages - bytes) / 16 * 16
            };
            for part in parts() {
                let offset = part.p_offset as usize;
                let bytes = file
                    .slice(offset, part.p_filesz as usize)
                    .expect("in the file");
                let to = (base + part.p_vaddr as usize) as *mut u8;
                // SAFETY: in the mapping.
                unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
            let mut image = Image {
                base,
                headers,
                tables: Vec::new(),
                names: Vec::new(),
            };
            let found = image.object().tables;
            image.tables = vec![
                found.dynamic.first(
                    16 * found
                        .dynamic
                        .entries()
                        .take_while(|[tag, _]: &[usize; 2]| *tag != 0)
                        .count(),
                ),
                found.gnu_hash.first(2048),
                found.hash.first(2048),
                found.symbols.first(4096),
                found.strings.first(4096),
                found.versions.first(512),
                found.defined_versions.first(512),
                found.needed_versions.first(256),
                found.relocations.first(4096),
                found.plt_relocations.first(2048),
            ];
            image.tables.retain(|table| table.bytes > 8);
            let symbols = found.symbols.entries::<Elf64_Sym>().skip(1).take(200);
            let names = symbols.map(|symbol| found.strings.text(symbol.st_name as usize));
            image.names = names
                .filter(|name| !name.is_empty())
                .map(CStr::to_owned)
                .collect();
            image
        }

        fn object(&self) -> Object {
            let place = Place {
                start: self.base,
                end: usize::MAX,
                name: 0,
            };
            Object::new(place, std::ptr::null(), self.base, &self.headers)
        }
    }

    /// Reads everything that a name leads to.
    fn visit(object: &Object, name: &CStr) -> usize {
        let version = Some(Version(7));
        object.slots(name).for_each(|slot| {
            slot.get();
        });
        object.is_called(name);
        object.defines_versions_of(name);
        object.defines_at(name, 1);
        object.needed().count()
            + object.definition(name, None).unwrap_or(0)
            + object.definition(name, version).unwrap_or(0)
            + usize::from(object.reference(name).is_some())
    }

    /// Returns the files of the C library and of the loader.
    fn libraries() -> Vec<String> {
        let mut found = Vec::new();
        each(|info| {
            // SAFETY: the loader's name is a C string.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) }.to_string_lossy();
            if name.contains("/libc.so") || name.contains("/ld-linux") {
                found.push(name.into_owned());
            }
            true
        });
        found
    }

    /// A library that is damaged, as the loader does not notice, is read without leaving its memory.
    #[test]
    fn damaged_tables_are_read_within_the_object() {
        let long = std::env::var_os("SIDECAR_LONG_TESTS").is_some();
        let rounds = if long { 5_000_000 } else { 10_000 };
        let libraries = libraries();
        assert_eq!(libraries.len(), 2, "{libraries:?}");
        for path in libraries {
            let image = Image::of(&path);
            let whole = image.object();
            let defined = image
                .names
                .iter()
                .filter(|name| whole.defines(name))
                .count();
            assert!(defined > 10, "{defined} functions in {path}");
            assert!(image.tables.len() > 6, "{}", image.tables.len());
            let seed = std::hash::RandomState::new().hash_one(0);
            println!("{path}: seed {seed}");
            let fixed = std::hash::BuildHasherDefault::<DefaultHasher>::default();
            for round in 0..rounds {
                let random = |which: u32| fixed.hash_one((seed, round, which)) as usize;
                let mut before = Vec::new();
                for damage in 0..1 + random(0) % 3 {
                    let random = |which| random(1 + 10 * damage as u32 + which);
                    let table = image.tables[random(0) % image.tables.len()];
                    let at = table.start + random(1) % (table.bytes - 8);
                    let value: u64 = match random(2) % 5 {
                        0 => random(3) as u64,
                        1 => (random(3) % 0x10000) as u64,
                        2 => u64::MAX - (random(3) % 64) as u64,
                        3 => (image.base + random(3) % (1 << 22)) as u64,
                        _ => 0,
                    };
                    let bytes = [1, 2, 4, 8][random(4) % 4];
                    let place = at as *mut u8;
                    // SAFETY: in the table.
                    unsafe {
                        before.push((place, place.cast::<u64>().read_unaligned()));
                        place.copy_from_nonoverlapping((&raw const value).cast(), bytes);
                    }
                }
                let object = image.object();
                for which in 100..103 {
                    visit(&object, &image.names[random(which) % image.names.len()]);
                }
                for (place, value) in before.into_iter().rev() {
                    // SAFETY: as above.
                    unsafe { place.cast::<u64>().write_unaligned(value) };
                }
            }
            let after = image
                .names
                .iter()
                .filter(|name| image.object().defines(name));
            assert_eq!(after.count(), defined);
        }
    }

    #[test]
    fn the_definition_of_a_function_is_the_loaders() {
        for (name, address) in [
            (c"getpid", libc::getpid as *const () as usize),
            (c"mmap", libc::mmap as *const () as usize),
            (
                c"dl_iterate_phdr",
                libc::dl_iterate_phdr as *const () as usize,
            ),
        ] {
            let found = look(|objects, _| {
                let object = objects.iter().find(|object| object.contains(address));
                object.and_then(|object| object.definition(name, None))
            });
            assert_eq!(found.flatten(), Some(address), "{name:?}");
        }
    }
}
