//! `docs/c-api-reference.md`, generated from the header.

use std::fmt::Write;

use anyhow::{Context, Result, ensure};

/// Path of the page.
pub const PAGE: &str = "docs/c-api-reference.md";

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Function,
    Handle,
    Struct,
    Enum,
    Callback,
    Macro,
}

/// A declaration with its comment.
#[derive(Debug, PartialEq)]
struct Item {
    kind: Kind,
    code: String,
    doc: String,
    /// Fields or constants, with their comments.
    members: Vec<(String, String)>,
}

/// Writes the page for a header.
pub fn page(header: &str) -> Result<String> {
    let (introduction, rest) = header
        .split_once("*/")
        .context("the header begins with a comment")?;
    let (_, conventions) = introduction
        .split_once("Conventions\n")
        .context("the header states its conventions")?;
    let conventions: Vec<&str> = conventions.lines().map(text).collect();
    let mut out = format!(
        "# C API reference\n\n`cargo xtask header` generates this page from \
[include/llama_sidecar.h](../include/llama_sidecar.h). [The C API by example](c-api.md) is the \
introduction.\n\n## Conventions\n\n{}\n",
        conventions.join("\n").trim()
    );
    let items = items(rest)?;
    for (title, kind) in [
        ("Functions", Kind::Function),
        ("Handles", Kind::Handle),
        ("Structs", Kind::Struct),
        ("Enums", Kind::Enum),
        ("Callbacks", Kind::Callback),
        ("Macros", Kind::Macro),
    ] {
        write!(out, "\n## {title}\n")?;
        for item in items.iter().filter(|item| item.kind == kind) {
            section(&mut out, item)?;
        }
    }
    Ok(out)
}

/// Writes the section of an item.
fn section(out: &mut String, item: &Item) -> Result<()> {
    write!(out, "\n### {}\n", name(item).context("a name")?)?;
    if item.members.is_empty() {
        write!(out, "\n```c\n{}\n```\n", item.code)?;
    }
    if !item.doc.is_empty() {
        write!(out, "\n{}\n", item.doc)?;
    }
    if !item.members.is_empty() {
        let member = if item.kind == Kind::Enum {
            "constant"
        } else {
            "field"
        };
        write!(out, "\n| {member} | meaning |\n|---|---|\n")?;
    }
    for (code, doc) in &item.members {
        let doc = doc.replace('\n', " ").replace('|', "\\|");
        writeln!(out, "| `{code}` | {doc} |")?;
    }
    Ok(())
}

fn name(item: &Item) -> Option<&str> {
    let words = |text: &'static str| move |c: char| text.contains(c);
    match item.kind {
        Kind::Function => item.code.split('(').next()?.rsplit(words(" *")).next(),
        Kind::Callback => item.code.split(words("*)")).nth(1),
        _ => item.code.trim_end_matches(';').split(' ').nth(1),
    }
}

fn kind(code: &str) -> Kind {
    match code {
        _ if code.starts_with("#define") => Kind::Macro,
        _ if code.starts_with("typedef") => Kind::Callback,
        _ if code.contains('(') => Kind::Function,
        _ if code.starts_with("enum") => Kind::Enum,
        _ if code.ends_with(';') => Kind::Handle,
        _ => Kind::Struct,
    }
}

/// Reads declarations with comments in the style of C99 (`//`) or Doxygen (`/** */`).
fn items(header: &str) -> Result<Vec<Item>> {
    let mut items: Vec<Item> = Vec::new();
    let (mut doc, mut code) = (Vec::<String>::new(), String::new());
    let (mut in_comment, mut in_body) = (false, false);
    for line in header.lines() {
        let trimmed = line.trim();
        if in_comment || trimmed.starts_with("//") || trimmed.starts_with("/**") {
            in_comment = !trimmed.starts_with("//") && !trimmed.ends_with("*/");
            doc.push(markdown(text(trimmed.trim_end_matches("*/"))));
            continue;
        }
        let is_guard = ["extern", "#if", "#endif", "#include", "}  //"]
            .iter()
            .any(|start| line.starts_with(start));
        if trimmed.is_empty() || is_guard || line == "#define LLAMA_SIDECAR_H" {
            doc.clear();
            continue;
        }
        if line == "};" {
            in_body = false;
            continue;
        }
        if !code.is_empty() {
            code.push('\n');
        }
        code += line;
        let opens = code.ends_with(" {");
        if !(opens || in_body || code.ends_with(';') || code.starts_with('#')) {
            continue;
        }
        let doc = std::mem::take(&mut doc).join("\n").trim().to_owned();
        let code = std::mem::take(&mut code);
        if in_body {
            let item = items.last_mut().context("a member of an item")?;
            let member = code.trim().trim_end_matches([',', ';']).to_owned();
            item.members.push((member, doc));
            continue;
        }
        in_body = opens;
        let code = code.trim_end_matches(" {").to_owned();
        items.push(Item {
            kind: kind(&code),
            code,
            doc,
            members: Vec::new(),
        });
    }
    ensure!(code.is_empty(), "the declaration '{code}' has no end");
    Ok(items)
}

/// Returns a line of a comment without its markers.
fn text(line: &str) -> &str {
    line.trim_start_matches([' ', '/', '*']).trim_end()
}

/// Turns the commands of Doxygen for parameters and results into items of a list.
fn markdown(line: &str) -> String {
    let parameter = line
        .strip_prefix("@param ")
        .and_then(|rest| rest.split_once(' '));
    match (parameter, line.strip_prefix("@return ")) {
        (Some((name, text)), _) => format!("- `{name}`: {text}"),
        (None, Some(text)) => format!("- Result: {text}"),
        (None, None) => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "\
/*
 * Conventions
 *
 *  - Sizes are bytes.
 */
#ifndef LLAMA_SIDECAR_H
#define LLAMA_SIDECAR_H

// Version.
#define VERSION 1

/**
 * A status.
 */
enum status {
    /** Done. */
    OK = 0,
};

// Opaque.
struct model;

/** Receives progress. */
typedef bool (*progress)(uint64_t done);

// Options.
struct options {
    // Either a | or
    // nothing.
    uint64_t ne[4];
};

/**
 * Loads a model.
 *
 * @param options NULL for
 * the defaults.
 * @return The model.
 */
struct model *load(const char *path,
                   const struct options *options);

#endif
";

    #[test]
    fn both_styles_of_comments_are_read() {
        let page = page(HEADER).unwrap();
        for expected in [
            "## Conventions\n\n- Sizes are bytes.\n",
            "### VERSION\n\n```c\n#define VERSION 1\n```\n\nVersion.\n",
            "### status\n\nA status.\n\n| constant | meaning |\n|---|---|\n| `OK = 0` | Done. |\n",
            "### model\n\n```c\nstruct model;\n```\n\nOpaque.\n",
            "### progress\n\n```c\ntypedef bool (*progress)(uint64_t done);\n```\n\nReceives progress.\n",
            "### options\n\nOptions.\n\n| field | meaning |\n|---|---|\n| `uint64_t ne[4]` | Either a \\| or nothing. |\n",
            "### load\n\n```c\nstruct model *load(const char *path,\n                   const struct options *options);\n```\n\nLoads a model.\n\n- `options`: NULL for\nthe defaults.\n- Result: The model.\n",
        ] {
            assert!(page.contains(expected), "{expected} is not in {page}");
        }
    }

    #[test]
    fn a_declaration_without_an_end_is_an_error() {
        assert!(items("void f(int x,\n").is_err());
    }
}
