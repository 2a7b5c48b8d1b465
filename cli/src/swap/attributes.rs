//! Owner, group, mode, access lists and extended attributes, copied to the new version of a file.

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

/// Attributes of a file.
pub struct Attributes {
    user: u32,
    group: u32,
    mode: u32,
    extended: BTreeMap<OsString, Vec<u8>>,
}

impl Attributes {
    /// Reads the attributes of an open file.
    pub fn of(file: &File) -> io::Result<Attributes> {
        let found = file.metadata()?;
        Ok(Attributes {
            user: found.uid(),
            group: found.gid(),
            mode: mode(&found),
            extended: extended(file)?,
        })
    }

    /// Sets the attributes of a new file.
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
                    "cannot give the new file user {0} and group {1} of the old file: run the swap as user {0} or as root",
                    self.user, self.group
                )
            })?;
        }
        let access = OsStr::new(ACCESS);
        if own.extended.contains_key(access) && !self.extended.contains_key(access) {
            // The default of the folder set it.
            file.remove_xattr(access)
                .context("cannot remove the default access list of the folder from the new file")?;
        }
        let mode = Permissions::from_mode(self.mode);
        file.set_permissions(mode)
            .with_context(|| format!("cannot set the mode {:o} of the new file", self.mode))?;
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
            // The access list is set again because the mode has changed it.
            if own.extended.get(name) == Some(value) && name != ACCESS {
                continue;
            }
            match file.set_xattr(name, value) {
                Err(error) if is_needed(name) => {
                    return Err(error).with_context(|| {
                        format!(
                            "cannot set the attribute '{}' of the new file: run the swap as a user with the right to set it, or remove it from the old file",
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

/// Returns whether users of the file depend on the attribute. Other namespaces describe how a
/// file system stores a file.
fn is_needed(name: &OsStr) -> bool {
    let namespaces: [&[u8]; 3] = [b"user.", b"system.", b"security."];
    namespaces
        .iter()
        .any(|namespace| name.as_bytes().starts_with(namespace))
}

/// Returns whether the kernel computes the attribute from the content or the inode of a file.
fn is_derived(name: &OsStr) -> bool {
    name == "security.ima" || name == "security.evm"
}

fn mode(found: &Metadata) -> u32 {
    found.mode() & 0o7777
}

/// Reads all extended attributes; none if the file system does not support them.
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
