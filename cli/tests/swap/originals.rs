//! Originals belong to a model by content.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::time::SystemTime;

use super::*;

const FIRST: &str = "blk.0.ffn_down.weight";
const SECOND: &str = "blk.1.ffn_down.weight";

impl Fixture {
    fn originals(&self) -> String {
        self.at("model.gguf.originals")
    }

    /// The name of the originals while the model is renamed.
    fn beside(&self) -> String {
        self.at("model.gguf.originals.new")
    }

    /// Swap and restore both fail with these words and change nothing.
    fn refuses(&self, with: &[&str]) {
        let third = self.at("third.gguf");
        model(F16, 30, 32).write(third.as_ref()).expect("a third");
        let names = self.files();
        let read = |name: &String| fs::read(self.at(name)).expect("a file");
        let contents: Vec<_> = names.iter().map(read).collect();
        for name in [FIRST, SECOND] {
            fails(&[&self.model, "--tensor", name, "--from", &third], with);
        }
        fails(&["undo", &self.model], with);
        assert_eq!(self.files(), names);
        for (name, content) in names.iter().zip(contents) {
            assert_eq!(read(name), content, "{name}");
        }
    }
}

/// Writes into a file, and puts its modification time back.
fn edit(path: &str, at: usize, with: &[u8]) {
    let mut file = File::options().write(true).open(path).expect("a file");
    let time = file.metadata().and_then(|found| found.modified());
    file.seek(SeekFrom::Start(at as u64)).expect("a position");
    file.write_all(with).expect("free space");
    file.set_modified(time.expect("a time")).expect("a time");
}

/// Where the data of a tensor starts in the file.
fn data_of(file: &Gguf, name: &str) -> usize {
    let padded = |len: usize| len.next_multiple_of(file.alignment as usize);
    let before = file.tensors.iter().take_while(|tensor| tensor.name != name);
    file.header().len()
        + before
            .map(|tensor| padded(tensor.data.len()))
            .sum::<usize>()
}

/// A command that was killed leaves a temporary file for new originals, and a restore of all tensors writes none.
#[test]
fn what_a_killed_command_left_of_originals_goes_with_the_next() {
    let it = Fixture::new(32);
    succeeds(&it.tensors(FIRST));
    let left = it.at(".model.gguf.originals.new.swap-0123456789abcdef");
    fs::write(&left, "part").expect("free space");
    let names = it.files();
    succeeds(&["undo", &it.model]);
    assert!(names.len() > it.files().len() && !Path::new(&left).exists());
}

#[test]
fn originals_behind_a_link_are_refused_wherever_it_leads() {
    let it = Fixture::new(32);
    succeeds(&it.tensors(FIRST));
    let disk = it.at("disk");
    fs::rename(it.originals(), &disk).expect("a folder");
    std::os::unix::fs::symlink(&disk, it.originals()).expect("a link");
    it.refuses(&["it is a link"]);
    fs::rename(&disk, it.at("away")).expect("a folder");
    fails(&["undo", &it.model], &["it is a link"]);
    fs::remove_file(it.originals()).expect("a link");
    fs::rename(it.at("away"), it.originals()).expect("a folder");
    succeeds(&["undo", &it.model]);
}

#[test]
fn originals_survive_another_time_of_modification() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    succeeds(&it.tensors(FIRST));
    let file = File::options().write(true).open(&it.model);
    let touched = file.expect("a model").set_modified(SystemTime::UNIX_EPOCH);
    touched.expect("a time");
    succeeds(&it.tensors(SECOND));
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
}

#[test]
fn a_copy_of_model_and_originals_can_be_restored() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    succeeds(&it.tensors(FIRST));
    let copy = it.at("copy.gguf");
    fs::copy(&it.model, &copy).expect("a copy");
    fs::copy(it.originals(), it.at("copy.gguf.originals")).expect("a copy");
    succeeds(&[&copy, "--tensor", SECOND, "--from", &it.other]);
    succeeds(&["undo", &copy]);
    assert_eq!(bytes(&copy), before);
}

#[test]
fn a_tensor_that_no_swap_wrote_stops_swap_and_restore() {
    let swapped = {
        let mut file = model(Q4_0, 10, 32);
        file.tensors[1] = model(Q8_0, 20, 32).tensors[1].clone();
        file
    };
    // One that was swapped, and one that never was.
    for name in [FIRST, "token_embd.weight"] {
        let it = Fixture::new(32);
        succeeds(&it.tensors(FIRST));
        assert_eq!(bytes(&it.model), swapped.bytes());
        edit(&it.model, data_of(&swapped, name) + 3, b"edited");
        it.refuses(&[
            "model.gguf.originals does not fit",
            &format!("'{name}' is neither"),
            "nothing was changed",
            "move the originals away",
        ]);
        // What the message advises.
        let moved = it.at("moved.gguf");
        let edited = bytes(&it.model);
        fs::rename(it.originals(), &moved).expect("a rename");
        succeeds(&it.tensors(SECOND));
        succeeds(&["undo", &it.model]);
        assert_eq!(bytes(&it.model), edited);
        succeeds(&[&it.model, "--tensor", FIRST, "--from", &moved]);
        let header = model(Q4_0, 10, 32).header();
        assert_eq!(bytes(&it.model)[..header.len()], header);
    }
}

#[test]
fn originals_of_another_model_stop_swap_and_restore() {
    let others = [
        // A download of another version; the same with other metadata; with other tensors;
        // and the whole of the file that one tensor was swapped in from.
        model(Q4_0, 77, 32),
        model(Q4_0, 10, 32).kv("llama.more", Kv::U32(1)),
        model(Q4_0, 10, 32).tensor("blk.2.ffn_down.weight", &[32, 3], F32, 9),
        model(Q8_0, 20, 32),
    ];
    for other in others {
        let it = Fixture::new(32);
        succeeds(&it.tensors(FIRST));
        other.replace(it.model.as_ref()).expect("a model");
        it.refuses(&["model.gguf.originals does not fit", "nothing was changed"]);
    }
}

#[test]
fn the_original_download_in_place_of_the_swapped_file_needs_no_restore() {
    let it = Fixture::new(32);
    succeeds(&it.tensors(FIRST));
    model(Q4_0, 10, 32)
        .replace(it.model.as_ref())
        .expect("a model");
    let before = bytes(&it.model);
    succeeds(&it.tensors(SECOND));
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
}

#[test]
fn originals_that_came_from_another_file_are_dropped() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    let download = it.at("download.gguf");
    fs::copy(&it.model, &download).expect("a copy");
    succeeds(&it.tensors(".*ffn.*"));
    let back = |regex| [it.model.as_str(), "--tensor", regex, "--from", &download];
    succeeds(&back(FIRST));
    let rest = succeeds(&["undo", &it.model, "--dry-run"]);
    assert!(rest.contains("1 of 4 tensors change"), "{rest}");
    succeeds(&back(".*"));
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files(), ["download.gguf", "model.gguf", "other.gguf"]);
}

#[test]
fn damaged_originals_stop_swap_and_restore() {
    let it = Fixture::new(32);
    succeeds(&it.tensors(FIRST));
    let good = bytes(it.originals());
    let saved = &model(Q4_0, 10, 32).tensors[1].data;
    let data = (0..good.len())
        .find(|&at| good[at..].starts_with(saved))
        .expect("the saved tensor");
    let put = |content: &[u8]| fs::write(it.originals(), content).expect("a file");
    for cut in [0, 3, 24, 60, 200, data, data + 17] {
        put(&good[..cut]);
        it.refuses(&["model.gguf.originals"]);
    }
    // A flipped bit of the saved tensor.
    let mut content = good.clone();
    content[data + 40] ^= 4;
    put(&content);
    it.refuses(&["model.gguf.originals is damaged", FIRST]);
    // A flipped bit anywhere in the header: never a panic, and never a wrong model.
    let before = model(Q4_0, 10, 32).bytes();
    let swapped = bytes(&it.model);
    for at in 0..data {
        let mut content = good.clone();
        content[at] ^= 1 << (at % 8);
        put(&content);
        let output = swap(&["undo", &it.model]);
        match output.status.code() {
            Some(0) => assert_eq!(bytes(&it.model), before, "{at}: {}", said(&output)),
            Some(1) => assert_eq!(bytes(&it.model), swapped, "{at}: {}", said(&output)),
            _ => panic!("{at}: {}", said(&output)),
        }
        fs::write(&it.model, &swapped).expect("a file");
    }
    put(&good);
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), before);
}

#[test]
fn files_that_are_no_originals_stop_swap_and_restore() {
    let it = Fixture::new(32);
    // The format that told versions apart by inode, size and time.
    let identity = Kv::Text("1 2 3.000000004".into());
    let old = Gguf {
        kvs: vec![("llama-sidecar.originals-of".into(), identity)],
        ..Gguf::default()
    };
    old.tensor(FIRST, &[64, 7], Q4_0, 10)
        .write(it.originals().as_ref())
        .expect("a file");
    it.refuses(&["an earlier version of llama-sidecar", "move it away"]);
    // A model.
    fs::copy(&it.other, it.originals()).expect("a copy");
    it.refuses(&["model.gguf.originals", "move it away"]);
    // Nothing that could be read.
    fs::remove_file(it.originals()).expect("it was there");
    fs::create_dir(it.originals()).expect("a folder");
    fails(&it.tensors(FIRST), &["expected a regular file"]);
    fails(&["undo", &it.model], &["expected a regular file"]);
}

#[test]
fn an_interruption_between_renames_loses_nothing() {
    let before = model(Q4_0, 10, 32).bytes();
    // The states of a first swap, a second one, a restore of one tensor and of all: those
    // before, and those after.
    let reach = |steps: &[&[&str]]| {
        let it = Fixture::new(32);
        for step in steps {
            succeeds(&match step.strip_prefix(&["undo"]) {
                Some(rest) => [&["undo", &it.model], rest].concat(),
                None => [&[it.model.as_str()], *step, &["--from", &it.other]].concat(),
            });
        }
        it
    };
    let (a, b): (&[&str], &[&str]) = (&["--tensor", FIRST], &["--tensor", SECOND]);
    let back: &[&str] = &["undo", "--tensor", FIRST];
    let all: &[&str] = &["undo"];
    for (first, last) in [
        (vec![], a),
        (vec![a], b),
        (vec![a, b], back),
        (vec![a, b], all),
        (vec![a], a),
    ] {
        for renamed in [false, true] {
            let from = reach(&first);
            let to = reach(&[first.as_slice(), &[last]].concat());
            if let Ok(originals) = fs::read(to.originals()) {
                fs::write(from.beside(), originals).expect("a file");
            }
            if renamed {
                fs::copy(&to.model, &from.model).expect("a copy");
            }
            // Whatever comes next, all can go back.
            succeeds(&from.tensors(SECOND));
            succeeds(&["undo", &from.model]);
            assert_eq!(bytes(&from.model), before, "{first:?} {last:?} {renamed}");
            assert_eq!(from.files(), ["model.gguf", "other.gguf"]);
        }
    }
}

#[test]
fn an_interrupted_restore_is_finished() {
    let it = Fixture::new(32);
    let before = bytes(&it.model);
    succeeds(&it.tensors(".*ffn.*"));
    fs::write(&it.model, &before).expect("a file");
    let dry = succeeds(&["undo", &it.model, "--dry-run"]);
    assert!(dry.contains("nothing to do"), "{dry}");
    assert!(Path::new(&it.originals()).exists());
    succeeds(&["undo", &it.model]);
    assert_eq!(bytes(&it.model), before);
    assert_eq!(it.files(), ["model.gguf", "other.gguf"]);
}

#[test]
fn padding_and_what_follows_the_data_come_back_too() {
    let file = model(Q4_0, 10, 64);
    let whole = file.bytes();
    let last = data_of(&file, SECOND) + file.tensors[3].data.len();
    let gap = data_of(&file, FIRST) + file.tensors[1].data.len();
    let mut marked = whole.clone();
    marked[gap] = 0xaa;
    assert!(whole.len() > last + 1 && data_of(&file, "blk.0.attn_norm.weight") > gap);
    for before in [
        whole[..last].to_vec(),
        whole[..last + 1].to_vec(),
        [whole.as_slice(), b"a signature"].concat(),
        marked,
    ] {
        let it = Fixture::new(64);
        fs::write(&it.model, &before).expect("a file");
        succeeds(&it.tensors(FIRST));
        succeeds(&it.tensors(SECOND));
        succeeds(&["undo", &it.model, "--tensor", FIRST]);
        succeeds(&["undo", &it.model]);
        assert_eq!(bytes(&it.model), before);
    }
}

#[test]
fn a_shard_whose_originals_do_not_fit_stops_them_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let others = folder.path().join("others");
    fs::create_dir(&others).expect("a folder");
    let model: Vec<_> = (1..3).map(|n| shard(folder.path(), n, 2, Q4_0)).collect();
    let from: Vec<_> = (1..3).map(|n| shard(&others, n, 2, Q8_0)).collect();
    let (first, from) = (path(&model[0]), path(&from[1]));
    succeeds(&[&first, "--tensor", ".*", "--from", &from]);
    let before = bytes(&model[0]);
    let len = bytes(&model[1]).len();
    edit(&path(&model[1]), len - 40, b"edited");
    fails(
        &["undo", &first],
        &["00002-of-00002.gguf.originals does not fit"],
    );
    assert_eq!(bytes(&model[0]), before);
    // The other one can go back alone.
    succeeds(&["undo", &first, "--tensor", "blk.1.*"]);
    let again = tempfile::tempdir().expect("a folder");
    assert_eq!(bytes(&model[0]), bytes(shard(again.path(), 1, 2, Q4_0)));
}
