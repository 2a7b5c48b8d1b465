//! Files in folders that other users may write.
//!
//! A path can name what another user put there: a link to a file of this process, a FIFO, a
//! model. Each file that this project reads or writes by a path of the user goes through here:
//!
//! * A link is followed only if it is the own user's or root's.
//! * A file is written beside its path, under a random name, and renamed. Only a complete file
//!   ever has the path.
//! * What was there stays, unless it is empty or an earlier output of the same kind (see
//!   [`kind_of`]): a name states nothing about who wrote a file. A file of another user always
//!   stays.
//! * Reading never waits for the writer of a FIFO, and a file that commands something is read
//!   only if it is the own user's or root's.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{
    FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use parking_lot::Mutex;
use tempfile::NamedTempFile;

use crate::descriptors::{self, Kept, above_standard};
use crate::signals::without_write_signals;
use crate::text;

/// The end of the name of a file that is not complete. The name starts with a dot.
pub const INCOMPLETE: &str = ".part";

/// The random letters and digits in the name of a file that is not complete, or of a temporary one: more than a user types, so
/// that a name with so many is known.
pub const RANDOM: usize = 16;

/// The most bytes of a text that is read whole.
const MOST_TEXT: u64 = 256 << 20;
/// The links that a path may go through.
const MAX_LINKS: usize = 40;
/// The bytes at the start of a file by which it is known.
const START: usize = 256;
/// The names that an output gets where files of others are.
const MAX_NAMES: u32 = 1000;
/// Attempts at a path to which other programs write at the same time.
const ATTEMPTS: usize = 16;

/// When this process began, if that counts.
static BEGAN: OnceLock<SystemTime> = OnceLock::new();
/// The paths that this process has written.
static WRITTEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Notes that this process begins now: an output that another one writes from here on is not of an
/// earlier run, and stays. Several programs of one command can have the same variables.
pub fn begin() {
    BEGAN.get_or_init(SystemTime::now);
}

/// What a new file may replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Nothing, and an empty file.
    Nothing,
    /// Also an output of an earlier run, of the same kind.
    Own,
    /// Also any other file of the own user, except a model.
    Any,
}

/// Returns how files of a kind start that this project writes; `None` for all others. `start` is
/// the start of a file, at most 256 bytes count.
///
/// ```
/// use sidecar_core::files::kind_of;
///
/// let trace = kind_of(b"{\n  \"schema\": \"llama-sidecar/expert-trace/1\",");
/// assert_eq!(trace.as_deref(), Some("{\"schema\":\"llama-sidecar/expert-trace/1\""));
/// assert_eq!(kind_of(b"{\"schema\": \"of another program\"}"), None);
/// ```
pub fn kind_of(start: &[u8]) -> Option<String> {
    /// Starts up to a quotation mark, without white space.
    const NAMED: [&str; 4] = [
        "{\"schema\":\"llama-sidecar/",
        "[{\"schema\":\"llama-sidecar/",
        "{\"llama_sidecar\":\"",
        "<!doctypehtml><htmllang=en><metacharset=utf-8><metaname=generatorcontent=\"llama-sidecar:",
    ];
    /// Other starts.
    const STARTS: [&[u8]; 10] = [
        b"{ \"llama_sidecar_compare\":",
        b"<svg data-generator=\"llama-sidecar\"",
        b"# rows and hash of each output\n",
        b"layer,expert,count,share\n",
        b"offset,bytes,layer,expert,file\n",
        b"LSROUTES",
        // Routes of these formats are known by the file of marks beside them.
        b"layer,expert\n",
        b"layer,expert,weight\n",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<i2'",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4'",
    ];
    let start = &start[..start.len().min(START)];
    if let Some(of) = STARTS.iter().find(|of| start.starts_with(of)) {
        return Some(String::from_utf8_lossy(of).into_owned());
    }
    let text = String::from_utf8_lossy(start);
    let text: String = text.split_ascii_whitespace().collect();
    let mark = |line: &str| {
        let marks = ["\"mark\":", "\"dropped\":"];
        let rest = line.strip_prefix("{\"token\":")?;
        let rest = rest
            .trim_start_matches(|of: char| of.is_ascii_digit())
            .strip_prefix(',')?;
        marks
            .iter()
            .any(|of| rest.starts_with(of))
            .then(|| "marks".into())
    };
    let status = || {
        let states = ["computing ", "done ", "reload_failed ", "exiting "];
        let line = std::str::from_utf8(start).ok()?.strip_suffix('\n')?;
        let numbers = states.iter().find_map(|state| line.strip_prefix(state))?;
        let (a, b) = numbers.split_once(' ')?;
        (a.parse::<u64>().is_ok() && b.parse::<u64>().is_ok()).then(|| "status".into())
    };
    let named = NAMED.iter().find_map(|named| {
        let end = text.strip_prefix(named)?.find('"')?;
        Some(text[..=named.len() + end].to_owned())
    });
    named.or_else(|| mark(&text)).or_else(status)
}

/// Opens a regular file, or a descriptor of this process, for reading.
pub fn open(path: &Path) -> io::Result<File> {
    let path = resolve(path)?;
    let file = open_at(&path, OpenOptions::new().read(true))?;
    match file.metadata()?.is_file() || is_descriptor(&path) {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// Reads a file that [`open`] opens.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a text that [`open`] opens: a list, prompts, a trace. One with more than [`MOST_TEXT`] bytes is an error.
pub fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    // Not by the size that is stated: that of a pipe is 0.
    let read = open(path)?.take(MOST_TEXT + 1).read_to_string(&mut text)?;
    match read as u64 <= MOST_TEXT {
        true => Ok(text),
        false => Err(io::Error::other("it is larger than 256 MiB")),
    }
}

/// Opens a regular file of the own user or of root for reading: the file has commands, or data
/// that is used without another check.
pub fn open_trusted(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    check_owner(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file of the own user for appending and reading. Creates it if nothing is there.
pub fn append(path: &Path) -> io::Result<File> {
    let path = resolve(path)?;
    let mut options = OpenOptions::new();
    let file = open_at(&path, options.read(true).append(true).create(true))?;
    let found = file.metadata()?;
    check_owner(&found)?;
    check_kind(&found, &start_of(&file)?)?;
    Ok(file)
}

/// Whether a file is a regular one that is empty or starts like this: more may be appended.
pub fn goes_on(file: &File, start: &[u8]) -> io::Result<bool> {
    let there = start_of(file)?;
    Ok(file.metadata()?.is_file() && (there.is_empty() || there.starts_with(start)))
}

/// Writes a file. A file that is there and that it may not replace is an error of the kind
/// `AlreadyExists`, unless it has the same content. Bytes for a FIFO or a terminal are written to
/// it; without a reader, a FIFO is an error.
///
/// The file is not flushed to the disk: the end of a process must not wait for that.
///
/// ```
/// use sidecar_core::files::{self, Replace};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("report.txt");
/// std::fs::write(&path, "notes of the user")?;
/// assert!(files::write(&path, b"a report", Replace::Own).is_err());
/// assert_eq!(std::fs::read(&path)?, b"notes of the user");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write(path: &Path, content: &[u8], replace: Replace) -> io::Result<()> {
    let path = resolve(path)?;
    if let Some(mut stream) = stream(&path)? {
        return without_write_signals(|| stream.write_all(content));
    }
    let mut new = beside(&path)?;
    without_write_signals(|| new.write_all(content))?;
    put(new, &path, content, replace, |_| Ok(())).map(drop)
}

/// Creates an empty file that is written while it is at its path. `start` is how it will start.
/// See [`write()`].
///
/// The file is locked until it is closed. A file that another process has locked stays: the error
/// has the kind `ResourceBusy`.
pub fn create(path: &Path, start: &[u8], replace: Replace) -> io::Result<Kept> {
    let path = resolve(path)?;
    if let Some(stream) = stream(&path)? {
        return Kept::new(stream);
    }
    let new = beside(&path)?;
    let file = put(new, &path, start, replace, |there| match there.try_lock() {
        Err(TryLockError::WouldBlock) => Err(io::Error::new(
            ErrorKind::ResourceBusy,
            "another process writes to it: use a path with %p, which is replaced by the process ID",
        )),
        _ => Ok(()),
    })?;
    Kept::new(file)
}

/// Calls `write` with a path, or, where that fails because of the file that is there, with the first
/// numbered one at which it succeeds. Returns that path. For outputs whose loss would be worse than
/// another name; the log has the name.
pub fn at_free_name<T>(
    path: &Path,
    mut write: impl FnMut(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    let mut refused = None;
    for number in 0..MAX_NAMES {
        let name = with_number(path, number);
        let is_known = WRITTEN.lock().contains(&std::path::absolute(&name)?);
        match write(&name) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                refused.get_or_insert(error);
            }
            written => {
                if let (Some(why), Ok(_), false) = (&refused, &written, is_known) {
                    log::warn!(
                        "{}: {why}; written to {}",
                        text::path(path),
                        text::path(&name)
                    );
                }
                return written.map(|written| (name, written));
            }
        }
    }
    Err(refused.unwrap_or_else(|| io::Error::other("no name is free")))
}

/// Returns a path with a number before the extension, which gives the format.
fn with_number(path: &Path, number: u32) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!(".~{number}~"));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Fails if no file that starts so can be written at a path, so that a long work can fail before it
/// begins. An empty start stands for all outputs. What is no regular file, such as a FIFO or a
/// socket, needs no new file.
pub fn check(path: &Path, start: &[u8], replace: Replace) -> io::Result<()> {
    let path = resolve(path)?;
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => {
            return Err(io::Error::other("it is a folder: name a file in it"));
        }
        Ok(found) if is_descriptor(&path) || !found.is_file() => return Ok(()),
        Ok(_) => {
            let there = open_at(&path, OpenOptions::new().read(true))?;
            check_replaceable(&path, &there, start, replace)?;
        }
        Err(_) => {}
    }
    // Removed at once.
    beside(&path).map(drop).map_err(|error| {
        let what = "make the folder, or name a path that you may write";
        io::Error::new(error.kind(), format!("its folder: {error}: {what}"))
    })
}

/// Renames a complete file to its path; see [`write()`]. `new` is in the same folder, and flushed to
/// the disk first.
pub fn persist(new: NamedTempFile, path: &Path, replace: Replace) -> io::Result<()> {
    new.as_file().sync_all()?;
    let path = resolve(path)?;
    let start = start_of(new.as_file())?;
    put(new, &path, &start, replace, |_| Ok(()))?;
    sync_folder_of(&path)
}

/// Writes renames in the folder of a file to disk.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    descriptors::open(OpenOptions::new().read(true), folder_of(path))?.sync_all()
}

/// Returns what the names of files start with that are not complete yet, and get this path; they end with [`INCOMPLETE`].
pub fn incomplete_prefix(path: &Path) -> String {
    format!(
        ".{}.",
        path.file_name().unwrap_or_default().to_string_lossy()
    )
}

/// Creates a file with a random name in the folder of a path, with the mode that the user gives
/// to new files. It is locked while it is open, so that what a killed process leaves is known.
pub fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let prefix = incomplete_prefix(path);
    let mut new = tempfile::Builder::new();
    new.prefix(&prefix)
        .suffix(INCOMPLETE)
        .rand_bytes(RANDOM)
        .permissions(Permissions::from_mode(0o666));
    loop {
        let made = above_standard(|| new.tempfile_in(folder_of(path))).map_err(|error| {
            // Without the random name.
            let text = error.to_string();
            let cause = text.split(" at path ").next().unwrap_or_default();
            io::Error::new(error.kind(), cause)
        })?;
        if lock_new(made.as_file(), made.path()) {
            return Ok(made);
        }
    }
}

/// Locks a file or folder that was made at a path just now. Returns false if another process has taken it for one that was left.
/// Without locks, what is left stays.
pub fn lock_new(made: &File, path: &Path) -> bool {
    let identity = |found: Metadata| (found.dev(), found.ino());
    let is_there = || {
        let there = fs::symlink_metadata(path).map(identity).ok();
        there.is_some() && made.metadata().map(identity).ok() == there
    };
    !matches!(made.try_lock(), Err(TryLockError::WouldBlock)) && is_there()
}

/// Returns the folder of a file.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Fails if a file is neither the own user's nor root's.
pub fn check_owner(found: &Metadata) -> io::Result<()> {
    // SAFETY: a plain system call.
    let own = unsafe { libc::geteuid() };
    match found.uid() {
        uid if uid == own || uid == 0 => Ok(()),
        uid => Err(io::Error::other(format!(
            "it belongs to user {uid}, not to user {own}: choose a path in a folder of your own"
        ))),
    }
}

/// Fails if a file may not be replaced by one with this content, or with this start.
fn check_replaceable(
    path: &Path,
    there: &File,
    content: &[u8],
    replace: Replace,
) -> io::Result<()> {
    let found = there.metadata()?;
    check_owner(&found)?;
    let start = start_of(there)?;
    check_kind(&found, &start)?;
    let absolute = std::path::absolute(path)?;
    let is_earlier = || {
        let began = BEGAN.get();
        began.is_none_or(|began| found.modified().is_ok_and(|time| time < *began))
    };
    let is_own = || {
        let kind = kind_of(&start);
        kind.is_some() && (content.is_empty() || kind == kind_of(content))
    };
    let is_same = || {
        let mut bytes = vec![0; content.len()];
        found.len() == content.len() as u64
            && there.read_exact_at(&mut bytes, 0).is_ok()
            && bytes == content
    };
    let what = match replace {
        Replace::Any => return Ok(()),
        _ if start.is_empty() => return Ok(()),
        Replace::Own if is_own() => {
            if is_earlier() || WRITTEN.lock().contains(&absolute) {
                return Ok(());
            }
            "another process wrote it while this one ran: use a path with %p, which is replaced by the process ID"
        }
        _ if is_same() => return Ok(()),
        _ => "a file is there that is no earlier version of this output: choose another path",
    };
    Err(io::Error::new(ErrorKind::AlreadyExists, what))
}

/// Fails if a file is a model or not a regular file.
fn check_kind(found: &Metadata, start: &[u8]) -> io::Result<()> {
    match (found.is_file(), start.starts_with(b"GGUF")) {
        (true, true) => Err(io::Error::other(
            "a model is there, which is never written over: choose another path",
        )),
        (true, false) => Ok(()),
        (false, _) => Err(io::Error::other("it is not a regular file")),
    }
}

/// Follows the links of the own user and of root at the end of a path.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_symlink() && !is_descriptor(&path) => {
                check_owner(&found)?;
                path = folder_of(&path).join(fs::read_link(&path)?);
            }
            _ => return Ok(path),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP))
}

/// Returns a path that names the same file when this process has other descriptors and another folder: that of the file, for
/// a path through `/proc`, such as `/dev/fd/3` and `/proc/self/cwd/m.gguf`. Fails if the file has no path.
pub fn lasting_path(path: &Path) -> io::Result<PathBuf> {
    if !passes_proc(path)? {
        return Ok(path.to_owned());
    }
    let of = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let file = of(path)?;
    match fs::canonicalize(path) {
        Ok(target) if of(&target).is_ok_and(|found| found == file) => Ok(target),
        _ => Err(io::Error::other(format!(
            "{} names a descriptor of a file without a path: open the file by its path",
            text::path(path)
        ))),
    }
}

/// Whether the links and folders of an absolute path lead through `/proc`.
fn passes_proc(path: &Path) -> io::Result<bool> {
    let mut at = PathBuf::new();
    let mut rest: Vec<PathBuf> = vec![path.to_owned()];
    let mut links = 0;
    while let Some(next) = rest.pop() {
        let mut components = next.components();
        let Some(first) = components.next() else {
            continue;
        };
        rest.push(components.as_path().to_owned());
        match first {
            Component::ParentDir => {
                at.pop();
                continue;
            }
            Component::CurDir => continue,
            first => at.push(first),
        }
        if at.starts_with("/proc") {
            return Ok(true);
        }
        if fs::symlink_metadata(&at)?.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::from_raw_os_error(libc::ELOOP));
            }
            rest.push(fs::read_link(&at)?);
            at.pop();
        }
    }
    Ok(false)
}

/// Whether a path names a descriptor of this process, as `/dev/stdout` does. The kernel follows
/// it: what it names may have no path.
fn is_descriptor(path: &Path) -> bool {
    path.starts_with("/proc/self/fd") || path.starts_with("/dev/fd")
}

/// Opens what a path without links names. Never waits for another end of a FIFO.
fn open_at(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = match is_descriptor(path) {
        true => 0,
        false => libc::O_NOFOLLOW | libc::O_NONBLOCK,
    };
    descriptors::open(options.custom_flags(flags), path)
}

/// Opens what takes bytes and keeps none: a FIFO, a terminal, a descriptor of this process.
fn stream(path: &Path) -> io::Result<Option<File>> {
    let Ok(found) = fs::metadata(path) else {
        return Ok(None);
    };
    if found.is_file() && !is_descriptor(path) {
        return Ok(None);
    }
    let file = open_at(path, OpenOptions::new().append(true))?;
    let found = file.metadata()?;
    let kind = found.file_type();
    if is_descriptor(path) {
        return Ok(Some(file));
    }
    check_owner(&found)?;
    match kind.is_fifo() || kind.is_char_device() {
        true => Ok(Some(file)),
        false => Err(io::Error::other("neither a regular file nor a stream")),
    }
}

/// Renames a new file to its path, and returns it. `check` is called with an earlier file.
fn put(
    mut new: NamedTempFile,
    path: &Path,
    content: &[u8],
    replace: Replace,
    check: impl Fn(&File) -> io::Result<()>,
) -> io::Result<File> {
    let absolute = std::path::absolute(path)?;
    for _ in 0..ATTEMPTS {
        let there = match open_at(path, OpenOptions::new().read(true)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match new.persist_noclobber(path) {
                    Ok(file) => {
                        WRITTEN.lock().insert(absolute);
                        return Ok(file);
                    }
                    // Another program was faster.
                    Err(failed) if failed.error.kind() == ErrorKind::AlreadyExists => {
                        new = failed.file;
                        continue;
                    }
                    Err(failed) => return Err(failed.error),
                }
            }
            Err(error) => return Err(error),
        };
        check(&there)?;
        check_replaceable(path, &there, content, replace)?;
        let found = there.metadata()?;
        // Without the right to give files away, the new one is the own user's.
        let _ = fchown(new.as_file(), Some(found.uid()), Some(found.gid()));
        let mode = Permissions::from_mode(found.mode() & 0o777);
        new.as_file().set_permissions(mode)?;
        let file = new.persist(path).map_err(|failed| failed.error)?;
        WRITTEN.lock().insert(absolute);
        return Ok(file);
    }
    Err(io::Error::other(
        "another program writes to this path all the time",
    ))
}

/// Returns the first bytes of a file.
fn start_of(file: &File) -> io::Result<Vec<u8>> {
    let mut start = [0; START];
    let read = file.read_at(&mut start, 0)?;
    Ok(start[..read].to_vec())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    /// Another user, if this process may give files away.
    const OTHER: u32 = 65534;

    #[test]
    fn a_path_through_proc_is_that_of_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path().canonicalize().expect("a folder");
        let [real, deleted] = ["real", "deleted"].map(|name| folder.join(name));
        for path in [&real, &deleted] {
            fs::write(path, "bytes").expect("free space");
        }
        let at = |name: &str, target: &Path| {
            symlink(target, folder.join(name)).expect("a link");
            folder.join(name)
        };
        let opened = File::open(&real).expect("a file");
        let in_folder = File::open(&folder).expect("a folder");
        let [number, of_folder] = [opened.as_raw_fd(), in_folder.as_raw_fd()];
        let through = [
            format!("/proc/self/fd/{number}").into(),
            format!("/dev/fd/{number}").into(),
            format!("/proc/thread-self/fd/{number}").into(),
            format!("/dev/fd/{of_folder}/real").into(),
            format!("/proc/self/root{}", real.display()).into(),
            at("number", format!("/proc/self/fd/{number}").as_ref()),
            at("folder", format!("/dev/fd/{of_folder}").as_ref()).join("real"),
        ];
        for path in through {
            assert_eq!(lasting_path(&path).expect("a path"), real, "{path:?}");
        }
        // Links of the user are followed each time.
        at("linked", Path::new("."));
        for path in [
            real.clone(),
            at("link", Path::new("./linked/real")),
            folder.join("linked/real"),
        ] {
            assert_eq!(lasting_path(&path).expect("a path"), path);
        }
        let gone = File::open(&deleted).expect("a file");
        fs::remove_file(&deleted).expect("a file");
        let path = format!("/dev/fd/{}", gone.as_raw_fd());
        let refused = lasting_path(path.as_ref()).expect_err("no path");
        assert!(refused.to_string().contains("without a path"), "{refused}");
        let around = at("around", Path::new("around"));
        assert!(lasting_path(&around).is_err());
    }

    fn give_away(path: &Path) -> bool {
        let given = chown(path, Some(OTHER), None);
        if given.is_err() {
            eprintln!("not tested without root: a file of another user");
        }
        given.is_ok()
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> = entries
            .map(|entry| name(entry).into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    /// An output of an earlier run.
    fn earlier(path: &Path, content: &[u8]) {
        fs::write(path, content).expect("free space");
        let file = open_at(path, OpenOptions::new().write(true)).expect("a file");
        let time = SystemTime::now() - std::time::Duration::from_secs(3600);
        file.set_modified(time).expect("a time");
    }

    #[test]
    fn an_earlier_output_of_the_kind_is_replaced_with_its_mode_and_nothing_else() {
        let page = b"<!doctype html><html lang=en><meta charset=utf-8><meta name=generator content=\"llama-sidecar: Margins\">";
        let kinds: [&[u8]; 9] = [
            b"{\n  \"schema\": \"llama-sidecar/expert-trace/1\",\n",
            b"[{\"schema\":\"llama-sidecar/experts/1\",\"layer\":1}]",
            b"{\"llama_sidecar\":\"measured\",",
            b"{ \"llama_sidecar_compare\": 1,",
            page,
            b"done 1 0\n",
            b"{\"token\":12,\"dropped\":3}\n",
            b"LSROUTES....",
            b"layer,expert,count,share\n0,0,1,0.5\n",
        ];
        let others: [&[u8]; 6] = [
            b"{\"schema\": \"of another\"}",
            b"<!doctype html><html lang=en><meta charset=utf-8><title>mine</title>",
            b"done with it\n",
            b"done 1 0\nand notes\n",
            b"{\"token\":\"secret\"}",
            b"notes",
        ];
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        let tried = |there: &[u8], new: &[u8], goes: bool| {
            WRITTEN.lock().remove(&path);
            earlier(&path, there);
            fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("a mode");
            let text = || format!("{there:?} by {new:?}");
            assert_eq!(check(&path, new, Replace::Own).is_ok(), goes, "{}", text());
            let written = write(&path, new, Replace::Own);
            assert_eq!(written.is_ok(), goes, "{}: {written:?}", text());
            let expected = if goes { new } else { there };
            assert_eq!(fs::read(&path).expect("a file"), expected, "{}", text());
            assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o640);
            fs::remove_file(&path).expect("a file");
        };
        for (at, there) in kinds.iter().enumerate() {
            for (new, content) in kinds.iter().enumerate() {
                tried(there, content, at == new);
            }
        }
        for there in others {
            for new in kinds {
                tried(there, new, false);
                tried(b"", new, true);
            }
            tried(there, there, true);
        }
        fs::write(&path, "notes").expect("free space");
        write(&path, b"new", Replace::Any).expect("forced");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn an_output_beside_the_file_of_another_has_the_same_name_each_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.json");
        let name_of = |number| folder.path().join(format!("t.~{number}~.json"));
        earlier(&path, b"of the user");
        earlier(&folder.path().join("t.~1~.json"), b"of the user");
        for text in [
            "{\"schema\":\"llama-sidecar/a/1\"}",
            "{\"schema\":\"llama-sidecar/a/1\"} ",
        ] {
            let write = |path: &Path| write(path, text.as_bytes(), Replace::Own);
            let (name, ()) = at_free_name(&path, write).expect("written");
            assert_eq!(name, folder.path().join("t.~2~.json"));
            assert_eq!(fs::read(&name).expect("a file"), text.as_bytes());
        }
        // What another process wrote since this one began.
        begin();
        WRITTEN.lock().remove(&name_of(2));
        let other = open_at(&name_of(2), OpenOptions::new().write(true)).expect("a file");
        let time = SystemTime::now() + std::time::Duration::from_secs(3600);
        other.set_modified(time).expect("a time");
        let text = b"{\"schema\":\"llama-sidecar/a/1\"} 2";
        let write = |path: &Path| write(path, text, Replace::Own);
        let (name, ()) = at_free_name(&path, write).expect("written");
        assert_eq!(name, folder.path().join("t.~3~.json"));
        assert_eq!(fs::read(&path).expect("a file"), b"of the user");
        assert_eq!(
            names(folder.path()),
            ["t.json", "t.~1~.json", "t.~2~.json", "t.~3~.json"]
        );
    }

    #[test]
    fn a_model_is_never_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, link) = (folder.path().join("m"), folder.path().join("link"));
        fs::write(&path, b"GGUF and more").expect("free space");
        symlink("m", &link).expect("a link");
        for path in [&path, &link] {
            assert!(
                write(path, b"x", Replace::Any).is_err()
                    && create(path, b"", Replace::Any).is_err()
            );
            assert!(append(path).is_err() && check(path, b"", Replace::Any).is_err());
            let new = beside(path).expect("free space");
            assert!(persist(new, path, Replace::Any).is_err());
        }
        assert_eq!(fs::read(&path).expect("a file"), b"GGUF and more");
        assert_eq!(names(folder.path()), ["link", "m"]);
    }

    #[test]
    fn own_links_are_followed_and_those_of_others_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        symlink("target", &link).expect("a link");
        check(&link, b"", Replace::Own).expect("the own link");
        write(&link, b"1", Replace::Own).expect("written");
        assert_eq!(fs::read(&target).expect("a file"), b"1");
        assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
        let given = std::os::unix::fs::lchown(&link, Some(OTHER), None);
        if given.is_err() {
            eprintln!("not tested without root: a link of another user");
            return;
        }
        let refused = write(&link, b"2", Replace::Any).expect_err("another user");
        assert!(
            refused.to_string().contains("belongs to user 65534"),
            "{refused}"
        );
        assert!(
            open(&link).is_err()
                && append(&link).is_err()
                && create(&link, b"", Replace::Any).is_err()
        );
        assert_eq!(fs::read(&target).expect("a file"), b"1");
    }

    #[test]
    fn a_file_of_another_user_stays_and_commands_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("control");
        fs::write(&path, "compute 1\n").expect("free space");
        open_trusted(&path).expect("the own file");
        if !give_away(&path) {
            return;
        }
        open(&path).expect("only read");
        assert!(open_trusted(&path).is_err() && append(&path).is_err());
        assert!(
            write(&path, b"", Replace::Any).is_err() && create(&path, b"", Replace::Any).is_err()
        );
        assert_eq!(fs::read(&path).expect("a file"), b"compute 1\n");
    }

    #[test]
    fn a_fifo_never_blocks() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fifo");
        let name = std::ffi::CString::new(path.to_str().expect("UTF-8")).expect("no zero");
        // SAFETY: a path that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(open(&path).is_err() && append(&path).is_err());
        assert!(write(&path, b"x", Replace::Any).is_err(), "no reader");
        let mut reader = OpenOptions::new();
        let mut reader = open_at(&path, reader.read(true)).expect("a reader");
        write(&path, b"text", Replace::Own).expect("written");
        let mut text = [0; 4];
        reader.read_exact(&mut text).expect("a text");
        assert_eq!(&text, b"text");
    }

    #[test]
    fn a_file_that_is_being_written_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("r");
        let first = create(&path, b"", Replace::Own).expect("free space");
        first.write_all(b"more").expect("free space");
        let busy = create(&path, b"", Replace::Any).expect_err("it is locked");
        assert_eq!(busy.kind(), ErrorKind::ResourceBusy);
        drop(first);
        create(&path, b"", Replace::Any).expect("free");
        assert_eq!(names(folder.path()), ["r"]);
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        fs::create_dir(&path).expect("a folder");
        assert!(
            write(&path, b"x", Replace::Any).is_err() && check(&path, b"", Replace::Any).is_err()
        );
        let missing =
            check(&folder.path().join("none/a"), b"", Replace::Own).expect_err("no folder");
        assert!(missing.to_string().starts_with("its folder: "), "{missing}");
        check(Path::new("/dev/null"), b"", Replace::Own).expect("nothing is made");
        assert_eq!(names(folder.path()), ["a"]);
    }
}
