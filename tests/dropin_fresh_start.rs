//! Reloads of files in which one thing changed at random: a key, a value, a tensor, a type, a shape, a
//! scale, a bias. The host either computes what a new process with the file computes, or the file is
//! refused, or the report names what needs a new start.

mod hosts;
mod models;

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::ops::Range;
use std::path::Path;

use hosts::{TOKENS, on};
use models::read;
use sidecar_core::gguf::{ValueType, companions};
use testkit::architectures::{self, Device, Process, Reference, WRITER};
use testkit::fixtures::fixture;
use testkit::host::{Host, Program};
use testkit::writer::{F16, F32, Gguf, Kv, Q4_0, Q8_0, Tensor, pattern, weights};

/// Random numbers of a seed.
struct Random(Vec<u8>, usize);

impl Random {
    fn pick(&mut self, range: Range<usize>) -> usize {
        let at = self.1;
        self.1 += 2;
        let number = u16::from_le_bytes([self.0[at], self.0[at + 1]]);
        range.start + usize::from(number) % range.len()
    }

    fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.pick(0..all.len())].clone()
    }
}

/// Changes one thing, and returns what it is.
fn change(gguf: &mut Gguf, seed: u64) -> String {
    let mut random = Random(pattern(seed, 64), 0);
    let kind = random.pick(0..14);
    let (key, tensor) = (
        random.pick(0..gguf.kvs.len()),
        random.pick(0..gguf.tensors.len()),
    );
    let matrices = gguf.tensors.iter().enumerate();
    let matrices = matrices.filter(|(_, of)| of.ne.len() >= 2 && of.ne[0] % 32 == 0);
    let matrices: Vec<usize> = matrices.map(|(at, _)| at).collect();
    let matrix = random.one_of(&matrices);
    match kind {
        0 | 1 => {
            let (name, Kv::Raw(id, bytes)) = &mut gguf.kvs[key] else {
                unreachable!("each value was read as it is");
            };
            change_value(ValueType::from_id(*id), bytes);
            format!("another value of {name}")
        }
        2 => format!("without {}", gguf.kvs.remove(key).0),
        3 => {
            let architecture = architecture(gguf);
            let (name, value) = random.one_of(&[
                (format!("{architecture}.logit_scale"), Kv::F32(0.5)),
                (format!("{architecture}.rope.scaling.factor"), Kv::F32(4.0)),
                ("general.author".into(), Kv::Text("somewhere".into())),
                ("tokenizer.ggml.eot_token_id".into(), Kv::U32(3)),
                ("tokenizer.chat_template".into(), Kv::Text("{{ 1 }}".into())),
                ("sampling.unknown".into(), Kv::Bool(true)),
            ]);
            gguf.kvs.retain(|(known, _)| *known != name);
            gguf.kvs.push((name.clone(), value));
            format!("{name} is new")
        }
        4 => {
            let (name, Kv::Raw(id, bytes)) = &mut gguf.kvs[key] else {
                unreachable!("each value was read as it is");
            };
            // The same bits as another type of that size.
            let other = [(4, 5), (5, 4), (6, 4), (7, 0), (0, 1), (10, 11)];
            let Some((_, to)) = other.iter().find(|(from, _)| from == id) else {
                change_value(ValueType::from_id(*id), bytes);
                return format!("another value of {name}");
            };
            *id = *to;
            format!("another type of {name}")
        }
        5 | 6 => {
            let of = &mut gguf.tensors[matrix];
            of.ty = random.one_of(&[F16, Q8_0, Q4_0]);
            of.data = weights(seed, of.ty, of.ne.iter().product::<i64>() as u64);
            // Small numbers: no product exceeds a float.
            let block = match of.ty {
                F16 => 2,
                Q4_0 => 18,
                _ => 34,
            };
            for block in of.data.chunks_exact_mut(block) {
                block[1] = block[1] & 0x80 | 0x1c;
            }
            format!("{} as type {}", of.name, of.ty)
        }
        7 => {
            let of = &mut gguf.tensors[tensor];
            match random.pick(0..3) {
                0 if of.ne.len() > 1 => of.ne.reverse(),
                1 if of.ne[0] % 64 == 0 => {
                    of.ne[0] /= 2;
                    of.ne.resize(of.ne.len().max(2), 1);
                    of.ne[1] *= 2;
                }
                _ => of.ne.insert(0, 1),
            }
            format!("another shape of {}: {:?}", of.name, of.ne)
        }
        8 | 9 => {
            let of = &gguf.tensors[matrix];
            let stem = of.name.trim_end_matches(".weight");
            let rows = of.ne[1];
            let one_of = [
                (format!("{stem}.scale"), 1),
                (format!("{stem}.input_scale"), 1),
                (format!("{stem}.bias"), rows),
                ("rope_freqs.weight".into(), 16),
                ("output_norm.bias".into(), 8),
                (format!("{stem}.unknown"), 8),
            ];
            let (name, count) = random.one_of(&one_of);
            let known = gguf.tensors.iter().position(|of| of.name == name);
            match known {
                Some(at) => {
                    let of = &mut gguf.tensors[at];
                    change_numbers(of, seed);
                    format!("other numbers in {name}")
                }
                None => {
                    gguf.tensors.push(Tensor {
                        name: name.clone(),
                        ne: vec![count],
                        ty: F32,
                        data: 0.25f32.to_le_bytes().repeat(count as usize),
                    });
                    format!("{name} is new")
                }
            }
        }
        10 => format!("without {}", gguf.tensors.remove(tensor).name),
        11 => {
            let of = &mut gguf.tensors[tensor];
            of.name.push('s');
            format!("{} is renamed", of.name)
        }
        12 => {
            let floats: Vec<usize> = (0..gguf.tensors.len())
                .filter(|at| gguf.tensors[*at].ty == F32)
                .collect();
            let of = &mut gguf.tensors[random.one_of(&floats)];
            change_numbers(of, seed);
            format!("other numbers in {}", of.name)
        }
        _ => match random.pick(0..3) {
            0 => {
                gguf.alignment = 64;
                "another alignment".into()
            }
            1 => {
                gguf.kvs[1..].reverse();
                "another order of keys".into()
            }
            _ => {
                gguf.tensors.reverse();
                "another order of tensors".into()
            }
        },
    }
}

fn architecture(gguf: &Gguf) -> String {
    let value = gguf.kvs.iter().find(|of| of.0 == "general.architecture");
    match value {
        Some((_, Kv::Raw(_, bytes))) => String::from_utf8_lossy(&bytes[8..]).into_owned(),
        _ => "llama".into(),
    }
}

/// Changes the bytes of a value: of text, the last letter; of numbers, the upper bits, which no
/// computation rounds away. An empty value gets an element.
fn change_value(ty: Option<ValueType>, bytes: &mut Vec<u8>) {
    match ty {
        Some(ValueType::F32) => {
            let value = f32::from_le_bytes(bytes[..4].try_into().expect("four"));
            *bytes = (value * 1.5 + 0.25).to_le_bytes().to_vec();
        }
        Some(ValueType::String) if bytes.len() == 8 => {
            *bytes = [&1u64.to_le_bytes()[..], b"x"].concat();
        }
        Some(ValueType::Array) if bytes.len() == 12 => {
            let uint32 = 4u32.to_le_bytes();
            *bytes = [&uint32[..], &1u64.to_le_bytes(), &[0; 4]].concat();
        }
        Some(ValueType::String | ValueType::Array) => {
            *bytes.last_mut().expect("a value") ^= 1;
        }
        _ => bytes[0] ^= 1,
    }
}

/// Halves some numbers of a tensor, whose signs stay.
fn change_numbers(of: &mut Tensor, seed: u64) {
    for (at, bytes) in of.data.chunks_exact_mut(4).enumerate() {
        let number = f32::from_le_bytes(bytes.try_into().expect("four"));
        let factor = if (at as u64 + seed).is_multiple_of(2) {
            0.5
        } else {
            0.75
        };
        bytes.copy_from_slice(&(number * factor).to_le_bytes());
    }
}

/// A program with the drop-in, and what a new process computes with a file; `Err` when it does not
/// start.
struct Compared<'a> {
    model: &'a Path,
    results: &'a mut dyn FnMut() -> String,
    control: &'a dyn Fn(&str) -> serde_json::Value,
    fresh: &'a mut dyn FnMut(&Path) -> Result<String, String>,
    /// Whether results come from tokens that no vocabulary made.
    has_fixed_tokens: bool,
}

#[derive(Default, Debug)]
struct Counts {
    taken: u64,
    named: u64,
    refused: u64,
}

/// Changes a model that a program has loaded, a number of times.
fn compare(
    of: Compared<'_>,
    original: &Gguf,
    seeds: Range<u64>,
    counts: &mut Counts,
) -> Vec<String> {
    let other = of.model.with_extension("other");
    let before = (of.results)();
    let mut wrong = Vec::new();
    for seed in seeds {
        let mut changed = original.clone();
        let what = change(&mut changed, seed);
        changed.replace(of.model).expect("free space");
        let answer = (of.control)("reload");
        let after = (of.results)();
        let file = &answer["reports"][0]["files"][0];
        let mut fresh = || {
            std::fs::copy(of.model, &other).expect("free space");
            (of.fresh)(&other)
        };
        let (event, reason) = (file["event"].as_str(), file["reason"].as_str());
        let is_right = match (event, reason) {
            (Some("taken"), Some("")) => {
                counts.taken += 1;
                fresh() == Ok(after)
            }
            (Some("taken"), Some(reason)) => {
                counts.named += 1;
                // A new process may refuse the value, such as a token that is there twice.
                let same = match of.has_fixed_tokens.then(fresh) {
                    Some(Err(_)) => what.starts_with("another value"),
                    Some(Ok(found)) => found == before,
                    None => true,
                };
                reason.contains("needs a new start") && after == before && same
            }
            (Some("ignored"), Some(reason)) => {
                counts.refused += 1;
                !reason.is_empty() && after == before
            }
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{seed}: {what}: {event:?} {reason:?}"));
        }
        original.replace(of.model).expect("free space");
        let answer = (of.control)("reload");
        let event = &answer["reports"][0]["files"][0]["event"];
        assert_eq!(event, "taken", "{seed}: {what}: {answer}");
    }
    assert_eq!((of.results)(), before);
    wrong
}

/// The folder of models that are written often.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    folder.expect("a folder")
}

fn report(model: &str, changes: u64, counts: &Counts, wrong: &[String]) {
    let Counts {
        taken,
        named,
        refused,
    } = counts;
    println!(
        "{model}: {changes} changes: {taken} as a fresh start, {named} named, {refused} refused"
    );
    assert!(wrong.is_empty(), "{model}:\n{}", wrong.join("\n"));
}

#[test]
fn a_reload_of_a_file_with_one_change_is_a_fresh_start_or_is_refused() {
    let changes = if testkit::long_tests() { 500 } else { 40 };
    let original = read(&fixture("small.gguf"));
    let folder = folder();
    let model = folder.path().join("model.gguf");
    original.replace(&model).expect("free space");
    let mut host = Host::start(Program::C, &model, &on());
    let socket = host.socket().to_owned();
    let mut counts = Counts::default();
    let of = Compared {
        model: &model,
        results: &mut || format!("{:?}", host.text(TOKENS)),
        control: &|command| testkit::host::control(&socket, command),
        fresh: &mut |path| {
            let mut fresh = Host::start(Program::C, path, &on());
            let text = format!("{:?}", fresh.text(TOKENS));
            assert_eq!(fresh.end(), Some(0));
            Ok(text)
        },
        has_fixed_tokens: false,
    };
    let wrong = compare(of, &original, 0..changes, &mut counts);
    report("small.gguf", changes, &counts, &wrong);
    assert!(counts.taken > 0 && counts.named > 0 && counts.refused > 0);
    assert_eq!(host.end(), Some(0));
}

#[test]
fn a_reload_is_a_fresh_start_or_is_refused_in_many_architectures_from_source() {
    let changes = if testkit::long_tests() { 250 } else { 10 };
    let mut reference = Reference::start(Device::Cpu);
    let mut wrong = Vec::new();
    let mut all = Counts::default();
    let models = architectures::daily(WRITER, &architectures::folder());
    for (at, path) in models.iter().enumerate() {
        let original = read(path);
        let folder = folder();
        let model = folder.path().join("model.gguf");
        original.replace(&model).expect("free space");
        let mut process = Process::start(Device::Cpu, &on());
        assert!(process.load(&model), "{}", path.display());
        let socket = process.host.socket().to_owned();
        let of = Compared {
            model: &model,
            results: &mut || process.evaluate().expect("an evaluation"),
            control: &|command| testkit::host::control(&socket, command),
            fresh: &mut |path| reference.evaluate(path),
            has_fixed_tokens: true,
        };
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let first = 1000 * (1 + at as u64);
        let mut counts = Counts::default();
        let found = compare(of, &original, first..first + changes, &mut counts);
        println!("{name}: {counts:?}");
        wrong.extend(found.into_iter().map(|found| format!("{name}: {found}")));
        all.taken += counts.taken;
        all.named += counts.named;
        all.refused += counts.refused;
        process.end();
    }
    report("architectures", changes * models.len() as u64, &all, &wrong);
}

#[test]
fn a_weight_takes_its_scales_and_its_bias_from_another_file_from_source() {
    let mut reference = Reference::start(Device::Cpu);
    for path in architectures::daily(WRITER, &architectures::folder()) {
        let original = read(&path);
        let folder = folder();
        let source = folder.path().join("source.gguf");
        let mut process = Process::start(Device::Cpu, &on());
        assert!(process.load(&path), "{}", path.display());
        let before = process.evaluate().expect("an evaluation");
        let mut kinds = BTreeSet::new();
        for weight in &original.tensors {
            let name = CString::new(weight.name.as_str()).expect("no zero");
            let has = |name: &CStr| {
                let mut tensors = original.tensors.iter();
                tensors.any(|of| of.name.as_bytes() == name.to_bytes())
            };
            let names = companions(&name, has).into_iter();
            let names: Vec<String> = names
                .map(|name| name.into_string().expect("text"))
                .collect();
            // The first layer that has it.
            let kind = weight.name.replace(|c: char| c.is_ascii_digit(), "");
            let Some(last) = names.last().filter(|_| kinds.insert(kind)) else {
                continue;
            };
            let what = format!("{}: {}", path.display(), weight.name);
            let mut changed = original.clone();
            for of in &mut changed.tensors {
                if of.name == weight.name || names.contains(&of.name) {
                    change_numbers(of, 0);
                }
            }
            changed.replace(&source).expect("free space");
            let overlay = architectures::overlay(&weight.name, &source);
            let answer = process.request(&overlay);
            assert_eq!(answer["ok"], true, "{what}: {answer}");
            assert_eq!(process.evaluate(), reference.evaluate(&source), "{what}");
            process.request(&architectures::revert());
            changed.tensors.retain(|of| of.name != *last);
            changed.replace(&source).expect("free space");
            let answer = process.request(&overlay);
            let named = format!("is used with '{last}' in the model");
            assert!(answer.to_string().contains(&named), "{what}: {answer}");
            assert_eq!(process.evaluate().as_ref(), Ok(&before), "{what}");
        }
        println!("{}: {} kinds of weights", path.display(), kinds.len());
        process.end();
    }
}
