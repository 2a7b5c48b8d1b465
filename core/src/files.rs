//! Files in folders that other users may write.
//!
//! A path can name what another user put there: a link to a file of this process, a FIFO, a
//! model. Each file that this project reads or writes by a path of the user goes through here:
//!
//! * A link is followed only if it is the own user's or root's.
//! * A file is written beside its path, under a random name, and renamed. Only a complete file
//!   ever has the path.
//! * What was there is kept under another name, unless the caller knows that it may go. A model,
//!   and a file of another user, are never written over.
//! * Reading never waits for the writer of a FIFO, and a file that commands something is read
//!   only if it is the own user's or root's.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tempfile::NamedTempFile;

use crate::descriptors::{self, Kept, above_standard};
use crate::signals::without_write_signals;

/// The end of the name of a file that is not complete. The name starts with a dot.
pub const INCOMPLETE: &str = ".part";

/// The links that a path may go through.
const MAX_LINKS: usize = 40;
/// The bytes at the start of a file by which it is known.
const START: usize = 64;
/// The earlier versions of a file that are kept.
const MAX_KEPT: u32 = 1000;
/// Attempts at a path to which other programs write at the same time.
const ATTEMPTS: usize = 16;

/// The paths that this process has written: what is there may be replaced.
static WRITTEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

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
    check_replaceable(&found, &start_of(&file)?)?;
    Ok(file)
}

/// Writes a file, and returns the path at which an earlier file was kept.
///
/// `replaces` is called with the first bytes of an earlier file, at most 64; true lets it go. An
/// empty file, and a file that this process wrote, go without the call. Bytes for a FIFO or a
/// terminal are written to it; without a reader, a FIFO is an error.
///
/// The file is not flushed to the disk: the end of a process must not wait for that.
///
/// ```
/// use sidecar_core::files;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("report.txt");
/// std::fs::write(&path, "notes of the user")?;
/// let kept = files::write(&path, b"a report", |_| false)?.expect("the notes");
/// assert_eq!(std::fs::read(kept)?, b"notes of the user");
/// assert_eq!(std::fs::read(&path)?, b"a report");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write(
    path: &Path,
    content: &[u8],
    replaces: impl Fn(&[u8]) -> bool,
) -> io::Result<Option<PathBuf>> {
    let path = resolve(path)?;
    if let Some(mut stream) = stream(&path)? {
        without_write_signals(|| stream.write_all(content))?;
        return Ok(None);
    }
    let mut new = beside(&path)?;
    without_write_signals(|| new.write_all(content))?;
    let kept = put(new, &path, |_, start| Ok(replaces(start)))?.1;
    Ok(kept)
}

/// Creates an empty file that is written while it is at its path, and returns it with the path at
/// which an earlier file was kept, as [`write()`] does.
///
/// The file is locked until it is closed. A file that another process has locked stays: the error
/// has the kind `ResourceBusy`.
pub fn create(
    path: &Path,
    replaces: impl Fn(&[u8]) -> bool,
) -> io::Result<(Kept, Option<PathBuf>)> {
    let path = resolve(path)?;
    if let Some(stream) = stream(&path)? {
        return Ok((Kept::new(stream)?, None));
    }
    let new = beside(&path)?;
    // Where the file system has no locks, there is no answer.
    let _ = new.as_file().try_lock();
    let (file, kept) = put(new, &path, |there, start| match there.try_lock() {
        Err(TryLockError::WouldBlock) => Err(io::Error::new(
            ErrorKind::ResourceBusy,
            "another process writes to it: use a path with %p, which is replaced by the process ID",
        )),
        _ => Ok(replaces(start)),
    })?;
    Ok((Kept::new(file)?, kept))
}

/// Fails if no file can be written at a path, so that a long work can fail before it begins. What
/// is no regular file, such as a FIFO or a socket, needs no new file.
pub fn check(path: &Path) -> io::Result<()> {
    let path = resolve(path)?;
    match fs::metadata(&path) {
        Ok(found) if found.is_dir() => {
            return Err(io::Error::other("it is a folder: name a file in it"));
        }
        Ok(found) if is_descriptor(&path) || !found.is_file() => return Ok(()),
        Ok(found) => {
            check_owner(&found)?;
            let there = open_at(&path, OpenOptions::new().read(true))?;
            check_replaceable(&there.metadata()?, &start_of(&there)?)?;
        }
        Err(_) => {}
    }
    // Removed at once.
    beside(&path).map(drop).map_err(|error| {
        let what = "make the folder, or name a path that you may write";
        io::Error::new(error.kind(), format!("its folder: {error}: {what}"))
    })
}

/// Renames a complete file to its path, and returns the path at which an earlier file was kept, as
/// [`write()`] does. `new` is in the same folder, and flushed to the disk first.
pub fn persist(
    new: NamedTempFile,
    path: &Path,
    replaces: impl Fn(&[u8]) -> bool,
) -> io::Result<Option<PathBuf>> {
    new.as_file().sync_all()?;
    let path = resolve(path)?;
    let kept = put(new, &path, |_, start| Ok(replaces(start)))?.1;
    sync_folder_of(&path)?;
    Ok(kept)
}

/// Writes renames in the folder of a file to disk.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    descriptors::open(OpenOptions::new().read(true), folder_of(path))?.sync_all()
}

/// Creates a file with a random name in the folder of a path, with the mode that the user gives
/// to new files.
pub fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{name}.");
    let mut new = tempfile::Builder::new();
    new.prefix(&prefix)
        .suffix(INCOMPLETE)
        .rand_bytes(12)
        .permissions(Permissions::from_mode(0o666));
    above_standard(|| new.tempfile_in(folder_of(path))).map_err(|error| {
        // Without the random name.
        let text = error.to_string();
        let cause = text.split(" at path ").next().unwrap_or_default();
        io::Error::new(error.kind(), cause)
    })
}

/// Logs where an earlier file is kept, if there was one.
pub fn log_kept(path: &Path, kept: Option<&Path>) {
    if let Some(kept) = kept {
        let (path, kept) = (path.display(), kept.display());
        log::warn!("{path}: the earlier file is kept as {kept}");
    }
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

/// Fails if a file is a model or not a regular file.
fn check_replaceable(found: &Metadata, start: &[u8]) -> io::Result<()> {
    match (found.is_file(), start.starts_with(b"GGUF")) {
        (true, false) => Ok(()),
        (true, true) => Err(io::Error::other(
            "a model is there, which is never written over: choose another path",
        )),
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

/// Renames a new file to its path; returns it with the path at which an earlier file was kept.
/// `goes` is called with the earlier file and its first bytes.
fn put(
    mut new: NamedTempFile,
    path: &Path,
    goes: impl Fn(&File, &[u8]) -> io::Result<bool>,
) -> io::Result<(File, Option<PathBuf>)> {
    let absolute = std::path::absolute(path)?;
    for _ in 0..ATTEMPTS {
        let there = match open_at(path, OpenOptions::new().read(true)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match new.persist_noclobber(path) {
                    Ok(file) => {
                        WRITTEN.lock().insert(absolute);
                        return Ok((file, None));
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
        let found = there.metadata()?;
        check_owner(&found)?;
        let start = start_of(&there)?;
        check_replaceable(&found, &start)?;
        let goes = goes(&there, &start)?;
        let goes = goes || start.is_empty() || WRITTEN.lock().contains(&absolute);
        let kept = (!goes).then(|| keep(path)).transpose()?;
        let mode = Permissions::from_mode(found.mode() & 0o777);
        new.as_file().set_permissions(mode)?;
        let file = new.persist(path).map_err(|failed| failed.error)?;
        WRITTEN.lock().insert(absolute);
        return Ok((file, kept));
    }
    Err(io::Error::other(
        "another program writes to this path all the time",
    ))
}

/// Gives a file a second name, which is free.
fn keep(path: &Path) -> io::Result<PathBuf> {
    for number in 1..=MAX_KEPT {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".~{number}~"));
        let name = PathBuf::from(name);
        let kept = match fs::hard_link(path, &name) {
            // The file system has no second names.
            Err(error) if !is_taken(&error) => match fs::symlink_metadata(&name) {
                Err(free) if free.kind() == ErrorKind::NotFound => fs::rename(path, &name),
                _ => continue,
            },
            linked => linked,
        };
        match kept {
            Err(error) if is_taken(&error) => {}
            kept => return kept.map(|()| name),
        }
    }
    Err(io::Error::other(format!(
        "{MAX_KEPT} earlier files are kept beside it: remove them"
    )))
}

fn is_taken(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AlreadyExists
}

/// Returns the first bytes of a file.
fn start_of(file: &File) -> io::Result<Vec<u8>> {
    let mut start = [0; START];
    let read = file.read_at(&mut start, 0)?;
    Ok(start[..read].to_vec())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    /// Another user, if this process may give files away.
    const OTHER: u32 = 65534;

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

    #[test]
    fn an_earlier_file_is_kept_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.json");
        fs::write(&path, "of the user").expect("free space");
        fs::write(folder.path().join("t.json.~1~"), "older").expect("free space");
        let kept = write(&path, b"1", |_| false)
            .expect("written")
            .expect("kept");
        assert_eq!(kept, folder.path().join("t.json.~2~"));
        assert_eq!(fs::read(kept).expect("a file"), b"of the user");
        // What this process wrote goes.
        assert_eq!(write(&path, b"2", |_| false).expect("written"), None);
        assert_eq!(fs::read(&path).expect("a file"), b"2");
        assert_eq!(names(folder.path()), ["t.json", "t.json.~1~", "t.json.~2~"]);
    }

    #[test]
    fn what_is_empty_or_may_go_is_replaced_with_its_mode() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        for content in [&b""[..], b"done 1 0"] {
            WRITTEN.lock().clear();
            fs::write(&path, content).expect("free space");
            fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("a mode");
            let replaces = |start: &[u8]| start.starts_with(b"done");
            assert_eq!(write(&path, b"done 2 0", replaces).expect("written"), None);
            assert_eq!(fs::metadata(&path).expect("a file").mode() & 0o777, 0o640);
        }
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn a_model_is_never_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, link) = (folder.path().join("m"), folder.path().join("link"));
        fs::write(&path, b"GGUF and more").expect("free space");
        symlink("m", &link).expect("a link");
        for path in [&path, &link] {
            assert!(write(path, b"x", |_| true).is_err() && create(path, |_| true).is_err());
            assert!(append(path).is_err() && check(path).is_err());
            let new = beside(path).expect("free space");
            assert!(persist(new, path, |_| true).is_err());
        }
        assert_eq!(fs::read(&path).expect("a file"), b"GGUF and more");
        assert_eq!(names(folder.path()), ["link", "m"]);
    }

    #[test]
    fn own_links_are_followed_and_those_of_others_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        symlink("target", &link).expect("a link");
        check(&link).expect("the own link");
        write(&link, b"1", |_| false).expect("written");
        assert_eq!(fs::read(&target).expect("a file"), b"1");
        assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
        let given = std::os::unix::fs::lchown(&link, Some(OTHER), None);
        if given.is_err() {
            eprintln!("not tested without root: a link of another user");
            return;
        }
        let refused = write(&link, b"2", |_| true).expect_err("another user");
        assert!(
            refused.to_string().contains("belongs to user 65534"),
            "{refused}"
        );
        assert!(open(&link).is_err() && append(&link).is_err() && create(&link, |_| true).is_err());
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
        assert!(write(&path, b"", |_| true).is_err() && create(&path, |_| true).is_err());
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
        assert!(write(&path, b"x", |_| true).is_err(), "no reader");
        let mut reader = OpenOptions::new();
        let mut reader = open_at(&path, reader.read(true)).expect("a reader");
        write(&path, b"text", |_| false).expect("written");
        let mut text = [0; 4];
        reader.read_exact(&mut text).expect("a text");
        assert_eq!(&text, b"text");
    }

    #[test]
    fn a_file_that_is_being_written_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("r");
        let (first, _) = create(&path, |_| false).expect("free space");
        first.write_all(b"more").expect("free space");
        let busy = create(&path, |_| true).expect_err("it is locked");
        assert_eq!(busy.kind(), ErrorKind::ResourceBusy);
        drop(first);
        create(&path, |_| true).expect("free");
        assert_eq!(names(folder.path()), ["r"]);
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        fs::create_dir(&path).expect("a folder");
        assert!(write(&path, b"x", |_| true).is_err() && check(&path).is_err());
        let missing = check(&folder.path().join("none/a")).expect_err("no folder");
        assert!(missing.to_string().starts_with("its folder: "), "{missing}");
        check(Path::new("/dev/null")).expect("nothing is made");
        assert_eq!(names(folder.path()), ["a"]);
    }
}
