//! The comparison of two models: metadata, tensors and shapes. It reads headers only.
//!
//! A new version of a file is taken if a process that starts with it would compute with the same
//! hyperparameters and list of tensors. A source of single tensors needs less: its elements must stand
//! where the model has them, and a weight needs the same companions.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;

use crate::gguf::{
    GgufFile, Header, KeyValue, Purpose, companions, has_one_type, has_tensor, places_elements,
};
use crate::text;

/// How many names a message has.
const NAMED: usize = 3;

/// The files of a model, as they were when it was loaded.
#[derive(Debug)]
pub struct LoadedModel(Vec<Loaded>);

#[derive(Debug)]
struct Loaded {
    header: Arc<Header>,
    /// Values for messages, by the position of the key: the file may be written later.
    shown: HashMap<usize, String>,
    is_further_shard: bool,
}

impl LoadedModel {
    /// Keeps what describes a model.
    pub fn of<'a>(files: impl Iterator<Item = &'a GgufFile>) -> LoadedModel {
        LoadedModel(files.map(Loaded::of).collect())
    }

    /// Compares a new version of a file with the loaded one. Returns the keys that are used only when
    /// the program starts, in words; or why the file holds another model.
    pub(super) fn compare(&self, file: usize, new: &GgufFile) -> Result<Option<String>, String> {
        let loaded = &self.0[file];
        let mut start = Vec::new();
        let mut differences = loaded.metadata(new, &mut start);
        differences.extend(tensors(&loaded.header, &new.header));
        match differences.is_empty() {
            true => Ok((!start.is_empty())
                .then(|| format!("needs a new start to be used: {}", start.join(", ")))),
            false => Err(differences.join("; ")),
        }
    }

    /// Returns why the files of a source have no bytes for a tensor with this name and shape, or not the
    /// same companions; `None` when they have. `path` is the path of the source for messages.
    pub fn misfit(
        &self,
        source: &[GgufFile],
        path: &Path,
        name: &CStr,
        ne: &[u64; 4],
    ) -> Option<String> {
        let alone = self.misfit_alone(source, path, name, ne);
        alone.or_else(|| self.other_companions(source, path, name))
    }

    /// Returns the same of a tensor without its companions.
    pub fn misfit_alone(
        &self,
        source: &[GgufFile],
        path: &Path,
        name: &CStr,
        ne: &[u64; 4],
    ) -> Option<String> {
        const NEXT: &str = "name another version of the same model";
        let first = source.first()?;
        let (text, path) = (name.to_string_lossy(), text::path(path));
        let find = |name: &CStr| find(source.iter().map(|file| &*file.header), name);
        let Some((header, at)) = find(name) else {
            return Some(format!("{path} has no tensor '{text}': {NEXT}"));
        };
        let found = &header.tensors[at].ne;
        if found != ne {
            return Some(format!(
                "tensor '{text}' has shape {found:?} in {path}, the model needs {ne:?}: {NEXT}"
            ));
        }
        if let Some(loaded) = self.0.first()
            && let Some(difference) = loaded.other_places(first)
        {
            return Some(format!("{path}: {difference}: {NEXT}"));
        }
        None
    }

    /// Returns which companion only one of the model and a source has, in words.
    fn other_companions(&self, source: &[GgufFile], path: &Path, name: &CStr) -> Option<String> {
        let (text, path) = (name.to_string_lossy(), text::path(path));
        let own = |name: &CStr| find(self.0.iter().map(|of| &*of.header), name).is_some();
        let theirs = |name: &CStr| has_tensor(source, name);
        let all = companions(name, |name| own(name) || theirs(name));
        all.into_iter().find_map(|companion| {
            let with = companion.to_string_lossy();
            match (own(&companion), theirs(&companion)) {
                (true, false) => Some(format!(
                    "tensor '{text}' is used with '{with}' in the model, and {path} has no such tensor: name a version of the model that has it"
                )),
                (false, true) => Some(format!(
                    "tensor '{text}' is used with '{with}' in {path}, and the model has no such tensor: name a version of the model without it"
                )),
                _ => None,
            }
        })
    }
}

impl Loaded {
    fn of(file: &GgufFile) -> Loaded {
        let keys = file.header.keys.iter().enumerate();
        let named = keys.filter(|(_, key)| has_one_type(&key.name));
        Loaded {
            shown: named.map(|(at, key)| (at, file.shown(key))).collect(),
            header: file.header.clone(),
            is_further_shard: file.is_further_shard(),
        }
    }

    /// Returns the value of a key in words.
    fn shown(&self, name: &[u8]) -> String {
        let at = self.header.keys.iter().position(|key| &*key.name == name);
        let shown = at.and_then(|at| self.shown.get(&at).cloned());
        shown.unwrap_or_else(|| "none".into())
    }

    /// Returns which hyperparameters differ, in words. Adds the keys that are used when a program
    /// starts. llama.cpp reads the metadata of the first file alone.
    fn metadata(&self, new: &GgufFile, start: &mut Vec<String>) -> Vec<String> {
        let is_whole = |header: &Header| {
            let count = header.key(b"split.count").and_then(KeyValue::as_u64);
            count.unwrap_or(0) <= 1
        };
        let whole = is_whole(&self.header) && is_whole(&new.header);
        let mut differ = Vec::new();
        for (name, old, new_key) in differing(&self.header, &new.header) {
            let is_split = name.starts_with(b"split.");
            if is_split && whole || self.is_further_shard && name != b"split.no" {
                continue;
            }
            // The number of tokens is a shape.
            let same_count = old.map(|key| key.count) == new_key.map(|key| key.count);
            let same_type = match (old, new_key) {
                (Some(old), Some(new)) => (old.ty, old.array) == (new.ty, new.array),
                _ => true,
            };
            match Purpose::of(name) {
                _ if !same_type && has_one_type(name) => differ.push((name, new_key)),
                Purpose::Start if name != b"tokenizer.ggml.tokens" || same_count => {
                    start.push(printable(name));
                }
                Purpose::Description => {}
                _ => differ.push((name, new_key)),
            }
        }
        let shown = differ.iter().take(NAMED).map(|(name, key)| {
            let (old, ty) = (self.header.key(name), |key: &KeyValue| (key.ty, key.array));
            let other_type = match (old, key) {
                (Some(old), Some(key)) if ty(old) != ty(key) => ", which has another type",
                _ => "",
            };
            format!(
                "{} is {} in the file, and {} in the model{other_type}",
                printable(name),
                key.map_or_else(|| "none".into(), |key| new.shown(key)),
                self.shown(name)
            )
        });
        let mut shown: Vec<String> = shown.collect();
        if let Some(more) = differ.len().checked_sub(NAMED + 1) {
            shown.push(format!("{} more keys differ", more + 1));
        }
        shown
    }

    /// Returns which key that decides where elements stand has another value in a source, in words. A
    /// key that one of them lacks counts as equal: older converters leave out defaults.
    fn other_places(&self, source: &GgufFile) -> Option<String> {
        let keys = self.header.keys.iter();
        let mut keys = keys.filter(|key| places_elements(&key.name));
        keys.find_map(|key| {
            let other = source.header.key(&key.name)?;
            (!key.same_value(other)).then(|| {
                format!(
                    "{} is {} there, and {} in the model",
                    printable(&key.name),
                    source.shown(other),
                    self.shown(&key.name)
                )
            })
        })
    }
}

/// A key, and its values in two headers.
type Differing<'a> = (&'a [u8], Option<&'a KeyValue>, Option<&'a KeyValue>);

/// Returns the keys that differ, in the order of their names.
fn differing<'a>(loaded: &'a Header, new: &'a Header) -> impl Iterator<Item = Differing<'a>> {
    let mut keys: BTreeMap<&[u8], (Option<&KeyValue>, Option<&KeyValue>)> = BTreeMap::new();
    for key in &loaded.keys {
        keys.entry(&key.name).or_default().0 = Some(key);
    }
    for key in &new.keys {
        keys.entry(&key.name).or_default().1 = Some(key);
    }
    let differ = |(_, values): &(_, (Option<&KeyValue>, Option<&KeyValue>))| match values {
        (Some(old), Some(new)) => !old.same_value(new),
        _ => true,
    };
    let keys = keys.into_iter().filter(differ);
    keys.map(|(name, (old, new))| (name, old, new))
}

/// Returns which tensors are missing, have another shape, or are new, each in a sentence.
fn tensors(loaded: &Header, new: &Header) -> Vec<String> {
    let missing = loaded.tensors.iter().map(|info| loaded.name(info));
    let missing: Vec<&CStr> = missing.filter(|name| new.find(name).is_none()).collect();
    let added = new.tensors.iter().map(|info| new.name(info));
    let added: Vec<&CStr> = added.filter(|name| loaded.find(name).is_none()).collect();
    let shapes = loaded.tensors.iter().filter_map(|info| {
        let other = &new.tensors[new.find(loaded.name(info))?];
        (other.ne != info.ne).then_some((loaded.name(info), other.ne, info.ne))
    });
    let shapes: Vec<_> = shapes.collect();
    let mut sentences = Vec::new();
    if !missing.is_empty() {
        sentences.push(format!("it has no tensor {}", list(&missing)));
    }
    if let Some((name, found, needed)) = shapes.first() {
        let more = match shapes.len() - 1 {
            0 => String::new(),
            more => format!("; {more} more tensors have another shape"),
        };
        sentences.push(format!(
            "tensor '{}' has shape {found:?} in the file, the model needs {needed:?}{more}",
            name.to_string_lossy()
        ));
    }
    if !added.is_empty() {
        sentences.push(format!("the model has no tensor {}", list(&added)));
    }
    sentences
}

/// Returns the first of these names, and how many more there are.
fn list(names: &[&CStr]) -> String {
    let first = names.iter().take(NAMED);
    let first: Vec<String> = first
        .map(|name| format!("'{}'", name.to_string_lossy()))
        .collect();
    match names.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Returns the name of a key for a message.
fn printable(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    name.escape_debug().take(80).collect()
}

/// Finds a tensor in the files of a model.
fn find<'a>(
    mut headers: impl Iterator<Item = &'a Header>,
    name: &CStr,
) -> Option<(&'a Header, usize)> {
    headers.find_map(|header| Some((header, header.find(name)?)))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::gguf::{Access, HeaderWriter};

    /// Opens a file with these tensors of 32 numbers, and what `set` adds.
    fn model<'a>(
        tensors: impl IntoIterator<Item = &'a str>,
        set: impl FnOnce(&mut HeaderWriter),
    ) -> GgufFile {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        let mut header = HeaderWriter::new(32);
        header.value("general.architecture", "llama");
        set(&mut header);
        let mut data = 0;
        for name in tensors {
            header
                .tensor(name.as_bytes(), &[32], 0, 128)
                .expect("it fits");
            data += 128;
        }
        std::fs::write(&path, [header.finish(), vec![0; data]].concat()).expect("free space");
        GgufFile::open(&path, Access::Read).expect("a model")
    }

    fn epsilon(value: f32) -> impl FnOnce(&mut HeaderWriter) {
        move |header| header.value("llama.attention.layer_norm_rms_epsilon", &value)
    }

    fn compare(old: &GgufFile, new: &GgufFile) -> Result<Option<String>, String> {
        LoadedModel::of(std::iter::once(old)).compare(0, new)
    }

    #[test]
    fn a_file_that_is_computed_with_otherwise_is_another_model() {
        let old = model(["a.weight"], epsilon(1e-5));
        let refused = |new: GgufFile| compare(&old, &new).expect_err("another model");
        assert_eq!(compare(&old, &model(["a.weight"], epsilon(1e-5))), Ok(None));
        assert_eq!(
            refused(model(["a.weight"], epsilon(1e-2))),
            "llama.attention.layer_norm_rms_epsilon is 0.01 in the file, and 0.00001 in the model"
        );
        assert_eq!(
            refused(model(["a.weight"], |header| {
                epsilon(1e-5)(header);
                header.value("unknown", "\u{1b}[1m");
            })),
            "unknown is \\u{1b}[1m in the file, and none in the model"
        );
        assert_eq!(
            refused(model(["a.weight", "a.scale"], epsilon(1e-5))),
            "the model has no tensor 'a.scale'"
        );
    }

    #[test]
    fn what_is_read_at_the_start_is_named_and_what_describes_a_file_is_not() {
        let with = |template: &'static str, author: &'static str, tokens: &'static [&str]| {
            model(["a.weight"], move |header| {
                header.value("tokenizer.chat_template", template);
                header.array("tokenizer.ggml.tokens", tokens);
                header.value("general.author", author);
            })
        };
        let old = with("{{ a }}", "a", &["a", "b"]);
        assert_eq!(compare(&old, &with("{{ a }}", "b", &["a", "b"])), Ok(None));
        let taken = compare(&old, &with("{{ b }}", "a", &["a", "c"]));
        let keys = "tokenizer.chat_template, tokenizer.ggml.tokens";
        assert_eq!(
            taken,
            Ok(Some(format!("needs a new start to be used: {keys}")))
        );
        let refused = compare(&old, &with("{{ a }}", "a", &["a"])).expect_err("fewer tokens");
        assert_eq!(
            refused,
            "tokenizer.ggml.tokens is 1 texts in the file, and 2 texts in the model"
        );
    }

    #[test]
    fn a_value_of_another_type_refuses_a_file() {
        let first = |set: &dyn Fn(&mut HeaderWriter)| model(["a.weight"], set);
        let old = first(&|header| header.value("tokenizer.ggml.bos_token_id", &1u32));
        let new = first(&|header| header.value("tokenizer.ggml.bos_token_id", &1i32));
        let sentence = "tokenizer.ggml.bos_token_id is 1 in the file, and 1 in the model, which has another type";
        assert_eq!(compare(&old, &new), Err(sentence.into()));
        // Nothing reads the author.
        let old = first(&|header| header.value("general.author", "a"));
        let new = first(&|header| header.array("general.author", &["a"]));
        assert_eq!(compare(&old, &new), Ok(None));
    }

    #[test]
    fn a_thousand_missing_tensors_are_one_sentence() {
        let names: Vec<String> = (0..1000).map(|at| format!("blk.{at}.w")).collect();
        let whole = model(names.iter().map(String::as_str), |_| ());
        let loaded = LoadedModel::of(std::iter::once(&whole));
        let began = Instant::now();
        assert_eq!(loaded.compare(0, &whole), Ok(None));
        println!("1000 tensors: {:?}", began.elapsed());
        let refused = loaded
            .compare(0, &model([], |_| ()))
            .expect_err("no tensor");
        let list = "'blk.0.w', 'blk.1.w', 'blk.2.w' and 997 more";
        assert_eq!(refused, format!("it has no tensor {list}"));
    }

    #[test]
    fn a_source_has_its_elements_where_the_model_has_them_and_the_same_companions() {
        let heads = |heads: u32, name: &'static str| {
            move |header: &mut HeaderWriter| header.value(name, &heads)
        };
        let count = "llama.attention.head_count";
        let plain = model(["a.weight"], heads(4, count));
        let scaled = model(["a.weight", "a.scale"], heads(4, count));
        let misfit = |model: &GgufFile, source: GgufFile| {
            let ne = [32, 1, 1, 1];
            let loaded = LoadedModel::of(std::iter::once(model));
            loaded.misfit(&[source], Path::new("f.gguf"), c"a.weight", &ne)
        };
        let other_base = heads(2, "llama.rope.freq_base");
        assert_eq!(misfit(&plain, model(["a.weight"], other_base)), None);
        let why = misfit(&plain, model(["a.weight"], heads(2, count))).expect("a misfit");
        assert!(
            why.contains("head_count is 2 there, and 4 in the model"),
            "{why}"
        );
        let why = misfit(&scaled, model(["a.weight"], heads(4, count))).expect("a misfit");
        assert!(why.contains("with 'a.scale' in the model"), "{why}");
        let why = misfit(&plain, scaled).expect("a misfit");
        assert!(why.contains("with 'a.scale' in f.gguf"), "{why}");
    }
}
