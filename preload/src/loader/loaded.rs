//! The objects that the dynamic loader has loaded: their definitions, references,
//! dependencies, and the slots through which they call functions of other objects.
//!
//! Reads their dynamic sections in memory. `dlopen` and `dlsym` are not usable here: both
//! wait for the loader's lock, which a thread holds while it runs a library's constructor;
//! `dlopen` keeps an object loaded; and both replace the message that the program may yet
//! read with `dlerror`. Crates for ELF read files: they need the sizes of tables, which a
//! loaded object does not have.
//!
//! The rules are those of glibc's loader (`elf/dl-lookup.c`).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{Elf64_Phdr, Elf64_Sym, dl_phdr_info};

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
    /// The pages that the loader made read-only after it had filled the slots in them.
    read_only: (usize, usize),
    tables: Tables,
}

/// The tables of a dynamic section; 0 for a table that is missing.
#[derive(Clone, Copy, Default)]
struct Tables {
    dynamic: usize,
    strings: usize,
    symbols: usize,
    gnu_hash: usize,
    hash: usize,
    versions: usize,
    defined_versions: usize,
    needed_versions: usize,
    soname: Option<usize>,
    relocations: Relocations,
    plt_relocations: Relocations,
}

#[derive(Clone, Copy, Default)]
struct Relocations {
    start: usize,
    bytes: usize,
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
const STT_GNU_IFUNC: u8 = 10;
const STV_INTERNAL: u8 = 1;
const STV_HIDDEN: u8 = 2;
/// The bit of a version index that hides the symbol from references without a version.
const VERSION_HIDDEN: u16 = 0x8000;
/// The first index of a version after the first version of an object.
const LATER_VERSION: u16 = 3;

const SYMBOL_BYTES: usize = size_of::<Elf64_Sym>();
/// `struct Elf64_Rela`: offset, info, addend.
const RELOCATION_BYTES: usize = 24;
const R_X86_64_GLOB_DAT: u32 = 6;
const R_X86_64_JUMP_SLOT: u32 = 7;

/// Reads a value of a loaded object.
///
/// # Safety
///
/// The address is in a table of an object that is loaded.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: as the caller ensures; tables may be aligned for less than `T`.
    unsafe { std::ptr::read_unaligned(address as *const T) }
}

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

/// Returns the pages that the loader makes read-only after relocation: first address and end.
fn read_only_pages(info: &dl_phdr_info) -> (usize, usize) {
    let headers = headers(info);
    let part = headers.iter().find(|h| h.p_type == libc::PT_GNU_RELRO);
    part.map_or((0, 0), |part| {
        let start = (info.dlpi_addr as usize).wrapping_add(part.p_vaddr as usize);
        let end = start.wrapping_add(part.p_memsz as usize);
        (page_of(start), page_of(end))
    })
}

/// Returns the first address of the page of an address.
fn page_of(address: usize) -> usize {
    address & !(page_bytes() - 1)
}

fn page_bytes() -> usize {
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
        let mut object = Object {
            place: Place::of(info),
            name: info.dlpi_name,
            base: info.dlpi_addr as usize,
            read_only: read_only_pages(info),
            tables: Tables::default(),
        };
        let dynamic = headers(info).iter().find(|h| h.p_type == libc::PT_DYNAMIC);
        if let Some(dynamic) = dynamic {
            object.tables.dynamic = object.base.wrapping_add(dynamic.p_vaddr as usize);
            object.read_tables();
        }
        object
    }

    fn read_tables(&mut self) {
        let mut found = self.tables;
        for (tag, value) in self.dynamic() {
            match tag {
                DT_STRTAB => found.strings = self.address(value),
                DT_SYMTAB => found.symbols = self.address(value),
                DT_GNU_HASH => found.gnu_hash = self.address(value),
                DT_HASH => found.hash = self.address(value),
                DT_VERSYM => found.versions = self.address(value),
                DT_VERDEF => found.defined_versions = self.address(value),
                DT_VERNEED => found.needed_versions = self.address(value),
                DT_SONAME => found.soname = Some(value),
                DT_RELA => found.relocations.start = self.address(value),
                DT_RELASZ => found.relocations.bytes = value,
                DT_JMPREL => found.plt_relocations.start = self.address(value),
                DT_PLTRELSZ => found.plt_relocations.bytes = value,
                _ => {}
            }
        }
        self.tables = found;
    }

    /// Returns the entries of the dynamic section.
    fn dynamic(&self) -> impl Iterator<Item = (usize, usize)> {
        let start = self.tables.dynamic;
        let entries = (0..).map_while(move |number: usize| {
            // SAFETY: the section ends with DT_NULL, where this stops.
            let entry = unsafe { read::<[usize; 2]>(start + number * 16) };
            (entry[0] != DT_NULL).then_some((entry[0], entry[1]))
        });
        entries.take(if start == 0 { 0 } else { usize::MAX })
    }

    /// Returns the address of a table; 0 if it is outside of the object. The loader has
    /// replaced offsets by addresses where the section can be written.
    fn address(&self, value: usize) -> usize {
        let moved = self.base.wrapping_add(value);
        [value, moved]
            .into_iter()
            .find(|address| self.contains(*address))
            .unwrap_or(0)
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

    fn string(&self, offset: usize) -> &CStr {
        if self.tables.strings == 0 {
            return c"";
        }
        // SAFETY: offsets of an object lead to C strings in its table.
        unsafe { CStr::from_ptr((self.tables.strings + offset) as *const c_char) }
    }

    fn needed(&self) -> impl Iterator<Item = &CStr> {
        let names = self.dynamic().filter(|(tag, _)| *tag == DT_NEEDED);
        names.map(|(_, offset)| self.string(offset))
    }

    /// Whether a dependency of this name means this object.
    fn is_called(&self, name: &CStr) -> bool {
        if self
            .tables
            .soname
            .is_some_and(|soname| self.string(soname) == name)
        {
            return true;
        }
        let (path, name) = (self.name().to_bytes(), name.to_bytes());
        match name.contains(&b'/') {
            true => path == name,
            false => path.rsplit(|byte| *byte == b'/').next() == Some(name),
        }
    }

    fn symbol(&self, index: usize) -> Elf64_Sym {
        // SAFETY: indices come from the object's own tables.
        unsafe { read(self.tables.symbols + index * SYMBOL_BYTES) }
    }

    fn version_index(&self, symbol: usize) -> u16 {
        match self.tables.versions {
            0 => 0,
            // SAFETY: the table has an entry for each symbol.
            table => unsafe { read(table + symbol * 2) },
        }
    }

    /// Whether it defines a function of this name.
    pub fn defines(&self, name: &CStr) -> bool {
        self.any_definition(name, |_| true)
    }

    /// Whether it defines versions of a function.
    pub fn defines_versions_of(&self, name: &CStr) -> bool {
        self.tables.defined_versions != 0 && self.defines(name)
    }

    /// Whether it defines a function of this name at this address.
    pub fn defines_at(&self, name: &CStr, address: usize) -> bool {
        self.any_definition(name, |symbol| {
            // The resolver of an indirect function chooses among functions of its object.
            symbol.st_info & 15 == STT_GNU_IFUNC || self.address_of(symbol) == address
        })
    }

    fn any_definition(&self, name: &CStr, accept: impl Fn(&Elf64_Sym) -> bool) -> bool {
        let mut found = false;
        self.named(name, |index| {
            let symbol = self.symbol(index);
            found = is_definition(&symbol) && accept(&symbol);
            !found
        });
        found
    }

    fn address_of(&self, symbol: &Elf64_Sym) -> usize {
        match symbol.st_shndx {
            SHN_ABS => symbol.st_value as usize,
            _ => self.base.wrapping_add(symbol.st_value as usize),
        }
    }

    /// Returns the address of a function that this object defines, in the version of a
    /// reference. Runs the resolver of an indirect function.
    pub fn definition(&self, name: &CStr, version: Option<Version>) -> Option<usize> {
        let mut later = None;
        let mut laters = 0;
        let mut exact = None;
        self.named(name, |index| {
            let symbol = self.symbol(index);
            if !is_definition(&symbol) {
                return true;
            }
            let full = self.version_index(index);
            let (index, hidden) = (full & !VERSION_HIDDEN, full & VERSION_HIDDEN != 0);
            let matches = match version {
                _ if self.tables.versions == 0 => true,
                Some(wanted) => {
                    let own = self.version_name(index);
                    own == Some(wanted) || own.is_none() && !hidden
                }
                None if index < LATER_VERSION => true,
                // The default of several versions, if there is no older one.
                None => {
                    if !hidden {
                        later.get_or_insert(symbol);
                        laters += 1;
                    }
                    false
                }
            };
            if matches {
                exact = Some(symbol);
            }
            !matches
        });
        let symbol = exact.or(later.filter(|_| laters == 1))?;
        let mut address = self.address_of(&symbol);
        if symbol.st_info & 15 == STT_GNU_IFUNC {
            // SAFETY: the object is loaded; the function of an indirect symbol returns the address.
            let resolver: extern "C" fn() -> usize = unsafe { std::mem::transmute(address) };
            address = resolver();
        }
        Some(address)
    }

    /// Returns the version of an index of defined symbols; `None` for the object's own name.
    fn version_name(&self, index: u16) -> Option<Version> {
        let mut at = self.tables.defined_versions;
        if at == 0 || index <= 1 {
            return None;
        }
        // struct Elf64_Verdef: u16 version, flags, index, count; u32 hash, aux, next.
        loop {
            // SAFETY: each entry has the offset of the next one; the last one has 0.
            let (found, hash, next) = unsafe {
                (
                    read::<u16>(at + 4),
                    read::<u32>(at + 8),
                    read::<u32>(at + 16),
                )
            };
            if found & !VERSION_HIDDEN == index {
                return Some(Version(hash));
            }
            if next == 0 {
                return None;
            }
            at += next as usize;
        }
    }

    /// Returns the version of an index of undefined symbols.
    fn needed_version(&self, index: u16) -> Option<Version> {
        let mut at = self.tables.needed_versions;
        if at == 0 || index <= 1 {
            return None;
        }
        loop {
            // SAFETY: struct Elf64_Verneed: u16 version, count; u32 file, aux, next.
            let (aux, next) = unsafe { (read::<u32>(at + 8), read::<u32>(at + 12)) };
            let mut entry = at + aux as usize;
            loop {
                // SAFETY: struct Elf64_Vernaux: u32 hash; u16 flags, index; u32 name, next.
                let (hash, found, next) = unsafe {
                    (
                        read::<u32>(entry),
                        read::<u16>(entry + 6),
                        read::<u32>(entry + 12),
                    )
                };
                if found & !VERSION_HIDDEN == index {
                    return Some(Version(hash));
                }
                if next == 0 {
                    break;
                }
                entry += next as usize;
            }
            if next == 0 {
                return None;
            }
            at += next as usize;
        }
    }

    /// Returns the reference of this object to a name, if it has one.
    pub fn reference(&self, name: &CStr) -> Option<Reference> {
        let (_, _, index) = self.relocations_for(name).next()?;
        let symbol = self.symbol(index);
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
            .filter(|(_, kind, _)| [R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT].contains(kind))
            .map(move |(offset, ..)| {
                let address = self.base.wrapping_add(offset);
                Slot {
                    address,
                    read_only: (start..end).contains(&address),
                }
            })
            .filter(|slot| self.contains(slot.address))
    }

    /// Returns the relocations for a name: offset of the slot, kind, and index of the symbol.
    fn relocations_for(&self, name: &CStr) -> impl Iterator<Item = (usize, u32, usize)> {
        let tables = [self.tables.plt_relocations, self.tables.relocations];
        tables
            .into_iter()
            .filter(|table| table.start != 0 && self.tables.symbols != 0)
            .flat_map(|table| {
                let count = table.bytes / RELOCATION_BYTES;
                (0..count).map(move |number| table.start + number * RELOCATION_BYTES)
            })
            .map(|relocation| {
                // SAFETY: within the table; info is the symbol's index and the kind.
                unsafe { (read::<usize>(relocation), read::<u64>(relocation + 8)) }
            })
            .map(|(offset, info)| (offset, info as u32, (info >> 32) as usize))
            .filter(move |&(_, _, index)| {
                index != 0 && self.string(self.symbol(index).st_name as usize) == name
            })
    }

    /// Calls `visit` with the index of each symbol of a name until it returns false.
    fn named(&self, name: &CStr, mut visit: impl FnMut(usize) -> bool) {
        let found = |index: usize| {
            let symbol = self.symbol(index);
            self.string(symbol.st_name as usize) == name && !visit(index)
        };
        if self.tables.symbols == 0 {
            return;
        }
        if self.tables.gnu_hash != 0 {
            self.in_gnu_hash(name, found);
        } else if self.tables.hash != 0 {
            self.in_hash(name, found);
        }
    }

    /// Searches `DT_GNU_HASH` until `found` returns true.
    fn in_gnu_hash(&self, name: &CStr, mut found: impl FnMut(usize) -> bool) {
        let table = self.tables.gnu_hash;
        let hash = name.to_bytes().iter().fold(5381u32, |hash, byte| {
            hash.wrapping_mul(33).wrapping_add(u32::from(*byte))
        });
        // SAFETY: four words, then the filter, the buckets, and a chain that ends with an
        // odd hash.
        unsafe {
            let [buckets, first, filters, shift] = read::<[u32; 4]>(table);
            if buckets == 0 || filters == 0 {
                return;
            }
            let filter = read::<u64>(table + 16 + 8 * ((hash / 64) % filters) as usize);
            let bits = (1u64 << (hash % 64)) | (1u64 << (hash.wrapping_shr(shift) % 64));
            if filter & bits != bits {
                return;
            }
            let bucket = table + 16 + 8 * filters as usize;
            let chain = bucket + 4 * buckets as usize;
            let mut index = read::<u32>(bucket + 4 * (hash % buckets) as usize);
            if index < first {
                return;
            }
            loop {
                let entry = read::<u32>(chain + 4 * (index - first) as usize);
                if (entry | 1) == (hash | 1) && found(index as usize) || entry & 1 != 0 {
                    return;
                }
                index += 1;
            }
        }
    }

    /// Searches `DT_HASH` until `found` returns true.
    fn in_hash(&self, name: &CStr, mut found: impl FnMut(usize) -> bool) {
        let table = self.tables.hash;
        let hash = name.to_bytes().iter().fold(0u32, |hash, byte| {
            let hash = (hash << 4).wrapping_add(u32::from(*byte));
            let high = hash & 0xf000_0000;
            (hash ^ (high >> 24)) & !high
        });
        // SAFETY: two words, then the buckets, and chains that end with 0.
        unsafe {
            let buckets = read::<u32>(table);
            if buckets == 0 {
                return;
            }
            let chain = table + 8 + 4 * buckets as usize;
            let mut index = read::<u32>(table + 8 + 4 * (hash % buckets) as usize);
            while index != 0 {
                if found(index as usize) {
                    return;
                }
                index = read::<u32>(chain + 4 * index as usize);
            }
        }
    }
}

/// Whether the loader takes a symbol for a definition of a function.
fn is_definition(symbol: &Elf64_Sym) -> bool {
    let (binding, kind) = (symbol.st_info >> 4, symbol.st_info & 15);
    symbol.st_shndx != SHN_UNDEF
        && (symbol.st_value != 0 || symbol.st_shndx == SHN_ABS)
        && [STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE].contains(&binding)
        && [STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC].contains(&kind)
        && ![STV_INTERNAL, STV_HIDDEN].contains(&(symbol.st_other & 3))
}
