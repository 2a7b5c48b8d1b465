//! Files that fuzzing starts from.

use crate::writer::{F32, Gguf, Kv, Q4_0, vocabulary};

/// Two small models, by name: one without and one with a vocabulary.
pub fn gguf() -> [(&'static str, Vec<u8>); 2] {
    let mut small = Gguf::default()
        .tensor("blk.0.ffn_down_exps.weight", &[32, 2, 4], Q4_0, 1)
        .tensor("output_norm.weight", &[5], F32, 2);
    let plain = small.bytes();
    small.kvs.extend(vocabulary(3));
    small.alignment = 64;
    [("small", plain), ("vocabulary", small.bytes())]
}

/// Returns what a fuzz target starts from, by name.
pub fn of(target: &str) -> Vec<(String, Vec<u8>)> {
    let texts = |texts: &[&str]| {
        let texts = texts.iter().enumerate();
        texts
            .map(|(at, text)| (format!("text-{at}"), text.as_bytes().to_vec()))
            .collect()
    };
    match target {
        "gguf" => gguf().map(|(name, bytes)| (name.into(), bytes)).into(),
        "http" => texts(&HTTP),
        "imatrix" => imatrix().map(|(name, bytes)| (name.into(), bytes)).into(),
        "messages" => texts(&MESSAGES),
        "routes" => [0, 1]
            .map(|flags| (format!("routes-{flags}"), routes(flags)))
            .into(),
        "trace" => texts(&TRACES),
        _ => Vec::new(),
    }
}

const HTTP: [&str; 3] = [
    "GET / HTTP/1.1\r\nHost: localhost:9000\r\n\r\n",
    "GET /metrics?a=b HTTP/1.1\r\nHost: [::1]:1\r\nAccept-Encoding: gzip\r\nOrigin: null\r\n\r\n",
    "POST /a HTTP/1.0\r\nContent-Length: 3\r\nHost: a\r\nHost: b\r\n\r\nabc",
];

const TRACES: [&str; 2] = [
    r#"{"schema":"llama-sidecar/expert-trace/1","version":"0","model":{"name":"m","architecture":"a","files":[{"path":"/m.gguf","size":9,"mtime":-1}]},"experts_used":2,"tokens":3,"activations":6,"rejected":0,"seconds":1.5,"layers":[{"layer":0,"tokens":3,"counts":[3,2,1,0],"expert_bytes":100}]}"#,
    r#"{"schema":"llama-sidecar/expert-trace/1","model":{},"rejected":1,"layers":[{"layer":2,"tokens":2,"counts":[2,2],"locality":{"first":2,"lru":[1,1],"lfu":[1,1],"window":{"tokens":2,"first":2,"lru":[1,1],"best":[2,0]}}}]}"#,
];

const MESSAGES: [&str; 11] = [
    r#"{"cmd":"status"}"#,
    r#"{"cmd":"swap","revert":".*","overlays":[{"tensor":"blk\\..*","path":"/a.gguf"}]}"#,
    r#"{"cmd":"mask","masks":[{"layer":3,"experts":[3,17]}],"clear":true}"#,
    r#"{"cmd":"prefer","margin":0.1}"#,
    r#"{"cmd":"mark","text":"a"}"#,
    r#"{"cmd":"round","start":true}"#,
    r#"[{"schema":"llama-sidecar/experts/1","layer":3,"experts":[3,17]}]"#,
    r#"{"ok":false,"error":"reason"}"#,
    r#"{"ok":true,"models":[{"model":1,"path":"/m.gguf","tensors":[]}]}"#,
    r#"{"pid":1,"event":"loaded","program":"/p"}"#,
    r#"{"pid":1,"event":"trace","path":"/t.json","error":null}"#,
];

/// An importance matrix of a tensor with two experts, in GGUF and in the older format.
fn imatrix() -> [(&'static str, Vec<u8>); 2] {
    let gguf = Gguf::default()
        .tensor("blk.0.ffn_up_exps.weight.in_sum2", &[4, 2], F32, 1)
        .tensor("blk.0.ffn_up_exps.weight.counts", &[1, 2], F32, 2)
        .kv("imatrix.datasets", Kv::Texts(vec!["a.txt".into()]))
        .kv("imatrix.chunk_count", Kv::U32(2))
        .kv("imatrix.chunk_size", Kv::U32(512));
    [("gguf", gguf.bytes()), ("older", older_imatrix(2))]
}

/// An importance matrix in the older format: two values of the tensor `abc` after two calls, a
/// number of chunks and a text. `values` is how many values it states.
pub fn older_imatrix(values: i32) -> Vec<u8> {
    let numbers = |all: [i32; 2]| all.map(i32::to_le_bytes).concat();
    let mut bytes = numbers([1, 3]);
    bytes.extend(b"abc");
    bytes.extend(numbers([2, values]));
    bytes.extend([4.0f32, 6.0].map(f32::to_le_bytes).concat());
    bytes.extend(numbers([7, 2]));
    bytes.extend(b"xy");
    bytes
}

/// Routes of two layers in the compact format: rows, a mark and dropped tokens.
fn routes(flags: u32) -> Vec<u8> {
    let mut bytes = b"LSROUTES".to_vec();
    let numbers = |bytes: &mut Vec<u8>, numbers: &[u32]| {
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    };
    numbers(&mut bytes, &[1, flags, 2, 2, 1]);
    bytes.push(b'm');
    numbers(&mut bytes, &[0, 4, 1, 4]);
    numbers(&mut bytes, &[1, 1, 0]);
    bytes.extend([0i16, 3, -1, 2].iter().flat_map(|id| id.to_le_bytes()));
    if flags == 1 {
        bytes.extend([0.5f32; 4].iter().flat_map(|weight| weight.to_le_bytes()));
    }
    numbers(&mut bytes, &[2, 2, 0]);
    bytes.extend(b"ab");
    numbers(&mut bytes, &[3, 5, 0]);
    bytes
}
