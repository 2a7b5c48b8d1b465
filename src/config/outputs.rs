//! Whether a file can be made at a path.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns why no file can be made at a path, and the next step.
pub(super) fn obstacle(path: &Path) -> Option<String> {
    let folder = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => return Some("it is a folder: name a file".into()),
    };
    if path.is_dir() {
        return Some("it is a folder: name a file in it".into());
    }
    // A pipe or a terminal needs no new file.
    if path.exists() && !path.is_file() {
        return None;
    }
    let text = CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: a system call with a text that ends with NUL.
    if unsafe { libc::access(text.as_ptr(), libc::W_OK | libc::X_OK) } == 0 {
        return match folder.is_dir() {
            true => None,
            false => Some(format!(
                "{} is no folder: name another path",
                folder.display()
            )),
        };
    }
    let error = std::io::Error::last_os_error();
    Some(format!(
        "its folder: {error}: make the folder, or name a path that you may write"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_a_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| obstacle(&folder.path().join(name));
        assert_eq!(at("trace.json"), None);
        assert_eq!(obstacle(Path::new("trace.json")), None);
        assert_eq!(obstacle(Path::new("/dev/null")), None);
        let missing = at("no/trace.json").expect("no folder");
        assert!(missing.starts_with("its folder: No such file"), "{missing}");
        std::fs::write(folder.path().join("file"), "").expect("free space");
        let inside = at("file/trace.json").expect("no folder");
        assert!(inside.contains("folder"), "{inside}");
        assert!(at("").expect("a folder").contains("name a file in it"));
    }
}
