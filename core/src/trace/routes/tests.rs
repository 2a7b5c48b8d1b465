use std::io::{self, ErrorKind};
use std::path::Path;

use super::layout::{NPY_HEADER, ROWS};
use super::writer::{beside, record_header};
use super::*;

fn layout(weights: bool) -> RouteLayout {
    RouteLayout::new("a model", &[(0, 4), (3, 8)], 2, weights).expect("it fits")
}

fn read_all(bytes: &[u8]) -> io::Result<(Vec<RouteRecord>, bool)> {
    let mut reader = RouteReader::new(bytes)?;
    let mut records = Vec::new();
    while let Some(record) = reader.read()? {
        records.push(record);
    }
    Ok((records, reader.is_cut()))
}

/// Two evaluations, a mark and a gap.
fn written(name: &str, weights: bool) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    let mut writer = RouteWriter::create(&path, layout(weights)).expect("free space");
    let gate = |count: usize| vec![0.5; if weights { count } else { 0 }];
    writer
        .rows(1, &[0, 1, 2, 3, 3, 2, -1, -1], &gate(8))
        .expect("free space");
    writer.mark("next").expect("free space");
    writer.dropped(5);
    writer.rows(2, &[1, 2, 6, 7], &gate(4)).expect("free space");
    writer.flush().expect("free space");
    assert_eq!((writer.tokens(), writer.missing()), (3, 5));
    (folder, path)
}

#[test]
fn compact_binary_comes_back() {
    for weights in [false, true] {
        let (_folder, path) = written("model.routes", weights);
        let bytes = std::fs::read(&path).expect("a file");
        let (records, is_cut) = read_all(&bytes).expect("valid");
        let gate = |count: usize| vec![0.5; if weights { count } else { 0 }];
        let rows = |context, experts: &[i16]| RouteRecord::Rows {
            context,
            weights: gate(experts.len()),
            experts: experts.to_vec(),
        };
        let expected = [
            rows(1, &[0, 1, 2, 3, 3, 2, -1, -1]),
            RouteRecord::Mark("next".into()),
            RouteRecord::Dropped(5),
            rows(2, &[1, 2, 6, 7]),
        ];
        assert_eq!((&records[..], is_cut), (&expected[..], false));
        let reader = RouteReader::open(&path).expect("valid");
        assert_eq!(reader.layout(), &layout(weights));
        let mut workloads = Vec::new();
        let read = reader.workloads(|text, counts| {
            workloads.push((text.to_owned(), counts));
            Ok(())
        });
        read.expect("valid");
        let counts: Vec<_> = workloads
            .iter()
            .map(|(text, counts)| {
                let layers = counts.layers.iter();
                let layers = layers.map(|layer| (layer.tokens, layer.experts.as_slice()));
                (text.as_str(), layers.collect::<Vec<_>>())
            })
            .collect();
        let before: [(u64, &[u64]); 2] = [(2, &[1, 1, 1, 1]), (1, &[0, 0, 1, 1, 0, 0, 0, 0])];
        let after: [(u64, &[u64]); 2] = [(1, &[0, 1, 1, 0]), (1, &[0, 0, 0, 0, 0, 0, 1, 1])];
        assert_eq!(counts, [("", before.to_vec()), ("next", after.to_vec())]);
        let locality = workloads[0].1.layers[0].locality.as_ref();
        assert_eq!(locality.map(|locality| locality.first), Some(4));
        // Cut at any byte: a prefix of the records, and never an error.
        let header = layout(weights).header().len();
        for end in header..bytes.len() {
            let (part, _) = read_all(&bytes[..end]).expect("valid");
            assert_eq!(part[..], expected[..part.len()]);
        }
        for end in 0..header {
            assert!(read_all(&bytes[..end]).is_err());
        }
    }
}

#[test]
fn damaged_files_use_no_memory_and_never_panic() {
    let (_folder, path) = written("model.routes", true);
    let good = std::fs::read(&path).expect("a file");
    for at in 0..good.len() {
        for value in [0, 1, 0x7f, 0xff] {
            let mut bytes = good.clone();
            bytes[at] = value;
            let _ = read_all(&bytes);
            let _ = RouteReader::new(&bytes[..]).and_then(|reader| reader.workloads(|_, _| Ok(())));
        }
    }
    // Sizes at the limits of their type.
    for at in [16, 20, 24] {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read_all(&bytes).is_err(), "number at {at}");
    }
    let mut bytes = layout(true).header();
    bytes.extend(record_header(ROWS, u32::MAX, 0));
    assert!(read_all(&bytes).is_err());
}

#[test]
fn arrays_have_a_header_for_numpy() {
    let (_folder, path) = written("model.npy", true);
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[10..NPY_HEADER]).into_owned();
    let routes = std::fs::read(&path).expect("a file");
    assert_eq!(routes.len(), NPY_HEADER + 3 * 4 * 2);
    let header = text(&routes);
    assert!(
        header.starts_with("{'descr': '<i2', 'fortran_order': False, 'shape': (3, 2, 2), }")
            && header.ends_with(" \n"),
        "{header}"
    );
    let weights = std::fs::read(beside(&path, ".weights.npy")).expect("a file");
    assert_eq!(weights.len(), NPY_HEADER + 3 * 4 * 4);
    assert!(text(&weights).contains("'<f4'"));
    let marks = std::fs::read_to_string(beside(&path, ".marks.jsonl")).expect("a file");
    assert_eq!(
        marks,
        "{\"token\":2,\"mark\":\"next\"}\n{\"token\":2,\"dropped\":5}\n"
    );
}

#[test]
fn csv_has_a_line_for_each_routed_expert() {
    for (weights, expected) in [
        (
            false,
            "layer,expert\n0,0\n0,1\n3,2\n3,3\n0,3\n0,2\n0,1\n0,2\n3,6\n3,7\n",
        ),
        (true, "layer,expert,weight\n0,0,0.5\n0,1,0.5\n"),
    ] {
        let (_folder, path) = written("model.csv", weights);
        let text = std::fs::read_to_string(&path).expect("a file");
        assert!(text.starts_with(expected), "{text}");
    }
}

#[test]
fn tokens_that_cannot_be_written_are_missing() {
    let full = Path::new("/dev/full");
    let failed = RouteWriter::create(full, layout(false)).expect_err("no space");
    assert_eq!(failed.kind(), ErrorKind::StorageFull);
}
