//! Makes the packages: an archive that runs where it is unpacked, a package for Debian and its
//! descendants, and for pip a wheel and the sources. The same files give the same bytes.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use goblin::elf::Elf;

use crate::install::{DebugInfo, copy, install, target_folder};
use crate::machine::Machine;
use crate::run::{command, output, root, run};
use crate::third_party;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The oldest glibc that the packages run with; docs/install.md states it, too.
const GLIBC: Glibc = Glibc(2, 34);
/// Libraries that programs may need beside the loader, all of glibc but the first.
const LIBRARIES: [&str; 3] = ["libgcc_s.so.1", "libc.so.6", "libm.so.6"];

/// From this version on, std's functions that glibc may lack bind to it.
const TOO_NEW: Glibc = Glibc(2, 39);

/// A version of glibc.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Glibc(u32, u32);

/// The packages that were made.
pub struct Packages {
    /// To be unpacked anywhere.
    pub archive: PathBuf,
    /// For pip.
    pub wheel: PathBuf,
    /// For pip where no wheel fits: it builds with cargo.
    pub sources: PathBuf,
    /// For dpkg.
    pub deb: PathBuf,
}

impl Packages {
    /// Returns all of them.
    pub fn all(&self) -> [&Path; 4] {
        [&self.archive, &self.wheel, &self.sources, &self.deb]
    }
}

/// Returns why packages cannot be made here, if so.
pub fn missing() -> Option<String> {
    // SAFETY: the string is a constant of the C library.
    let glibc = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
    let glibc = glibc.to_string_lossy();
    let is_too_new = Glibc::parse(&format!("GLIBC_{glibc}")).is_none_or(|glibc| glibc >= TOO_NEW);
    is_too_new.then(|| {
        format!("packages built here would need glibc {TOO_NEW}, because this machine has {glibc}")
    })
}

/// Builds in release mode and makes the packages for a processor in a folder.
pub fn make(out: &Path, machine: Machine) -> Result<Packages> {
    fs::create_dir_all(out)?;
    let folder = tempfile::tempdir()?;
    let name = format!("llama-sidecar-{VERSION}-{}-linux-gnu", machine.name());
    let tree = folder.path().join(&name);
    install(&tree, machine, DebugInfo::Left)?;
    let glibc = needed(&tree, machine)?;
    documents(&tree.join("share/doc/llama-sidecar"), machine)?;
    let epoch = epoch()?;
    let (wheel, sources) = for_pip(&tree, glibc, machine, epoch, out)?;
    let packages = Packages {
        archive: out.join(format!("{name}.tar.gz")),
        wheel,
        sources,
        deb: out.join(format!("llama-sidecar_{VERSION}_{}.deb", machine.debian())),
    };
    tar(folder.path(), &name, epoch, &packages.archive)?;
    deb(folder.path(), &tree, (glibc, machine), epoch, &packages.deb)?;
    Ok(packages)
}

/// The crates for crates.io: the library, and what it needs.
const CRATES: [&str; 3] = ["gguf-write", "llama-sidecar-core", "llama-sidecar"];

/// Packs the crates, builds each from its package, and uploads nothing.
pub fn crates() -> Result<()> {
    let crates = CRATES.iter().flat_map(|name| ["--package", name]);
    let target = target_folder()?.join("publish");
    // Cargo takes a version of a package for what it unpacked and built before, however the content
    // changed: the folders of earlier runs, in the target folder and in Cargo's own.
    let cargo_home = match std::env::var_os("CARGO_HOME") {
        Some(home) => PathBuf::from(home),
        None => std::env::home_dir()
            .context("no home folder")?
            .join(".cargo"),
    };
    let unpacked = fs::read_dir(cargo_home.join("registry/src"))
        .into_iter()
        .flatten()
        .map(|folder| Ok(folder?.path()))
        .collect::<Result<Vec<_>>>()?;
    let unpacked = unpacked
        .iter()
        .flat_map(|folder| CRATES.map(|name| folder.join(format!("{name}-{VERSION}"))));
    for folder in unpacked.chain([target.clone()]).filter(|of| of.exists()) {
        fs::remove_dir_all(folder)?;
    }
    run(command("cargo", &root())
        .args(["publish", "--quiet", "--dry-run", "--allow-dirty"])
        .arg("--target-dir")
        .arg(target)
        .args(crates))
}

/// Makes the wheel from the installed tree, and the package of the sources.
fn for_pip(
    tree: &Path,
    glibc: Glibc,
    machine: Machine,
    epoch: u64,
    out: &Path,
) -> Result<(PathBuf, PathBuf)> {
    let names = output(
        command("python3", &root())
            .arg("python/build_backend.py")
            .arg(tree)
            .arg(format!("{glibc}_{}", machine.name()))
            .arg(out)
            .env("SOURCE_DATE_EPOCH", epoch.to_string()),
    )?;
    let mut names = names.lines().map(|name| out.join(name));
    let mut next = || {
        names
            .next()
            .context("python/build_backend.py printed no name")
    };
    Ok((next()?, next()?))
}

/// The time of every entry, in seconds.
fn epoch() -> Result<u64> {
    let epoch = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(epoch) => epoch,
        Err(_) => output(command("git", &root()).args(["log", "-1", "--format=%ct"]))
            .context("outside of a git repository, set SOURCE_DATE_EPOCH to a time in seconds")?,
    };
    let parsed = epoch.trim().parse();
    parsed.with_context(|| format!("SOURCE_DATE_EPOCH is '{epoch}': set it to a number of seconds"))
}

/// Adds the documents, the notices and the examples of units and of a container.
fn documents(folder: &Path, machine: Machine) -> Result<()> {
    for name in ["README.md", "CHANGELOG.md", "LICENSE"] {
        copy(&root().join(name), &folder.join(name))?;
    }
    copy_all(&root().join("docs"), &folder.join("docs"))?;
    copy_all(&root().join("packaging/examples"), &folder.join("examples"))?;
    fs::write(
        folder.join("THIRD-PARTY.txt"),
        third_party::notices(machine)?,
    )?;
    copy(
        &third_party::standard_library()?,
        &folder.join("rust-standard-library.html"),
    )
}

fn copy_all(from: &Path, to: &Path) -> Result<()> {
    for file in files(from)? {
        copy(&from.join(&file), &to.join(&file))?;
    }
    Ok(())
}

/// Files and links below a folder, relative to it, sorted.
pub fn files(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).with_context(|| next.display().to_string())? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push(entry.path()),
                false => _ = files.insert(entry.path().strip_prefix(folder)?.to_owned()),
            }
        }
    }
    Ok(files)
}

/// Archives one entry of a folder, with everything below it.
fn tar(folder: &Path, entry: &str, epoch: u64, to: &Path) -> Result<()> {
    run(command("tar", folder)
        .args(["--create", "--format=ustar", "--sort=name"])
        .args(["--owner=0", "--group=0", "--numeric-owner"])
        .args(["--mode=u=rwX,go=rX", "--use-compress-program=gzip -n"])
        .arg(format!("--mtime=@{epoch}"))
        .arg("--file")
        .arg(to)
        .arg(entry))
}

/// Makes a package for dpkg from the installed tree, which it changes.
fn deb(
    folder: &Path,
    tree: &Path,
    (glibc, machine): (Glibc, Machine),
    epoch: u64,
    to: &Path,
) -> Result<()> {
    let data = folder.join("data");
    let usr = data.join("usr");
    fs::create_dir_all(&data)?;
    fs::rename(tree, &usr)?;
    // Where Debian differs: compressed man pages, another folder for zsh, the licence's file.
    let man = usr.join("share/man/man1");
    run(command("gzip", &man).args(["-n"]).args(files(&man)?))?;
    let zsh = usr.join("share/zsh");
    fs::rename(zsh.join("site-functions"), zsh.join("vendor-completions"))?;
    let doc = usr.join("share/doc/llama-sidecar");
    fs::remove_file(doc.join("LICENSE"))?;
    fs::write(doc.join("copyright"), copyright()?)?;

    let files = files(&data)?;
    let mut kib = 0;
    for file in &files {
        kib += fs::symlink_metadata(data.join(file))?.len().div_ceil(1024);
    }
    let control = data.join("DEBIAN");
    fs::create_dir_all(&control)?;
    let template = fs::read_to_string(root().join("packaging/debian/control.in"))?;
    let text = template
        .replace("@VERSION@", VERSION)
        .replace("@ARCHITECTURE@", machine.debian())
        .replace("@GLIBC@", &glibc.to_string())
        .replace("@KIB@", &kib.to_string());
    fs::write(control.join("control"), text)?;
    // dpkg then runs ldconfig.
    fs::write(control.join("triggers"), "activate-noawait ldconfig\n")?;
    let regular = files.iter().filter(|file| !data.join(file).is_symlink());
    let sums = output(command("md5sum", &data).args(regular))?;
    fs::write(control.join("md5sums"), sums)?;

    // Neither the umask nor the clock is in the package.
    run(command("chmod", &data).args(["-R", "u=rwX,go=rX", "."]))?;
    run(command("find", &data)
        .args([".", "-exec", "touch", "--no-dereference"])
        .arg(format!("--date=@{epoch}"))
        .args(["{}", "+"]))?;
    output(
        command("dpkg-deb", folder)
            .env("SOURCE_DATE_EPOCH", epoch.to_string())
            .args(["--root-owner-group", "-Zgzip", "--build"])
            .args([data.as_path(), to]),
    )
    .context("install dpkg")?;
    Ok(())
}

/// The licence in Debian's format.
fn copyright() -> Result<String> {
    let licence = fs::read_to_string(root().join("LICENSE"))?;
    let paragraphs: Vec<&str> = licence.trim().split("\n\n").collect();
    let [_, holder, text @ ..] = paragraphs.as_slice() else {
        bail!("expected a heading, a copyright line and the text in LICENSE");
    };
    let holder = holder.trim_start_matches("Copyright (c) ");
    // A line that begins with a space continues the field; a point stands for an empty line.
    let text = text.join("\n\n");
    let text = text.lines().map(|line| match line {
        "" => " .\n".into(),
        line => format!(" {line}\n"),
    });
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: llama-sidecar\n\
         Comment: The libraries and the command contain code of other packages. Their licences are\n \
         in THIRD-PARTY.txt and rust-standard-library.html, beside this file.\n\n\
         Files: *\nCopyright: {holder}\nLicense: MIT\n{}",
        text.collect::<String>()
    ))
}

/// The oldest glibc that the libraries and the command run with. An error if they need another
/// library, or a newer glibc than is stated.
fn needed(tree: &Path, machine: Machine) -> Result<Glibc> {
    let mut newest = Glibc(2, 0);
    for name in [
        "bin/llama-sidecar",
        "lib/libllama_sidecar.so",
        "lib/libllama_sidecar_preload.so",
    ] {
        let bytes = fs::read(tree.join(name))?;
        let elf = Elf::parse(&bytes).with_context(|| format!("cannot read {name}"))?;
        for library in &elf.libraries {
            ensure!(
                LIBRARIES.contains(library) || *library == machine.loader(),
                "{name} needs {library}, which the packages do not depend on: add it to {}",
                "xtask/src/dist.rs and packaging/debian/control.in"
            );
        }
        for (stated, symbols) in glibc_versions(&elf)? {
            let glibc = Glibc::parse(stated).filter(|glibc| *glibc <= GLIBC);
            newest = newest.max(glibc.with_context(|| {
                format!(
                    "{name} needs {stated} ({}), and the packages state glibc {GLIBC}: \
                     build where glibc is older, or avoid these functions",
                    symbols.join(", ")
                )
            })?);
        }
    }
    Ok(newest)
}

/// The versions of glibc's symbols that a program needs, with these symbols.
fn glibc_versions<'a>(elf: &'a Elf) -> Result<Vec<(&'a str, Vec<&'a str>)>> {
    let mut versions = Vec::new();
    for library in elf.verneed.iter().flat_map(|all| all.iter()) {
        for version in library.iter() {
            let name = elf.dynstrtab.get_at(version.vna_name);
            let name = name.context("a version without a name")?;
            if name.starts_with("GLIBC_") {
                versions.push((name, symbols(elf, version.vna_other)));
            }
        }
    }
    Ok(versions)
}

/// The symbols of a version, by its number in the file.
fn symbols<'a>(elf: &'a Elf, version: u16) -> Vec<&'a str> {
    let versions = elf.versym.iter().flat_map(|all| all.iter());
    let symbols = elf.dynsyms.iter().zip(versions);
    symbols
        .filter(|(_, of)| of.version() == version)
        .filter_map(|(symbol, _)| elf.dynstrtab.get_at(symbol.st_name))
        .collect()
}

impl Glibc {
    /// Parses the name of a symbol's version.
    fn parse(name: &str) -> Option<Glibc> {
        let mut numbers = name.strip_prefix("GLIBC_")?.split('.');
        let mut number = || numbers.next()?.parse().ok();
        Some(Glibc(number()?, number()?))
    }
}

impl std::fmt::Display for Glibc {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_glibc_have_an_order() {
        let parsed = |name| Glibc::parse(name).expect("it is one of glibc's");
        assert!(parsed("GLIBC_2.9") < parsed("GLIBC_2.34"));
        assert_eq!(parsed("GLIBC_2.2.5"), Glibc(2, 2));
        assert_eq!(Glibc::parse("GCC_3.0"), None);
        assert_eq!(Glibc::parse("GLIBC_ABI_DT_RELR"), None);
    }

    #[test]
    fn the_copyright_file_has_the_whole_licence() {
        let copyright = copyright().expect("the licence has this form");
        let licence = fs::read_to_string(root().join("LICENSE")).expect("it is there");
        let words = |text: &str| -> Vec<String> {
            let words = text.split_whitespace().filter(|word| *word != ".");
            words.map(str::to_owned).collect()
        };
        let (heading, text) = (words("MIT License"), words(&licence));
        let words = words(&copyright);
        // After the line of the copyright, the field of the licence.
        assert!(words.ends_with(&text[heading.len() + 7..]), "{copyright}");
        assert!(copyright.contains("\nCopyright: 2026 The llama-sidecar authors\nLicense: MIT\n"));
    }
}
