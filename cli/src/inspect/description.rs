//! `llama-sidecar inspect`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::Result;
use llama_sidecar::model::{Model, Options};
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};
use sidecar_core::experts::Projection;
use sidecar_core::gguf::{KeyValue, Value};
use sidecar_core::text;

use crate::print::stdout;

/// Number of array elements in the output.
const SHOWN: u64 = 5;

/// What is printed as JSON.
#[derive(Serialize)]
struct Description<'a> {
    #[serde(flatten)]
    general: Json,
    tensors: Tensors<'a>,
}

/// The tensors of a model. A file may have very many: they are written one by one.
struct Tensors<'a>(&'a Model);

#[derive(Serialize)]
struct Tensor<'a> {
    name: Cow<'a, str>,
    #[serde(rename = "type")]
    ty: &'static str,
    shape: [u64; 4],
    bytes: u64,
    file: usize,
    offset: Option<u64>,
}

impl<'a> Tensors<'a> {
    fn iter(&self) -> impl Iterator<Item = Tensor<'a>> {
        let model = self.0;
        (0..model.tensor_count()).map(move |index| {
            let tensor = model.tensor(index);
            Tensor {
                name: model.name(index).to_string_lossy(),
                ty: tensor.ty().name(),
                shape: tensor.ne(),
                bytes: tensor.nbytes(),
                file: tensor.file,
                offset: tensor.file_offset(),
            }
        })
    }
}

impl Serialize for Tensors<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter())
    }
}

/// Prints a model to standard output.
pub fn run(file: &Path, as_json: bool) -> Result<()> {
    let model = Model::open(file, Options::host())?;
    let mut general = describe(&model)?;
    let tensors = Tensors(&model);
    let mut out = stdout();
    if as_json {
        serde_json::to_writer_pretty(&mut out, &Description { general, tensors })?;
        writeln!(out)?;
    } else {
        text::one_line(&mut general);
        print(&mut out, &general, &tensors)?;
    }
    Ok(out.flush()?)
}

/// Describes a model without its tensors.
fn describe(model: &Model) -> Result<Json> {
    let metadata: serde_json::Map<String, Json> = model
        .metadata()
        .iter()
        .map(|key| Ok((key.name_lossy(), metadata_value(model, key)?)))
        .collect::<Result<_>>()?;
    let files: Vec<String> = (0..model.file_count())
        .map(|file| text::path(model.file_path(file)))
        .collect();
    Ok(json!({
        "gguf_version": model.gguf_version(),
        "files": files,
        "file_bytes": model.file_bytes(),
        "metadata": metadata,
        "types": types(model),
        "moe_layers": moe_layers(model),
    }))
}

fn metadata_value(model: &Model, key: &KeyValue) -> Result<Json> {
    if !key.array {
        return Ok(scalar(model.value(key)?));
    }
    let first = model.elements(key, 0, SHOWN)?;
    Ok(json!({
        "array_of": key.ty.to_string(),
        "count": key.count,
        "first": first.into_iter().map(scalar).collect::<Vec<_>>(),
    }))
}

fn scalar(value: Value) -> Json {
    match value {
        Value::Unsigned(n) => json!(n),
        Value::Signed(n) => json!(n),
        // The shortest form: 1e-5 instead of the digits of the nearest double.
        Value::Single(n) => json!(n.to_string().parse::<f64>().unwrap_or(f64::from(n))),
        Value::Double(n) => json!(n),
        Value::Bool(b) => json!(b),
        Value::Text(text) => json!(String::from_utf8_lossy(&text)),
    }
}

fn types(model: &Model) -> Json {
    let mut types: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for index in 0..model.tensor_count() {
        let tensor = model.tensor(index);
        let (count, bytes) = types.entry(tensor.ty().name()).or_default();
        *count += 1;
        *bytes += tensor.nbytes();
    }
    let each = types
        .into_iter()
        .map(|(name, (count, bytes))| (name.to_owned(), json!({"tensors": count, "bytes": bytes})));
    Json::Object(each.collect())
}

/// Lists for each layer and projection the number of experts and the bytes of one.
fn moe_layers(model: &Model) -> Json {
    let mut layers: BTreeMap<u32, BTreeMap<Projection, (u32, u64, &str)>> = BTreeMap::new();
    for tensor in model.experts().tensors() {
        let of_layer = layers.entry(tensor.name.layer).or_default();
        let (experts, bytes, ty) = of_layer.entry(tensor.name.projection).or_default();
        *experts += tensor.experts;
        *bytes = (*bytes).max(tensor.nbytes / u64::from(tensor.experts.max(1)));
        *ty = model.tensor(tensor.tensor).ty().name();
    }
    let layers = layers.into_iter().map(|(layer, projections)| {
        let projections = projections
            .into_iter()
            .map(|(projection, (experts, bytes, ty))| {
                let value = json!({"experts": experts, "bytes_per_expert": bytes, "type": ty});
                (projection.to_string(), value)
            });
        json!({"layer": layer, "projections": projections.collect::<serde_json::Map<_, _>>()})
    });
    layers.collect()
}

fn print(out: &mut impl Write, model: &Json, tensors: &Tensors) -> std::io::Result<()> {
    let list = |name: &str| model[name].as_array().cloned().unwrap_or_default();
    let object = |value: &Json| value.as_object().cloned().unwrap_or_default();
    writeln!(
        out,
        "GGUF version {}, {} file(s), {} bytes, {} tensors",
        model["gguf_version"],
        list("files").len(),
        model["file_bytes"],
        tensors.0.tensor_count()
    )?;
    writeln!(out, "\nmetadata")?;
    for (key, value) in object(&model["metadata"]) {
        match value.get("count") {
            Some(count) => {
                writeln!(
                    out,
                    "  {key}: {count} x {} {}, …",
                    plain(&value["array_of"]),
                    value["first"]
                )?;
            }
            None => writeln!(out, "  {key}: {}", plain(&value))?,
        }
    }
    writeln!(out, "\ntypes")?;
    for (name, of_type) in object(&model["types"]) {
        writeln!(
            out,
            "  {name:<10} {:>6} tensors {:>14} bytes",
            of_type["tensors"], of_type["bytes"]
        )?;
    }
    if !list("moe_layers").is_empty() {
        writeln!(out, "\nmixture of experts")?;
    }
    for layer in list("moe_layers") {
        write!(out, "  layer {:>3}:", layer["layer"])?;
        for (projection, p) in object(&layer["projections"]) {
            write!(
                out,
                "  {projection} {} x {} bytes {}",
                p["experts"],
                p["bytes_per_expert"],
                plain(&p["type"])
            )?;
        }
        writeln!(out)?;
    }
    writeln!(out, "\ntensors")?;
    for tensor in tensors.iter() {
        let shape: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
        writeln!(
            out,
            "  {:<44} {:<8} {:<26} {:>12} bytes, file {}, offset {}",
            text::line(&tensor.name),
            tensor.ty,
            shape.join(" x "),
            tensor.bytes,
            tensor.file,
            tensor
                .offset
                .map_or("none".into(), |offset| offset.to_string())
        )?;
    }
    Ok(())
}

/// A string without its quotes, anything else as JSON.
fn plain(value: &Json) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}
