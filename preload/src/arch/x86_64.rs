//! The code for x86-64.

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderOptions, Instruction,
    InstructionBlock, Mnemonic, OpKind,
};

/// Relocations of slots that hold the address of a function.
pub const GLOB_DAT: u32 = 6;
/// The same, of the procedure linkage table.
pub const JUMP_SLOT: u32 = 7;

/// How far from a program memory for code is looked for, in MiB; jumps reach 2 GiB.
pub const REACH_MIB: usize = 1 << 10;
/// A jump to an address within 2 GiB: the opcode and the distance.
pub const JUMP: usize = 5;
/// Where calls may go to by a pointer, with control-flow protection: stays where it is.
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The first instructions of a function, in whose place a jump has space.
pub struct Start {
    /// The address of the jump.
    pub address: usize,
    instructions: Vec<Instruction>,
    /// The address of the first instruction that stays.
    rest: usize,
}

impl Start {
    /// Reads a function of which these are all bytes; an error is why a jump has no space.
    pub fn of(bytes: &[u8], address: usize) -> Result<Start, &'static str> {
        let skipped = if bytes.starts_with(&ENDBR64) {
            ENDBR64.len()
        } else {
            0
        };
        let start = address + skipped;
        let mut decoder =
            Decoder::with_ip(64, &bytes[skipped..], start as u64, DecoderOptions::NONE);
        let (mut instructions, mut rest) = (Vec::new(), start);
        let mut targets = Vec::new();
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                return Err("has instructions that are not known");
            }
            let is_call = instruction.mnemonic() == Mnemonic::Call;
            if instruction.op0_kind() == OpKind::NearBranch64 && !is_call {
                targets.push(instruction.near_branch_target() as usize);
            }
            if rest < start + JUMP {
                rest = instruction.next_ip() as usize;
                let ends = matches!(instruction.mnemonic(), Mnemonic::Jmp | Mnemonic::Ret);
                // A call would leave an address in the moved code on the stack, which exceptions do not know.
                if is_call || ends && rest < start + JUMP {
                    return Err("has no space for a jump at its start");
                }
                instructions.push(instruction);
            }
        }
        if rest < start + JUMP {
            return Err("is shorter than a jump");
        }
        // Not to the start itself: that is another call.
        if targets.iter().any(|to| (start + 1..rest).contains(to)) {
            return Err("jumps back to where a jump would be");
        }
        Ok(Start {
            address: start,
            instructions,
            rest,
        })
    }

    /// Returns code for another address that does what the first instructions do, and goes on after them.
    pub fn moved(mut self, to: usize) -> Result<Vec<u8>, &'static str> {
        let back = Instruction::with_branch(Code::Jmp_rel32_64, self.rest as u64);
        self.instructions
            .push(back.map_err(|_| "cannot be continued")?);
        let block = InstructionBlock::new(&self.instructions, to as u64);
        match BlockEncoder::encode(64, block, BlockEncoderOptions::NONE) {
            Ok(moved) => Ok(moved.code_buffer),
            Err(_) => Err("begins with instructions that cannot be moved"),
        }
    }
}

/// Returns a jump from an address to another one, within 2 GiB.
pub fn jump(from: usize, to: usize) -> Option<[u8; JUMP]> {
    let distance = to.wrapping_sub(from + JUMP) as isize;
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, a, b, c, d])
}

/// Returns the instructions that hand the call of a function to `enter`: `push NUMBER; jmp [rip + 0]`, and the
/// address.
pub fn stub_head(number: usize, enter: usize) -> Vec<u8> {
    let mut head = vec![0x68];
    head.extend((number as u32).to_le_bytes());
    head.extend([0xff, 0x25, 0, 0, 0, 0]);
    head.extend(enter.to_le_bytes());
    head
}

/// Calls `visit` with the addresses that instructions of code at an address call, or jump to. Other bytes may look like
/// such instructions.
pub fn branches(start: usize, bytes: &[u8], mut visit: impl FnMut(usize)) {
    // Each byte of the program: only the opcodes are compared.
    let opcodes = bytes.iter().enumerate();
    for (at, _) in opcodes.filter(|(_, opcode)| matches!(opcode, 0xe8 | 0xe9)) {
        let distance = bytes
            .get(at + 1..at + JUMP)
            .and_then(|of| of.try_into().ok());
        let Some(distance) = distance.map(i32::from_le_bytes) else {
            continue;
        };
        visit((start + at + JUMP).wrapping_add_signed(distance as isize));
    }
}

/// Returns why calls of functions of this program cannot be seen on this processor, if so.
pub fn lacks() -> Option<&'static str> {
    (!std::arch::is_x86_feature_detected!("xsave")).then_some("needs a processor with XSAVE")
}

/// Lets processors see instructions that were written: on x86-64 they do.
///
/// # Safety
///
/// None here.
pub unsafe fn code_written(_: usize, _: usize) {}

/// Registers that calls may change besides the general ones, by the bits of `XCR0`: x87, SSE, AVX, AVX-512.
pub const STATE: u32 = 0b1110_0111;
/// What they take: 512 bytes, a header of 64, and up to the end of the last AVX-512 registers.
pub const STATE_BYTES: usize = 2688;

/// The body of an exported function: jumps to the address that `$route` returns, with all arguments unchanged.
macro_rules! routed {
    ($hook:expr, $route:path) => {
        std::arch::naked_asm!(
            // All registers that can hold arguments (System V ABI): xmm0 to
            // xmm7, six integers, and al, the number of vector arguments. The
            // stack is on 16 bytes then, as calls want it.
            ".cfi_startproc",
            "sub rsp, 200",
            ".cfi_adjust_cfa_offset 200",
            "movups [rsp], xmm0",
            "movups [rsp + 16], xmm1",
            "movups [rsp + 32], xmm2",
            "movups [rsp + 48], xmm3",
            "movups [rsp + 64], xmm4",
            "movups [rsp + 80], xmm5",
            "movups [rsp + 96], xmm6",
            "movups [rsp + 112], xmm7",
            "mov [rsp + 128], rdi",
            "mov [rsp + 136], rsi",
            "mov [rsp + 144], rdx",
            "mov [rsp + 152], rcx",
            "mov [rsp + 160], r8",
            "mov [rsp + 168], r9",
            "mov [rsp + 176], rax",
            "mov edi, {hook}",
            "mov rsi, [rsp + 200]",
            "lea rdx, [rsp + 128]",
            "call {route}",
            "mov r11, rax",
            "mov rax, [rsp + 176]",
            "mov r9, [rsp + 168]",
            "mov r8, [rsp + 160]",
            "mov rcx, [rsp + 152]",
            "mov rdx, [rsp + 144]",
            "mov rsi, [rsp + 136]",
            "mov rdi, [rsp + 128]",
            "movups xmm7, [rsp + 112]",
            "movups xmm6, [rsp + 96]",
            "movups xmm5, [rsp + 80]",
            "movups xmm4, [rsp + 64]",
            "movups xmm3, [rsp + 48]",
            "movups xmm2, [rsp + 32]",
            "movups xmm1, [rsp + 16]",
            "movups xmm0, [rsp]",
            "add rsp, 200",
            ".cfi_adjust_cfa_offset -200",
            "jmp r11",
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
            // The path is the only argument in a register. The stack is on 16 bytes then.
            "push rdi",
            ".cfi_adjust_cfa_offset 8",
            "call {destination}",
            "pop rdi",
            ".cfi_adjust_cfa_offset -8",
            "test rax, rax",
            "jnz 2f",
            "jmp rdx",
            "2:",
            "ret",
            ".cfi_endproc",
            destination = sym $destination,
        )
    };
}
pub(crate) use kept_or_real;

/// Defines a function that jumps to the function of the same name in libgcc_s.
macro_rules! found {
    ($name:ident, $find:path) => {
        std::arch::global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ", @function"),
            concat!(stringify!($name), ":"),
            ".cfi_startproc",
            "mov r11, [rip + 4f]",
            "test r11, r11",
            "jnz 2f",
            // The registers of the arguments: there are four at most. The stack is on 16
            // bytes then, as calls want it.
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "sub rsp, 8",
            ".cfi_adjust_cfa_offset 40",
            "lea rdi, [rip + 3f]",
            "lea rsi, [rip + 4f]",
            "call {find}",
            "mov r11, rax",
            "add rsp, 8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            ".cfi_adjust_cfa_offset -40",
            "2:",
            "jmp r11",
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

/// The instruction that jumps to a function of this library.
macro_rules! branch {
    () => {
        "jmp"
    };
}
pub(crate) use branch;

/// The body of the function that each replaced function jumps to.
macro_rules! enter {
    ($destination:path) => {
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
            bytes = const crate::arch::STATE_BYTES,
            state = const crate::arch::STATE,
            destination = sym $destination,
        )
    };
}
pub(crate) use enter;

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(bytes: &[u8]) -> &'static str {
        Start::of(bytes, 0x1000).err().unwrap_or("")
    }

    #[test]
    fn a_start_without_space_is_refused() {
        // test rdi, rdi; je +1; ret; ret
        let fits = [0x48, 0x85, 0xff, 0x74, 0x01, 0xc3, 0xc3];
        assert_eq!(refused(&fits), "");
        assert_eq!(refused(&[0xc3]), "has no space for a jump at its start");
        assert_eq!(refused(&[0x90, 0x90]), "is shorter than a jump");
        // push rax; call
        let calls = [0x50, 0xe8, 0, 0, 0, 0, 0xc3];
        assert_eq!(refused(&calls), "has no space for a jump at its start");
        // nop; dec edi; jne to the second instruction; ret
        let back = [0x90, 0xff, 0xcf, 0x75, 0xfc, 0x90, 0xc3];
        assert_eq!(refused(&back), "jumps back to where a jump would be");
        // The same, to the first instruction: a call of itself.
        let again = [0x90, 0xff, 0xcf, 0x75, 0xfb, 0x90, 0xc3];
        assert_eq!(refused(&again), "");
        assert_eq!(
            refused(&[0x06, 0x06]),
            "has instructions that are not known"
        );
        assert_eq!(refused(&[]), "is shorter than a jump");
    }

    #[test]
    fn moved_instructions_do_the_same_elsewhere() {
        // endbr64; cmp dword ptr [rip + 16], 0; ret
        let bytes = [0xf3, 0x0f, 0x1e, 0xfa, 0x83, 0x3d, 16, 0, 0, 0, 0, 0xc3];
        let start = Start::of(&bytes, 0x1000)
            .map_err(str::to_owned)
            .expect("space");
        assert_eq!(start.address, 0x1004, "behind endbr64");
        let moved = start.moved(0x2000).expect("near");
        // The same address, and a jump to the rest.
        let distance = (0x100b + 16 - 0x2007_i32).to_le_bytes();
        assert_eq!(moved[..7], [&[0x83, 0x3d][..], &distance, &[0]].concat());
        assert_eq!(jump(0x2007, 0x100b).expect("near"), moved[7..]);
        assert_eq!(jump(0x1000, 1 << 40), None);
    }

    #[test]
    fn a_function_of_one_jump_and_targets_beyond_2_gib() {
        let start = |bytes: &[u8]| Start::of(bytes, 0x1000).map_err(str::to_owned);
        // jmp to 0x2000: it calls another function. Not the short form.
        let one = [0xe9, 0xfb, 0x0f, 0, 0];
        let moved = start(&one).and_then(|one| Ok(one.moved(0x3000)?));
        assert_eq!(
            moved.expect("near")[..JUMP],
            jump(0x3000, 0x2000).expect("near")
        );
        assert_eq!(
            refused(&[0xeb, 0x40, 0xcc, 0xcc, 0xcc, 0xcc]),
            "has no space for a jump at its start"
        );
        // A jump reaches all addresses through a pointer: jmp [rip + ...].
        const FAR: usize = 1 << 40;
        let moved = start(&one).and_then(|one| Ok(one.moved(FAR)?));
        let moved = moved.expect("a pointer");
        assert_eq!(moved[..2], [0xff, 0x25]);
        assert!(moved.ends_with(&0x1005_u64.to_le_bytes()), "{moved:x?}");
        // An operand does not: cmp dword ptr [rip + 16], 0; ret
        let operand = [0x83, 0x3d, 16, 0, 0, 0, 0, 0xc3];
        let moved = Start::of(&operand, 2 * FAR).and_then(|operand| operand.moved(FAR));
        assert_eq!(
            moved.expect_err("too far"),
            "begins with instructions that cannot be moved"
        );
    }
}

/// Functions for the test of replaced functions.
#[cfg(test)]
pub mod replaced {
    use std::arch::naked_asm;

    /// The general registers that calls may change, and 16 of AVX.
    #[repr(C, align(32))]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Registers {
        vectors: [[u64; 4]; 16],
        general: [u64; 8],
    }

    impl Registers {
        /// Returns different values, with the argument of a call.
        pub fn with(argument: u64) -> Registers {
            Registers {
                vectors: std::array::from_fn(|at| [at as u64 + 1, 2, 3, !(at as u64)]),
                general: [argument, 102, 103, 104, 105, 106, 107, 108],
            }
        }
    }

    /// What the replaced functions have: a conditional jump and an address relative to the instruction.
    #[unsafe(naked)]
    pub extern "C" fn twice(_of: usize) -> usize {
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
    pub const TWICE: usize = 26;

    /// Sets the registers, calls [`twice`] with 21, and stores the registers.
    #[unsafe(naked)]
    pub extern "C" fn with_registers(_registers: &mut Registers) -> usize {
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
    pub unsafe extern "C-unwind" fn throws() {
        naked_asm!(
            ".cfi_startproc", "push rax", ".cfi_adjust_cfa_offset 8", "nop", "nop", "nop", "nop", "call {thrown}", ".cfi_endproc",
            thrown = sym thrown,
        )
    }
    pub const THROWS: usize = 10;

    extern "C-unwind" fn thrown() {
        std::panic::resume_unwind(Box::new(5));
    }

    #[unsafe(naked)]
    pub unsafe extern "C-unwind" fn call_throws() {
        naked_asm!(
            ".cfi_startproc", "push rax", ".cfi_adjust_cfa_offset 8", "call {throws}", "pop rax", ".cfi_adjust_cfa_offset -8", "ret", ".cfi_endproc",
            throws = sym throws,
        )
    }

    /// Changes the registers that calls may change.
    pub fn clobber() {
        // SAFETY: changes what calls may change.
        unsafe {
            std::arch::asm!("vzeroall", out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _,
                out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _,
                out("xmm14") _, out("xmm15") _, out("r8") _, out("r9") _, out("r10") _,
                out("r11") _);
        }
    }

    /// Returns the instructions of a function that returns a number.
    pub fn returning(result: u8) -> [u8; 6] {
        [0xb8, result, 0, 0, 0, 0xc3]
    }
}
