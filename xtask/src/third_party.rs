//! The notices of the code that is linked into the installed libraries and the command.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::machine::Machine;
use crate::run::{command, output, root};

/// The packages of this repository that are installed.
pub const INSTALLED: [&str; 3] = [
    "llama-sidecar",
    "llama-sidecar-cli",
    "llama-sidecar-preload",
];
/// How the name of a file with a licence or a notice begins.
const NOTICES: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "COPYING",
    "UNLICENSE",
    "NOTICE",
    "COPYRIGHT",
];
/// Those that are a licence.
const LICENCES: &[&str] = NOTICES.split_at(4).0;

/// Notices as one text: the packages with their licences, then each text once, with the packages
/// that it belongs to. An error if a package has no licence, or none in its sources.
pub fn notices(machine: Machine) -> Result<String> {
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages(machine)? {
        let Package { name, licence, .. } = &package;
        list += &format!("{name}: {licence}\n");
        for (file, text) in package.texts()? {
            texts
                .entry(text)
                .or_default()
                .push(format!("{name} {file}"));
        }
    }
    let mut texts: Vec<(Vec<String>, String)> =
        texts.into_iter().map(|(text, of)| (of, text)).collect();
    texts.sort();
    let line = "=".repeat(80);
    let texts = texts
        .iter()
        .map(|(of, text)| format!("{line}\n{}\n{line}\n\n{text}\n\n", of.join("\n")));
    Ok(format!(
        "The libraries and the command of llama-sidecar contain code of these packages, and of\n\
         Rust's standard library, whose notices are in rust-standard-library.html.\n\n\
         {list}\n{}",
        texts.collect::<String>()
    ))
}

/// Path of the notices of Rust's standard library, which come with the compiler.
pub fn standard_library() -> Result<PathBuf> {
    let sysroot = output(command("rustc", &root()).args(["--print", "sysroot"]))?;
    let file = Path::new(sysroot.trim()).join("share/doc/rust/COPYRIGHT-library.html");
    ensure!(
        file.exists(),
        "the notices of Rust's standard library are missing: there is no {}; install Rust with rustup",
        file.display()
    );
    Ok(file)
}

/// A package that is linked in.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    /// Name and version.
    name: String,
    /// An SPDX expression.
    licence: String,
    folder: PathBuf,
}

impl Package {
    /// Files with licences and notices, by name.
    fn texts(&self) -> Result<BTreeMap<String, String>> {
        let mut texts = BTreeMap::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_file() && begins(&file, &NOTICES) {
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let text = text.replace("\r\n", "\n").trim_matches('\n').to_owned();
                texts.insert(file.into_owned(), text);
            }
        }
        if !texts.keys().any(|file| begins(file, LICENCES))
            && let Some(text) = self.text_by_header()
        {
            texts.insert("LICENSE, by the header of src/lib.rs".into(), text);
        }
        ensure!(
            texts.keys().any(|file| begins(file, LICENCES)),
            "{} has no text of its licence in {}: use a version that has one",
            self.name,
            self.folder.display()
        );
        Ok(texts)
    }

    /// The MIT licence with the copyright of the sources, if they begin with both (SPDX).
    fn text_by_header(&self) -> Option<String> {
        let source = std::fs::read_to_string(self.folder.join("src/lib.rs")).ok()?;
        let mut lines = source.lines();
        if self.licence != "MIT" || lines.next()? != "// SPDX-License-Identifier: MIT" {
            return None;
        }
        let copyright = lines.next()?.strip_prefix("// ")?;
        let is_one = copyright.starts_with("Copyright ");
        let (_, terms) = include_str!("../../LICENSE").split_once("authors\n\n")?;
        is_one.then(|| format!("MIT License\n\n{copyright}\n\n{}", terms.trim_end()))
    }
}

fn begins(file: &str, with: &[&str]) -> bool {
    let file = file.to_uppercase();
    with.iter().any(|start| file.starts_with(start))
}

/// The packages of others that are linked in, sorted.
fn packages(machine: Machine) -> Result<BTreeSet<Package>> {
    let target = machine.triple();
    let tree = output(
        command("cargo", &root())
            .args(["tree", "--quiet", "--locked", "--target", &target])
            .args(["--edges", "no-dev,no-build,no-proc-macro"])
            .args(["--prefix", "none", "--no-dedupe", "--format", "{p}"])
            .args(INSTALLED.map(|name| format!("--package={name}"))),
    )?;
    let tree: BTreeSet<&str> = tree.lines().collect();
    let metadata = output(command("cargo", &root()).args([
        "metadata",
        "--format-version=1",
        "--locked",
        "--filter-platform",
        &target,
    ]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let all = metadata["packages"].as_array().context("a list")?;
    let text = |of: &Value| of.as_str().map(str::to_owned);
    let mut packages = BTreeSet::new();
    // Packages of this repository have no source.
    for package in all.iter().filter(|package| !package["source"].is_null()) {
        let name = text(&package["name"]).context("a name")?;
        let version = text(&package["version"]).context("a version")?;
        if !tree.contains(format!("{name} v{version}").as_str()) {
            continue;
        }
        let manifest = text(&package["manifest_path"]).context("a path")?;
        packages.insert(Package {
            licence: text(&package["license"])
                .with_context(|| format!("{name} {version} states no licence"))?,
            name: format!("{name} {version}"),
            folder: Path::new(&manifest)
                .parent()
                .context("a folder")?
                .to_owned(),
        });
    }
    Ok(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_name_every_package_and_have_its_texts() {
        let notices = notices(Machine::HERE).expect("every package has a licence");
        for package in packages(Machine::HERE).expect("cargo knows them") {
            let line = format!("{}: {}\n", package.name, package.licence);
            assert!(notices.contains(&line), "{line}");
            for text in package.texts().expect("it has some").values() {
                assert!(notices.contains(text), "{}", package.name);
            }
        }
        // Linked into the drop-in, the library and the command; a build tool is not.
        assert!(notices.contains("\nparking_lot ") && notices.contains("\nureq "));
        assert!(!notices.contains("\ncbindgen ") && !notices.contains("\nserde_derive "));
    }

    #[test]
    fn a_package_without_the_text_of_its_licence_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let package = Package {
            name: "example 1.0.0".into(),
            licence: "MIT".into(),
            folder: folder.path().into(),
        };
        std::fs::write(folder.path().join("NOTICE"), "a notice").expect("free space");
        let error = package.texts().expect_err("a notice is no licence");
        assert!(error.to_string().contains("example 1.0.0 has no text"));
        let source = folder.path().join("src/lib.rs");
        std::fs::create_dir(source.parent().expect("a folder")).expect("free space");
        let header =
            "// SPDX-License-Identifier: MIT\n// Copyright (C) 2018 Example authors\n\nfn f() {}\n";
        std::fs::write(&source, header).expect("free space");
        let texts = package.texts().expect("it has a header");
        let text = &texts["LICENSE, by the header of src/lib.rs"];
        assert!(
            text.starts_with("MIT License\n\nCopyright (C) 2018 Example authors\n\nPermission")
        );
        std::fs::write(folder.path().join("license.md"), "a licence\r\n").expect("free space");
        let texts = package.texts().expect("it has one");
        assert_eq!(texts["license.md"], "a licence");
    }
}
