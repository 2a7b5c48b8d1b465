//! The maps of modules are true, and no imports go round in a circle.
//!
//! A map is a table in the documentation of a crate or of a folder. Its rows name modules, top to
//! bottom. A module imports only modules in rows below its own; the modules of one row import
//! none of each other. A name that a folder passes on counts as an import of the module that
//! defines it. What a folder's own module defines may be below the modules of the folder or above
//! them, not both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the crates that have maps.
const CRATES: [&str; 9] = [
    "core/src",
    "src",
    "preload/src",
    "cli/src",
    "xtask/src",
    "testkit/src",
    "ggml-quantize/src",
    "tests/sim-cuda/src",
    "tests/sim-ggml/src",
];

/// The most lines of Rust in a folder. A change that needs more states why in its commit, and raises the number here.
const MOST_LINES: [(&str, usize); 9] = [
    ("core", 21_100),
    ("src", 11_700),
    ("preload", 26_400),
    ("cli", 27_900),
    ("xtask", 10_600),
    ("testkit", 4_700),
    ("ggml-quantize", 600),
    ("tests", 32_200),
    ("benches", 3_850),
];

/// The names of modules from the root of the crate, or of a module and an item.
type Names = Vec<String>;

/// A path in the text of a module.
struct Reference {
    /// The path from the root of the crate.
    names: Names,
    line: usize,
    /// Whether the module passes the name on, and does not use it itself.
    is_passed_on: bool,
}

/// A file of a crate.
struct Module {
    file: PathBuf,
    text: String,
    /// Identifiers, `::` and single characters, each with its line.
    tokens: Vec<(usize, String)>,
    children: Vec<String>,
    /// The paths that names stand for, because of `use`.
    scope: BTreeMap<String, Names>,
    /// The modules all of whose names it has.
    globs: Vec<Names>,
    references: Vec<Reference>,
}

/// An import between two modules of a folder. The name of the folder's own module is empty.
struct Arrow {
    from: String,
    to: String,
    /// File, line number and text, to be shown.
    place: String,
}

/// The tokens of a text, without comments and literals.
fn tokens(text: &str) -> Vec<(usize, String)> {
    let bytes = text.as_bytes();
    let is_name = |at: usize| {
        bytes
            .get(at)
            .is_some_and(|c| c.is_ascii_alphanumeric() || *c == b'_')
    };
    let find = |from: usize, end: &str| text[from..].find(end).map_or(text.len(), |at| from + at);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let begin = at;
        match bytes[at] {
            b'/' if text[at..].starts_with("//") => at = find(at, "\n"),
            b'/' if text[at..].starts_with("/*") => at = find(at, "*/") + 2,
            b'"' => {
                let hashes = text[..at].len() - text[..at].trim_end_matches('#').len();
                match text[..at - hashes].ends_with(['r']) {
                    true => at = find(at + 1, &format!("\"{}", "#".repeat(hashes))) + 1 + hashes,
                    false => {
                        at += 1;
                        while bytes[at] != b'"' {
                            at += 1 + usize::from(bytes[at] == b'\\');
                        }
                        at += 1;
                    }
                }
            }
            b'\'' if bytes[at + 1] == b'\\' => at = find(at + 3, "'") + 1,
            b'\'' => {
                let next = text[at + 1..].chars().next().map_or(1, char::len_utf8);
                let is_character = bytes.get(at + 1 + next) == Some(&b'\'');
                at += if is_character { next + 2 } else { 1 };
            }
            _ if is_name(at) => {
                while is_name(at) {
                    at += 1;
                }
                found.push((begin, text[begin..at].to_owned()));
            }
            b':' if bytes.get(at + 1) == Some(&b':') => {
                at += 2;
                found.push((begin, "::".to_owned()));
            }
            c => {
                at += 1;
                if c.is_ascii_punctuation() {
                    found.push((begin, char::from(c).to_string()));
                }
            }
        }
    }
    let (mut line, mut counted) = (1, 0);
    for (at, _) in &mut found {
        line += text[counted..*at].matches('\n').count();
        counted = *at;
        *at = line;
    }
    found
}

/// The modules that a file declares, without those of tests.
fn declared(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let name = |(number, line): (usize, &&str)| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        let name = line.strip_prefix("mod ")?.strip_suffix(';')?;
        let is_test = number > 0 && lines[number - 1] == "#[cfg(test)]";
        (!is_test).then(|| name.to_owned())
    };
    lines.iter().enumerate().filter_map(name).collect()
}

/// The rows of the table of modules in the documentation of a file: the modules of each.
fn map(text: &str) -> Vec<Vec<String>> {
    let head = |line: &&str| !line.starts_with("//! | module |");
    let rows = text.lines().skip_while(head).skip(2);
    let cells = rows.map_while(|row| row.strip_prefix("//! |")?.split('|').next());
    let names = |cell: &str| {
        cell.split('`')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect()
    };
    cells.map(names).collect()
}

/// Adds the module at `path` and those below it to `found`.
fn read(folder: &Path, file: PathBuf, path: Names, found: &mut BTreeMap<Names, Module>) {
    let text = fs::read_to_string(&file).expect("a source file");
    let module = Module {
        tokens: tokens(&text),
        children: declared(&text),
        file,
        text,
        scope: BTreeMap::new(),
        globs: Vec::new(),
        references: Vec::new(),
    };
    for name in &module.children {
        let inner = folder.join(name);
        let files = [folder.join(format!("{name}.rs")), inner.join("mod.rs")];
        let file = files.into_iter().find(|file| file.exists());
        let file = file.unwrap_or_else(|| panic!("{}: no file for {name}", folder.display()));
        let path = path.iter().chain([name]).cloned().collect();
        read(&inner, file, path, found);
    }
    found.insert(path, module);
}

/// All modules of a crate, with their imports.
fn modules(folder: &Path) -> BTreeMap<Names, Module> {
    let roots = ["lib.rs", "main.rs"].map(|name| folder.join(name));
    let root = roots.into_iter().find(|path| path.exists());
    let mut all = BTreeMap::new();
    read(folder, root.expect("a crate"), Names::new(), &mut all);
    for (path, module) in &mut all {
        module.find_references(path);
    }
    all
}

/// Adds the paths of an import to `found`: line, path and the name that it gets.
fn tree(tokens: &[(usize, String)], mut names: Names, found: &mut Vec<(usize, Names, String)>) {
    let mut at = 0;
    while at < tokens.len() {
        let (line, token) = &tokens[at];
        match token.as_str() {
            "::" => {}
            "{" => {
                let (mut depth, mut begin) = (0, at + 1);
                for end in at..tokens.len() {
                    match tokens[end].1.as_str() {
                        "{" => depth += 1,
                        "}" => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 || depth == 1 && tokens[end].1 == "," {
                        tree(&tokens[begin..end], names.clone(), found);
                        begin = end + 1;
                    }
                }
                return;
            }
            "*" => return found.push((*line, names, "*".to_owned())),
            "as" => return found.push((*line, names, tokens[at + 1].1.clone())),
            "self" if !names.is_empty() => {}
            name => names.push(name.to_owned()),
        }
        at += 1;
    }
    if let (Some(name), Some((line, _))) = (names.last().cloned(), tokens.first()) {
        found.push((*line, names, name));
    }
}

impl Module {
    /// Finds the paths in the text of the module at `path`.
    fn find_references(&mut self, path: &[String]) {
        let tokens = std::mem::take(&mut self.tokens);
        let text = |at: usize| tokens.get(at).map_or("", |(_, token)| token);
        // The module and inline modules in it, each with the number of open braces outside.
        let mut inside: Vec<(usize, Names)> = vec![(0, path.into())];
        let (mut depth, mut at) = (0, 0);
        while at < tokens.len() {
            let (_, module) = inside.last().expect("the module itself");
            match text(at) {
                "{" => depth += 1,
                "}" => {
                    depth -= 1;
                    inside.retain(|(outside, names)| *outside < depth || *names == path);
                }
                "mod" if text(at + 2) == "{" => {
                    let names = module.iter().cloned().chain([text(at + 1).to_owned()]);
                    inside.push((depth, names.collect()));
                }
                // `use<>` in a type is no import.
                "use" if text(at + 1) != "<" => {
                    let is_public = at > 0 && ["pub", ")"].contains(&text(at - 1));
                    let end = (at..tokens.len()).find(|at| text(*at) == ";");
                    let end = end.expect("the end of the import");
                    let mut used = Vec::new();
                    tree(&tokens[at + 1..end], Vec::new(), &mut used);
                    for (line, names, name) in used {
                        let Some(names) = self.absolute(module, names) else {
                            continue;
                        };
                        match name.as_str() {
                            "*" => self.globs.push(names.clone()),
                            _ => drop(self.scope.insert(name.clone(), names.clone())),
                        }
                        let uses =
                            |pair: &[(usize, String)]| pair[1].1 == name && pair[0].1 != "mod";
                        let mut others = tokens[..at].windows(2).chain(tokens[end..].windows(2));
                        let is_passed_on = is_public && !others.any(uses);
                        self.references.push(Reference {
                            names,
                            line,
                            is_passed_on,
                        });
                    }
                    at = end;
                }
                first
                    if text(at + 1) == "::" && !["::", ".", "$"].contains(&text(at.max(1) - 1)) =>
                {
                    let line = tokens[at].0;
                    let mut names = vec![first.to_owned()];
                    while text(at + 1) == "::" && text(at + 2).starts_with(char::is_alphabetic) {
                        names.push(text(at + 2).to_owned());
                        at += 2;
                    }
                    self.references
                        .extend(self.absolute(module, names).map(|names| Reference {
                            names,
                            line,
                            is_passed_on: false,
                        }));
                }
                _ => {}
            }
            at += 1;
        }
        self.tokens = tokens;
    }

    /// The path from the root of the crate, for a path in the module `inside`; none for a path of
    /// another crate.
    fn absolute(&self, inside: &[String], names: Names) -> Option<Names> {
        let mut up = 0;
        while names.get(up).is_some_and(|name| name == "super") {
            up += 1;
        }
        let rest = |from: usize| names[from..].iter().cloned();
        let outside = |up: usize| inside[..inside.len().saturating_sub(up)].iter().cloned();
        let first = names.first()?;
        match first.as_str() {
            "crate" => Some(rest(1).collect()),
            "self" => Some(outside(0).chain(rest(1)).collect()),
            "super" => Some(outside(up).chain(rest(up)).collect()),
            _ if self.children.contains(first) => Some(outside(0).chain(rest(0)).collect()),
            _ => {
                let known = self.scope.get(first)?;
                Some(known.iter().cloned().chain(rest(1)).collect())
            }
        }
    }

    fn defines(&self, name: &str) -> bool {
        const BEFORE: [&str; 8] = [
            "fn", "struct", "enum", "trait", "type", "const", "static", "!",
        ];
        let mut pairs = self.tokens.windows(2);
        pairs.any(|pair| pair[1].1 == name && BEFORE.contains(&pair[0].1.as_str()))
    }
}

/// The module that defines what a path names.
fn definition(all: &BTreeMap<Names, Module>, names: &[String], steps: usize) -> Names {
    let mut path = Names::new();
    for (at, name) in names.iter().enumerate() {
        let module = &all[&path];
        if module.children.contains(name) {
            path.push(name.clone());
            continue;
        }
        let through = |target: &Names| {
            let names = target.iter().chain(&names[at + 1..]);
            definition(all, &names.cloned().collect::<Names>(), steps + 1)
        };
        if steps > 8 || module.defines(name) {
            return path;
        }
        if let Some(target) = module.scope.get(name) {
            return through(target);
        }
        // An item of a macro is found by elimination.
        let named = |glob: &&Names| all.get(*glob).is_some_and(|module| module.defines(name));
        let known = module.globs.iter().find(named).or(module.globs.first());
        return match known {
            Some(glob) if *glob != path => definition(all, glob, steps + 1),
            _ => path,
        };
    }
    path
}

/// The imports inside each folder of a crate.
fn arrows(all: &BTreeMap<Names, Module>) -> BTreeMap<Names, Vec<Arrow>> {
    let mut found: BTreeMap<Names, Vec<Arrow>> = BTreeMap::new();
    for (from, module) in all {
        for reference in &module.references {
            let to = definition(all, &reference.names, 0);
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if to == *from || reference.is_passed_on && common == from.len() {
                continue;
            }
            let name = |path: &Names| path.get(common).cloned().unwrap_or_default();
            let code = module.text.lines().nth(reference.line - 1);
            let code = code.unwrap_or_default().trim();
            found.entry(from[..common].into()).or_default().push(Arrow {
                from: name(from),
                to: name(&to),
                place: format!("{}:{}: {code}", module.file.display(), reference.line),
            });
        }
    }
    found
}

/// The modules that one imports, and those that they import, without the folder's own module.
fn below(arrows: &[Arrow], from: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        let next = arrows
            .iter()
            .filter(|arrow| arrow.from == module && !arrow.to.is_empty());
        for arrow in next {
            if found.insert(arrow.to.clone()) {
                open.push(&arrow.to);
            }
        }
    }
    found
}

/// The number of modules in the longest chain of imports in a folder, unless there is a circle.
fn floors(arrows: &BTreeSet<(&String, &String)>, modules: &[String]) -> usize {
    let mut floors: BTreeMap<&String, usize> = modules.iter().map(|name| (name, 1)).collect();
    for _ in modules {
        for (from, to) in arrows {
            let above = floors[to] + 1;
            floors
                .entry(from)
                .and_modify(|floor| *floor = above.max(*floor));
        }
    }
    floors.into_values().max().unwrap_or(0)
}

/// What is wrong with the maps of a crate.
fn faults(folder: &Path) -> Vec<String> {
    let all = modules(folder);
    let arrows = arrows(&all);
    let mut faults = Vec::new();
    for (path, module) in &all {
        let (map, file) = (map(&module.text), module.file.display());
        let row = |name: &str| map.iter().position(|row| row.iter().any(|it| it == name));
        let inside = arrows.get(path).map_or(&[][..], Vec::as_slice);
        let unknown = map.iter().flatten();
        let unknown = unknown.filter(|name| !module.children.contains(name));
        faults
            .extend(unknown.map(|it| format!("{file}: the map names {it}, which does not exist")));
        if module.children.len() > 1 {
            let missing = module.children.iter().filter(|name| row(name).is_none());
            faults.extend(missing.map(|it| format!("{file}: {it} is missing in the map")));
            let between = inside.iter().map(|arrow| (&arrow.from, &arrow.to));
            let between = between.filter(|(from, to)| !from.is_empty() && !to.is_empty());
            let between: BTreeSet<_> = between.collect();
            println!(
                "{file}: {} modules, {} arrows, {} floors",
                module.children.len(),
                between.len(),
                floors(&between, &module.children)
            );
        }
        let mut seen = BTreeSet::new();
        for Arrow { from, to, place } in inside {
            if from.is_empty() || !seen.insert((from, to)) {
                continue;
            }
            let target = if to.is_empty() {
                "the folder's own module"
            } else {
                to
            };
            if below(inside, to).contains(from) {
                faults.push(format!("{place}: {from} imports {target} in a circle"));
            } else if !to.is_empty() && row(from) >= row(to) {
                faults.push(format!(
                    "{place}: {from} imports {target}, which is not below it"
                ));
            }
        }
    }
    faults
}

#[test]
fn modules_import_downwards() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let found: Vec<String> = CRATES
        .iter()
        .flat_map(|folder| faults(&root.join(folder)))
        .collect();
    assert!(
        found.is_empty(),
        "{}\n{} faults",
        found.join("\n"),
        found.len()
    );
}

fn lines_in(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let lines = paths.map(|path| match path.extension() {
        _ if path.is_dir() && path.file_name() != Some("target".as_ref()) => lines_in(&path),
        Some(end) if end == "rs" => fs::read_to_string(path).expect("UTF-8").lines().count(),
        _ => 0,
    });
    lines.sum()
}

#[test]
fn folders_grow_by_decision_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let grown = MOST_LINES.map(|(folder, most)| (folder, lines_in(&root.join(folder)), most));
    let grown: Vec<_> = grown
        .iter()
        .filter(|(_, lines, most)| lines > most)
        .collect();
    assert!(
        grown.is_empty(),
        "folder, lines, most: {grown:?}: take something out, or raise MOST_LINES and say why in the commit"
    );
}

/// The steps of docs/architecture.md: rows of a file and a function.
#[test]
fn the_steps_of_the_documentation_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/architecture.md")).expect("a page");
    let steps: Vec<(&str, &str)> = page
        .lines()
        .filter_map(|line| {
            let (file, rest) = line.strip_prefix("| `")?.split_once("` | `")?;
            let (function, _) = rest.split_once("` | ")?;
            file.ends_with(".rs").then_some((file, function))
        })
        .collect();
    assert_eq!(steps.len(), 30, "{steps:?}");
    for (file, function) in steps {
        let text = fs::read_to_string(root.join(file)).unwrap_or_default();
        let defined = [format!("fn {function}("), format!("fn {function}<")];
        let exists = defined.iter().any(|start| text.contains(start));
        assert!(exists, "{file} has no function {function}");
    }
}

#[test]
fn imports_that_point_up_and_circles_are_found() {
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
        "use crate::{\n    left, // top::\n    low::{self, Passed},\n};\n",
    );
    write(
        "left.rs",
        "use crate::low;\n\nfn f() {\n    let _ = \"super::top::f\";\n    let right: super::right::F;\n}\n",
    );
    write(
        "right.rs",
        "// use crate::top;\nmod tests {\n    use super::*;\n}\n",
    );
    write(
        "low/mod.rs",
        "//! | module | contents |\n//! |---|---|\n//! | `one` | a |\n//! | `two`, `three` | b |\n\
         mod one;\nmod three;\nmod two;\npub use three::Passed;\nuse two::Two;\nstruct Own(Two);\n",
    );
    write("low/one.rs", "use super::Passed;\nuse super::super::top;\n");
    write("low/two.rs", "use super::{Own, one};\npub struct Two;\n");
    write(
        "low/three.rs",
        "use crate::right::Kind;\npub struct Passed;\n",
    );
    write("lost.rs", "");
    let expected = [
        "lib.rs: the map names gone, which does not exist",
        "lib.rs: lost is missing in the map",
        "left.rs:1: use crate::low;: left imports low in a circle",
        "left.rs:5: let right: super::right::F;: left imports right, which is not below it",
        "low/one.rs:2: use super::super::top;: low imports top in a circle",
        "low/three.rs:1: use crate::right::Kind;: low imports right, which is not below it",
        "top.rs:2: left, // top::: top imports left in a circle",
        "top.rs:3: low::{self, Passed},: top imports low in a circle",
        "low/two.rs:1: use super::{Own, one};: two imports the folder's own module in a circle",
        "low/two.rs:1: use super::{Own, one};: two imports one, which is not below it",
    ];
    let prefix = format!("{}/", folder.path().display());
    let found: Vec<String> = faults(folder.path())
        .iter()
        .map(|fault| fault.replace(&prefix, ""))
        .collect();
    assert_eq!(found, expected);
}
