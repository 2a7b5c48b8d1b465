//! `include/llama_sidecar.h`, generated from `src/ffi`.

use anyhow::{Context, Result, bail};

use crate::root;

const HEADER: &str = "include/llama_sidecar.h";

fn generate() -> Result<String> {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml"))
        .map_err(|error| anyhow::anyhow!("cbindgen.toml: {error}"))?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    let mut files: Vec<_> = std::fs::read_dir(root().join("src/ffi"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    files.sort();
    for file in files {
        builder = builder.with_src(file);
    }
    let mut text = Vec::new();
    builder.generate()?.write(&mut text);
    Ok(without_safety_sections(&String::from_utf8(text)?))
}

/// Rust asks for a section on what callers of an unsafe function promise. C has no
/// other functions, and the conventions at the top of the header say the same.
fn without_safety_sections(header: &str) -> String {
    let mut out = String::with_capacity(header.len());
    let mut in_section = false;
    for line in header.lines() {
        in_section = match line.trim() {
            "// # Safety" => {
                // The empty comment line that led to the section goes, too.
                out.truncate(out.trim_end_matches("//\n").len());
                true
            }
            comment => in_section && comment.starts_with("//"),
        };
        if !in_section {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// Writes the header.
pub fn write() -> Result<()> {
    let path = root().join(HEADER);
    std::fs::create_dir_all(path.parent().expect("a folder"))?;
    std::fs::write(path, generate()?)?;
    Ok(())
}

/// Fails when the header in the repository is not the one that would be written.
pub fn check() -> Result<()> {
    let kept = std::fs::read_to_string(root().join(HEADER)).context(HEADER)?;
    if kept != generate()? {
        bail!("{HEADER} is stale: run 'cargo xtask header' and commit it");
    }
    Ok(())
}
