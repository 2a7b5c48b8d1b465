//! Sources that are damaged.

use std::fs::File;
use std::os::fd::AsRawFd;

use super::*;

/// Writes the other model with one changed tensor.
fn change(it: &Fixture, ty: u32, change: impl Fn(&mut Vec<u8>)) {
    let mut other = model(ty, 20, 32);
    change(&mut other.tensors[1].data);
    other.write(it.other.as_ref()).expect("another");
}

#[test]
fn a_damaged_source_is_refused() {
    let row = 2 * 34;
    for (defect, change_of) in [
        (
            "1 of its rows hold only zeros, 0 do in the tensor in use",
            &(|data: &mut Vec<u8>| data[..row].fill(0)) as &dyn Fn(&mut Vec<u8>),
        ),
        (
            "1 of its scales are infinite or not a number, none is in the tensor in use",
            &|data| data[..2].copy_from_slice(&0x7e00u16.to_le_bytes()),
        ),
    ] {
        let it = Fixture::new(32);
        let before = bytes(&it.model);
        change(&it, Q8_0, change_of);
        let tensors = it.tensors(".*ffn_down.*");
        fails(
            &tensors,
            &[
                "other.gguf: tensor 'blk.0.ffn_down.weight' is damaged",
                defect,
                "LLAMA_HOTSWAP_CHECK=0",
            ],
        );
        assert_eq!(bytes(&it.model), before);
        assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
        // The other tensor is whole.
        succeeds(&it.tensors("blk.1.ffn_down.*"));
        let mut command = Command::new(PROGRAM);
        command.env("LLAMA_HOTSWAP_CHECK", "0");
        let output = command.arg("swap").args(tensors).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{}", said(&output));
    }
}

#[test]
fn defects_of_the_tensor_in_use_are_no_damage() {
    let it = Fixture::new(32);
    let mut old = model(Q4_0, 10, 32);
    old.tensors[1].data[..2 * 18].fill(0);
    old.write(it.model.as_ref()).expect("a model");
    change(&it, Q8_0, |data| data[..2 * 34].fill(0));
    succeeds(&it.tensors(".*ffn_down.*"));
}

/// A model of one layer with four experts.
fn mixture(path: &str) -> Gguf {
    let key = |name: &str| format!("llama.{name}");
    let mut file = Gguf::default()
        .kv(&key("expert_count"), Kv::U32(4))
        .kv(&key("expert_used_count"), Kv::U32(1))
        .tensor("blk.0.ffn_gate_inp.weight", &[64, 4], F32, 1);
    for name in ["gate", "up", "down"] {
        let name = format!("blk.0.ffn_{name}_exps.weight");
        file = file.tensor(&name, &[64, 64, 4], F32, 2);
    }
    file.write(path.as_ref()).expect("a model");
    file
}

#[test]
fn an_expert_that_was_never_written_is_not_pruned_around() {
    let it = Fixture::new(32);
    let (path, list, to) = (it.at("mixture"), it.at("list"), it.at("pruned"));
    let mut written = mixture(&path);
    std::fs::write(&list, r#"[{"layer": 0, "experts": [3]}]"#).expect("free space");
    let prune = || {
        let mut command = Command::new(PROGRAM);
        command.args(["prune", &path, "--experts", &list, "-o", &to]);
        command.env("PATH", "").output().expect("it starts")
    };
    // Rows of zeros that were written are the model's own.
    written.tensors[1].data[..64 * 4].fill(0);
    written.write(path.as_ref()).expect("a model");
    let output = prune();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("was not loaded"), "{output:?}");
    std::fs::remove_file(&to).expect("a model");
    let file = File::options().write(true).open(&path).expect("a model");
    let size = file.metadata().expect("a file").len() as libc::off_t;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: a system call for a descriptor that is open.
    let punched = unsafe { libc::fallocate(file.as_raw_fd(), mode, size / 2, 16 << 10) };
    if punched != 0 {
        eprintln!("skipped: the file system has no holes");
        return;
    }
    drop(file);
    let output = prune();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("is damaged"), "{}", said(&output));
    assert!(!Path::new(&to).exists());
    assert_eq!(files(it.folder.path()).len(), 4, "{:?}", it.files());
}
