//! Reloads of files in which one thing changed at random: a key, a value, a tensor, a type, a shape, a
//! scale. The host either writes what a new process with the file writes, or the file is refused, or
//! the report names what needs a new start.

mod hosts;

use std::ops::Range;
use std::path::Path;

use hosts::{TOKENS, copied, on};
use sidecar_core::gguf::{Access, GgufFile, ValueType};
use testkit::fixtures::fixture;
use testkit::host::{Host, Program};
use testkit::writer::{F16, F32, Gguf, Kv, Q8_0, Tensor, pattern, weights};

const MODEL: &str = "small.gguf";

/// Reads a model, with each value as it is.
fn read(path: &Path) -> Gguf {
    let file = GgufFile::open(path, Access::Read).expect("a model");
    let bytes = |offset: u64, len: u64| {
        let mut bytes = vec![0; len as usize];
        file.source
            .read_at(&mut bytes, offset)
            .expect("the file is whole");
        bytes
    };
    let mut gguf = Gguf::default();
    gguf.kvs.clear();
    for key in &file.header.keys {
        let (id, before) = match (key.array, key.ty) {
            (true, _) => (ValueType::Array as u32, 12),
            (false, ValueType::String) => (key.ty as u32, 8),
            (false, _) => (key.ty as u32, 0),
        };
        let value = bytes(key.offset - before, key.len + before);
        gguf = gguf.kv(&key.name_lossy(), Kv::Raw(id, value));
    }
    for info in &file.header.tensors {
        gguf.tensors.push(Tensor {
            name: file.header.name(info).to_string_lossy().into_owned(),
            ne: info.ne[..info.n_dims as usize]
                .iter()
                .map(|n| *n as i64)
                .collect(),
            ty: info.ty.id,
            data: bytes(info.offset, info.nbytes),
        });
    }
    gguf
}

/// Changes one thing, and returns what it is.
fn change(gguf: &mut Gguf, seed: u64) -> String {
    let random = pattern(seed, 16);
    let pick = |range: Range<usize>, at: usize| {
        let number = u16::from_le_bytes([random[at], random[at + 1]]);
        range.start + usize::from(number) % range.len()
    };
    let (key, tensor) = (pick(0..gguf.kvs.len(), 2), pick(0..gguf.tensors.len(), 4));
    let matrices = gguf.tensors.iter().enumerate();
    let matrices = matrices.filter(|(_, of)| of.ne.len() == 2 && of.name.starts_with("blk."));
    let matrices: Vec<usize> = matrices.map(|(at, _)| at).collect();
    let matrix = matrices[pick(0..matrices.len(), 6)];
    let one = |name: String| Tensor {
        name,
        ne: vec![1],
        ty: F32,
        data: 0.25f32.to_le_bytes().to_vec(),
    };
    match pick(0..10, 0) {
        0 | 1 => {
            let (name, Kv::Raw(id, bytes)) = &mut gguf.kvs[key] else {
                unreachable!("each value was read as it is");
            };
            // Of text, the last letter; of numbers, the upper bits, which no computation rounds away.
            match ValueType::from_id(*id) {
                Some(ValueType::F32) => {
                    let value = f32::from_le_bytes(bytes[..4].try_into().expect("four"));
                    *bytes = (value * 1.5 + 0.25).to_le_bytes().to_vec();
                }
                Some(ValueType::String | ValueType::Array) => {
                    *bytes.last_mut().expect("a value") ^= 1;
                }
                _ => bytes[0] ^= 1,
            }
            format!("another value of {name}")
        }
        2 => format!("without {}", gguf.kvs.remove(key).0),
        3 => {
            let (name, value) = [
                ("llama.logit_scale", Kv::F32(0.5)),
                ("llama.rope.scaling.factor", Kv::F32(4.0)),
                ("general.author", Kv::Text("somewhere".into())),
                ("tokenizer.ggml.eot_token_id", Kv::U32(3)),
                ("sampling.unknown", Kv::Bool(true)),
            ][pick(0..5, 8)]
            .clone();
            gguf.kvs.retain(|(known, _)| known != name);
            gguf.kvs.push((name.into(), value));
            format!("{name} is new")
        }
        4 | 5 => {
            let of = &mut gguf.tensors[matrix];
            of.ty = [F16, Q8_0][pick(0..2, 8)];
            of.data = weights(seed, of.ty, of.ne.iter().product::<i64>() as u64);
            // Small numbers: no product exceeds a float.
            let (block, end) = if of.ty == F16 { (2, 1) } else { (34, 1) };
            for block in of.data.chunks_exact_mut(block) {
                block[end] = block[end] & 0x80 | 0x1c;
            }
            format!("{} as type {}", of.name, of.ty)
        }
        6 => {
            let of = &mut gguf.tensors[matrix];
            of.ne.reverse();
            format!("another shape of {}", of.name)
        }
        7 => {
            let weight = &gguf.tensors[matrix].name;
            let name = match pick(0..3, 8) {
                0 => weight.replace(".weight", ".scale"),
                1 => weight.replace(".weight", ".input_scale"),
                _ => "rope_freqs.weight".into(),
            };
            gguf.tensors.push(one(name.clone()));
            format!("{name} is new")
        }
        8 => format!("without {}", gguf.tensors.remove(tensor).name),
        _ => {
            let of = &mut gguf.tensors[tensor];
            of.name.push('s');
            format!("{} is renamed", of.name)
        }
    }
}

#[test]
fn a_reload_of_a_file_with_one_change_is_a_fresh_start_or_is_refused() {
    let cases = if testkit::long_tests() { 1000 } else { 60 };
    let original = read(&fixture(MODEL));
    let (_folder, path) = copied(MODEL);
    let other = path.with_extension("other");
    let mut host = Host::start(Program::C, &path, &on());
    let before = host.text(TOKENS);
    let (mut taken, mut named, mut refused) = (0, 0, 0);
    for seed in 0..cases {
        let mut changed = original.clone();
        let what = change(&mut changed, seed);
        changed.replace(&path).expect("free space");
        let answer = host.control("reload");
        let after = host.text(TOKENS);
        let file = &answer["reports"][0]["files"][0];
        match (file["event"].as_str(), file["reason"].as_str()) {
            (Some("taken"), Some("")) => {
                taken += 1;
                std::fs::copy(&path, &other).expect("free space");
                let mut fresh = Host::start(Program::C, &other, &on());
                assert_eq!(after, fresh.text(TOKENS), "{seed}: {what}: {answer}");
                assert_eq!(fresh.end(), Some(0));
            }
            (Some("taken"), Some(reason)) => {
                named += 1;
                assert!(
                    reason.contains("needs a new start"),
                    "{seed}: {what}: {reason}"
                );
                assert_eq!(after, before, "{seed}: {what}");
            }
            (Some("ignored"), Some(reason)) => {
                refused += 1;
                assert!(!reason.is_empty(), "{seed}: {what}");
                assert_eq!(after, before, "{seed}: {what}");
            }
            _ => panic!("{seed}: {what}: {answer}"),
        }
        original.replace(&path).expect("free space");
        let answer = host.control("reload");
        let event = &answer["reports"][0]["files"][0]["event"];
        assert_eq!(event, "taken", "{seed}: {what}: {answer}");
    }
    println!("{cases} changes: {taken} as a fresh start, {named} named, {refused} refused");
    assert!(taken > 0 && named > 0 && refused > 0);
    assert_eq!(host.text(TOKENS), before);
    assert_eq!(host.end(), Some(0));
}
