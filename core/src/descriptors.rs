//! Descriptors inside a program that has its own.
//!
//! A program may start without descriptors 0, 1 and 2, and print to these numbers all the same. It may also
//! close descriptors that it did not open (`closefrom`), and get their numbers for its own files. So each
//! descriptor that is opened here has another number than these three, and one that is kept is known by the
//! identity of its file.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::limits;
use crate::signals::without_write_signals;

/// Calls `open`, whose descriptors are 3 and above, and closed when a program is executed.
///
/// Numbers below are taken during the call, by descriptors with which reads and writes of the program fail as
/// without them.
pub fn above_standard<T>(open: impl FnOnce() -> T) -> T {
    let _taken = Call::begin();
    open()
}

/// A call of [`above_standard`]. The numbers stay taken until the last of the calls that overlap ends.
struct Call;

struct Calls {
    number: usize,
    taken: Vec<Kept<OwnedFd>>,
}

static CALLS: Mutex<Calls> = Mutex::new(Calls {
    number: 0,
    taken: Vec::new(),
});

/// Returns the calls, or nothing in a child whose parent forked while another thread had the lock.
fn calls() -> Option<MutexGuard<'static, Calls>> {
    CALLS.try_lock_for(Duration::from_secs(1))
}

impl Call {
    fn begin() -> Option<Call> {
        let mut calls = calls()?;
        calls.number += 1;
        for number in 0..=libc::STDERR_FILENO {
            // SAFETY: plain system calls; a new descriptor is owned by nothing else.
            let new = unsafe {
                if libc::fcntl(number, libc::F_GETFD) >= 0 {
                    continue;
                }
                #[expect(clippy::disallowed_methods, reason = "takes a number up to 2")]
                let new = libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
                if new < 0 {
                    continue;
                }
                OwnedFd::from_raw_fd(new)
            };
            calls.taken.extend(Kept::new(new));
        }
        Some(Call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let Some(mut calls) = calls() else { return };
        calls.number -= 1;
        if calls.number == 0 {
            calls.taken.clear();
        }
    }
}

/// Opens a file.
pub fn open(options: &OpenOptions, path: impl AsRef<Path>) -> io::Result<File> {
    above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
        options.open(path)
    })
}

/// Reads a file.
pub fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(OpenOptions::new().read(true), path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a file of text.
pub fn read_to_string(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::new();
    open(OpenOptions::new().read(true), path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Returns how many threads of this process can run at a time, at least one, for which the standard library opens files of
/// control groups.
pub fn processors() -> usize {
    above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with numbers above 2")]
        std::thread::available_parallelism().map_or(1, usize::from)
    })
}

/// A descriptor that is kept. Its number is used only while it belongs to the same file or socket, and, of a file that is
/// only read, to what was opened here: a program may have opened its model again.
#[derive(Debug)]
pub struct Kept<T: AsFd = File> {
    opened: ManuallyDrop<T>,
    identity: (libc::dev_t, libc::ino_t),
    is_marked: bool,
}

/// The position of a file that is opened here, which is read at offsets only. No program reads up to there.
const MARK: libc::off_t = (1 << 40) + 0x51de_ca52;

impl<T: AsFd> Kept<T> {
    /// Keeps what was opened just now. Fails where descriptors are scarce: the last quarter of those that the process may
    /// have is left to the program.
    pub fn new(opened: T) -> io::Result<Kept<T>> {
        let most = limits::current(libc::RLIMIT_NOFILE);
        if opened.as_fd().as_raw_fd() as u64 >= most - most.div_ceil(4) {
            return Err(io::Error::other(format!(
                "this process may have {most} descriptors, and the last quarter is left to the program: start it with a higher limit (ulimit -n)"
            )));
        }
        Ok(Kept {
            identity: identity(opened.as_fd())?,
            is_marked: mark(opened.as_fd()),
            opened: ManuallyDrop::new(opened),
        })
    }

    /// Returns what is kept, for a use at once. Fails if the program has closed it.
    pub fn get(&self) -> io::Result<&T> {
        let opened = self.opened.as_fd();
        match identity(opened) {
            Ok(found) if found == self.identity && (!self.is_marked || has_mark(opened)) => {
                Ok(&self.opened)
            }
            _ => Err(io::Error::other(
                "the program has closed a descriptor that it did not open, or this thread has other descriptors (unshare)",
            )),
        }
    }
}

impl<T: AsFd> Drop for Kept<T> {
    fn drop(&mut self) {
        if self.get().is_ok() {
            // SAFETY: the value is not used after this call.
            unsafe { ManuallyDrop::drop(&mut self.opened) };
        }
    }
}

impl Kept {
    /// Opens an open file again, with other options and a position of its own.
    pub fn open_again(&self, options: &OpenOptions) -> io::Result<File> {
        open(
            options,
            format!("/proc/self/fd/{}", self.get()?.as_raw_fd()),
        )
    }

    /// Appends bytes to a file, or writes them to a stream.
    pub fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        without_write_signals(|| self.get()?.write_all(bytes))
    }

    /// Writes bytes at an offset.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        without_write_signals(|| self.get()?.write_all_at(bytes, offset))
    }

    /// Cuts a file.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        without_write_signals(|| self.get()?.set_len(len))
    }
}

/// Returns the device and the inode of a descriptor.
fn identity(of: BorrowedFd<'_>) -> io::Result<(libc::dev_t, libc::ino_t)> {
    let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the struct is filled where the call succeeds.
    unsafe {
        match libc::fstat(of.as_raw_fd(), found.as_mut_ptr()) {
            0 => Ok((found.assume_init().st_dev, found.assume_init().st_ino)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Sets the position of a file that is only read. Returns whether the file system has such positions.
fn mark(of: BorrowedFd<'_>) -> bool {
    let number = of.as_raw_fd();
    // SAFETY: plain system calls.
    unsafe {
        libc::fcntl(number, libc::F_GETFL) & libc::O_ACCMODE == libc::O_RDONLY
            && libc::lseek(number, MARK, libc::SEEK_SET) == MARK
    }
}

fn has_mark(of: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::lseek(of.as_raw_fd(), 0, libc::SEEK_CUR) == MARK }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;
    use testkit::process::in_own_process;

    #[test]
    fn threads_leave_each_other_no_number_of_a_standard_one() {
        // The standard library opens what is closed at the start of a process, so this one closes it itself.
        let name = "descriptors::tests::threads_leave_each_other_no_number_of_a_standard_one";
        if let Some(status) = in_own_process(name, Stdio::inherit()) {
            return assert_eq!(
                status.code(),
                Some(0),
                "1: a number up to 2, 2: one is left"
            );
        }
        (0..=2).for_each(|number| {
            // SAFETY: nothing in this process needs them any more.
            unsafe { libc::close(number) };
        });
        let opens = || {
            (0..20_000)
                .all(|_| above_standard(|| File::open("/")).is_ok_and(|file| file.as_raw_fd() > 2))
        };
        let above = std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(opens));
            threads.map(|thread| thread.join().is_ok_and(|above| above)) == [true; 4]
        });
        // SAFETY: a plain system call.
        let free = (0..=2).all(|number| unsafe { libc::fcntl(number, libc::F_GETFD) } < 0);
        std::process::exit(if !above {
            1
        } else if !free {
            2
        } else {
            0
        });
    }

    #[test]
    fn a_model_that_a_program_opens_again_stays_open() {
        let named = tempfile::NamedTempFile::new().expect("a file");
        named.as_file().write_all(b"text").expect("free space");
        let kept = Kept::new(File::open(named.path()).expect("a file")).expect("a file");
        let mut byte = [0];
        kept.get()
            .and_then(|file| file.read_exact_at(&mut byte, 3))
            .expect("read");
        assert_eq!(&byte, b"t");
        let again = File::open(named.path()).expect("a file");
        let number = kept.opened.as_raw_fd();
        // SAFETY: what a program may do with any number.
        unsafe { libc::dup2(again.as_raw_fd(), number) };
        assert!(kept.get().is_err());
        drop(kept);
        // SAFETY: the number is closed after its check.
        unsafe {
            assert!(libc::fcntl(number, libc::F_GETFD) >= 0, "it is open");
            libc::close(number);
        }
    }

    #[test]
    fn a_number_of_another_file_is_neither_used_nor_closed() {
        let kept = Kept::new(tempfile::tempfile().expect("a file")).expect("a file");
        kept.write_all(b"text").expect("written");
        let other = tempfile::tempfile().expect("a file");
        let number = kept.opened.as_raw_fd();
        // SAFETY: what a program may do with any number.
        unsafe { libc::dup2(other.as_raw_fd(), number) };
        assert!(kept.write_all(b"more").is_err() && kept.get().is_err());
        assert_eq!(other.metadata().expect("a file").len(), 0);
        drop(kept);
        // SAFETY: the number is closed after its check.
        unsafe {
            assert!(libc::fcntl(number, libc::F_GETFD) >= 0, "it is open");
            libc::close(number);
        }
    }
}
