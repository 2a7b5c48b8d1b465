//! The routed experts of a model: tensors by name, and the bytes of each expert.
//!
//! A mixture-of-experts layer sends each token to a few of its experts. GGUF files store an
//! expert's matrices in these forms, with the shape (`ne`) innermost first:
//!
//! | tensor | shape | contents |
//! |---|---|---|
//! | `blk.5.ffn_gate_exps.weight` | `[n_embd, n_ff, n_expert]` | gate of all experts |
//! | `blk.5.ffn_up_exps.weight` | `[n_embd, n_ff, n_expert]` | up of all experts |
//! | `blk.5.ffn_gate_up_exps.weight` | `[n_embd, 2 * n_ff, n_expert]` | gate and up of all experts |
//! | `blk.5.ffn_down_exps.weight` | `[n_ff, n_embd, n_expert]` | down of all experts |
//! | `blk.5.ffn_down.3.weight` | `[n_ff, n_embd]` | down of expert 3, in older files |
//! | `blk.5.ffn_down_exps.3.weight` | `[n_ff, n_embd]` | down of expert 3, a rare spelling |
//!
//! In a merged tensor, expert *e* begins at byte `e * nb[2]`. These tensors are left out:
//! biases (`blk.5.ffn_down_exps.bias`), shared experts (`blk.5.ffn_down_shexp.weight`), which
//! every token uses, the router (`blk.5.ffn_gate_inp.weight`) and dense layers
//! (`blk.5.ffn_down.weight`).
//!
//! [`ExpertIndex`] reads the names of a model's tensors once; [`ExpertIndex::slice`] then
//! answers where a matrix of an expert is.

use std::fmt;
use std::ops::Range;

use crate::gguf::{GgufFile, KeyValue, Value};

/// Layers that are indexed: llama.cpp loads 512 at most. The limit bounds the memory that
/// a malformed file can make callers reserve.
pub const MAX_LAYERS: u32 = 1 << 12;
/// Experts per layer that are indexed: llama.cpp loads 512 at most.
pub const MAX_EXPERTS: u32 = 1 << 12;

/// How a model chooses experts, as its files state it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// `general.architecture`; empty if there is none.
    pub architecture: String,
    /// Experts of a layer (`expert_count`); 0 when not stated.
    pub experts: u64,
    /// Experts that a token uses (`expert_used_count`): one number for all layers, or one for each; empty when not stated.
    pub used: Vec<u64>,
    /// Groups of experts (`expert_group_count`); one where there are none.
    pub groups: u64,
    /// Groups that a token uses (`expert_group_used_count`); all where that is not stated.
    pub groups_used: u64,
    /// Layers that predict further tokens (MTP, `nextn_predict_layers`): the last ones, which are computed with options alone.
    pub predicting: Range<u32>,
    /// Layers in which a table has the experts of each token of the vocabulary, as in DeepSeek-V4.
    pub by_token: Vec<u32>,
}

/// What the name of a table with the experts of each token ends with.
const TABLE: &str = ".ffn_gate_tid2eid.weight";

impl Routing {
    /// Reads the headers of a model's files.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> Routing {
        let files: Vec<&GgufFile> = files.into_iter().collect();
        let find = |name: &str| {
            let mut files = files.iter();
            files.find_map(|file| Some((*file, file.header.key(name.as_bytes())?)))
        };
        let architecture = find("general.architecture").map(|(file, key)| file.value(key));
        let architecture = match architecture {
            Some(Ok(Value::Text(text))) => String::from_utf8_lossy(&text).into_owned(),
            _ => String::new(),
        };
        let of_model = |name: &str| find(&format!("{architecture}.{name}"));
        let number = |name: &str| of_model(name)?.1.as_u64().filter(|number| *number > 0);
        let numbers = |(file, key): (&GgufFile, &KeyValue)| match key.array {
            false => Some(vec![key.as_u64()?]),
            true => {
                let values = file.elements(key, 0, MAX_LAYERS.into()).ok()?;
                values.iter().map(Value::as_u64).collect()
            }
        };
        let tensors = files.iter().flat_map(|file| {
            let infos = file.header.tensors.iter();
            infos.map(|info| file.header.name(info).to_string_lossy())
        });
        let by_table = |name: &str| self::number(name.strip_prefix("blk.")?.strip_suffix(TABLE)?);
        let groups = number("expert_group_count").unwrap_or(1);
        let layers = number("block_count").unwrap_or(0);
        let predicting = number("nextn_predict_layers").filter(|number| *number < layers);
        let predicting = predicting.unwrap_or(0);
        let layer = |number: u64| number.min(MAX_LAYERS.into()) as u32;
        Routing {
            predicting: layer(layers.saturating_sub(predicting))..layer(layers),
            experts: number("expert_count").unwrap_or(0),
            used: of_model("expert_used_count")
                .and_then(numbers)
                .unwrap_or_default(),
            groups,
            groups_used: number("expert_group_used_count").unwrap_or(groups),
            by_token: tensors.filter_map(|name| by_table(&name)).collect(),
            architecture,
        }
    }

    /// Returns how many experts a token uses in a layer; 0 when not stated.
    pub fn used_in(&self, layer: u32) -> u64 {
        let of_layer = match self.used.as_slice() {
            [all] => Some(all),
            each => each.get(layer as usize),
        };
        of_layer.copied().unwrap_or(0)
    }

    /// Returns the most experts that a token uses in a layer; 0 when not stated.
    pub fn most_used(&self) -> u64 {
        self.used.iter().copied().max().unwrap_or(0)
    }

    /// Fails for a layer whose experts are not chosen by their scores: none can be left out.
    pub fn check_layer(&self, layer: u32) -> Result<(), String> {
        match self.by_token.contains(&layer) {
            true => Err(format!(
                "layer {layer} takes the experts of each token from a table (blk.{layer}{TABLE}), not by their scores: leave its experts as they are"
            )),
            false => Ok(()),
        }
    }

    /// Fails unless a token can choose from as many experts as it `used` without these, if it uses the groups with the fewest.
    ///
    /// llama.cpp chooses groups by the scores of their two best experts: of a group with one, it chooses none.
    pub fn check_without(
        &self,
        layer: u32,
        used: u64,
        experts: u64,
        masked: impl IntoIterator<Item = u32>,
    ) -> Result<(), String> {
        let each = (experts / self.groups).max(1);
        // More groups than experts are no groups.
        let mut left = vec![each; self.groups.min(experts) as usize];
        for expert in masked {
            if let Some(left) = left.get_mut((u64::from(expert) / each) as usize) {
                *left = left.saturating_sub(1);
            }
        }
        if self.groups > 1
            && let Some(group) = left.iter().position(|left| *left == 1)
        {
            let first = group as u64 * each;
            return Err(format!(
                "layer {layer} would have one expert in the group of experts {first} to {}, and llama.cpp chooses none from such a group: leave two of them, or none",
                first + each - 1
            ));
        }
        left.sort_unstable();
        let fewest: u64 = left.iter().take(self.groups_used as usize).sum();
        match fewest >= used {
            true => Ok(()),
            false => Err(format!(
                "layer {layer} would have {fewest} experts to choose from, and a token uses {used}: leave more"
            )),
        }
    }
}

/// A weight matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// Gate.
    Gate,
    /// Up.
    Up,
    /// Gate and up in one matrix.
    GateUp,
    /// Down.
    Down,
}

impl Projection {
    /// All of them.
    pub const ALL: [Projection; 4] = [
        Projection::Gate,
        Projection::Up,
        Projection::GateUp,
        Projection::Down,
    ];

    fn name(self) -> &'static str {
        match self {
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::GateUp => "gate_up",
            Projection::Down => "down",
        }
    }
}

impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The parsed name of an expert tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertName {
    /// Layer, from 0.
    pub layer: u32,
    /// Which matrix.
    pub projection: Projection,
    /// Which expert; `None` when the tensor holds all experts of the layer.
    pub expert: Option<u32>,
}

impl ExpertName {
    /// Parses a tensor name; `None` when the tensor is no expert tensor.
    pub fn parse(name: &str) -> Option<ExpertName> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (kind, expert) = rest
            .strip_prefix("ffn_")?
            .strip_suffix(".weight")
            .map(|kind| match kind.split_once('.') {
                Some((kind, expert)) => (kind, Some(expert)),
                None => (kind, None),
            })?;
        let (kind, merged_spelling) = match kind.strip_suffix("_exps") {
            Some(kind) => (kind, true),
            None => (kind, false),
        };
        // `blk.5.ffn_down.weight` belongs to a dense layer.
        if !merged_spelling && expert.is_none() {
            return None;
        }
        let expert = match expert {
            Some(expert) => Some(number(expert)?),
            None => None,
        };
        Some(ExpertName {
            layer: number(layer)?,
            projection: Projection::ALL.into_iter().find(|p| p.name() == kind)?,
            expert,
        })
    }
}

impl fmt::Display for ExpertName {
    /// Writes the tensor's name, in the spelling of current files where there is a choice.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, kind) = (self.layer, self.projection);
        match self.expert {
            None => write!(f, "blk.{layer}.ffn_{kind}_exps.weight"),
            Some(expert) => write!(f, "blk.{layer}.ffn_{kind}.{expert}.weight"),
        }
    }
}

/// A tensor that holds a matrix of one expert or of all experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTensor {
    /// Layer, matrix and expert.
    pub name: ExpertName,
    /// Index of the tensor, counted through all files of the model.
    pub tensor: usize,
    /// Index of the file.
    pub file: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of the whole tensor.
    pub nbytes: u64,
    /// Number of experts in the tensor; 0 when the shape is not that of experts, or beyond
    /// [`MAX_LAYERS`] or [`MAX_EXPERTS`]. Such a tensor has no slices.
    pub experts: u32,
}

impl ExpertTensor {
    /// Returns the numbers of the experts in the tensor.
    pub fn range(&self) -> Range<u32> {
        let first = self.name.expert.unwrap_or(0);
        first..first + self.experts
    }

    /// Returns the bytes of one expert; `None` when the tensor does not hold the expert.
    pub fn slice(&self, expert: u32) -> Option<ExpertSlice> {
        let range = self.range();
        let mut slice = ExpertSlice {
            tensor: self.tensor,
            file: self.file,
            offset: self.offset,
            nbytes: self.nbytes,
            part: range.contains(&expert).then(|| expert - range.start)?,
            parts: self.experts,
        };
        let bytes = slice.within(self.nbytes);
        slice.offset += bytes.start;
        slice.nbytes = bytes.end - bytes.start;
        Some(slice)
    }
}

/// Returns the number of experts in a tensor of this name and shape; 0 when it is out of bounds.
fn experts_in(name: ExpertName, ne: &[u64; 4]) -> u32 {
    let (experts, end) = match name.expert {
        Some(expert) => (1, u64::from(expert) + 1),
        None if ne[3] == 1 => (ne[2], ne[2]),
        None => return 0,
    };
    match name.layer < MAX_LAYERS && end <= u64::from(MAX_EXPERTS) {
        true => experts as u32,
        false => 0,
    }
}

/// The bytes of one matrix of one expert, as they are in the model's files.
///
/// A reload can change the type of a tensor and with it all sizes. [`ExpertSlice::within`]
/// gives the range inside the tensor's current data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertSlice {
    /// Index of the tensor, counted through all files of the model.
    pub tensor: usize,
    /// Index of the file.
    pub file: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes of the matrix.
    pub nbytes: u64,
    /// Which of the tensor's equal parts, from 0.
    pub part: u32,
    /// Number of equal parts of the tensor: its experts.
    pub parts: u32,
}

impl ExpertSlice {
    /// Returns the range of the matrix inside a tensor of `tensor_bytes` bytes.
    pub fn within(&self, tensor_bytes: u64) -> Range<u64> {
        let nbytes = tensor_bytes / u64::from(self.parts);
        let start = u64::from(self.part) * nbytes;
        start..start + nbytes
    }
}

/// All expert tensors of a model.
///
/// The index takes memory for each tensor, not for each expert. Queries are binary searches
/// and allocate nothing.
///
/// Where a layer has a merged tensor and tensors of single experts for the same matrix, the
/// merged one counts. Of tensors with the same meaning, the first in the files counts.
///
/// ```
/// use sidecar_core::experts::{ExpertIndex, Projection};
/// use sidecar_core::gguf::{Access, GgufFile};
/// # use testkit::writer::{Gguf, Q4_0};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.gguf");
/// # Gguf::default().tensor("blk.0.ffn_down_exps.weight", &[64, 32, 8], Q4_0, 1).write(&path)?;
///
/// let file = GgufFile::open(&path, Access::Read)?;
/// let index = ExpertIndex::of([&file]);
/// assert_eq!(index.layers().collect::<Vec<_>>(), [(0, 8)]);
///
/// let slice = index.slice(0, Projection::Down, 3).expect("expert 3 of layer 0");
/// assert_eq!(slice.nbytes, 32 * 64 / 32 * 18);
/// assert_eq!(slice.offset, file.header.tensors[0].offset + 3 * slice.nbytes);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ExpertIndex {
    /// Ascending by name; of equal names, the first in the files is the last here, where
    /// [`ExpertIndex::find`] ends its search.
    tensors: Vec<ExpertTensor>,
}

impl ExpertIndex {
    /// Reads the names of all tensors of a model's files.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a GgufFile>) -> ExpertIndex {
        let mut tensors = Vec::new();
        let mut first_of_file = 0;
        for (file, gguf) in files.into_iter().enumerate() {
            for (at, info) in gguf.header.tensors.iter().enumerate() {
                let text = gguf.header.name(info).to_str();
                let Some(name) = text.ok().and_then(ExpertName::parse) else {
                    continue;
                };
                tensors.push(ExpertTensor {
                    name,
                    tensor: first_of_file + at,
                    file,
                    offset: info.offset,
                    nbytes: info.nbytes,
                    experts: experts_in(name, &info.ne),
                });
            }
            first_of_file += gguf.header.tensors.len();
        }
        ExpertIndex::sorted(tensors)
    }

    fn sorted(mut tensors: Vec<ExpertTensor>) -> ExpertIndex {
        tensors.sort_unstable_by_key(|t| (t.name, std::cmp::Reverse(t.tensor)));
        ExpertIndex { tensors }
    }

    /// Returns all expert tensors, ascending by layer, matrix and expert.
    pub fn tensors(&self) -> &[ExpertTensor] {
        &self.tensors
    }

    /// Returns the expert tensors of a layer, ascending by matrix and expert.
    pub fn of_layer(&self, layer: u32) -> &[ExpertTensor] {
        let start = self.tensors.partition_point(|t| t.name.layer < layer);
        let end = self.tensors.partition_point(|t| t.name.layer <= layer);
        &self.tensors[start..end]
    }

    /// Returns the tensor of this meaning.
    pub fn find(&self, name: ExpertName) -> Option<&ExpertTensor> {
        let after = self.tensors.partition_point(|t| t.name <= name);
        self.tensors[..after].last().filter(|t| t.name == name)
    }

    /// Returns where a matrix of an expert is.
    pub fn slice(&self, layer: u32, projection: Projection, expert: u32) -> Option<ExpertSlice> {
        let name = |expert| ExpertName {
            layer,
            projection,
            expert,
        };
        let usable = |name| self.find(name).filter(|t| t.experts > 0);
        let tensor = usable(name(None)).or_else(|| usable(name(Some(expert))));
        tensor?.slice(expert)
    }

    /// Returns the layers that have experts, ascending, each with its number of experts: the
    /// largest of its matrices.
    pub fn layers(&self) -> impl Iterator<Item = (u32, u32)> {
        let layers = self.tensors.chunk_by(|a, b| a.name.layer == b.name.layer);
        let experts = layers.map(|all| (all[0].name.layer, highest(all.iter())));
        experts.filter(|&(_, experts)| experts > 0)
    }

    /// Returns the layers that have a matrix, ascending, each with its number of experts.
    pub fn layers_with(&self, projection: Projection) -> impl Iterator<Item = (u32, u32)> {
        let of_projection = move |t: &&ExpertTensor| t.name.projection == projection;
        let layers = self.tensors.chunk_by(|a, b| a.name.layer == b.name.layer);
        let experts = layers.map(move |all| {
            let mut of_layer = all.iter().filter(of_projection);
            let merged = of_layer.rfind(|t| t.name.expert.is_none() && t.experts > 0);
            let experts = merged.map(|t| t.experts);
            let layer = all[0].name.layer;
            (
                layer,
                experts.unwrap_or_else(|| highest(all.iter().filter(of_projection))),
            )
        });
        experts.filter(|&(_, experts)| experts > 0)
    }
}

/// Returns the end of the experts' numbers in some tensors.
fn highest<'a>(tensors: impl Iterator<Item = &'a ExpertTensor>) -> u32 {
    let usable = tensors.filter(|t| t.experts > 0);
    usable.map(|t| t.range().end).max().unwrap_or(0)
}

/// Parses a decimal number as names spell it: no sign, no leading zero.
fn number(text: &str) -> Option<u32> {
    let canonical = text == "0" || !text.starts_with(['0', '+']);
    text.parse().ok().filter(|_| canonical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "miri has no O_NONBLOCK for files")]
    fn a_file_has_one_number_of_used_experts_or_one_for_each_layer() {
        use testkit::writer::{Gguf, Kv};
        let routing = |used| {
            let file = tempfile::NamedTempFile::new().expect("a file");
            let keys = [
                ("block_count", Kv::U32(4)),
                ("nextn_predict_layers", Kv::U32(1)),
                ("expert_used_count", used),
            ];
            let model = keys
                .into_iter()
                .fold(Gguf::default(), |model, (key, value)| {
                    model.kv(&format!("llama.{key}"), value)
                });
            model.write(file.path()).expect("free space");
            let file = GgufFile::open(file.path(), crate::gguf::Access::Read);
            Routing::of([&file.expect("a model")])
        };
        let one = routing(Kv::U32(2));
        assert_eq!((one.used_in(0), one.used_in(9), one.most_used()), (2, 2, 2));
        assert_eq!(one.predicting, 3..4);
        let each = routing(Kv::I32s(vec![0, 4, 2]));
        assert_eq!([0, 1, 2, 3].map(|layer| each.used_in(layer)), [0, 4, 2, 0]);
        assert_eq!(each.most_used(), 4);
        for unknown in [Kv::I32s(vec![1, -1]), Kv::Text("2".into())] {
            assert_eq!(routing(unknown).most_used(), 0);
        }
    }

    #[test]
    fn a_token_can_use_the_groups_with_the_fewest_experts() {
        let refused = |groups, groups_used, used, experts, masked: &[u32]| {
            let routing = Routing {
                groups,
                groups_used,
                ..Routing::default()
            };
            routing
                .check_without(3, used, experts, masked.iter().copied())
                .err()
        };
        assert_eq!(refused(1, 1, 6, 8, &[0, 7]), None);
        let few = refused(1, 1, 7, 8, &[0, 7]).expect("too few");
        assert!(few.contains("layer 3 would have 6 experts"), "{few}");
        assert_eq!(refused(4, 2, 6, 12, &[]), None);
        assert_eq!(refused(4, 2, 4, 12, &[0, 5]), None);
        assert!(refused(4, 2, 5, 12, &[0, 5]).is_some());
        // A group without experts is not chosen, and one with a single expert neither.
        assert_eq!(refused(4, 3, 6, 12, &[0, 1, 2]), None);
        let single = refused(4, 3, 1, 12, &[3, 5]).expect("a single expert");
        assert!(single.contains("the group of experts 3 to 5"), "{single}");
        assert!(refused(u64::MAX, 1, 1, 2, &[0, 1, 2]).is_some());
    }

    fn parse(name: &str) -> Option<(u32, Projection, Option<u32>)> {
        ExpertName::parse(name).map(|e| (e.layer, e.projection, e.expert))
    }

    #[test]
    fn all_spellings_are_read() {
        use Projection::*;
        assert_eq!(parse("blk.5.ffn_down_exps.weight"), Some((5, Down, None)));
        assert_eq!(
            parse("blk.0.ffn_gate_up_exps.weight"),
            Some((0, GateUp, None))
        );
        assert_eq!(parse("blk.12.ffn_gate.3.weight"), Some((12, Gate, Some(3))));
        assert_eq!(
            parse("blk.12.ffn_up_exps.511.weight"),
            Some((12, Up, Some(511)))
        );
    }

    #[test]
    fn names_are_built_as_they_are_read() {
        for name in ["blk.5.ffn_down_exps.weight", "blk.12.ffn_gate.3.weight"] {
            let parsed = ExpertName::parse(name).expect("an expert");
            assert_eq!(parsed.to_string(), name);
        }
    }

    #[test]
    fn other_tensors_are_not_experts() {
        for name in [
            "blk.5.ffn_down.weight",
            "blk.5.ffn_down_shexp.weight",
            "blk.5.ffn_down_exps.bias",
            "blk.5.ffn_gate_inp.weight",
            "blk.05.ffn_down_exps.weight",
            "blk.-1.ffn_down_exps.weight",
            "blk.99999999999.ffn_down_exps.weight",
            "output.weight",
            "",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    /// An index of `f16` tensors with these names and shapes.
    fn index(tensors: &[(&str, [u64; 4])]) -> ExpertIndex {
        let tensors = tensors
            .iter()
            .enumerate()
            .filter_map(|(tensor, (name, ne))| {
                let name = ExpertName::parse(name)?;
                Some(ExpertTensor {
                    name,
                    tensor,
                    file: 0,
                    offset: 1000 * tensor as u64,
                    nbytes: 2 * ne.iter().product::<u64>(),
                    experts: experts_in(name, ne),
                })
            });
        ExpertIndex::sorted(tensors.collect())
    }

    #[test]
    fn slices_of_merged_and_single_tensors() {
        let index = index(&[
            ("blk.1.ffn_down.4.weight", [2, 8, 1, 1]),
            ("blk.1.ffn_down.1.weight", [2, 4, 1, 1]),
            ("blk.0.ffn_up_exps.weight", [4, 2, 3, 1]),
            ("blk.0.ffn_up.1.weight", [4, 2, 1, 1]),
            ("blk.0.attn_q.weight", [4, 2, 1, 1]),
        ]);
        assert_eq!(index.layers().collect::<Vec<_>>(), [(0, 3), (1, 5)]);
        let of = |projection| index.layers_with(projection).collect::<Vec<_>>();
        assert_eq!(
            (of(Projection::Up), of(Projection::Gate)),
            (vec![(0, 3)], vec![])
        );
        assert_eq!(of(Projection::Down), [(1, 5)]);
        let slice = |layer, projection, expert| {
            let slice = index.slice(layer, projection, expert)?;
            Some((slice.offset, slice.nbytes, slice.within(300)))
        };
        assert_eq!(slice(0, Projection::Up, 2), Some((2032, 16, 200..300)));
        assert_eq!(slice(0, Projection::Up, 1), Some((2016, 16, 100..200)));
        assert_eq!(slice(0, Projection::Up, 3), None);
        assert_eq!(slice(1, Projection::Down, 4), Some((0, 32, 0..300)));
        assert_eq!(slice(1, Projection::Down, 1), Some((1000, 16, 0..300)));
        assert_eq!(slice(1, Projection::Down, 0), None);
        assert_eq!(slice(2, Projection::Down, 0), None);
    }

    #[test]
    fn malformed_tensors_have_no_slices() {
        let index = index(&[
            ("blk.0.ffn_up_exps.weight", [1, 1, 4097, 1]),
            ("blk.0.ffn_down_exps.weight", [1, 1, 2, 2]),
            ("blk.0.ffn_down.4096.weight", [1; 4]),
            ("blk.0.ffn_down.4294967295.weight", [1; 4]),
            ("blk.4096.ffn_down_exps.weight", [1, 1, 2, 1]),
            ("blk.4294967295.ffn_down.0.weight", [1; 4]),
        ]);
        assert_eq!(index.tensors().len(), 6);
        assert!(index.tensors().iter().all(|t| t.slice(0).is_none()));
        assert_eq!(index.layers().count(), 0);
        assert_eq!(index.slice(0, Projection::Down, u32::MAX), None);
        assert_eq!(index.slice(u32::MAX, Projection::Down, 0), None);
    }
}
