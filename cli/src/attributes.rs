//! Owner, group, mode, access lists and extended attributes of a file, to give a new
//! version of it the same.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

use anyhow::{Context, Result};
use rustix::io::Errno;
use xattr::FileExt;

/// The access list of a file: an attribute that also changes the mode.
const ACCESS: &str = "system.posix_acl_access";

/// What a new version of a file gets from the old one.
pub struct Attributes {
    user: u32,
    group: u32,
    mode: u32,
    extended: BTreeMap<OsString, Vec<u8>>,
}

impl Attributes {
    /// Reads those of an open file.
    pub fn of(file: &File) -> io::Result<Attributes> {
        let found = file.metadata()?;
        Ok(Attributes {
            user: found.uid(),
            group: found.gid(),
            mode: mode(&found),
            extended: extended(file)?,
        })
    }

    /// Gives them to a new file.
    ///
    /// The order matters: attributes of the namespace `user` need write permission,
    /// another owner takes some bits of the mode, and an access list gets its mask from
    /// the mode.
    pub fn give_to(&self, file: &File) -> Result<()> {
        let own = Attributes::of(file)?;
        let is_user = |name: &OsStr| name.as_bytes().starts_with(b"user.");
        self.give_extended(file, &own, is_user)?;
        if (own.user, own.group) != (self.user, self.group) {
            fchown(file, Some(self.user), Some(self.group)).with_context(|| {
                format!(
                    "the new file cannot belong to user {0} and group {1} as the old one does: run the swap as user {0} or as root",
                    self.user, self.group
                )
            })?;
        }
        let access = OsStr::new(ACCESS);
        if own.extended.contains_key(access) && !self.extended.contains_key(access) {
            // It came from the folder's default.
            file.remove_xattr(access)
                .context("cannot remove the access list that the folder gives to new files")?;
        }
        let mode = Permissions::from_mode(self.mode);
        file.set_permissions(mode)
            .with_context(|| format!("the new file cannot have the mode {:o}", self.mode))?;
        self.give_extended(file, &own, |name| !is_user(name))
    }

    fn give_extended(
        &self,
        file: &File,
        own: &Attributes,
        which: impl Fn(&OsStr) -> bool,
    ) -> Result<()> {
        let wanted = self.extended.iter().filter(|(name, _)| which(name));
        for (name, value) in wanted {
            // The access list is set again, for the mode has changed it.
            if own.extended.get(name) == Some(value) && name != ACCESS {
                continue;
            }
            match file.set_xattr(name, value) {
                Err(error) if is_needed(name) => {
                    return Err(error).with_context(|| {
                        format!(
                            "the new file cannot have the attribute '{}' as the old one has: run the swap as a user who may set it, or remove it",
                            name.to_string_lossy()
                        )
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Says whether a file without the attribute would be another file to its users. Other
/// namespaces say how a file system stores a file.
fn is_needed(name: &OsStr) -> bool {
    let namespaces: [&[u8]; 3] = [b"user.", b"system.", b"security."];
    namespaces
        .iter()
        .any(|namespace| name.as_bytes().starts_with(namespace))
}

/// Attributes that the kernel makes from the content or the inode of a file.
fn is_derived(name: &OsStr) -> bool {
    name == "security.ima" || name == "security.evm"
}

fn mode(found: &Metadata) -> u32 {
    found.mode() & 0o7777
}

/// Reads all extended attributes; none where the file system has none.
fn extended(file: &File) -> io::Result<BTreeMap<OsString, Vec<u8>>> {
    let names = match file.list_xattr() {
        Ok(names) => names,
        Err(error) => {
            return match Errno::from_io_error(&error) {
                Some(Errno::NOTSUP | Errno::NOSYS) => Ok(BTreeMap::new()),
                _ => Err(error),
            };
        }
    };
    let mut all = BTreeMap::new();
    for name in names.filter(|name| !is_derived(name)) {
        if let Some(value) = file.get_xattr(&name)? {
            all.insert(name, value);
        }
    }
    Ok(all)
}
