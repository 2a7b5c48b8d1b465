//! A program that ggml is linked into: calls of ggml are seen at the first instructions of its functions.
//!
//! Such a program calls its functions directly, without the loader. When this library is loaded, and no other thread
//! of the program runs, the start of each function that is to be seen becomes a jump ([`code`]). The call then goes to
//! `enter`, which calls its destination: the function itself, or what replaces it.
//!
//! Compilers know which registers a function of the same file leaves as they are (GCC's `-fipa-ra`), and keep values
//! in them, also in those that calls may change. So a call that is seen here changes no register except for its
//! result.
//!
//! A function whose code was put into all its callers (link-time optimisation) is never called. Therefore a function
//! counts as seen only if some instruction of the program calls it.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use once_cell::sync::OnceCell;

use crate::arch::{self, Start};
use crate::loader::code;
use crate::loader::loaded::{self, Place, Program, page_bytes};
use crate::loader::symbols::{self, Function};

/// Arguments in integer registers.
pub type Arguments = [usize; 6];
/// Returns the destination of a call of a function of a program, by its number and its address without the jump.
pub type Route = fn(Place, usize, usize, &Arguments) -> *const c_void;

/// A function whose calls are to be seen.
struct Entry {
    name: &'static CStr,
    /// The function without the jump; an error is why its calls are not seen.
    real: Result<usize, &'static str>,
    /// The function that replaces it; 0 for none.
    to: AtomicUsize,
}

struct Linked {
    /// In the order of the names.
    entries: Vec<Entry>,
    /// The program.
    program: Place,
    /// How many of them `route` decides.
    routed: usize,
    route: Route,
}

static LINKED: OnceCell<Linked> = OnceCell::new();

/// Bytes of the code for a function: a jump to `enter` with its number, and its moved instructions.
const BYTES: usize = 96;
/// Where the moved instructions begin.
const MOVED: usize = 24;

/// Returns the program if ggml is linked into it and its calls are wanted. Allocates nothing for other programs.
pub fn find(are_wanted: impl FnOnce() -> bool) -> Option<Program> {
    let program = loaded::program()?;
    symbols::read(program.headers, program.base, are_wanted).then_some(program)
}

/// Makes calls of functions of the program visible: of those that `route` decides, and of those that may be
/// [redirected](redirected). All have their arguments in integer registers, and one result. Called once, when this library is loaded: no thread of the program is in them yet.
pub fn install(
    program: &Program,
    routed: &[&'static CStr],
    redirected: &[&'static CStr],
    route: Route,
) {
    let names = routed.iter().chain(redirected);
    let functions: Vec<_> = names.map(|name| (*name, symbols::function(name))).collect();
    install_in(program, &functions, routed.len(), route);
}

fn install_in(
    program: &Program,
    functions: &[(&'static CStr, Option<&Function>)],
    routed: usize,
    route: Route,
) {
    let linked = Linked {
        entries: replace(program, functions),
        program: program.place,
        routed,
        route,
    };
    // Set once: the only call.
    let _ = LINKED.set(linked);
}

/// Returns why calls of a function of the program are not seen; `None` if they are, or if ggml is not linked into it.
pub fn unseen(name: &CStr) -> Option<&'static str> {
    let mut entries = LINKED.get()?.entries.iter();
    match entries.find(|entry| entry.name == name) {
        Some(entry) => entry.real.err(),
        None => Some("is not looked for"),
    }
}

/// Returns the place of the program if ggml is linked into it.
pub fn program() -> Option<Place> {
    LINKED.get().map(|linked| linked.program)
}

/// Returns the functions whose calls are looked for, and why those of some are not seen.
pub fn entries() -> impl Iterator<Item = (&'static CStr, Option<&'static str>)> {
    let linked = LINKED.get().into_iter();
    let routed = linked.flat_map(|linked| linked.entries.iter().take(linked.routed));
    routed.map(|entry| (entry.name, entry.real.err()))
}

/// A function whose calls may go elsewhere.
#[derive(Clone, Copy)]
pub struct Redirected(&'static Entry);

/// Returns the function of the program of this name, if its calls can be redirected.
pub fn redirected(name: &CStr) -> Option<Redirected> {
    let linked = LINKED.get()?;
    let mut entries = linked.entries.iter().skip(linked.routed);
    let entry = entries.find(|entry| entry.name == name && entry.real.is_ok())?;
    Some(Redirected(entry))
}

impl Redirected {
    /// The function itself.
    pub fn real(self) -> usize {
        self.0.real.unwrap_or(0)
    }

    /// Lets all calls go to another function of its type.
    pub fn set(self, to: usize) {
        self.0.to.store(to, Ordering::Release);
    }
}

/// Replaces the start of each function that is called and has space for a jump.
fn replace(program: &Program, functions: &[(&'static CStr, Option<&Function>)]) -> Vec<Entry> {
    const FAR: &str = "has no free memory near it";
    /// All instructions are read, when the program starts.
    const LONGEST: usize = 1 << 20;
    let called = called(
        program,
        functions.iter().filter_map(|(_, function)| *function),
    );
    let bytes = (functions.len() * BYTES).next_multiple_of(page_bytes());
    let place = code::reserve(program.place.start, program.place.end, bytes).ok_or(FAR);
    let mut stubs = vec![0; bytes];
    let mut prepare = |number: usize, function: &Function| {
        if let Some(lacks) = arch::lacks() {
            return Err(lacks);
        }
        let bytes = program.code(function.address, function.bytes);
        let bytes = bytes.ok_or("is not in the code of the program")?;
        if bytes.len() > LONGEST {
            return Err("is longer than a function of ggml");
        }
        let start = Start::of(bytes, function.address)?;
        if !called.contains(&function.address) {
            return Err("is called by no instruction, so it is part of its callers");
        }
        if function.is_shared {
            return Err("has the code of another function, too");
        }
        let stub = place? + number * BYTES;
        let jump = (start.address, arch::jump(start.address, stub).ok_or(FAR)?);
        let moved = start.moved(stub + MOVED)?;
        let stub_bytes = &mut stubs[number * BYTES..][..BYTES];
        let head = arch::stub_head(number, enter as *const () as usize);
        stub_bytes[..head.len()].copy_from_slice(&head);
        let space = stub_bytes[MOVED..].get_mut(..moved.len());
        space
            .ok_or("begins with instructions that are too long")?
            .copy_from_slice(&moved);
        Ok((jump, stub + MOVED))
    };
    let prepared = functions.iter().enumerate().map(|(number, (_, function))| {
        prepare(
            number,
            function.ok_or("is not in the symbol table of the program")?,
        )
    });
    let prepared: Vec<_> = prepared.collect();
    // SAFETY: reserved above, and used by nothing yet.
    let is_mapped = place.is_ok_and(|place| unsafe { code::map(place, &stubs) }.is_ok());
    let entries = functions.iter().zip(prepared).map(|((name, _), prepared)| {
        let real = prepared.and_then(|((address, jump), real)| {
            // SAFETY: no thread is in the function; the jump leads to its moved start.
            let is_put = is_mapped && unsafe { code::put(address, &jump) }.is_ok();
            is_put
                .then_some(real)
                .ok_or("cannot be changed: the system forbids it")
        });
        let to = AtomicUsize::new(0);
        Entry { name, real, to }
    });
    entries.collect()
}

/// Returns the addresses of functions that instructions of the program call, or jump to.
fn called<'a>(program: &Program, functions: impl Iterator<Item = &'a Function>) -> BTreeSet<usize> {
    /// Programs have many calls: most are of functions with another remainder.
    const REMAINDERS: usize = 4096;
    let all: BTreeSet<usize> = functions.map(|function| function.address).collect();
    let mut remainders = [false; REMAINDERS];
    for address in &all {
        remainders[address % REMAINDERS] = true;
    }
    let mut found = BTreeSet::new();
    for (start, bytes) in program.parts() {
        arch::branches(start, bytes, |to| {
            if remainders[to % REMAINDERS] && all.contains(&to) {
                found.insert(to);
            }
        });
    }
    found
}

/// Where each replaced function jumps to, with its number on the stack: calls its destination, and changes no register
/// but the result.
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    arch::enter!(destination)
}

/// Returns where a call goes to.
extern "C" fn destination(number: usize, arguments: &Arguments) -> *const c_void {
    // The jumps are there before the list is.
    let linked = LINKED.wait();
    let entry = &linked.entries[number];
    let real = entry.real.unwrap_or(0);
    match entry.to.load(Ordering::Acquire) {
        0 if number < linked.routed => (linked.route)(linked.program, number, real, arguments),
        0 => real as *const c_void,
        to => to as *const c_void,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::replaced::{
        self, Registers, THROWS, TWICE, call_throws, throws, twice, with_registers,
    };
    use std::sync::atomic::AtomicU64;

    static SEEN: AtomicU64 = AtomicU64::new(0);
    static REAL: AtomicUsize = AtomicUsize::new(0);

    /// Changes the registers that calls may change, and returns a multiple of the real result.
    extern "C" fn replacement(of: usize) -> usize {
        replaced::clobber();
        // SAFETY: `twice`, at its moved start.
        let real: extern "C" fn(usize) -> usize =
            unsafe { std::mem::transmute(REAL.load(Ordering::SeqCst)) };
        100 * real(of) + real(0)
    }

    fn route(_: Place, number: usize, real: usize, arguments: &Arguments) -> *const c_void {
        SEEN.fetch_add(arguments[0] as u64, Ordering::SeqCst);
        if number != 0 {
            return real as *const c_void;
        }
        REAL.store(real, Ordering::SeqCst);
        replacement as *const c_void
    }

    #[test]
    fn a_call_changes_no_register_and_exceptions_pass() {
        let mut registers = Registers::with(21);
        let before = registers;
        assert_eq!(with_registers(&mut registers), 42);

        let program = loaded::program().expect("this program");
        let function = |address: *const (), bytes| Function::new(address as usize, bytes);
        let twice = function(twice as *const (), TWICE);
        let throws = function(throws as *const (), THROWS);
        let absent = function(std::ptr::null(), 16);
        let functions = [
            (c"twice", Some(&twice)),
            (c"throws", Some(&throws)),
            (c"none", None),
            (c"absent", Some(&absent)),
        ];
        install_in(&program, &functions, 2, route);
        let unseen: Vec<_> = functions.iter().map(|(name, _)| unseen(name)).collect();
        assert_eq!(
            unseen,
            [
                None,
                None,
                Some("is not in the symbol table of the program"),
                Some("is not in the code of the program")
            ]
        );

        registers = before;
        assert_eq!(with_registers(&mut registers), 4277);
        assert_eq!(registers, before);
        assert_eq!(SEEN.load(Ordering::SeqCst), 21);
        // SAFETY: takes nothing, and throws.
        let result = std::panic::catch_unwind(|| unsafe { call_throws() });
        let thrown = result.expect_err("thrown").downcast::<i32>();
        assert_eq!(*thrown.expect("a number"), 5);
    }
}
