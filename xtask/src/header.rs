//! `include/llama_sidecar.h`, generated from `src/ffi`.

use anyhow::{Context, Result, bail, ensure};

use crate::run::root;

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
    let header = in_c89(&String::from_utf8(text)?);
    let header = with_short_comments(&without_safety_sections(&header));
    let functions = header.matches("llama_model_load(").count();
    ensure!(
        functions == 1,
        "cbindgen wrote {functions} declarations of llama_model_load"
    );
    Ok(header)
}

/// Builds the version macros from cargo's version.
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
/** Version of this header. llama_sidecar_version() returns the version of the library. */
#define LLAMA_SIDECAR_VERSION \"{version}\"
/** Major version of this header. */
#define LLAMA_SIDECAR_VERSION_MAJOR {major}
/** Minor version of this header. */
#define LLAMA_SIDECAR_VERSION_MINOR {minor}
/** Patch version of this header. */
#define LLAMA_SIDECAR_VERSION_PATCH {patch}
/** Version of this header for comparisons: MAJOR * 1000000 + MINOR * 1000 + PATCH. */
#define LLAMA_SIDECAR_VERSION_NUMBER {}",
        major * 1_000_000 + minor * 1000 + patch
    ))
}

/// Replaces what C89 does not have: a comma after the last enumerator, and comments of one line.
fn in_c89(header: &str) -> String {
    let header = header.replace(",\n};", "\n};");
    header.replace("// __cplusplus", "/* __cplusplus */")
}

/// Removes the sections on safety. Clippy requires them for unsafe functions of Rust; the
/// conventions at the top of the header replace them for C.
fn without_safety_sections(header: &str) -> String {
    let mut out = String::with_capacity(header.len());
    let mut in_section = false;
    for line in header.lines() {
        in_section = match line.trim() {
            "* # Safety" => {
                // Also remove the empty comment line before the section.
                out.truncate(out.trim_end_matches(" *\n").len());
                true
            }
            comment => in_section && comment != "*/",
        };
        if !in_section {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// Puts each comment of one line that fits into one line.
fn with_short_comments(header: &str) -> String {
    const WIDTH: usize = 100;
    let lines: Vec<&str> = header.lines().collect();
    let mut out = String::with_capacity(header.len());
    let mut at = 0;
    while at < lines.len() {
        let short = match lines[at..] {
            [open, text, close, ..] if open.trim() == "/**" && close.trim() == "*/" => {
                let text = text.trim().trim_start_matches("* ");
                Some(open.to_owned() + " " + text + " */").filter(|line| line.len() <= WIDTH)
            }
            _ => None,
        };
        at += if short.is_some() { 3 } else { 1 };
        out += short.as_deref().unwrap_or(lines[at - 1]);
        out.push('\n');
    }
    out
}

/// Writes the header.
pub fn write() -> Result<()> {
    let header = generate()?;
    let path = root().join(HEADER);
    std::fs::create_dir_all(path.parent().expect("a folder"))?;
    Ok(std::fs::write(path, header)?)
}

/// Fails when the header in the repository differs from what [`write`] would write.
pub fn check() -> Result<()> {
    let header = generate()?;
    let kept = std::fs::read_to_string(root().join(HEADER)).context(HEADER)?;
    if kept != header {
        bail!("{HEADER} is stale: run 'cargo xtask header' and commit it");
    }
    Ok(())
}
