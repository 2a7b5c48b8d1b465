//! The parser's verdicts against upstream's own `gguf_init_from_file`, on files
//! made by hand and on thousands of damaged ones.
//!
//! Upstream runs in a process of its own and forks for each file: some damage ends
//! it with a signal, and that must not end the tests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sidecar_core::gguf::{
    Access, Dialect, FormatError, GgufFile, Header, OpenError, ParseError, ScaleFormat, TYPES,
};
use testkit::fixtures::upstream_libraries;
use testkit::ggml::Ggml;
use testkit::writer::{F32, Gguf, Kv, Q4_0};

/// What upstream did with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Accepted,
    Rejected,
    Crashed,
}

/// Not a test of its own: the process in which upstream reads the files named on
/// standard input, one a line, and answers with a letter each.
#[test]
#[ignore = "started by the other tests of this file, in a process of its own"]
fn upstream_process() {
    let ggml = Ggml::load(&upstream_libraries());
    let mut answers = String::new();
    for line in std::io::stdin().lines() {
        let path = PathBuf::from(line.unwrap());
        // SAFETY: this process has one thread (the parent set RUST_TEST_THREADS=1),
        // and the child ends without returning.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                // Bounds what a crash can cost: no core file, no endless loop.
                libc::alarm(20);
                libc::_exit(if ggml.accepts(&path) { 0 } else { 1 });
            }
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            status
        };
        answers.push(match (libc::WIFEXITED(status), libc::WEXITSTATUS(status)) {
            (true, 0) => 'a',
            (true, 1) => 'r',
            _ => 'c',
        });
    }
    println!("\nverdicts:{answers}");
}

fn upstream(paths: &[PathBuf]) -> Vec<Verdict> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "upstream_process", "--nocapture"])
        .env("RUST_TEST_THREADS", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    for path in paths {
        writeln!(input, "{}", path.display()).unwrap();
    }
    drop(input);
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    let (_, answers) = output.split_once("verdicts:").expect("upstream answered");
    let verdicts: Vec<Verdict> = answers
        .chars()
        .map_while(|letter| match letter {
            'a' => Some(Verdict::Accepted),
            'r' => Some(Verdict::Rejected),
            'c' => Some(Verdict::Crashed),
            _ => None,
        })
        .collect();
    assert_eq!(verdicts.len(), paths.len());
    verdicts
}

fn ours(bytes: &[u8]) -> Result<Header, FormatError> {
    Header::parse(bytes, bytes.len() as u64).map_err(|stop| match stop {
        ParseError::Malformed(error) => error,
        ParseError::NeedMore(_) => panic!("the whole file was there"),
    })
}

/// Whether a verdict of this library may differ from upstream's, and why.
fn deliberate(ours: &Result<Header, FormatError>, upstream: Verdict) -> bool {
    match (ours, upstream) {
        // Types that only ik_llama.cpp knows.
        (Ok(header), Verdict::Rejected) => header
            .tensors
            .iter()
            .any(|tensor| tensor.ty.dialect == Dialect::IkLlama),
        // Upstream's own product of dimensions can wrap around to a small number.
        (Err(FormatError::Shape { .. }), Verdict::Accepted) => true,
        (Err(_), Verdict::Crashed) => true,
        _ => false,
    }
}

fn compare(folder: &Path, files: &[Vec<u8>]) -> [usize; 3] {
    let paths: Vec<PathBuf> = (0..files.len())
        .map(|i| folder.join(format!("{i}.gguf")))
        .collect();
    for (path, bytes) in paths.iter().zip(files) {
        std::fs::write(path, bytes).unwrap();
    }
    let mut tally = [0; 3];
    for ((path, bytes), theirs) in paths.iter().zip(files).zip(upstream(&paths)) {
        let ours = ours(bytes);
        let agreed = ours.is_ok() == (theirs == Verdict::Accepted) && theirs != Verdict::Crashed;
        assert!(
            agreed || deliberate(&ours, theirs),
            "{}: upstream {theirs:?}, we {:?}",
            path.display(),
            ours.map(|_| "accepted")
        );
        // Through reads in growing steps, the verdict is the same.
        let read = GgufFile::open(path, Access::Read);
        let data_is_short = matches!(
            &read,
            Err(OpenError::Malformed {
                error: FormatError::DataShort { .. },
                ..
            })
        );
        assert_eq!(
            read.is_ok() || data_is_short,
            ours.is_ok(),
            "{}",
            path.display()
        );
        tally[if !agreed {
            2
        } else {
            usize::from(ours.is_ok())
        }] += 1;
    }
    tally
}

fn sample() -> Gguf {
    Gguf::default()
        .kv("general.name", Kv::Text("sample".into()))
        .kv("a.u16", Kv::U16(7))
        .kv("an.i32", Kv::I32(-7))
        .kv(
            "tokens",
            Kv::Texts(vec!["a".into(), String::new(), "ccc".into()]),
        )
        .kv("scores", Kv::F32s(vec![0.5; 3]))
        .kv("a.bool", Kv::Raw(7, vec![1]))
        .kv("a.u64", Kv::Raw(10, vec![0xff; 8]))
        .tensor("token_embd.weight", &[64, 3], Q4_0, 1)
        .tensor("blk.0.ffn_down_exps.weight", &[32, 2, 4], F32, 2)
        .tensor("output_norm.weight", &[5], F32, 3)
}

#[test]
fn the_type_table_is_upstreams() {
    let ggml = Ggml::load(&upstream_libraries());
    for ty in TYPES.iter().filter(|ty| ty.dialect == Dialect::Upstream) {
        let (name, block, bytes) = ggml.type_traits(ty.id);
        assert_eq!(
            (ty.name(), ty.block, ty.bytes),
            (name.as_str(), block, bytes)
        );
        assert_eq!((ty.row_meta, ty.interleave), (0, 1));
    }
}

#[test]
fn scales_are_where_upstream_reads_them() {
    let ggml = Ggml::load(&upstream_libraries());
    let mut checked = Vec::new();
    for ty in TYPES.iter().filter(|ty| ty.dialect == Dialect::Upstream) {
        let (format, offsets) = ty.scales();
        let (one, infinite): (&[u8], &[u8]) = match format {
            ScaleFormat::F32 => continue,
            ScaleFormat::F16 => (&[0, 0x3c], &[0, 0x7c]),
            ScaleFormat::Bf16 => (&[0x80, 0x3f], &[0x80, 0x7f]),
            ScaleFormat::E8m0 => (&[127], &[255]),
        };
        let block = |scale: &[u8], at: usize| {
            let mut block = vec![0x55; ty.bytes as usize];
            for &offset in offsets {
                let scale = if offset == at { scale } else { one };
                block[offset..offset + scale.len()].copy_from_slice(scale);
            }
            block
        };
        let finite = |block: &[u8]| {
            let floats = ggml.floats(ty.id, block)?;
            Some(floats.iter().all(|float| float.is_finite()))
        };
        for &at in offsets {
            // ggml does not turn q8_1 into floats.
            if let Some(whole) = finite(&block(one, at)) {
                assert!(whole, "{}", ty.name());
                assert_eq!(
                    finite(&block(infinite, at)),
                    Some(false),
                    "{} at {at}",
                    ty.name()
                );
                checked.push(ty.name());
            }
        }
    }
    assert!(checked.len() >= 24, "{checked:?}");
}

#[test]
fn verdicts_on_files_made_by_hand() {
    let with = |change: fn(&mut Gguf)| {
        let mut file = sample();
        change(&mut file);
        file.bytes()
    };
    let patched = |at: usize, bytes: &[u8]| {
        let mut file = sample().bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let shape = |ne: &'static [i64]| {
        let mut file = sample();
        file.tensors.truncate(1);
        file.tensors[0].ne = ne.to_vec();
        file.tensors[0].ty = F32;
        file.bytes()
    };
    let files = vec![
        sample().bytes(),
        Gguf::default().bytes(),
        patched(0, b"gguf"),
        patched(4, &0u32.to_le_bytes()),
        patched(4, &1u32.to_le_bytes()),
        patched(4, &2u32.to_le_bytes()),
        patched(4, &4u32.to_le_bytes()),
        patched(4, &3u32.to_be_bytes()),
        patched(8, &(-1i64).to_le_bytes()),
        patched(8, &i64::MAX.to_le_bytes()),
        patched(8, &0i64.to_le_bytes()),
        patched(16, &(-1i64).to_le_bytes()),
        patched(16, &u64::MAX.to_le_bytes()),
        patched(16, &0i64.to_le_bytes()),
        patched(24, &u64::MAX.to_le_bytes()),
        patched(24, &0u64.to_le_bytes()),
        with(|f| f.version = 2),
        with(|f| f.alignment = 64),
        with(|f| f.kvs.push(("general.alignment".into(), Kv::U32(0)))),
        with(|f| f.kvs.push(("general.alignment".into(), Kv::U32(33)))),
        with(|f| f.kvs.push(("general.alignment".into(), Kv::U32(1 << 31)))),
        with(|f| f.kvs.push(("general.alignment".into(), Kv::I32(32)))),
        with(|f| {
            f.kvs
                .push(("general.alignment".into(), Kv::Text("32".into())))
        }),
        with(|f| f.kvs.push(("general.alignment".into(), Kv::U32(64)))),
        with(|f| f.kvs.push(("general.name".into(), Kv::U32(1)))),
        with(|f| f.kvs.push((String::new(), Kv::U32(1)))),
        with(|f| f.kvs.push(("bad type".into(), Kv::Raw(13, vec![0; 8])))),
        with(|f| {
            f.kvs.push((
                "nested".into(),
                Kv::Raw(9, [9u32.to_le_bytes(), [0; 4], [0; 4]].concat()),
            ))
        }),
        with(|f| {
            f.kvs.push((
                "no elements".into(),
                Kv::Raw(9, [[8, 0, 0, 0], [0; 4], [0; 4]].concat()),
            ))
        }),
        with(|f| {
            f.kvs.push((
                "too many".into(),
                Kv::Raw(9, [[0, 0, 0, 0], [0; 4], [1, 0, 0, 0]].concat()),
            ))
        }),
        with(|f| f.tensors[1].name = "token_embd.weight".into()),
        with(|f| f.tensors[1].name = "token_embd.weight\0x".into()),
        with(|f| f.tensors[1].name = String::new()),
        with(|f| f.tensors[1].name = "n".repeat(63)),
        with(|f| f.tensors[1].name = "n".repeat(64)),
        with(|f| f.tensors[1].ne = vec![2; 5]),
        with(|f| f.tensors[1].ne = vec![]),
        with(|f| f.tensors[0].ne = vec![33, 3]),
        with(|f| f.tensors[0].ty = 4),
        with(|f| f.tensors[0].ty = 31),
        with(|f| f.tensors[0].ty = 37),
        with(|f| f.tensors[0].ty = 43),
        with(|f| f.tensors[0].ty = 137),
        with(|f| f.tensors[0].ty = u32::MAX),
        with(|f| f.tensors.swap(0, 2)),
        with(|f| f.tensors[0].data.push(0)),
        with(|f| f.tensors[0].data.truncate(1)),
        shape(&[0]),
        shape(&[-1]),
        shape(&[4, 0, i64::MAX]),
        shape(&[i64::MAX]),
        shape(&[i64::MAX - 1]),
        shape(&[1 << 31, 1 << 31]),
        shape(&[1 << 32, 1 << 31]),
        shape(&[1 << 32, 1 << 32]),
        shape(&[1 << 21, 1 << 21, 1 << 21, 1]),
        shape(&[1 << 16, 1 << 16, 1 << 16, 1 << 15]),
        shape(&[i64::MIN, 2]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let [rejected, accepted, deliberate] = compare(folder.path(), &files);
    assert!(rejected > 25 && accepted > 10, "{rejected} {accepted}");
    // Those of `deliberate` are few, or the exception hides something.
    assert!(deliberate <= 6, "{deliberate}");
}

#[test]
fn verdicts_on_damaged_files() {
    let sample = sample().bytes();
    let header = sample.len() - 32 * 2 * 4 * 4 - 64 - 256;
    let mut state = 0x1234_5678_9abc_def0u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let interesting: [&[u8]; 8] = [
        &[0xff],
        &[0; 4],
        &[0xff; 4],
        &[0; 8],
        &[0xff; 8],
        &[0, 0, 0, 0, 1, 0, 0, 0],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        &[1, 0, 0, 0, 0, 0, 0, 0],
    ];
    let files: Vec<Vec<u8>> = (0..4000)
        .map(|i| {
            let mut file = sample.clone();
            for _ in 0..1 + random(2) {
                let at = random(header);
                match random(3) {
                    0 => file[at] ^= 1 << random(8),
                    1 => file[at] = random(256) as u8,
                    _ => {
                        let patch = interesting[random(interesting.len())];
                        file[at..at + patch.len()].copy_from_slice(patch);
                    }
                }
            }
            if i % 8 == 0 {
                file.truncate(random(sample.len()));
            }
            file
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let [rejected, accepted, deliberate] = compare(folder.path(), &files);
    assert!(rejected > 500 && accepted > 500, "{rejected} {accepted}");
    assert!(deliberate < 40, "{deliberate}");
}
