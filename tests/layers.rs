//! The maps in `src/lib.rs` and `preload/src/lib.rs` are true.
//!
//! A map is a table whose rows name modules, top to bottom. A module imports only modules in
//! rows below its own; the modules of one row import none of each other.

use std::fs;
use std::path::Path;

/// A line of a source file that names a module of its crate.
struct Import {
    /// The module that the file belongs to.
    from: String,
    /// The module that the line names.
    to: String,
    /// File, line number and text, to be shown.
    place: String,
}

/// The rows of the first table in the documentation of a crate: the modules of each.
fn map(lib: &str) -> Vec<Vec<String>> {
    let table = lib.lines().filter_map(|line| line.strip_prefix("//! |"));
    // The first two rows are the head and the rule below it.
    let cells = table.skip(2).filter_map(|row| row.split('|').next());
    let modules = |cell: &str| {
        let quoted = cell.split('`').skip(1).step_by(2);
        quoted.map(str::to_owned).collect()
    };
    cells.map(modules).collect()
}

/// The modules that a crate declares.
fn declared(lib: &str) -> Vec<String> {
    let name = |line: &str| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        Some(line.strip_prefix("mod ")?.strip_suffix(';')?.to_owned())
    };
    lib.lines().filter_map(name).collect()
}

/// The modules of its own crate that a file names, with line numbers. `nested` tells a file in
/// a folder, where `super` is a module and not the crate.
fn named(text: &str, modules: &[String], nested: bool) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    // Inside the braces of `use crate::{`, which may go over several lines.
    let mut depth = 0;
    for (number, line) in text.lines().enumerate() {
        let line = match line.trim_start().starts_with("//") {
            true => "",
            false => line,
        };
        let mut rest = line;
        let mut names = Vec::new();
        if depth > 0 {
            rest = in_braces(rest, &mut depth, &mut names);
        }
        let root = match nested {
            true => "super::super::",
            false => "super::",
        };
        for start in ["crate::", root] {
            for (at, _) in rest.match_indices(start) {
                // `$crate` is the crate that uses a macro.
                let whole =
                    !rest[..at].ends_with(|c: char| c.is_alphanumeric() || "_$:".contains(c));
                let path = &rest[at + start.len()..];
                match path.strip_prefix('{') {
                    _ if !whole => {}
                    Some(list) => {
                        depth = 1;
                        in_braces(list, &mut depth, &mut names);
                    }
                    None => names.push(identifier(path)),
                }
            }
        }
        let known = names.into_iter().filter(|name| modules.contains(name));
        found.extend(known.map(|name| (number + 1, name)));
    }
    found
}

/// Adds the first names in a list in braces, as far as the list is on this line. Returns the
/// rest of the line.
fn in_braces<'a>(text: &'a str, depth: &mut usize, names: &mut Vec<String>) -> &'a str {
    let mut begins = true;
    for (at, c) in text.char_indices() {
        match c {
            '{' => *depth += 1,
            '}' => *depth -= 1,
            _ if begins && *depth == 1 && c.is_alphabetic() => names.push(identifier(&text[at..])),
            _ => {}
        }
        if *depth == 0 {
            return &text[at + 1..];
        }
        begins = c == ',' || begins && c.is_whitespace();
    }
    ""
}

fn identifier(text: &str) -> String {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    text[..end.unwrap_or(text.len())].to_owned()
}

/// All imports of a crate.
fn imports(folder: &Path, modules: &[String]) -> Vec<Import> {
    let mut all = Vec::new();
    for module in modules {
        let file = folder.join(format!("{module}.rs"));
        let in_folder = files(&folder.join(module));
        assert!(
            file.exists() || !in_folder.is_empty(),
            "{}: no file for the module {module}",
            folder.display()
        );
        let nested = in_folder.into_iter().map(|file| {
            // The folder's own module is one level up.
            let is_root = file.ends_with("mod.rs");
            (file, !is_root)
        });
        for (path, nested) in file
            .exists()
            .then_some((file, false))
            .into_iter()
            .chain(nested)
        {
            let text = fs::read_to_string(&path).expect("a source file");
            for (line, to) in named(&text, modules, nested) {
                let code = text.lines().nth(line - 1).unwrap_or_default().trim();
                all.push(Import {
                    from: module.clone(),
                    to,
                    place: format!("{}:{line}: {code}", path.display()),
                });
            }
        }
    }
    all
}

/// The Rust files in a folder and the folders in it.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut found: Vec<_> = paths
        .flat_map(|path| match path.is_dir() {
            true => files(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    found.sort();
    found
}

/// What is wrong with the map of a crate.
fn faults(folder: &Path) -> Vec<String> {
    let lib = fs::read_to_string(folder.join("lib.rs")).expect("lib.rs");
    let (map, declared) = (map(&lib), declared(&lib));
    let row = |module: &str| {
        map.iter()
            .position(|row| row.iter().any(|name| name == module))
    };
    let lib = folder.join("lib.rs");
    let unknown = map.iter().flatten().filter(|name| !declared.contains(name));
    let missing = declared.iter().filter(|name| row(name).is_none());
    let mut faults: Vec<String> = unknown
        .map(|name| {
            format!(
                "{}: the map names {name}, which does not exist",
                lib.display()
            )
        })
        .chain(missing.map(|name| format!("{}: {name} is missing in the map", lib.display())))
        .collect();
    for import in imports(folder, &declared) {
        let (Some(from), Some(to)) = (row(&import.from), row(&import.to)) else {
            continue;
        };
        if import.from != import.to && from >= to {
            faults.push(format!(
                "{}: {} imports {}, which is not below it",
                import.place, import.from, import.to
            ));
        }
    }
    faults
}

fn root(folder: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)
}

#[test]
fn the_library_imports_downwards() {
    let faults = faults(&root("src"));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_drop_in_imports_downwards() {
    let faults = faults(&root("preload/src"));
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn an_import_that_points_up_is_found() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("its folder");
        fs::write(path, text).expect("a file");
    };
    write(
        "lib.rs",
        "//! | module | contents |\n//! |---|---|\n//! | [`top`] | a |\n//! | [`left`], [`right`] | b |\n\
         //! | [`gone`] | c |\n//! | [`low`] | d |\nmod left;\nmod low;\nmod right;\npub mod top;\nmod lost;\n",
    );
    write(
        "top.rs",
        "use crate::{\n    left, // top::\n    low::{self, right},\n};\n",
    );
    write(
        "left.rs",
        "use crate::low;\n\nfn f() {\n    super::right::f();\n}\n",
    );
    write(
        "right.rs",
        "// use crate::top;\nmod tests {\n    use super::*;\n}\n",
    );
    write(
        "low/mod.rs",
        "mod part;\nuse crate::{low::part, right::Kind};\n",
    );
    write("low/part.rs", "use super::top;\nuse super::super::top;\n");
    write("lost.rs", "");
    let expected = [
        "lib.rs: the map names gone, which does not exist",
        "lib.rs: lost is missing in the map",
        "left.rs:4: super::right::f();: left imports right, which is not below it",
        "low/mod.rs:2: use crate::{low::part, right::Kind};: low imports right, which is not below it",
        "low/part.rs:2: use super::super::top;: low imports top, which is not below it",
    ];
    let prefix = format!("{}/", folder.path().display());
    let found: Vec<String> = faults(folder.path())
        .iter()
        .map(|fault| fault.replace(&prefix, ""))
        .collect();
    assert_eq!(found, expected);
}
