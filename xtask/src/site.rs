//! The documentation as a site: `cargo xtask site`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use regex::Regex;

use crate::dist::files;
use crate::install::{copy, target_folder};
use crate::run::{command, root, run};
use crate::toolchain;

/// The pages and their order, with paths from the root of the repository.
const SUMMARY: &str = "docs/site/SUMMARY.md";
const SETTINGS: &str = "docs/site/book.toml";

/// Why the site cannot be made here, if so.
pub fn missing() -> Option<String> {
    mdbook().err().map(|error| format!("{error:#}"))
}

fn mdbook() -> Result<PathBuf> {
    toolchain::program(
        "mdbook",
        "0.5.4",
        &["--no-default-features", "--features", "search"],
    )
}

/// Makes the site, checks its links, and returns its folder.
pub fn make() -> Result<PathBuf> {
    let folder = target_folder()?.join("site");
    let _ = fs::remove_dir_all(&folder);
    let sources = folder.join("src");
    copy(&root().join(SETTINGS), &folder.join("book.toml"))?;
    copy(&root().join(SUMMARY), &sources.join("SUMMARY.md"))?;
    let pages = stage(&sources)?;
    let all = files(&root().join("docs"))?.into_iter();
    let unlisted: Vec<_> = all
        .map(|file| Path::new("docs").join(file))
        .filter(|file| is_page(file) && file != Path::new(SUMMARY) && !pages.contains(file))
        .collect();
    ensure!(unlisted.is_empty(), "{SUMMARY} has no {unlisted:?}");
    run(command(mdbook()?, &folder)
        .arg("build")
        .env("MDBOOK_LOG", "warn"))?;
    let site = folder.join("book");
    check_links(&site)?;
    println!("the site is in {}", site.display());
    Ok(site)
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// Copies the pages and the files to which they link; returns the pages.
fn stage(sources: &Path) -> Result<BTreeSet<PathBuf>> {
    let link = Regex::new(r"\]\(([^)\s#]+)[^)]*\)")?;
    let links = |text: &str, page: &Path| -> Vec<PathBuf> {
        let found = link.captures_iter(text).map(|found| found[1].to_owned());
        let inside =
            found.filter(|target| !target.contains("://") && !target.starts_with("mailto:"));
        let folder = page.parent().unwrap_or(Path::new(""));
        inside.map(|target| normal(&folder.join(target))).collect()
    };
    let summary = fs::read_to_string(root().join(SUMMARY))?;
    let pages: BTreeSet<PathBuf> = links(&summary, Path::new("")).into_iter().collect();
    let mut others = BTreeSet::new();
    for page in &pages {
        let text = fs::read_to_string(root().join(page))
            .with_context(|| format!("{SUMMARY} names {}", page.display()))?;
        others.extend(links(&text, page));
        copy(&root().join(page), &sources.join(page))?;
    }
    for file in others.difference(&pages) {
        let from = root().join(file);
        ensure!(
            from.is_file(),
            "a page links to {}, which is no file",
            file.display()
        );
        ensure!(!is_page(file), "{SUMMARY} has no {}", file.display());
        copy(&from, &sources.join(file))?;
    }
    Ok(pages)
}

/// Removes `.` and `..` from a path inside the repository.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

/// Fails if a page refers to a file or a section of the site that is not there.
fn check_links(site: &Path) -> Result<()> {
    let reference = Regex::new(r#"(?:href|src)="([^"]*)""#)?;
    let id = Regex::new(r#"\bid="([^"]*)""#)?;
    let mut pages = BTreeMap::new();
    for file in files(site)? {
        if file
            .extension()
            .is_some_and(|extension| extension == "html")
        {
            pages.insert(file.clone(), fs::read_to_string(site.join(&file))?);
        }
    }
    let ids: BTreeMap<_, BTreeSet<&str>> = pages
        .iter()
        .map(|(file, text)| {
            let ids = id
                .captures_iter(text)
                .map(|found| found.extract::<1>().1[0]);
            (file.clone(), ids.collect())
        })
        .collect();
    let (mut broken, mut count) = (Vec::new(), 0);
    // The page of an unknown address has links from the site's root.
    for (file, text) in pages
        .iter()
        .filter(|(file, _)| *file != Path::new("404.html"))
    {
        for found in reference.captures_iter(text) {
            let target = &found[1];
            if target.contains("://")
                || target.starts_with("data:")
                || target.starts_with("mailto:")
            {
                continue;
            }
            count += 1;
            let (path, section) = target.split_once('#').unwrap_or((target, ""));
            let path = match path {
                "" => file.clone(),
                path => normal(&file.parent().unwrap_or(Path::new("")).join(path)),
            };
            let has_section =
                section.is_empty() || ids.get(&path).is_some_and(|ids| ids.contains(section));
            if !site.join(&path).is_file() || !has_section {
                broken.push(format!("{}: {target}", file.display()));
            }
        }
    }
    ensure!(
        broken.is_empty(),
        "links of the site to nothing:\n{}",
        broken.join("\n")
    );
    ensure!(count > 1000, "only {count} links were found in the site");
    println!("{count} links of {} pages are good", pages.len());
    Ok(())
}
