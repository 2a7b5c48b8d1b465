//! Files that the library writes: what another user, or an earlier run, put at the path stays.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use sidecar_core::trace::{RouteLayout, RouteWriter, write_text};

fn routes(path: &Path) -> std::io::Result<RouteWriter> {
    let layout = RouteLayout::new("a model", &[(0, 4)], 2, false).unwrap();
    RouteWriter::create(path, layout)
}

#[test]
fn routes_do_not_replace_a_model() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["precious.gguf", "precious.csv", "precious.npy"] {
        let path = folder.path().join(name);
        fs::write(&path, b"GGUF and more").unwrap();
        let refused = routes(&path).unwrap_err().to_string();
        assert!(refused.contains("a model is there"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"GGUF and more");
        let beside = folder.path().join(format!("{name}.marks.jsonl"));
        assert!(!beside.exists(), "nothing is made beside it");
    }
}

#[test]
fn routes_replace_those_of_an_earlier_run_only() {
    let folder = tempfile::tempdir().unwrap();
    let lines = ["layer,expert\n0,1\n", "{\"token\": \"secret\"}\n", "notes"];
    for name in ["m.routes", "m.csv", "m.npy"] {
        let path = folder.path().join(name);
        routes(&path).unwrap().rows(0, &[0, 1, 2, 3], &[]).unwrap();
        let marks = folder.path().join(format!("{name}.marks.jsonl"));
        let has_marks = marks.exists();
        let hour = std::time::Duration::from_secs(3600);
        let earlier = std::time::SystemTime::now() - hour;
        let age = |path: &Path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(earlier).unwrap();
        };
        // Under another name, as a file of another process.
        let [other, other_marks] = ["", ".marks.jsonl"].map(|end| {
            let from = folder.path().join(format!("{name}{end}"));
            let to = folder.path().join(format!("of.{name}{end}"));
            if from.exists() {
                fs::rename(&from, &to).unwrap();
                age(&to);
            }
            to
        });
        let before = fs::read(&other).unwrap();
        if has_marks {
            // Without marks, the same bytes are those of another program.
            fs::rename(&other_marks, &marks).unwrap();
            let refused = routes(&other).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
            assert_eq!(fs::read(&other).unwrap(), before);
            assert!(!other_marks.exists());
            fs::rename(&marks, &other_marks).unwrap();
            // Marks of another program.
            fs::write(&marks, lines[1]).unwrap();
            assert!(routes(&path).is_err() && !path.exists());
            assert_eq!(fs::read_to_string(&marks).unwrap(), lines[1]);
        }
        drop(routes(&other).unwrap());
        assert!(fs::metadata(&other).unwrap().len() < before.len() as u64);
        for line in lines {
            let path = folder.path().join(format!("foreign.{name}"));
            fs::write(&path, line).unwrap();
            assert!(routes(&path).is_err());
            assert_eq!(fs::read_to_string(&path).unwrap(), line);
        }
    }
}

#[test]
fn links_at_names_that_can_be_guessed_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let precious = folder.path().join("precious");
    fs::write(&precious, "1").unwrap();
    let path = folder.path().join("t.json");
    for number in 0..100 {
        let name = format!("t.json.{}-{number}.part", std::process::id());
        symlink(&precious, folder.path().join(name)).unwrap();
    }
    write_text(&path, "{}").unwrap();
    assert_eq!(fs::read(&precious).unwrap(), b"1");
    assert_eq!(fs::read(&path).unwrap(), b"{}");
}

#[test]
fn one_module_writes_files() {
    /// Calls that create or cut a file.
    const CALLS: [&str; 9] = [
        "File::create",
        "fs::write(",
        ".set_len(",
        ".truncate(true)",
        ".create(true)",
        ".create_new(",
        "NamedTempFile::",
        "O_CREAT",
        ".append(true)",
    ];
    /// Files that may have them, with the reason.
    const PERMITTED: [(&str, &str); 11] = [
        ("core/src/files.rs", "the module itself"),
        (
            "core/src/trace/routes/writer.rs",
            "cuts a file that it made",
        ),
        (
            "preload/src/process/journal.rs",
            "appends to the file of the wrapper",
        ),
        (
            "cli/src/launch/limit.rs",
            "writes settings of control groups",
        ),
        (
            "cli/src/launch/journal.rs",
            "tries the file of events, and cuts it",
        ),
        (
            "cli/src/swap/rewrite.rs",
            "a new file, with the attributes of a model",
        ),
        ("cli/src/tune/record.rs", "cuts a file that it appends to"),
        (
            "cli/src/output.rs",
            "a new file beside a model, until it has its name",
        ),
        (
            "cli/src/evaluation/program.rs",
            "a new file in a folder of its own",
        ),
        ("cli/src/temporary.rs", "a new file, locked until it goes"),
        ("core/src/descriptors.rs", "cuts a file that is kept open"),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<_> = ["core/src", "src", "preload/src", "cli/src"]
        .map(|it| root.join(it))
        .into();
    let (mut wrong, mut used) = (Vec::new(), Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path
                .strip_prefix(root)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            let code = code
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"));
            let calls = code.flat_map(|line| CALLS.iter().filter(move |it| line.contains(**it)));
            let calls: Vec<_> = calls.collect();
            let permitted = PERMITTED.iter().any(|(file, _)| *file == name);
            match (calls.is_empty(), permitted) {
                (false, true) => used.push(name),
                (false, false) if !name.ends_with("tests.rs") => wrong.push((name, calls)),
                _ => {}
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "these write past core/src/files.rs: {wrong:?}"
    );
    assert_eq!(
        used.len(),
        PERMITTED.len(),
        "no call is left in one of them: {used:?}"
    );
}
