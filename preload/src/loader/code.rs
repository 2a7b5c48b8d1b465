//! Instructions of functions that are replaced while a program runs.
//!
//! No page can be written and executed at any time, and none becomes executable that could be written: a copy of the
//! pages is made in a file in memory, changed there, and mapped over them at once. A system that forbids such mappings
//! keeps the function as it is.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderOptions, Instruction,
    InstructionBlock, Mnemonic, OpKind,
};
use sidecar_core::descriptors::{self, Kept};

use crate::loader::loaded::{page_bytes, page_of};

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

/// Reserves memory that jumps from an object at these addresses reach; whole pages.
pub fn reserve(from: usize, to: usize, bytes: usize) -> Option<usize> {
    /// How far from the program is looked, in steps; jumps reach 2 GiB.
    const STEPS: usize = 1 << 10;
    const STEP: usize = 1 << 20;
    let above = (1..STEPS).filter_map(|step| page_of(to).checked_add(step * STEP));
    let below = (1..STEPS).filter_map(|step| page_of(from).checked_sub(step * STEP));
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    below.chain(above).find(|at| {
        // SAFETY: takes addresses that nothing uses.
        let found = unsafe { libc::mmap(*at as *mut c_void, bytes, libc::PROT_NONE, flags, -1, 0) };
        if found == libc::MAP_FAILED {
            return false;
        }
        if found as usize != *at {
            // A kernel before 4.17 takes the address for a wish.
            // SAFETY: mapped just now.
            unsafe { libc::munmap(found, bytes) };
        }
        found as usize == *at
    })
}

/// Puts code at an address. No thread may execute what is replaced.
///
/// # Safety
///
/// The pages are code of this program, or reserved for it, and the new code does what the old code did.
pub unsafe fn put(address: usize, code: &[u8]) -> io::Result<()> {
    let first = page_of(address);
    let end = page_of(address + code.len() - 1) + page_bytes();
    let mut pages = vec![0; end - first];
    // SAFETY: pages of the program, which may be read.
    unsafe { (first as *const u8).copy_to(pages.as_mut_ptr(), pages.len()) };
    pages[address - first..][..code.len()].copy_from_slice(code);
    // SAFETY: the pages have what they had, and the new code.
    unsafe { map(first, &pages) }
}

/// Maps new bytes in place of pages.
///
/// # Safety
///
/// The pages are code of this program, or reserved for it.
pub unsafe fn map(address: usize, bytes: &[u8]) -> io::Result<()> {
    let file = descriptors::above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
        // SAFETY: takes a string.
        let opened = unsafe { libc::memfd_create(c"llama-sidecar".as_ptr(), libc::MFD_CLOEXEC) };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: opened just now.
        Ok(unsafe { File::from_raw_fd(opened) })
    })?;
    let file = Kept::new(file)?;
    file.write_all_at(bytes, 0)?;
    let descriptor = file.get()?.as_raw_fd();
    let (access, flags) = (
        libc::PROT_READ | libc::PROT_EXEC,
        libc::MAP_PRIVATE | libc::MAP_FIXED,
    );
    // SAFETY: as the caller ensures.
    let mapped = unsafe {
        let address = address as *mut c_void;
        libc::mmap(address, bytes.len(), access, flags, descriptor, 0)
    };
    match mapped {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

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

    #[test]
    fn code_is_exchanged_and_never_writable() {
        let page = page_bytes();
        let here = page_bytes as *const () as usize;
        let place = reserve(here, here, page).expect("space");
        let function = |result: u8| [0xb8, result, 0, 0, 0, 0xc3];
        let mut bytes = vec![0xcc; page];
        bytes[page - 6..].copy_from_slice(&function(7));
        let address = place + page - 6;
        // SAFETY: reserved above.
        unsafe { map(place, &bytes) }.expect("mapped");
        // SAFETY: a function without arguments.
        let code: extern "C" fn() -> i32 = unsafe { std::mem::transmute(address) };
        assert_eq!(code(), 7);
        // SAFETY: nothing runs it.
        unsafe { put(address, &function(9)) }.expect("mapped");
        assert_eq!(code(), 9);
        let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
        let line = maps
            .lines()
            .find(|line| line.starts_with(&format!("{place:x}-")));
        assert!(line.expect("the page").contains(" r-xp "), "{line:?}");
    }
}
