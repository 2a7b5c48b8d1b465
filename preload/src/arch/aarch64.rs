//! The code for AArch64.

use std::arch::asm;
use std::sync::atomic::{AtomicU32, Ordering};

/// Relocations of slots that hold the address of a function.
pub const GLOB_DAT: u32 = 1025;
/// The same, of the procedure linkage table.
pub const JUMP_SLOT: u32 = 1026;

/// How far from a program memory for code is looked for, in MiB; branches reach 128 MiB.
pub const REACH_MIB: usize = 1 << 6;
/// A branch to an address within 128 MiB: one instruction.
pub const JUMP: usize = 4;
/// `bti c`: where calls may go to by a pointer, with control-flow protection. It stays where it is. `paciasp` has the
/// same effect and is moved: the pages of the branch are mapped again, without this protection.
const BTI_C: u32 = 0xd503_245f;
/// The same for calls and jumps, `bti jc`.
const BTI_JC: u32 = 0xd503_24df;

/// The first instruction of a function, in whose place a branch has space.
#[derive(Debug)]
pub struct Start {
    /// The address of the branch.
    pub address: usize,
    instruction: u32,
}

/// What an instruction does at another address.
enum Kind {
    /// The same.
    Fixed,
    /// Branches, always (`b`).
    Branch(usize),
    /// Branches on a condition; the distance is in these bits, in instructions.
    Conditional { to: usize, bits: u32 },
    /// Loads an address into a register.
    Address { register: u32, value: usize },
    /// Not known, or something else at another address.
    Other(&'static str),
}

/// Returns `count` bits of an instruction as a distance.
fn distance(instruction: u32, first: u32, count: u32) -> isize {
    ((instruction << (32 - first - count)) as i32 >> (32 - count)) as isize
}

/// Returns what an instruction at an address does.
fn kind(instruction: u32, address: usize) -> Kind {
    let to = |first, count| address.wrapping_add_signed(4 * distance(instruction, first, count));
    let is = |mask: u32, bits: u32| instruction & mask == bits;
    // Bits 25 to 28 are 0 in what has no meaning, `udf` among it.
    if is(0x1e00_0000, 0) {
        return Kind::Other("has instructions that are not known");
    }
    // `bl`, and `blr` with and without authentication.
    if is(0xfc00_0000, 0x9400_0000) || is(0xfeff_f000, 0xd63f_0000) {
        return Kind::Other("has no space for a jump at its start");
    }
    if is(0xfc00_0000, 0x1400_0000) {
        return Kind::Branch(to(0, 26));
    }
    // `b.cond` and `bc.cond`, `cbz` and `cbnz`; `tbz` and `tbnz`.
    if is(0xff00_0000, 0x5400_0000) || is(0x7e00_0000, 0x3400_0000) {
        let bits = 0x00ff_ffe0;
        return Kind::Conditional {
            to: to(5, 19),
            bits,
        };
    }
    if is(0x7e00_0000, 0x3600_0000) {
        let bits = 0x0007_ffe0;
        return Kind::Conditional {
            to: to(5, 14),
            bits,
        };
    }
    // `adr` and `adrp`.
    if is(0x1f00_0000, 0x1000_0000) {
        let low = (instruction >> 29 & 3) as isize;
        let distance = distance(instruction, 5, 19) << 2 | low;
        let value = match instruction >> 31 {
            0 => address.wrapping_add_signed(distance),
            _ => (address & !0xfff).wrapping_add_signed(distance << 12),
        };
        let register = instruction & 31;
        return Kind::Address { register, value };
    }
    // Loads from an address relative to the instruction.
    if is(0x3b00_0000, 0x1800_0000) {
        return Kind::Other("begins with instructions that cannot be moved");
    }
    Kind::Fixed
}

impl Start {
    /// Reads a function of which these are all bytes; an error is why a branch has no space.
    pub fn of(bytes: &[u8], address: usize) -> Result<Start, &'static str> {
        let mut words = bytes.chunks_exact(JUMP);
        let mut next = || {
            let word = words.next()?.try_into().ok()?;
            Some(u32::from_le_bytes(word))
        };
        let first = next().ok_or("is shorter than a jump")?;
        let (address, instruction) = match [BTI_C, BTI_JC].contains(&first) {
            true => (address + JUMP, next().ok_or("is shorter than a jump")?),
            false => (address, first),
        };
        if !address.is_multiple_of(JUMP) {
            return Err("has instructions that are not known");
        }
        match kind(instruction, address) {
            Kind::Other(why) => Err(why),
            // One instruction is replaced: a branch to it is another call.
            _ => Ok(Start {
                address,
                instruction,
            }),
        }
    }

    /// Returns code for another address that does what the first instruction does, and goes on after it.
    pub fn moved(self, to: usize) -> Result<Vec<u8>, &'static str> {
        const FAR: &str = "begins with instructions that cannot be moved";
        let rest = self.address + JUMP;
        let branch = |at: usize, target| {
            let jump = jump(to + JUMP * at, target).ok_or(FAR)?;
            Ok::<u32, &str>(u32::from_le_bytes(jump))
        };
        let words = match kind(self.instruction, self.address) {
            Kind::Fixed => vec![self.instruction, branch(1, rest)?],
            Kind::Branch(target) => vec![branch(0, target)?],
            Kind::Conditional { to: target, bits } => {
                // Over the next instruction.
                let over = self.instruction & !bits | 2 << 5;
                vec![over, branch(1, rest)?, branch(2, target)?]
            }
            Kind::Address { register, value } => {
                // `ldr REGISTER, [pc + 8]`, and the address.
                let (low, high) = (value as u32, (value as u64 >> 32) as u32);
                vec![0x5800_0040 | register, branch(1, rest)?, low, high]
            }
            Kind::Other(why) => return Err(why),
        };
        Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
    }
}

/// Returns a branch from an address to another one, within 128 MiB.
pub fn jump(from: usize, to: usize) -> Option<[u8; JUMP]> {
    const REACH: isize = 1 << 27;
    let distance = to.wrapping_sub(from) as isize;
    let fits = (-REACH..REACH).contains(&distance) && distance % 4 == 0;
    let instruction = 0x1400_0000 | (distance >> 2) as u32 & 0x03ff_ffff;
    fits.then(|| instruction.to_le_bytes())
}

/// Returns the instructions that hand the call of a function to `enter`: `movz x17, NUMBER; ldr x16, [pc + 12]; br x16`, a
/// space and the address. Code between a call and a function may change both registers.
pub fn stub_head(number: usize, enter: usize) -> Vec<u8> {
    let movz = 0xd280_0011 | (number as u32 & 0xffff) << 5;
    let words = [movz, 0x5800_0070, 0xd61f_0200, 0xd503_201f];
    let mut head: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    head.extend(enter.to_le_bytes());
    head
}

/// Calls `visit` with the addresses that instructions of code at an address call, or branch to.
pub fn branches(start: usize, bytes: &[u8], mut visit: impl FnMut(usize)) {
    for (at, word) in bytes.chunks_exact(JUMP).enumerate() {
        let instruction = u32::from_le_bytes(word.try_into().unwrap_or_default());
        // `b` and `bl`.
        if instruction & 0x7c00_0000 == 0x1400_0000 {
            let distance = JUMP as isize * distance(instruction, 0, 26);
            visit((start + JUMP * at).wrapping_add_signed(distance));
        }
    }
}

/// Returns why calls of functions of this program cannot be seen on this processor, if so.
pub fn lacks() -> Option<&'static str> {
    // SAFETY: reads a number that the kernel passed to the process.
    let features = unsafe { libc::getauxval(libc::AT_HWCAP) };
    HAS_SVE.store((features & libc::HWCAP_SVE != 0).into(), Ordering::Relaxed);
    None
}

/// Whether the processor has SVE, whose registers `enter` keeps.
pub static HAS_SVE: AtomicU32 = AtomicU32::new(0);

/// Lets processors see instructions that were written.
///
/// # Safety
///
/// Memory that may be read.
pub unsafe fn code_written(address: usize, bytes: usize) {
    let of_processor: usize;
    // SAFETY: reads a register that processes may read.
    unsafe { asm!("mrs {}, ctr_el0", out(reg) of_processor, options(nomem, nostack)) };
    let line = |shift: usize| JUMP << (of_processor >> shift & 15);
    let lines = |line: usize| (address / line * line..address + bytes).step_by(line);
    // SAFETY: changes no memory; as the caller ensures.
    unsafe {
        for at in lines(line(16)) {
            asm!("dc cvau, {}", in(reg) at, options(nostack));
        }
        asm!("dsb ish", options(nostack));
        for at in lines(line(0)) {
            asm!("ic ivau, {}", in(reg) at, options(nostack));
        }
        asm!("dsb ish", "isb", options(nostack));
    }
}

/// The body of an exported function: branches to the address that `$route` returns, with all arguments unchanged.
macro_rules! routed {
    ($hook:expr, $route:path) => {
        std::arch::naked_asm!(
            // All registers that can hold arguments (AAPCS64): eight vectors, eight integers, and
            // x8, the address of a result.
            ".cfi_startproc",
            "sub sp, sp, 224",
            ".cfi_def_cfa_offset 224",
            "stp x29, x30, [sp]",
            ".cfi_offset x29, -224",
            ".cfi_offset x30, -216",
            "mov x29, sp",
            "stp q0, q1, [sp, 16]",
            "stp q2, q3, [sp, 48]",
            "stp q4, q5, [sp, 80]",
            "stp q6, q7, [sp, 112]",
            "stp x0, x1, [sp, 144]",
            "stp x2, x3, [sp, 160]",
            "stp x4, x5, [sp, 176]",
            "stp x6, x7, [sp, 192]",
            "str x8, [sp, 208]",
            "mov w0, {hook}",
            "mov x1, x30",
            "add x2, sp, 144",
            "bl {route}",
            "mov x16, x0",
            "ldr x8, [sp, 208]",
            "ldp x6, x7, [sp, 192]",
            "ldp x4, x5, [sp, 176]",
            "ldp x2, x3, [sp, 160]",
            "ldp x0, x1, [sp, 144]",
            "ldp q6, q7, [sp, 112]",
            "ldp q4, q5, [sp, 80]",
            "ldp q2, q3, [sp, 48]",
            "ldp q0, q1, [sp, 16]",
            "ldp x29, x30, [sp]",
            ".cfi_restore x29",
            ".cfi_restore x30",
            "add sp, sp, 224",
            ".cfi_def_cfa_offset 0",
            "br x16",
            ".cfi_endproc",
            hook = const $hook,
            route = sym $route,
        )
    };
}
pub(crate) use routed;

/// The body of the function that loads a model in place of llama.cpp's.
macro_rules! kept_or_real {
    ($destination:path) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            // The path, and the address of the parameters.
            "stp x29, x30, [sp, -48]!",
            ".cfi_def_cfa_offset 48",
            ".cfi_offset x29, -48",
            ".cfi_offset x30, -40",
            "stp x0, x1, [sp, 16]",
            "str x8, [sp, 32]",
            "bl {destination}",
            "mov x16, x1",
            "mov x17, x0",
            "ldr x8, [sp, 32]",
            "ldp x0, x1, [sp, 16]",
            "ldp x29, x30, [sp], 48",
            ".cfi_restore x29",
            ".cfi_restore x30",
            ".cfi_def_cfa_offset 0",
            "cbnz x17, 2f",
            "br x16",
            "2:",
            "mov x0, x17",
            "ret",
            ".cfi_endproc",
            destination = sym $destination,
        )
    };
}
pub(crate) use kept_or_real;

/// Defines a function that branches to the function of the same name in libgcc_s.
macro_rules! found {
    ($name:ident, $find:path) => {
        std::arch::global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ", @function"),
            ".balign 4",
            concat!(stringify!($name), ":"),
            ".cfi_startproc",
            "adrp x16, 4f",
            "ldr x16, [x16, :lo12:4f]",
            "cbnz x16, 2f",
            // The registers of the arguments: there are four at most.
            "stp x29, x30, [sp, -48]!",
            ".cfi_def_cfa_offset 48",
            ".cfi_offset x29, -48",
            ".cfi_offset x30, -40",
            "stp x0, x1, [sp, 16]",
            "stp x2, x3, [sp, 32]",
            "adrp x0, 3f",
            "add x0, x0, :lo12:3f",
            "adrp x1, 4f",
            "add x1, x1, :lo12:4f",
            "bl {find}",
            "mov x16, x0",
            "ldp x2, x3, [sp, 32]",
            "ldp x0, x1, [sp, 16]",
            "ldp x29, x30, [sp], 48",
            ".cfi_restore x29",
            ".cfi_restore x30",
            ".cfi_def_cfa_offset 0",
            "2:",
            "br x16",
            ".cfi_endproc",
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            ".pushsection .rodata.unwind, \"a\", @progbits",
            "3:",
            concat!(".asciz \"", stringify!($name), "\""),
            ".popsection",
            ".pushsection .bss.unwind, \"aw\", @nobits",
            ".balign 8",
            "4:",
            ".zero 8",
            ".popsection",
            find = sym $find,
        );
    };
}
pub(crate) use found;

/// The instruction that branches to a function of this library.
macro_rules! branch {
    () => {
        "b"
    };
}
pub(crate) use branch;

/// An instruction for each register up to a number, which is `\\n` in it.
macro_rules! numbered {
    (15, $instruction:literal) => {
        concat!(".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n", $instruction, "\n.endr")
    };
    (31, $instruction:literal) => {
        concat!(
            ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n",
            $instruction,
            "\n.endr"
        )
    };
}
pub(crate) use numbered;

/// The body of the function that each replaced function branches to, with its number in x17.
macro_rules! enter {
    ($destination:path) => {
        std::arch::naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, -16]!",
            ".cfi_def_cfa_offset 16",
            ".cfi_offset x29, -16",
            ".cfi_offset x30, -8",
            "mov x29, sp",
            ".cfi_def_cfa x29, 16",
            // The general registers that calls may change, from [x29 - 144]; x18 is the platform's.
            "stp x0, x1, [sp, -144]!",
            "stp x2, x3, [sp, 16]",
            "stp x4, x5, [sp, 32]",
            "stp x6, x7, [sp, 48]",
            "stp x8, x9, [sp, 64]",
            "stp x10, x11, [sp, 80]",
            "stp x12, x13, [sp, 96]",
            "stp x14, x15, [sp, 112]",
            // Of the vectors calls may change all, or more than the lower halves.
            "adrp x9, {has_sve}",
            "ldr w9, [x9, :lo12:{has_sve}]",
            "str x9, [sp, 128]",
            "cbnz w9, 2f",
            "sub sp, sp, 512",
            crate::arch::numbered!(31, "str q\\n, [sp, 16 * \\n]"),
            "b 3f",
            "2:",
            ".arch_extension sve",
            "addvl sp, sp, -32",
            crate::arch::numbered!(31, "str z\\n, [sp, \\n, mul vl]"),
            // Predicates have an eighth of the bytes of a vector.
            "addvl sp, sp, -2",
            crate::arch::numbered!(15, "str p\\n, [sp, \\n, mul vl]"),
            "3:",
            "mov x0, x17",
            "sub x1, x29, 144",
            "bl {destination}",
            "mov x16, x0",
            "sub x9, x29, 144",
            "ldp x0, x1, [x9]",
            "ldp x2, x3, [x9, 16]",
            "ldp x4, x5, [x9, 32]",
            "ldp x6, x7, [x9, 48]",
            "ldr x8, [x9, 64]",
            "blr x16",
            "sub x9, x29, 144",
            "str x0, [x9]",
            "ldr w10, [x9, 128]",
            "cbnz w10, 4f",
            crate::arch::numbered!(31, "ldr q\\n, [sp, 16 * \\n]"),
            "b 5f",
            "4:",
            crate::arch::numbered!(15, "ldr p\\n, [sp, \\n, mul vl]"),
            "addvl sp, sp, 2",
            crate::arch::numbered!(31, "ldr z\\n, [sp, \\n, mul vl]"),
            "5:",
            "sub sp, x29, 144",
            "ldp x14, x15, [sp, 112]",
            "ldp x12, x13, [sp, 96]",
            "ldp x10, x11, [sp, 80]",
            "ldp x8, x9, [sp, 64]",
            "ldp x6, x7, [sp, 48]",
            "ldp x4, x5, [sp, 32]",
            "ldp x2, x3, [sp, 16]",
            "ldp x0, x1, [sp]",
            "mov sp, x29",
            ".cfi_def_cfa sp, 16",
            "ldp x29, x30, [sp], 16",
            ".cfi_def_cfa_offset 0",
            ".cfi_restore x29",
            ".cfi_restore x30",
            "ret",
            ".cfi_endproc",
            has_sve = sym crate::arch::HAS_SVE,
            destination = sym $destination,
        )
    };
}
pub(crate) use enter;

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: usize = 0x10_0000;
    const ELSEWHERE: usize = 0x20_0000;

    fn start(words: &[u32]) -> Result<Start, &'static str> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Start::of(&bytes, ADDRESS)
    }

    /// Returns the moved instructions of a function that begins with this one.
    fn moved(word: u32) -> Result<Vec<u32>, &'static str> {
        let bytes = start(&[word])?.moved(ELSEWHERE)?;
        let words = bytes.chunks_exact(4).map(|word| word.try_into());
        Ok(words
            .map(|word| u32::from_le_bytes(word.expect("four")))
            .collect())
    }

    fn branch(from: usize, to: usize) -> u32 {
        u32::from_le_bytes(jump(from, to).expect("near"))
    }

    #[test]
    fn a_start_without_space_is_refused() {
        let refused = |word| moved(word).expect_err("refused");
        // bl; blr x8; blraaz x8
        for call in [0x9400_0010, 0xd63f_0100, 0xd63f_091f] {
            assert_eq!(refused(call), "has no space for a jump at its start");
        }
        assert_eq!(refused(0), "has instructions that are not known");
        // ldr x0, ldr w0, ldrsw x0, prfm, ldr q0, each relative to the instruction
        for load in [
            0x5800_0080,
            0x1800_0080,
            0x9800_0080,
            0xd800_0080,
            0x9c00_0080,
        ] {
            assert_eq!(
                refused(load),
                "begins with instructions that cannot be moved"
            );
        }
        assert_eq!(start(&[]).expect_err("empty"), "is shorter than a jump");
        assert_eq!(
            start(&[BTI_C]).expect_err("no more"),
            "is shorter than a jump"
        );
        // A branch to its own file ends 128 MiB away.
        assert_eq!(jump(0, 1 << 27), None);
        assert_eq!(jump(1 << 27, 0), Some([0, 0, 0, 0x16]));
        assert!(start(&[0xd503_201f]).expect("nop").moved(1 << 30).is_err());
    }

    #[test]
    fn moved_instructions_do_the_same_elsewhere() {
        let rest = ADDRESS + 4;
        let back = |at: usize| branch(ELSEWHERE + 4 * at, rest);
        // paciasp; stp x29, x30, [sp, -16]!; ret; ldr x0, [x1]; add x0, x0, x1
        for fixed in [
            0xd503_233f,
            0xa9bf_7bfd,
            0xd65f_03c0,
            0xf940_0020,
            0x8b01_0000,
        ] {
            assert_eq!(moved(fixed), Ok(vec![fixed, back(1)]), "{fixed:x}");
        }
        // b to 64 bytes after it, and to as many before it
        assert_eq!(
            moved(0x1400_0010),
            Ok(vec![branch(ELSEWHERE, ADDRESS + 64)])
        );
        assert_eq!(
            moved(0x17ff_fff0),
            Ok(vec![branch(ELSEWHERE, ADDRESS - 64)])
        );
        // b.ne, cbz x0, cbnz w1, tbz w2 3, tbnz x3 40: over the next one
        let conditions = [
            (0x5400_0201, 0x5400_0041),
            (0xb400_0200, 0xb400_0040),
            (0x3500_0201, 0x3500_0041),
            (0x3618_0202, 0x3618_0042),
            (0xb740_0203, 0xb740_0043),
        ];
        for (word, over) in conditions {
            let target = branch(ELSEWHERE + 8, ADDRESS + 64);
            assert_eq!(moved(word), Ok(vec![over, back(1), target]), "{word:x}");
        }
        // adr x5, 9 after it; adrp x6, two pages before it: ldr from two instructions later
        let value = (ADDRESS + 9) as u32;
        assert_eq!(moved(0x3000_0045), Ok(vec![0x5800_0045, back(1), value, 0]));
        let value = (ADDRESS - 0x2000) as u32;
        assert_eq!(moved(0xd0ff_ffe6), Ok(vec![0x5800_0046, back(1), value, 0]));
        // After `bti c`, which stays.
        let start = start(&[BTI_C, 0xa9bf_7bfd]).expect("space");
        assert_eq!(start.address, rest);
    }
}

/// Functions for the test of replaced functions.
#[cfg(test)]
pub mod replaced {
    use std::arch::naked_asm;

    /// The registers that calls may change, without the result, and those of vectors that are kept in part.
    #[repr(C, align(16))]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Registers {
        vectors: [[u64; 2]; 32],
        /// x1 to x14.
        general: [u64; 14],
        argument: u64,
    }

    impl Registers {
        /// Returns different values, with the argument of a call.
        pub fn with(argument: u64) -> Registers {
            Registers {
                vectors: std::array::from_fn(|at| [at as u64 + 1, !(at as u64)]),
                general: std::array::from_fn(|at| at as u64 + 101),
                argument,
            }
        }
    }

    /// What the replaced functions have: a conditional branch at the start, and an address relative to the instruction.
    #[unsafe(naked)]
    pub extern "C" fn twice(_of: usize) -> usize {
        naked_asm!(
            "cbz x0, 2f",
            "ldr x1, 3f",
            "mul x0, x0, x1",
            "ret",
            "2:",
            "mov x0, 77",
            "ret",
            "3:",
            ".quad 2",
        )
    }
    pub const TWICE: usize = 24;

    /// Sets the registers, calls [`twice`] with the argument, and stores the registers.
    #[unsafe(naked)]
    pub extern "C" fn with_registers(_registers: &mut Registers) -> usize {
        naked_asm!(
            "stp x29, x30, [sp, -96]!",
            "mov x29, sp",
            "str x19, [sp, 16]",
            "stp d8, d9, [sp, 32]", "stp d10, d11, [sp, 48]", "stp d12, d13, [sp, 64]", "stp d14, d15, [sp, 80]",
            "mov x19, x0",
            super::numbered!(31, "ldr q\\n, [x19, 16 * \\n]"),
            "add x16, x19, 512",
            "ldp x1, x2, [x16, 0]", "ldp x3, x4, [x16, 16]", "ldp x5, x6, [x16, 32]", "ldp x7, x8, [x16, 48]",
            "ldp x9, x10, [x16, 64]", "ldp x11, x12, [x16, 80]", "ldp x13, x14, [x16, 96]",
            "ldr x0, [x19, 624]",
            "bl {twice}",
            super::numbered!(31, "str q\\n, [x19, 16 * \\n]"),
            "add x16, x19, 512",
            "stp x1, x2, [x16, 0]", "stp x3, x4, [x16, 16]", "stp x5, x6, [x16, 32]", "stp x7, x8, [x16, 48]",
            "stp x9, x10, [x16, 64]", "stp x11, x12, [x16, 80]", "stp x13, x14, [x16, 96]",
            "ldp d8, d9, [sp, 32]", "ldp d10, d11, [sp, 48]", "ldp d12, d13, [sp, 64]", "ldp d14, d15, [sp, 80]",
            "ldr x19, [sp, 16]",
            "ldp x29, x30, [sp], 96",
            "ret",
            twice = sym twice,
        )
    }

    /// Throws through the frame of `enter`.
    #[unsafe(naked)]
    pub unsafe extern "C-unwind" fn throws() {
        naked_asm!(
            ".cfi_startproc", "stp x29, x30, [sp, -16]!", ".cfi_def_cfa_offset 16", ".cfi_offset x29, -16",
            ".cfi_offset x30, -8", "bl {thrown}", "nop", ".cfi_endproc",
            thrown = sym thrown,
        )
    }
    pub const THROWS: usize = 12;

    extern "C-unwind" fn thrown() {
        std::panic::resume_unwind(Box::new(5));
    }

    #[unsafe(naked)]
    pub unsafe extern "C-unwind" fn call_throws() {
        naked_asm!(
            ".cfi_startproc", "stp x29, x30, [sp, -16]!", ".cfi_def_cfa_offset 16", ".cfi_offset x29, -16",
            ".cfi_offset x30, -8", "bl {throws}", "ldp x29, x30, [sp], 16", ".cfi_def_cfa_offset 0",
            ".cfi_restore x29", ".cfi_restore x30", "ret", ".cfi_endproc",
            throws = sym throws,
        )
    }

    /// Changes the registers that calls may change.
    pub fn clobber() {
        // SAFETY: changes what calls may change.
        unsafe {
            std::arch::asm!(
                "movi v0.2d, 0", "movi v1.2d, 0", "movi v2.2d, 0", "movi v3.2d, 0", "movi v4.2d, 0", "movi v5.2d, 0", "movi v6.2d, 0", "movi v7.2d, 0",
                "movi v8.2d, 0", "movi v9.2d, 0", "movi v10.2d, 0", "movi v11.2d, 0", "movi v12.2d, 0", "movi v13.2d, 0", "movi v14.2d, 0", "movi v15.2d, 0",
                "movi v16.2d, 0", "movi v17.2d, 0", "movi v18.2d, 0", "movi v19.2d, 0", "movi v20.2d, 0", "movi v21.2d, 0", "movi v22.2d, 0", "movi v23.2d, 0",
                "movi v24.2d, 0", "movi v25.2d, 0", "movi v26.2d, 0", "movi v27.2d, 0", "movi v28.2d, 0", "movi v29.2d, 0", "movi v30.2d, 0", "movi v31.2d, 0",
                "mov x1, 0", "mov x2, 0", "mov x3, 0", "mov x4, 0", "mov x5, 0", "mov x6, 0", "mov x7, 0", "mov x8, 0",
                "mov x9, 0", "mov x10, 0", "mov x11, 0", "mov x12, 0", "mov x13, 0", "mov x14, 0", "mov x15, 0",
                out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _, out("v6") _, out("v7") _,
                out("v8") _, out("v9") _, out("v10") _, out("v11") _, out("v12") _, out("v13") _, out("v14") _, out("v15") _,
                out("v16") _, out("v17") _, out("v18") _, out("v19") _, out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                out("v24") _, out("v25") _, out("v26") _, out("v27") _, out("v28") _, out("v29") _, out("v30") _, out("v31") _,
                out("x1") _, out("x2") _, out("x3") _, out("x4") _, out("x5") _, out("x6") _, out("x7") _, out("x8") _,
                out("x9") _, out("x10") _, out("x11") _, out("x12") _, out("x13") _, out("x14") _, out("x15") _,
            );
        }
    }

    /// Returns the instructions of a function that returns a number: `movz w0, NUMBER; ret`.
    pub fn returning(result: u8) -> [u8; 8] {
        let movz = 0x5280_0000 | u32::from(result) << 5;
        let mut code = [0; 8];
        code[..4].copy_from_slice(&movz.to_le_bytes());
        code[4..].copy_from_slice(&0xd65f_03c0_u32.to_le_bytes());
        code
    }
}
