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

use crate::loader::code::{self, JUMP, Start};
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
        if !std::arch::is_x86_feature_detected!("xsave") {
            return Err("needs a processor with XSAVE");
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
        let jump = (start.address, code::jump(start.address, stub).ok_or(FAR)?);
        let moved = start.moved(stub + MOVED)?;
        let stub_bytes = &mut stubs[number * BYTES..][..BYTES];
        let head = stub_head(number);
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

/// Returns the instructions that hand the call of a function to [`enter`]: `push NUMBER; jmp [rip + 0]`, and the
/// address.
fn stub_head(number: usize) -> Vec<u8> {
    let enter = enter as *const () as usize;
    let mut head = vec![0x68];
    head.extend((number as u32).to_le_bytes());
    head.extend([0xff, 0x25, 0, 0, 0, 0]);
    head.extend(enter.to_le_bytes());
    head
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
        // Each byte of the program: only the opcodes are compared.
        let opcodes = bytes.iter().enumerate();
        for (at, _) in opcodes.filter(|(_, opcode)| matches!(opcode, 0xe8 | 0xe9)) {
            let distance = bytes
                .get(at + 1..at + JUMP)
                .and_then(|of| of.try_into().ok());
            let Some(distance) = distance.map(i32::from_le_bytes) else {
                continue;
            };
            let to = (start + at + JUMP).wrapping_add_signed(distance as isize);
            if remainders[to % REMAINDERS] && all.contains(&to) {
                found.insert(to);
            }
        }
    }
    found
}

/// Registers that calls may change besides the general ones, by the bits of `XCR0`: x87, SSE, AVX, AVX-512.
const STATE: u32 = 0b1110_0111;
/// What they take: 512 bytes, a header of 64, and up to the end of the last AVX-512 registers.
const STATE_BYTES: usize = 2688;

/// Where each replaced function jumps to, with its number on the stack: calls its destination, and changes no register
/// but the result.
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    std::arch::naked_asm!(
        ".cfi_startproc",
        // The number, above the address that the call returns to.
        ".cfi_adjust_cfa_offset 8",
        "push rbp",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_offset rbp, -24",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "push r11",
        "push r10",
        "push rax",
        "push r9",
        "push r8",
        "push rcx",
        "push rdx",
        "push rsi",
        "push rdi",
        "sub rsp, {bytes}",
        "and rsp, -64",
        // XSAVE leaves reserved bytes of the header, which XRSTOR expects to be 0.
        "xor eax, eax",
        "lea rdi, [rsp + 512]",
        "mov ecx, 8",
        "rep stosq",
        "mov eax, {state}",
        "xor edx, edx",
        "xsave64 [rsp]",
        "mov rdi, [rbp + 8]",
        "lea rsi, [rbp - 72]",
        "call {destination}",
        "mov r11, rax",
        "mov rdi, [rbp - 72]",
        "mov rsi, [rbp - 64]",
        "mov rdx, [rbp - 56]",
        "mov rcx, [rbp - 48]",
        "mov r8, [rbp - 40]",
        "mov r9, [rbp - 32]",
        "mov rax, [rbp - 24]",
        "call r11",
        "mov [rbp - 24], rax",
        "mov eax, {state}",
        "xor edx, edx",
        "xrstor64 [rsp]",
        "lea rsp, [rbp - 72]",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rcx",
        "pop r8",
        "pop r9",
        "pop rax",
        "pop r10",
        "pop r11",
        "pop rbp",
        ".cfi_def_cfa rsp, 16",
        // The number.
        "lea rsp, [rsp + 8]",
        ".cfi_adjust_cfa_offset -8",
        "ret",
        ".cfi_endproc",
        bytes = const STATE_BYTES,
        state = const STATE,
        destination = sym destination,
    )
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
    use std::arch::naked_asm;
    use std::sync::atomic::AtomicU64;

    /// The general registers that calls may change, and 16 of AVX.
    #[repr(C, align(32))]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Registers {
        vectors: [[u64; 4]; 16],
        general: [u64; 8],
    }

    /// What the replaced functions have: a conditional jump and an address relative to the instruction.
    #[unsafe(naked)]
    extern "C" fn twice(_of: usize) -> usize {
        naked_asm!(
            "test rdi, rdi",
            "je 2f",
            "lea rax, [rip + 3f]",
            "mov rax, [rax]",
            "imul rax, rdi",
            "ret",
            "2:",
            "mov eax, 77",
            "ret",
            "3:",
            ".quad 2",
        )
    }
    const TWICE: usize = 26;

    /// Sets the registers, calls [`twice`] with 21, and stores the registers.
    #[unsafe(naked)]
    extern "C" fn with_registers(_registers: &mut Registers) -> usize {
        naked_asm!(
            "push rbx",
            "mov rbx, rdi",
            "vmovdqa ymm0, [rbx]", "vmovdqa ymm1, [rbx + 32]", "vmovdqa ymm2, [rbx + 64]",
            "vmovdqa ymm3, [rbx + 96]", "vmovdqa ymm4, [rbx + 128]", "vmovdqa ymm5, [rbx + 160]",
            "vmovdqa ymm6, [rbx + 192]", "vmovdqa ymm7, [rbx + 224]", "vmovdqa ymm8, [rbx + 256]",
            "vmovdqa ymm9, [rbx + 288]", "vmovdqa ymm10, [rbx + 320]", "vmovdqa ymm11, [rbx + 352]",
            "vmovdqa ymm12, [rbx + 384]", "vmovdqa ymm13, [rbx + 416]", "vmovdqa ymm14, [rbx + 448]",
            "vmovdqa ymm15, [rbx + 480]",
            "mov rdi, [rbx + 512]", "mov rsi, [rbx + 520]", "mov rdx, [rbx + 528]",
            "mov rcx, [rbx + 536]", "mov r8, [rbx + 544]", "mov r9, [rbx + 552]",
            "mov r10, [rbx + 560]", "mov r11, [rbx + 568]",
            "call {twice}",
            "vmovdqa [rbx], ymm0", "vmovdqa [rbx + 32], ymm1", "vmovdqa [rbx + 64], ymm2",
            "vmovdqa [rbx + 96], ymm3", "vmovdqa [rbx + 128], ymm4", "vmovdqa [rbx + 160], ymm5",
            "vmovdqa [rbx + 192], ymm6", "vmovdqa [rbx + 224], ymm7", "vmovdqa [rbx + 256], ymm8",
            "vmovdqa [rbx + 288], ymm9", "vmovdqa [rbx + 320], ymm10", "vmovdqa [rbx + 352], ymm11",
            "vmovdqa [rbx + 384], ymm12", "vmovdqa [rbx + 416], ymm13", "vmovdqa [rbx + 448], ymm14",
            "vmovdqa [rbx + 480], ymm15",
            "mov [rbx + 512], rdi", "mov [rbx + 520], rsi", "mov [rbx + 528], rdx",
            "mov [rbx + 536], rcx", "mov [rbx + 544], r8", "mov [rbx + 552], r9",
            "mov [rbx + 560], r10", "mov [rbx + 568], r11",
            "pop rbx",
            "ret",
            twice = sym twice,
        )
    }

    /// Throws through the frame of [`enter`]; padded, as functions are.
    #[unsafe(naked)]
    unsafe extern "C-unwind" fn throws() {
        naked_asm!(
            ".cfi_startproc", "push rax", ".cfi_adjust_cfa_offset 8", "nop", "nop", "nop", "nop", "call {thrown}", ".cfi_endproc",
            thrown = sym thrown,
        )
    }
    const THROWS: usize = 10;

    extern "C-unwind" fn thrown() {
        std::panic::resume_unwind(Box::new(5));
    }

    #[unsafe(naked)]
    unsafe extern "C-unwind" fn call_throws() {
        naked_asm!(
            ".cfi_startproc", "push rax", ".cfi_adjust_cfa_offset 8", "call {throws}", "pop rax", ".cfi_adjust_cfa_offset -8", "ret", ".cfi_endproc",
            throws = sym throws,
        )
    }

    static SEEN: AtomicU64 = AtomicU64::new(0);
    static REAL: AtomicUsize = AtomicUsize::new(0);

    /// Changes the registers that calls may change, and returns a multiple of the real result.
    extern "C" fn replacement(of: usize) -> usize {
        // SAFETY: changes what calls may change.
        unsafe {
            std::arch::asm!("vzeroall", out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _,
                out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _,
                out("xmm14") _, out("xmm15") _, out("r8") _, out("r9") _, out("r10") _,
                out("r11") _);
        }
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
        let mut registers = Registers {
            vectors: std::array::from_fn(|at| [at as u64 + 1, 2, 3, !(at as u64)]),
            general: [21, 102, 103, 104, 105, 106, 107, 108],
        };
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
