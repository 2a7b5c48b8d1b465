//! Pages without external files, in light and dark.

use std::path::Path;

use sidecar_core::text::{self, html};

use crate::sizes::Table;

/// The look of pages.
pub const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c2026;--soft:#667;--paper:#fff;--line:#d8dbe2}\
@media(prefers-color-scheme:dark){:root{--ink:#e8eaf0;--soft:#9aa3b2;--paper:#14171c;--line:#333a45}}\
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}\
main{max-width:76rem;margin:0 auto;padding:1.5rem}\
section+section{margin-top:4rem;border-top:1px solid var(--line)}\
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,35rem),1fr));gap:0 1.5rem}\
.columns>*{min-width:0}.columns>div{align-self:end}.columns>section{border:0}main:has(.columns){max-width:110rem}\
section+.columns{margin-top:4rem;border-top:1px solid var(--line)}.columns>section+section{margin-top:0}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}\
.note{color:var(--soft);overflow-wrap:anywhere}.wide{overflow-x:auto}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(14rem,1fr));gap:.8rem;margin:0}\
dl div{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}\
dt{color:var(--soft);font-size:.85rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}\
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--soft);font-weight:500}svg{max-width:100%;height:auto}.wide svg{max-width:none}\
@media print{.wide{overflow:visible}.wide svg{max-width:100%}h2{break-after:avoid}tr{break-inside:avoid}}";

/// Returns how pages with this title start: an earlier one is known by it.
pub fn start(title: &str) -> String {
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=generator content=\"llama-sidecar: {}\">",
        html(title)
    )
}

/// Returns a self-contained page. `body` has markup.
pub fn document(title: &str, body: &str) -> String {
    format!(
        "{}<meta name=viewport content=\"width=device-width, initial-scale=1\"><title>{}</title><style>{STYLE}</style><main>{body}</main></html>\n",
        start(title),
        html(title)
    )
}

/// Returns a sentence for a page whose measurements ended early.
pub fn incomplete(is_complete: bool) -> Option<&'static str> {
    (!is_complete).then_some("The measurements ended early: by an error, or by the user.")
}

/// Returns a page about a model: sentences, tables, each below its heading, if it has one, and how they were made.
pub fn measurements<'a>(
    title: &str,
    model: &Path,
    sentences: &[Option<&str>],
    facts: &[(&str, String)],
    tables: impl IntoIterator<Item = (Option<&'a str>, Table)>,
) -> String {
    let model = html(&text::path(model));
    let sentences: Vec<&str> = sentences.iter().copied().flatten().collect();
    let mut body = format!(
        "<section><h1>{model}</h1><p class=note>{}</p>",
        html(&sentences.join(" "))
    );
    for (heading, of) in tables {
        if let Some(heading) = heading {
            body += &format!("<h2>{}</h2>", html(heading));
        }
        body += &format!("<div class=wide>{}</div>", of.as_html());
    }
    body += "<h2>How it was measured</h2>";
    for (name, fact) in facts {
        body += &format!("<p class=note>{}: {}</p>", html(name), html(fact));
    }
    document(title, &(body + "</section>"))
}
