//! `llama-sidecar inspect`.

use std::process::{Command, Stdio};

use testkit::writer::{F32, Gguf, Tensor};

/// A file of 4 MB may have so many tensors without bytes.
const TENSORS: usize = 100_000;
/// Address space for the command, in KiB.
const SPACE: u32 = 200_000;

#[test]
fn very_many_tensors_are_printed_one_by_one() {
    let mut gguf = Gguf::default();
    gguf.tensors.extend((0..TENSORS).map(|number| Tensor {
        name: format!("t{number}"),
        ne: vec![0],
        ty: F32,
        data: Vec::new(),
    }));
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    gguf.write(&path).expect("free space");
    for output in ["--json", "--"] {
        let inspected = Command::new("sh")
            .args(["-c", "ulimit -v $0 && exec \"$@\"", &SPACE.to_string()])
            .args([env!("CARGO_BIN_EXE_llama-sidecar"), "inspect", output])
            .arg(&path)
            .stderr(Stdio::inherit())
            .output()
            .expect("it starts");
        assert!(inspected.status.success(), "{:?}", inspected.status);
        let text = String::from_utf8(inspected.stdout).expect("UTF-8");
        let last = format!("t{}", TENSORS - 1);
        assert!(text.contains(&last), "{last} is not printed");
    }
}
