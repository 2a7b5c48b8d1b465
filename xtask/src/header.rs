//! `include/llama_sidecar.h`, generated from `src/ffi`.

use anyhow::{Context, Result, bail, ensure};

use crate::{c_api_page, root};

const HEADER: &str = "include/llama_sidecar.h";

fn generate() -> Result<String> {
    let mut config = cbindgen::Config::from_file(root().join("cbindgen.toml"))
        .map_err(|error| anyhow::anyhow!("cbindgen.toml: {error}"))?;
    config.after_includes = Some(version()?);
    // The other files of the module are found from here.
    let builder = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root().join("src/ffi/mod.rs"));
    let mut text = Vec::new();
    builder.generate()?.write(&mut text);
    let header = without_safety_sections(&String::from_utf8(text)?);
    let functions = header.matches("llama_model_load(").count();
    ensure!(
        functions == 1,
        "cbindgen wrote {functions} declarations of llama_model_load"
    );
    Ok(header)
}

/// Macros that tell which version the header is of: cargo's.
fn version() -> Result<String> {
    let version = env!("CARGO_PKG_VERSION");
    let numbers: Vec<u32> = version
        .split('.')
        .map(|number| number.parse().context("a version is three numbers"))
        .collect::<Result<_>>()?;
    let &[major, minor, patch] = numbers.as_slice() else {
        bail!("the version {version} is not of the form MAJOR.MINOR.PATCH");
    };
    Ok(format!(
        "
// The version of this header; llama_sidecar_version() returns that of the library. The number is
// MAJOR * 1000000 + MINOR * 1000 + PATCH, to be compared.
#define LLAMA_SIDECAR_VERSION \"{version}\"
#define LLAMA_SIDECAR_VERSION_MAJOR {major}
#define LLAMA_SIDECAR_VERSION_MINOR {minor}
#define LLAMA_SIDECAR_VERSION_PATCH {patch}
#define LLAMA_SIDECAR_VERSION_NUMBER {}",
        major * 1_000_000 + minor * 1000 + patch
    ))
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

/// Writes the header and the page that is made from it.
pub fn write() -> Result<()> {
    let header = generate()?;
    let path = root().join(HEADER);
    std::fs::create_dir_all(path.parent().expect("a folder"))?;
    std::fs::write(path, &header)?;
    std::fs::write(root().join(c_api_page::PAGE), c_api_page::page(&header)?)?;
    Ok(())
}

/// Fails when the header or its page in the repository differ from what [`write`] would write.
pub fn check() -> Result<()> {
    let header = generate()?;
    let page = c_api_page::page(&header)?;
    for (path, expected) in [(HEADER, header), (c_api_page::PAGE, page)] {
        let kept = std::fs::read_to_string(root().join(path)).context(path)?;
        if kept != expected {
            bail!("{path} is stale: run 'cargo xtask header' and commit it");
        }
    }
    Ok(())
}
